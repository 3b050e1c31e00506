"""The operations in plain torch: the specification of every other backend, and the one that runs on a CPU.

`shrink` and `expand` group the rows by slot and run one matmul per slot. `add_each` is both at once for a moderate
number of rows: one batched matmul each, over copies of the rows' own A and B. `expand_gated` serves few tokens: one
dense matmul over the rank rows of all slots, with the columns that are not a row's own closed.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor


def groups(order: Tensor, offsets: Tensor, starts: Tensor, ranks: Tensor) -> Iterator[tuple[int, int, int, int, int]]:
    """(slot, first sorted row, last + 1, first rank row, r) of every slot that has both rows and rank in one slice:
    starts, ranks int32 [S]."""
    edges = offsets.tolist()
    for slot, (start, r) in enumerate(zip(starts.tolist(), ranks.tolist(), strict=True)):
        if r and edges[slot] < edges[slot + 1]:
            yield slot, edges[slot], edges[slot + 1], start, r


def _pick(order: Tensor) -> slice | Tensor:
    """Rows that follow each other as a slice, which picks them without a copy; others as int64 indices."""
    rows = order.tolist()
    low, high = rows[0], rows[0] + len(rows)
    return slice(low, high) if rows == list(range(low, high)) else order.long()


def shrink(
    x: Tensor, a: Tensor, order: Tensor, offsets: Tensor, starts: Tensor, ranks: Tensor, max_rank: int, split: int = 1
) -> Tensor:
    """h[0, i, t, :r] = A_s x[i, t]; see `ops.lora_shrink`. Zero where nothing is specified."""
    if split != 1:
        raise ValueError(f"lora_shrink: the torch backend sums K at once, so split must be 1, got {split}")
    pieces = starts.shape[0]
    h = x.new_zeros((1, *x.shape[:2], pieces * max_rank), dtype=torch.promote_types(x.dtype, torch.float32))
    with torch.autocast(x.device.type, enabled=False):  # which would multiply in a coarser dtype
        for piece in range(pieces):
            for _, low, high, start, r in groups(order, offsets, starts[piece], ranks[piece]):
                rows, column = _pick(order[low:high]), piece * max_rank
                own = a[piece::pieces][start : start + r].to(h.dtype)
                some = torch.matmul(x[rows].to(h.dtype), own.t())  # [rows, T, r]
                h[0, rows, :, column : column + r] = some
    return h


def expand(
    y: Tensor,
    h: Tensor,
    b: Tensor,
    order: Tensor,
    offsets: Tensor,
    starts: Tensor,
    ranks: Tensor,
    slices: Tensor | None = None,
    scale: Tensor | None = None,
    bias: Tensor | None = None,
    own_columns: bool = False,
) -> Tensor:
    """out[i, t] = scale_s (y[i, t] + B_s^T h[i, t, :r]) + bias_s; see `ops.lora_expand`."""
    out = y.clone(memory_format=torch.contiguous_format)
    wide = torch.promote_types(torch.promote_types(y.dtype, h.dtype), torch.float32)
    h = h.sum(0) if h.shape[0] > 1 else h[0]
    max_rank = h.shape[2] // starts.shape[0]
    with torch.autocast(y.device.type, enabled=False):
        for piece, (first, width, offset) in enumerate([(0, y.shape[2], 0)] if slices is None else slices.tolist()):
            for slot, low, high, start, r in groups(order, offsets, starts[piece], ranks[piece]):
                rows, columns = _pick(order[low:high]), slice(first, first + width)
                begin = offset + start * width
                own = b.view(-1)[begin : begin + r * width].view(r, width).to(wide)
                column = start if own_columns else piece * max_rank
                lanes = h[..., piece :: starts.shape[0]] if own_columns else h
                some = lanes[rows][:, :, column : column + r].to(wide)  # [rows, T, r]
                if slices is None and scale is None and bias is None and y.dtype == wide:  # without a copy of y's rows
                    if isinstance(rows, slice):
                        out[rows].flatten(0, 1).addmm_(some.flatten(0, 1), own)
                    else:
                        out.index_add_(0, rows, torch.matmul(some, own))
                    continue
                total = out[rows][:, :, columns] + torch.matmul(some, own)  # rounded once, at the end
                if scale is not None:
                    total = total * scale[slot, columns]
                if bias is not None:
                    total = total + bias[slot, columns]
                out[rows, :, columns] = total.to(y.dtype)
    return out if slices is None else _one_after_another(out, slices)


def _one_after_another(out: Tensor, slices: Tensor) -> Tensor:
    """Flat: the columns of each slice, [R, T, n], at R * T * its first column."""
    parts = sorted(slices.tolist())
    return torch.cat([out[..., first : first + width].flatten() for first, width, _ in parts])


def expand_gated(y: Tensor, h: Tensor, b: Tensor, closed: Tensor) -> Tensor:
    """y[i, t] + B^T (h[i, t] where open): y [R, T, N], h [R, T, P] with the columns of all slots, b [P, N],
    closed bool [R, P] True where the rank row is not row i's. Closed columns are replaced, not multiplied: an overflow
    in another slot's column must not become NaN here.
    """
    own = h.masked_fill(closed[:, None, :], 0)
    return torch.addmm(y.flatten(0, 1), own.flatten(0, 1), b).view(y.shape)


def add_each(y: Tensor, x: Tensor, a: Tensor, b: Tensor, rows: Tensor, shut: Tensor | None, own_y: bool) -> Tensor:
    """y + B^T (A x) with the rank rows of each of C equal chunks of the batch: y [R, T, N], x [R, T, K], a [P, K],
    b [P, N], rows int64 [C, w]. shut bool [C, w]: those that count for nothing, which are replaced, not multiplied: an
    overflow there must not become NaN here. own_y: y is nobody else's, so the sum may be written into it.
    """
    chunks, w = rows.shape
    wide = torch.promote_types(torch.promote_types(y.dtype, b.dtype), torch.float32)
    own_a, own_b = (m.index_select(0, rows.flatten()).view(chunks, w, m.shape[1]).to(wide) for m in (a, b))
    with torch.autocast(y.device.type, enabled=False):  # which would multiply in a coarser dtype
        h = torch.bmm(x.reshape(chunks, -1, x.shape[2]).to(wide), own_a.mT)
        if shut is not None:
            h, own_b = h.masked_fill(shut[:, None], 0), own_b.masked_fill(shut[..., None], 0)
        flat = y.reshape(chunks, -1, y.shape[2])
        if own_y and y.dtype == wide:
            flat.baddbmm_(h, own_b)
            return y
        return torch.baddbmm(flat.to(wide), h, own_b).to(y.dtype).view(y.shape)  # rounded once, at the end


def add_one(y: Tensor, x: Tensor, a: Tensor, b: Tensor, own_y: bool = False) -> Tensor:
    """y + B^T (A x) where all rows share one adapter: y [..., N], x [..., K], a [r, K], b [r, N]. own_y: y is nobody
    else's, so the sum may be written into it."""
    wide = torch.promote_types(y.dtype, b.dtype)  # rounded once, at the end
    h = torch.matmul(x.to(a.dtype), a.t()).to(wide).reshape(-1, a.shape[0])
    if own_y and y.dtype == wide:
        y.view(-1, y.shape[-1]).addmm_(h, b.to(wide))
        return y
    flat = torch.addmm(y.reshape(-1, y.shape[-1]).to(wide), h, b.to(wide))
    return flat.to(y.dtype).view(y.shape)
