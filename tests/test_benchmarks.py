"""The benchmark runs, and refuses to time answers that differ."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.benchmarks import gate, registry, run, timing

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
