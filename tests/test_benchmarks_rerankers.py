"""The benchmarks of rerankers run, and refuse to time answers that differ."""

from __future__ import annotations

import copy
import json
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import get_peft_model

from hf_multilora.layers.rows import BASE_ONLY
from tests.benchmarks import (
    gpu_contenders,
    gpu_rerankers,
    gpu_timing,
    registry,
    reranker_contenders,
    reranker_gate,
    reranker_material,
    rerankers,
)
from tests.test_benchmarks import Replay

PAIRS = "--base random:tiny --rows 4 --tokens 9 6 --adapters 1 2 --rounds 1 --threads 1 --rank 4".split()


def test_rerankers_fill_their_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "result.json"
    assert rerankers.main([*PAIRS, "--out", str(out)]) == 0
    result = json.loads(out.read_text())
    (timed,) = result["runs"]
    cells = [f"{who}, {mix}" for mix in ("1 adapter", "2 adapters") for who in ("hf_multilora", "peft, grouped")]
    assert list(timed["cells"]) == [f"{t} tokens, {cell}" for t in (9, 6) for cell in ("bare", *cells)]
    ours = timed["cells"]["6 tokens, hf_multilora, 2 adapters"]
    assert all(ours[f"{kind}_peft_over_this"] > 0 and ours[f"{kind}_ratio"] > 0 for kind in rerankers.KINDS)
    for errors in result["logits"].values():
        assert errors["control"] > registry.TOLERANCE > max(errors["base"], errors["predict"], errors["forward"])
    assert "sentence-transformers" in result["versions"]
    assert "6 tokens, hf_multilora, 2 adapters" in capsys.readouterr().out


@pytest.mark.parametrize("fault", ["swapped rows", "ignored", "nan"])
def test_wrong_scores_are_not_timed(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = reranker_contenders.ours

    def ours(*args: Any) -> reranker_contenders.Contender:
        made = right(*args)

        def forward(work: Any, rows: Any) -> torch.Tensor:
            return made.forward(work, rows[::-1] if fault == "swapped rows" else [None] * len(rows))

        def predict(work: Any, rows: Any) -> torch.Tensor:
            return made.predict(work, rows) * (torch.nan if fault == "nan" and any(rows) else 1)

        return reranker_contenders.Contender(predict, made.forward if fault == "nan" else forward)

    monkeypatch.setattr(reranker_contenders, "ours", ours)
    assert rerankers.main([*PAIRS, "--out", str(tmp_path / "result.json")]) == 1
    assert not (tmp_path / "result.json").exists()
    assert ("predict" if fault == "nan" else "forward") in capsys.readouterr().err


def run_gpu_rerankers(tmp_path: Path) -> tuple[int, dict[str, Any]]:
    out = tmp_path / "gpu.json"
    return gpu_rerankers.main(["--tiny", "--out", str(out)]), json.loads(out.read_text())


@pytest.mark.parametrize("replays", ["no graph", "right", "frozen"])
def test_the_gpu_benchmark_of_rerankers(
    replays: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def capture(step: Any) -> tuple[Replay, torch.Tensor]:
        graph = Replay(step, replays == "frozen")
        return graph, graph.out

    if replays != "no graph":
        monkeypatch.setattr(gpu_timing, "capture", capture)
        monkeypatch.setattr(gpu_timing, "why_no_graph", lambda device: None)
    status, result = run_gpu_rerankers(tmp_path)
    assert status == int(replays == "frozen")
    assert list(result["cells"]) == [
        gpu_rerankers.cell_name(tokens, distinct) for distinct in (0, 1, 2, 4) for tokens in (6, 3)
    ]
    for name, cell in result["cells"].items():
        mixed = " 2 " in name or " 4 " in name
        assert ("failed" in cell) == (mixed and replays == "frozen")
        assert cell["errors"].get("control", 1) > cell["errors"]["bound"] >= cell["errors"]["mixed"]
        assert ("reroute" in cell) == (mixed and replays == "right")
        assert cell["floors"]["flops"] > 1 or " 0 " in name
    assert set(result["bare"]["before"]) == set(result["bare"]["after"]) == {"6", "3"}
    assert set(result) >= {"commit", "device", "versions", "attention", "settings", "seconds"}
    assert "4 adapters" in capsys.readouterr().out


@pytest.mark.parametrize("fault", ["wrong row", "head only"])
def test_wrong_scores_have_no_time_on_a_gpu(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = gpu_contenders.ours

    @contextmanager
    def ours(*args: Any) -> Any:
        with right(*args) as subject:
            route = subject.route
            if fault == "wrong row":
                subject.route = lambda rows: route(rows[::-1])
            else:
                for _, slots in subject.model._multilora.sites.values():
                    if slots.role == "lora":  # its delta is left out
                        slots.path = lambda: BASE_ONLY
            yield subject

    monkeypatch.setattr(gpu_contenders, "ours", ours)
    status, result = run_gpu_rerankers(tmp_path)
    assert status == 1
    timed = [name for name, cell in result["cells"].items() if "eager" in cell]
    assert not any(" 2 " in name or " 4 " in name for name in timed)


def test_the_formula_of_heads_is_that_of_peft() -> None:
    """Each row's own A, B and head, against PEFT with that adapter alone, in float64."""
    base = gpu_rerankers.random_base("tiny", None, torch.float64, "cpu")
    made = {n: reranker_material.random_reranker(base, 4, i, torch.float64, "cpu") for i, n in enumerate("pq")}
    ids = torch.randint(5, 64, (3, 6), generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), reranker_gate.formula(base, made, 9 / 4, ["q", None, "p"]):
        found = base(input_ids=ids).logits
    assert not base.classifier._forward_hooks
    plain = base(input_ids=ids).logits
    torch.testing.assert_close(found[1], plain[1])
    settings = reranker_material.lora_settings(4)
    for row, name in ((0, "q"), (2, "p")):
        model = get_peft_model(copy.deepcopy(base), settings, adapter_name="x").double().eval()
        state = model.state_dict()
        for path, (a, b) in made[name].pairs.items():
            state[f"base_model.model.{path}.lora_A.x.weight"].copy_(a)
            state[f"base_model.model.{path}.lora_B.x.weight"].copy_(b)
        for key, value in made[name].head.items():
            state[f"base_model.model.classifier.modules_to_save.x.{key}"].copy_(value)
        expected = model(input_ids=ids[row : row + 1]).logits[0]
        torch.testing.assert_close(found[row], expected, atol=1e-10, rtol=1e-10)
        assert (plain[row] - expected).abs().min() > 1e-3


@torch.no_grad()
def test_attention_has_no_mask_eager_or_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the captured bare model is slow, and everything looks fast beside it."""
    masks: list[Any] = []
    attention = torch.nn.functional.scaled_dot_product_attention

    def seen(*args: Any, attn_mask: Any = None, **kwargs: Any) -> torch.Tensor:
        masks.append(attn_mask)
        return attention(*args, attn_mask=attn_mask, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", seen)
    base = gpu_rerankers.random_base("tiny", None, torch.float32, "cpu")
    for capturing in (False, True):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)  # noqa: B023
        base(input_ids=torch.full((2, 6), 7))
    assert masks == [None] * 4
    base(input_ids=torch.full((2, 6), 7), attention_mask=torch.zeros(2, 1, 6, 6))
    assert masks[-1] is not None
