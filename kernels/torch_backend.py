"""The operations in plain torch: the specification of every other backend, and the one that runs on a CPU.

`shrink` and `expand` group the rows by slot and run one matmul per slot. `expand_gated` serves few tokens: one dense
matmul over the rank rows of all slots, with the columns that are not a row's own closed.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor


def _groups(order: Tensor, offsets: Tensor, starts: Tensor, ranks: Tensor) -> Iterator[tuple[int, int, int, int]]:
    """(first sorted row, last + 1, first rank row, r) of every slot that has both rows and rank."""
    edges = offsets.tolist()
    for slot, (start, r) in enumerate(zip(starts.tolist(), ranks.tolist(), strict=True)):
        if r and edges[slot] < edges[slot + 1]:
            yield edges[slot], edges[slot + 1], start, r


def shrink(
    x: Tensor, a: Tensor, order: Tensor, offsets: Tensor, starts: Tensor, ranks: Tensor, max_rank: int
) -> Tensor:
    """h[i, t, :r] = A_s x[order[i], t]; see `ops.lora_shrink`."""
    h = x.new_zeros((x.shape[0], x.shape[1], max_rank), dtype=torch.promote_types(x.dtype, torch.float32))
    for low, high, start, r in _groups(order, offsets, starts, ranks):
        rows = x.index_select(0, order[low:high])  # [rows, T, K]
        h[low:high, :, :r] = torch.matmul(rows.to(h.dtype), a[start : start + r].to(h.dtype).t())
    return h


def expand(y: Tensor, h: Tensor, b: Tensor, order: Tensor, offsets: Tensor, starts: Tensor, ranks: Tensor) -> Tensor:
    """out[order[i], t] = y[order[i], t] + B_s^T h[i, t, :r]; see `ops.lora_expand`."""
    out = y.clone(memory_format=torch.contiguous_format)
    for low, high, start, r in _groups(order, offsets, starts, ranks):
        delta = torch.matmul(h[low:high, :, :r], b[start : start + r].to(h.dtype))  # [rows, T, N]
        rows = order[low:high]
        if y.dtype == delta.dtype:
            out.index_add_(0, rows, delta)
        else:  # one rounding, of the sum in the wider dtype
            out.index_copy_(0, rows.long(), (out.index_select(0, rows) + delta).to(y.dtype))
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
