"""Launchers of the Triton kernels: tile sizes, grids and checks. Specified by torch_backend.py.

Grids and tiles depend on shapes and capacity only, never on the mix: a captured launch serves every mix. FIXED tiles
and a split of K that depends on K alone make a row's delta independent of everything else in the batch.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from .backends import MOST_SLICES
from .launch import Launcher, dependent_launch
from .lora_expand import lora_expand_kernel
from .lora_shrink import lora_shrink_kernel

NARROW = 64  # tokens per group up to which the smallest tile is used
FIXED_CHUNK = 256  # columns of one range of K where the split depends on K alone
MAX_SPLIT = 16


@dataclass(frozen=True)
class Tiles:
    block_m: int  # tokens
    block_r: int  # ranks
    block_k: int  # in STEPS blocks
    block_n: int
    warps: int = 4


FIXED = Tiles(16, 16, 64, 64)
LOW = Tiles(16, 16, 128, 256)  # of an expand where no rank is above 16: little to multiply


@functools.cache
def processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 8


def tile_bound(rows: int, tokens: int, groups: int, block: int) -> int:
    """Tiles that R rows of T tokens in at most `groups` groups can need: sum of ceil(c / block) over any split."""
    return (rows * tokens + min(rows, groups) * (block - 1)) // block


def tiles(tokens: int, groups: int, max_rank: int, width: int) -> Tiles:
    """tokens: R * T; groups: slots that may share them; width: bytes of an element."""
    block_m = 16 if tokens <= NARROW * groups else 64
    block_r = min(64 if width == 2 else 32, max(16, triton.next_power_of_2(max_rank)))
    return Tiles(block_m, block_r, 128 if width == 2 else 64, 128)


def fixed_split(k: int) -> int:
    """Ranges that K is cut into, by K alone."""
    return _power(min(MAX_SPLIT, k // FIXED_CHUNK))


def _power(split: int) -> int:
    """The power of two below: each number of ranges is an expand kernel of its own."""
    return 1 << (max(1, split).bit_length() - 1)


def split_of(k: int, programs: int, device: torch.device) -> int:
    """Ranges that K is cut into, each summed by a program of its own, to occupy the device."""
    wanted = triton.cdiv(2 * processors(device), max(1, programs))  # two waves
    return _power(min(MAX_SPLIT, wanted, k // 256))


def precision(dtype: torch.dtype) -> str:
    """Of products of float32: three passes of TF32 hold a 16-bit factor exactly; float32 follows torch's setting."""
    if dtype != torch.float32:
        return "tf32x3"
    return "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"


def steps(dtype: torch.dtype) -> int:
    """Blocks that are summed apart and then added: one long chain of float32 sums would lose digits."""
    return 2 if dtype == torch.float32 else 1


def _rows(x: Tensor) -> tuple[Tensor, int]:
    """x [R, T, n] with tokens at one distance and n together, and that distance: itself where it lies so."""
    stride = x.stride()
    if stride[2] == 1 and stride[0] == x.shape[1] * stride[1]:
        return x, stride[1]
    x = x.contiguous()
    return x, x.shape[2]


@functools.lru_cache(maxsize=4096)
def _shrink(
    rows: int, tokens: int, k: int, slots: int, pieces: int, max_rank: int, split: int | None, stride: int,
    stride_a: int, dtype: torch.dtype, exact: str, fixed: bool, early: bool, device: torch.device,
) -> Launcher:  # fmt: skip
    """Cached, since an eager call has hundreds. h has as many planes as the grid's last number."""
    groups = min(rows, slots)
    t = FIXED if fixed else tiles(rows * tokens, groups, max_rank, dtype.itemsize)
    count, blocks = tile_bound(rows, tokens, groups, t.block_m), triton.cdiv(max_rank, t.block_r)
    if split is None:
        by_k = fixed or dtype == torch.float32  # one long chain of sums would lose digits
        split = fixed_split(k) if by_k else split_of(k, count * blocks * pieces, device)
    block, width = t.block_k, pieces * max_rank
    chunk = triton.cdiv(triton.cdiv(k, split), block) * block
    constants = {
        "SLOTS": triton.next_power_of_2(slots + 1), "BLOCK_M": t.block_m, "BLOCK_R": t.block_r,
        "BLOCK_K": block // steps(dtype), "EVEN_K": k % block == 0, "STEPS": steps(dtype), "PRECISION": exact,
        "SLICES": pieces, "PDL": early and dependent_launch(device),
    }  # fmt: skip
    numbers = (rows, tokens, k, slots, max_rank, blocks, chunk, stride, stride_a, width, rows * tokens * width)
    return Launcher(lora_shrink_kernel, (count, pieces * blocks, split), numbers, constants, t.warps, 3)


def shrink(
    x: Tensor, a: Tensor, order: Tensor, offsets: Tensor, starts: Tensor, ranks: Tensor, max_rank: int,
    split: int | None = None, *, fixed: bool = False, early: bool = False,
) -> Tensor:  # fmt: skip
    """See `ops.lora_shrink`; split None: chosen from the shapes. What is not specified is left unwritten.

    early: it may be launched before the kernel before it on the stream has ended, which wrote none of the tables.
    """
    (rows, tokens, k), (pieces, slots), (x, stride) = x.shape, starts.shape, _rows(x)
    run = _shrink(
        rows, tokens, k, slots, pieces, max_rank, split, stride, a.stride(0), x.dtype, precision(x.dtype), fixed, early,
        x.device,
    )  # fmt: skip
    h = torch.empty((run.grid[2], rows, tokens, pieces * max_rank), dtype=torch.float32, device=x.device)
    if not k:
        h.zero_()
    elif h.numel():
        run(x, a, h, order, offsets, starts, ranks)
    return h


@functools.lru_cache(maxsize=4096)
def expand_launcher(
    rows: int, tokens: int, n: int, slots: int, pieces: int, lanes: int, width: int, stride: int, stride_h: int,
    shift: int, plane: int, planes: int, dtype: torch.dtype, exact: str, own_columns: bool, scale: bool, bias: bool,
    even: bool, fixed: bool, early: bool, device: torch.device,
) -> Launcher:  # fmt: skip
    """Cached, since an eager call has hundreds. width: columns of h. dtype: of b. early: it may be launched
    before the kernel before it on the stream has ended, which wrote neither b nor tables."""
    groups, bound = min(rows, slots + 1), 16 if own_columns else min(width // lanes, 32)
    t = FIXED if fixed else tiles(rows * tokens, groups, bound, dtype.itemsize)
    if bound <= 16 and dtype.itemsize == 2 and not fixed:
        t = LOW
    constants = {
        "SLICES": pieces, "LANES": lanes, "PLANES": planes, "OWN_COLUMNS": own_columns, "SCALE": scale, "BIAS": bias,
        "SLOTS": triton.next_power_of_2(slots + 1), "BLOCK_M": t.block_m, "BLOCK_R": t.block_r, "BLOCK_N": t.block_n,
        "STEPS": steps(dtype), "PRECISION": exact, "EVEN": even,
        "PDL": early and dependent_launch(device),
    }  # fmt: skip
    grid = (tile_bound(rows, tokens, groups, t.block_m), triton.cdiv(n, t.block_n) + pieces - 1, 1)
    numbers = (rows, tokens, n, slots, width // lanes, stride, stride_h, shift, plane)
    return Launcher(lora_expand_kernel, grid, numbers, constants, t.warps, 1)


def expand(
    y: Tensor, h: Tensor, b: Tensor, order: Tensor, offsets: Tensor, starts: Tensor, ranks: Tensor,
    slices: Tensor | None = None, scale: Tensor | None = None, bias: Tensor | None = None, own_columns: bool = False,
    *, fixed: bool = False,
) -> Tensor:  # fmt: skip
    """See `ops.lora_expand`."""
    (rows, tokens, n), (pieces, slots), (planes, _, _, width) = y.shape, starts.shape, h.shape
    if pieces > MOST_SLICES:
        raise ValueError(f"lora_expand: Triton takes at most {MOST_SLICES} slices, got {pieces}")
    shape = (rows, tokens, n) if slices is None else (rows * tokens * n,)
    out = torch.empty(shape, dtype=y.dtype, device=y.device)
    if not out.numel():
        return out
    parts = [out]
    if slices is not None:
        flat = rows * tokens
        parts = [out[flat * first : flat * (first + size)] for first, size, _ in slices.tolist()]
    y, stride = _rows(y)
    plane, stride_r, stride_h, together = h.stride()
    if together != 1 or stride_r != tokens * stride_h:
        h, stride_h, plane = h.contiguous(), width, rows * tokens * width
    run = expand_launcher(
        rows, tokens, n, slots, pieces, pieces, width, stride, stride_h, 0, plane, planes, b.dtype,
        precision(b.dtype), own_columns, scale is not None, bias is not None, False, fixed, False, y.device,
    )  # fmt: skip
    run(y, h, *four(parts), b, order, offsets, starts, ranks, slices, scale, bias)
    return out


def four(outs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The kernels' parameters out ... out_3, of which they use as many as there are slices."""
    return (*outs, *[outs[0]] * (MOST_SLICES - len(outs)))
