"""The backends by name, and which one serves a module. A new one is a file with `shrink` and `expand`, and a row."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from . import torch_backend

TORCH, TRITON, TRITON_FIXED = "torch", "triton", "triton-fixed"
TRITON_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


class KernelError(RuntimeError):
    """Triton kernels that are asked for and cannot be built or run here."""


@dataclass(frozen=True)
class Backend:
    """shrink, expand: as specified in ops.py. split: K -> ranges of K that suit it, where nothing else is known.
    fixed: a row's delta depends on nothing else in the batch."""

    name: str
    shrink: Callable[..., Tensor]
    expand: Callable[..., Tensor]
    split: Callable[[int], int]
    fixed: bool = False


@functools.cache
def backend(name: str) -> Backend:
    """Raises ValueError for an unknown name, KernelError where Triton is missing."""
    if name == TORCH:
        return Backend(TORCH, torch_backend.shrink, torch_backend.expand, lambda k: 1)
    if name not in (TRITON, TRITON_FIXED):
        raise ValueError(f"backend must be one of {(TORCH, TRITON, TRITON_FIXED)}, got {name!r}")
    require_triton()
    from . import triton_backend

    if name == TRITON:
        return Backend(TRITON, triton_backend.shrink, triton_backend.expand, triton_backend.fixed_split)
    shrink = functools.partial(triton_backend.shrink, fixed=True)
    expand = functools.partial(triton_backend.expand, fixed=True)
    return Backend(TRITON_FIXED, shrink, expand, triton_backend.fixed_split, fixed=True)


def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def require_triton() -> None:
    """Raises KernelError where Triton is not installed."""
    if not has_triton():
        raise KernelError(
            "the Triton kernels must find the package triton, it is not installed; pip install the triton that this "
            "torch asks for, or pass backend='torch'"
        )


def why_not_triton(device: torch.device, dtype: torch.dtype) -> str | None:
    """What keeps Triton from serving factors of this dtype on this device; None: nothing."""
    if dtype not in TRITON_DTYPES:
        return f"factors must be float16, bfloat16 or float32, got {dtype}"
    if device.type == "cuda" or (device.type == "cpu" and interpreted()):
        return None
    return f"tensors must be on a CUDA device, got {device}"


def interpreted() -> bool:
    """Whether Triton's kernels run in its interpreter, so also on CPU tensors: TRITON_INTERPRET=1 before the import."""
    from triton.runtime.interpreter import InterpretedFunction

    from .lora_shrink import lora_shrink_kernel

    return isinstance(lora_shrink_kernel, InterpretedFunction)


def choose(setting: str, deterministic: bool, device: torch.device, dtype: torch.dtype) -> Backend:
    """The backend of a module whose factors lie there. setting: "auto", "torch" or "triton".

    "auto" takes Triton on CUDA devices for the dtypes it has. Raises KernelError where what is asked for cannot be.
    """
    if setting == TORCH or (setting == "auto" and not deterministic and (device.type != "cuda" or not has_triton())):
        return backend(TORCH)
    require_triton()
    why = why_not_triton(device, dtype)
    if why is None:
        return backend(TRITON_FIXED if deterministic else TRITON)
    if setting == "auto" and not deterministic:
        return backend(TORCH)
    asked = "deterministic=True" if deterministic else "backend='triton'"
    raise KernelError(f"{asked} needs the Triton kernels: {why}; move the base there, or leave the setting out")
