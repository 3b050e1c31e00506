"""The stages of the GPU benchmark on a tiny model: they fill their tables, and time nothing that is wrong."""

from __future__ import annotations

import json
import stat
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hf_multilora.kernels.launch import Launcher
from hf_multilora.siblings import siblings_of
from tests.benchmarks import gpu_contenders, gpu_timing
from tests.benchmarks.gate import GateError
from tests.benchmarks.speed import __main__ as speed
from tests.benchmarks.speed import clock, compiled, kernel_calls, linears, sanitize, stage, streams, targets
from tests.kernels import test_gated
from tests.kernels.suite import INTERPRETED
from tests.test_benchmarks import Replay

TINY = (
    "--shape tiny --device cpu --dtype float32 --rank 4 --backend torch --replays 2 --prefills 2 --tokens 3 --batches 3"
).split()


def run(tmp_path: Path, stages: str, *more: str) -> tuple[int, dict[str, Any]]:
    out = tmp_path / "speed.json"
    status = speed.main([*TINY, "--stages", *stages.split(), "--out", str(out), *more])
    return status, json.loads(out.read_text())


@pytest.mark.parametrize("name", [name for name in speed.PLANS if name != "sanitize"])
def test_a_stage_fills_its_table(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, result = run(tmp_path, name)
    assert status == 0
    record = result["stages"][name]
    settings = SimpleNamespace(small=True, registered=[])
    assert list(record["cells"]) == list(speed.PLANS[name].cells(settings))
    for cell in record["cells"].values():
        assert "skipped" in cell or cell["value"] > 0
        errors = cell.get("errors")
        assert errors is None or errors["mixed"] <= errors["bound"] < errors.get("control", 1)
    assert set(record) >= {"commit", "device", "versions", "triton", "seconds", "shape", "rank"}
    assert result["seconds"][name] == record["seconds"] > 0 and result["commits"]
    printed = capsys.readouterr().out
    assert all(cell in printed for cell in record["cells"])


def test_kernels_of_a_cell_are_shown_where_its_target_is_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = {"4,2": targets.Target(target=0.0), "4,4": targets.Target(target=1e9)}
    monkeypatch.setattr(stage, "target", lambda name, cell: known[cell])
    monkeypatch.setattr(stage.Stage, "small", property(lambda self: False, lambda self, small: None), raising=False)
    _, result = run(tmp_path, "linears", "--cells", *known)
    cells = result["stages"]["linears"]["cells"]
    assert "profile" not in cells["4,4"] and set(cells["4,2"]["profile"]) == {clock.BARE, clock.OURS}
    monkeypatch.undo()
    _, result = run(tmp_path, "generate", "--cells", "eager 2,2", "--profile")
    assert set(result["stages"]["generate"]["cells"]["eager 2,2"]["profile"]) == {clock.BARE, clock.OURS}


def test_what_needs_a_gpu_says_so(tmp_path: Path) -> None:
    status, result = run(tmp_path, "decode sanitize", "--cells", "2,2", "memcheck", "poisoned")
    assert status == 0
    (cell,) = result["stages"]["decode"]["cells"].values()
    assert cell["kind"] == "eager" and "CUDA device" in cell["graph"]["skipped"]
    sanitized = result["stages"]["sanitize"]["cells"]
    assert set(sanitized) == {"memcheck", "poisoned"} and "CUDA device" in sanitized["memcheck"]["skipped"]
    assert "right" in sanitized["poisoned"]["note"]


def test_runs_are_merged_into_one_file(tmp_path: Path) -> None:
    run(tmp_path, "decode", "--cells", "2,0")
    run(tmp_path, "decode", "--cells", "1,1")
    _, result = run(tmp_path, "linears", "--cells", "4,2")
    assert set(result["stages"]) == {"decode", "linears"}
    assert list(result["stages"]["decode"]["cells"]) == ["2,0", "1,1"]
    out = tmp_path / "speed.json"
    result["stages"]["decode"]["commit"] = "another"
    out.write_text(json.dumps(result))
    _, result = run(tmp_path, "decode", "--cells", "2,2")
    assert list(result["stages"]["decode"]["cells"]) == ["2,2"], "cells of another commit stand beside none of this"


@pytest.mark.parametrize(("more", "told"), [(["--stages", "decod"], "--stages"), (["--cells", "9,9"], "--cells")])
def test_unknown_names_are_refused(more: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        speed.main([*TINY, *more])
    assert told in str(error.value) + capsys.readouterr().err


# -- wrong answers -------------------------------------------------------------------------------------------------
CHECKED = {
    "decode": "2,2", "prefill": "4x7,4", "linears": "4,4", "generate": "eager 2,2", "loads": "uniform",
    "many": "4 registered", "compiled": "2,2", "accuracy": "decode 2,2", "popularity": "r 5, skewed",
}  # fmt: skip


@pytest.mark.parametrize("name", CHECKED)
def test_wrong_answers_are_not_timed(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = gpu_contenders.routed

    def routed(model: Any, who: str) -> Any:
        subject = right(model, who)
        route, generate = subject.route, model.generate
        subject.route = lambda rows: route(rows[::-1] if len(set(rows)) > 1 else [None] * len(rows))
        if name == "generate":
            model.__dict__["generate"] = lambda *a, adapter_names, **k: generate(
                *a, adapter_names=adapter_names[::-1], **k
            )
        return subject

    monkeypatch.setattr(gpu_contenders, "routed", routed)
    status, result = run(tmp_path, name, "--cells", CHECKED[name])
    (cell,) = result["stages"][name]["cells"].values()
    assert status == 1 and "value" not in cell and "must" in cell["failed"]


@pytest.mark.parametrize("frozen", [False, True])
def test_a_captured_step_must_serve_another_mix(frozen: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def capture(step: Any) -> tuple[Replay, torch.Tensor]:
        graph = Replay(step, frozen)
        return graph, graph.out

    monkeypatch.setattr(gpu_timing, "capture", capture)
    monkeypatch.setattr(gpu_timing, "why_no_graph", lambda device: None)
    status, result = run(tmp_path, "decode prefill loads", "--cells", "2,2", "4x7,4", "uniform")
    for record in result["stages"].values():
        (cell,) = record["cells"].values()
        assert ("failed" in cell) == frozen and ("value" in cell) != frozen
    assert status == int(frozen)


def test_a_prompt_that_cannot_be_captured_is_timed_eager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def capture(step: Any) -> Any:
        raise RuntimeError("not while capturing")

    monkeypatch.setattr(gpu_timing, "capture", capture)
    monkeypatch.setattr(gpu_timing, "why_no_graph", lambda device: None)
    status, result = run(tmp_path, "decode prefill", "--cells", "2,2", "4x7,4")
    prompt, step = (result["stages"][name]["cells"][cell] for name, cell in (("prefill", "4x7,4"), ("decode", "2,2")))
    assert status == 1 and "failed" in step
    assert "failed" not in prompt and prompt["value"] > 0 and "not while capturing" in prompt["graph"]["skipped"]


def test_a_recompiled_step_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = iter(range(100))
    monkeypatch.setattr(compiled, "counts", lambda cuda: {"graphs": next(made)})
    status, result = run(tmp_path, "compiled", "--cells", "2,2")
    cell = result["stages"]["compiled"]["cells"]["2,2"]
    assert status == 1 and "as it is" in cell["failed"] and cell["recompiled"]["graphs"] > 0


def test_a_stage_that_breaks_is_recorded_and_the_next_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def peft(*args: Any) -> Any:
        raise RuntimeError("no such thing")
        yield

    monkeypatch.setattr(gpu_contenders, "peft", peft)
    status, result = run(tmp_path, "accuracy linears", "--cells", "decode 2,2", "4,2")
    assert status == 1 and "no such thing" in result["stages"]["accuracy"]["error"]
    assert result["stages"]["linears"]["cells"]["4,2"]["value"] > 0


# -- parts ---------------------------------------------------------------------------------------------------------
def test_contenders_take_turns() -> None:
    order: list[str] = []

    def job(name: str) -> Any:
        return lambda: order.append(name) or [float(len(order)), float(len(order))]

    found = clock.palindrome({"bare": job("a"), "ours": job("b")}, 2)
    assert "".join(order) == "abbaabba"
    assert found["bare"]["blocks_ms"] == [1.0, 4.0, 5.0, 8.0] and found["ours"]["ms"] == 4.5
    assert found["bare"]["ms"] == 4.5


def test_a_ratio_is_that_of_neighbours() -> None:
    """As it was measured on a host that got faster: the medians of both sides differ by 7%."""
    blocks = {"bare": [39.93, 22.93, 22.87, 21.44], "ours": [39.93, 28.57, 22.29, 21.48]}
    found = {name: clock.summary([[ms] for ms in side]) for name, side in blocks.items()}
    assert clock.ratio(found) == pytest.approx(1.001, abs=1e-3)
    assert found["ours"]["ms"] / found["bare"]["ms"] > 1.05


def test_verdicts() -> None:
    lower, higher = targets.Target(target=1.10, stretch=1.05), targets.Target(target=15.0, better="higher")
    assert [lower.verdict(v) for v in (1.04, 1.10, 1.105, 1.2)] == ["stretch met", "met", "near", "MISSED"]
    assert [higher.verdict(v) for v in (16.0, 14.9, 12.0)] == ["met", "near", "MISSED"]
    assert [lower.reached(v) for v in (1.10, 1.105)] == [True, False] == [higher.reached(v) for v in (15.0, 14.9)]
    assert targets.Target().verdict(1.0) == "" and targets.Target().reached(99.0)


def test_targets_are_those_of_cells() -> None:
    settings = SimpleNamespace(small=False, registered=[5, 100, 1000, 2000])
    known = {name: set(plan.cells(settings)) for name, plan in speed.PLANS.items()}
    assert all(cell in known[stage] for stage, cell in targets.TARGETS)


def test_mixes_are_punicas() -> None:
    counts = {mix: sorted(map(linears.shares(mix, 64).count, {*linears.shares(mix, 64)})) for mix in linears.MIXES}
    assert counts["identical"] == [64] and counts["distinct"] == [1] * 64 and counts["uniform"] == [8] * 8
    skewed = counts["skewed"][::-1]
    assert sum(skewed) == 64 and skewed[:3] == [22, 14, 10] and len(skewed) < 16


def test_the_linears_alone_have_the_siblings_of_a_llama() -> None:
    layer = linears.make("tiny", 1, torch.float32, "cpu").layers[0]
    groups = [siblings_of(module) for module in (layer.self_attn, layer.mlp)]
    assert groups == [(("q_proj", "k_proj", "v_proj"),), (("gate_proj", "up_proj"),)]


def test_requests() -> None:
    times = streams.arrivals(20.0, 1.0, 4000, 0)
    gaps = torch.tensor(times).diff()
    assert abs(gaps.mean() * 20 - 1) < 0.1 and abs(gaps.std() / gaps.mean() - 1) < 0.1
    regular = torch.tensor(streams.arrivals(20.0, 0.1, 4000, 0)).diff()
    assert regular.std() / regular.mean() < 0.2
    names = [f"{i}" for i in range(256)]
    asked = streams.drawn(names, 1.1, 4000, 0)
    assert abs(asked.count("0") / 4000 - streams.popular(256, 1.1)[0]) < 0.03
    assert abs(streams.drawn(names, 0.0, 4000, 0).count("0") / 4000 - 1 / 256) < 0.01
    batches = streams.resident([["p", "q", "p"], ["r", "r", None]], ["x", "y", "z"])
    assert batches == [["x", "y", "x"], ["x", "x", "y"]]


def test_guards_notice_what_is_written_beside() -> None:
    guards = kernel_calls.Guards()
    inside = guards.around(torch.arange(12.0).view(3, 4).t())
    assert torch.equal(inside, torch.arange(12.0).view(3, 4).t()) and inside.stride() == (1, 4)
    inside.zero_()
    guards.check("inside")
    inside.as_strided((13,), (1,))[12] = 1.0
    with pytest.raises(GateError, match="beside"):
        guards.check("outside")


@pytest.mark.parametrize(
    ("says", "status", "wanted"),
    [
        (kernel_calls.DONE, 0, "note"),
        ("========= a hazard", sanitize.FOUND, "found errors:\n========= a hazard"),
        ("AssertionError", 1, "answer was wrong"),
        ("Unable to start", 255, "skipped"),
    ],
)
def test_what_the_sanitizer_says(says: str, status: int, wanted: str, tmp_path: Path) -> None:
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(f"#!/bin/sh\necho '{says}'; echo \"$*\" > {tmp_path}/asked\nexit {status}\n")
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    found: dict[str, Any] = {}
    if wanted in ("note", "skipped"):
        sanitize.watched(str(tool), "racecheck", found)
        assert wanted in found
    else:
        with pytest.raises(GateError, match=wanted):
            sanitize.watched(str(tool), "racecheck", found)
    asked = (tmp_path / "asked").read_text()
    assert "--tool racecheck" in asked and asked.endswith("kernel_calls --models float32\n")


@INTERPRETED
def test_calls_of_each_expand(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels, launch = set[str](), Launcher.__call__

    def noted(self: Launcher, *pointers: Any) -> None:
        kernels.add(self.kernel.fn.__name__)
        launch(self, *pointers)

    monkeypatch.setattr(Launcher, "__call__", noted)
    assert kernel_calls.laid("cpu") == 40
    some = {f"lora_{kind}_kernel" for kind in ("expand", "expand_rows", "expand_wide", "gated_rows", "gated_wide")}
    assert kernels == some | {"lora_gated_kernel", "lora_shrink_kernel"}
    monkeypatch.setattr(test_gated, "ACTS", {"silu": torch.nn.functional.relu, "gelu_tanh": torch.tanh})
    with pytest.raises(GateError, match=r"rows, a decode, torch.float32: tests.kernels.test_gated.laid"):
        kernel_calls.laid("cpu")
