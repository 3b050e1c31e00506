"""Where the time of a step goes: the device's kernels by name, also inside CUDA graphs."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..timing import now

STEPS = 5
SHOWN = 14

Kernels = dict[str, tuple[float, float]]  # name -> (launches of a step, us of a step)


def kernels(step: Callable[[], Any], count: int, device: str) -> Kernels:
    """A clock for `block`, in place of intervals: what ran on the device (without one: on the host)."""
    from torch.profiler import ProfilerActivity, profile

    cuda = device.startswith("cuda")
    now(device)
    with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as seen:
        for _ in range(count):
            step()
        now(device)
    found: dict[str, list[float]] = {}
    for event in seen.events():
        if cuda and event.device_type != torch.autograd.DeviceType.CUDA:
            continue
        us = event.device_time if cuda else event.cpu_time
        sums = found.setdefault(short(event.name), [0.0, 0.0])
        sums[0] += 1 / count
        sums[1] += us / count
    return {name: (launches, us) for name, (launches, us) in found.items()}


def short(name: str) -> str:
    """A kernel's name without what its template says."""
    return re.sub(r"<.*", "", name.removeprefix("void "))[:70]


def lines(found: Mapping[str, Kernels]) -> list[str]:
    """us of a step by kernel and side, those with the largest differences first."""
    first, *_, last = found
    names = {name for side in found.values() for name in side}

    def us(side: str, name: str) -> float:
        return found[side].get(name, (0.0, 0.0))[1]

    told = [
        "  in all: "
        + ", ".join(
            f"{side} {sum(us(side, name) for name in names):.0f} us in {sum(n for n, _ in found[side].values()):.0f}"
            for side in found
        )
    ]
    for name in sorted(names, key=lambda name: -abs(us(last, name) - us(first, name)))[:SHOWN]:
        parts = [f"{side} {us(side, name):9.1f} us in {found[side].get(name, (0, 0))[0]:5.1f}" for side in found]
        told.append(f"  {us(last, name) - us(first, name):+9.1f}   {'   '.join(parts)}   {name}")
    return told
