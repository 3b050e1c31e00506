# mypy: allow-untyped-defs, allow-incomplete-defs
"""The kernels that name the pairs of experts' LoRA and give them their places. Letters as in torch_pairs.py."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["n", "per_row", "slots", "count"])
def pair_keys_kernel(index, row_slots, keys, n, per_row, slots, count, BLOCK: tl.constexpr):
    """keys[i] of the pairs of a block; per_row: pairs of a row."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = i < n
    expert = tl.minimum(tl.load(index + i, mask=live, other=0), count)
    slot = tl.load(row_slots + i // per_row, mask=live, other=0)
    slot = tl.where(slot < 0, slots, slot)
    tl.store(keys + i, (expert * (slots + 1) + slot).to(keys.dtype.element_ty), mask=live)


@triton.jit(do_not_specialize=["n", "k", "width", "count", "blocks"])
def pair_places_kernel(
    sorted_keys, order, keys, tokens, places, ends, n, k, width, count, blocks, BLOCK: tl.constexpr, DEPTH: tl.constexpr
):  # fmt: skip
    """Programs below `blocks`: keys, tokens and places of the sorted pairs of a block. The others: ends of a block of
    experts, by halving DEPTH times. order: which pair lies there; width: slots + 1."""
    block = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    if block < blocks:
        i = block * BLOCK + at
        live = i < n
        pair = tl.load(order + i, mask=live, other=0)
        tl.store(keys + i, tl.load(sorted_keys + i, mask=live, other=0).to(tl.int32), mask=live)
        tl.store(tokens + i, (pair // k).to(tl.int32), mask=live)
        tl.store(places + pair, i, mask=live)
    else:
        expert = (block - blocks) * BLOCK + at
        bound = (expert + 1) * width
        low = tl.zeros((BLOCK,), dtype=tl.int32)
        high = low + n  # the first pair of a later expert is in low ... high
        for _ in range(DEPTH):
            middle = (low + high) // 2
            open_ = low < high
            before = tl.load(sorted_keys + middle, mask=open_, other=0).to(tl.int32) < bound
            low = tl.where(open_ & before, middle + 1, low)
            high = tl.where(open_ & ~before, middle, high)
        tl.store(ends + expert, low, mask=expert < count)
