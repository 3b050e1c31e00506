"""Launches without Triton's look-up: what is kept, and who is told. What is compiled are stand-ins: no GPU needed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton")
from hf_multilora.kernels import launch  # noqa: E402

STREAM = 77


class Compiled:
    """Stands in for a compiled kernel."""

    function, packed_metadata = "function", "metadata"

    def __init__(self) -> None:
        self.runs: list[tuple[Any, ...]] = []
        self.slow: list[tuple[Any, ...]] = []

    def run(self, *arguments: Any) -> None:
        self.runs.append(arguments)

    def __getitem__(self, grid: Any) -> Any:
        return lambda *arguments: self.slow.append((*grid, *arguments))


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Compiled]]:
    """All that was compiled, one for each launch in full."""
    made: list[Compiled] = []

    def full(kernel: Any, grid: Any, arguments: Any, constants: Any) -> Compiled:
        made.append(Compiled())
        return made[-1]

    monkeypatch.setattr(launch, "launch", full)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: STREAM, raising=False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: -1)  # what tensors on the CPU say
    yield made


def launcher() -> launch.Launcher:
    return launch.Launcher(None, (2, 3, 1), (5, 6), {"BLOCK": 16, "PDL": False}, 4, 1)


def tensors(count: int, odd: int = 0) -> list[Tensor]:
    return [torch.zeros(64)[odd:] for _ in range(count)]


def expected(*pointers: Tensor | None) -> tuple[Any, ...]:
    addresses = [None if t is None else t.data_ptr() for t in pointers]
    return (2, 3, 1, STREAM, "function", "metadata", None, None, None, *addresses, 5, 6, 16, False)


def test_a_second_launch_goes_straight_to_what_was_compiled(compiled: list[Compiled]) -> None:
    run, (x, y) = launcher(), tensors(2)
    run(x, y, None)
    assert len(compiled) == 1 and not compiled[0].runs
    run(y, x, None)
    assert len(compiled) == 1 and compiled[0].runs == [expected(y, x, None)] != [expected(x, y, None)]


@pytest.mark.parametrize("hook", ["launch_enter_hook", "launch_exit_hook"])
def test_who_follows_launches_is_told(compiled: list[Compiled], hook: str) -> None:
    run, (x, y), chain = launcher(), tensors(2), getattr(triton.knobs.runtime, hook)
    run(x, y)
    chain.add(print)
    try:
        run(x, y)
    finally:
        chain.remove(print)
    assert len(compiled[0].slow) == 1 and not compiled[0].runs
    with mock.patch.object(triton.knobs.runtime, hook, print):
        run(x, y)
    assert len(compiled[0].slow) == 2
    run(x, y)
    assert len(compiled[0].slow) == 2 and len(compiled[0].runs) == 1


def test_alignment_is_part_of_what_is_kept(compiled: list[Compiled]) -> None:
    run, (x, y), (odd,) = launcher(), tensors(2), tensors(1, odd=1)
    for pointers in ((x, y), (x, odd), (odd, x), (x, None), (y, x), (x, odd)):
        run(*pointers)
    assert len(compiled) == 4 and [len(one.runs) for one in compiled] == [1, 1, 0, 0]


def test_dtypes_are_part_of_what_is_kept(compiled: list[Compiled]) -> None:
    run, (x, y) = launcher(), tensors(2)
    for pointers in ((x, y), (x, y.long()), (x.half(), y), (y, x), (y, x.long())):
        run(*pointers)
    assert [len(one.runs) for one in compiled] == [1, 1, 0]
    for last in (y, y.long()):
        bound = launch.Bound(run, 1, last)
        bound(x, [y])
        bound(y, [x])
    assert [len(one.runs) for one in compiled] == [1, 1, 0, 1, 1]


def test_another_device_is_launched_in_full(compiled: list[Compiled], monkeypatch: pytest.MonkeyPatch) -> None:
    run, (x, y) = launcher(), tensors(2)
    run(x, y)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    run(x, y)
    assert len(compiled) == 2 and not compiled[0].runs


@pytest.mark.parametrize("devices", [1, 2])
def test_bound_pointers(compiled: list[Compiled], monkeypatch: pytest.MonkeyPatch, devices: int) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    (x, y, z, b), (odd,) = tensors(4), tensors(1, odd=1)
    for last in (b, odd):
        compiled.clear()
        bound = launch.Bound(launcher(), 3, last, None)
        for both, outs in ((x, [y]), (y, [x]), (x, [x, z]), (y, [x, y, z])):
            bound(both, outs)
        assert len(compiled) == 1
        assert compiled[0].runs == [
            expected(y, y, x, x, x, last, None),
            expected(x, x, x, z, x, last, None),
            expected(y, y, x, y, z, last, None),
        ]
        bound(odd, [x])
        bound(x, [y, odd])
        assert len(compiled) == 3, "an address that is no multiple of 16 is a kernel of its own"
        bound(x, [y])
        assert len(compiled) == 3 and len(compiled[0].runs) == 4 and not compiled[1].runs
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
        bound(x, [y])
        assert len(compiled) == (3 if devices == 1 else 4), "the other of two devices is current"
        monkeypatch.setattr(torch.cuda, "current_device", lambda: -1)
