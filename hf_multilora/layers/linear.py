"""Linears: `nn.Linear`, its subclasses, and GPT-2's `Conv1D` (weight [in, out]; A and B are as for a linear)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..kernels import ops
from ..kernels.torch_backend import add_one, expand_gated
from . import augmented
from .base import LoraLayer
from .slots import BASE_ONLY, GATED_TOKENS, ONE, ModuleSlots


class LoraLinear(LoraLayer, kind="linear"):
    """Adds `B (A x)` of each row's adapter to the output of the class it is mixed into."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        slots: ModuleSlots = self._lora
        path = slots.path()
        if path == BASE_ONLY:
            return super().__call__(*args, **kwargs)
        x: Tensor = args[0] if args else next(iter(kwargs.values()))
        if path == ONE:
            y = super().__call__(*args, **kwargs)
            return add_one(y, x, *slots.own())
        layout = slots.layout
        assert layout is not None
        rows = slots.routing.align(x, layout.closed.shape[0], slots.name, flat=slots.flat)  # [R, T, K]
        few = rows.shape[0] * rows.shape[1] <= GATED_TOKENS or rows.is_cuda
        if few and isinstance(self, nn.Linear) and augmented.ready(self, slots):
            both = F.linear(rows, slots.buffer_used, slots.bias_used)  # type: ignore[arg-type]  # [R, T, N + w]
            y, h = both[..., : slots.out_features], both[..., slots.out_features :]
            return expand_gated(y, h, slots.b_used, layout.closed).view(*x.shape[:-1], slots.out_features)
        y = super().__call__(*args, **kwargs)
        out = y.reshape(*rows.shape[:2], -1)  # [R, T, N]
        if few:
            h = F.linear(rows.to(slots.a_used.dtype), slots.a_used).to(y.dtype)
            return expand_gated(out, h, slots.b_used.to(y.dtype), layout.closed).view(y.shape)
        tracing = torch.compiler.is_compiling()  # a traced graph calls the registered operations as they are
        shrink = torch.ops.hf_multilora.lora_shrink if tracing else ops.lora_shrink
        expand = torch.ops.hf_multilora.lora_expand if tracing else ops.lora_expand
        width = slots.a_used.shape[0] if tracing else layout.max_rank
        h = shrink(rows.to(slots.a.dtype), slots.a, *slots.tables(), width)
        return expand(out, h, slots.b, *slots.tables()).view(y.shape)
