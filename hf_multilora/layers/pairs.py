"""The pairs of a call: each token with each of its experts, and whose adapter it has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..kernels import ops_experts
from ..routing import RoutingError
from .rows import BASE_ONLY, ONE


@dataclass(frozen=True)
class Pairs:
    """The n pairs of a call, in the order of the base's matmul.

    keys    int32 [n]  expert * width + slot; width: slots + 1, the last slot is the base's
    tokens  int [n]    token
    places  int [T, K] where the pairs of each token lie
    table   int [R]    slot of each row of T / R tokens, -1 or the last slot for the base
    count              experts of this device; pairs of others have the key of expert `count`
    ends    int32 [E]  one past the last pair of each expert; None where pairs lie token after token
    sharded            whether there may be pairs of experts on other devices
    """

    keys: Tensor
    tokens: Tensor
    places: Tensor
    table: Tensor
    width: int
    count: int
    ends: Tensor | None = None
    sharded: bool = False

    @property
    def slots(self) -> Tensor:
        """int32 [n] slot."""
        return self.keys % self.width

    @property
    def experts(self) -> Tensor:
        """int32 [n] expert of this device."""
        return (self.keys // self.width).clamp(max=self.count - 1)

    @property
    def absent(self) -> Tensor | None:
        """bool [n, 1] pairs of experts on other devices; None: there are none."""
        return (self.keys >= self.count * self.width)[:, None] if self.sharded else None

    @property
    def rows(self) -> Tensor:
        """int32 [T] slot of each token."""
        return slots_in(self.table, self.places.shape[0], self.width - 1)


def pairs_of(self: Any, hidden: Tensor, index: Tensor, in_order: bool) -> Pairs:
    """The pairs of a call; in_order: sorted by expert and slot, else token after token."""
    table, slots, count = row_table(self, hidden), self._experts[0].routing.slots, self.num_experts
    backend = next(slots.backend for slots in self._experts if slots.layout is not None)
    sharded = getattr(self, "_is_expert_parallel", False)
    if in_order:
        keys, tokens, places, ends = ops_experts.sort_pairs(backend, index, table, slots, count)
        return Pairs(keys, tokens, places, table, slots + 1, count, ends, sharded)
    keys = ops_experts.pair_keys(backend, index, table, slots, count)
    places = torch.arange(keys.shape[0], device=keys.device)
    return Pairs(keys, places // index.shape[1], places.view(index.shape), table, slots + 1, count, None, sharded)


def row_table(self: Any, hidden: Tensor) -> Tensor:
    """int32 [R]: slot of each row of hidden [T, H], which has T / R tokens; -1 for the base."""
    first = next(slots for slots in self._experts if slots.path() != BASE_ONLY)
    routing, layout = first.routing, first.layout
    assert layout is not None
    if first.path() == ONE:
        assert routing.uniform is not None
        return layout.alone(routing.uniform).row_slots
    assert layout.table is not None
    table = layout.table.row_slots
    aligned = routing.align(hidden, table.shape[0], first.name, flat=True)  # [R, T / R, H]
    if aligned.shape[0] * aligned.shape[1] != hidden.shape[0]:
        raise RoutingError(f"{first.name}: its tokens must come in one list [T, H], got {tuple(hidden.shape)}")
    return table


def slots_in(table: Tensor, tokens: int, base: int) -> Tensor:
    """int32 [T]: slot of each token, `base` for the base's."""
    own = torch.where(table < 0, base, table).to(torch.int32)
    return own[:, None].expand(-1, tokens // table.shape[0]).reshape(-1).contiguous()  # of one row it is a view
