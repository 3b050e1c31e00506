"""The expand kernels for prompts: a program keeps its part of B and goes over a row's tokens.

A token has little to multiply, so what counts is how much is on its way from memory at a time: y is read STAGES - 1
blocks ahead into shared memory. It is the sum's first term, since Triton reads ahead what goes into a product. Letters
as in lora_expand.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .lora_expand import find_columns, h_of, of_slice, product
from .lora_gated import product_of


@triton.jit
def find_chunk(tiles, chunks, chunk, tokens):
    """(tile of columns, row, its first token, one past its last) of a program. Those of one chunk of tokens follow each
    other, so that whole lines of y are read at a time."""
    part = tl.program_id(0) // tiles
    row, first = part // chunks, (part % chunks) * chunk
    return tl.program_id(0) % tiles, row, first, tl.minimum(first + chunk, tokens)


@triton.jit(do_not_specialize=["tokens", "slots", "chunk", "chunks", "tiles"])  # one compiled kernel for all batches
def lora_expand_long_kernel(
    y, h, out, out_1, out_2, out_3, b, row_slots, starts, ranks, slices,
    tokens, n, slots, max_rank, stride_y, stride_h, shift, chunk, chunks, tiles,
    SLICES: tl.constexpr, LANES: tl.constexpr, OWN_COLUMNS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr, EVEN: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program (row, chunk of its tokens, tile of columns) writes out[these tokens, columns]. h is in one plane,
    no rank above BLOCK_R.

    chunks: of a row; `chunk` tokens each. tiles: of columns.
    """
    tile, row, first, end = find_chunk(tiles, chunks, chunk, tokens)
    piece, left, width, offset, column = find_columns(tile, slices, n, SLICES, BLOCK_N, EVEN)
    if piece < SLICES:
        slot = tl.load(row_slots + row)
        entry = piece * slots + slot
        r = tl.load(ranks + entry, mask=slot >= 0, other=0)
        start = tl.load(starts + entry, mask=slot >= 0, other=0).to(tl.int64)
        columns, at = column + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_R)
        inside, own = columns < width, at < r
        b_tile = b + offset + (start + at[:, None]) * width + columns[None, :]
        some_b = tl.load(b_tile, mask=own[:, None] & inside[None, :], other=0.0)
        if PDL:
            tl.extra.cuda.gdc_wait()
        begin = row.to(tl.int64) * tokens + first
        y_tile = y + begin * stride_y + (left + columns)[None, :]
        h_tile = h_of(h, start, piece if LANES > 1 else 0, max_rank, shift, LANES, OWN_COLUMNS)
        h_tile += begin * stride_h + at[None, :] * (LANES if OWN_COLUMNS else 1)
        out_tile = of_slice(piece, out, out_1, out_2, out_3, SLICES) + begin * width + columns[None, :]
        kind: tl.constexpr = out.dtype.element_ty
        for low in tl.range(0, end - first, BLOCK_M, num_stages=STAGES):
            token = low + tl.arange(0, BLOCK_M)[:, None]
            edge = (token < end - first) & inside[None, :]
            total = tl.load(y_tile + token * stride_y, mask=edge, other=0.0).to(tl.float32)
            some_h = tl.load(h_tile + token * stride_h, mask=(token < end - first) & own[None, :], other=0.0)
            total = product(some_h, some_b, total, kind == tl.bfloat16, PRECISION)
            tl.store(out_tile + token * width, total.to(kind), mask=edge)


@triton.jit(do_not_specialize=["tokens", "slots", "chunk", "chunks", "tiles"])  # one compiled kernel for all batches
def lora_gated_long_kernel(
    y, h, out, b, row_slots, starts, ranks,
    tokens, width, slots, max_rank, stride_y, stride_h, shift, offset, chunk, chunks, tiles,
    GATE: tl.constexpr, ACT: tl.constexpr, LANES: tl.constexpr, OWN_COLUMNS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The same for a gated MLP; letters as in lora_gated.py."""
    tile, row, first, end = find_chunk(tiles, chunks, chunk, tokens)
    slot = tl.load(row_slots + row)
    r_0 = tl.load(ranks + slot, mask=slot >= 0, other=0)
    r_1 = tl.load(ranks + slots + slot, mask=slot >= 0, other=0)
    start_0 = tl.load(starts + slot, mask=slot >= 0, other=0).to(tl.int64)
    start_1 = tl.load(starts + slots + slot, mask=slot >= 0, other=0).to(tl.int64)
    columns, at = tile * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_R)
    inside, own_0, own_1 = columns < width, at < r_0, at < r_1
    tile_0 = b + (start_0 + at[:, None]) * width + columns[None, :]
    tile_1 = b + offset + (start_1 + at[:, None]) * width + columns[None, :]
    some_0 = tl.load(tile_0, mask=own_0[:, None] & inside[None, :], other=0.0)
    some_1 = tl.load(tile_1, mask=own_1[:, None] & inside[None, :], other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
    begin = row.to(tl.int64) * tokens + first
    y_tile, out_tile = y + begin * stride_y + columns[None, :], out + begin * width + columns[None, :]
    h_row = begin * stride_h + at[None, :] * (LANES if OWN_COLUMNS else 1)
    h_0 = h_of(h, start_0, 0, max_rank, shift, LANES, OWN_COLUMNS) + h_row
    h_1 = h_of(h, start_1, LANES - 1, max_rank, shift, LANES, OWN_COLUMNS) + h_row
    kind: tl.constexpr = out.dtype.element_ty
    for low in tl.range(0, end - first, BLOCK_M, num_stages=STAGES):
        token = low + tl.arange(0, BLOCK_M)[:, None]
        live = token < end - first
        edge = live & inside[None, :]
        total_0 = tl.load(y_tile + token * stride_y, mask=edge, other=0.0).to(tl.float32)
        total_1 = tl.load(y_tile + token * stride_y + width, mask=edge, other=0.0).to(tl.float32)
        some_h = tl.load(h_0 + token * stride_h, mask=live & own_0[None, :], other=0.0)
        total_0 = product(some_h, some_0, total_0, kind == tl.bfloat16, PRECISION)
        some_h = tl.load(h_1 + token * stride_h, mask=live & own_1[None, :], other=0.0)
        total_1 = product(some_h, some_1, total_1, kind == tl.bfloat16, PRECISION)
        if GATE == 0:
            found = product_of(total_0, total_1, kind, ACT)
        else:
            found = product_of(total_1, total_0, kind, ACT)
        tl.store(out_tile + token * width, found, mask=edge)
