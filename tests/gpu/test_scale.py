"""A thousand adapters over eight slots on a CUDA device: all rows right, host copies pinned, nothing piles up."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.scale import MIB, Fleet, Life, assert_flat, long_life

TOLERANCE = 2e-4  # sums in another order than the merged weight's


def test_a_thousand_adapters(tmp_path: Path) -> None:
    assert_flat(long_life(tmp_path, "cuda", TOLERANCE), rss=64 * MIB)  # kernels are compiled meanwhile


@pytest.mark.parametrize("bounds", [(1, 1), (3, None), (6, 7)], ids=str)
def test_few_slots(tmp_path: Path, bounds: tuple[int, int | None]) -> None:
    """With all that is in host memory page-locked, after reloads and deletions too."""
    fleet = Fleet(tmp_path, 14, "cuda", seed=1)
    model = fleet.model(max_loras=bounds[0], max_cpu_loras=bounds[1])
    life = Life(fleet, model, most=7, tolerance=TOLERANCE)
    for i in range(40):
        life.change()
        life.batch(generate=i % 8 == 7)
        life.without_names()
        life.check(whole=True)
        report = model.memory_report()
        assert report.host_pinned_bytes == report.host_bytes > 0
    assert life.seen["passes"] > 5 and life.seen["deletes"] and life.seen["reloads"]


def test_moves_between_devices(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, 20, "cuda", seed=3)
    life = Life(fleet, fleet.model(max_loras=4, max_cpu_loras=5), most=6, tolerance=TOLERANCE)
    for device in ("cpu", "cuda", "cpu", "cuda"):
        life.model.to(device)
        fleet.base.to(device)
        fleet.device = torch.device(device)
        for _ in range(5):
            life.change()
            life.batch()
            life.check(whole=True)
