"""Linears and embeddings of which each process has a part, and whose part is not a linear of its own (see local.py).

The deltas of a linear are added inside the parallel forward of its instance. There x and W are this process's part, and
so are A and B, see parallel.py: what comes after, a gather or a sum over the processes, makes the deltas whole together
with the base's output. `fully_sharded_loras` is S-LoRA's idea (section 6 of its paper): h = A x is summed over the
processes before each multiplies its part of B.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..cuts import is_distributed
from .base import AdaptedLayer
from .linear import add_own, expand, shrink
from .local import require_local
from .rows import BASE_ONLY, ONE
from .slots import ModuleSlots


class LoraSharded(AdaptedLayer, kind="sharded linear"):
    """Adds `B (A x)` of each row's adapter, of this process's parts, to what its part of W gives."""

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        slots: ModuleSlots = self._lora
        path = slots.path()
        y: Tensor = super().forward(x, *args, **kwargs)  # type: ignore[misc]
        if path == BASE_ONLY:
            return y
        if is_distributed(x) or is_distributed(y):
            require_local(slots)
        if slots.shard.group is None and not (x.numel() and y.numel()):
            return y
        if slots.shard.group is None:
            return add_own(y, x, slots, path, y.is_contiguous())
        return _add_summed(y, x, slots, path)


def _add_summed(y: Tensor, x: Tensor, slots: ModuleSlots, path: int) -> Tensor:
    """y plus this process's columns of `B h`, h being the sum over all of `A x`."""
    shard, layout = slots.shard, slots.layout
    assert layout is not None
    if path == ONE:
        rows, tables = x.flatten(0, -2)[None], slots.tables(slots.routing.uniform)
    else:
        rows = slots.routing.align(x, layout.closed.shape[0], slots.name, flat=slots.flat)
        tables = slots.tables()
    h = shrink(shard.input(rows).to(slots.a.dtype), slots, tables, slots.bound())
    h = shard.sum(h.sum(0, keepdim=True))
    if not slots.out_features or not y.numel():
        return y
    out, first = y.reshape(*rows.shape[:2], y.shape[-1]), shard.first or 0
    mine = slice(first, first + slots.out_features)
    if slots.out_features == y.shape[-1]:
        return expand(out, h, slots, tables).view(y.shape)
    out = out.clone()  # y of a parallel forward is summed in place, and may be somebody's
    out[..., mine] = expand(out[..., mine], h, slots, tables)
    return out.view(y.shape)


class LoraShardedEmbedding(AdaptedLayer, kind="sharded embedding"):
    """y = W[id] + scale * B^T A[:, id] with the A and B of each row's adapter, A for this process's ids; ids [R, T]."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        y: Tensor = super().__call__(*args, **kwargs)
        slots: ModuleSlots = self._lora
        path = slots.path()
        if path == BASE_ONLY:
            return y
        ids: Tensor = args[0] if args else next(iter(kwargs.values()))
        layout, shard = slots.layout, slots.shard
        assert layout is not None and shard.x is not None
        if path == ONE:
            rows, own = ids.reshape(1, -1), torch.tensor([layout.spans[slots.routing.uniform]], device=ids.device).T  # type: ignore[index]
        else:
            rows = slots.routing.align(ids, layout.closed.shape[0], slots.name, trailing=0, flat=slots.flat)
            assert layout.table is not None
            own = layout.both.index_select(1, layout.table.row_slots.long().remainder(layout.both.shape[1]))  # [2, R]
        at = torch.arange(slots.bound(), device=ids.device)
        mine = at < own[1][:, None]  # [R, r]
        lines = (own[0][:, None] + at).clamp(max=slots.a.shape[0] - 1)  # [R, r] rank rows
        ((low, high),) = shard.x.ranges
        here = (rows >= low) & (rows < high)  # [R, T]
        h = slots.a[lines[:, None, :], (rows - low).clamp(0, max(0, high - low - 1))[..., None]].float()
        h = shard.sum(h.masked_fill(~(here[..., None] & mine[:, None, :]), 0.0))  # [R, T, r]
        delta = torch.matmul(h, slots.b[lines].float())
        return y + (delta.view(y.shape) * getattr(self, "embed_scale", 1.0)).to(y.dtype)
