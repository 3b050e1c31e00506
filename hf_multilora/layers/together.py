"""What one call of linears in one buffer computes: a matmul, and a kernel that adds the deltas."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..kernels.backends import MOST_SLICES
from .rows import ONE
from .slots import dense_tokens
from .traced import expand_plainly, expand_traced, gated_traced

if TYPE_CHECKING:
    from .merged import Merged


class Product(NamedTuple):
    """What a gated MLP multiplies, of two members: act(output of member `piece`) * output of the other."""

    piece: int
    act: str


class Step(NamedTuple):
    """What calls have in common while rows, slots and layouts stay as they are: a decode step has hundreds.

    stamp: of the routing. shape, dtype: of x. product: as asked for. flat: x as a matrix. weight [K, N + w * lanes],
    bias: what it is multiplied with. outs: shapes of the outputs. more: how often the first of them is given to the
    kernel again, in places that it does not use. launch: of the kernel, for what the matmul gives in `given`.
    """

    stamp: int
    shape: torch.Size
    dtype: torch.dtype
    product: Product | None
    flat: tuple[int, int]
    weight: Tensor
    bias: Tensor | None
    outs: list[tuple[int, ...]]
    more: int
    given: torch.dtype
    launch: Callable[..., None]

    def fits(self, stamp: int, x: Tensor, product: Product | None) -> bool:
        return self.stamp == stamp and self.shape == x.shape and self.dtype == x.dtype and self.product == product


def run(
    merged: Merged, x: Tensor, step: Step | None = None, product: Product | None = None
) -> list[Tensor | None] | None:
    """The members' outputs for x, in some member of which rows have an adapter, or with `product` the one made of them;
    None where each is computed better alone. step: of a call like this one."""
    if step is not None:
        both = _both(x.view(step.flat) if x.is_contiguous() else x.reshape(step.flat), step.weight, step.bias)
        if both.dtype == step.given:  # else autocast began or ended
            return _finish(step, both)
    lead, path = merged.lead()
    backend, layout, routing, joint = lead.backend, lead.layout, lead.routing, merged.joint
    assert layout is not None and joint is not None
    tracing, kernels = torch.compiler.is_compiling(), backend.expand_laid is not None
    if (product is not None and not kernels) or (path == ONE and (tracing or not kernels)):
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
    many = rows.shape[0] * rows.shape[1] > dense_tokens(backend, width, merged.buffer.is_cuda)
    bound = joint.most if capturing else joint.bound
    shapes = [(*x.shape[:-1], size) for size in (merged.sizes if product is None else merged.sizes[:1])]
    gradients = torch.is_grad_enabled() and rows.requires_grad
    if tracing or gradients or not kernels:
        plain = gradients or not kernels
        if many or path == ONE or (product is not None and plain):
            return None
        both = F.linear(rows, weight, bias)
        if product is not None:
            return [gated_traced(merged, both, table, joint, backend, product).view(shapes[0])]
        found = expand_plainly(merged, both) if plain else expand_traced(merged, both, table, joint, backend)
        return [out.view(shape) for out, shape in zip(found, shapes, strict=True)]
    tables = table.order, table.offsets, joint.starts, joint.ranks
    more = MOST_SLICES - len(shapes) if product is None else 0
    if not many and rows.numel():
        flat, turned = rows.reshape(-1, rows.shape[2]), weight.t()
        both = _both(flat, turned, bias)
        given = both, rows.shape[0], merged.b, table.row_slots, *tables
        if product is None:
            launch = backend.expand_laid(*given, merged.slices, merged.n, bound, merged.even, merged.lanes)  # type: ignore[misc]
        else:
            launch = backend.gated_laid(*given, merged.places[1], merged.n, bound, *product, merged.lanes)  # type: ignore[misc]
        facts = (flat.shape, turned, bias, shapes, more, both.dtype, launch)
        merged.step = Step(routing.stamp, x.shape, x.dtype, product, *facts)  # type: ignore[arg-type]
        return _finish(merged.step, both)
    y = F.linear(rows, *merged.weights)
    outs = [y.new_empty(shape) for shape in shapes]
    if y.numel():
        a = merged.buffer[merged.n :]
        of_h = (table.order, table.offsets, joint.starts[:1], joint.ranks[:1]) if merged.one_a else tables
        h = backend.shrink(rows.to(a.dtype), a, *of_h, bound, early=True)
        if product is None:
            four, rest = [*outs, *outs[:1] * more], (merged.slices, merged.even, merged.lanes)
            backend.expand_parts(y, h, four, merged.b, *tables, *rest)  # type: ignore[misc]
        else:
            last = merged.places[1], *product, merged.lanes
            backend.gated_parts(y, h, *outs, merged.b, *tables, *last)  # type: ignore[misc]
    return outs  # type: ignore[return-value]


def _finish(step: Step, both: Tensor) -> list[Tensor | None]:
    outs = [both.new_empty(shape) for shape in step.outs]
    step.launch(both, both, *outs, *outs[:1] * step.more)
    return outs  # type: ignore[return-value]


def _both(flat: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """[y | h], [R * T, N + w * lanes], of x [R * T, K] and a weight [K, N + w * lanes]."""
    return torch.mm(flat, weight) if bias is None else torch.addmm(bias, flat, weight)
