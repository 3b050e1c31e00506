"""Whether what Dynamo traces began at an entry point of the model."""

from __future__ import annotations

import weakref

import torch
from torch._guards import TracingContext


class Trace:
    """Of one routing. `enter` is for traced code; `inside` for what gives it constants, while it is traced."""

    def __init__(self) -> None:
        self._context: weakref.ref[TracingContext] | None = None

    @torch.compiler.assume_constant_result
    def enter(self) -> bool:
        """Dynamo has read the routing, so it checks before each call what is read of it from here on."""
        context = TracingContext.try_get()
        self._context = None if context is None else weakref.ref(context)
        return context is not None

    def inside(self) -> bool:
        context = TracingContext.try_get()
        return context is not None and self._context is not None and self._context() is context
