"""The expand kernels of two slices that a gated MLP multiplies: out = act(y_g + B_g^T h_g) * (y_u + B_u^T h_u).

One pass over y instead of three: the two deltas, the activation and the product. All is rounded where a model that does
it in steps rounds: the two sums, the activation, the product. Letters as in ops.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .lora_expand import h_of, over_ranks, summed
from .tiles import find_group, find_tile, tokens_of


@triton.jit
def activated(x, ACT: tl.constexpr):
    """float32 -> float32. gelu_tanh: x / 2 * (1 + tanh(z)) is x * sigmoid(2 z)."""
    tl.static_assert(ACT == "silu" or ACT == "gelu_tanh")
    if ACT == "silu":
        return x / (1.0 + tl.exp(-x))
    else:
        return x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))


@triton.jit
def product_of(gate, up, kind: tl.constexpr, ACT: tl.constexpr):
    """Of two float32 sums, rounded to `kind` at each step."""
    some = activated(gate.to(kind).to(tl.float32), ACT).to(kind).to(tl.float32)
    return (some * up.to(kind).to(tl.float32)).to(kind)


@triton.jit(do_not_specialize=["tokens", "slots"])  # one compiled kernel for all batches
def lora_gated_rows_kernel(
    y, h, out, b, row_slots, order, offsets, starts, ranks,
    tokens, width, slots, max_rank, stride_y, stride_h, shift, plane, offset,
    GATE: tl.constexpr, ACT: tl.constexpr, LANES: tl.constexpr, PLANES: tl.constexpr, OWN_COLUMNS: tl.constexpr,
    GROUP: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, STEPS: tl.constexpr, PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program (tile of columns, sorted token) writes out[tokens, columns]. For few tokens.

    width: of each slice; that of the gate is the GATE-th of y and b, the one of slice 1 begins at `offset` of b. GROUP:
    as in lora_rows.py, the other letters as in lora_expand.py.
    """
    token, slot, first, end = find_group(tl.program_id(1), order, offsets, row_slots, tokens, GROUP)
    if first == end:
        return
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    if end - first > 1:
        if GROUP > 1:
            several, live = tokens_of(order, first, end, tokens, GROUP)
            gated_columns(
                y, h, out, b, starts, ranks, slot, several, live, columns,
                width, slots, max_rank, stride_y, stride_h, shift, plane, offset,
                GATE, ACT, LANES, PLANES, OWN_COLUMNS, GROUP, BLOCK_R, BLOCK_N, STEPS, PRECISION, PDL,
            )  # fmt: skip
    else:
        gated_columns_of_one(
            y, h, out, b, starts, ranks, slot, token, columns,
            width, slots, max_rank, stride_y, stride_h, shift, plane, offset,
            GATE, ACT, LANES, PLANES, OWN_COLUMNS, BLOCK_R, BLOCK_N, PDL,
        )  # fmt: skip


@triton.jit
def gated_columns_of_one(
    y, h, out, b, starts, ranks, slot, token, columns,
    width, slots, max_rank, stride_y, stride_h, shift, plane, offset,
    GATE: tl.constexpr, ACT: tl.constexpr, LANES: tl.constexpr, PLANES: tl.constexpr, OWN_COLUMNS: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One tile of columns of one token, without tensor cores."""
    inside = columns < width
    at = tl.arange(0, BLOCK_R)
    r_0 = tl.load(ranks + slot, mask=slot >= 0, other=0)
    r_1 = tl.load(ranks + slots + slot, mask=slot >= 0, other=0)
    start_0 = tl.load(starts + slot, mask=slot >= 0, other=0).to(tl.int64)
    start_1 = tl.load(starts + slots + slot, mask=slot >= 0, other=0).to(tl.int64)
    tile_0 = b + start_0 * width + columns[None, :]
    tile_1 = b + offset + start_1 * width + columns[None, :]
    some_0 = tl.load(tile_0 + at[:, None] * width, mask=(at < r_0)[:, None] & inside[None, :], other=0.0)
    some_1 = tl.load(tile_1 + at[:, None] * width, mask=(at < r_1)[:, None] & inside[None, :], other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
    place = y + token * stride_y + columns
    total_0 = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    total_1 = tl.load(place + width, mask=inside, other=0.0).to(tl.float32)
    lane: tl.constexpr = LANES if OWN_COLUMNS else 1
    h_0 = h_of(h, start_0, 0, max_rank, shift, LANES, OWN_COLUMNS) + token * stride_h
    h_1 = h_of(h, start_1, LANES - 1, max_rank, shift, LANES, OWN_COLUMNS) + token * stride_h
    for _ in range(0, tl.maximum(r_0, r_1), BLOCK_R):
        some_h = summed(h_0 + at * lane, at < r_0, plane, PLANES)
        total_0 += tl.sum(some_h.to(tl.float32)[:, None] * some_0.to(tl.float32), 0)
        some_h = summed(h_1 + at * lane, at < r_1, plane, PLANES)
        total_1 += tl.sum(some_h.to(tl.float32)[:, None] * some_1.to(tl.float32), 0)
        at += BLOCK_R
        some_0 = tl.load(tile_0 + at[:, None] * width, mask=(at < r_0)[:, None] & inside[None, :], other=0.0)
        some_1 = tl.load(tile_1 + at[:, None] * width, mask=(at < r_1)[:, None] & inside[None, :], other=0.0)
    kind: tl.constexpr = out.dtype.element_ty
    if GATE == 0:
        found = product_of(total_0, total_1, kind, ACT)
    else:
        found = product_of(total_1, total_0, kind, ACT)
    tl.store(out + token * width + columns, found, mask=inside)


@triton.jit(do_not_specialize=["rows", "tokens", "slots"])  # one compiled kernel for all batches
def lora_gated_kernel(
    y, h, out, b, order, offsets, starts, ranks,
    rows, tokens, width, slots, max_rank, stride_y, stride_h, shift, plane, offset,
    GATE: tl.constexpr, ACT: tl.constexpr, LANES: tl.constexpr, PLANES: tl.constexpr, OWN_COLUMNS: tl.constexpr,
    SLOTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, STEPS: tl.constexpr,
    PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (tile, tile of columns) writes out[tokens of the tile, columns]; letters as in lora_expand.py."""
    slot, first, end = find_tile(tl.program_id(0), offsets, rows, tokens, slots, SLOTS, BLOCK_M)
    if slot > slots:
        return
    token, live = tokens_of(order, first, end, tokens, BLOCK_M)
    gated_columns(
        y, h, out, b, starts, ranks, slot, token, live, tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N),
        width, slots, max_rank, stride_y, stride_h, shift, plane, offset,
        GATE, ACT, LANES, PLANES, OWN_COLUMNS, BLOCK_M, BLOCK_R, BLOCK_N, STEPS, PRECISION, PDL,
    )  # fmt: skip


@triton.jit
def gated_columns(
    y, h, out, b, starts, ranks, slot, token, live, columns,
    width, slots, max_rank, stride_y, stride_h, shift, plane, offset,
    GATE: tl.constexpr, ACT: tl.constexpr, LANES: tl.constexpr, PLANES: tl.constexpr, OWN_COLUMNS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, STEPS: tl.constexpr, PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One tile of columns, for the tokens of one slot."""
    inside = columns < width
    edge = live[:, None] & inside[None, :]
    r_0 = tl.load(ranks + slot, mask=slot < slots, other=0)
    r_1 = tl.load(ranks + slots + slot, mask=slot < slots, other=0)
    start_0 = tl.load(starts + slot, mask=slot < slots, other=0).to(tl.int64)
    start_1 = tl.load(starts + slots + slot, mask=slot < slots, other=0).to(tl.int64)
    tile_0 = b + start_0 * width + columns[None, :]
    tile_1 = b + offset + start_1 * width + columns[None, :]
    at = tl.arange(0, BLOCK_R)
    some_0 = tl.load(tile_0 + at[:, None] * width, mask=(at < r_0)[:, None] & inside[None, :], other=0.0)
    some_1 = tl.load(tile_1 + at[:, None] * width, mask=(at < r_1)[:, None] & inside[None, :], other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
    place = y + token[:, None] * stride_y + columns[None, :]
    before_0 = tl.load(place, mask=edge, other=0.0)
    before_1 = tl.load(place + width, mask=edge, other=0.0)
    lane: tl.constexpr = LANES if OWN_COLUMNS else 1
    h_0 = h_of(h, start_0, 0, max_rank, shift, LANES, OWN_COLUMNS) + token[:, None] * stride_h
    h_1 = h_of(h, start_1, LANES - 1, max_rank, shift, LANES, OWN_COLUMNS) + token[:, None] * stride_h
    kind: tl.constexpr = out.dtype.element_ty
    total_0 = over_ranks(
        h_0, lane, plane, tile_0, width, some_0, r_0, live, inside, kind == tl.bfloat16,
        PLANES, BLOCK_M, BLOCK_R, BLOCK_N, STEPS, PRECISION,
    )  # fmt: skip
    total_0 += before_0.to(tl.float32)
    total_1 = over_ranks(
        h_1, lane, plane, tile_1, width, some_1, r_1, live, inside, kind == tl.bfloat16,
        PLANES, BLOCK_M, BLOCK_R, BLOCK_N, STEPS, PRECISION,
    )  # fmt: skip
    total_1 += before_1.to(tl.float32)
    if GATE == 0:
        found = product_of(total_0, total_1, kind, ACT)
    else:
        found = product_of(total_1, total_0, kind, ACT)
    tl.store(out + token[:, None] * width + columns[None, :], found, mask=edge)
