"""Rank rows of one module: which rows of A and B belong to which slot.

A module with a pool of P rank rows holds A as [P, in] and B as [P, out]. An adapter of rank r in a slot owns r
consecutive rows of both: no padding to a maximum rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import Any

import torch

BASE = -1  # the slot of a row without adapter
FILL = float("-inf")  # logits beyond a row's own labels, in a batch where another row has more
FREE = -2  # the owner of an unused rank row: equals no row's slot, so nothing ever reads it
BUCKET = 16  # the occupied prefix of a pool is rounded up to this, then doubled: few shapes, so graphs survive


def fixed(*tensors: torch.Tensor) -> None:
    """Say to compiled code that the tensors stay where they are: with CUDA graphs it would copy them at every call, and
    weights are among them. Where one does move, the graph is recorded anew."""
    from torch._dynamo import mark_static_address  # slow to import, and loaded by the time there is a model

    for tensor in tensors:
        mark_static_address(tensor)


def upload(target: torch.Tensor, host: torch.Tensor) -> None:
    """Copy a table to its device. On a CUDA device it is under way on return, in the order of the current stream; while
    a graph is captured, which may hold no such copy, CUDA refuses it."""
    if target.is_cuda and not torch.cuda.is_current_stream_capturing():
        target.copy_(host.pin_memory(), non_blocking=True)  # its memory is free again when the copy has ended
    else:
        target.copy_(host)


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


def bucket(rows: int, capacity: int | None = None) -> int:
    """The prefix of the pool that kernels cover: `rows` rounded up to 16, 32, 64, ... and at most `capacity`."""
    width = BUCKET
    while width < rows:
        width *= 2
    return width if capacity is None else min(width, capacity)


def pool_rows(ranks: Iterable[int], max_loras: int, max_lora_rank: int | None, unit: int = BUCKET) -> int:
    """Rank rows of one module's pool: `max_lora_rank` in each slot, without it the `max_loras` largest of the ranks.

    ranks: those of all adapters in this module, 0 where one does not train it. In multiples of `unit`, for LoRA BUCKET,
    so that what follows in a row of the augmented matmul's output is aligned.
    """
    rows = max_loras * max_lora_rank if max_lora_rank is not None else sum(sorted(ranks, reverse=True)[:max_loras])
    return -(-rows // unit) * unit


class RowTables:
    """The rows of a call on one device, in one int32 buffer, so that they are written by one copy.

    row_slots [R]        slot of each row, or BASE
    order     [R]        rows sorted by slot, base rows last
    offsets   [slots+1]  the rows of slot s are order[offsets[s]:offsets[s + 1]]
    """

    def __init__(self, rows: int, slots: int, device: torch.device) -> None:
        wide = -(-rows // 4) * 4  # aligned to 16 bytes, whatever R: else each alignment is a kernel of its own
        self.data = torch.zeros(2 * wide + slots + 1, dtype=torch.int32, device=device)
        self.row_slots, self.order = self.data[:rows], self.data[wide : wide + rows]
        self.offsets = self.data[2 * wide :]
        fixed(self.row_slots, self.order, self.offsets)

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy is one of zeros: pickle does not keep that tensors are views of one, and rows are written anew."""
        return RowTables, (self.row_slots.shape[0], self.offsets.shape[0] - 1, self.data.device)


class Layout:
    """Where every slot's rank rows lie; shared by all modules whose pools look the same, so written once for them all.

    owner  int32 [P]        slot that owns the rank row, or FREE
    starts int32 [1, slots] first rank row of the slot
    ranks  int32 [1, slots] rank of the slot in these modules, 0 where it has none
    gated: closed bool [R, w] True where the rank row is not the batch row's, of the occupied prefix; shut [R, P] of all
    not gated: own int64 [2, R] first rank row and rank of each batch row's slot, both 0 for the base;
           widest           the largest rank of a row's slot; whole: every row's slot has rank rows
    experts: each int32 [2, (experts + 1) * (slots + 1)] first rank row and rank by expert * (slots + 1) + slot; the
           last expert (what another device holds) and the last slot (the base) have none. parts: slot -> each one's
    no_rows      [0, bound] its shape tells traced code an upper bound of the ranks
    most                    an upper bound of all ranks that may come: a graph that is captured must serve them
    table                   the rows of the call in force, on this device
    Tables keep their addresses while the layout is in use: `take` writes new spans into them, `write` the rows, and
    `reach` says how much of the pool is occupied.
    """

    def __init__(
        self, capacity: int, bound: int, slots: int, device: torch.device, gated: bool = True,
        experts: int | None = None, most: int | None = None,
    ) -> None:  # fmt: skip
        """capacity: P. most: None where nothing but the ranks that are there is known."""
        self.capacity, self.device, self.gated, self.experts, self._most = capacity, device, gated, experts, most
        owned, wide = (capacity if gated else 0), -(-(slots + 1) // 4) * 4  # aligned to 16 bytes
        self.tables = torch.zeros(owned + 2 * wide, dtype=torch.int32, device=device)
        self.owner, both = self.tables.split([owned, 2 * wide])
        self.both = both.view(2, wide)  # the last column is the base's: no rank rows
        self.starts, self.ranks = self.both[:1, :slots], self.both[1:, :slots]
        self.spans: dict[int, tuple[int, int]] = {}
        self.parts: dict[int, tuple[int, ...]] = {}
        self.each = torch.zeros(2, 0 if experts is None else (experts + 1) * (slots + 1), dtype=torch.int32).to(device)
        begins, ranks = self.both.unbind()
        of_keys, ranks_of_keys = self.each.unbind()
        self.key_tables = (begins, ranks), (of_keys, ranks_of_keys)  # by slot, by key: views, made once
        self.shut = self.closed = torch.ones(0, owned, dtype=torch.bool, device=device)
        self.own = torch.zeros(2, 0, dtype=torch.int64, device=device)
        fixed(self.owner, self.starts, self.ranks, self.each, begins, ranks, of_keys, ranks_of_keys)
        self.kept: dict[int, torch.Tensor] = {}  # `shut` or `own` by the number of rows
        self.table: RowTables | None = None
        self.single: dict[int, RowTables] = {}
        self.live, self.whole, self.widest = False, False, 0
        self._chunks: tuple[torch.Tensor, torch.Tensor | None] | None = None
        self.reach(owned, bound)

    def __reduce__(self) -> tuple[Any, ...]:
        """Made anew, as pickle does not keep that tables are views of one buffer; a copy has no rows in force."""
        made = self.capacity, self.bound, self.starts.shape[1], self.device, self.gated, self.experts, self._most
        return _layout, (made, self.width, self.spans, self.parts)

    def reach(self, width: int, bound: int) -> None:
        """The occupied prefix is `width` rank rows wide, its ranks are at most `bound`."""
        self.width, self.bound = width, bound
        self.most = max(bound, self._most or 0)
        self.no_rows = torch.empty(0, bound)
        self._cut()

    def _cut(self) -> None:
        self.closed = self.shut[:, : self.width]
        fixed(self.closed)

    def afresh(self) -> None:
        """The rows to come are written to new tensors."""
        self.kept.clear()
        self.own, self.shut = self.own[:, :0], self.shut[:0]
        self._cut()

    def take(self, spans: Mapping[int, tuple[int, int]], parts: Mapping[int, tuple[int, ...]] | None = None) -> None:
        """Slot -> (first rank row, r), and for experts the rank of each; written by one copy each."""
        parts = parts or {}
        if self.spans == spans and self.parts == parts:
            return
        if self.experts is not None:
            each = torch.zeros(2, self.experts + 1, self.each.shape[1] // (self.experts + 1), dtype=torch.int32)
            for slot, (start, _) in spans.items():
                ranks = torch.tensor(parts[slot], dtype=torch.int32)
                each[0, :-1, slot], each[1, :-1, slot] = start + ranks.cumsum(0) - ranks, ranks
            upload(self.each, each.view(2, -1))
        self.parts = dict(parts)
        host = torch.zeros(self.tables.shape, dtype=torch.int32)
        owner, both = host[: self.owner.shape[0]], host[self.owner.shape[0] :].view(self.both.shape)
        owner.fill_(FREE)
        for slot, (start, r) in spans.items():
            owner[start : start + r] = slot
            both[0, slot], both[1, slot] = start, r
        upload(self.tables, host)
        self.spans = dict(spans)

    def write(self, table: RowTables, present: frozenset[int], keep: bool = False) -> None:
        """The rows in force; `present`: the slots that occur in them, BASE too. keep: what is written for when as many
        rows come again: a graph that was captured with them reads it."""
        self.table = table
        self._chunks = None
        self.live = not present.isdisjoint(self.spans)
        self.whole = present <= self.spans.keys()
        self.widest = max((self.spans[slot][1] for slot in present if slot in self.spans), default=0)
        rows, now = table.row_slots.shape[0], self.shut if self.gated else self.own
        fresh = self.kept.get(rows, now)
        if fresh.shape[0 if self.gated else 1] != rows and self.gated:
            fresh = torch.empty(rows, self.capacity, dtype=torch.bool, device=self.device)
        elif fresh.shape[0 if self.gated else 1] != rows:
            fresh = torch.empty(2, rows, dtype=torch.int64, device=self.device)
        if keep:
            self.kept[rows] = fresh
        if fresh is not now:
            fixed(fresh)
            if self.gated:
                self.shut = fresh
                self._cut()
            else:
                self.own = fresh
        if self.gated:
            torch.ne(self.owner, table.row_slots[:, None], out=self.shut)
        else:
            at = table.row_slots.long().remainder(self.both.shape[1])  # BASE, -1, is the last column
            self.own.copy_(self.both.index_select(1, at))

    def chunks(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The rows in force as C equal chunks of one slot each, as few as there can be: rank rows int64 [C, w] of each,
        w the widest rank, and bool [C, w] True where they are not its own (None: all are). Made once per change.
        """
        if self._chunks is None:
            assert self.table is not None
            slots = self.table.row_slots.tolist()
            size = math.gcd(*(len(list(run)) for _, run in groupby(slots)))
            with torch.inference_mode(False):  # calls with gradients keep them
                spans = torch.tensor([self.spans.get(slot, (0, 0)) for slot in slots[::size]])  # [C, 2]
                columns = torch.arange(self.widest)
                rows, shut = (spans[:, :1] + columns).clamp(max=self.capacity - 1), columns >= spans[:, 1:]
                self._chunks = rows.to(self.device), shut.to(self.device) if shut.any() else None
        return self._chunks

    def alone(self, slot: int) -> RowTables:
        """Tables for one row that has this slot, made once."""
        if slot not in self.single:
            with torch.inference_mode(False), torch.no_grad():  # calls with gradients keep them
                host = RowTables(1, self.starts.shape[1], torch.device("cpu"))
                host.row_slots[0] = slot
                host.offsets[slot + 1 :] = 1
                made = RowTables(1, self.starts.shape[1], self.device)
                made.data.copy_(host.data)
            self.single[slot] = made
        return self.single[slot]


def _layout(
    made: tuple[Any, ...], width: int, spans: Mapping[int, tuple[int, int]], parts: Mapping[int, tuple[int, ...]]
) -> Layout:
    layout = Layout(*made)
    layout.reach(width, layout.bound)
    layout.take(spans, parts)
    return layout
