# mypy: allow-untyped-defs, allow-incomplete-defs
"""The kernels of experts' LoRA. Letters and tables as in torch_experts.py; begins, ranks, keys int32.

For few pairs a program serves one pair and multiplies without tensor cores: what counts is to read its rank rows once
at full speed. For many, a program takes BLOCK_M pairs that lie side by side and goes through the keys among them, a
product for each: sorted pairs have few. Every grid follows from the shapes alone.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .lora_expand import product

NONE = tl.constexpr(2147483647)  # a key above all others: of pairs for which there is nothing to do


@triton.jit
def row_of(source, pair, live, SOURCE: tl.constexpr):
    """int64: the row of the input that the pair reads."""
    if SOURCE:
        return tl.load(source + pair, mask=live, other=0).to(tl.int64)
    else:
        return pair.to(tl.int64)


@triton.jit
def keys_of(block, keys, begins, ranks, n, low, BLOCK_M: tl.constexpr):
    """[BLOCK_M] each: pairs of the block, their keys, first rank rows and r; key NONE where r is not above `low`."""
    pair = block * BLOCK_M + tl.arange(0, BLOCK_M)
    live = pair < n
    key = tl.load(keys + pair, mask=live, other=0)
    r = tl.load(ranks + key, mask=live, other=0)
    begin = tl.load(begins + key, mask=live, other=0)
    return pair, tl.where(r > low, key, NONE), begin, r


@triton.jit
def next_key(key, current):
    """The least key above `current`."""
    return tl.min(tl.where(key > current, key, NONE), 0)


@triton.jit
def count_keys(key, BLOCK_M: tl.constexpr):
    """How many different keys there are, without NONE."""
    at = tl.arange(0, BLOCK_M)
    earlier = (key[:, None] == key[None, :]) & (at[None, :] < at[:, None])
    first = (tl.max(earlier.to(tl.int32), 1) == 0) & (key < NONE)
    return tl.sum(first.to(tl.int32), 0)


@triton.jit
def of_key(values, mine):
    """The value, not below 0, that the pairs of one key share."""
    return tl.max(tl.where(mine, values, 0), 0)


# -- one pair a program ------------------------------------------------------------------------------
@triton.jit(do_not_specialize=["blocks"])
def experts_shrink_pair_kernel(
    x, a, h, begins, ranks, keys, source, k, max_rank, blocks, stride_x,
    SOURCE: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    """Program pair * blocks + block writes h[pair, ranks of the block]."""
    pair, low = tl.program_id(0) // blocks, (tl.program_id(0) % blocks) * BLOCK_R
    key = tl.load(keys + pair)
    row = row_of(source, pair, pair >= 0, SOURCE)
    r = tl.load(ranks + key)
    begin = tl.load(begins + key).to(tl.int64)
    if low >= r:
        return
    at = low + tl.arange(0, BLOCK_R)
    own = at < r
    columns = tl.arange(0, BLOCK_K)
    x_row = x + row * stride_x + columns
    a_rows = a + (begin + at)[:, None] * k + columns[None, :]
    total = tl.zeros((BLOCK_R, BLOCK_K), dtype=tl.float32)
    for step in range(0, k, BLOCK_K):
        if EVEN_K:
            some_a = tl.load(a_rows + step, mask=own[:, None], other=0.0)
            some_x = tl.load(x_row + step)
        else:
            inside = columns + step < k
            some_a = tl.load(a_rows + step, mask=own[:, None] & inside[None, :], other=0.0)
            some_x = tl.load(x_row + step, mask=inside, other=0.0)
        total += some_a.to(tl.float32) * some_x.to(tl.float32)[None, :]
    tl.store(h + pair.to(tl.int64) * max_rank + at, tl.sum(total, 1), mask=own)


@triton.jit(do_not_specialize=["tiles"])
def experts_expand_pair_kernel(
    y, h, b, begins, ranks, keys, source, width, max_rank, tiles, stride_y,
    SOURCE: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Program pair * tiles + tile adds to y[pair, columns of the tile]; y begins at the first column of the delta."""
    pair, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    key = tl.load(keys + pair)
    row = row_of(source, pair, pair >= 0, SOURCE)
    r = tl.load(ranks + key)
    begin = tl.load(begins + key).to(tl.int64)
    if r == 0:
        return
    columns = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = columns < width
    y_row = y + pair.to(tl.int64) * stride_y + columns
    before = tl.load(y_row, mask=inside, other=0.0)
    total = tl.zeros((BLOCK_N,), dtype=tl.float32)
    for low in range(0, r, BLOCK_R):
        at = low + tl.arange(0, BLOCK_R)
        own = at < r
        edge = own[:, None] & inside[None, :]
        some_b = tl.load(b + (begin + at)[:, None] * width + columns[None, :], mask=edge, other=0.0)
        some_h = tl.load(h + row * max_rank + at, mask=own, other=0.0)
        total += tl.sum(some_h[:, None] * some_b.to(tl.float32), 0)
    tl.store(y_row, (before.to(tl.float32) + total).to(y.dtype.element_ty), mask=inside)


# -- a tile of pairs a program -----------------------------------------------------------------------
@triton.jit(do_not_specialize=["n", "blocks"])
def experts_shrink_tile_kernel(
    x, a, h, begins, ranks, keys, source, n, k, max_rank, blocks, stride_x,
    SOURCE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr,
    STEPS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Program tile * blocks + block writes h[pairs of the tile, ranks of the block], key after key.

    STEPS: blocks of K that are summed apart and then added: float32 loses digits in one long chain of sums.
    """
    low = (tl.program_id(0) % blocks) * BLOCK_R
    pair, key, begin, r = keys_of(tl.program_id(0) // blocks, keys, begins, ranks, n, low, BLOCK_M)
    row = row_of(source, pair, key < NONE, SOURCE)
    at = low + tl.arange(0, BLOCK_R)
    columns = tl.arange(0, BLOCK_K)
    x_tile = x + row[:, None] * stride_x + columns[None, :]
    h_tile = h + pair.to(tl.int64)[:, None] * max_rank + at[None, :]
    current = tl.min(key, 0)
    while current < NONE:
        mine = key == current
        own = at < of_key(r, mine)
        a_tile = a + (of_key(begin, mine).to(tl.int64) + at)[None, :] * k + columns[:, None]
        total = tl.zeros((BLOCK_M, BLOCK_R), dtype=tl.float32)
        for step in range(0, k, BLOCK_K * STEPS):
            part = tl.zeros((BLOCK_M, BLOCK_R), dtype=tl.float32) if STEPS > 1 else total
            for i in tl.static_range(STEPS):
                here = step + i * BLOCK_K
                if EVEN_K:
                    some_x = tl.load(x_tile + here, mask=mine[:, None], other=0.0)
                    some_a = tl.load(a_tile + here, mask=own[None, :], other=0.0)
                else:
                    inside = columns + here < k
                    some_x = tl.load(x_tile + here, mask=mine[:, None] & inside[None, :], other=0.0)
                    some_a = tl.load(a_tile + here, mask=own[None, :] & inside[:, None], other=0.0)
                part = tl.dot(some_x, some_a, part, input_precision=PRECISION)
            total = total + part if STEPS > 1 else part
        tl.store(h_tile, total, mask=mine[:, None] & own[None, :])
        current = next_key(key, current)


@triton.jit(do_not_specialize=["n", "tiles"])
def experts_expand_tile_kernel(
    y, h, b, begins, ranks, keys, source, n, width, max_rank, tiles, stride_y,
    SOURCE: tl.constexpr, ONE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
    STEPS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Program block * tiles + tile adds to y[pairs of the block, columns of the tile]; y begins at the first column of
    the delta. What a key's product gives other pairs is left out by selection: it may be NaN.

    ONE: no key has more than BLOCK_R rank rows. STEPS: as in the shrink, of blocks of ranks.
    """
    pair, key, begin, r = keys_of(tl.program_id(0) // tiles, keys, begins, ranks, n, 0, BLOCK_M)
    row = row_of(source, pair, key < NONE, SOURCE)
    columns = (tl.program_id(0) % tiles) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = columns < width
    y_tile = y + pair.to(tl.int64)[:, None] * stride_y + columns[None, :]
    edge = (key < NONE)[:, None] & inside[None, :]
    before = tl.load(y_tile, mask=edge, other=0.0)
    h_tile = h + row[:, None] * max_rank
    COARSE: tl.constexpr = y.dtype.element_ty == tl.bfloat16
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    current = tl.min(key, 0)
    if ONE:
        at = tl.arange(0, BLOCK_R)
        all_h = tl.load(h_tile + at[None, :], mask=at[None, :] < r[:, None], other=0.0)
        for _ in range(count_keys(key, BLOCK_M)):  # not a while: loads of the next key's B go ahead
            mine = key == current
            rows = (at < of_key(r, mine))[:, None] & inside[None, :]
            first = of_key(begin, mine).to(tl.int64)
            some_b = tl.load(b + (first + at)[:, None] * width + columns[None, :], mask=rows, other=0.0)
            part = product(all_h, some_b, tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32), COARSE, PRECISION)
            total = tl.where(mine[:, None], part, total)
            current = next_key(key, current)
    else:
        while current < NONE:
            mine = key == current
            own_r, first = of_key(r, mine), of_key(begin, mine).to(tl.int64)
            own_sum = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
            for low in range(0, own_r, BLOCK_R * STEPS):
                part = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32) if STEPS > 1 else own_sum
                for i in tl.static_range(STEPS):
                    at = low + i * BLOCK_R + tl.arange(0, BLOCK_R)
                    own = at < own_r
                    rows = own[:, None] & inside[None, :]
                    some_b = tl.load(b + (first + at)[:, None] * width + columns[None, :], mask=rows, other=0.0)
                    some_h = tl.load(h_tile + at[None, :], mask=mine[:, None] & own[None, :], other=0.0)
                    part = product(some_h, some_b, part, COARSE, PRECISION)
                own_sum = own_sum + part if STEPS > 1 else part
            total = tl.where(mine[:, None], own_sum, total)
            current = next_key(key, current)
    tl.store(y_tile, (before.to(tl.float32) + total).to(y.dtype.element_ty), mask=edge)


# -- the routed sum ----------------------------------------------------------------------------------
@triton.jit(do_not_specialize=["tiles"])
def experts_combine_kernel(
    y, places, weights, out, width, tiles, stride_y, stride_t, stride_c,
    CHOICES: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Program token * tiles + tile writes out[token, columns of the tile]."""
    token, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    token = token.to(tl.int64)
    columns = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = columns < width
    total = tl.zeros((BLOCK_N,), dtype=tl.float32)
    for c in tl.static_range(CHOICES):
        place = tl.load(places + token * CHOICES + c).to(tl.int64)
        weight = tl.load(weights + token * stride_t + c * stride_c).to(tl.float32)
        total += weight * tl.load(y + place * stride_y + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * width + columns, total.to(out.dtype.element_ty), mask=inside)
