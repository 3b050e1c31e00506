"""Launchers of the kernels that name and place pairs. Specified by torch_pairs.py: two launches beside the sort."""

from __future__ import annotations

import functools

import torch
import triton
from torch import Tensor

from .expert_pairs import pair_keys_kernel, pair_places_kernel
from .launch import Launcher
from .torch_pairs import SHORT

BLOCK = 256
WARPS, STAGES = 4, 3  # Triton's own choice


def pair_keys(index: Tensor, row_slots: Tensor, slots: int, count: int, dtype: torch.dtype = torch.int32) -> Tensor:
    """See torch_pairs.py; dtype: of the keys."""
    index, n = index.contiguous(), index.numel()
    keys = torch.empty(n, dtype=dtype, device=index.device)
    if n:
        _namer(n, n // row_slots.shape[0], slots, count, index.device)(index, row_slots, keys)
    return keys


@functools.lru_cache(maxsize=4096)
def _namer(n: int, per_row: int, slots: int, count: int, device: torch.device) -> Launcher:
    return Launcher(
        pair_keys_kernel, (triton.cdiv(n, BLOCK), 1, 1), (n, per_row, slots, count), {"BLOCK": BLOCK}, WARPS, STAGES
    )


def sort_pairs(index: Tensor, row_slots: Tensor, slots: int, count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See torch_pairs.py."""
    short = (count + 1) * (slots + 1) < SHORT
    n, k = index.numel(), index.shape[1]
    ordered, order = torch.sort(pair_keys(index, row_slots, slots, count, torch.int16 if short else torch.int32))
    out = torch.empty(3 * n + count, dtype=torch.int32, device=index.device)
    keys, tokens, places, ends = out.split([n, n, n, count])
    _placer(n, k, slots, count, short, index.device)(ordered, order, keys, tokens, places, ends)
    return keys, tokens, places.view(-1, k), ends


@functools.lru_cache(maxsize=4096)
def _placer(n: int, k: int, slots: int, count: int, short: bool, device: torch.device) -> Launcher:
    blocks = triton.cdiv(n, BLOCK)
    grid = (blocks + triton.cdiv(count, BLOCK), 1, 1)
    constants = {"BLOCK": BLOCK, "DEPTH": max(n, 1).bit_length()}
    return Launcher(pair_places_kernel, grid, (n, k, slots + 1, count, blocks), constants, WARPS, STAGES)
