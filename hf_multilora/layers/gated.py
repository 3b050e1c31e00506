"""Gated MLPs, down(act(gate(x)) * up(x)): what comes before `down` is one matmul and one kernel.

The MLP is given a class that mixes `GatedLayer` into its own, whose `forward` asks for the product first and else runs
the one of the class: batches without adapters, traced code, gradients, hooks on gate, up or act, other backends.
"""

from __future__ import annotations

import functools
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

from ..gates import Gate, activation_of
from ..routing import Routing
from .base import state_of
from .local import part_of
from .plain import plain_call
from .slots import ModuleSlots
from .together import Product
from .traced import product_traced

NAMES, ROUTING = "_gated", "_gated_routing"  # of the MLP; the first as traced code reads it, see traced.py


class GatedLayer:
    """Mixed in front of the class of a gated MLP."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle and deepcopy through the class it is mixed into: the mixed one has no import path of its own."""
        return _rebuild, (type(self).__bases__[-1],), state_of(self)


def _rebuild(own: type) -> Any:
    mixed: Any = _mixed(own)
    return mixed.__new__(mixed)


def _mixed(own: Any) -> type:
    return _mix(own, own.forward, own.forward.__code__)


@functools.cache
def _mix(own: Any, read: Any, code: Any) -> type:
    """Under the name and module of `own`. read, code: its `forward`, whose source was read; another one that it gets
    later, as kernel packages give classes, is what runs."""

    @functools.wraps(read)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        names = self.__dict__.get(NAMES)
        if names is None or (not torch.compiler.is_compiling() and self.__dict__[ROUTING].idle):
            return own.forward(self, *args, **kwargs)
        known = own.forward is read and read.__code__ is code
        if known and len(args) == 1 and not kwargs and isinstance(args[0], Tensor):
            found = product(self, names, args[0])
            if found is not None:
                return self._modules[names["down"]](found)
        return own.forward(self, *args, **kwargs)

    body = {"__module__": own.__module__, "__qualname__": own.__qualname__, "_mixed": True, "forward": forward}
    return type(own.__name__, (GatedLayer, own), body)


def product(module: nn.Module, names: dict[str, str], x: Tensor) -> Tensor | None:
    """act(gate(x)) * up(x) [..., n] of x [..., K]; None where the children must be called for it."""
    modules, own = module._modules, module.__dict__
    gate_name, up_name, act_name, down_name = names.values()
    gate, up, act = (
        part_of(modules.get(gate_name)),
        part_of(modules.get(up_name)),
        own.get(act_name, modules.get(act_name)),
    )
    if gate_name in own or up_name in own or down_name in own or modules.get(down_name) is None:
        return None
    if gate is None or up is None or not (_lora_alone(gate) and _lora_alone(up)):
        return None
    kind = None if isinstance(act, nn.Module) and not plain_call(act) else activation_of(act)
    if kind is None:
        return None
    if torch.compiler.is_compiling():
        return product_traced(gate, up, x, kind)
    slots: ModuleSlots = gate.__dict__["_lora"]
    merged, index = slots.merged, slots.index
    if merged is None or up.__dict__["_lora"].merged is not merged:
        return None
    members = merged.members
    if len(members) != 2 or members[index][0] is not gate or members[1 - index][0] is not up:
        return None
    return merged.product(x, Product(index, kind))


def _lora_alone(module: nn.Module) -> bool:
    """Whether LoRA is all that adapters change of a linear."""
    own = module.__dict__
    return "_lora" in own and "_saved" not in own and "_tokens" not in own


def follow(module: nn.Module, gate: Gate, routing: Routing) -> None:
    """Compute the MLP as one from now on. gate: as `gate_of` gives it."""
    own: Any = type(module)
    module.__dict__[NAMES], module.__dict__[ROUTING] = asdict(gate), routing
    module.__class__ = _mixed(own)


def unfollow(module: nn.Module) -> None:
    """Give the MLP its class back, if it was taken."""
    module.__dict__.pop(ROUTING, None)
    if module.__dict__.pop(NAMES, None) is not None and isinstance(module, GatedLayer):
        cls = type(module)
        if "_mixed" in cls.__dict__:  # else somebody has changed it since, and what is below does nothing any more
            module.__class__ = cls.__bases__[-1]
