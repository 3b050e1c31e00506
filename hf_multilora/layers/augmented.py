"""The augmented weight: one buffer [W ; A] per linear, so that one matmul gives `W x` and every `A x`.

`weight.data` becomes a view of the buffer's first N rows: the same Parameter, so tying, names and optimizers' references
hold. Whoever replaces the data (`.to`, `load_state_dict(assign=True)`, an assignment) is noticed by the address, at the
next call, and the weight is laid anew. The buffer is no registered buffer, and `state_dict` exports clones.
"""

from __future__ import annotations

import torch
from torch import nn

from .slots import ModuleSlots


def can_lay(module: nn.Module, slots: ModuleSlots) -> bool:
    """Whether the module's weight may be moved into a buffer: plain, dense, its own, and of A's dtype and device."""
    weight = module._parameters.get("weight")
    return (
        not slots.tied
        and isinstance(module, nn.Linear)
        and type(module).forward is nn.Linear.forward
        and type(weight) is nn.Parameter
        and not weight.is_meta
        and weight.dtype == slots.a.dtype
        and weight.device == slots.a.device
        and weight.is_floating_point()
        and tuple(weight.shape) == (slots.out_features, slots.in_features)
        and (module.bias is None or (type(module.bias) is nn.Parameter and module.bias.dtype == weight.dtype))
    )


def plain_call(module: nn.Module) -> bool:
    """Whether calling the module is calling its class's forward: no hook and no instance forward is left out."""
    return not (
        "forward" in module.__dict__
        or module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )


def is_laid(module: nn.Module, slots: ModuleSlots) -> bool:
    weight, bias = module._parameters["weight"], module._parameters["bias"]
    if slots.buffer is None or weight is None or weight.data_ptr() != slots.buffer.data_ptr():
        return False
    if bias is None:
        return slots.bias_buffer is None
    return slots.bias_buffer is not None and bias.data_ptr() == slots.bias_buffer.data_ptr()


def lay(module: nn.Linear, slots: ModuleSlots) -> None:
    """Move weight, A and bias into one buffer each. Peak extra memory: this one module."""
    n, pool = slots.out_features, slots.rows.capacity
    with torch.inference_mode(False), torch.no_grad():
        buffer = torch.empty(n + pool, slots.in_features, dtype=module.weight.dtype, device=module.weight.device)
        buffer[:n], buffer[n:] = module.weight, slots.a
        bias = None
        if module.bias is not None:
            bias = torch.zeros(n + pool, dtype=module.bias.dtype, device=module.bias.device)
            bias[:n] = module.bias
            module.bias.data = bias[:n]
        module.weight.data = buffer[:n]
    slots.a, slots.buffer, slots.bias_buffer = buffer[n:], buffer, bias


def unlay(module: nn.Module, slots: ModuleSlots) -> None:
    """Give weight and bias storage of their own again."""
    if slots.buffer is not None and is_laid(module, slots):
        with torch.inference_mode(False), torch.no_grad():
            for name in ("weight", "bias"):
                parameter = module._parameters[name]
                if parameter is not None:
                    parameter.data = parameter.data.clone()
    if slots.buffer is not None:
        slots.a = slots.a.clone()
    slots.buffer = slots.bias_buffer = None


def ready(module: nn.Module, slots: ModuleSlots) -> bool:
    """Whether this call may use the buffer; lays the weight when it has to be laid (anew).

    While gradients of the weight are wanted the buffer, which is no Parameter, is not used.
    """
    if torch.is_grad_enabled() and module._parameters["weight"].requires_grad:  # type: ignore[union-attr]
        return False
    if torch.compiler.is_compiling():  # addresses cannot be read while tracing: `settle` ran before
        return slots.buffer is not None and plain_call(module)
    if not plain_call(module):
        return False
    if not is_laid(module, slots):
        if not can_lay(module, slots):
            return False
        lay(module, slots)  # type: ignore[arg-type]
    return True
