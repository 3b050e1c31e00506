"""The part of a sharded linear that a process has, as a linear of its own.

Inside the parallel forward of its instance a sharded linear is an ordinary one: x, W and y are this process's part.
That linear is made here, with the DTensor's own memory for its weight, and adapted as any other, so that those of one
input are laid in one buffer. Nothing but the instance's forward is changed of the module that the base holds.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..cuts import is_distributed
from ..parallel import OUTER, PART, WHOLE, Installed, installed
from ..routing import RoutingError
from .base import AdaptedLayer, slots_of
from .plain import without_hooks

# Attributes of the module: its part, and the same where a call of it is one of the module
LOCAL, ALIKE = "_multilora_local", "_multilora_alike"


def local_of(module: Any) -> nn.Linear | None:
    """This process's part of a linear, with the memory of the DTensors; None where it is computed in another way."""
    weight = module._parameters.get("weight")
    if type(module).forward is not nn.Linear.forward or weight is None or not is_distributed(weight):
        return None
    if not weight.is_floating_point() or type(weight._local_tensor) is not Tensor:
        return None
    out, inner = weight._local_tensor.shape
    if not out or not inner:  # more processes than there are rows or columns
        return None
    bias = module._parameters.get("bias")
    # of a row-parallel linear the bias comes after the sum
    here = bias is not None and is_distributed(bias) and not all(p.is_replicate() for p in bias.placements)
    local = nn.Linear(inner, out, bias=here, device="meta", dtype=weight.dtype)
    follow(module, local)
    return local.eval()


def follow(module: nn.Module, local: nn.Module) -> None:
    """Let the part have the memory that the module's DTensors have: at each call, as nothing else tells of another."""
    for name, own in local._parameters.items():
        whole: Any = module._parameters[name]
        if own is not None and (own.is_meta or own.data_ptr() != whole._local_tensor.data_ptr()):
            with torch.inference_mode(False):
                setattr(local, name, nn.Parameter(whole._local_tensor, requires_grad=False))


def lead(module: nn.Module, local: nn.Module) -> None:
    """Let the module's DTensors have the memory where the part was laid."""
    for name, own in local._parameters.items():
        whole: Any = module._parameters[name]
        if own is not None and whole._local_tensor.data_ptr() != own.data_ptr():
            whole._local_tensor = own.data


def enclose(module: nn.Module, local: nn.Module | None) -> None:
    """Install the parallel forward anew, so that it calls the part; None: what the module's class became."""
    own = installed(module)
    assert own is not None
    module.__dict__[OUTER] = module.__dict__.pop("forward")
    if local is not None:
        module.__dict__[LOCAL] = local
        module.__dict__["forward"] = _with_gradients(module, local)
        if (own.boundary.x, own.boundary.y) == (WHOLE, PART):
            module.__dict__[ALIKE] = local
    own.style.install_forward(module, own.mesh)
    if local is not None:
        module.__dict__["forward"] = _around(module, local, own, module.__dict__["forward"])


def disclose(module: nn.Module) -> None:
    """Give the module the parallel forward that it had."""
    module.__dict__.pop(LOCAL, None)
    module.__dict__.pop(ALIKE, None)
    if OUTER in module.__dict__:  # not so after an interrupt
        module.__dict__["forward"] = module.__dict__.pop(OUTER)


def part_of(module: nn.Module | None) -> nn.Module | None:
    """What a linear computes here: the module itself, or the part of one that is sharded by its outputs, which neither
    gathers nor sums. Hooks and gradients are the module's."""
    part: nn.Module | None = None if module is None else module.__dict__.get(ALIKE)
    if part is None or torch.is_grad_enabled() or not without_hooks(module):  # type: ignore[arg-type]
        return module
    if not torch.compiler.is_compiling():
        follow(module, part)  # type: ignore[arg-type]
    return part


def _around(module: nn.Module, local: nn.Module, own: Installed, with_gradients: Any) -> Any:
    """The parallel forward, whose module has local parameters already: a call, and what is traced of it, meets none of
    its DTensors."""
    before, after, mesh = own.style.transform_inputs_pre_forward, own.style.transform_output_post_forward, own.mesh

    def forward(*args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            return with_gradients(*args, **kwargs)
        if (
            not torch.compiler.is_compiling()
        ):  # a state dict may have been assigned, and calls of the base open no request
            follow(module, local)
        args, kwargs = before(module, args, kwargs, mesh)
        return after(module, local(*args, **kwargs), mesh)

    return forward


def _with_gradients(module: Any, local: Any) -> Any:
    """Inside the parallel forward, where the base computes with DTensors."""

    def forward(x: Any) -> Any:
        require_local(local._lora)
        return nn.Linear.forward(module, x)

    return forward


def require_local(slots: Any) -> None:
    """Raises RoutingError where rows of the call have adapters here, whose input is no local tensor."""
    if slots.path():
        raise RoutingError(
            f"{slots.name}: a sharded base must be called under torch.no_grad() where rows have adapters, its parts "
            f"are no local tensors otherwise; call the model itself, which sees to it"
        )


def require_unshared(module: nn.Module, name: str) -> None:
    """Raises ValueError where another model has adapted the part of the module."""
    local = module.__dict__.get(LOCAL)
    if OUTER in module.__dict__ and isinstance(local or module, AdaptedLayer):
        other = next(slots_of(local or module))
        raise ValueError(
            f"{name}: no other MultiLoRAModel may have adapted it, one that shares it has (as {other.name}); unpatch() "
            f"that one first"
        )
