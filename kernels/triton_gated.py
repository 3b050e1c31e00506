"""Launchers of the expand kernels of gated MLPs. Two slices of one width each: of a gate, and of what it multiplies.

piece: which of the slices is the gate. act: one of ACTIVATIONS. The rest is as in triton_laid.py.
"""

from __future__ import annotations

import functools

import triton
from torch import Tensor

from .launch import Bound, Launcher, dependent_launch
from .lora_gated import lora_gated_kernel, lora_gated_rows_kernel
from .lora_wide import lora_gated_wide_kernel
from .triton_backend import LOW, steps, tile_bound, tiles
from .triton_laid import FEW_BYTES, ROWS, WARPS, WIDE, Given, of_laid, of_parts, rows_constants, wide_plan

ACTIVATIONS = ("silu", "gelu_tanh")


@functools.lru_cache(maxsize=4096)
def _rows(g: Given, width: int, offset: int, piece: int, act: str) -> Launcher:
    constants = {"GATE": piece, "ACT": act} | rows_constants(g, FEW_BYTES) | {"PDL": dependent_launch(g.device)}
    grid = (triton.cdiv(width, constants["BLOCK_N"]), g.rows * g.tokens, 1)
    numbers = (g.tokens, width, g.slots, *g.numbers, g.plane, offset)
    return Launcher(lora_gated_rows_kernel, grid, numbers, constants, 1, 1)


@functools.lru_cache(maxsize=4096)
def _wide(g: Given, width: int, offset: int, piece: int, act: str) -> Launcher:
    grid, constants = wide_plan(g, width, 1)
    constants = {"GATE": piece, "ACT": act} | constants | {"PDL": dependent_launch(g.device)}
    numbers = (g.rows, g.tokens, width, g.slots, *g.numbers, offset)
    return Launcher(lora_gated_wide_kernel, grid, numbers, constants, WARPS, 1)


@functools.lru_cache(maxsize=4096)
def _tiles(g: Given, width: int, offset: int, piece: int, act: str) -> Launcher:
    groups, bound = min(g.rows, g.slots + 1), 16 if g.own_columns else min(g.max_rank, 32)
    t = tiles(g.rows * g.tokens, groups, bound, g.dtype.itemsize)
    low = bound <= 16 and g.dtype.itemsize == 2
    block_m, block_n = (LOW.block_m, LOW.block_n // 2) if low else (t.block_m, 64)
    constants = {"GATE": piece, "ACT": act} | g.constants | {
        "PLANES": g.planes, "SLOTS": triton.next_power_of_2(g.slots + 1), "BLOCK_M": block_m, "BLOCK_R": t.block_r,
        "BLOCK_N": block_n, "STEPS": steps(g.dtype), "PRECISION": g.exact, "PDL": dependent_launch(g.device),
    }  # fmt: skip
    grid = (tile_bound(g.rows, g.tokens, groups, block_m), triton.cdiv(width, block_n), 1)
    numbers = (g.rows, g.tokens, width, g.slots, *g.numbers, g.plane, offset)
    return Launcher(lora_gated_kernel, grid, numbers, constants, t.warps, 1)


def _chosen(
    g: Given, width: int, offset: int, piece: int, act: str, b: Tensor, row_slots: Tensor, order: Tensor,
    offsets: Tensor, starts: Tensor, ranks: Tensor,
) -> tuple[Launcher, tuple[Tensor, ...]]:  # fmt: skip
    """The launcher, and its pointers after the output."""
    kind, own = g.kernel, (width, offset, piece, act)
    if kind == ROWS:
        return _rows(g, *own), (b, row_slots, order, offsets, starts, ranks)
    if kind == WIDE:
        return _wide(g, *own), (b, order, offsets, starts, ranks)
    return _tiles(g, *own), (b, order, offsets, starts, ranks)


def gated_laid(
    both: Tensor, rows: int, b: Tensor, row_slots: Tensor, order: Tensor, offsets: Tensor, starts: Tensor,
    ranks: Tensor, offset: int, n: int, bound: int, piece: int, act: str, lanes: int,
) -> Bound:  # fmt: skip
    """As `triton_laid.expand_laid`: to be called with `both` and the one output [R * T, n / 2]. offset: of slice 1 in
    b."""
    given, tables = of_laid(both, rows, b, starts, n, bound, lanes), (row_slots, order, offsets, starts, ranks)
    run, last = _chosen(given, n // 2, offset, piece, act, b, *tables)
    return Bound(run, 1, *last)


def gated_parts(
    y: Tensor, h: Tensor, out: Tensor, b: Tensor, row_slots: Tensor, order: Tensor, offsets: Tensor, starts: Tensor,
    ranks: Tensor, offset: int, piece: int, act: str, lanes: int,
) -> None:  # fmt: skip
    """As `triton_laid.expand_parts`: y [R, T, N], h [Z, R, T, lanes * max_rank] -> out [R, T, N / 2]."""
    given, tables = of_parts(y, h, b, starts, lanes), (row_slots, order, offsets, starts, ranks)
    run, last = _chosen(given, y.shape[2] // 2, offset, piece, act, b, *tables)
    run(y, h, out, *last)
