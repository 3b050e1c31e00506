"""Clocks of contenders that take turns: bare, ours, ours, bare."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from statistics import mean, median
from typing import Any

import torch
from torch import Tensor
from transformers import StoppingCriteria, StoppingCriteriaList

from ..timing import now

BARE, OURS = "bare", "ours"
WARM_S = 0.3
Blocks = dict[str, list[list[float]]]


def palindrome(jobs: Mapping[str, Callable[[], Sequence[float]]], rounds: int = 1) -> dict[str, dict[str, Any]]:
    """Each job, a block of steps that gives their ms, in turns: A B B A, so that a drift of the clock hits all alike.

    name -> median ms and mean ms of all its steps, and the median of each of its blocks. A GPU works for WARM_S first:
    at rest its clocks are others.
    """
    blocks: Blocks = {name: [] for name in jobs}
    until = time.perf_counter() + WARM_S * torch.cuda.is_available()
    while time.perf_counter() < until:
        for job in jobs.values():
            job()
    for name in [*jobs, *reversed(jobs)] * rounds:
        blocks[name].append(list(jobs[name]()))
    return {name: summary(found) for name, found in blocks.items()}


def summary(blocks: Sequence[Sequence[float]]) -> dict[str, Any]:
    steps = [ms for block in blocks for ms in block]
    return {
        "ms": median(steps), "mean_ms": mean(steps), "steps": len(steps), "blocks_ms": [median(b) for b in blocks],
    }  # fmt: skip


def ratio(found: Mapping[str, Mapping[str, Any]], this: str = OURS, unit: str = BARE) -> float:
    """Median of the ratios of neighbouring blocks: what drifts meanwhile is in both."""
    blocks = zip(found[this]["blocks_ms"], found[unit]["blocks_ms"], strict=True)
    return median(ours / bare for ours, bare in blocks)


class Marks(StoppingCriteria):
    """Notes when each new token of a `generate` is there, on the device's own clock, without waiting for it; never
    stops."""

    def __init__(self, device: str) -> None:
        self.cuda = device.startswith("cuda")
        self.marks: list[Any] = []

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        if self.cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks.append(event)
        else:
            self.marks.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)

    def intervals(self) -> list[float]:
        """ms between the tokens, so one less than there are."""
        if not self.cuda:
            return [1e3 * (b - a) for a, b in pairwise(self.marks)]
        torch.cuda.synchronize()
        return [a.elapsed_time(b) for a, b in pairwise(self.marks)]


def generated(
    model: Any, inputs: Mapping[str, Tensor], more: Mapping[str, Any], count: int, device: str
) -> list[float]:
    """ms of each token but the first of one greedy `generate` of `count` tokens."""
    marks = Marks(device)
    now(device)
    model.generate(**inputs, **more, max_new_tokens=count, stopping_criteria=StoppingCriteriaList([marks]))
    if len(marks.marks) != count:
        raise RuntimeError(f"generate must make {count} tokens, it made {len(marks.marks)}")
    return marks.intervals()
