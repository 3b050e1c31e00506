"""Experts of Transformers' experts interface: each token's experts with the factors of the token's own adapter.

A pair is a token and one of its K chosen experts; n = tokens * K. Where adapters of a call have rank rows here, the
module's forward finds ours in the interface: the base's matmuls as its implementation does them, over pairs sorted by
(expert, slot), so that the deltas read the same order; deltas are added before the gate and before the routing weights.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, _batched_linear, _grouped_linear

from ..kernels import ops_experts
from .base import AdaptedLayer
from .expert_slots import ExpertSlots
from .pairs import Pairs, pairs_of
from .rows import BASE_ONLY

NAME = "hf_multilora"  # in Transformers' interface
# Pairs up to which batched_mm is followed on a GPU. On an H200 (128 experts of 2048 x 768) grouped_mm took 0.57 of its
# time at 64 pairs, 0.3 at 256 and 0.17 at 512; below 64 was not measured
BATCHED_PAIRS = 32
Late = list[tuple[ExpertSlots, Tensor]]  # projection whose B all experts share -> h [n, r] of the pairs


class LoraExperts(AdaptedLayer, role="experts", kind="experts"):
    """Adds `B (A x)` of each pair's expert and adapter to what the projections of the class it is mixed into give."""

    _experts: tuple[ExpertSlots, ...]  # of all its projections

    @property
    def config(self) -> Any:
        """The module's config; while adapters of the call have rank rows here, one that asks for our forward."""
        own = self._experts[0].config  # torch 2.11 cannot trace a look into __dict__ here
        return Ours(own) if any(slots.path() for slots in self._experts) else own

    @config.setter
    def config(self, value: Any) -> None:
        self.__dict__["config"] = value
        for slots in self._experts:
            slots.config = value


class Ours:
    """A config that names our implementation, and is in all else the one it stands for."""

    _experts_implementation = NAME

    def __init__(self, config: Any) -> None:
        self.config = config

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["config"], name)


def experts_forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Transformers' experts forward: hidden_states [T, H], top_k_index and top_k_weights [T, K] -> [T, H].

    Raises RoutingError where tokens cannot be attributed to rows, NotImplementedError for an implementation of the base
    whose matmuls are not known here.
    """
    each = getattr(self, "_experts", None)  # None: users asked for our implementation, of a module without adapters
    implementation = (each[0] if each else self).config._experts_implementation
    linear = LINEARS.get(implementation)
    if linear is _batched and _many(self, top_k_index):
        linear = _grouped
    if linear is None:
        where = each[0].name if each else type(self).__name__
        raise NotImplementedError(
            f"{where}: the experts implementation must be one of {sorted(LINEARS)} where adapters "
            f"train experts, it is {implementation!r}; call model.set_experts_implementation('grouped_mm')"
        )
    pairs = pairs_of(self, hidden_states, top_k_index, linear is not _batched)
    tokens = hidden_states.index_select(0, pairs.tokens)
    name = "gate_up_proj" if self.has_gate else "up_proj"
    y = linear(self, name, tokens, pairs)
    y, _ = add_deltas(self, name, y, tokens, hidden_states, pairs)
    y = self._apply_gate(y) if self.has_gate else self.act_fn(y)
    down = linear(self, "down_proj", y, pairs)
    down, late = add_deltas(self, "down_proj", down, y, None, pairs)
    weights = top_k_weights
    if pairs.absent is not None:
        down = down.masked_fill(pairs.absent, 0.0)
        weights = weights.masked_fill(top_k_index >= self.num_experts, 0.0)
    if _normed(self):
        down = self.post_expert_norm(down)
    out = combine(self, down, pairs, weights, hidden_states.dtype)
    for slots, h in late:  # B is the same for all experts: multiplied once per token
        own = combine(self, h, pairs, weights, h.dtype)
        out = expand(slots, out, own, pairs.rows, None)
    return out


def _normed(self: Any) -> bool:
    return getattr(self, "has_post_expert_norm", False)


# -- the base's matmuls ------------------------------------------------------------------------------------------
def _grouped(self: Any, name: str, x: Tensor, pairs: Pairs) -> Tensor:
    bias = getattr(self, f"{name}_bias")[pairs.experts] if self.has_bias else None
    if pairs.absent is not None:
        x = x.masked_fill(pairs.absent, 0.0)
    weight = getattr(self, name)
    y = _grouped_linear(x, weight, pairs.ends, bias=bias, is_transposed=self.is_transposed)  # type: ignore[arg-type]
    return y if pairs.absent is None else y.masked_fill(pairs.absent, 0.0)


def _batched(self: Any, name: str, x: Tensor, pairs: Pairs) -> Tensor:
    bias = getattr(self, f"{name}_bias")[pairs.experts] if self.has_bias else None
    return _batched_linear(x, getattr(self, name)[pairs.experts], bias=bias, is_transposed=self.is_transposed)


def _eager(self: Any, name: str, x: Tensor, pairs: Pairs) -> Tensor:
    weight, parts, start = getattr(self, name), [], 0
    assert pairs.ends is not None
    for expert, end in enumerate(pairs.ends.tolist()):
        if end > start:
            own = weight[expert] if self.is_transposed else weight[expert].t()
            y = torch.matmul(x[start:end].to(own.dtype), own)
            parts.append(y + getattr(self, f"{name}_bias")[expert] if self.has_bias else y)
            start = end
    y = torch.cat(parts) if parts else x.new_zeros(0, weight.shape[2 if self.is_transposed else 1])
    rest = x.shape[0] - y.shape[0]  # pairs of experts on other devices
    return y if not rest else torch.cat([y, y.new_zeros(rest, y.shape[1])])


def _many(self: Any, index: Tensor) -> bool:
    """Whether copies of the experts' weights for each pair, as batched_mm makes them, cost more than a sort. `generate`
    takes batched_mm for each decoding step on a GPU, whatever the number of rows."""
    weight = self.down_proj
    return weight.is_cuda and weight.dtype == torch.bfloat16 and index.numel() > BATCHED_PAIRS


LINEARS = {"grouped_mm": _grouped, "batched_mm": _batched, "eager": _eager}


# -- the deltas --------------------------------------------------------------------------------------------------
def add_deltas(self: Any, name: str, y: Tensor, x: Tensor, tokens: Tensor | None, pairs: Pairs) -> tuple[Tensor, Late]:
    """y [n, out] of the parameter `name` with the pairs' own deltas, and what is added once the pairs are summed.

    x [n, in]. tokens [T, in]: what x was taken from; None: each pair has an input of its own, as in down_proj.
    """
    late: Late = []
    every = [slots for slots in self._experts if slots.parameter == name and slots.path() != BASE_ONLY]
    for slots in every:
        bias = slots.projection.endswith("_bias")  # its A, whose input is 1, says what B is multiplied with
        if not slots.half:
            if bias:
                h = _of_ones(slots, x, pairs.keys)
            elif tokens is None:
                h = shrink(slots, x, pairs.keys, None)
            else:  # reads each token once where the copies for its pairs would be read K times
                h = shrink(slots, tokens, pairs.keys, pairs.tokens)
            y = expand(slots, y, h, pairs.keys, None)
        if slots.half not in ("a", "a1"):
            continue
        keys, source = _keys(slots, pairs), None
        if bias:
            h = _of_ones(slots, x, keys)
        elif slots.half == "a1" and tokens is not None:  # once for all experts of a token
            h, source = shrink(slots, tokens, pairs.rows, None), pairs.tokens
        else:
            h = shrink(slots, x, keys, None)
        mine = slots.tables_of()[1][keys.long()] > 0  # the rest of h is not written
        for other in every:
            if other.projection != slots.projection or other.half not in ("b", "b1"):
                continue
            if other.half == "b1" and name == "down_proj" and not _normed(self):
                late.append((other, _as_wide(h.masked_fill(~mine[:, None], 0.0), other)))
            else:
                y = expand(other, y, h, torch.where(mine, _keys(other, pairs), _nobody(other)), source)
    return y, late


def _of_ones(slots: ExpertSlots, x: Tensor, keys: Tensor) -> Tensor:
    """h [n, max_rank] of pairs whose input is 1."""
    return shrink(slots, x.new_ones(1, 1), keys, torch.zeros_like(keys))


def _keys(slots: ExpertSlots, pairs: Pairs) -> Tensor:
    return pairs.keys if slots.count is not None else pairs.slots


def _as_wide(h: Tensor, slots: ExpertSlots) -> Tensor:
    """h [n, r] with zeros up to the largest rank that `slots` has: adapters whose A lies elsewhere read that far."""
    assert slots.layout is not None
    return F.pad(h, (0, max(0, slots.bound() - h.shape[1])))


def _nobody(slots: ExpertSlots) -> int:
    """A key without rank rows."""
    return slots.tables_of()[1].shape[0] - 1


def combine(self: Any, y: Tensor, pairs: Pairs, weights: Tensor, dtype: torch.dtype) -> Tensor:
    """[T, width] of `dtype`: each token's pairs y [n, width], weighted and added up."""
    backend = next(slots.backend for slots in self._experts if slots.layout is not None)
    return ops_experts.combine(backend, y, pairs.places, weights, dtype)


def shrink(slots: ExpertSlots, x: Tensor, keys: Tensor, source: Tensor | None) -> Tensor:
    """h [n, max_rank] = A x of each pair."""
    assert slots.layout is not None
    max_rank, shard = slots.bound(), slots.shard
    x = shard.input(x).to(slots.a.dtype)
    return shard.sum(ops_experts.shrink(slots.backend, x, slots.a, *slots.tables_of(), keys, source, max_rank))


def expand(slots: ExpertSlots, y: Tensor, h: Tensor, keys: Tensor, source: Tensor | None) -> Tensor:
    """y [n, out] plus B h of each pair in the projection's columns: y itself, but where a gradient is wanted."""
    return ops_experts.expand(slots.backend, y, h, slots.b, *slots.tables_of(), keys, source, slots.first)


ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)
