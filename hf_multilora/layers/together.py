"""What one call of linears in one buffer computes: a matmul, and a kernel that adds the deltas."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from .rows import ONE
from .slots import dense
from .traced import expand_plainly

if TYPE_CHECKING:
    from .merged import Merged


class Product(NamedTuple):
    """What a gated MLP multiplies, of two members: act(output of member `piece`) * output of the other."""

    piece: int
    act: str


class Step(NamedTuple):
    """What calls have in common while rows, slots and layouts stay as they are: a decode step has hundreds.

    call: the stamp of the routing, shape and dtype of x, the product as asked for. weight [N + w * lanes, K], bias:
    what x is multiplied with. outs: shapes and strides of the outputs. launch: of the kernel, for what the matmul gives
    in `given`.
    """

    call: tuple[int, torch.Size, torch.dtype, Product | None]
    weight: Tensor
    bias: Tensor | None
    outs: list[tuple[tuple[int, ...], tuple[int, ...]]]
    given: torch.dtype
    launch: Callable[[Tensor, list[Tensor]], None]

    def again(self, x: Tensor) -> list[Tensor | None] | None:
        """As `run` for a call like the last one; None where autocast began or ended since. A decode step without
        a CUDA graph waits for the host here, so it is written out."""
        both = F.linear(x.contiguous(), self.weight, self.bias)
        if both.dtype is not self.given:
            return None
        outs = [both.new_empty_strided(*out) for out in self.outs]  # a third less of the host than new_empty
        self.launch(both, outs)
        return outs  # type: ignore[return-value]


def run(merged: Merged, x: Tensor, product: Product | None = None) -> list[Tensor | None] | None:
    """The members' outputs for x, in some member of which rows have an adapter, or with `product` the one made of them;
    None where each is computed better alone."""
    lead, path = merged.lead()
    backend, layout, routing, joint = lead.backend, lead.layout, lead.routing, merged.joint
    assert layout is not None and joint is not None
    kernels = backend.expand_laid is not None
    if not kernels and (product is not None or path == ONE):
        return None
    if path == ONE:
        assert routing.uniform is not None
        rows, table = x.reshape(1, -1, x.shape[-1]), layout.alone(routing.uniform)
    else:
        assert layout.table is not None
        rows, table = routing.align(x, layout.closed.shape[0], lead.name, flat=lead.flat), layout.table
    capturing = routing.capturing  # then the whole pool: what is loaded later must be there
    weight, bias = (merged.buffer, merged.bias_buffer) if capturing else merged.used
    width = (weight.shape[0] - merged.n) // merged.lanes if capturing else merged.width
    many = not dense(backend.name, rows.shape[0] * rows.shape[1], width, merged.buffer.is_cuda)
    bound = joint.most if capturing else joint.bound
    shapes = [(*x.shape[:-1], size) for size in (merged.sizes if product is None else merged.sizes[:1])]
    gradients = torch.is_grad_enabled() and rows.requires_grad
    if gradients or not kernels:
        if many or path == ONE or product is not None:
            return None
        own = [None if slots.layout is None else slots.covered()[1:] for _, slots in merged.members]
        found = expand_plainly(F.linear(rows, weight, bias), merged.sizes, merged.lanes, own)
        return [out.view(shape) for out, shape in zip(found, shapes, strict=True)]
    tables = table.order, table.offsets, joint.starts, joint.ranks
    if not many and rows.numel():
        both = F.linear(x.contiguous(), weight, bias)  # else it would be a matmul for each row
        given = both.view(-1, both.shape[-1]), rows.shape[0], merged.b, table.row_slots, *tables
        if product is None:
            launch = backend.expand_laid(*given, merged.slices, merged.n, bound, merged.even, merged.lanes)  # type: ignore[misc]
        else:
            launch = backend.gated_laid(*given, merged.places[1], merged.n, bound, *product, merged.lanes)  # type: ignore[misc]
        call, outs = (routing.stamp, x.shape, x.dtype, product), [both.new_empty(shape) for shape in shapes]
        like = [(shape, out.stride()) for shape, out in zip(shapes, outs, strict=True)]
        merged.step = Step(call, weight, bias, like, both.dtype, launch)
        launch(both, outs)
        return outs  # type: ignore[return-value]
    y = F.linear(rows, *merged.weights)
    outs = [y.new_empty(shape) for shape in shapes]
    if y.numel():
        a = merged.buffer[merged.n :]
        of_h = (table.order, table.offsets, joint.starts[:1], joint.ranks[:1]) if merged.one_a else tables
        h = backend.shrink(rows.to(a.dtype), a, *of_h, bound, early=True)
        if product is None:
            rest = merged.slices, merged.even, merged.lanes
            backend.expand_parts(y, h, outs, merged.b, table.row_slots, *tables, *rest)  # type: ignore[misc]
        else:
            last = merged.places[1], *product, merged.lanes
            backend.gated_parts(y, h, *outs, merged.b, table.row_slots, *tables, *last)  # type: ignore[misc]
    return outs  # type: ignore[return-value]
