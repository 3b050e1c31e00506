"""Linears in one buffer in traced code, and their expand where it has gradients or no kernel: plain torch.

Dynamo checks before every call whatever traced code has read. It skips a module, and all below it, whose attributes are
still the same objects and of which nothing was read but tensors, numbers, strings and dicts of these; and it compares
other objects that several modules share one by one, in Python: of a model with many layers that takes longer than the
rest of a call. So all that this code reads of a linear is in one dict that `tell` puts into it, and what all linears
share is read from the routing alone, see `routing_of`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..kernels import ops_laid  # noqa: F401 (registers the operations)
from ..kernels.backends import TORCH, TRITON
from ..kernels.torch_backend import expand_gated
from ..routing import Routing
from .plain import any_global_hook
from .slots import dense

if TYPE_CHECKING:
    from .merged import Merged

ATTRIBUTE = "_traced"  # of a linear in a buffer

# name: of the linear, for errors only: what is checked must be alike in all layers, so that one trace can serve them.
# numbers: the linear's place among those of the buffer, flat, their names in their parent, the backend's name, that
# of the joint, lanes, even, whether there is a bias, and of each linear its columns and its place in b.
# weight [N + w * lanes, K], bias: of the occupied prefix; all_weight, all_bias: of the whole pool. b, slices: as
# `Merged` has them
Told = dict[str, Any]


def tell(merged: Merged) -> None:
    """Put what traced code reads into the modules of a buffer; nothing where it computes each linear alone."""
    facts = _facts(merged)
    for index, (module, slots) in enumerate(merged.members):
        if slots.merged is not merged:  # it is elsewhere, or not here yet
            continue
        if facts is None:
            module.__dict__.pop(ATTRIBUTE, None)
            continue
        numbers, tensors = facts
        own = {"name": slots.name, "numbers": f"{index},{int(slots.flat)},{numbers}"}
        module.__dict__[ATTRIBUTE] = own | tensors


def untell(merged: Merged) -> None:
    """What was told holds no longer."""
    for module, slots in merged.members:
        if slots.merged is merged:
            module.__dict__.pop(ATTRIBUTE, None)


def _facts(merged: Merged) -> tuple[str, Told] | None:
    joint, leads, (weight, bias) = merged.joint_name, merged.leads, merged.used
    if not merged.whole or not joint or not leads or not all(slots.mixable for slots in leads):
        return None
    if not all(map(merged.lies, range(len(merged.members)))):
        return None
    backend = leads[0].backend.name
    if backend not in (TORCH, TRITON):
        return None
    numbers = [merged.lanes, int(merged.even), int(bias is not None)]
    for row in zip(merged.sizes, merged.places, strict=False):
        numbers += row
    tensors = {
        "weight": weight, "bias": bias, "all_weight": merged.buffer, "all_bias": merged.bias_buffer, "b": merged.b,
        "slices": merged.slices,
    }  # fmt: skip
    names = [slots.name.rpartition(".")[2] for _, slots in merged.members]
    return ",".join(map(str, ("|".join(names) if len(names) > 1 else "", backend, joint, *numbers))), tensors


def routing_of(module: Any) -> Routing:
    """In traced code. Where the trace began at an entry point of the model, the routing is one that it has read there,
    with all checks, so here it is taken as a constant; else by the linear's rank rows."""
    known = module._multilora_routing()
    own: Routing = module.__dict__["_lora"].routing if known is None else known()
    return own


def compute_traced(module: Any, x: Tensor) -> Tensor | None:
    """`Merged.compute` in traced code. In an open request the mix is data, so that one graph serves every mix.

    The identity of x must do, as versions cannot be read: `siblings_of` has seen to it that nothing visible changes x
    between the calls of siblings. A member with hooks may, so what was computed for those after it is dropped.
    """
    told: Told | None = module.__dict__.get(ATTRIBUTE)
    if told is None:
        return None
    routing = routing_of(module)
    if not routing.open:
        return None
    shared = routing.shared
    if not _plain(module):
        routing.shared = None
        return None
    index, buffer = int(told["numbers"].split(",")[0]), module._multilora_buffer()
    if shared is not None and shared[0] == buffer and shared[1] is x and not shared[4]:
        outs = shared[5]
        if outs[index] is not None and shared[2] == modes(x):
            own: Tensor = outs[index]
            outs[index] = None
            if all(other is None for other in outs):
                routing.shared = None  # else the graph would keep the outputs
            return own
    found = _run(told, routing, x)
    if found is None or len(found) == 1:
        return None if found is None else found[0]
    rest: list[Tensor | None] = [None] * (index + 1)  # what its code calls before it may come after a change
    rest += found[index + 1 :]
    if index + 1 < len(found):
        routing.shared = buffer, x, modes(x), None, [], rest
    return found[index]


def _plain(module: nn.Module) -> bool:
    """Whether the buffer may stand for the module: no hook is left out, nor a gradient of its weight or bias. Hooks as
    attributes, which Dynamo does not check at each call."""
    hooks = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    if hooks or "forward" in module.__dict__ or any_global_hook():
        return False
    parameters = module.__dict__["_parameters"].values() if torch.is_grad_enabled() else ()
    return not any(parameter is not None and parameter.requires_grad for parameter in parameters)


def product_traced(gate: Any, up: Any, x: Tensor, act: str) -> Tensor | None:
    """`Merged.product` in traced code, of two linears that are alone in one buffer."""
    own, other = gate.__dict__.get(ATTRIBUTE), up.__dict__.get(ATTRIBUTE)
    if own is None or other is None or gate is up:
        return None
    names, others = (told["numbers"].split(",")[2] for told in (own, other))
    if names != others or gate._multilora_buffer() != up._multilora_buffer():
        return None
    routing = routing_of(gate)
    if not routing.open or not (_plain(gate) and _plain(up)):
        return None
    found = _run(own, routing, x, act)
    return None if found is None else found[0]


def _run(told: Told, routing: Routing, x: Tensor, act: str | None = None) -> list[Tensor] | None:
    """As `together.run`; act: the product of a gated MLP, whose gate is the linear. Kernels as operations of their own
    at any number of tokens: what Inductor made of the same in plain torch took longer for 8 tokens, as a sum over the
    ranks and as products added one by one, and up to four times as long to compile."""
    own, flat, _, backend, name, *rest = told["numbers"].split(",")
    lanes, even, biased, *pairs = [int(number) for number in rest]
    joint, sizes, places = getattr(routing.joints, name), pairs[::2], pairs[1::2]
    table = joint.first.table
    assert table is not None
    n = sum(sizes)
    rows = routing.align(x, table.row_slots.shape[0], told["name"], flat=bool(int(flat)))
    capturing = routing.capturing  # then the whole pool: what is loaded later must be there
    # what is None is not read: that would be checked too
    prefix = "all_" if capturing else ""
    weight, bias = told[prefix + "weight"], told[prefix + "bias"] if biased else None
    plain = backend == TORCH or (torch.is_grad_enabled() and rows.requires_grad)
    few = dense(backend, rows.shape[0] * rows.shape[1], (weight.shape[0] - n) // lanes, weight.is_cuda)
    if not few or (act is not None and (plain or len(sizes) != 2)):
        return None
    both = F.linear(rows, weight, bias)
    if plain:
        flat_b = told["b"]
        covered = [None if one is None else (one.shut if capturing else one.closed) for one in joint.layouts]
        outs = expand_plainly(both, sizes, lanes, [
            None if closed is None else (flat_b[place : place + closed.shape[1] * size].view(-1, size), closed)
            for closed, size, place in zip(covered, sizes, places, strict=True)
        ])  # fmt: skip
        return [out.view(*x.shape[:-1], size) for out, size in zip(outs, sizes, strict=True)]
    tables = table.row_slots, table.order, table.offsets, joint.starts, joint.ranks
    bound = joint.most if capturing else joint.bound
    if act is not None:
        of_product = places[1], n, bound, int(own), act, lanes, backend
        out: Tensor = torch.ops.hf_multilora.lora_gated_laid(both, told["b"], *tables, *of_product)
        return [out.view(*x.shape[:-1], sizes[0])]
    slices = told["slices"] if len(sizes) > 1 else None
    how = slices, sizes, bound, bool(even), lanes, backend
    outs = torch.ops.hf_multilora.lora_expand_laid(both, told["b"], *tables, *how)
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
