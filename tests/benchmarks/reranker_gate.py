"""Correctness of rerankers on a GPU before timing: some rows of each batch against the formula, with their own heads.

Truth is the base in the next wider dtype with hooks: `scaling * (x A^T) B^T` on its linears, each row's own head behind
them. The same hooks on the base in its own dtype say what that dtype costs: a contender may err twice as much, plus a
floor. Errors are differences of logits in units of the truth's mean magnitude: a row has one logit, perhaps near 0; of
several rows the root of the mean square, as the largest of a few is mostly chance; none may err WORST times the bound.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from . import gpu_gate
from .gate import GateError
from .gpu_contenders import Rows, Subject
from .gpu_gate import FLOOR, WIDER, moved
from .material import Pairs
from .reranker_material import HEAD, Factors

WORST = 3  # times the bound, six times the plain formula's error: one row in another's place is to be noticed too


@dataclass
class Truth:
    """logits [some] of the rows `at` in the wider dtype, how far the plain formula in the base's dtype is off, and what
    exchanging the rows' A and B, not their heads, changes (the median of the rows)."""

    at: list[int]
    logits: Tensor
    plain: float
    bound: float
    exchanged: float


@contextmanager
def formula(model: nn.Module, adapters: Mapping[str, Factors], scaling: float, rows: Rows) -> Iterator[None]:
    """The base with the adapters of `rows`, and their heads, added by hooks."""
    plain = copy.deepcopy(model.get_submodule(HEAD))

    def own_heads(module: nn.Module, args: Any, out: Tensor) -> Tensor:
        x: Tensor = args[0]
        own = []
        for i, name in enumerate(rows):
            head = {} if name is None else {k: v.to(x.dtype) for k, v in adapters[name].head.items()}
            own.append(functional_call(plain, head, (x[i : i + 1],)))
        return torch.cat(own)

    handle = model.get_submodule(HEAD).register_forward_hook(own_heads)
    try:
        with gpu_gate.formula(model, {name: factors.pairs for name, factors in adapters.items()}, scaling, rows):
            yield
    finally:
        handle.remove()


def some_rows(rows: int, count: int) -> list[int]:
    """Up to `count` rows from all over the batch, not all of one adapter."""
    step = rows // count | 1
    return sorted({i * step % rows for i in range(min(count, rows))})


@torch.no_grad()
def truths(
    base: nn.Module,
    adapters: Mapping[str, Factors],
    scaling: float,
    cells: Mapping[Any, tuple[Tensor, Rows]],
    count: int,
) -> dict[Any, Truth]:
    """For every cell, given as ids [R, T] and rows; needs the base once more, in the wider dtype, for the time of the
    call."""
    torch.set_float32_matmul_precision("highest")  # no TF32
    dtype = next(base.parameters()).dtype
    wide: Any = copy.deepcopy(base).to(WIDER[dtype])
    found = {}
    for cell, (ids, rows) in cells.items():
        at = some_rows(len(rows), count)
        mine = [rows[i] for i in at]
        swapped = {  # rows with other A and B and their own heads
            name: Factors(adapters[other].pairs if other else zeros(adapters[name].pairs), adapters[name].head)
            for name, other in zip(mine, moved(mine), strict=True)
            if name
        }
        logits = []
        for model, known in ((wide, adapters), (base, adapters), (wide, swapped)):
            with formula(model, known, scaling, mine):
                logits.append(model(input_ids=ids[at]).logits[:, 0])
        plain = together(errors(logits[1], logits[0]))
        exchanged = errors(logits[2], logits[0]).median().item()
        found[cell] = Truth(at, logits[0], plain, 2 * plain + FLOOR[dtype], exchanged)
    return found


def zeros(pairs: Pairs) -> Pairs:
    return {path: (a, torch.zeros_like(b)) for path, (a, b) in pairs.items()}


def errors(logits: Tensor, truth: Tensor) -> Tensor:
    """[rows]"""
    return (logits.to(truth.dtype) - truth).abs() / truth.abs().mean()


def together(errors: Tensor) -> float:
    """Errors of rows [rows] as one."""
    return errors.square().mean().sqrt().item()


@torch.no_grad()
def check(subject: Subject, name: str, ids: Tensor, rows: Rows, truth: Truth) -> dict[str, float]:
    """Errors of a cell; raises GateError where they are not what they must be.

    mixed: the batch. worst: its worst row. alone: its rows run by themselves. control: the median error of a row when
    every row has another adapter, which must be above the bound; exchanged: the same of the formula with other A and B
    but the right heads.
    """

    def answer(some: Tensor, rows: Rows) -> Tensor:
        with subject.route(rows) as call:
            return subject.model(input_ids=some, **call).logits[:, 0]

    at, found = truth.at, {"plain": truth.plain, "bound": truth.bound, "exchanged": truth.exchanged}
    mixed = errors(answer(ids, rows)[at], truth.logits)
    found |= {"mixed": together(mixed), "worst": mixed.max().item()}
    alone = torch.cat([answer(ids[i : i + 1], [rows[i]]) for i in at])
    found["alone"] = together(errors(alone, truth.logits))
    for kind in ("mixed", "alone"):
        require(f"{subject.name}, {name}, {kind}", found[kind], truth.bound)
    require(f"{subject.name}, {name}, worst row", found["worst"], WORST * truth.bound)
    if any(rows):
        found["control"] = errors(answer(ids, moved(rows))[at], truth.logits).median().item()
        for kind in ("control", "exchanged"):
            require_other(f"{subject.name}, {name}, {kind}", found[kind], truth.bound)
    return found


def require(what: str, error: float, bound: float) -> None:
    if not error <= bound:  # also NaN
        raise GateError(f"{what}: logits must be within {bound:.3g} of what they should be, they differ by {error:.3g}")


def require_other(what: str, error: float, bound: float) -> None:
    if not error > bound:
        raise GateError(
            f"{what}: other adapters must change the logits by more than {bound:.3g}, they differ by {error:.3g} only: "
            f"the comparison would not notice a wrong row"
        )


def check_replay(
    name: str, replayed: Tensor, eager: Tensor, bound: float, other: Tensor | None = None
) -> dict[str, float]:
    """A replayed graph against an eager call under the same mix; other: logits of another mix, which must differ.

    Each may be `bound` away from the truth, and not to the same side.
    """
    found, bound = {"error": together(errors(replayed, eager))}, 2 * bound
    require(f"{name}, replayed", found["error"], bound)
    if other is not None:
        found["control"] = errors(replayed, other).median().item()
        require_other(f"{name}, replayed", found["control"], bound)
    return found
