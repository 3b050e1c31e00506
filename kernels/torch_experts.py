"""The operations for experts' LoRA in plain torch: the specification of every other backend.

A pair is a token and one of its chosen experts. Letters: n pairs, m rows of the input, K in, N columns of the delta, P
rank rows of the pool, G keys, r rank of one key, T tokens, C choices of a token, H columns of the result.

Tables, on the device of the data: `keys` int32 [n] names the key of each pair; `begins`, `ranks` int32 [G] say that key
k owns the rank rows begins[k]:begins[k] + ranks[k]; rank 0: there is no adapter. `source` int32 or int64 [n]: the row
of the input that a pair reads, None: row i for pair i. Keys may come in any order; equal ones side by side are fast.

Two forms give the same. `_runs` groups the pairs by key and multiplies once per key, which a CPU does faster at any
number of pairs; it asks the device which keys there are. `_copies` copies each pair's own rank rows and asks nothing:
for traced calls and for GPUs, but where gradients would keep all copies.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

COPIED = 1 << 27  # bytes of copied rank rows at a time
Rows = slice | Tensor


def shrink(
    x: Tensor, a: Tensor, begins: Tensor, ranks: Tensor, keys: Tensor, source: Tensor | None, max_rank: int
) -> Tensor:
    """h[i, :r] = A_k x[source[i]] with k = keys[i]; see `ops_experts.experts_shrink`. Zero beyond r."""
    wide = torch.promote_types(x.dtype, torch.float32)
    n = keys.shape[0]
    if not n or not a.shape[0]:
        return x.new_zeros((n, max_rank), dtype=wide)
    parts = []
    with torch.autocast(x.device.type, enabled=False):  # which would multiply in a coarser dtype
        if _asks_nothing(keys, wants_gradient(x)):
            for part, own, _ in _copies(a, begins, ranks, keys, max_rank, wide):
                some = _read(x, source, part).to(wide)
                h = torch.bmm(_own_rows(a, own, wide), some[:, :, None])[:, :, 0]
                parts.append(h.masked_fill(own < 0, 0))
            return torch.cat(parts)
        order, runs = _runs(begins, ranks, keys)
        for rows, begin, r in runs:
            some = x[:0] if not r else _read(x, source, rows)
            h = torch.matmul(some.to(wide), a[begin : begin + r].to(wide).t())
            lacks = (0, max_rank - r, 0, _count(rows) - some.shape[0])
            parts.append(torch.nn.functional.pad(h, lacks))
    return _back(torch.cat(parts), order)


def expand(
    y: Tensor, h: Tensor, b: Tensor, begins: Tensor, ranks: Tensor, keys: Tensor, source: Tensor | None, first: int
) -> Tensor:
    """y[i, first : first + N] += B_k^T h[source[i], :r] with k = keys[i]; see `ops_experts.experts_expand`.

    Returns y, written in place; where a gradient of y or h is wanted, a new tensor.
    """
    wide = torch.promote_types(torch.promote_types(y.dtype, h.dtype), torch.float32)
    out = y.clone() if wants_gradient(y, h) else y
    if not keys.shape[0] or not b.shape[0]:
        return out
    columns = slice(first, first + b.shape[1])
    with torch.autocast(y.device.type, enabled=False):
        if _asks_nothing(keys, out is not y):
            for part, own, live in _copies(b, begins, ranks, keys, h.shape[1], wide):
                some = _read(h, source, part).to(wide).masked_fill(own < 0, 0)
                before = y[part, columns]
                total = torch.bmm(some[:, None], _own_rows(b, own, wide))[:, 0] + before.to(wide)
                out[part, columns] = torch.where(live[:, None], total.to(y.dtype), before)  # rounded once, here
            return out
        for rows, begin, r in _runs(begins, ranks, keys)[1]:
            if r:
                some = _read(h, source, rows)[:, :r].to(wide)
                total = y[rows, columns].to(wide) + torch.matmul(some, b[begin : begin + r].to(wide))
                out[rows, columns] = total.to(y.dtype)  # rounded once, here
    return out


def combine(y: Tensor, places: Tensor, weights: Tensor, dtype: torch.dtype) -> Tensor:
    """out[t] = sum over c of weights[t, c] * y[places[t, c]]; see `ops_experts.experts_combine`."""
    wide = torch.promote_types(torch.promote_types(y.dtype, dtype), torch.float32)
    total = y.new_zeros((places.shape[0], y.shape[1]), dtype=wide)
    for c in range(places.shape[1]):  # in this order
        total = total + weights[:, c, None].to(wide) * y.index_select(0, places[:, c]).to(wide)
    return total.to(dtype)


def wants_gradient(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def _asks_nothing(keys: Tensor, gradients: bool) -> bool:
    """Whether the device must not, or need not, be asked which keys there are."""
    if torch.compiler.is_compiling():
        return True
    return keys.is_cuda and (not gradients or torch.cuda.is_current_stream_capturing())


def _copies(
    factor: Tensor, begins: Tensor, ranks: Tensor, keys: Tensor, max_rank: int, wide: torch.dtype
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """(pairs, their rank rows int64 [pairs, max_rank] with -1 where there is none, whether there is any) in chunks
    whose copies of rank rows of `factor` stay below COPIED bytes."""
    step = max(1, COPIED // max(1, max_rank * factor.shape[1] * wide.itemsize))
    at = torch.arange(max_rank, device=keys.device)
    for low in range(0, keys.shape[0], step):
        part = slice(low, min(low + step, keys.shape[0]))
        some = keys[part].long()
        begin, r = begins[some].long()[:, None], ranks[some]
        yield part, torch.where(at < r[:, None], begin + at, -1), r > 0


def _own_rows(factor: Tensor, own: Tensor, wide: torch.dtype) -> Tensor:
    """[pairs, max_rank, columns] of the factor. Rows that are not there are replaced by zeros, not multiplied: an
    overflow in somebody else's must not become NaN here."""
    rows = factor.index_select(0, own.clamp(min=0).flatten()).view(*own.shape, factor.shape[1])
    return rows.to(wide).masked_fill(own[:, :, None] < 0, 0)


def _runs(begins: Tensor, ranks: Tensor, keys: Tensor) -> tuple[Tensor | None, list[tuple[Rows, int, int]]]:
    """(order of the pairs by key, None where they lie so already; [(pairs of one key, its first rank row, r)])."""
    order = None if bool((keys[1:] >= keys[:-1]).all()) else torch.argsort(keys, stable=True)
    found, counts = torch.unique_consecutive(keys if order is None else keys[order], return_counts=True)
    runs: list[tuple[Rows, int, int]] = []
    low = 0
    table = torch.stack((counts, begins[found.long()].long(), ranks[found.long()].long())).tolist()
    for count, begin, r in zip(*table, strict=True):
        runs.append((slice(low, low + count) if order is None else order[low : low + count], begin, r))
        low += count
    return order, runs


def _count(rows: Rows) -> int:
    return rows.stop - rows.start if isinstance(rows, slice) else rows.shape[0]


def _read(x: Tensor, source: Tensor | None, rows: Rows) -> Tensor:
    return x[rows] if source is None else x.index_select(0, source[rows])


def _back(sorted_rows: Tensor, order: Tensor | None) -> Tensor:
    """Rows in the order of the pairs."""
    if order is None:
        return sorted_rows
    place = torch.empty_like(order)
    place[order] = torch.arange(order.shape[0], device=order.device)
    return sorted_rows[place]
