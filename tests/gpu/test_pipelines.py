"""Pipelines on a CUDA device, to which they move the model themselves: rows as merged copies answer them on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from hf_multilora.integrations.pipelines import pipeline
from tests.integrations.pipes import CASES, NAMES, Served


@pytest.mark.parametrize("name", ["text, all scores", "tokens", "zero-shot", "generation", "chats"])
def test_rows_are_each_adapters_own(tmp_path: Path, name: str) -> None:
    served = Served(CASES[name], tmp_path)
    case = served.case
    model = served.family.model()
    pipe = pipeline(case.task, model=model, tokenizer=served.tokenizer(), device=0)
    assert model.device.type == "cuda"
    for batch_size in (1, 2, 5):
        got = pipe(list(case.inputs), adapter_names=NAMES, batch_size=batch_size, **case.params)
        served.check(got, tolerance=2e-3)
    model.set_adapter("b")
    served.check(pipe(list(case.inputs), batch_size=2, **case.params), ["b"] * len(NAMES), tolerance=2e-3)
    assert model.device.type == "cuda"
