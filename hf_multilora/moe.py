"""Experts and routers of a mixture-of-experts model, as an adapter sees them."""

from __future__ import annotations

import re
from typing import Any

from torch import Tensor, nn

from .cuts import cuts_of
from .formats import ExpertsShape, ModuleShape, Projection
from .patches.experts import PARAMETERS, REFUSED, Held
from .sources import source_of

ROUTER = re.compile(r"Router|TopK|Gate")
# what a router's forward does with its weight; other uses cannot be followed
LINEAR_USE = re.compile(r"linear\([^#]{0,200}self\.weight|super\(\)\.forward\(")
# the attributes that Transformers' decorator gives to a class of its experts interface
INTERFACE = ("config", "has_gate", "has_bias", "is_transposed", "num_experts")


def experts_of(module: Any) -> ModuleShape | None:
    """The shape of a module that holds the weights of many experts and can be followed, None for any other."""
    if type(module).__name__ in REFUSED:
        return ModuleShape("experts", refused=REFUSED[type(module).__name__])
    if type(module).__name__ in PARAMETERS:
        return _outside(module, PARAMETERS[type(module).__name__])
    if not hasattr(type(module).forward, "__wrapped__") or not all(hasattr(module, name) for name in INTERFACE):
        return None
    first = "gate_up_proj" if module.has_gate else "up_proj"
    parameters = {name: tensor for name, tensor in module._parameters.items() if tensor is not None}
    refused = _refusal(module, first)
    if refused is not None:
        return ModuleShape("experts", refused=refused)
    projections: dict[str, Projection] = {}
    for name in (first, "down_proj"):
        _, out, inner = parameters[name].shape
        if module.is_transposed:
            out, inner = inner, out
        projections[name] = Projection(name, inner, out)
        if module.has_bias:
            projections[f"{name}_bias"] = Projection(f"{name}_bias", 1, out)
    if module.has_gate and module.is_concatenated:
        projections |= _halves(projections[first])
    count = parameters[first].shape[0]  # of all processes, num_experts are of this one
    shape = ExpertsShape(count, projections, tuple(parameters), bool(module.is_transposed))
    return ModuleShape("experts", experts=shape)


def _halves(both: Projection) -> dict[str, Projection]:
    """Gate and up of a projection that holds one after the other."""
    half = both.out_features // 2
    return {
        "gate_proj": Projection(both.parameter, both.in_features, half),
        "up_proj": Projection(both.parameter, both.in_features, half, first=half),
    }


def _outside(module: nn.Module, held: Held) -> ModuleShape:
    projections = dict[str, Projection]()
    for name in held.parameters:
        tensor = module._parameters.get(name)
        if not isinstance(tensor, Tensor) or tensor.dim() != 3 or not tensor.is_floating_point():
            return ModuleShape("experts", refused=f"its {name} is no plain parameter with one entry per expert")
        count, out, inner = tensor.shape
        projections[name] = Projection(name, out, inner) if held.transposed else Projection(name, inner, out)
    if "gate_up_proj" in projections:
        projections |= _halves(projections["gate_up_proj"])
    shape = ExpertsShape(count, projections, tuple(module._parameters), held.transposed, told=False)
    return ModuleShape("experts", experts=shape)


def _refusal(module: Any, first: str) -> str | None:
    """Why the experts cannot be adapted."""
    for name in (first, "down_proj", *((f"{first}_bias", "down_proj_bias") if module.has_bias else ())):
        tensor = module._parameters.get(name)
        dims = 2 if name.endswith("_bias") else 3
        if not isinstance(tensor, Tensor) or tensor.dim() != dims or not tensor.is_floating_point():
            return f"its {name} is no plain parameter with one entry per expert"
        if tensor.dtype.itemsize == 1:
            return f"its {name} is quantized ({tensor.dtype})"
        own = cuts_of(tensor).get(0)
        count = tensor.shape[0] if own is None else own.size
        if count != module.num_experts:
            return f"its {name} holds {count} experts, num_experts is {module.num_experts}"
    return None


def router_of(module: nn.Module) -> ModuleShape | None:
    """The shape of a router that multiplies with its own weight, None for any other module."""
    if not ROUTER.search(type(module).__name__):
        return None
    weight = module._parameters.get("weight")
    if not isinstance(weight, Tensor) or weight.dim() != 2 or not weight.is_floating_point():
        return None
    forward: Any = type(module).forward  # which an adapted router's class inherits
    known = LINEAR_USE.search(source_of(forward)) is not None
    refused = None if known else f"the forward of {type(module).__name__} cannot be followed"
    return ModuleShape("router", weight.shape[1], weight.shape[0], refused, weight=weight)
