"""Clocks for the GPU: intervals between steps, captured graphs, loads into a slot, copies as a measure of the rest."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import mean, median
from typing import Any

import torch
from torch import Tensor

from .gpu_contenders import Subject
from .timing import now

WARM_UP = 3


def intervals(step: Callable[[], Any], count: int, device: str) -> list[float]:
    """ms of each of `count` steps that follow each other without a pause: on CUDA between events on the stream."""
    now(device)
    if not device.startswith("cuda"):
        marks = [time.perf_counter()]
        for _ in range(count):
            step()
            marks.append(time.perf_counter())
        return [1e3 * (b - a) for a, b in pairwise(marks)]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    events[0].record()
    for event in events[1:]:
        step()
        event.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) for a, b in pairwise(events)]


def steps(step: Callable[[], Any], most: int, budget_s: float, device: str) -> dict[str, float]:
    """Median and mean ms of up to `most` steps, fewer (but two) where they would take longer than `budget_s`."""
    for _ in range(WARM_UP):
        start = now(device)
        step()
        once = now(device) - start
        if once > 1:
            break
    count = max(2, min(most, int(budget_s / once)))
    found = intervals(step, count, device)
    return {"ms": median(found), "mean_ms": mean(found), "steps": count}


def why_no_graph(device: str) -> str | None:
    return None if device.startswith("cuda") else "a CUDA graph needs a CUDA device"


def capture(step: Callable[[], Tensor]) -> tuple[Any, Tensor]:
    """(graph of one step, the tensor that its replays write), after a warm-up on a stream of its own."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    return graph, out


def slot_loads(subject: Subject, names: Sequence[str], count: int, device: str) -> dict[str, float]:
    """ms to open a request for one adapter, in a model that has one slot less than `names`: least recently used first,
    so that it must be loaded, to a slot that has been loaded before; and again, when it is there."""

    def enter(name: str) -> float:
        start = now(device)
        with subject.route([name]):
            pass
        return 1e3 * (now(device) - start)

    def on_device(name: str) -> bool:
        return next(row["on_device"] for row in subject.model.list_adapters() if row["name"] == name)

    for name in [*names, *names]:
        enter(name)
    loads, again = [], []
    for i in range(count):
        name = names[i % len(names)]
        if on_device(name):
            raise RuntimeError(f"{name} must not be in a slot before its load is timed")
        loads.append(enter(name))
        again.append(enter(name))
    return {
        "loads": count, "ms": median(loads), "resident_ms": median(again),
        "load_ms": median(a - b for a, b in zip(loads, again, strict=True)),
    }  # fmt: skip


def pinned_copy_ms(nbytes: int, device: str) -> float | None:
    """ms of one copy of that size from pinned host memory; None without CUDA."""
    if not device.startswith("cuda"):
        return None
    source = torch.randint(0, 256, (nbytes,), dtype=torch.uint8).pin_memory()
    target = torch.empty(nbytes, dtype=torch.uint8, device=device)
    return median(intervals(lambda: target.copy_(source, non_blocking=True), 10, device))


def bytes_per_ms(device: str) -> float:
    """Bytes read and written in a ms by a copy within the device."""
    source = torch.randn((1 << 28) if device.startswith("cuda") else (1 << 20), device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / median(intervals(lambda: target.copy_(source), 10, device)[1:])
