"""Linears in one buffer in traced code, and their expand where it has gradients or no kernel: plain torch.

Dynamo checks before every call whatever traced code has read, and compares objects that several modules share one by
one, in Python: of a model with many layers that takes longer than the rest of a call. So this code reads of each buffer
one tuple, `Merged.told`, the numbers in it as one string, and what modules share through its `joint` alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..kernels import ops_laid  # noqa: F401 (registers the operations)
from ..kernels.backends import TORCH, TRITON
from ..kernels.torch_backend import expand_gated
from .joint import Joint
from .plain import any_global_hook
from .slots import ModuleSlots, dense

if TYPE_CHECKING:
    from .merged import Merged
    from .together import Product


# of a buffer: numbers, joint, weight [N + w * lanes, K] and bias of the occupied prefix, b and slices as `Merged` has
# them. In `numbers` the backend's name, lanes, even, whether there is a bias, and of each linear its columns and its
# place in b
Told = tuple[str, Joint, Tensor, Tensor | None, Tensor, Tensor | None]


def tell(merged: Merged) -> Told | None:
    """None where traced code computes each linear alone."""
    joint, leads, (weight, bias) = merged.joint, merged.leads, merged.used
    if not merged.whole or joint is None or not leads or not all(slots.mixable for slots in leads):
        return None
    if not all(map(merged.lies, range(len(merged.members)))):
        return None
    backend = leads[0].backend.name
    if backend not in (TORCH, TRITON):
        return None
    numbers = [merged.lanes, int(merged.even), int(bias is not None)]
    for row in zip(merged.sizes, merged.places, strict=False):
        numbers += row
    return " ".join(map(str, (backend, *numbers))), joint, weight, bias, merged.b, merged.slices


def compute_traced(merged: Merged, module: nn.Module, slots: ModuleSlots, x: Tensor) -> Tensor | None:
    """`Merged.compute` in traced code. In an open request the mix is data, so that one graph serves every mix.

    The identity of x must do, as versions cannot be read: `siblings_of` has seen to it that nothing visible changes x
    between the calls of siblings. A member with hooks may, so what was computed for those after it is dropped.
    """
    told = merged.told
    if told is None or not told[1].routing.open:
        return None
    routing = told[1].routing
    shared = routing.shared
    if not _plain(module):
        routing.shared = None
        return None
    if shared is not None and shared[0] is merged and shared[1] is x and not shared[4]:
        outs, index = shared[5], slots.index
        if outs[index] is not None and shared[2] == modes(x):
            own: Tensor = outs[index]
            outs[index] = None
            if all(other is None for other in outs):
                routing.shared = None  # else the graph would keep the outputs
            return own
    found = _run(merged, told, slots, x)
    if found is None or len(found) == 1:
        return None if found is None else found[0]
    index = slots.index
    rest: list[Tensor | None] = [None] * (index + 1)  # what its code calls before it may come after a change
    rest += found[index + 1 :]
    if index + 1 < len(found):
        routing.shared = merged, x, modes(x), None, [], rest
    return found[index]


def _plain(module: nn.Module) -> bool:
    """Whether the buffer may stand for the module: no hook is left out, nor a gradient of its weight or bias. Hooks as
    attributes, which Dynamo does not check at each call."""
    hooks = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    if hooks or "forward" in module.__dict__ or any_global_hook():
        return False
    parameters = module.__dict__["_parameters"].values() if torch.is_grad_enabled() else ()
    return not any(parameter is not None and parameter.requires_grad for parameter in parameters)


def product_traced(merged: Merged, gate: nn.Module, up: nn.Module, x: Tensor, product: Product) -> Tensor | None:
    """`Merged.product` in traced code."""
    told = merged.told
    if told is None or not told[1].routing.open or not (_plain(gate) and _plain(up)):
        return None
    found = _run(merged, told, gate.__dict__["_lora"], x, product)
    return None if found is None else found[0]


def _run(
    merged: Merged, told: Told, slots: ModuleSlots, x: Tensor, product: Product | None = None
) -> list[Tensor] | None:
    """As `together.run`. Kernels as operations of their own at any number of tokens: what Inductor made of the same in
    plain torch took longer for 8 tokens, as a sum over the ranks and as products added one by one, and up to four times
    as long to compile."""
    numbers, joint = told[:2]
    routing, table = joint.routing, joint.first.table
    assert table is not None
    backend, *rest = numbers.split()
    lanes, even, biased, *pairs = [int(number) for number in rest]
    sizes, places = pairs[::2], pairs[1::2]
    n = sum(sizes)
    rows = routing.align(x, table.row_slots.shape[0], slots.name, flat=slots.flat)
    capturing = routing.capturing  # then the whole pool: what is loaded later must be there
    # what is None is not read: that would be checked too
    weight, bias = (merged.buffer, merged.bias_buffer) if capturing else (told[2], told[3] if biased else None)
    plain = backend == TORCH or (torch.is_grad_enabled() and rows.requires_grad)
    few = dense(backend, rows.shape[0] * rows.shape[1], (weight.shape[0] - n) // lanes, weight.is_cuda)
    if not few or (product is not None and (plain or len(sizes) != 2)):
        return None
    both = F.linear(rows, weight, bias)
    if plain:
        flat = told[4]
        covered = [None if one is None else (one.shut if capturing else one.closed) for one in joint.layouts]
        outs = expand_plainly(both, sizes, lanes, [
            None if closed is None else (flat[place : place + closed.shape[1] * size].view(-1, size), closed)
            for closed, size, place in zip(covered, sizes, places, strict=True)
        ])  # fmt: skip
        return [out.view(*x.shape[:-1], size) for out, size in zip(outs, sizes, strict=True)]
    tables = table.row_slots, table.order, table.offsets, joint.starts, joint.ranks
    bound = joint.most if capturing else joint.bound
    if product is not None:
        of_product = places[1], n, bound, product.piece, product.act, lanes, backend
        out: Tensor = torch.ops.hf_multilora.lora_gated_laid(both, told[4], *tables, *of_product)
        return [out.view(*x.shape[:-1], sizes[0])]
    slices = told[5] if len(sizes) > 1 else None
    how = slices, sizes, bound, bool(even), lanes, backend
    outs = torch.ops.hf_multilora.lora_expand_laid(both, told[4], *tables, *how)
    return [out.view(*x.shape[:-1], size) for out, size in zip(outs, sizes, strict=True)]


def expand_plainly(
    both: Tensor, sizes: Sequence[int], lanes: int, own: Sequence[tuple[Tensor, Tensor] | None]
) -> list[Tensor]:
    """Of both = [y | h], [R, T, N + w * lanes], the output [R, T, n] of each member, with the rank rows of all slots.

    own: B [w, n] and `closed` [R, w] of each member; None without rank rows: it keeps y.
    """
    outs, low, n = [], 0, sum(sizes)
    for i, (size, one) in enumerate(zip(sizes, own, strict=True)):
        y = both[..., low : low + size]
        low += size
        if one is None:
            outs.append(y.contiguous())
            continue
        h = both[..., n + (i if lanes > 1 else 0) :: lanes]
        outs.append(expand_gated(y, h[..., : one[0].shape[0]], *one))
    return outs


def modes(x: Tensor) -> tuple[bool, object]:
    """Whether gradients are recorded, and the dtype of autocast, if it is on."""
    kind = x.device.type
    return torch.is_grad_enabled(), torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind)
