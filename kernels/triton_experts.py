"""Launchers of the Triton kernels for experts' LoRA. Specified by torch_experts.py. (The kernels follow.)"""

from __future__ import annotations

from typing import Any

from torch import Tensor


def shrink(*arguments: Any, fixed: bool = False) -> Tensor:
    raise NotImplementedError("experts_shrink: the Triton kernel is not there yet; pass backend='torch'")


def expand(*arguments: Any, fixed: bool = False) -> Tensor:
    raise NotImplementedError("experts_expand: the Triton kernel is not there yet; pass backend='torch'")


def combine(*arguments: Any) -> Tensor:
    raise NotImplementedError("experts_combine: the Triton kernel is not there yet; pass backend='torch'")
