"""Linears of which each process has a part: the deltas are added inside the parallel forward of the instance.

There x and W are this process's part, and so are A and B, see parallel.py: what comes after, a gather or a sum over
the processes, makes the deltas whole together with the base's output.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..routing import RoutingError
from .base import AdaptedLayer
from .linear import add_own
from .rows import BASE_ONLY
from .slots import ModuleSlots


class LoraSharded(AdaptedLayer, kind="sharded"):
    """Adds `B (A x)` of each row's adapter, of this process's parts, to what its part of W gives."""

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        slots: ModuleSlots = self._lora
        path = slots.path()
        y: Tensor = super().forward(x, *args, **kwargs)  # type: ignore[misc]
        if path == BASE_ONLY:
            return y
        if type(x) is not Tensor or type(y) is not Tensor:
            raise RoutingError(
                f"{slots.name}: a sharded base must be called under torch.no_grad() where rows have adapters, its "
                f"parts are no local tensors otherwise, got {type(x).__name__}; call the model itself, which sees to it"
            )
        return add_own(y, x, slots, path, y.is_contiguous())
