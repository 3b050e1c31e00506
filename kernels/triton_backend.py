"""Launchers of the Triton kernels: tile sizes, grids and checks. Specified by torch_backend.py.

Grids and tiles depend on shapes and capacity only, never on the mix: a captured launch serves every mix. FIXED tiles
and a split of K that depends on K alone make a row's delta independent of everything else in the batch.
"""

from __future__ import annotations

import functools
import subprocess
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
from torch import Tensor
from triton.runtime.errors import PTXASError

from .backends import KernelError
from .lora_expand import lora_expand_kernel
from .lora_shrink import lora_shrink_kernel

MANY = 1 << 14  # tokens of a call from which a program of the expand writes more columns
NARROW = 64  # tokens per group up to which the smallest tile is used
# of the compiler, its assembler, and the C compiler (a missing one too) that builds launchers
BROKEN = (triton.CompilationError, PTXASError, triton.OutOfResources, subprocess.CalledProcessError, FileNotFoundError)
FIXED_CHUNK = 256  # columns of one range of K where the split depends on K alone
MAX_SPLIT = 16


@dataclass(frozen=True)
class Tiles:
    block_m: int  # tokens
    block_r: int  # ranks
    block_k: int
    block_n: int
    warps: int = 4
    loop: int = 1  # tiles of columns that one program of the expand writes


FIXED = Tiles(16, 16, 64, 64)
LONG = Tiles(16, 16, 128, 256, loop=4)


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


def _launch(kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], constants: dict[str, Any]) -> None:
    """On the device of the first argument, which need not be the current one. Raises KernelError where the kernel
    cannot be compiled."""
    device = arguments[0].device
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            return _launch(kernel, grid, arguments, constants)
    try:
        kernel[grid](*arguments, **constants)
    except BROKEN as error:
        raise _broken(kernel, error) from error
    except RuntimeError as error:
        if "C compiler" not in str(error):  # Triton builds its launcher with one
            raise
        raise _broken(kernel, error) from error


def _broken(kernel: Any, error: Exception) -> KernelError:
    return KernelError(
        f"the Triton kernel {kernel.fn.__name__} must compile on this machine, it did not: {type(error).__name__}: "
        f"{str(error)[:300]}; install a C compiler and a Triton that fits torch and this GPU, or pass backend='torch' "
        f"to from_pretrained"
    )


@functools.lru_cache(maxsize=4096)
def _shrink_plan(
    rows: int, tokens: int, k: int, slots: int, pieces: int, max_rank: int, split: int | None, dtype: torch.dtype,
    exact: str, fixed: bool, device: torch.device,
) -> tuple[tuple[int, int, int], tuple[int, int], dict[str, Any]]:  # fmt: skip
    """(grid, (rank blocks per slice, columns of a range of K), constants of the kernel); cached, since an eager call
    has hundreds."""
    groups = min(rows, slots)
    t = FIXED if fixed else tiles(rows * tokens, groups, max_rank, dtype.itemsize)
    count, blocks = tile_bound(rows, tokens, groups, t.block_m), triton.cdiv(max_rank, t.block_r)
    if split is None:
        by_k = fixed or dtype == torch.float32  # one long chain of sums would lose digits
        split = fixed_split(k) if by_k else split_of(k, count * blocks * pieces, device)
    block = t.block_k * steps(dtype)
    chunk = triton.cdiv(triton.cdiv(k, split), block) * block
    constants = {
        "SLOTS": triton.next_power_of_2(slots + 1), "BLOCK_M": t.block_m, "BLOCK_R": t.block_r, "BLOCK_K": t.block_k,
        "EVEN_K": k % block == 0, "STEPS": steps(dtype), "PRECISION": exact, "num_warps": t.warps, "num_stages": 3,
    }  # fmt: skip
    return (count, pieces * blocks, split), (blocks, chunk), constants


def shrink(
    x: Tensor, a: Tensor, order: Tensor, offsets: Tensor, starts: Tensor, ranks: Tensor, max_rank: int,
    split: int | None = None, *, fixed: bool = False,
) -> Tensor:  # fmt: skip
    """See `ops.lora_shrink`; split None: chosen from the shapes. What is not specified is left unwritten."""
    rows, tokens, k = x.shape
    pieces, slots = starts.shape
    grid, (blocks, chunk), constants = _shrink_plan(
        rows, tokens, k, slots, pieces, max_rank, split, x.dtype, precision(x.dtype), fixed, x.device
    )
    width = pieces * max_rank
    h = torch.empty((grid[2], rows, tokens, width), dtype=torch.float32, device=x.device)
    if not k:
        h.zero_()
    elif h.numel():
        x, stride = _rows(x)
        numbers = (rows, tokens, k, slots, max_rank, blocks, chunk, stride, a.stride(0), width, rows * tokens * width)
        _launch(lora_shrink_kernel, grid, (x, a, h, order, offsets, starts, ranks, *numbers), constants)
    return h


@functools.lru_cache(maxsize=4096)
def _expand_plan(
    rows: int, tokens: int, n: int, slots: int, pieces: int, width: int, planes: int, dtype: torch.dtype, exact: str,
    own_columns: bool, scale: bool, bias: bool, fixed: bool,
) -> tuple[tuple[int, int], dict[str, Any]]:  # fmt: skip
    """(grid, constants of the kernel); cached, since an eager call has hundreds."""
    groups, bound = min(rows, slots + 1), 16 if own_columns else min(width // pieces, 32)
    t = FIXED if fixed else tiles(rows * tokens, groups, bound, dtype.itemsize)
    if t.block_m > 16 and bound <= 16 and dtype.itemsize == 2:  # little to multiply: what counts is the order of writes
        t = LONG if rows * tokens >= MANY else replace(LONG, loop=2)
    constants = {
        "SLICES": pieces, "PLANES": planes, "OWN_COLUMNS": own_columns, "SCALE": scale, "BIAS": bias,
        "SLOTS": triton.next_power_of_2(slots + 1), "BLOCK_M": t.block_m, "BLOCK_R": t.block_r, "BLOCK_N": t.block_n,
        "STEPS": steps(dtype), "PRECISION": exact, "LOOP": t.loop, "num_warps": t.warps, "num_stages": 1,
    }  # fmt: skip
    columns = triton.cdiv(n, t.block_n) + pieces - 1
    return (tile_bound(rows, tokens, groups, t.block_m), triton.cdiv(columns, t.loop)), constants


def expand(
    y: Tensor, h: Tensor, b: Tensor, order: Tensor, offsets: Tensor, starts: Tensor, ranks: Tensor,
    slices: Tensor | None = None, scale: Tensor | None = None, bias: Tensor | None = None, own_columns: bool = False,
    *, fixed: bool = False,
) -> Tensor:  # fmt: skip
    """See `ops.lora_expand`."""
    rows, tokens, n = y.shape
    pieces, slots = starts.shape
    planes, _, _, width = h.shape
    out = torch.empty((rows, tokens, n), dtype=y.dtype, device=y.device)
    if not out.numel():
        return out
    grid, constants = _expand_plan(
        rows, tokens, n, slots, pieces, width, planes, b.dtype, precision(b.dtype), own_columns, scale is not None,
        bias is not None, fixed,
    )  # fmt: skip
    y, stride = _rows(y)
    plane, stride_r, stride_h, together = h.stride()
    if together != 1 or stride_r != tokens * stride_h:
        h, stride_h, plane = h.contiguous(), width, rows * tokens * width
    numbers = (rows, tokens, n, slots, width // pieces, stride, stride_h, n, plane)
    tables = (order, offsets, starts, ranks, slices, scale, bias)
    _launch(lora_expand_kernel, grid, (y, h, b, out, *tables, *numbers), constants)
    return out
