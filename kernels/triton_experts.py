"""Launchers of the Triton kernels for experts' LoRA: tile sizes and grids. Specified by torch_experts.py.

Grids and tiles depend on shapes alone, never on keys or ranks: a captured launch serves every routing. FIXED tiles make
what a pair gets independent of everything else in the batch. Gradients are the torch backend's: `ops_experts` goes
there, and these refuse.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from .launch import Launcher
from .lora_experts import (
    experts_combine_kernel,
    experts_expand_pair_kernel,
    experts_expand_tile_kernel,
    experts_shrink_pair_kernel,
    experts_shrink_tile_kernel,
)
from .torch_experts import wants_gradient
from .triton_backend import precision, steps


@dataclass(frozen=True)
class Tile:
    """What one program takes. block: columns of K (shrink) or of the result (expand, combine), for 16-bit factors; half
    of it for float32."""

    block_m: int  # pairs; 1: no tensor cores
    block_r: int  # ranks at most
    block: int
    warps: int
    stages: int = 1


SHRINK, EXPAND, COMBINE = "shrink", "expand", "combine"
FEW, MANY = "few", "many"  # pairs
# the fastest on an H200 for 128 experts of 2048 x 768, rank 16, 512 to 16,384 pairs: tests.benchmarks.gpu_experts
TILES = {
    (SHRINK, FEW): Tile(1, 16, 256, 4),
    (SHRINK, MANY): Tile(16, 64, 256, 2, 4),
    (EXPAND, FEW): Tile(1, 16, 512, 2),
    (EXPAND, MANY): Tile(16, 64, 128, 2, 3),
    (COMBINE, FEW): Tile(1, 1, 512, 2),
    (COMBINE, MANY): Tile(1, 1, 1024, 4),
}
FIXED = {SHRINK: Tile(16, 16, 64, 4, 3), EXPAND: Tile(16, 16, 64, 4)}
FEW_PAIRS = 1024  # always few
PAIRS_OF_KEY = 2  # at most, on average, where they are still few


def amount(n: int, groups: int) -> str:
    """Whether n pairs over so many keys are few: then each reads rank rows for itself."""
    return FEW if n <= max(FEW_PAIRS, min(PAIRS_OF_KEY * groups, 4 * FEW_PAIRS)) else MANY


def _choose(op: str, n: int, groups: int, fixed: bool) -> Tile:
    return FIXED[op] if fixed else TILES[op, amount(n, groups)]


def _power(number: int, least: int, most: int) -> int:
    return max(least, min(most, triton.next_power_of_2(number)))


@functools.lru_cache(maxsize=4096)
def _shrink_plan(
    n: int, k: int, max_rank: int, dtype: torch.dtype, exact: str, source: bool, fixed: bool, t: Tile
) -> tuple[Any, int, int, dict[str, Any]]:
    """(kernel, programs, rank blocks, constants of the kernel); cached, since an eager call has hundreds."""
    tiled = t.block_m > 1
    most = min(t.block * 2 // dtype.itemsize, 64 if tiled and dtype == torch.float32 else t.block)  # see steps
    block_k = t.block if fixed else _power(k, 16, most)
    block_r = t.block_r if fixed else _power(max_rank, 16 if tiled else 1, t.block_r)
    blocks, count = triton.cdiv(max_rank, block_r), triton.cdiv(n, t.block_m)
    deep = t.stages if block_r <= 32 else min(t.stages, 2)  # else smaller GPUs lack the shared memory
    constants: dict[str, Any] = {
        "SOURCE": source, "BLOCK_R": block_r, "BLOCK_K": block_k, "num_warps": t.warps, "num_stages": deep,
    }  # fmt: skip
    if not tiled:
        return experts_shrink_pair_kernel, count * blocks, blocks, constants | {"EVEN_K": k % block_k == 0}
    constants |= {"BLOCK_M": t.block_m, "STEPS": steps(dtype), "PRECISION": exact}
    constants |= {"EVEN_K": k % (block_k * steps(dtype)) == 0}
    return experts_shrink_tile_kernel, count * blocks, blocks, constants


def shrink(
    x: Tensor, a: Tensor, begins: Tensor, ranks: Tensor, keys: Tensor, source: Tensor | None, max_rank: int,
    *, fixed: bool = False, tile: Tile | None = None,
) -> Tensor:  # fmt: skip
    """See `ops_experts.experts_shrink`; tile None: chosen from the shapes. What is not specified is left unwritten."""
    _refuse_gradients(x)
    n, k = keys.shape[0], a.shape[1]
    h = torch.empty((n, max_rank), dtype=torch.float32, device=x.device)
    if not k:
        return h.zero_()
    if not n:
        return h
    tile = tile or _choose(SHRINK, n, ranks.shape[0], fixed)
    x = x if x.stride(1) == 1 else x.contiguous()
    given = (n, k, max_rank, x.dtype, precision(x.dtype), source is not None, fixed, tile)
    _launcher(SHRINK, given, x.stride(0), x.device)(x, a, h, begins, ranks, keys, source)
    return h


@functools.lru_cache(maxsize=4096)
def _expand_plan(
    n: int, width: int, max_rank: int, dtype: torch.dtype, exact: str, source: bool, fixed: bool, t: Tile
) -> tuple[Any, int, int, dict[str, Any]]:
    """(kernel, programs, tiles of columns, constants of the kernel)."""
    tiled = t.block_m > 1
    block_n = t.block if fixed else _power(width, 16, t.block * 2 // dtype.itemsize)
    block_r = t.block_r if fixed else _power(max_rank, 16 if tiled else 1, t.block_r)
    if tiled and max_rank > block_r:
        block_r = min(block_r, 64 // dtype.itemsize)  # of several blocks: larger ones do not fit the registers
    tiles, count = triton.cdiv(width, block_n), triton.cdiv(n, t.block_m)
    constants: dict[str, Any] = {
        "SOURCE": source, "BLOCK_R": block_r, "BLOCK_N": block_n, "num_warps": t.warps, "num_stages": t.stages,
    }  # fmt: skip
    if not tiled:
        return experts_expand_pair_kernel, count * tiles, tiles, constants
    constants |= {"BLOCK_M": t.block_m, "STEPS": steps(dtype), "PRECISION": exact}
    constants |= {"ONE": not fixed and max_rank <= block_r}
    return experts_expand_tile_kernel, count * tiles, tiles, constants


def expand(
    y: Tensor, h: Tensor, b: Tensor, begins: Tensor, ranks: Tensor, keys: Tensor, source: Tensor | None, first: int,
    *, fixed: bool = False, tile: Tile | None = None,
) -> Tensor:  # fmt: skip
    """See `ops_experts.experts_expand`. Returns y, written in place."""
    _refuse_gradients(y, h)
    n, width = keys.shape[0], b.shape[1]
    if not n or not width:
        return y
    tile = tile or _choose(EXPAND, n, ranks.shape[0], fixed)
    h = h.contiguous()
    max_rank = h.shape[1]
    out = y if y.stride(1) == 1 else y.contiguous()
    into = out[:, first:] if first else out
    given = (n, width, max_rank, b.dtype, precision(b.dtype), source is not None, fixed, tile)
    _launcher(EXPAND, given, out.stride(0), y.device)(into, h, b, begins, ranks, keys, source)
    return y if out is y else y.copy_(out)


@functools.lru_cache(maxsize=4096)
def _launcher(op: str, given: tuple[Any, ...], stride: int, device: torch.device) -> Launcher:
    """Of a shrink or an expand. given: of the plan."""
    kernel, programs, blocks, constants = (_shrink_plan if op == SHRINK else _expand_plan)(*given)
    (n, width, max_rank, *_), tile = given, given[-1]
    numbers = (*([n] if tile.block_m > 1 else []), width, max_rank, blocks, stride)
    return _made(kernel, programs, numbers, constants)


def _made(kernel: Any, programs: int, numbers: tuple[int, ...], constants: dict[str, Any]) -> Launcher:
    """Constants in the order of the kernel's parameters."""
    own = {name: constants[name] for name in kernel.arg_names if name in constants}
    return Launcher(kernel, (programs, 1, 1), numbers, own, constants["num_warps"], constants["num_stages"])


@functools.lru_cache(maxsize=4096)
def _combine_plan(width: int, choices: int, dtype: torch.dtype, t: Tile) -> tuple[int, dict[str, Any]]:
    """(tiles of columns, constants of the kernel)."""
    block = _power(width, 16, t.block * 2 // dtype.itemsize)
    constants = {"CHOICES": choices, "BLOCK_N": block, "num_warps": t.warps, "num_stages": t.stages}
    return triton.cdiv(width, block), constants


def combine(
    y: Tensor, places: Tensor, weights: Tensor, dtype: torch.dtype, *, tile: Tile | None = None
) -> Tensor:  # fmt: skip
    """See `ops_experts.experts_combine`."""
    _refuse_gradients(y, weights)
    (tokens, choices), width = places.shape, y.shape[1]
    out = torch.empty((tokens, width), dtype=dtype, device=y.device)
    if not out.numel():
        return out
    tile = tile or TILES[COMBINE, FEW if tokens * choices <= FEW_PAIRS else MANY]
    y = y if y.stride(1) == 1 else y.contiguous()
    strides = (y.stride(0), weights.stride(0), weights.stride(1))
    _combiner(tokens, width, choices, tile, strides, y.dtype, y.device)(y, places, weights, out)
    return out


@functools.lru_cache(maxsize=4096)
def _combiner(
    tokens: int, width: int, choices: int, tile: Tile, strides: tuple[int, int, int], dtype: torch.dtype,
    device: torch.device,
) -> Launcher:  # fmt: skip
    tiles, constants = _combine_plan(width, choices, dtype, tile)
    return _made(experts_combine_kernel, tokens * tiles, (width, tiles, *strides), constants)


def _refuse_gradients(*tensors: Tensor) -> None:
    if wants_gradient(*tensors):
        raise NotImplementedError("experts' LoRA in Triton has no gradients; call it through ops_experts, or no_grad()")
