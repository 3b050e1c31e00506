"""Modules that adapters save in full (PEFT's modules_to_save): linears and embeddings, selected per row.

A row whose adapter saved the module gets that adapter's output, every other row the base's. Adapters may differ in the
number of outputs (labels, vocabulary): the output is as wide as the widest row of the call, the others end in FILL. In
a traced or captured call, which must serve any mix, it is as wide as the widest slot.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..kernels import ops  # noqa: F401 (registers the operations)
from ..pool import FILL
from .base import AdaptedLayer
from .linear import shrink
from .rows import BASE_ONLY, ONE, SlotRows

# Tokens of a call x rank rows of the pool up to which one matmul with the rows of all slots is used, beyond it one per
# adapter of the batch: heads are narrow, vocabularies are not.
DENSE_WORK = 1 << 20


class SavedSlots(SlotRows):
    """a [P, width] and b [P, 1] (linear: weight and bias) or [P, 0] of one module in its slots."""

    role = "saved"


class SavedLinear(AdaptedLayer, role="saved", kind="linear"):
    """W_s x + b_s with the weight and bias of each row's adapter."""

    _saved: SavedSlots

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        slots = self._saved
        path = slots.path()
        if path == BASE_ONLY:
            return super().__call__(*args, **kwargs)
        x: Tensor = args[0] if args else next(iter(kwargs.values()))
        if path == ONE:
            weight, bias = slots.own()
            return F.linear(x, weight, bias[:, 0])
        layout, open_mix = slots.layout, slots.open_mix()
        assert layout is not None
        rows = slots.routing.align(x, layout.own.shape[1], slots.name, flat=slots.flat)  # [R, T, K]
        count = layout.own[1][:, None]  # [R, 1] outputs of each row's own, 0 for the base
        if open_mix or not layout.whole:
            y = super().__call__(*args, **kwargs).reshape(*rows.shape[:2], -1)  # [R, T, N]
            width = max(y.shape[2], slots.bound() if open_mix else layout.widest)
            own = outputs(rows, slots, width, slots.b[:, 0]).to(y.dtype)
            y = F.pad(y, (0, width - y.shape[2]), value=FILL).masked_fill((count > 0)[..., None], FILL)
        else:
            width = layout.widest
            own = outputs(rows, slots, width, slots.b[:, 0])
            y = own.new_full((), FILL)
        inside = torch.arange(width, device=x.device) < count  # [R, width]
        return torch.where(inside[:, None], own, y).view(*x.shape[:-1], width)


def outputs(x: Tensor, slots: SlotRows, width: int, bias: Tensor | None) -> Tensor:
    """a_s x + bias_s of each row's slot, [R, T, width]: x [R, T, K], bias [P]; columns beyond a row's own r hold
    anything."""
    layout, tokens = slots.layout, x.shape[0] * x.shape[1]
    assert layout is not None
    x = x.to(slots.a.dtype)
    columns = layout.own[0][:, None] + torch.arange(width, device=x.device)  # [R, width] rank rows
    columns = columns.clamp(max=slots.a.shape[0] - 1)
    if tokens * slots.a.shape[0] <= DENSE_WORK and not slots.backend.fixed:
        every = F.linear(x, slots.a, bias)  # [R, T, P]
        return every.gather(2, columns[:, None].expand(-1, x.shape[1], -1))
    h = shrink(x, slots, slots.tables(), width)
    h = h.sum(0) if h.shape[0] > 1 else h[0]
    return (h if bias is None else h + bias[columns][:, None]).to(x.dtype)


class SavedEmbedding(AdaptedLayer, role="saved", kind="embedding"):
    """The row of each batch row's own table, times the module's embedding scale if any; ids int [R, T]."""

    _saved: SavedSlots

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        slots = self._saved
        path = slots.path()
        if path == BASE_ONLY:
            return super().__call__(*args, **kwargs)
        ids: Tensor = args[0] if args else next(iter(kwargs.values()))
        scale = getattr(self, "embed_scale", 1.0)  # Gemma: a buffer, BART: a float
        if path == ONE:
            return F.embedding(ids, slots.own()[0]) * scale
        rows, view = token_rows(ids, slots)
        first, count = (column[:, None] for column in slots.layout.own)  # type: ignore[union-attr]  # [R, 1] each
        others = torch.where(count > 0, 0, rows)  # an id that only an adapter's own vocabulary has
        y = super().__call__(others.view(view))
        y = y.reshape(*rows.shape, y.shape[-1])
        inside = (rows >= 0) & (rows < count)
        # an id outside a row's own vocabulary must fail as it does in the base, not read another tenant's rows
        at = torch.where(count > 0, torch.where(inside, first + rows, slots.a.shape[0]), 0)
        own = F.embedding(at, slots.a) * scale
        return torch.where((count > 0)[..., None], own.to(y.dtype), y).view(*view, y.shape[-1])


def token_rows(ids: Tensor, slots: SlotRows) -> tuple[Tensor, tuple[int, ...]]:
    """Token ids with the batch rows in front, [R, T], and the shape of what is returned for them but for its width.

    Positions that all rows share, [1, T], become one row each."""
    assert slots.layout is not None
    r = slots.layout.own.shape[1]
    if ids.dim() == 2 and ids.shape[0] == 1 and r > 1 and not slots.routing.ragged:
        ids = ids.expand(r, -1)
    return slots.routing.align(ids, r, slots.name, trailing=0, flat=slots.flat), tuple(ids.shape)
