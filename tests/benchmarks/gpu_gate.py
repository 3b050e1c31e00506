"""Correctness on the GPU before timing: every cell against the formula of LoRA, row by row.

Truth is the base in the next wider dtype with hooks that add `scaling * (x A^T) B^T`. The same hooks on the base in
its own dtype say what that dtype costs: a contender may err twice as much, plus a floor. All errors are relative:
|logits - truth| / |truth| over the vocabulary, for each row.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .gate import GateError
from .gpu_contenders import Batch, Rows, Subject
from .material import Pairs
from .registry import Work

WIDER = {torch.bfloat16: torch.float32, torch.float16: torch.float32, torch.float32: torch.float64}
FLOOR = {torch.bfloat16: 2e-3, torch.float16: 2.5e-4, torch.float32: 1e-6}  # half a unit in the last place of 1.0
ALONE = 8  # rows of a batch that are also run by themselves


@dataclass
class Truth:
    """Logits [rows, V] of one cell in the wider dtype, and how far the plain formula in the base's dtype is off.

    plain: the largest error of a row. plain_rms: the root mean square of the rows' errors.
    """

    logits: Tensor
    plain: float
    bound: float
    plain_rms: float


Answer = Callable[[Any, Tensor], Tensor]  # (model, ids) -> what is compared, [rows, ...]


def last_logits(model: Any, ids: Tensor) -> Tensor:
    """[rows, V] after the last token."""
    logits: Tensor = model(input_ids=ids, use_cache=False, logits_to_keep=1).logits[:, -1]
    return logits


@contextmanager
def formula(model: nn.Module, adapters: Mapping[str, Pairs], scaling: float, rows: Rows) -> Iterator[None]:
    """The base with the adapters of `rows` added by hooks on its linears."""
    handles = []
    if any(rows):
        for path in next(iter(adapters.values())):
            pairs = [adapters[name][path] if name else None for name in rows]
            handles.append(model.get_submodule(path).register_forward_hook(partial(_add, pairs, scaling)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _add(
    pairs: Sequence[tuple[Tensor, Tensor] | None], scaling: float, module: nn.Module, args: Any, out: Tensor
) -> Tensor:
    x: Tensor = args[0]
    known = [pair for pair in pairs if pair]
    rank, (some_a, some_b) = max(a.shape[0] for a, _ in known), known[0]
    a = x.new_zeros(len(pairs), rank, some_a.shape[1])  # [R, r, K]
    b = x.new_zeros(len(pairs), some_b.shape[0], rank)  # [R, N, r]
    for row, pair in enumerate(pairs):
        if pair is not None:
            a[row, : pair[0].shape[0]], b[row, :, : pair[1].shape[1]] = pair
    return out + (x @ a.mT) @ b.mT * scaling


@torch.no_grad()
def truths(
    base: nn.Module,
    adapters: Mapping[str, Pairs],
    scaling: float,
    works: Sequence[Work],
    ids: Callable[[Work], Tensor],
    *,
    answer: Answer = last_logits,
    wider: torch.dtype | None = None,
) -> dict[Work, Truth]:
    """For every cell; needs the base once more, in the wider dtype, for the time of the call.

    answer: what is compared. wider: the dtype of the truth, instead of the next wider one.
    """
    torch.set_float32_matmul_precision("highest")  # no TF32
    dtype = next(base.parameters()).dtype
    wide = copy.deepcopy(base).to(wider or WIDER[dtype])
    return {work: truth(wide, base, adapters, scaling, work.mix(), ids(work), answer) for work in works}


def truth(
    wide: nn.Module, base: nn.Module, adapters: Mapping[str, Pairs], scaling: float, rows: Rows, ids: Tensor,
    answer: Answer = last_logits,
) -> Truth:  # fmt: skip
    """Of one batch; wide: the base in the wider dtype."""
    found = []
    for model in (wide, base):
        with formula(model, adapters, scaling, rows):
            found.append(answer(model, ids))
    off = errors(found[1], found[0])
    plain = off.max().item()
    return Truth(found[0], plain, 2 * plain + FLOOR[found[1].dtype], rms(off))


def errors(logits: Tensor, truth: Tensor) -> Tensor:
    """[rows]: relative errors of the rows."""
    off, whole = (logits.to(truth.dtype) - truth).flatten(1), truth.flatten(1)
    return off.norm(dim=-1) / whole.norm(dim=-1)


def rms(values: Tensor) -> float:
    """Root of the mean square."""
    return values.square().mean().sqrt().item()


def moved(rows: Rows) -> Rows:
    """Every row with another adapter: the next of those in the batch, or the base where all have the same."""
    names = list(dict.fromkeys(rows))
    turned = dict(zip(names, [*names[1:], names[0]], strict=True)) if len(names) > 1 else {}
    return [turned.get(name) for name in rows]


@torch.no_grad()
def check(
    subject: Subject, work: Work, ids: Tensor, truth: Truth, *, all_checks: bool, read: Answer | None = None
) -> dict[str, float]:
    """Errors of a cell, each the largest of its rows; raises GateError where they are not what they must be.

    mixed: the batch. alone: rows of different adapters run by themselves. control: the smallest error of a row when
    every row has another adapter, which must be above the bound. all_checks=False: mixed only. over_plain: the rows'
    root mean square error over that of the plain formula. read: what is compared, instead of the answer of a `Batch`.
    """

    def answer(rows: Rows, some: Tensor) -> Tensor:
        with subject.route(rows) as call:
            if read is not None:
                return read(subject.model, some)
            return Batch(subject, work, some, steps=1).answer(call)

    rows = work.mix()
    found = {"plain": truth.plain, "bound": truth.bound}
    off = errors(answer(rows, ids), truth.logits)
    found |= {"mixed": off.max().item(), "over_plain": rms(off) / truth.plain_rms}
    if all_checks:
        firsts = list({name: i for i, name in enumerate(rows)}.values())
        firsts = firsts[:: -(-len(firsts) // ALONE)]
        found["alone"] = max(errors(answer([rows[i]], ids[i : i + 1]), truth.logits[i : i + 1]).item() for i in firsts)
    for kind in ("mixed", "alone"):
        if kind in found and not found[kind] <= truth.bound:  # also NaN
            raise GateError(
                f"{subject.name}, {work.name}, {kind}: logits must be within {truth.bound:.3g} of the formula in "
                f"{truth.logits.dtype}, they differ by {found[kind]:.3g} (the formula in the base's dtype: "
                f"{truth.plain:.3g})"
            )
    if all_checks and work.distinct:
        found["control"] = errors(answer(moved(rows), ids), truth.logits).min().item()
        if not found["control"] > truth.bound:
            raise GateError(
                f"{subject.name}, {work.name}: other adapters must change every row by more than {truth.bound:.3g}, "
                f"one differs by {found['control']:.3g} only: the comparison would not notice a wrong row"
            )
    return found


def check_replay(
    subject: Subject, work: Work, what: str, replayed: Tensor, eager: Tensor, bound: float, other: Tensor | None = None
) -> dict[str, float]:
    """A replayed graph against an eager step under the same mix; other: logits of another mix, which must differ."""
    found = {"error": errors(replayed, eager).max().item()}
    if not found["error"] <= bound:
        raise GateError(
            f"{subject.name}, {work.name}, {what}: a replayed graph must give the logits of an eager step within "
            f"{bound:.3g}, they differ by {found['error']:.3g}"
        )
    if other is not None:
        found["control"] = errors(replayed, other).min().item()
        if not found["control"] > bound:
            raise GateError(
                f"{subject.name}, {work.name}, {what}: another mix must change every row by more than {bound:.3g}, one "
                f"differs by {found['control']:.3g} only"
            )
    return found
