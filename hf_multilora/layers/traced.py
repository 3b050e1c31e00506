"""The expand of linears in one buffer where it is traced or has gradients: plain torch, or a registered operation."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..kernels import ops_laid  # noqa: F401 (registers the operation)
from ..kernels.backends import Backend
from ..kernels.torch_backend import expand_gated, expand_own
from ..pool import Layout, RowTables

if TYPE_CHECKING:
    from .joint import Joint
    from .merged import Merged

OWN_TOKENS = 16  # of a traced call up to which the compiler gets the expand in plain torch, with each row's rank rows


def expand_traced(merged: Merged, both: Tensor, table: RowTables, joint: Joint, backend: Backend) -> list[Tensor]:
    """Of both = [y | h], [R, T, N + w * lanes], the output [R, T, n] of each member; for kernels, without gradients."""
    if both.shape[0] * both.shape[1] > OWN_TOKENS:
        tables = table.row_slots, table.order, table.offsets, joint.starts, joint.ranks, merged.slices
        rest = merged.sizes, joint.bound, merged.even, merged.lanes, backend.name
        outs: list[Tensor] = torch.ops.hf_multilora.lora_expand_laid(both, merged.b, *tables, *rest)
        return outs
    base, slot = table.row_slots < 0, table.row_slots.clamp(min=0).long()

    def expand(layout: Layout, y: Tensor, h: Tensor, b: Tensor, closed: Tensor) -> Tensor:
        ranks = layout.ranks[0][slot].masked_fill(base, 0)
        return expand_own(y, h, b, layout.starts[0][slot], ranks, layout.no_rows.shape[1])

    return _of_each(merged, both, expand)


def expand_plainly(merged: Merged, both: Tensor) -> list[Tensor]:
    """As `expand_traced`, with the rank rows of all slots: with gradients, and for the torch backend."""
    return _of_each(merged, both, lambda layout, y, h, b, closed: expand_gated(y, h, b, closed))


def _of_each(
    merged: Merged, both: Tensor, expand: Callable[[Layout, Tensor, Tensor, Tensor, Tensor], Tensor]
) -> list[Tensor]:
    """expand: of a member with its layout, y [R, T, n], h [R, T, w], B [w, n] and closed [R, w]; one without rank rows
    keeps y."""
    outs, lanes = [], merged.lanes
    for i, (_, slots) in enumerate(merged.members):
        y = both[..., merged.edges[i] : merged.edges[i + 1]]
        if slots.layout is None:
            outs.append(y.contiguous())
            continue
        _, b, closed = slots.covered()
        h = both[..., merged.n + (i if lanes > 1 else 0) :: lanes]
        outs.append(expand(slots.layout, y, h[..., : b.shape[0]], b, closed))
    return outs
