"""The augmented weight: one buffer [W ; A], so that one matmul gives `W x` and every `A x`.

Linears that one input feeds share a buffer: see merged.py.

`weight.data` becomes a view of the buffer: the same Parameter, so tying, names and optimizers' references hold.
`prepare` lays weights when a request opens, and none moves while it is open: a traced or captured call keeps their
addresses. Whoever replaces the data (`.to`, `load_state_dict(assign=True)`, an assignment) is noticed by the address:
calls go without the buffer until the next request lays the weight anew. The buffer is no registered buffer, and
`state_dict` exports clones.

`slots.laid` says that A and B lie in the buffers too. Where they went elsewhere (the pool grew), `laid` is False and
the buffer is kept until the weight is laid anew or leaves it: while the weight lies in it, copies must not carry its
other rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..kernels.backends import MOST_SLICES
from .merged import Merged
from .one_a import has_one_a
from .plain import can_lay, plain_call
from .slots import ModuleSlots
from .traced import ATTRIBUTE

WASTED = 8  # computations for siblings that did not ask, after which each is computed alone
Member = tuple[nn.Module, ModuleSlots]


def lies(module: nn.Module, slots: ModuleSlots) -> bool:
    """Whether weight and bias lie in the buffers."""
    return slots.merged is not None and slots.merged.lies(slots.index)


def is_laid(module: nn.Module, slots: ModuleSlots) -> bool:
    """Whether weight, bias and rank rows all lie in the buffers."""
    return slots.laid and lies(module, slots)


def lay(members: Sequence[Member]) -> None:
    """Move the weights, biases and rank rows of linears into buffers that they share. Peak extra memory: these."""
    weights = [module._parameters["weight"] for module, _ in members]
    biases = [module._parameters.get("bias") for module, _ in members]
    one_a, rows = has_one_a(members), max(slots.rows.capacity for _, slots in members)
    lanes = 1 if one_a else len(members)
    n, k = sum(slots.out_features for _, slots in members), members[0][1].in_features
    size_b = sum(slots.rows.capacity * slots.out_features for _, slots in members)
    with torch.inference_mode(False), torch.no_grad():
        first = weights[0]
        assert first is not None
        buffer = torch.empty(n + rows * lanes, k, dtype=first.dtype, device=first.device)
        b = torch.empty(size_b, dtype=first.dtype, device=first.device)
        bias = None
        if any(one is not None for one in biases):
            bias = torch.zeros(n + rows * lanes, dtype=first.dtype, device=first.device)
        buffer[n:].zero_()
        merged = Merged(members, buffer, bias, b, one_a)
        for i, (_, slots) in enumerate(members):
            own, own_bias = weights[i], biases[i]
            assert own is not None
            span, capacity = slice(merged.edges[i], merged.edges[i + 1]), slots.rows.capacity
            own_a = buffer[n + (0 if one_a else i) :: lanes][:capacity]
            own_b = b[merged.places[i] : merged.places[i + 1]].view(capacity, slots.out_features)
            buffer[span], own_a[:], own_b[:] = own, slots.a, slots.b
            old, place = slots.merged, slots.index
            members[i][0].__dict__.pop(ATTRIBUTE, None)
            slots.disturb()
            merged.before[i] = None if old is None else (old, place)
            slots.a, slots.b, slots.laid, slots.merged, slots.index = own_a, own_b, True, merged, i
            own.data = buffer[span]
            if own_bias is not None:
                assert bias is not None
                bias[span] = own_bias
                own_bias.data = bias[span]
            merged.forget(i)
    for _, slots in members:
        slots.look()


def unlay(module: nn.Module, slots: ModuleSlots) -> None:
    """Give weight, bias and rank rows storage of their own again."""
    merged = slots.merged
    module.__dict__.pop(ATTRIBUTE, None)
    slots.disturb()
    with torch.inference_mode(False), torch.no_grad():
        at = None if merged is None else (merged, slots.index)
        while at is not None:  # an interrupt may have left it in the buffer of before
            for name, buffer in (("weight", at[0].buffer), ("bias", at[0].bias_buffer)):
                parameter = module._parameters.get(name)
                if parameter is not None and _within(parameter, buffer):
                    parameter.data = parameter.data.clone()
            at = at[0].before[at[1]]
        if slots.laid:
            slots.a, slots.b = slots.a.clone(memory_format=torch.contiguous_format), slots.b.clone()
    slots.laid = False
    if merged is not None:
        merged.leave(slots.index)
    slots.merged = None
    slots.look()


def _within(parameter: Tensor, buffer: Tensor | None) -> bool:
    """Whether the parameter lies in the buffer."""
    return buffer is not None and parameter.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()


def settle(module: nn.Module, slots: ModuleSlots) -> None:
    """Let go of a buffer that weight or bias has left."""
    if slots.merged is not None and not lies(module, slots):
        unlay(module, slots)


def prepare(members: Sequence[Member]) -> bool:
    """Before a request: lay what can be laid of linears that are thought to get one input, so that no weight moves
    while calls are traced or captured. Returns whether something was, or buffers lack their tables."""
    if _rests(members):
        return False
    for module, slots in members:
        if not slots.looked:
            slots.look()
        settle(module, slots)
    if all(slots.layout is None for _, slots in members):
        return False
    able: dict[tuple[Any, ...], list[Member]] = {}
    for module, slots in members:
        if plain_call(module) and can_lay(module, slots):
            able.setdefault((slots.in_features, slots.a.dtype, slots.a.device), []).append((module, slots))
    done = False
    for alike in able.values():
        merged = alike[0][1].merged
        wasteful = merged is not None and len(merged.members) > 1 and merged.wasted > WASTED
        if wasteful or any(slots.alone for _, slots in alike):
            for _, slots in alike:
                slots.alone = True
        size = 1 if alike[0][1].alone else MOST_SLICES
        for part in [alike[i : i + size] for i in range(0, len(alike), size)]:
            merged = part[0][1].merged
            if merged is None or not merged.whole or merged.members != tuple(part):
                lay(part)
                done = True
            elif merged.joint is None and merged.leads:  # an error came before they were made
                done = True
    for module, slots in members:
        if slots.merged is not None and not slots.merged.whole:  # it would hold the weights of those that went
            unlay(module, slots)
            done = True
    return done


def _rests(members: Sequence[Member]) -> bool:
    """Whether they are in one buffer, ready for calls, as before nearly every request."""
    merged = members[0][1].merged
    if merged is None or not merged.whole or merged.joint is None or merged.wasted > WASTED:
        return False
    return len(members) == len(merged.members) and all(
        slots.merged is merged
        and slots.index == i
        and slots.looked
        and type(module).forward is nn.Linear.forward
        and plain_call(module)
        and merged.lies(i)
        for i, (module, slots) in enumerate(members)
    )


def without_buffers(state: Any, buffers: Iterable[Tensor | None]) -> Any:
    """Replace tensors of a state dict that lie in one of the buffers of weights with A by copies."""
    laid = {buffer.untyped_storage().data_ptr() for buffer in buffers if buffer is not None}
    for key, value in state.items():
        own = getattr(value, "_local_tensor", value)  # of a DTensor
        if isinstance(own, Tensor) and not own.is_meta and own.untyped_storage().data_ptr() in laid:
            state[key] = value.clone()
    return state
