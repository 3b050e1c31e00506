"""The expands of linears laid in one buffer as registered operations, for traced code. Letters as in ops.py."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from . import torch_backend
from .backends import KernelError
from .backends import backend as backend_named
from .checks import check_gated, check_laid
from .ops import NAMESPACE, TABLES

EXPAND_LAID = (
    f"lora_expand_laid(Tensor both, Tensor b, Tensor row_slots, {TABLES}, Tensor? slices, int[] sizes, int bound, "
    f"bool even, int lanes, str backend) -> Tensor[]"
)
GATED_LAID = (
    f"lora_gated_laid(Tensor both, Tensor b, Tensor row_slots, {TABLES}, int offset, int n, int bound, int piece, "
    f"str act, int lanes, str backend) -> Tensor"
)

_library = torch.library.Library(NAMESPACE, "FRAGMENT")
_library.define(EXPAND_LAID)
_library.define(GATED_LAID)


def lora_expand_laid(
    both: Tensor, b: Tensor, row_slots: Tensor, order: Tensor, offsets: Tensor, starts: Tensor, ranks: Tensor,
    slices: Tensor | None, sizes: Sequence[int], bound: int, even: bool, lanes: int, backend: str = "torch",
) -> list[Tensor]:  # fmt: skip
    """`lora_expand` with own columns of both = [y | h], [R, T, N + P * lanes] -> a new [R, T, n] for each slice.

    row_slots: int32 [R], slot of each row, or -1. sizes: n of each slice, one after the other in y. bound: of all
    ranks. even: sizes and places in b are multiples of 16. lanes: L, or 1 where all slices read the same h.
    Gradients: none.
    """
    check_laid(both, row_slots, starts, slices, sizes, lanes)
    rows, tokens, columns = both.shape
    n, chosen = sum(sizes), backend_named(backend)
    if chosen.expand_laid is None:
        y, h = both[..., :n], both[None, ..., n:]
        h = h if lanes == len(sizes) else h.repeat_interleave(len(sizes), 3)
        shaped = b.view(-1, n) if slices is None else b
        out = torch_backend.expand(y, h, shaped, order, offsets, starts, ranks, slices, own_columns=True)
        parts = out.view(-1).split([rows * tokens * size for size in sizes])
        return [part.view(rows, tokens, size).clone() for part, size in zip(parts, sizes, strict=True)]
    outs = [both.new_empty(rows, tokens, size) for size in sizes]
    flat = both.reshape(-1, columns)
    if flat.numel():
        tables = (row_slots, order, offsets, starts, ranks, slices, n, bound, even, lanes)
        chosen.expand_laid(flat, rows, b, *tables)(flat, outs)
    return outs


def _fake(
    both: Tensor, b: Tensor, row_slots: Tensor, order: Tensor, offsets: Tensor, starts: Tensor, ranks: Tensor,
    slices: Tensor | None, sizes: Sequence[int], bound: int, even: bool, lanes: int, backend: str,
) -> list[Tensor]:  # fmt: skip
    return [both.new_empty(both.shape[0], both.shape[1], size) for size in sizes]


def lora_gated_laid(
    both: Tensor, b: Tensor, row_slots: Tensor, order: Tensor, offsets: Tensor, starts: Tensor, ranks: Tensor,
    offset: int, n: int, bound: int, piece: int, act: str, lanes: int, backend: str,
) -> Tensor:  # fmt: skip
    """act(y_g) * y_u [R, T, n / 2] of the sums of `lora_expand_laid` for two slices of n / 2 columns each, of which
    `piece` (0 or 1) is the gate. offset: of slice 1 in b. act: "silu" or "gelu_tanh". Gradients: none. Raises
    ValueError for shapes that do not fit together, KernelError for a backend that has no such kernel."""
    check_gated(both, row_slots, starts, n, piece, lanes)
    chosen = backend_named(backend)
    if chosen.gated_laid is None:
        raise KernelError(f"lora_gated_laid must be computed by backend='triton', got {backend!r}")
    rows, tokens, columns = both.shape
    out, flat = both.new_empty(rows, tokens, n // 2), both.reshape(-1, columns)
    if flat.numel():
        tables = (row_slots, order, offsets, starts, ranks)
        chosen.gated_laid(flat, rows, b, *tables, offset, n, bound, piece, act, lanes)(flat, [out])
    return out


def _fake_gated(
    both: Tensor, b: Tensor, row_slots: Tensor, order: Tensor, offsets: Tensor, starts: Tensor, ranks: Tensor,
    offset: int, n: int, bound: int, piece: int, act: str, lanes: int, backend: str,
) -> Tensor:  # fmt: skip
    return both.new_empty(both.shape[0], both.shape[1], n // 2)


_library.impl("lora_expand_laid", lora_expand_laid, "CompositeExplicitAutograd")
torch.library.register_fake(f"{NAMESPACE}::lora_expand_laid", _fake, lib=_library)
_library.impl("lora_gated_laid", lora_gated_laid, "CompositeExplicitAutograd")
torch.library.register_fake(f"{NAMESPACE}::lora_gated_laid", _fake_gated, lib=_library)
