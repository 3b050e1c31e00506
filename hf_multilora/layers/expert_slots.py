"""The rank rows of one projection of experts, or of half of it."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..parallel import ALL, Shard
from ..routing import Routing
from .rows import Pool, SlotRows


class ExpertSlots(SlotRows):
    """a [P, in] and b [P, out] of a projection: an adapter's rows lie expert after expert, as formats/base.py says.

    projection: its name. half: "" where A and B lie here, else "a", "b", or "a1", "b1" where all experts share the
    rows. parameter: the weight whose output the projection adds to. count: experts that have rows of their own; None:
    all share them. first: the first column of that output that the projection has.
    """

    role = "experts"
    shard: Shard = ALL  # what this process holds of them
    config: Any = None  # the module's own, if it has one: set by whoever adapts it

    def __init__(
        self,
        name: str,
        in_features: int,
        out_features: int,
        routing: Routing,
        *,
        role: str,
        parameter: str,
        count: int,
        first: int = 0,
        mixable: bool = True,
    ) -> None:
        self.projection, _, self.half = role.partition(".")
        self.parameter, self.first = parameter.removesuffix("_bias"), first
        self.count = None if self.half.endswith("1") else count
        self.attribute = f"_{role}"
        self.parts: dict[int, tuple[int, ...]] = {}
        super().__init__(name, in_features, out_features, routing, flat=True, mixable=mixable)

    def place(self, slot: int, r: int, parts: tuple[int, ...] | None = None) -> tuple[Tensor, Tensor]:
        """See `SlotRows.place`."""
        if self.count is not None:
            assert parts is not None and len(parts) == self.count
            self.parts[slot] = parts
        return super().place(slot, r)

    def clear(self, slot: int) -> None:
        super().clear(slot)
        self.parts.pop(slot, None)

    def free(self) -> None:
        """Give up the memory of a pool in which no slot has rows."""
        self.disturb()
        self.a, self.b, self.rows.capacity = self.a[:0].clone(), self.b[:0].clone(), 0
        self.settle(None)

    def restore(self, pool: Pool) -> None:
        super().restore(pool)
        self.parts = {slot: parts for slot, parts in self.parts.items() if slot in self.rows.spans}

    def tables_of(self) -> tuple[Tensor, Tensor]:
        """(first rank row, rank) by key, int32: the key is expert * (slots + 1) + slot, the slot where all share."""
        layout = self.layout
        assert layout is not None
        by_slot, by_key = layout.key_tables
        return by_slot if self.count is None else by_key

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"parts": dict(self.parts)}
