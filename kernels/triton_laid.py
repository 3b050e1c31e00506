"""Launchers of the expands of linears laid in one buffer: of [y | h], and of y and h after a shrink.

Kernels share the work: `rows` for few tokens, `wide` for more; `tiles` for float32, for ranks above MOST_RANK, and for
h in several planes.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from . import triton_backend
from .backends import MOST_SLICES
from .launch import Bound, Launcher, dependent_launch
from .lora_rows import lora_expand_rows_kernel
from .lora_wide import lora_expand_wide_kernel
from .triton_backend import four, precision, processors, steps, tile_bound

# An expand of as few tokens has programs for each per so many bytes of a row of B; beyond, it has them for tiles.
# LOW_BYTES: where no rank is above 16. Of 64 tokens of an 8B shape on an H200, gate and up, o took 1 to 17% less than
# with FEW_BYTES, q, k and v from 2% less to 5% more.
FEW, FEW_PER_SLOT, FEW_BYTES, LOW_BYTES = 256, 2, 256, 512
MOST_RANK = 64  # more ranks are not multiplied at once
WIDEST, STAGES, WARPS = 16, 3, 4  # of wide; WIDEST: most blocks of columns of a program
ROWS, WIDE, TILES = "rows", "wide", "tiles"


class Given(NamedTuple):
    """What an expand is given: R rows of T tokens, y with `stride_y` numbers per token, h with `stride_h`, from
    `shift` on, in `planes` partial sums that are `plane` apart.

    lanes: L, or 1 where all slices read the same h. max_rank: columns of h for each lane; all rank rows of the pool
    where own_columns. bound: of all ranks. dtype: of B. exact: see `precision`.
    """

    rows: int
    tokens: int
    slots: int
    lanes: int
    stride_y: int
    stride_h: int
    shift: int
    plane: int
    planes: int
    max_rank: int
    bound: int
    own_columns: bool
    dtype: torch.dtype
    exact: str
    device: torch.device

    @property
    def kernel(self) -> str:
        """Which of them."""
        if self.rows * self.tokens <= min(FEW, FEW_PER_SLOT * self.slots):
            return ROWS
        if self.planes > 1 or self.bound > MOST_RANK or self.dtype.itemsize > 2:
            return TILES
        return WIDE

    @property
    def numbers(self) -> tuple[int, ...]:
        """The kernels' parameters max_rank ... shift."""
        return self.max_rank, self.stride_y, self.stride_h, self.shift

    @property
    def constants(self) -> dict[str, object]:
        return {"LANES": self.lanes, "OWN_COLUMNS": self.own_columns}


def of_laid(both: Tensor, rows: int, b: Tensor, starts: Tensor, n: int, bound: int, lanes: int) -> Given:
    """both [R * T, n + P * lanes] = [y | h]."""
    count, columns = both.shape
    return Given(
        rows, count // rows, starts.shape[1], lanes, columns, columns, n, 0, 1, (columns - n) // lanes, bound, True,
        b.dtype, precision(b.dtype), both.device,
    )  # fmt: skip


def of_parts(y: Tensor, h: Tensor, b: Tensor, starts: Tensor, lanes: int) -> Given:
    """y [R, T, N], h [Z, R, T, lanes * max_rank]."""
    (rows, tokens, n), (planes, _, _, width) = y.shape, h.shape
    return Given(
        rows, tokens, starts.shape[1], lanes, n, width, 0, rows * tokens * width, planes, width // lanes,
        width // lanes, False, b.dtype, precision(b.dtype), y.device,
    )  # fmt: skip


def group_of(bound: int) -> int:
    """How many of few tokens with one slot are expanded together. Gate and up of an 8B shape, 64 tokens on an H200, us:
    together 20 with one adapter of rank 64 and 28 of rank 128, 27 and 41 with 8 adapters, 67 and 116 with 64; each by
    itself 34 and 60, 40 and 109, 61 and 113. At rank 16 each by itself took 13, 14 and 21, tiles 19, 20 and 50."""
    return 16 if bound > 16 else 1


def rows_constants(g: Given, width: int) -> dict[str, object]:
    """width: bytes of a row of B for each program."""
    return g.constants | {
        "PLANES": g.planes, "GROUP": group_of(g.bound), "BLOCK_R": min(triton.next_power_of_2(g.bound), 32),
        "BLOCK_N": width // g.dtype.itemsize, "STEPS": steps(g.dtype), "PRECISION": g.exact,
    }  # fmt: skip


def wide_plan(g: Given, n: int, pieces: int) -> tuple[tuple[int, int, int], dict[str, object]]:
    """Grid and constants: as many columns for a program as leave programs for the whole device, whatever the mix; no
    more shared memory than the 99 KB of consumers' cards.

    An 8B shape on an H200, us, in tiles before: 8 prompts of 1,024 tokens, rank 16, q, k and v 85 now 56, o 57 now 41,
    gate and up 351 now 187 (floors 49, 32, 168), of rank 64 gate and up 737 now 340 (176); 256 tokens of 32 adapters,
    q, k and v 8 now 7, gate and up 28 now 21 (3, 12).
    """
    block_r = max(16, triton.next_power_of_2(g.bound))
    block_m, block_n = 16, 128 if block_r <= 32 else 64  # of rank 64 gate and up took 391 us in blocks of 128
    tiles = tile_bound(g.rows, g.tokens, min(g.rows, g.slots + 1), block_m)
    loop = min(WIDEST, max(1, tiles * triton.cdiv(n, block_n) // (4 * processors(g.device))))
    loop = 1 << (loop.bit_length() - 1)  # few kernels to compile
    constants = g.constants | {
        "SLOTS": triton.next_power_of_2(g.slots + 1), "BLOCK_M": block_m, "BLOCK_R": block_r, "BLOCK_N": block_n,
        "LOOP": loop, "STAGES": STAGES, "PRECISION": g.exact,
    }  # fmt: skip
    return (tiles, triton.cdiv(n, block_n * loop) + pieces - 1, 1), constants


@functools.lru_cache(maxsize=4096)
def _rows(g: Given, n: int, pieces: int, even: bool) -> Launcher:
    constants = {"SLICES": pieces} | rows_constants(g, LOW_BYTES if g.bound <= 16 else FEW_BYTES)
    constants |= {"EVEN": even, "PDL": dependent_launch(g.device)}
    grid = (triton.cdiv(n, constants["BLOCK_N"]) + pieces - 1, g.rows * g.tokens, 1)
    return Launcher(lora_expand_rows_kernel, grid, (g.tokens, n, g.slots, *g.numbers, g.plane), constants, 1, 1)


@functools.lru_cache(maxsize=4096)
def _wide(g: Given, n: int, pieces: int, even: bool) -> Launcher:
    grid, constants = wide_plan(g, n, pieces)
    constants = {"SLICES": pieces} | constants | {"EVEN": even, "PDL": dependent_launch(g.device)}
    return Launcher(lora_expand_wide_kernel, grid, (g.rows, g.tokens, n, g.slots, *g.numbers), constants, WARPS, 1)


def _chosen(
    g: Given, n: int, even: bool, b: Tensor, row_slots: Tensor, order: Tensor, offsets: Tensor, starts: Tensor,
    ranks: Tensor, slices: Tensor | None,
) -> tuple[Launcher, tuple[Tensor | None, ...]]:  # fmt: skip
    """The launcher, and its pointers after the outputs."""
    kind, pieces = g.kernel, starts.shape[0]
    if kind == ROWS:
        return _rows(g, n, pieces, even), (b, row_slots, order, offsets, starts, ranks, slices)
    if kind == WIDE:
        return _wide(g, n, pieces, even), (b, order, offsets, starts, ranks, slices)
    run = triton_backend.expand_launcher(
        g.rows, g.tokens, n, g.slots, pieces, g.lanes, g.lanes * g.max_rank, g.stride_y, g.stride_h, g.shift, g.plane,
        g.planes, g.dtype, g.exact, g.own_columns, False, False, even, False, True, g.device,
    )  # fmt: skip
    return run, (b, order, offsets, starts, ranks, slices, None, None)


def expand_laid(
    both: Tensor, rows: int, b: Tensor, row_slots: Tensor, order: Tensor, offsets: Tensor, starts: Tensor,
    ranks: Tensor, slices: Tensor | None, n: int, bound: int, even: bool, lanes: int,
) -> Bound:  # fmt: skip
    """What expands such both = [y | h], [R * T, n + P * lanes], as a matmul that was just launched gives it: to be
    called with `both` and the outputs of the slices, again and again while the tables stay where they are.

    row_slots: int32 [R]. bound: of the ranks. even: sizes and offsets of slices are multiples of 16. lanes: L, or 1
    where all slices read the same h.
    """
    given = of_laid(both, rows, b, starts, n, bound, lanes)
    run, last = _chosen(given, n, even, b, row_slots, order, offsets, starts, ranks, slices)
    return Bound(run, MOST_SLICES, *last)


def expand_parts(
    y: Tensor, h: Tensor, outs: Sequence[Tensor], b: Tensor, row_slots: Tensor, order: Tensor, offsets: Tensor,
    starts: Tensor, ranks: Tensor, slices: Tensor | None, even: bool, lanes: int,
) -> None:  # fmt: skip
    """`expand` after a `shrink` into the outputs of the slices: y [R, T, N], h [Z, R, T, lanes * max_rank]."""
    given = of_parts(y, h, b, starts, lanes)
    run, last = _chosen(given, y.shape[2], even, b, row_slots, order, offsets, starts, ranks, slices)
    run(y, h, *four(outs), *last)
