"""Which tokens a program of a grouped kernel works on: computed from the rows' groups, so no table of tiles is written.

Sorted token j is token j % T of row order[j // T], so the tokens of one slot follow each other. A tile is BLOCK_M of
them at most and holds one slot only. The grid has as many as any mix could need
(`tile_bound` in triton_backend.py); programs of unused ones return.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def find_tile(tile, offsets, rows, tokens, slots, SLOTS: tl.constexpr, BLOCK_M: tl.constexpr):
    """(slot, first sorted token, one past the slot's last) of a tile; slot S: base rows; beyond S: an unused tile.

    offsets int32 [S + 1]; SLOTS: a power of two above S.
    """
    s = tl.arange(0, SLOTS)
    low = tl.load(offsets + s, mask=s <= slots, other=0)
    high = tl.load(offsets + s + 1, mask=s < slots, other=0)
    high = tl.where(s == slots, rows, high)  # base rows are sorted last
    tiles = (tl.maximum(high - low, 0) * tokens + BLOCK_M - 1) // BLOCK_M
    tiles = tl.where(s <= slots, tiles, 0)
    ends = tl.cumsum(tiles, 0)
    slot = tl.sum((ends <= tile).to(tl.int32), 0)
    slot = tl.where(tile < tl.sum(tiles, 0), slot, slots + 1)
    before = tl.sum(tl.where(s < slot, tiles, 0), 0)
    first = tl.sum(tl.where(s == slot, low, 0), 0) * tokens + (tile - before) * BLOCK_M
    return slot, first, tl.sum(tl.where(s == slot, high, 0), 0) * tokens


@triton.jit
def tokens_of(order, first, end, tokens, BLOCK_M: tl.constexpr):
    """(int64 [BLOCK_M] token of the batch, whether there is one) of the sorted tokens first ... first + BLOCK_M."""
    j = first + tl.arange(0, BLOCK_M)
    live = j < end
    row = tl.load(order + j // tokens, mask=live, other=0).to(tl.int64)
    return row * tokens + j % tokens, live


@triton.jit
def find_group(place, order, offsets, row_slots, tokens, GROUP: tl.constexpr):
    """(token of the batch, its slot, first and last + 1 of the sorted tokens that are computed with it) of one of the
    sorted tokens. None: first is the end. GROUP: most of them; 1: each by itself, in the order of the batch.

    A slot's tokens are computed together, GROUP at a time, by the program of the first of them, where there are more
    than 2: of fewer, tensor cores would multiply zeros most of the time.
    """
    row = place // tokens
    if GROUP > 1:
        row = tl.load(order + row)
    token = row.to(tl.int64) * tokens + place % tokens
    slot = tl.load(row_slots + row)
    first, end = place, place + 1
    if GROUP > 1:
        low = tl.load(offsets + slot, mask=slot >= 0, other=0) * tokens
        high = tl.load(offsets + slot + 1, mask=slot >= 0, other=0) * tokens
        together = high - low > 2
        end = tl.where(together, tl.minimum(place + GROUP, high), end)
        first = tl.where(together & ((place - low) % GROUP > 0), end, first)
    return token, slot, first, end
