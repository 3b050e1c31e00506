"""The augmented weight: one buffer [W ; A] per linear, so that one matmul gives `W x` and every `A x`.

`weight.data` becomes a view of the buffer's first N rows: the same Parameter, so tying, names and optimizers'
references hold. `prepare` lays weights when a request opens, and none moves while it is open: a traced or captured
call keeps their addresses. Whoever replaces the data (`.to`, `load_state_dict(assign=True)`, an assignment) is noticed
by the address: the call goes without the buffer until the next request lays the weight anew. The buffer is no
registered buffer, and `state_dict` exports clones.

`slots.laid` says that A lies in the buffer too. Where A went elsewhere (the pool grew), `laid` is False and the buffer
is kept until the weight is laid anew or leaves it: while the weight lies in it, copies must not carry its other rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as nn_module

from .slots import ModuleSlots


def can_lay(module: nn.Module, slots: ModuleSlots) -> bool:
    """Whether the module's weight may be moved into a buffer: plain, dense, its own, and of A's dtype and device."""
    weight = module._parameters.get("weight")
    return (
        not slots.tied
        and isinstance(module, nn.Linear)
        and type(module).forward is nn.Linear.forward
        and type(weight) is nn.Parameter
        and not (weight.is_meta or weight.is_inference())
        and weight.dtype == slots.a.dtype
        and weight.device == slots.a.device
        and weight.is_floating_point()
        and weight.is_contiguous()
        and tuple(weight.shape) == (slots.out_features, slots.in_features)
        and (module.bias is None or _goes_with(module.bias, weight))
    )


def _goes_with(bias: object, weight: nn.Parameter) -> bool:
    return type(bias) is nn.Parameter and bias.dtype == weight.dtype and bias.device == weight.device


def plain_call(module: nn.Module) -> bool:
    """Whether calling the module is calling its class's forward: no hook and no instance forward is left out."""
    return not (
        "forward" in module.__dict__
        or module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or nn_module._global_forward_hooks
        or nn_module._global_forward_pre_hooks
        or nn_module._global_backward_hooks
        or nn_module._global_backward_pre_hooks
    )


def is_laid(module: nn.Module, slots: ModuleSlots) -> bool:
    """Whether weight, bias and A all lie in the buffers."""
    return slots.laid and _both_lie(module, slots)


def _both_lie(module: nn.Module, slots: ModuleSlots) -> bool:
    if not _lies_in(module._parameters.get("weight"), slots.buffer):
        return False
    bias = module._parameters.get("bias")
    return slots.bias_buffer is None if bias is None else _lies_in(bias, slots.bias_buffer)


def _lies_in(parameter: Tensor | None, buffer: Tensor | None) -> bool:
    """Whether the parameter is the first rows of the buffer."""
    return parameter is not None and buffer is not None and parameter.data_ptr() == buffer.data_ptr()


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
    slots.looked = False  # an interrupt before its end must not leave views of two states
    slots.a, slots.buffer, slots.bias_buffer, slots.laid = buffer[n:], buffer, bias, True
    slots.look()


def unlay(module: nn.Module, slots: ModuleSlots) -> None:
    """Give weight and bias storage of their own again."""
    slots.looked = False
    with torch.inference_mode(False), torch.no_grad():
        for name, buffer in (("weight", slots.buffer), ("bias", slots.bias_buffer)):
            parameter = module._parameters.get(name)
            if parameter is not None and _lies_in(parameter, buffer):
                parameter.data = parameter.data.clone()
        if slots.laid:
            slots.a = slots.a.clone()
        if slots.buffer is not None:  # a weight that was taken out of the module takes no tenant's rows along
            slots.buffer[slots.out_features :].zero_()
    slots.buffer, slots.bias_buffer, slots.laid = None, None, False
    slots.look()


def settle(module: nn.Module, slots: ModuleSlots) -> None:
    """Let go of a buffer that weight or bias has left."""
    if slots.buffer is not None and not _both_lie(module, slots):
        unlay(module, slots)


def prepare(module: nn.Module, slots: ModuleSlots) -> None:
    """Before a request: lay what can be laid, so that no weight moves while calls are traced or captured."""
    if not slots.looked:
        slots.look()
    settle(module, slots)
    if slots.layout is not None and not slots.laid and plain_call(module) and can_lay(module, slots):
        lay(module, slots)  # type: ignore[arg-type]


def ready(module: nn.Module, slots: ModuleSlots) -> bool:
    """Whether this call may use the buffer, as `prepare` laid it. A weight that left it is laid at the next request.

    While gradients of the weight are wanted the buffer, which is no Parameter, is not used.
    """
    weight = module._parameters.get("weight")  # None: parametrized
    if weight is None or (torch.is_grad_enabled() and weight.requires_grad) or not plain_call(module):
        return False
    if torch.compiler.is_compiling():  # addresses cannot be read while tracing
        return slots.laid
    return is_laid(module, slots)


def without_buffers(state: Any, buffers: Iterable[Tensor | None]) -> Any:
    """Replace tensors of a state dict that lie in one of the buffers of weights with A by copies."""
    laid = {buffer.untyped_storage().data_ptr() for buffer in buffers if buffer is not None}
    for key, value in state.items():
        if isinstance(value, Tensor) and not value.is_meta and value.untyped_storage().data_ptr() in laid:
            state[key] = value.clone()
    return state
