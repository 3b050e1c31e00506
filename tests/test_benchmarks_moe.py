"""The benchmark of a mixture of experts runs, and refuses to time answers that differ."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks import gpu_contenders, gpu_moe
from tests.benchmarks.gate import GateError
from tests.benchmarks.gpu_contenders import Subject

TINY = "--shape tiny --layers 2 --rows 4 --adapters 2 --rank 3 --dtype float32 --device cpu --steps 2".split()


def test_a_mixture_of_experts_fills_its_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "result.json"
    assert gpu_moe.main([*TINY, "--out", str(out)]) == 0
    result = json.loads(out.read_text())
    assert [*result["cells"]] == [f"{phase}, {implementation}" for phase, implementation in gpu_moe.CELLS]
    for cell in result["cells"].values():
        assert [*cell] == ["bare", "ours", "bare after"] and all(found["eager"]["ms"] > 0 for found in cell.values())
    for errors in result["errors"].values():
        assert errors["error"] <= errors["bound"] < errors["control"]
    assert sum(result["slot_bytes"]) == 2 * result["adapter_bytes"]
    assert "decode, batched_mm, ours" in capsys.readouterr().out


def test_rows_with_other_adapters_are_not_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = gpu_contenders.ours

    @contextmanager
    def swapped(*args: Any) -> Iterator[Subject]:
        with right(*args) as subject:
            yield Subject("swapped", subject.model, lambda rows: subject.route(rows[::-1]))

    monkeypatch.setattr(gpu_contenders, "ours", swapped)
    with pytest.raises(GateError, match="swapped, decode: logits must be within"):
        gpu_moe.main([*TINY, "--out", str(tmp_path / "result.json")])
