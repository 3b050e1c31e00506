"""Linears: `nn.Linear`, its subclasses, and GPT-2's `Conv1D` (weight [in, out]; A and B are as for a linear)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..kernels import ops  # noqa: F401 (registers the operations)
from ..kernels.backends import TORCH, Backend
from ..kernels.torch_backend import add_each, add_one, expand_gated
from .base import AdaptedLayer
from .plain import plain_call
from .rows import BASE_ONLY, ONE, SlotRows
from .slots import ModuleSlots
from .traced import compute_traced

EACH_WORK = 1 << 22  # numbers in the copies of A and B that are made for the rows of a call; beyond, grouped operations


class LoraLinear(AdaptedLayer, kind="linear"):
    """Adds `B (A x)` of each row's adapter to the output of the class it is mixed into."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        slots: ModuleSlots = self._lora
        tracing = torch.compiler.is_compiling()
        if not tracing and slots.routing.idle:
            return super().__call__(*args, **kwargs)
        x: Any = args[0] if args else next(iter(kwargs.values()), None)
        alone = len(args) + len(kwargs) == 1 and (args or "input" in kwargs)  # else the class's forward will refuse
        if alone and isinstance(x, Tensor):
            out: Tensor | None = None
            if tracing:  # nothing of `slots` is read
                out = compute_traced(self, x)
            elif slots.merged is not None:
                out = slots.merged.compute(slots, x)
            if out is not None:
                return out
        path = slots.path()
        y = super().__call__(*args, **kwargs)
        return y if path == BASE_ONLY else add_own(y, x, slots, path, _fresh(self, y))


def add_own(y: Tensor, x: Tensor, slots: ModuleSlots, path: int, own_y: bool = False) -> Tensor:
    """y plus `B (A x)` of each row's adapter, some row having one: x the module's input. own_y: y is nobody else's."""
    if path == ONE:
        return add_uniform(y, x, slots, own_y)
    assert slots.layout is not None
    rows = slots.routing.align(x, slots.layout.closed.shape[0], slots.name, flat=slots.flat)  # [R, T, K]
    return add_mixed(y, rows, slots, own_y)


def add_mixed(y: Tensor, rows: Tensor, slots: ModuleSlots, own_y: bool = False) -> Tensor:
    """y plus `B (A x)` of each row's adapter: y as the module gives it, rows [R, T, K] its input. own_y: y is nobody
    else's."""
    layout, backend = slots.layout, slots.backend
    assert layout is not None
    out = y.reshape(*rows.shape[:2], slots.out_features)  # [R, T, N]
    if rows.shape[0] * rows.shape[1] <= slots.dense_tokens and backend.name == TORCH:
        (a, b, closed), wide = slots.covered(), torch.promote_types(y.dtype, slots.b.dtype)
        h = F.linear(rows.to(a.dtype), a).to(wide)
        return expand_gated(out.to(wide), h, b.to(wide), closed).to(y.dtype).view(y.shape)
    if backend.name == TORCH and not slots.open_mix():
        own, shut = layout.chunks()
        if own.numel() * (slots.in_features + slots.out_features) <= EACH_WORK:
            return add_each(out, rows.to(slots.a.dtype), slots.a, slots.b, own, shut, own_y).view(y.shape)
    return _grouped(out, rows, slots, slots.tables()).view(y.shape)


def add_uniform(y: Tensor, x: Tensor, slots: ModuleSlots, own_y: bool = False) -> Tensor:
    """y plus `B (A x)` of the one adapter that all rows share, in any shape."""
    if not slots.backend.fixed:
        return add_one(y, x, *slots.own(), own_y)
    tables = slots.tables(slots.routing.uniform)
    return _grouped(y.reshape(1, -1, y.shape[-1]), x.reshape(1, -1, x.shape[-1]), slots, tables).view(y.shape)


def _fresh(module: Any, y: Tensor) -> bool:
    """Whether y, which the module's class returned, is known to be nobody else's and needed for no gradient."""
    plain = type(module).forward is nn.Linear.forward and plain_call(module)
    return plain and y.is_contiguous() and not y.requires_grad and not torch.compiler.is_compiling()


def _grouped(y: Tensor, x: Tensor, slots: ModuleSlots, tables: tuple[Tensor, ...]) -> Tensor:
    """Shrink and expand: y [R, T, N], x [R, T, K] -> [R, T, N]. Directly, or as registered operations where the call is
    traced or a backend without gradients of its own must give them."""
    x, max_rank = x.to(slots.a.dtype), slots.bound()
    h = shrink(x, slots, tables, max_rank, y.requires_grad)
    return expand(y, h, slots, tables, x.requires_grad or y.requires_grad)


def shrink(x: Tensor, slots: SlotRows, tables: tuple[Tensor, ...], max_rank: int, gradients: bool = False) -> Tensor:
    """h [Z, R, T, max_rank], to be summed over Z: A x with the A of each row's slot; x [R, T, K] of A's dtype."""
    backend = slots.backend
    if not _registered(backend, x.requires_grad or gradients):
        return backend.shrink(x, slots.a, *tables, max_rank)
    split = backend.split(x.shape[2])
    return torch.ops.hf_multilora.lora_shrink(x, slots.a, *tables, max_rank, split, backend.name)


def expand(y: Tensor, h: Tensor, slots: ModuleSlots, tables: tuple[Tensor, ...], gradients: bool = False) -> Tensor:
    """y [R, T, N] plus B h of each row's slot, h [Z, R, T, max_rank]."""
    backend = slots.backend
    if not _registered(backend, gradients):
        return backend.expand(y, h, slots.b, *tables)
    return torch.ops.hf_multilora.lora_expand(y, h, slots.b, *tables, None, None, None, False, backend.name)


def _registered(backend: Backend, gradients: bool) -> bool:
    """Whether a call must use the registered operations: traced, or with gradients that a backend does not give."""
    return torch.compiler.is_compiling() or (torch.is_grad_enabled() and gradients and backend.name != TORCH)
