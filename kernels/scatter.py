# mypy: allow-untyped-defs, allow-incomplete-defs
"""The kernel that copies rows of a flat buffer to where they belong: bytes, whatever they mean."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["count"])
def scatter_kernel(source, table, count, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ZERO: tl.constexpr):
    """One piece, of up to BLOCK bytes, of a row.

    table int64, flat: of each of the `count` targets its first byte in the source, its address, bytes per row, and
    bytes from row to row there; then of each piece its target << 32 | its number in the target. Rows follow each other
    in the source. All of these are multiples of WIDTH, and so is the source's address. ZERO: zeros are written.
    """
    if WIDTH == 1:
        kind = tl.int8
    elif WIDTH == 2:
        kind = tl.int16
    elif WIDTH == 4:
        kind = tl.int32
    else:
        kind = tl.int64  # two of them make an access of 16 bytes
    COLUMNS: tl.constexpr = BLOCK // min(WIDTH, 8)
    piece = tl.load(table + 4 * count + tl.program_id(0))
    factor = table + 4 * (piece >> 32)
    begin = tl.load(factor)
    address = tl.load(factor + 1)
    size = tl.load(factor + 2)
    stride = tl.load(factor + 3)
    pieces = (size + BLOCK - 1) // BLOCK  # of a row
    row = (piece & 0xFFFFFFFF) // pieces
    skipped = ((piece & 0xFFFFFFFF) % pieces) * BLOCK
    rest = (size - skipped) // min(WIDTH, 8)
    if WIDTH == 16:
        rest = tl.multiple_of(rest, 2)
    target = tl.multiple_of((address + row * stride + skipped).to(tl.pointer_type(kind)), WIDTH)
    i = tl.arange(0, COLUMNS)
    if ZERO:
        values = tl.zeros((COLUMNS,), dtype=kind)
    else:
        first = source.to(tl.int64) + begin + row * size + skipped
        values = tl.load(tl.multiple_of(first.to(tl.pointer_type(kind)), WIDTH) + i, mask=i < rest)
    tl.store(target + i, values, mask=i < rest)
