"""Routers, which multiply with a weight of their own inside their forward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from ..routing import RoutingError
from .base import AdaptedLayer
from .linear import add_mixed, add_uniform
from .rows import BASE_ONLY, ONE
from .slots import ModuleSlots


class LoraRouter(AdaptedLayer, kind="router"):
    """Adds `B (A x)` of each row's adapter to the logits of experts, where the router's forward computes them."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        slots: ModuleSlots = self._lora
        if slots.path() == BASE_ONLY:
            return super().__call__(*args, **kwargs)
        met: list[Tensor] = []
        with AddToLogits(slots, met):
            output = super().__call__(*args, **kwargs)
        if len(met) != 1:
            raise RoutingError(
                f"{slots.name}: its forward must multiply once with its weight [{slots.out_features}, "
                f"{slots.in_features}], it did {len(met)} times, so an adapter's part cannot be added; leave the "
                f"router out of the adapter"
            )
        return output


class AddToLogits(TorchFunctionMode):
    """While it is on, products with the router's weight get the rows' own deltas, and are noted in `met`."""

    def __init__(self, slots: ModuleSlots, met: list[Tensor]) -> None:
        super().__init__()
        self.slots, self.met = slots, met

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        if func is not F.linear:
            return output
        x, weight = args[0], args[1] if len(args) > 1 else (kwargs or {})["weight"]
        if tuple(weight.shape) != (self.slots.out_features, self.slots.in_features):
            return output
        self.met.append(_add(output, x, self.slots))
        return self.met[-1]


def _add(logits: Tensor, x: Tensor, slots: ModuleSlots) -> Tensor:
    """logits [..., E] with the rows' deltas; x [..., H], rows in front or tokens row after row."""
    if slots.path() == ONE:
        return add_uniform(logits, x, slots)
    assert slots.layout is not None
    rows = slots.routing.align(x, slots.layout.closed.shape[0], slots.name, flat=x.dim() == 2)
    return add_mixed(logits, rows, slots)
