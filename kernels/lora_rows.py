"""The expand kernel for few tokens: every token by itself, or with those of its slot. Letters as in ops.py."""

from __future__ import annotations

import triton
import triton.language as tl

from .lora_expand import expand_columns, find_columns, h_of, of_slice, summed
from .tiles import find_group, tokens_of


@triton.jit(do_not_specialize=["tokens", "slots"])  # one compiled kernel for all batches
def lora_expand_rows_kernel(
    y, h, out, out_1, out_2, out_3, b, row_slots, order, offsets, starts, ranks, slices,
    tokens, n, slots, max_rank, stride_y, stride_h, shift, plane,
    SLICES: tl.constexpr, LANES: tl.constexpr, PLANES: tl.constexpr, OWN_COLUMNS: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, STEPS: tl.constexpr, PRECISION: tl.constexpr, EVEN: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program (tile of columns, sorted token) writes out[tokens, columns] = y + B^T h of the tokens' slot.

    What tokens of one slot share is read again, from L2, unless GROUP are computed together. The other letters as in
    the expand.
    """
    token, slot, first, end = find_group(tl.program_id(1), order, offsets, row_slots, tokens, GROUP)
    if first == end:
        return
    piece, left, width, offset, column = find_columns(tl.program_id(0), slices, n, SLICES, BLOCK_N, EVEN)
    if piece < SLICES:
        some_out = of_slice(piece, out, out_1, out_2, out_3, SLICES)
        if end - first > 1:
            if GROUP > 1:
                several, live = tokens_of(order, first, end, tokens, GROUP)
                expand_columns(
                    y, h, b, some_out, starts, ranks, None, None, slot, several, live, piece, left, width, offset,
                    column, n, slots, max_rank, stride_y, stride_h, shift, plane,
                    LANES, PLANES, OWN_COLUMNS, False, False, GROUP, BLOCK_R, BLOCK_N, STEPS, PRECISION, PDL,
                )  # fmt: skip
        else:
            entry = piece * slots + slot
            r = tl.load(ranks + entry, mask=slot >= 0, other=0)
            start = tl.load(starts + entry, mask=slot >= 0, other=0).to(tl.int64)
            columns = column + tl.arange(0, BLOCK_N)
            inside = columns < width
            at = tl.arange(0, BLOCK_R)
            b_tile = b + offset + start * width + columns[None, :]
            some_b = tl.load(b_tile + at[:, None] * width, mask=(at < r)[:, None] & inside[None, :], other=0.0)
            if PDL:
                tl.extra.cuda.gdc_wait()
            total = tl.load(y + token * stride_y + left + columns, mask=inside, other=0.0).to(tl.float32)
            own = piece if LANES > 1 else 0
            h_tile = h_of(h, start, own, max_rank, shift, LANES, OWN_COLUMNS) + token * stride_h
            for _ in range(0, r, BLOCK_R):
                some_h = summed(h_tile + at * (LANES if OWN_COLUMNS else 1), at < r, plane, PLANES)
                total += tl.sum(some_h.to(tl.float32)[:, None] * some_b.to(tl.float32), 0)
                at += BLOCK_R
                some_b = tl.load(b_tile + at[:, None] * width, mask=(at < r)[:, None] & inside[None, :], other=0.0)
            tl.store(some_out + token * width + columns, total.to(out.dtype.element_ty), mask=inside)
