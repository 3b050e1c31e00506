"""The backends by name, and which one serves a module. A new one is a file with `shrink` and `expand`, one with these
and `combine` for experts, and a row."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from . import torch_backend, torch_experts, torch_pairs

TORCH, TRITON, TRITON_FIXED = "torch", "triton", "triton-fixed"
Experts = tuple[Callable[..., Tensor], Callable[..., Tensor], Callable[..., Tensor]]
MOST_SLICES = 4  # of one launch
TRITON_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


class KernelError(RuntimeError):
    """Triton kernels that are asked for and cannot be built or run here."""


@dataclass(frozen=True)
class Backend:
    """shrink, expand: as specified in ops.py. split: K -> ranges of K that suit it, where nothing else is known.
    expand_laid, expand_parts: as in triton_laid.py, gated_laid, gated_parts: as in triton_gated.py; Triton alone has
    them.
    experts_...: as specified in ops_experts.py; experts_expand returns y, written in place (torch: a new tensor where
    gradients are wanted). pair_keys, sort_pairs: as specified in torch_pairs.py. fixed: a row's delta depends on
    nothing else in the batch."""

    name: str
    shrink: Callable[..., Tensor]
    expand: Callable[..., Tensor]
    split: Callable[[int], int]
    experts_shrink: Callable[..., Tensor]
    experts_expand: Callable[..., Tensor]
    experts_combine: Callable[..., Tensor]
    pair_keys: Callable[..., Tensor]
    sort_pairs: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]]
    fixed: bool = False
    expand_laid: Callable[..., Callable[..., None]] | None = None
    expand_parts: Callable[..., None] | None = None
    gated_laid: Callable[..., Callable[..., None]] | None = None
    gated_parts: Callable[..., None] | None = None


@functools.cache
def backend(name: str) -> Backend:
    """Raises ValueError for an unknown name, KernelError where Triton is missing."""
    experts: Experts
    if name == TORCH:
        experts = (torch_experts.shrink, torch_experts.expand, torch_experts.combine)
        pairs = (torch_pairs.pair_keys, torch_pairs.sort_pairs)
        return Backend(TORCH, torch_backend.shrink, torch_backend.expand, lambda k: 1, *experts, *pairs)
    if name not in (TRITON, TRITON_FIXED):
        raise ValueError(f"backend must be one of {(TORCH, TRITON, TRITON_FIXED)}, got {name!r}")
    require_triton()
    from . import triton_backend, triton_experts, triton_gated, triton_laid, triton_pairs

    split, pairs = triton_backend.fixed_split, (triton_pairs.pair_keys, triton_pairs.sort_pairs)
    if name == TRITON:
        experts = (triton_experts.shrink, triton_experts.expand, triton_experts.combine)
        shrink, expand = triton_backend.shrink, triton_backend.expand
        return Backend(
            TRITON, shrink, expand, split, *experts, *pairs, expand_laid=triton_laid.expand_laid,
            expand_parts=triton_laid.expand_parts, gated_laid=triton_gated.gated_laid,
            gated_parts=triton_gated.gated_parts,
        )  # fmt: skip
    shrink = functools.partial(triton_backend.shrink, fixed=True)
    expand = functools.partial(triton_backend.expand, fixed=True)
    experts_shrink = functools.partial(triton_experts.shrink, fixed=True)
    experts_expand = functools.partial(triton_experts.expand, fixed=True)
    experts = (experts_shrink, experts_expand, triton_experts.combine)
    return Backend(TRITON_FIXED, shrink, expand, split, *experts, *pairs, fixed=True)


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
