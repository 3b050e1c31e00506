"""Clocks: one `generate` split into prefill and tokens, cells taken in turns, and the registration of many adapters."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from transformers import StoppingCriteria, StoppingCriteriaList


def now(device: str) -> float:
    """Seconds, once the device has done all that was asked of it."""
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    return time.perf_counter()


class TokenClock(StoppingCriteria):
    """Notes when each new token is there; never stops."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.marks: list[float] = []

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.marks.append(now(self.device))
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


def timed_generate(
    model: Any, inputs: Mapping[str, Tensor], call: Mapping[str, Any], new_tokens: int, device: str
) -> tuple[float, float]:
    """(ms until the first token is there, median ms of the others) of one greedy `generate`."""
    clock = TokenClock(device)
    start = now(device)
    model.generate(**inputs, **call, max_new_tokens=new_tokens, stopping_criteria=StoppingCriteriaList([clock]))
    if len(clock.marks) != new_tokens:
        raise RuntimeError(f"generate must make {new_tokens} tokens, it made {len(clock.marks)}")
    steps = [b - a for a, b in zip(clock.marks, clock.marks[1:], strict=False)]
    return 1e3 * (clock.marks[0] - start), 1e3 * median(steps)


def interleave(
    jobs: Mapping[str, Callable[[], tuple[float, float]]], rounds: int, progress: Callable[[str], None]
) -> dict[str, list[tuple[float, float]]]:
    """Every job once per round, each round starting one job later, so that a slow moment of the machine hits all alike.
    One round before them warms up and is not counted."""
    names = list(jobs)
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for i in range(rounds + 1):
        progress(f"round {i} of {rounds}" if i else "warming up")
        for name in names[i % len(names) :] + names[: i % len(names)]:
            sample = jobs[name]()
            if i:
                samples[name].append(sample)
    return samples


def summary(samples: Mapping[str, Sequence[tuple[float, float]]], unit: str) -> dict[str, dict[str, float]]:
    """Per cell: medians over the rounds, and the median over the rounds of its ratio to `unit` in the same round."""
    found = {}
    for name, rounds in samples.items():
        row: dict[str, float] = {}
        for index, phase in enumerate(("prefill", "decode")):
            row[f"{phase}_ms"] = median(sample[index] for sample in rounds)
            row[f"{phase}_ratio"] = ratio(samples, name, unit, index)
        found[name] = row
    return found


def ratio(samples: Mapping[str, Sequence[tuple[float, float]]], name: str, unit: str, index: int) -> float:
    return median(a[index] / b[index] for a, b in zip(samples[name], samples[unit], strict=True))


def registration(
    model: Any, count: int, write: Callable[[Path, int], Path], folder: Path, device: str
) -> dict[str, float]:
    """ms to register adapter 1 ... count with `load_adapter`; files are written before the clock starts."""
    times = []
    for i in range(count):
        path = write(folder / f"registered-{i}", i)
        start = now(device)
        model.load_adapter(str(path), f"registered-{i}")
        times.append(1e3 * (now(device) - start))
        shutil.rmtree(path)
    some = min(8, count)
    first, last = median(times[:some]), median(times[-some:])
    return {
        "count": count, "first_ms": times[0], "last_ms": times[-1], "first_median_ms": first, "last_median_ms": last,
        "ratio": last / first,
    }  # fmt: skip
