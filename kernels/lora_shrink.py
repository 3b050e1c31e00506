"""The shrink kernel: h = A x with the A of each token's adapter. Letters as in ops.py."""

from __future__ import annotations

import triton
import triton.language as tl

from .tiles import find_tile, tokens_of


@triton.jit(do_not_specialize=["rows", "tokens", "slots", "blocks"])  # one compiled kernel for all batches
def lora_shrink_kernel(
    x, a, h, order, offsets, starts, ranks,
    rows, tokens, k, slots, max_rank, blocks, chunk, stride_x, stride_a, stride_h, plane,
    SLOTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr, STEPS: tl.constexpr, PRECISION: tl.constexpr, SLICES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (tile, slice and block of ranks, range of K) writes h[range, tokens of the tile, ranks of the block].

    blocks: rank blocks per slice. chunk: columns of a range of K, a multiple of BLOCK_K * STEPS. plane: elements of h
    per range.
    STEPS: blocks of K that are summed apart and then added: float32 loses digits in one long chain of sums. PDL: it is
    launched while the kernel before it still runs, which may use the memory of h, and lets the next one start early.
    Programs without work wait as well: the next kernel knows of the one before through this one's end alone.
    """
    slot, first, end = find_tile(tl.program_id(0), offsets, rows, tokens, slots, SLOTS, BLOCK_M)
    piece, block = tl.program_id(1) // blocks, tl.program_id(1) % blocks
    r = tl.load(ranks + piece * slots + slot, mask=slot < slots, other=0)
    if block * BLOCK_R >= r:
        if PDL:
            tl.extra.cuda.gdc_wait()
        return
    start = tl.load(starts + piece * slots + slot).to(tl.int64)
    token, live = tokens_of(order, first, end, tokens, BLOCK_M)
    at = block * BLOCK_R + tl.arange(0, BLOCK_R)
    own = at < r
    low = tl.program_id(2) * chunk
    columns = low + tl.arange(0, BLOCK_K)
    x_tile = x + token[:, None] * stride_x + columns[None, :]
    a_tile = a + ((start + at) * SLICES + piece)[None, :] * stride_a + columns[:, None]
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    total = tl.zeros((BLOCK_M, BLOCK_R), dtype=tl.float32)
    for step in range(0, tl.minimum(chunk, k - low), BLOCK_K * STEPS):
        part = tl.zeros((BLOCK_M, BLOCK_R), dtype=tl.float32) if STEPS > 1 else total
        for i in tl.static_range(STEPS):
            here = step + i * BLOCK_K
            if EVEN_K:
                some_x = tl.load(x_tile + here, mask=live[:, None], other=0.0)
                some_a = tl.load(a_tile + here, mask=own[None, :], other=0.0)
            else:
                inside = columns + here < k
                some_x = tl.load(x_tile + here, mask=live[:, None] & inside[None, :], other=0.0)
                some_a = tl.load(a_tile + here, mask=own[None, :] & inside[:, None], other=0.0)
            part = tl.dot(some_x, some_a, part, input_precision=PRECISION)
        total = total + part if STEPS > 1 else part
    place = h + tl.program_id(2).to(tl.int64) * plane + token[:, None] * stride_h + (piece * max_rank + at)[None, :]
    tl.store(place, total, mask=live[:, None] & own[None, :])
