"""Many LoRA adapters on one Hugging Face model, mixed row by row in a batch."""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_HOME = {
    "MultiLoRAModel": "model",
    "MultiLoRACollator": "collator",
    "MultiLoRAConfig": "config",
    "AdapterError": "formats",
    "AdapterInUseError": "store",
    "CapacityError": "store",
    "UnknownAdapterError": "store",
    "RoutingError": "routing",
    "KernelError": "kernels.backends",
}
__all__ = [*_HOME]


def __getattr__(name: str) -> Any:  # PEP 562: importing the package costs nothing until a name is used
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
