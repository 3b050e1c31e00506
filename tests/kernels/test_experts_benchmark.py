"""The benchmark of experts runs end to end on a CPU at a tiny size, and times nothing that is wrong."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hf_multilora.kernels import torch_experts
from tests.kernels.suite import INTERPRETED

TINY = "--experts 3 --choices 2 --hidden 32 --inner 16 --adapters 2 --rank 4 --tokens 4 --replays 2 --rounds 2".split()


@INTERPRETED
def test_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.benchmarks import gpu_experts

    monkeypatch.setattr(gpu_experts, "COPIES", 1)
    out = tmp_path / "found.json"
    chosen = ["--device", "cpu", "--dtype", "float32", "--backend", "torch", "--launches", "combine"]
    assert gpu_experts.main([*TINY, *chosen, "--out", str(out)]) == 0
    found = json.loads(out.read_text())
    cell, layer = found["launches"]["4"], found["layer"]["torch, 4"]
    assert found["commit"] and cell["taken"] == "few" and layer["error"] <= layer["bound"] < layer["control"]
    times = [cell["combine"]["few"], cell["combine"]["many"], layer["eager"]["bare"], layer["eager"]["ratio"]]
    assert min(times) > 0 and "graph" not in layer


@INTERPRETED
def test_a_wrong_launch_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.benchmarks import gpu_experts_launches as launches

    layer = launches.Layer.random(launches.Shape(3, 2, 32, 16, 4, 2), 4, torch.float32, "cpu", 0)
    gate = launches.Gate(layer, "shrink up")
    monkeypatch.setattr(launches, "triton_experts", torch_experts)
    monkeypatch.setattr(launches.Layer, "call", lambda self, *a, **k: torch_experts.shrink(
        self.data["tokens"], self.factors["a up"], self.begins, self.ranks, self.keys, self.tokens, 4))  # fmt: skip
    gate.check(None)
    for wrong in (replace(layer, keys=layer.keys.roll(1)), replace(layer, tokens=layer.tokens.roll(1))):
        gate.layer = wrong
        with pytest.raises(launches.GateError, match="shrink up with None must be right, it is off by"):
            gate.check(None)
