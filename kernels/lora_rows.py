"""The expand kernel for few tokens: without tensor cores, few tokens per program. Letters as in ops.py."""

from __future__ import annotations

import triton
import triton.language as tl

from .lora_expand import find_columns, of_slice


@triton.jit(do_not_specialize=["count", "tokens", "slots"])  # one compiled kernel for all batches
def lora_expand_rows_kernel(
    y, h, out, out_1, out_2, out_3, b, order, row_slots, starts, ranks, slices,
    count, tokens, n, slots, stride, shift,
    SLICES: tl.constexpr, ROWS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, EVEN: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program (tile of columns, ROWS sorted tokens) writes out[tokens, columns] = y + B^T h of the tokens' slots.

    y and h have `stride` numbers per token, h one for every rank row from column `shift` on. out, out_1, ...: of the
    slices, each [R, T, its columns]. B is read once for the tokens of a program that have one slot; what others of that
    slot read again comes from L2. Each thread holds all ranks of its columns, so that sums need no other thread: with
    ROWS > 1 BLOCK_R covers all ranks. PDL: as in the expand.
    """
    piece, left, width, offset, column = find_columns(tl.program_id(0), slices, n, SLICES, BLOCK_N, EVEN)
    if piece < SLICES:
        out = of_slice(piece, out, out_1, out_2, out_3, SLICES)
        columns = column + tl.arange(0, BLOCK_N)
        inside = columns < width
        j = tl.program_id(1) * ROWS
        if ROWS == 1:
            token = j.to(tl.int64)
            expand_one(
                y, h, out, b, row_slots, starts, ranks, token, piece, left, width, offset, columns, inside,
                tokens, slots, stride, shift, SLICES, BLOCK_R, PDL,
            )  # fmt: skip
        else:
            end = tl.minimum(j + ROWS, count)
            while j < end:  # once for each slot among the tokens
                j += expand_alike(
                    y, h, out, b, order, row_slots, starts, ranks, j, end, piece, left, width, offset, columns, inside,
                    tokens, slots, stride, shift, SLICES, ROWS, BLOCK_R, PDL,
                )  # fmt: skip


@triton.jit
def expand_one(
    y, h, out, b, row_slots, starts, ranks, token, piece, left, width, offset, columns, inside,
    tokens, slots, stride, shift, SLICES: tl.constexpr, BLOCK_R: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One token, any rank."""
    slot = tl.load(row_slots + token // tokens)
    entry = piece * slots + slot
    r = tl.load(ranks + entry, mask=slot >= 0, other=0)
    start = tl.load(starts + entry, mask=slot >= 0, other=0).to(tl.int64)
    at = tl.arange(0, BLOCK_R)
    b_tile = b + offset + start * width + columns[None, :]
    some_b = tl.load(b_tile + at[:, None] * width, mask=(at < r)[:, None] & inside[None, :], other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
    total = tl.load(y + token * stride + left + columns, mask=inside, other=0.0).to(tl.float32)
    h_tile = h + token * stride + shift + start * SLICES + piece
    for _ in range(0, r, BLOCK_R):
        some_h = tl.load(h_tile + at * SLICES, mask=at < r, other=0.0)
        total += tl.sum(some_h.to(tl.float32)[:, None] * some_b.to(tl.float32), 0)
        at += BLOCK_R
        some_b = tl.load(b_tile + at[:, None] * width, mask=(at < r)[:, None] & inside[None, :], other=0.0)
    tl.store(out + token * width + columns, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def expand_alike(
    y, h, out, b, order, row_slots, starts, ranks, j, end, piece, left, width, offset, columns, inside,
    tokens, slots, stride, shift, SLICES: tl.constexpr, ROWS: tl.constexpr, BLOCK_R: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The sorted tokens from j on that have its slot, up to `end`; how many they are."""
    slot = tl.load(row_slots + tl.load(order + j // tokens))
    entry = piece * slots + slot
    r = tl.load(ranks + entry, mask=slot >= 0, other=0)
    start = tl.load(starts + entry, mask=slot >= 0, other=0).to(tl.int64)
    at = tl.arange(0, BLOCK_R)
    b_tile = b + offset + start * width + columns[None, :]
    some_b = tl.load(b_tile + at[:, None] * width, mask=(at < r)[:, None] & inside[None, :], other=0.0)
    some_b = some_b.to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    seen, places, own, before, some_h = 0, (), (), (), ()
    for i in tl.static_range(ROWS):  # all loads before the first store
        row = tl.load(order + (j + i) // tokens, mask=j + i < end, other=0)
        token = row.to(tl.int64) * tokens + (j + i) % tokens
        same = (j + i < end) & (tl.load(row_slots + row) == slot)
        seen += same.to(tl.int32)
        at_y, at_h = y + token * stride + left, h + token * stride + shift + start * SLICES + piece
        places += (out + token * width,)
        own += (same,)
        before += (tl.load(at_y + columns, mask=inside & same, other=0.0),)
        some_h += (tl.load(at_h + at * SLICES, mask=(at < r) & same, other=0.0),)
    for i in tl.static_range(ROWS):
        total = before[i].to(tl.float32) + tl.sum(some_h[i].to(tl.float32)[:, None] * some_b, 0)
        tl.store(places[i] + columns, total.to(out.dtype.element_ty), mask=inside & own[i])
    return seen
