"""Embeddings: A is looked up by (token, slot), expanded, and multiplied by the module's embedding scale if any."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..kernels import ops  # noqa: F401 (registers the operations)
from ..kernels.backends import TORCH
from ..kernels.torch_backend import expand_gated, groups
from .base import AdaptedLayer
from .rows import BASE_ONLY, ONE
from .slots import ModuleSlots


class LoraEmbedding(AdaptedLayer, kind="embedding"):
    """y = W[id] + scale * B^T A[:, id] with the A and B of each row's adapter; ids int [R, T]."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        y: Tensor = super().__call__(*args, **kwargs)
        slots: ModuleSlots = self._lora
        path = slots.path()
        if path == BASE_ONLY:
            return y
        ids: Tensor = args[0] if args else next(iter(kwargs.values()))
        scale = getattr(self, "embed_scale", 1.0)  # Gemma: a buffer, BART: a float
        layout, backend = slots.layout, slots.backend
        assert layout is not None
        if path == ONE and not backend.fixed:
            a, b = slots.own()
            return y + (_look_up(a, ids, b) * scale).to(y.dtype)
        if path == ONE:
            rows, tables = ids.reshape(1, -1), slots.tables(slots.routing.uniform)
        else:
            r = layout.closed.shape[0]
            if ids.dim() == 2 and ids.shape[0] == 1 and r > 1 and not slots.routing.ragged:
                ids = ids.expand(r, -1)  # positions shared by all rows: each row gets its own table
                y = y.expand(r, -1, -1)
            rows = slots.routing.align(ids, r, slots.name, trailing=0, flat=slots.flat)  # [R, T]
            tables = slots.tables()
        delta = torch.zeros(*rows.shape, slots.out_features, dtype=slots.b.dtype, device=y.device)
        tracing = torch.compiler.is_compiling()
        if tracing or backend.name != TORCH or rows.numel() <= slots.dense_tokens:
            a, b, closed = slots.covered()
            columns = a.index_select(1, rows.flatten())  # [w, R * T]
            h = columns.t().reshape(*rows.shape, columns.shape[0])  # [R, T, w]
            if backend.name == TORCH or (tracing and not backend.fixed):
                delta = expand_gated(delta, h, b, closed)
            elif tracing:
                rest = (None, None, None, True, backend.name)  # no slices, scale or bias; own columns
                delta = torch.ops.hf_multilora.lora_expand(delta, h[None], slots.b, *tables, *rest)
            else:
                delta = backend.expand(delta, h[None], slots.b, *tables, own_columns=True)
        else:
            order, offsets, starts, ranks = tables
            for _, low, high, start, rank in groups(order, offsets, starts[0], ranks[0]):
                mine, own = order[low:high], slice(start, start + rank)
                some = _look_up(slots.a[own], rows.index_select(0, mine), slots.b[own])
                delta.index_copy_(0, mine.long(), some.to(delta.dtype))  # autocast
        return y + (delta.reshape(y.shape) * scale).to(y.dtype)


def _look_up(a: Tensor, ids: Tensor, b: Tensor) -> Tensor:
    """B^T A[:, ids]: a [r, V], ids [...], b [r, H] -> [..., H]."""
    return torch.matmul(a.index_select(1, ids.flatten()).t(), b).view(*ids.shape, -1)
