"""The benchmark runs, and refuses to time answers that differ."""

from __future__ import annotations

import json
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import get_peft_model

from tests.benchmarks import gate, gpu, gpu_contenders, gpu_gate, gpu_timing, material, registry, run, timing

TINY = "--base random:tiny --rounds 1 --threads 1 --rows 4 --prompt-tokens 5 --new-tokens 3 --adapters 1 2".split()


def test_tables_and_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "result.json"
    assert run.main([*TINY, "--registered", "3", "--out", str(out)]) == 0
    result = json.loads(out.read_text())
    (timed,) = result["runs"]
    assert list(timed["cells"]) == [
        "bare", "hf_multilora, all base", "hf_multilora, 1 adapter", "peft, 1 adapter", "hf_multilora, 2 adapters",
        "peft, 2 adapters",
    ]  # fmt: skip
    assert timed["cells"]["bare"]["decode_ratio"] == 1.0
    assert timed["cells"]["hf_multilora, 2 adapters"]["decode_peft_over_this"] > 0
    assert result["logits"]["2 adapters"]["control"] > registry.TOLERANCE > result["logits"]["2 adapters"]["peft"]
    assert result["registration"]["count"] == 3
    assert set(result) >= {"commit", "date", "versions", "cpu", "settings"}
    assert "2 adapters" in capsys.readouterr().out


@pytest.mark.parametrize("fault", ["wrong row", "ignored", "nan"])
def test_wrong_answers_are_not_timed(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = gate.logits

    def wrong(name: str, model: Any, inputs: Any, rows: list[str | None]) -> torch.Tensor:
        if name == registry.OURS and any(rows):
            if fault == "wrong row":
                rows = rows[::-1]
            elif fault == "nan":
                return right(name, model, inputs, rows) * torch.nan
        if fault == "ignored":
            rows = [None] * len(rows)
        return right(name, model, inputs, rows)

    monkeypatch.setattr(gate, "logits", wrong)
    assert run.main([*TINY, "--registered", "0", "--out", str(tmp_path / "result.json")]) == 1
    assert not (tmp_path / "result.json").exists()
    assert "differ" in capsys.readouterr().err


def test_a_mix_larger_than_the_batch_is_refused() -> None:
    assert registry.Mix("2", 2).rows(["a", "b"], 3) == ["a", "b", "a"]
    with pytest.raises(ValueError, match="got 2 rows"):
        registry.Mix("3", 3).rows(["a", "b", "c"], 2)


def test_rounds_take_turns_and_ratios_are_within_a_round() -> None:
    order: list[str] = []

    def job(name: str, milliseconds: float) -> Any:
        def once() -> tuple[float, float]:
            order.append(name)
            slow = 10.0 if len(order) > 4 else 1.0  # the machine gets ten times slower after the second round
            return milliseconds * slow, 2 * milliseconds * slow

        return once

    samples = timing.interleave({"bare": job("bare", 2.0), "ours": job("ours", 3.0)}, 3, lambda text: None)
    assert order == ["bare", "ours", "ours", "bare", "bare", "ours", "ours", "bare"]
    assert len(samples["ours"]) == 3  # the first round warms up
    assert timing.summary(samples, "bare")["ours"]["decode_ratio"] == 1.5


# -- the benchmark for a GPU, on a tiny model ----------------------------------------------------------------------

SMALL = "--shape tiny --plan small --device cpu --rank 4 --backend torch --steps 2 --replays 2 --prefills 2".split()


def run_gpu(tmp_path: Path, *more: str) -> tuple[int, dict[str, Any]]:
    out = tmp_path / "gpu.json"
    status = gpu.main([*SMALL, *more, "--out", str(out)])
    return status, json.loads(out.read_text())


def test_the_gpu_benchmark_fills_its_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, result = run_gpu(tmp_path)
    assert status == 0
    ours, peft = result["contenders"]["hf_multilora, torch"], result["contenders"]["peft"]
    works = registry.PLANS["small"]
    assert list(ours["cells"]) == [work.name for work in works]
    assert list(peft["cells"]) == [work.name for work in works if work.distinct]
    for cell in (*ours["cells"].values(), *peft["cells"].values()):
        assert cell["eager"]["ms"] > 0 and cell["errors"]["mixed"] <= cell["errors"]["bound"]
    for work in works:
        cell = ours["cells"][work.name]
        assert ("graph" in cell) == (work.phase == "decode")
        assert "CUDA device" in cell.get("graph", {}).get("skipped", "CUDA device")
        assert cell["errors"].get("control", 1) > cell["errors"]["bound"]
    assert [cell["resident"] for cell in ours["cells"].values()] == [0, 1, 1, 2, 4, 4, 4]
    assert set(result["bare"]["before"]) == set(result["bare"]["after"]) == {work.shape for work in works}
    assert {name: model["slot"]["loads"] for name, model in ours["models"].items()} == {"2 slots": 3, "4 slots": 5}
    assert set(result) >= {"commit", "device", "versions", "triton", "adapter_bytes", "weight_bytes", "settings"}
    printed = capsys.readouterr().out
    assert "bare after" in printed and "one adapter to its slot" in printed


class Replay:
    """Stands for a CUDA graph: each replay runs the step again. frozen: only the first does."""

    def __init__(self, step: Any, frozen: bool) -> None:
        self.step, self.frozen, self.out = step, frozen, step()

    def replay(self) -> None:
        self.out.copy_(self.step())
        if self.frozen:
            self.step = lambda: self.out


@pytest.mark.parametrize("frozen", [False, True])
def test_a_captured_step_must_serve_another_mix(frozen: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def capture(step: Any) -> tuple[Replay, torch.Tensor]:
        graph = Replay(step, frozen)
        return graph, graph.out

    monkeypatch.setattr(gpu_timing, "capture", capture)
    monkeypatch.setattr(gpu_timing, "why_no_graph", lambda device: None)
    status, result = run_gpu(tmp_path, "--no-peft")
    cells = result["contenders"]["hf_multilora, torch"]["cells"]
    rerouted = [cell for work in registry.PLANS["small"] if "reroute" in (cell := cells[work.name])]
    assert len(rerouted) == 3 and all(cell["graph"]["ms"] > 0 for cell in rerouted)
    assert [("failed" in cell["reroute"]) for cell in rerouted] == [frozen] * 3
    assert status == int(frozen)


@pytest.mark.parametrize("fault", ["wrong row", "ignored", "broken"])
def test_wrong_answers_have_no_time_on_a_gpu_either(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = gpu_contenders.ours

    @contextmanager
    def ours(*args: Any) -> Any:
        with right(*args) as subject:
            route = subject.route
            if fault == "broken":
                raise RuntimeError("no such kernel")
            subject.route = lambda rows: route(rows[::-1] if fault == "wrong row" else [None] * len(rows))
            yield subject

    monkeypatch.setattr(gpu_contenders, "ours", ours)
    status, result = run_gpu(tmp_path)
    record = result["contenders"]["hf_multilora, torch"]
    assert status == 1 and record["error"]
    mixed = [work.name for work in registry.PLANS["small"] if work.distinct > 1]
    assert not any("eager" in record["cells"].get(name, {}) for name in mixed)
    peft = result["contenders"]["peft"]
    assert peft["error"] is None and all("eager" in peft["cells"][name] for name in mixed)
    assert result["bare"]["after"], "the base is given back after a failure"
    assert "failed: hf_multilora, torch" in capsys.readouterr().err


def test_the_formula_is_that_of_peft() -> None:
    """What the cells of the GPU are compared with, against an independent implementation, in float64."""
    base = material.random_base("tiny", None, torch.float64, "cpu")
    pairs = {n: material.random_adapter(base, 4, registry.LINEARS, i, torch.float64, "cpu") for i, n in enumerate("pq")}
    ids = material.prompts(3, 6, 64, "cpu")["input_ids"]
    with torch.no_grad(), gpu_gate.formula(base, pairs, 9 / 4, ["q", None, "p"]):
        found = base(input_ids=ids).logits
    plain = base(input_ids=ids).logits
    model = get_peft_model(base, material.lora_config(4, registry.LINEARS), adapter_name="p").eval()
    model.add_adapter("q", material.lora_config(4, registry.LINEARS))
    model.double()
    state = model.state_dict()
    for name, factors in pairs.items():
        for path, (a, b) in factors.items():
            state[f"base_model.model.{path}.lora_A.{name}.weight"].copy_(a)
            state[f"base_model.model.{path}.lora_B.{name}.weight"].copy_(b)
    expected = model(input_ids=ids, adapter_names=["q", "__base__", "p"]).logits
    torch.testing.assert_close(found, expected, atol=1e-10, rtol=1e-10)
    assert (plain - expected)[[0, 2]].abs().amax((1, 2)).min() > 1e-3
