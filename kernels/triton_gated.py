"""Launchers of the expand kernels of gated MLPs. Two slices of one width each: of a gate, and of what it multiplies.

piece: which of the slices is the gate. act: one of ACTIVATIONS. The rest is as in triton_backend.py, whose rules choose
kernels and tiles.
"""

from __future__ import annotations

import functools

import torch
import triton
from torch import Tensor

from .launch import Bound, Launcher, dependent_launch
from .lora_gated import lora_gated_kernel, lora_gated_rows_kernel
from .triton_backend import FEW_BYTES, LONG, few, group_of, precision, steps, tile_bound, tiles

ACTIVATIONS = ("silu", "gelu_tanh")


@functools.lru_cache(maxsize=4096)
def _rows(
    count: int, tokens: int, width: int, slots: int, stride: int, bound: int, dtype: torch.dtype, exact: str,
    offset: int, piece: int, act: str, lanes: int, device: torch.device,
) -> Launcher:  # fmt: skip
    constants = {
        "GATE": piece, "ACT": act, "LANES": lanes, "GROUP": group_of(bound),
        "BLOCK_R": min(triton.next_power_of_2(bound), 32), "BLOCK_N": FEW_BYTES // dtype.itemsize,
        "STEPS": steps(dtype), "PRECISION": exact, "PDL": dependent_launch(device),
    }  # fmt: skip
    grid = (triton.cdiv(width, constants["BLOCK_N"]), count, 1)
    return Launcher(lora_gated_rows_kernel, grid, (tokens, width, slots, stride, 2 * width, offset), constants, 1, 1)


@functools.lru_cache(maxsize=4096)
def _tiles(
    rows: int, tokens: int, width: int, slots: int, columns: int, own_columns: bool, stride: int, stride_h: int,
    plane: int, planes: int, dtype: torch.dtype, exact: str, offset: int, piece: int, act: str, lanes: int,
    device: torch.device,
) -> Launcher:  # fmt: skip
    """columns: of h for each lane."""
    groups, bound = min(rows, slots + 1), 16 if own_columns else min(columns, 32)
    t = tiles(rows * tokens, groups, bound, dtype.itemsize)
    block_m, block_n = (LONG.block_m, LONG.block_n // 2) if bound <= 16 and dtype.itemsize == 2 else (t.block_m, 64)
    constants = {
        "GATE": piece, "ACT": act, "LANES": lanes, "PLANES": planes, "OWN_COLUMNS": own_columns,
        "SLOTS": triton.next_power_of_2(slots + 1), "BLOCK_M": block_m, "BLOCK_R": t.block_r, "BLOCK_N": block_n,
        "STEPS": steps(dtype), "PRECISION": exact, "PDL": dependent_launch(device),
    }  # fmt: skip
    grid = (tile_bound(rows, tokens, groups, block_m), triton.cdiv(width, block_n), 1)
    shift = 2 * width if own_columns else 0
    numbers = (rows, tokens, width, slots, columns, stride, stride_h, shift, plane, offset)
    return Launcher(lora_gated_kernel, grid, numbers, constants, t.warps, 1)


def gated_laid(
    both: Tensor, rows: int, b: Tensor, row_slots: Tensor, order: Tensor, offsets: Tensor, starts: Tensor,
    ranks: Tensor, offset: int, n: int, bound: int, piece: int, act: str, lanes: int,
) -> Bound:  # fmt: skip
    """As `triton_backend.expand_laid`: to be called with `both` and the one output [R * T, n / 2]. offset: of slice 1
    in b."""
    (count, columns), slots, width = both.shape, starts.shape[1], n // 2
    if few(count, slots):
        each = _rows(
            count, count // rows, width, slots, columns, bound, b.dtype, precision(b.dtype), offset, piece, act, lanes,
            both.device,
        )  # fmt: skip
        return Bound(each, 1, b, row_slots, order, offsets, starts, ranks)
    run = _tiles(
        rows, count // rows, width, slots, (columns - n) // lanes, True, columns, columns, 0, 1, b.dtype,
        precision(b.dtype), offset, piece, act, lanes, both.device,
    )  # fmt: skip
    return Bound(run, 1, b, order, offsets, starts, ranks)


def gated_parts(
    y: Tensor, h: Tensor, out: Tensor, b: Tensor, order: Tensor, offsets: Tensor, starts: Tensor, ranks: Tensor,
    offset: int, piece: int, act: str, lanes: int,
) -> None:  # fmt: skip
    """As `triton_backend.expand_parts`: y [R, T, N], h [Z, R, T, lanes * max_rank] -> out [R, T, N / 2]."""
    (rows, tokens, n), slots, (planes, _, _, columns) = y.shape, starts.shape[1], h.shape
    run = _tiles(
        rows, tokens, n // 2, slots, columns // lanes, False, n, columns, rows * tokens * columns, planes, b.dtype,
        precision(b.dtype), offset, piece, act, lanes, y.device,
    )  # fmt: skip
    run(y, h, out, b, order, offsets, starts, ranks)
