"""Linears in one buffer whose adapters have one A for all of them: it is stored and multiplied once.

`augmented.lay` decides it whenever a group is laid, by the adapters that are in slots then. Before rows of one that has
an A for each linear are written, each linear gets memory of its own, as where a pool grows, and the group is laid anew,
with an A for each, before the next request. It stays so until it is laid again for another reason: a pool that grew, a
weight that moved. So a group changes back and forth no more often than that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from .merged import Merged
from .rows import SlotRows
from .slots import ModuleSlots


def has_one_a(members: Sequence[tuple[nn.Module, ModuleSlots]]) -> bool:
    """Whether there are adapters in slots of these linears, and each has one A for all, in the same rank rows."""
    first, *others = [
        (slots.rows.capacity, slots.rows.spans, {slot: slots.sources.get(slot) for slot in slots.rows.spans})
        for _, slots in members
    ]
    return bool(others and first[1]) and None not in first[2].values() and all(other == first for other in others)


def apart(sites: Mapping[str, tuple[Any, SlotRows]], sources: Mapping[str, int]) -> dict[str, ModuleSlots]:
    """The linears that must get an A of their own before an adapter goes to a slot: those that have one together, and
    would not with it, or whose rank rows are not the same. What the slot had is gone, but for rows that it will take.

    sources: module that it trains -> its A, by number.
    """
    groups: dict[int, Merged] = {}
    for name in sources:
        slots = sites[name][1]
        if isinstance(slots, ModuleSlots) and slots.merged is not None and slots.merged.one_a:
            groups[id(slots.merged)] = slots.merged
    found = dict[str, ModuleSlots]()
    for merged in groups.values():
        members = {slots.name: slots for slots in merged.of_one_a()}
        spans = [slots.rows.spans for slots in members.values()]
        if len({sources.get(name) for name in members}) > 1 or any(own != spans[0] for own in spans):
            found |= members
    return found
