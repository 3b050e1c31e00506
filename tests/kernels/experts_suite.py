"""Cases for the operations of experts' LoRA and what they must answer. Letters as in kernels/torch_experts.py.

Used by test_experts*.py on the CPU (Triton in its interpreter) and by tests/gpu/test_experts_kernels.py.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hf_multilora.kernels import ops_experts as ops
from tests.kernels.suite import nan_filled

ORDERS = ("sorted", "shuffled", "one key", "all distinct", "no adapter")
# What differs from case()'s defaults: n = 40, G = 12, K = 37, N = 51, ranks 1, 3, 16, 33 and 0
SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "one pair": {"n": 1},
    "two pairs": {"n": 2},
    "one key there is": {"groups": 1},
    "a source map": {"m": 9},
    "a source map of int64": {"m": 9, "index": torch.int64},
    "a later column": {"first": 13, "extra": 40},
    "one column": {"k": 1, "columns": 1, "ranks": (1,)},
    "whole tiles": {"k": 128, "columns": 128, "ranks": (16,), "n": 64},
    "rank 16 alone": {"ranks": (16,), "bound": 16},
    "bound above the ranks": {"bound": 48},
    "more than 1,024 keys": {"groups": 1161, "ranks": (0, 1, 3)},
    "many pairs": {"n": 90, "m": 25, "first": 3, "extra": 3},
    "strided": {"strided": True},
}


@dataclass(frozen=True)
class Case:
    """x [m, K], y [n, Y], a [P, K], b [P, N]; keys [n], source [n] or None; begins, ranks [G]."""

    x: Tensor
    y: Tensor
    a: Tensor
    b: Tensor
    begins: list[int]
    ranks: list[int]
    keys: list[int]
    source: list[int] | None
    index: torch.dtype
    max_rank: int
    first: int

    def tables(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """begins, ranks, keys, source."""
        tables = [
            torch.tensor(t, dtype=torch.int32, device=self.x.device) for t in (self.begins, self.ranks, self.keys)
        ]
        source = None if self.source is None else torch.tensor(self.source, dtype=self.index, device=self.x.device)
        return tables[0], tables[1], tables[2], source

    def row(self, pair: int) -> int:
        return pair if self.source is None else self.source[pair]

    def own(self, pair: int) -> slice:
        """The pair's rank rows."""
        key = self.keys[pair]
        return slice(self.begins[key], self.begins[key] + self.ranks[key])

    def only(self, pairs: list[int]) -> Case:
        """A batch of these pairs."""
        source = [self.row(pair) for pair in pairs]
        return replace(self, y=self.y[pairs], keys=[self.keys[pair] for pair in pairs], source=source)


def case(
    dtype: torch.dtype = torch.float32,
    order: str = "sorted",
    *,
    n: int = 40,
    m: int | None = None,
    groups: int = 12,
    k: int = 37,
    columns: int = 51,
    ranks: tuple[int, ...] = (3, 0, 16, 1, 33),
    bound: int = 0,
    first: int = 0,
    extra: int = 0,
    index: torch.dtype = torch.int32,
    strided: bool = False,
    device: str = "cpu",
) -> Case:
    """m: rows of x, which the pairs read through a source map; None: row i for pair i. extra: columns of y beyond N.
    bound: max_rank, where it is above every rank. strided: x and y are columns of wider buffers."""
    rng = random.Random(7)
    own = [ranks[key % len(ranks)] for key in range(groups)]
    if order == "no adapter":
        own = [0] * groups
    begins, used = [0] * groups, 2
    for key in rng.sample(range(groups), groups):  # rank rows are not in the order of keys, and gaps lie between
        begins[key] = used
        used += own[key] + 1
    if order == "all distinct":
        keys = [(5 * pair) % groups for pair in range(n)]  # and in no order
    elif order == "one key":
        keys = [groups // 2] * n
    else:
        keys = [rng.randrange(groups) for _ in range(n)]
        keys = sorted(keys) if order == "sorted" else keys
    source = None if m is None else [rng.randrange(m) for _ in range(n)]
    wide = 5 if strided else 0
    x = torch.randn(n if m is None else m, k + wide, device=device).to(dtype)[:, :k]
    y = torch.randn(n, columns + extra + wide, device=device).to(dtype)[:, : columns + extra]
    a, b = ((torch.randn(used, width, device=device) / 4).to(dtype) for width in (k, columns))
    return Case(x, y, a, b, begins, own, keys, source, index, max(bound, 1, *own), first)


def by_pairs(c: Case, dtype: torch.dtype, keys: list[int] | None = None) -> tuple[Tensor, Tensor]:
    """h [n, max_rank], NaN where nothing is specified, and y after the expand; pair by pair in `dtype`."""
    c = replace(c, keys=c.keys if keys is None else keys)
    h = torch.full((len(c.keys), c.max_rank), torch.nan, dtype=dtype, device=c.x.device)
    out = c.y.to(dtype).clone()
    for pair in range(len(c.keys)):
        own = c.own(pair)
        if own.start == own.stop:
            continue
        some = c.a[own].to(dtype) @ c.x[c.row(pair)].to(dtype)
        h[pair, : len(some)] = some
        out[pair, c.first : c.first + c.b.shape[1]] += some @ c.b[own].to(dtype)
    return h, out


def rotated(c: Case) -> list[int]:
    """The key after each: a batch that nothing correct may take for this one."""
    return [(key + 1) % len(c.ranks) for key in c.keys]


def run(c: Case, backend: str) -> tuple[Tensor, Tensor]:
    """h and y after both operations, each with its input poisoned where nothing is specified. c.y is left alone."""
    begins, ranks, keys, source = c.tables()
    with nan_filled():
        h = ops.experts_shrink(c.x, c.a, begins, ranks, keys, source, c.max_rank, backend)
        y = torch.empty_strided(c.y.shape, c.y.stride(), dtype=c.y.dtype, device=c.y.device).copy_(c.y)
        ops.experts_expand(y, poisoned_h(c, h), c.b, begins, ranks, keys, None, c.first, backend)
    return h, y


def poisoned_h(c: Case, h: Tensor) -> Tensor:
    """h with NaN beyond each pair's rank."""
    ranks = torch.tensor([c.ranks[key] for key in c.keys], device=h.device)
    return h.masked_fill(torch.arange(c.max_rank, device=h.device) >= ranks[:, None], torch.nan)


def specified(c: Case, h: Tensor) -> Tensor:
    """h with 0 beyond each pair's rank."""
    return poisoned_h(c, h.nan_to_num(0.125)).nan_to_num(0)


def by_tokens(y: Tensor, places: Tensor, weights: Tensor, dtype: torch.dtype) -> Tensor:
    """What `experts_combine` must give, token by token in `dtype`."""
    out = torch.zeros(places.shape[0], y.shape[1], dtype=dtype, device=y.device)
    for t, row in enumerate(places.tolist()):
        for c, place in enumerate(row):
            out[t] += weights[t, c].to(dtype) * y[place].to(dtype)
    return out
