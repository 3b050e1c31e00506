"""What is reported of memory and adapters, in numbers, as text and as HTML; the progress bar of long loads."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from typing import Any

import pytest
import torch
from transformers.utils import logging

from hf_multilora.display import bar_picture
from hf_multilora.loading import FEW, progress
from hf_multilora.reports import MemoryReport
from tests import heads
from tests.models import INPUTS, Family

pytest_plugins = ("tests.fixtures",)

TIMES = "\N{MULTIPLICATION SIGN}"
VOID = {"br", "hr", "img"}


class Page(HTMLParser):
    """Text of an HTML fragment, its tags checked for balance, and the widths of bars' parts."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: list[str] = []
        self.tags: set[str] = set()
        self.feed(html)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.add(tag)
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if data.strip():
            self.texts.append(data.strip())


def report_of(model: Any) -> MemoryReport:
    report: MemoryReport = model.memory_report()
    assert report.device_bytes == sum(kind.bytes for kind in report.kinds)
    assert report.rank_rows == sum(kind.rank_rows for kind in report.kinds)
    assert report.rank_rows_used == sum(sum(kind.used.values()) for kind in report.kinds)
    assert len(report.per_module) == sum(kind.modules for kind in report.kinds)
    for slot, name in enumerate(report.slots):
        assert (name is not None) == (report.slot_bytes[slot] > 0)
        assert name is not None or not any(slot in kind.used for kind in report.kinds)
    return report


@torch.no_grad()
def test_memory_by_kind_and_slot(family: Callable[[str], Family]) -> None:
    """2 layers; a: r 4 on q, v; b: r 8 on all linears and the embedding; c: r 3 on o, down and the head."""
    model = family("llama").model(max_loras=2)
    before = report_of(model)
    assert before.device_bytes == 0 and before.host_adapters == 3 and before.slots == [None, None]
    model(**{k: v[:2] for k, v in INPUTS.items()}, adapter_names=["a", "b"])
    report = report_of(model)
    kinds = {kind.name: kind for kind in report.kinds}
    assert report.kinds[0].name == "embed_tokens" and report.kinds[-1].name == "lm_head"
    assert {kind.role for kind in report.kinds} == {"lora"}
    assert report.slots == ["a", "b"] and kinds["q_proj"].used == {0: 2 * 4, 1: 2 * 8}
    assert kinds["q_proj"].modules == 2 and kinds["q_proj"].rank_rows == 2 * 16
    assert kinds["embed_tokens"].used == {1: 8} and kinds["lm_head"].used == {}
    entry = model._multilora.store.catalogue.entry
    assert report.slot_bytes == [entry("a").host.nbytes, entry("b").host.nbytes]
    model.pin_adapter("c")
    model(**{k: v[:1] for k, v in INPUTS.items()}, adapter_names=["c"])
    swapped = report_of(model)
    assert sorted(filter(None, swapped.slots)) == ["b", "c"] and swapped.pinned == ["c"]


@torch.no_grad()
def test_saved_modules_and_token_rows(tmp_path_factory: pytest.TempPathFactory) -> None:
    torch.manual_seed(0)
    adapters = {
        "head": heads.Made({"task_type": "SEQ_CLS"}, heads.labels("score", 5)),
        "words": heads.Made({"trainable_token_indices": [5, 9, 17]}),
    }
    made = heads.Heads(heads.llama(), tmp_path_factory.mktemp("kinds"), adapters)
    model = made.model()
    model(heads.ids(2), adapter_names=["head", "words"])
    kinds = {str(kind): kind for kind in report_of(model).kinds}
    assert kinds[f"score {TIMES}1 saved"].used == {0: 5}
    assert kinds[f"embed_tokens {TIMES}1 tokens"].used == {1: 3}
    assert kinds[f"q_proj {TIMES}2"].used == {0: 4, 1: 4}
    listed = {row["name"]: row for row in model.list_adapters()}
    assert listed["head"]["max_rank"] == listed["words"]["max_rank"] == 2
    assert listed["head"]["modules"] == listed["words"]["modules"] == 2 * 2 + 1
    assert f"score {TIMES}1 saved" in Page(model.memory_report()._repr_html_()).texts


@torch.no_grad()
def test_the_picture(family: Callable[[str], Family]) -> None:
    model = family("llama").model(["a"], max_loras=3)
    model.load_adapter(str(family("llama").adapter("b")), "<b> & co", pinned=True)
    model(**{k: v[:2] for k, v in INPUTS.items()}, adapter_names=["a", "<b> & co"])
    report = report_of(model)
    html = report._repr_html_()
    page = Page(html)
    assert not page.tags & {"script", "style", "svg", "b"}
    assert str(report.kinds[0]) in page.texts and page.texts[0] == f"Device: {report._device()}"
    assert page.texts[-1] == f"Host: {report._host()}"
    assert any("<b> & co (pinned)" in text for text in page.texts)
    rows = re.findall(r"<tr .*?</tr>", html)
    assert len(rows) == len(report.kinds)
    for row, kind in zip(rows, report.kinds, strict=True):
        widths = [float(width) for width in re.findall(r'style="width:([\d.]+)%', row)]
        assert sum(widths) == pytest.approx(100, abs=0.05)
        assert widths[: len(kind.used)] == pytest.approx(
            [100 * r / kind.rank_rows for r in kind.used.values()], abs=0.01
        )
        assert len(widths) == len(kind.used) + (sum(kind.used.values()) < kind.rank_rows)
    colours = re.findall(r"background:(hsla\([^)]*\))", html)
    assert len(set(colours)) == 2, "a colour per adapter"
    model(**{k: v[:1] for k, v in INPUTS.items()}, adapter_names=["a"])
    model.load_adapter(str(family("llama").adapter("c")), "c")
    model.delete_adapter("a")
    model(**{k: v[:1] for k, v in INPUTS.items()}, adapter_names=["c"])
    moved = model.memory_report()
    assert moved.slots == ["c", "<b> & co", None] and moved.slot_ids == [3, 2, None]
    later = set(re.findall(r"background:(hsla\([^)]*\))", moved._repr_html_()))
    assert later & set(colours) == {colours[1]}, "the colour follows the adapter, not its slot"


def test_a_picture_without_adapters(family: Callable[[str], Family]) -> None:
    model = family("llama").model([])
    assert Page(model.memory_report()._repr_html_()).texts == [
        "Device: 0.0 MiB in 0 modules (0 of 0 rank rows, 0 of 8 slots)",
        "Host: 0.0 MiB in 0 adapters (0.0 pinned)",
    ]
    model = family("llama").model(["a"])  # registered, not used yet
    assert "0 of 0 rows" in Page(model.memory_report()._repr_html_()).texts
    assert Page(bar_picture("t", {}, [], "f")).texts == ["t", "f"]


@torch.no_grad()
def test_the_list_of_adapters_is_a_list_that_shows_as_a_table(family: Callable[[str], Family]) -> None:
    model = family("llama").model(max_loras=2, max_cpu_loras=2)
    model.set_adapter("c")
    rows = model.list_adapters()
    assert isinstance(rows, list) and rows == [dict(row) for row in rows] and rows[0]["name"] == "a"
    texts = Page(rows._repr_html_()).texts
    assert texts[:6] == ["adapter", "rank", "modules", "size", "where", "source"] and len(texts) == 4 * 6
    places = dict(zip(texts[6::6], texts[10::6], strict=True))
    assert places["a"] == "disk" and places["b"] == "host memory" and places["c"] == "slot, default"
    model.pin_adapter("b")
    assert "host memory, pinned" in model.list_adapters()._repr_html_()


# -- progress --------------------------------------------------------------------------------------------------
@pytest.fixture
def bars() -> Iterator[None]:
    verbosity, shown = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_warning()
    logging.enable_progress_bar()
    yield
    logging.set_verbosity(verbosity)
    if not shown:
        logging.disable_progress_bar()


def loaded(count: int, capfd: pytest.CaptureFixture[str]) -> str:
    """What a load of so many shows."""
    items = {f"n{i}": "folder" for i in range(count)}
    assert list(progress(items)) == list(items.items())
    return "".join(capfd.readouterr())


def test_long_loads_have_a_bar(bars: None, capfd: pytest.CaptureFixture[str]) -> None:
    assert "Loading adapters: 100%" in loaded(FEW + 1, capfd)
    assert loaded(FEW, capfd) == ""


@pytest.mark.parametrize("quiet", [logging.disable_progress_bar, logging.set_verbosity_error])
def test_no_bar_where_transformers_is_quiet(bars: None, capfd: pytest.CaptureFixture[str], quiet: Any) -> None:
    quiet()
    assert loaded(FEW + 1, capfd) == ""
