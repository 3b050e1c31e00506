"""What a call writes about its rows: once per change of (rows, slots), once per device, of the size of the rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hf_multilora.pool import Layout
from hf_multilora.routing import Routing
from tests.tiny import Family, ids, llama, logits

ROWS, TOKENS = 3, 7


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Family:
    torch.manual_seed(0)
    adapters: dict[str, dict[str, Any]] = {"a": {"r": 2}, "b": {"r": 5}, "c": {"r": 3, "targets": ["q_proj"]}}
    return Family(llama(), tmp_path_factory.mktemp("adapters"), adapters)


@pytest.fixture
def writes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, ...]]]:
    """The slots of every write of row tables."""
    seen: list[tuple[int, ...]] = []
    write = Routing._write

    def counted(self: Routing, slots: tuple[int, ...]) -> None:
        seen.append(slots)
        write(self, slots)

    monkeypatch.setattr(Routing, "_write", counted)
    yield seen


def generate(model: Any, names: list[str | None], **how: Any) -> torch.Tensor:
    return model.generate(ids(len(names), TOKENS), adapter_names=names, max_new_tokens=6, do_sample=False, **how)


def test_rows_are_written_once_per_change_not_per_token_or_layer(family: Family, writes: list[Any]) -> None:
    model = family.model()
    generate(model, ["a", None, "b"])
    assert len(writes) == 1
    generate(model, ["a", None, "b"])
    assert len(writes) == 1, "the same rows again: they are there"
    logits(model, ids(ROWS, 4), ["a", None, "b"])
    assert len(writes) == 1, "another length: tables know nothing of tokens"
    generate(model, ["b", None, "a"])
    assert len(writes) == 2
    generate(model, ["b", None, "a"], num_beams=2)
    assert [len(slots) for slots in writes[2:]] == [6], "the beams' rows"


def test_a_load_writes_the_layouts_that_changed_and_no_other(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    model = family.model(max_loras=2)
    logits(model, ids(2), ["a", "b"])
    taken: list[Any] = []
    take = Layout.take

    def counted(self: Layout, spans: Any, parts: Any) -> None:
        taken.append(spans != self.spans)
        take(self, spans, parts)

    monkeypatch.setattr(Layout, "take", counted)
    logits(model, ids(2), ["b", "a"])
    assert not taken
    logits(model, ids(2), ["b", "c"])
    assert any(taken) and len(taken) <= 2, "q_proj differs from the other three: two layouts for eight modules"


class Seen(TorchDispatchMode):
    """Sizes of what is sorted."""

    def __init__(self) -> None:
        super().__init__()
        self.sorted: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "sort" in func.name() or "topk" in func.name():
            self.sorted.append(args[0].numel())
        return func(*args, **(kwargs or {}))


def test_nothing_of_the_size_of_tokens_is_sorted(family: Family) -> None:
    model = family.model()
    with Seen() as seen:
        logits(model, ids(ROWS, 40), ["a", None, "b"])
    assert seen.sorted == [ROWS]
    with Seen() as control:
        torch.argsort(torch.zeros(ROWS * 40))
    assert control.sorted == [ROWS * 40]


def test_layouts_keep_their_addresses_while_adapters_come_and_go(family: Family) -> None:
    model = family.model("a", "b", max_loras=1, max_lora_rank=5)

    def addresses() -> set[tuple[int, ...]]:
        layouts = {id(s.layout): s.layout for _, s in model._multilora.sites.values()}
        return {(x.owner.data_ptr(), x.starts.data_ptr(), x.ranks.data_ptr()) for x in layouts.values()}

    logits(model, ids(2), ["a", None])
    before = addresses()
    logits(model, ids(2), ["b", None])
    assert addresses() == before and len(before) == 1
    assert {s.layout.spans[0][1] for _, s in model._multilora.sites.values()} == {5}, "control: b is in the slot"


@pytest.mark.parametrize("packed", [[3, 4], [1, 6]])
def test_rows_that_a_graph_reads_are_kept_also_after_packed_ones(family: Family, packed: list[int]) -> None:
    """A packed row of as many tokens as there are rows later, with the same slots or others, leaves nothing behind."""
    model, names = family.model("a", "b", max_loras=2), ["a"] * 3 + ["b"] * 4
    routing, layouts = model._multilora.routing, lambda: model._multilora.routing.layouts
    positions = torch.cat([torch.arange(count) for count in packed])[None]
    with torch.no_grad():
        model(input_ids=ids(1, 7), position_ids=positions, adapter_names=["a", "b"], use_cache=False)
    logits(model, ids(7), names)
    with model.adapters(names):
        seen = [(table.row_slots.data_ptr(), table.order.data_ptr()) for table in routing.tables.values()]
        shut = [layout.shut.data_ptr() for layout in layouts()]
        assert any(table is layouts()[0].table for table in routing.tables.values()), "it is kept"
    logits(model, ids(3), ["a", "b", None])
    with model.adapters([*names[1:], None]):
        assert [layout.shut.data_ptr() for layout in layouts()] == shut
        table = layouts()[0].table
        assert (table.row_slots.data_ptr(), table.order.data_ptr()) in seen
        assert table.row_slots.tolist() == list(routing.row_slots) and routing.row_slots[-1] == -1


def test_a_captured_call_covers_the_whole_pool(
    family: Family, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What is loaded later has its rank rows beyond those that are occupied now, and may have a larger rank."""
    model, names = family.model("a", "b", max_loras=9, max_lora_rank=20), ["a", None]
    routing, before = model._multilora.routing, logits(model, ids(2), ["a", None])
    sites = [slots for _, slots in model._multilora.sites.values()]
    seen: list[tuple[int, ...]] = []
    for slots in sites:
        covered = slots.covered
        monkeypatch.setattr(slots, "covered", lambda f=covered: seen.append(tuple(map(len, f()[:2]))) or f())
    assert {slots.layout.width for slots in sites} == {16} and {slots.bound() for slots in sites} == {16}
    with monkeypatch.context() as capturing:
        capturing.setattr(routing, "on_cuda", True)
        capturing.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        torch.testing.assert_close(logits(model, ids(2), names), before)
        with model.adapters(names):
            routing.enter(2)
            assert {slots.bound() for slots in sites} == {32}
            covers = {tuple(map(len, slots.covered())) for slots in sites}
    assert covers == {(192, 192, 2)} and set(seen) == {(192, 192)}, "9 slots of rank 20, in multiples of 16"
    moves, layouts = routing.moves, {id(slots.layout) for slots in sites}
    for i in range(4):
        model.load_adapter(str(family.paths["b"]), f"b{i}")
    logits(model, ids(5), ["b0", "b1", "b2", "b3", "b"])
    assert {slots.layout.width for slots in sites} == {32}, "control: more of the pool is occupied now"
    assert routing.moves == moves and {id(slots.layout) for slots in sites} == layouts
    logits(model, ids(2), names)
    assert "capture it again" not in caplog.text


def test_a_capture_that_no_longer_holds_is_told_once(family: Family, caplog: pytest.LogCaptureFixture) -> None:
    model, told = family.model("a", "c", max_loras=2), "capture it again"
    routing = model._multilora.routing
    logits(model, ids(2), ["a", None])
    routing.captured_at = routing.moves  # as `enter` notes while a graph is captured
    with caplog.at_level("WARNING"):
        logits(model, ids(2), [None, "a"])
        assert told not in caplog.text, "another mix: the graph serves it"
        model.load_adapter(str(family.paths["b"]), "b")
        logits(model, ids(2), ["c", None])
        assert caplog.text.count(told) == 1, "slots of q_proj are laid out on their own now"
        logits(model, ids(2), ["b", None])
        assert caplog.text.count(told) == 1
