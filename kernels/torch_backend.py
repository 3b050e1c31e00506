"""The operations in plain torch: the specification of every other backend, and the one that runs on a CPU.

`shrink` and `expand` group the rows by slot and run one matmul per slot. `expand_gated` serves few tokens: one dense
matmul over the rank rows of all slots, with the columns that are not a row's own closed.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor


def groups(order: Tensor, offsets: Tensor, starts: Tensor, ranks: Tensor) -> Iterator[tuple[int, int, int, int]]:
    """(first sorted row, last + 1, first rank row, r) of every slot that has both rows and rank."""
    edges = offsets.tolist()
    for slot, (start, r) in enumerate(zip(starts.tolist(), ranks.tolist(), strict=True)):
        if r and edges[slot] < edges[slot + 1]:
            yield edges[slot], edges[slot + 1], start, r


def _pick(order: Tensor) -> slice | Tensor:
    """Rows that follow each other as a slice, which picks them without a copy; others as int64 indices."""
    rows = order.tolist()
    low, high = rows[0], rows[0] + len(rows)
    return slice(low, high) if rows == list(range(low, high)) else order.long()


def shrink(
    x: Tensor, a: Tensor, order: Tensor, offsets: Tensor, starts: Tensor, ranks: Tensor, max_rank: int
) -> Tensor:
    """h[i, t, :r] = A_s x[order[i], t]; see `ops.lora_shrink`."""
    h = x.new_zeros((x.shape[0], x.shape[1], max_rank), dtype=torch.promote_types(x.dtype, torch.float32))
    for low, high, start, r in groups(order, offsets, starts, ranks):
        rows = x[_pick(order[low:high])]  # [rows, T, K]
        h[low:high, :, :r] = torch.matmul(rows.to(h.dtype), a[start : start + r].to(h.dtype).t())
    return h


def expand(y: Tensor, h: Tensor, b: Tensor, order: Tensor, offsets: Tensor, starts: Tensor, ranks: Tensor) -> Tensor:
    """out[order[i], t] = y[order[i], t] + B_s^T h[i, t, :r]; see `ops.lora_expand`."""
    out = y.clone(memory_format=torch.contiguous_format)
    for low, high, start, r in groups(order, offsets, starts, ranks):
        rows, own = _pick(order[low:high]), b[start : start + r].to(h.dtype)  # [r, N]
        some = h[low:high, :, :r]  # [rows, T, r]
        if y.dtype != h.dtype:  # one rounding, of the sum in the wider dtype
            out[rows] = (out[rows] + torch.matmul(some, own)).to(y.dtype)
        elif isinstance(rows, slice):
            out[rows].flatten(0, 1).addmm_(some.flatten(0, 1), own)
        else:
            out.index_add_(0, rows, torch.matmul(some, own))
    return out


def expand_gated(y: Tensor, h: Tensor, b: Tensor, closed: Tensor) -> Tensor:
    """y[i, t] + B^T (h[i, t] where open): y [R, T, N], h [R, T, P] with the columns of all slots, b [P, N],
    closed bool [R, P] True where the rank row is not row i's. Closed columns are replaced, not multiplied: an overflow
    in another slot's column must not become NaN here.
    """
    own = h.masked_fill(closed[:, None, :], 0)
    rows, tokens, _ = y.shape
    return torch.addmm(y.flatten(0, 1), own.flatten(0, 1), b).view(rows, tokens, -1)


def add_one(y: Tensor, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """y + B^T (A x) where all rows share one adapter: y [..., N], x [..., K], a [r, K], b [r, N]."""
    h = torch.matmul(x.to(a.dtype), a.t())
    flat = torch.addmm(y.reshape(-1, y.shape[-1]), h.reshape(-1, h.shape[-1]).to(y.dtype), b.to(y.dtype))
    return flat.view(y.shape)
