"""The expand of linears in one buffer where it is traced, by registered operations, or has gradients: plain torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..kernels import ops_laid  # noqa: F401 (registers the operation)
from ..kernels.backends import Backend
from ..kernels.torch_backend import expand_gated
from ..pool import RowTables

if TYPE_CHECKING:
    from .joint import Joint
    from .merged import Merged
    from .together import Product


def expand_traced(merged: Merged, both: Tensor, table: RowTables, joint: Joint, backend: Backend) -> list[Tensor]:
    """Of both = [y | h], [R, T, N + w * lanes], the output [R, T, n] of each member; for kernels, without gradients.

    An operation of its own at any number of tokens: what Inductor made of the same in plain torch took longer for 8
    tokens, as a sum over the ranks and as products added one by one, and up to four times as long to compile.
    """
    tables = table.row_slots, table.order, table.offsets, joint.starts, joint.ranks, merged.slices
    rest = merged.sizes, joint.bound, merged.even, merged.lanes, backend.name
    outs: list[Tensor] = torch.ops.hf_multilora.lora_expand_laid(both, merged.b, *tables, *rest)
    return outs


def gated_traced(
    merged: Merged, both: Tensor, table: RowTables, joint: Joint, backend: Backend, product: Product
) -> Tensor:
    """Of the same, act(gate) * up [R, T, N / 2] of the two members."""
    tables = table.row_slots, table.order, table.offsets, joint.starts, joint.ranks
    rest = merged.places[1], merged.n, joint.bound, product.piece, product.act, merged.lanes, backend.name
    out: Tensor = torch.ops.hf_multilora.lora_gated_laid(both, merged.b, *tables, *rest)
    return out


def expand_plainly(merged: Merged, both: Tensor) -> list[Tensor]:
    """As `expand_traced`, with the rank rows of all slots: with gradients, and for the torch backend. A member without
    rank rows keeps y."""
    outs, lanes = [], merged.lanes
    for i, (_, slots) in enumerate(merged.members):
        y = both[..., merged.edges[i] : merged.edges[i + 1]]
        if slots.layout is None:
            outs.append(y.contiguous())
            continue
        _, b, closed = slots.covered()
        h = both[..., merged.n + (i if lanes > 1 else 0) :: lanes]
        outs.append(expand_gated(y, h[..., : b.shape[0]], b, closed))
    return outs
