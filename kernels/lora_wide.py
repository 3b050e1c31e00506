"""The expand kernels for more than few tokens: a program keeps h of a tile of tokens and goes over a range of columns.

A token has little to multiply, so what counts is how much is on its way from memory at a time: B and y are read
STAGES - 1 blocks ahead into shared memory. y is the sum's first term, since Triton reads ahead what goes into a
product. What a program must look up first, it looks up once for all its columns. Letters as in lora_expand.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .lora_expand import find_columns, h_of, of_slice, product
from .lora_gated import product_of
from .tiles import find_tile, tokens_of


@triton.jit(do_not_specialize=["rows", "tokens", "slots"])  # one compiled kernel for all batches
def lora_expand_wide_kernel(
    y, h, out, out_1, out_2, out_3, b, order, offsets, starts, ranks, slices,
    rows, tokens, n, slots, max_rank, stride_y, stride_h, shift,
    SLICES: tl.constexpr, LANES: tl.constexpr, OWN_COLUMNS: tl.constexpr, SLOTS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, LOOP: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
    EVEN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (tile, LOOP blocks of columns of a slice) writes out[tokens of the tile, columns]. h is in one plane, no
    rank above BLOCK_R."""
    slot, first, end = find_tile(tl.program_id(0), offsets, rows, tokens, slots, SLOTS, BLOCK_M)
    if slot > slots:
        return
    piece, left, width, offset, column = find_columns(tl.program_id(1), slices, n, SLICES, BLOCK_N * LOOP, EVEN)
    if piece < SLICES:
        token, live = tokens_of(order, first, end, tokens, BLOCK_M)
        token, live = token[:, None], live[:, None]
        r = tl.load(ranks + piece * slots + slot, mask=slot < slots, other=0)
        start = tl.load(starts + piece * slots + slot, mask=slot < slots, other=0).to(tl.int64)
        at = tl.arange(0, BLOCK_R)
        h_tile = h_of(h, start, piece if LANES > 1 else 0, max_rank, shift, LANES, OWN_COLUMNS)
        h_tile += token * stride_h + at[None, :] * (LANES if OWN_COLUMNS else 1)
        b_tile, y_tile = b + offset + (start + at[:, None]) * width, y + token * stride_y + left
        out_tile = of_slice(piece, out, out_1, out_2, out_3, SLICES) + token * width
        kind: tl.constexpr = out.dtype.element_ty
        if PDL:
            tl.extra.cuda.gdc_wait()
        some_h = tl.load(h_tile, mask=live & (at < r)[None, :], other=0.0)
        for low in tl.range(column, tl.minimum(column + BLOCK_N * LOOP, width), BLOCK_N, num_stages=STAGES):
            columns = low + tl.arange(0, BLOCK_N)[None, :]
            inside = columns < width
            some_b = tl.load(b_tile + columns, mask=(at < r)[:, None] & inside, other=0.0)
            total = tl.load(y_tile + columns, mask=live & inside, other=0.0).to(tl.float32)
            total = product(some_h, some_b, total, kind == tl.bfloat16, PRECISION)
            tl.store(out_tile + columns, total.to(kind), mask=live & inside)


@triton.jit(do_not_specialize=["rows", "tokens", "slots"])  # one compiled kernel for all batches
def lora_gated_wide_kernel(
    y, h, out, b, order, offsets, starts, ranks,
    rows, tokens, width, slots, max_rank, stride_y, stride_h, shift, offset,
    GATE: tl.constexpr, ACT: tl.constexpr, LANES: tl.constexpr, OWN_COLUMNS: tl.constexpr, SLOTS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, LOOP: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The same for a gated MLP; letters as in lora_gated.py."""
    slot, first, end = find_tile(tl.program_id(0), offsets, rows, tokens, slots, SLOTS, BLOCK_M)
    if slot > slots:
        return
    token, live = tokens_of(order, first, end, tokens, BLOCK_M)
    token, live = token[:, None], live[:, None]
    r_0 = tl.load(ranks + slot, mask=slot < slots, other=0)
    r_1 = tl.load(ranks + slots + slot, mask=slot < slots, other=0)
    start_0 = tl.load(starts + slot, mask=slot < slots, other=0).to(tl.int64)
    start_1 = tl.load(starts + slots + slot, mask=slot < slots, other=0).to(tl.int64)
    at, column = tl.arange(0, BLOCK_R), tl.program_id(1) * (BLOCK_N * LOOP)
    h_row = token * stride_h + at[None, :] * (LANES if OWN_COLUMNS else 1)
    h_0 = h_of(h, start_0, 0, max_rank, shift, LANES, OWN_COLUMNS) + h_row
    h_1 = h_of(h, start_1, LANES - 1, max_rank, shift, LANES, OWN_COLUMNS) + h_row
    tile_0, tile_1 = b + (start_0 + at[:, None]) * width, b + offset + (start_1 + at[:, None]) * width
    y_tile, out_tile = y + token * stride_y, out + token * width
    kind: tl.constexpr = out.dtype.element_ty
    if PDL:
        tl.extra.cuda.gdc_wait()
    some_h_0 = tl.load(h_0, mask=live & (at < r_0)[None, :], other=0.0)
    some_h_1 = tl.load(h_1, mask=live & (at < r_1)[None, :], other=0.0)
    for low in tl.range(column, tl.minimum(column + BLOCK_N * LOOP, width), BLOCK_N, num_stages=STAGES):
        columns = low + tl.arange(0, BLOCK_N)[None, :]
        inside = columns < width
        some_0 = tl.load(tile_0 + columns, mask=(at < r_0)[:, None] & inside, other=0.0)
        some_1 = tl.load(tile_1 + columns, mask=(at < r_1)[:, None] & inside, other=0.0)
        total_0 = tl.load(y_tile + columns, mask=live & inside, other=0.0).to(tl.float32)
        total_1 = tl.load(y_tile + width + columns, mask=live & inside, other=0.0).to(tl.float32)
        total_0 = product(some_h_0, some_0, total_0, kind == tl.bfloat16, PRECISION)
        total_1 = product(some_h_1, some_1, total_1, kind == tl.bfloat16, PRECISION)
        if GATE == 0:
            found = product_of(total_0, total_1, kind, ACT)
        else:
            found = product_of(total_1, total_0, kind, ACT)
        tl.store(out_tile + columns, found, mask=live & inside)
