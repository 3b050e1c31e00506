"""Launcher of the kernel that moves factors from a flat buffer to their places, or wipes them: one launch for all."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import or_

import torch
from torch import Tensor

from .launch import Launcher
from .scatter import scatter_kernel

BLOCK = 8192  # bytes of a row that one program moves
WIDEST = 16  # bytes of one access
WARPS, STAGES = 4, 3
KINDS = 4  # of targets that a Wipe remembers
Kind = tuple[torch.Size, tuple[int, ...], torch.dtype]  # shape [r, n], strides, dtype


class Way:
    """To targets that stay where they are: the kernel's table, brought to their device once."""

    def __init__(self, targets: Sequence[Tensor], table: Tensor, bits: int, end: int = 0) -> None:
        """table, bits: as `_table` gives them. end: bytes that a source must have."""
        addresses = [target.data_ptr() for target in targets]
        self.count, self.end, self.bits = len(targets), end, reduce(or_, addresses, bits | WIDEST)
        self.pieces = table.shape[0] - 4 * self.count
        if self.pieces:
            device = targets[0].device
            host = torch.empty(table.shape, dtype=torch.int64, pin_memory=device.type == "cuda")
            host.copy_(table)
            host[1 : 4 * self.count : 4] = torch.tensor(addresses, dtype=torch.int64)
            self.table = host.to(device, non_blocking=True)
        self.launchers: dict[tuple[int, bool], Launcher] = {}

    def __call__(self, source: Tensor | None) -> None:
        """From source uint8 [bytes], on the targets' device; None: zeros. Raises ValueError, KernelError."""
        if source is not None and source.nbytes < self.end:
            raise ValueError(f"the source must hold the factors, which end at byte {self.end}, it has {source.nbytes}")
        if not self.pieces:
            return
        bits = self.bits if source is None else self.bits | source.data_ptr()
        key = bits & -bits, source is None
        if key not in self.launchers:
            constants = {"WIDTH": key[0], "BLOCK": BLOCK, "ZERO": key[1]}
            grid = (self.pieces, 1, 1)
            self.launchers[key] = Launcher(scatter_kernel, grid, (self.count,), constants, WARPS, STAGES)
        self.launchers[key](self.table if source is None else source, self.table)


class Scatter:
    """Factors [r, n] in a flat buffer, each with its rows together, and their way to targets of their shapes.

    begins: the first byte of each. What follows from shapes and strides is kept, as loads go to the same pools again
    and again; addresses are looked up at every call.
    """

    def __init__(self, begins: Sequence[int], shapes: Sequence[tuple[int, int]], dtypes: Sequence[torch.dtype]) -> None:
        self.begins, self.wanted = begins, list(zip(map(torch.Size, shapes), dtypes, strict=True))
        ends = [
            begin + shape.numel() * dtype.itemsize for begin, (shape, dtype) in zip(begins, self.wanted, strict=True)
        ]
        self.end = max(ends, default=0)
        self.kinds: list[Kind] = []
        self.table, self.bits = torch.empty(0, dtype=torch.int64), 0

    def to(self, targets: Sequence[Tensor]) -> Way | None:
        """The way to these targets, for as long as they stay there. None where a target has another dtype than the
        factor, or columns that are not together. Raises ValueError for other shapes."""
        kinds = _kinds(targets)
        if kinds != self.kinds:
            found = [(shape, dtype) for shape, _, dtype in kinds]
            if [shape for shape, _ in found] != [shape for shape, _ in self.wanted]:
                raise ValueError(f"targets must have the shapes of the factors, got {found} for {self.wanted}")
            rows = _rows(kinds)
            if rows is None or found != self.wanted:
                return None
            self.table, self.bits = _table(rows, self.begins)
            self.kinds = kinds
        return Way(targets, self.table, self.bits, self.end)

    def __call__(self, source: Tensor, targets: Sequence[Tensor]) -> bool:
        """source uint8 [bytes], targets on its device. Returns False, with nothing done, where there is no way. Raises
        ValueError for other shapes or too few bytes, KernelError."""
        way = self.to(targets)
        if way is not None:
            way(source)
        return way is not None


class Wipe:
    """Zeros. What follows from shapes and strides is kept for the last few kinds of targets."""

    def __init__(self) -> None:
        self.known: list[tuple[list[Kind], tuple[Tensor, int]]] = []

    def __call__(self, targets: Sequence[Tensor]) -> bool:
        """Into targets [r, n] on one device. Returns False, with nothing done, where columns of one are not together.
        Raises KernelError."""
        kinds = _kinds(targets)
        made = next((made for known, made in self.known if known == kinds), None)
        if made is None:
            rows = _rows(kinds)
            if rows is None:
                return False
            made = _table(rows, [0] * len(rows))
            self.known = [(kinds, made), *self.known[: KINDS - 1]]
        Way(targets, *made)(None)
        return True


def _kinds(tensors: Sequence[Tensor]) -> list[Kind]:
    return [(tensor.shape, tensor.stride(), tensor.dtype) for tensor in tensors]


def _rows(kinds: Sequence[Kind]) -> list[tuple[int, int, int]] | None:
    """Of each (rows, bytes of a row, bytes from row to row), rows that follow each other as one; None where columns of
    one are not together, or its rows overlap."""
    found = []
    for (r, n), (stride, step), dtype in kinds:
        size = n * dtype.itemsize
        if r * n and ((n > 1 and step != 1) or (r > 1 and stride < n)):
            return None
        together = r < 2 or stride == n
        found.append((1, r * size, r * size) if together else (r, size, stride * dtype.itemsize))
    return found


def _table(rows: Sequence[tuple[int, int, int]], begins: Sequence[int]) -> tuple[Tensor, int]:
    """(the kernel's table without addresses, all its numbers of bytes or-ed)."""
    each = [(begin, 0, size, stride) for begin, (_, size, stride) in zip(begins, rows, strict=True)]
    counts = torch.tensor([r * -(-size // BLOCK) for r, size, _ in rows], dtype=torch.int64)
    owner = torch.repeat_interleave(torch.arange(len(rows)), counts)
    number = torch.arange(len(owner)) - (counts.cumsum(0) - counts)[owner]
    bits = reduce(or_, (begin | size | stride for begin, _, size, stride in each), 0)
    return torch.cat([torch.tensor(each, dtype=torch.int64).flatten(), owner << 32 | number]), bits
