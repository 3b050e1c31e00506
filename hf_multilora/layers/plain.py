"""Which modules may be computed without calling them: what is asked before a weight is laid, and at each call."""

from __future__ import annotations

from torch import nn
from torch.nn.modules import module as nn_module

from .slots import ModuleSlots


def can_lay(module: nn.Module, slots: ModuleSlots) -> bool:
    """Whether the module's weight may be moved into a buffer: plain, dense, its own, and of A's dtype and device."""
    weight = module._parameters.get("weight")
    return (
        not slots.tied
        and isinstance(module, nn.Linear)
        and type(module).forward is nn.Linear.forward
        and own_class(module).__call__ is nn.Module.__call__
        and type(weight) is nn.Parameter
        and not (weight.is_meta or weight.is_inference())
        and weight.dtype == slots.a.dtype
        and weight.device == slots.a.device
        and weight.is_floating_point()
        and weight.is_contiguous()
        and tuple(weight.shape) == (slots.out_features, slots.in_features)
        and (module.bias is None or _goes_with(module.bias, weight))
    )


def own_class(module: nn.Module) -> type:
    """The class that layers are mixed into."""
    cls = type(module)
    return cls.__bases__[-1] if "_mixed" in cls.__dict__ else cls


def _goes_with(bias: object, weight: nn.Parameter) -> bool:
    return type(bias) is nn.Parameter and bias.dtype == weight.dtype and bias.device == weight.device


def plain_call(module: nn.Module) -> bool:
    """Whether calling the module is calling its class's forward: no hook and no instance forward is left out."""
    return "forward" not in module.__dict__ and without_hooks(module)


def without_hooks(module: nn.Module) -> bool:
    """Whether calls of the module run no hook."""
    own = module.__dict__
    return not (
        own["_forward_hooks"]
        or own["_forward_pre_hooks"]
        or own["_backward_hooks"]
        or own["_backward_pre_hooks"]
        or any_global_hook()
    )


def any_global_hook() -> bool:
    """Whether there are hooks that calls of all modules run."""
    return bool(
        nn_module._global_forward_hooks
        or nn_module._global_forward_pre_hooks
        or nn_module._global_backward_hooks
        or nn_module._global_backward_pre_hooks
    )
