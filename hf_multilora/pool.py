"""Rank rows of one module: which rows of A and B belong to which slot.

A module with a pool of P rank rows holds A as [P, in] and B as [P, out]. An adapter of rank r in a slot owns r
consecutive rows of both: no padding to a maximum rank.
"""

from __future__ import annotations

import torch

BASE = -1  # the slot of a row without adapter
FREE = -2  # the owner of an unused rank row: equals no row's slot, so nothing ever reads it
BUCKET = 16  # the occupied prefix of a pool is rounded up to this, then doubled: few shapes, so graphs survive


class RankRows:
    """First-fit allocator of spans of rank rows. Pure bookkeeping: the tensors live with the layer."""

    def __init__(self, capacity: int = 0) -> None:
        self.capacity = capacity
        self.spans: dict[int, tuple[int, int]] = {}  # slot -> (start, r)

    @property
    def used(self) -> int:
        return sum(r for _, r in self.spans.values())

    @property
    def end(self) -> int:
        """One past the last row in use."""
        return max((start + r for start, r in self.spans.values()), default=0)

    def allocate(self, slot: int, r: int) -> int | None:
        """The first row of a free span of r rows, now owned by `slot`; None where no gap is wide enough."""
        if slot in self.spans:
            raise ValueError(f"slot {slot} must be freed before it gets rows, it owns {self.spans[slot]}")
        if r <= 0:
            raise ValueError(f"r must be positive, got {r}")
        start = 0
        for taken, width in sorted(self.spans.values()):
            if taken - start >= r:
                break
            start = taken + width
        if start + r > self.capacity:
            return None
        self.spans[slot] = (start, r)
        return start

    def free(self, slot: int) -> tuple[int, int] | None:
        """Give up the span of `slot`, returned so that its rows can be wiped; None where it owns none."""
        return self.spans.pop(slot, None)

    def compact(self) -> list[tuple[int, int, int]]:
        """Close the gaps; returns the moves (old start, new start, r) in an order that is safe to carry out."""
        moves, at = [], 0
        for slot, (start, r) in sorted(self.spans.items(), key=lambda item: item[1]):
            if start != at:
                moves.append((start, at, r))
                self.spans[slot] = (at, r)
            at += r
        return moves


def bucket(rows: int, capacity: int) -> int:
    """The prefix of the pool that kernels cover: `rows` rounded up to 16, 32, 64, ... and at most `capacity`."""
    width = BUCKET
    while width < rows:
        width *= 2
    return min(width, capacity)


class Layout:
    """Where every slot's rank rows lie; shared by all modules whose pools look the same, so written once for them all.

    owner  int32 [P]     slot that owns the rank row, or FREE
    starts int32 [slots] first rank row of the slot
    ranks  int32 [slots] rank of the slot in these modules, 0 where it has none
    closed bool  [R, P]  True where the rank row is not the batch row's: set by `write`, at one address while R stays
    """

    def __init__(self, spans: tuple[tuple[int, int, int], ...], width: int, slots: int, device: torch.device) -> None:
        owner = torch.full((width,), FREE, dtype=torch.int32)
        starts, ranks = torch.zeros(slots, dtype=torch.int32), torch.zeros(slots, dtype=torch.int32)
        for slot, start, r in spans:
            owner[start : start + r] = slot
            starts[slot], ranks[slot] = start, r
        self.spans = {slot: (start, r) for slot, start, r in spans}
        self.width = width
        self.max_rank = max((r for _, _, r in spans), default=0)
        self.device = device
        self.owner, self.starts, self.ranks = owner.to(device), starts.to(device), ranks.to(device)
        self.closed = torch.ones(0, width, dtype=torch.bool, device=device)
        self.live = False

    def write(self, row_slots: torch.Tensor, present: frozenset[int]) -> None:
        """row_slots int32 [R] on the host or the device; `present`: the slots that occur in it."""
        self.live = not present.isdisjoint(self.spans)
        row_slots = row_slots.to(self.device)
        if self.closed.shape[0] != row_slots.shape[0]:
            self.closed = torch.empty(row_slots.shape[0], self.width, dtype=torch.bool, device=self.device)
        torch.ne(self.owner, row_slots[:, None], out=self.closed)
