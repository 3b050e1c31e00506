"""Correctness before timing: a wrong answer has no speed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .registry import BARE, CONTENDERS, OURS, PEFT, TOLERANCE, Mix

CALL = {contender.name: contender.call for contender in CONTENDERS}


class GateError(AssertionError):
    """Contenders that do not give the same answer."""


@torch.inference_mode()
def logits(name: str, model: Any, inputs: Mapping[str, Tensor], rows: list[str | None]) -> Tensor:
    """float32 [R, T, V] of one forward in which row i has adapter rows[i]."""
    return model(**inputs, **CALL[name](rows)).logits.float()


def check(
    models: Mapping[str, Any], mix: Mix, inputs: Mapping[str, Tensor], rows: list[str | None]
) -> dict[str, float]:
    """Largest differences of the logits for one mix; raises GateError where they are not what they must be.

    peft: against PEFT's mixed batch (a batch of the base: against the bare model). alone: one row of every adapter run
    by itself. control: the same batch with the adapters moved on by one row, which must differ.
    """
    mixed = logits(OURS, models[OURS], inputs, rows)
    reference = PEFT if mix.distinct else BARE
    errors = {reference: _difference(mixed, logits(reference, models[reference], inputs, rows))}
    errors["alone"] = max(
        _difference(
            mixed[i : i + 1], logits(OURS, models[OURS], {k: v[i : i + 1] for k, v in inputs.items()}, [rows[i]])
        )
        for i in {name: i for i, name in enumerate(rows)}.values()
    )
    for against, error in errors.items():
        if not error <= TOLERANCE:  # also NaN
            raise GateError(f"{mix.name}: logits must be within {TOLERANCE} of {against}, they differ by {error:.3g}")
    if mix.distinct:
        moved: list[str | None] = [*rows[1:], rows[0]] if mix.distinct > 1 else [None] * len(rows)
        errors["control"] = _difference(mixed, logits(OURS, models[OURS], inputs, moved))
        if not errors["control"] > TOLERANCE:
            raise GateError(
                f"{mix.name}: other adapters must change the logits, they differ by {errors['control']:.3g} only: the "
                f"comparison would not notice an adapter in the wrong row"
            )
    return errors


def _difference(a: Tensor, b: Tensor) -> float:
    return (a - b).abs().max().item()
