"""The expand of linears laid in one buffer as a registered operation, for traced code. Letters as in ops.py."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from . import torch_backend
from .backends import MOST_SLICES
from .backends import backend as backend_named
from .checks import check_laid
from .ops import NAMESPACE, TABLES

EXPAND_LAID = (
    f"lora_expand_laid(Tensor both, Tensor b, Tensor row_slots, {TABLES}, Tensor? slices, int[] sizes, int bound, "
    f"bool even, int lanes, str backend) -> Tensor[]"
)

_library = torch.library.Library(NAMESPACE, "FRAGMENT")
_library.define(EXPAND_LAID)


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
        chosen.expand_laid(flat, rows, b, *tables)(flat, flat, *outs, *outs[:1] * (MOST_SLICES - len(outs)))
    return outs


def _fake(
    both: Tensor, b: Tensor, row_slots: Tensor, order: Tensor, offsets: Tensor, starts: Tensor, ranks: Tensor,
    slices: Tensor | None, sizes: Sequence[int], bound: int, even: bool, lanes: int, backend: str,
) -> list[Tensor]:  # fmt: skip
    return [both.new_empty(both.shape[0], both.shape[1], size) for size in sizes]


_library.impl("lora_expand_laid", lora_expand_laid, "CompositeExplicitAutograd")
torch.library.register_fake(f"{NAMESPACE}::lora_expand_laid", _fake, lib=_library)
