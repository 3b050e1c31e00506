"""The expand kernel: out = y + B^T h with the B of each token's adapter. Letters as in ops.py."""

from __future__ import annotations

import triton
import triton.language as tl

from .tiles import find_tile, tokens_of


@triton.jit
def find_columns(tile, slices, n, SLICES: tl.constexpr, BLOCK_N: tl.constexpr, EVEN: tl.constexpr):
    """(slice, its first column, its width, where its B begins, first own column) of a tile of columns.

    slices int64 [L, 3]: first column, width, offset of B. Beyond all slices: slice L. EVEN: all of it is in multiples
    of 16, without which accesses are of single numbers.
    """
    piece, seen = SLICES, 0
    first, width, offset, column = n * 0, n, n * 0, tile * BLOCK_N
    if SLICES == 1:
        piece = 0
    else:
        for i in tl.static_range(SLICES):
            wide = tl.load(slices + 3 * i + 1)
            tiles = ((wide + BLOCK_N - 1) // BLOCK_N).to(tl.int32)
            here = (tile >= seen) & (tile < seen + tiles)
            piece = tl.where(here, i, piece)
            first = tl.where(here, tl.load(slices + 3 * i), first)
            width = tl.where(here, wide, width)
            offset = tl.where(here, tl.load(slices + 3 * i + 2), offset)
            column = tl.where(here, (tile - seen) * BLOCK_N, column)
            seen += tiles
        if EVEN:
            first, width = tl.multiple_of(first, 16), tl.multiple_of(width, 16)
            offset, column = tl.multiple_of(offset, 16), tl.multiple_of(column, 16)
    return piece, first, width, offset, column


@triton.jit
def of_slice(piece, out, out_1, out_2, out_3, SLICES: tl.constexpr):
    """The output of a slice."""
    if SLICES > 1:
        out = tl.where(piece == 1, out_1, out)
    if SLICES > 2:
        out = tl.where(piece == 2, out_2, out)
    if SLICES > 3:
        out = tl.where(piece == 3, out_3, out)
    return out


@triton.jit
def h_of(h, start, own, max_rank, shift, LANES: tl.constexpr, OWN_COLUMNS: tl.constexpr):
    """Where a slot's numbers begin in the row of a token: for the slice `own` of LANES."""
    if OWN_COLUMNS:
        h += shift + start * LANES + own
    else:
        h += own * max_rank
    return h


@triton.jit
def summed(place, own, plane, PLANES: tl.constexpr):
    """Numbers of h, each the sum of those in its planes."""
    some_h = tl.load(place, mask=own, other=0.0)
    for z in tl.static_range(1, PLANES):
        some_h += tl.load(place + z * tl.cast(plane, tl.int64), mask=own, other=0.0)
    return some_h


@triton.jit(do_not_specialize=["rows", "tokens", "slots"])  # one compiled kernel for all batches
def lora_expand_kernel(
    y, h, out, out_1, out_2, out_3, b, order, offsets, starts, ranks, slices, scale, bias,
    rows, tokens, n, slots, max_rank, stride_y, stride_h, shift, plane,
    SLICES: tl.constexpr, LANES: tl.constexpr, PLANES: tl.constexpr, OWN_COLUMNS: tl.constexpr, SCALE: tl.constexpr,
    BIAS: tl.constexpr, SLOTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
    STEPS: tl.constexpr, PRECISION: tl.constexpr, EVEN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (tile, tile of columns) writes out[tokens of the tile, columns]; base rows are copied from y.

    out, out_1, ...: of the slices, each [R, T, its columns]. PLANES: partial sums in h, `plane` elements apart, added
    in their order. OWN_COLUMNS: h has a column for every rank row of the pool, from column `shift` on, those of the
    slices interleaved; else column 0 of its slice's `max_rank` columns is the slot's first. LANES: SLICES, or 1 where
    all slices read the same columns of h, which are there once. STEPS: as in the shrink.
    PDL: it is launched while the kernel before it still runs, and reads what that one writes after the wait only.
    """
    slot, first, end = find_tile(tl.program_id(0), offsets, rows, tokens, slots, SLOTS, BLOCK_M)
    if slot > slots:
        return
    token, live = tokens_of(order, first, end, tokens, BLOCK_M)
    piece, left, width, offset, column = find_columns(tl.program_id(1), slices, n, SLICES, BLOCK_N, EVEN)
    if piece < SLICES:
        expand_columns(
            y, h, b, of_slice(piece, out, out_1, out_2, out_3, SLICES), starts, ranks, scale, bias,
            slot, token, live, piece, left, width, offset, column,
            n, slots, max_rank, stride_y, stride_h, shift, plane,
            LANES, PLANES, OWN_COLUMNS, SCALE, BIAS, BLOCK_M, BLOCK_R, BLOCK_N, STEPS, PRECISION, PDL,
        )  # fmt: skip


@triton.jit
def expand_columns(
    y, h, b, out, starts, ranks, scale, bias, slot, token, live, piece, left, width, offset, column,
    n, slots, max_rank, stride_y, stride_h, shift, plane,
    LANES: tl.constexpr, PLANES: tl.constexpr, OWN_COLUMNS: tl.constexpr, SCALE: tl.constexpr, BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, STEPS: tl.constexpr, PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One tile of columns of one slice, for the tokens of one slot."""
    entry = piece * slots + slot
    r = tl.load(ranks + entry, mask=slot < slots, other=0)
    start = tl.load(starts + entry, mask=slot < slots, other=0).to(tl.int64)
    columns = column + tl.arange(0, BLOCK_N)
    inside = columns < width
    edge = live[:, None] & inside[None, :]
    own = piece if LANES > 1 else 0
    h_tile = h_of(h, start, own, max_rank, shift, LANES, OWN_COLUMNS) + token[:, None] * stride_h
    b_tile = b + offset + start * width + columns[None, :]
    at = tl.arange(0, BLOCK_R)
    some_b = tl.load(b_tile + at[:, None] * width, mask=(at < r)[:, None] & inside[None, :], other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
    before = tl.load(y + token[:, None] * stride_y + (left + columns)[None, :], mask=edge, other=0.0)
    total = over_ranks(
        h_tile, LANES if OWN_COLUMNS else 1, plane, b_tile, width, some_b, r, live, inside,
        out.dtype.element_ty == tl.bfloat16, PLANES, BLOCK_M, BLOCK_R, BLOCK_N, STEPS, PRECISION,
    )  # fmt: skip
    total += before.to(tl.float32)
    if SCALE:
        factor = tl.load(scale + slot.to(tl.int64) * n + left + columns, mask=inside & (r > 0), other=1.0)
        total *= factor.to(tl.float32)[None, :]
    if BIAS:
        more = tl.load(bias + slot.to(tl.int64) * n + left + columns, mask=inside & (r > 0), other=0.0)
        total += more.to(tl.float32)[None, :]
    tl.store(out + token[:, None] * width + columns[None, :], total.to(out.dtype.element_ty), mask=edge)


@triton.jit
def over_ranks(
    h_tile, lane, plane, b_tile, width, some_b, r, live, inside, COARSE: tl.constexpr,
    PLANES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, STEPS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """[BLOCK_M, BLOCK_N] float32: h B over r ranks, `lane` apart in h; some_b: the first block of B, read before."""
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for low in range(0, r, BLOCK_R * STEPS):
        part = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32) if STEPS > 1 else total
        for i in tl.static_range(STEPS):
            at = low + i * BLOCK_R + tl.arange(0, BLOCK_R)
            own = live[:, None] & (at < r)[None, :]
            some_h = summed(h_tile + at[None, :] * lane, own, plane, PLANES)
            part = product(some_h, some_b, part, COARSE, PRECISION)
            at += BLOCK_R
            some_b = tl.load(b_tile + at[:, None] * width, mask=(at < r)[:, None] & inside[None, :], other=0.0)
        total = total + part if STEPS > 1 else part
    return total


@triton.jit
def product(h, b, total, COARSE: tl.constexpr, PRECISION: tl.constexpr):
    """total + h b. COARSE: the result is rounded to bfloat16. Then a float32 h is cut into two bfloat16 for a bfloat16
    b: 16 bits of it, 8 more than the result keeps, at half the time of the kernel with three passes of TF32."""
    if h.dtype == b.dtype:
        return tl.dot(h, b, total, input_precision=PRECISION)
    elif (b.dtype == tl.bfloat16) & COARSE:
        high = h.to(tl.bfloat16)
        low = (h - high.to(tl.float32)).to(tl.bfloat16)
        return tl.dot(low, b, tl.dot(high, b, total))
    else:
        return tl.dot(h.to(tl.float32), b.to(tl.float32), total, input_precision=PRECISION)
