"""The store on a real model: what is in the slots' rank rows, what it costs, and that answers are right throughout."""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_multilora import AdapterError, AdapterInUseError, CapacityError, MultiLoRAModel
from hf_multilora.pool import RankRows
from tests.tiny import LINEARS, Family, assert_rows, beside, error, ids, llama, logits, same_ids, save_adapter

ADAPTERS: dict[str, dict[str, Any]] = {
    "wide": {"r": {"q_proj": 7, "v_proj": 2, "up_proj": 5, "down_proj": 1}},
    "q": {"r": 3, "targets": ["q_proj"]},
    "mlp": {"r": 4, "targets": ["up_proj", "down_proj"]},
    "one": {"r": 1},
    "thirteen": {"r": 13},
}


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Family:
    torch.manual_seed(0)
    return Family(llama(), tmp_path_factory.mktemp("adapters"), ADAPTERS)


def check(family: Family, model: Any, names: Any) -> None:
    inputs = same_ids(len(names))
    got, want = logits(model, inputs, names), family.truth(inputs, names)
    assert error(got, want) < 1e-5
    if len(set(names)) == len(names) > 1:
        assert_rows(got, want)


def sites(model: Any) -> dict[str, Any]:
    return {name: slots for name, (_, slots) in model._multilora.sites.items()}


def assert_clean(model: Any) -> None:
    """Rank rows that nobody owns are zero, also those that the fast path has laid beside the weights."""
    for name, slots in sites(model).items():
        free = torch.ones(slots.rows.capacity, dtype=torch.bool)
        for start, r in slots.rows.spans.values():
            free[start : start + r] = False
        for tensor in (slots.a, slots.b, *([beside(slots)] if slots.laid else [])):
            assert not tensor[free].any(), name


# -- hygiene ----------------------------------------------------------------------------------------
def test_nothing_of_a_tenant_survives(family: Family) -> None:
    model = family.model(max_loras=1)
    for name in ("thirteen", "q", "wide", "mlp", "one", "q"):
        check(family, model, [name, None])
        assert_clean(model)
        trained = {n for n, slots in sites(model).items() if slots.rows.spans}
        assert trained == set(model._multilora.store.catalogue.entry(name).ranks)
    model.delete_adapter("q")
    assert all(not slots.a.any() and not slots.b.any() for slots in sites(model).values())
    check(family, model, [None, None])


def test_rows_of_a_module_the_adapter_lacks_are_base_rows(family: Family) -> None:
    model, outputs = family.model(max_loras=3), []
    module = model.model.layers[0].mlp.up_proj
    x = torch.randn(1, 3, 16).repeat(3, 1, 1)
    with torch.no_grad(), model.adapters(["q", "mlp", None]):
        outputs = module(x)
    assert torch.equal(outputs[0], outputs[2]) and not torch.allclose(outputs[1], outputs[2], rtol=0.1, atol=0.1)


# -- real ranks -------------------------------------------------------------------------------------
def sixteens(rows: int) -> int:
    return -(-rows // 16) * 16


def test_device_bytes_follow_the_real_ranks(family: Family) -> None:
    model = family.model(max_loras=2)
    logits(model, ids(2), ["wide", "thirteen"])
    logits(model, ids(2), ["one", "mlp"])
    ranks = {"q_proj": 13 + 7, "v_proj": 13 + 2, "up_proj": 13 + 5, "down_proj": 13 + 4}  # in sixteens: 32, 16, 32, 32
    for name, slots in sites(model).items():
        wanted = sixteens(ranks[name.rsplit(".", 1)[-1]])
        assert slots.rows.capacity == slots.a.shape[0] == slots.b.shape[0] == wanted, name
    small = family.model("one", "q", max_loras=8)
    logits(small, ids(2), ["one", "q"])
    assert sum(s.rows.capacity for s in sites(small).values()) == 2 * sum(map(sixteens, (1 + 3, 1, 1, 1)))


def test_a_rank_bound_sizes_the_pool_and_refuses_what_is_above(family: Family) -> None:
    model = family.model("wide", "q", max_loras=3, max_lora_rank=7)
    check(family, model, ["wide", None, "q"])
    assert {s.rows.capacity for s in sites(model).values()} == {32}, "21 in sixteens; without the bound it were 16"
    with pytest.raises(AdapterError, match=r"13.*max_lora_rank|max_lora_rank.*13|rank 13"):
        model.load_adapter(str(family.paths["thirteen"]))
    check(family, model, ["wide", None, "q"])
    assert [row["name"] for row in model.list_adapters()] == ["wide", "q"]


def test_a_fragmented_pool_is_compacted(family: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = {"r4": 4, "r5": 5, "r3": 3, "r7": 7, "s4": 4}
    own = Family(family.base, tmp_path, {name: {"r": r} for name, r in ranks.items()})
    model = own.model(max_loras=3, max_lora_rank=7)
    for slots in sites(model).values():
        slots.reserve(14, torch.device("cpu"), torch.float32)  # tighter than the settings would make it
    model._multilora.capacities = lambda: dict.fromkeys(sites(model), 14)
    moved, compact = [], RankRows.compact
    monkeypatch.setattr(RankRows, "compact", lambda rows: moved.append(compact(rows)) or moved[-1])
    for names in (["r4", "r5", "r3"], ["r5", "r3", None], ["r3", "s4", "r7"], ["r7", "r4", "r3"], ["r5", "r4", "r3"]):
        check(own, model, names)
        assert_clean(model)
    assert {s.rows.capacity for s in sites(model).values()} == {14}
    assert len(moved) == len(sites(model)) and all(moved), "gaps were closed in every module, once"


def test_a_pool_grows_also_inside_a_request(family: Family, tmp_path: Path) -> None:
    family = Family(family.base, tmp_path, {"q": ADAPTERS["q"], "one": ADAPTERS["one"], "large": {"r": 16}})
    model = family.model("q", "one", max_loras=3)
    check(family, model, ["q", None, "one"])
    assert {slots.rows.capacity for slots in sites(model).values()} == {16}
    inputs, want = same_ids(2), family.truth(same_ids(2), ["q", None])
    with torch.no_grad(), model.adapters(["q", None]):
        assert_rows(model(input_ids=inputs).logits, want)
        model.load_adapter(str(family.paths["large"]))
        check(family, model, ["large", "one", None])
        assert_rows(model(input_ids=inputs).logits, want)
    assert {slots.rows.capacity for slots in sites(model).values()} == {32}
    check(family, model, ["q", "large", "one"])
    assert_clean(model)


def test_many_adapters_through_few_slots(tmp_path: Path) -> None:
    base = llama(num_hidden_layers=1)
    rng = random.Random(0)
    settings = {f"t{i}": {"r": rng.choice([1, 2, 3, 5]), "targets": rng.sample(LINEARS, 2)} for i in range(200)}
    own = Family(base, tmp_path, settings)
    model = own.model(max_loras=4, max_cpu_loras=10)
    for _ in range(15):
        names: list[str | None] = [*rng.sample(list(settings), rng.randint(1, 4)), None]
        rng.shuffle(names)
        check(own, model, names)
    assert_clean(model)
    report = model.memory_report()
    assert sum(row["in_host_memory"] for row in model.list_adapters()) == 10 and report.slots.count(None) == 0


# -- reports ----------------------------------------------------------------------------------------
def test_reports_equal_what_is_allocated(family: Family) -> None:
    model = family.model(max_loras=3, max_cpu_loras=4)
    logits(model, ids(3), ["q", None, "mlp"])
    report = model.memory_report()
    assert report.per_module == {name: s.a.nbytes + s.b.nbytes for name, s in sites(model).items()}
    assert report.device_bytes == sum(report.per_module.values()) > 0
    assert report.rank_rows == sum(s.a.shape[0] for s in sites(model).values())
    assert report.rank_rows_used == 2 * (3 + 4 + 4)
    assert sorted(filter(None, report.slots)) == ["mlp", "q"] and len(report.slots) == 3
    hosts = [e.host for e in model._multilora.store.catalogue if e.host is not None]
    assert report.host_bytes == sum(h.flat.nbytes for h in hosts) and report.host_adapters == 4
    assert report.host_bytes > sum(a.nbytes + b.nbytes for h in hosts for a, b in h.factors.values())
    assert report.host_pinned_bytes == 0, "there is no CUDA device to pin for"
    assert len(hosts) == 4 and "2 of 3 slots" in str(report)
    rows = {row["name"]: row for row in model.list_adapters()}
    assert list(rows) == list(ADAPTERS) and [row["id"] for row in rows.values()] == [1, 2, 3, 4, 5]
    assert rows["wide"]["max_rank"] == 7 and rows["q"]["modules"] == 2
    assert {name for name, row in rows.items() if row["on_device"]} == {"q", "mlp"}
    assert not rows["wide"]["in_host_memory"] and rows["thirteen"]["source"] == str(family.paths["thirteen"])
    assert rows["one"]["bytes"] == 256 * 2 * 2 * len(LINEARS), "small factors take 256 bytes each"


# -- reload, flight, pins ---------------------------------------------------------------------------
def test_hot_reload_from_changed_files(family: Family, tmp_path: Path) -> None:
    own = Family(family.base, tmp_path, {"x": {"r": 3}, "y": {"r": 2}})
    model = own.model(max_loras=2)
    check(own, model, ["x", None, "y"])
    entry = model._multilora.store.catalogue.entry("x")
    save_adapter(own.base, own.paths["x"], r=5, seed=50, targets=["q_proj", "k_proj"])
    with pytest.raises(ValueError, match="load_inplace=True"):
        model.load_adapter(str(own.paths["x"]), "x")
    assert model.load_adapter(str(own.paths["x"]), "x", load_inplace=True) == "x"
    new = model._multilora.store.catalogue.entry("x")
    assert new.id == entry.id and new.digest != entry.digest and new.identity[0] == "x"
    check(own, model, ["x", None, "y"])
    assert_clean(model)
    model.delete_adapter("x")
    model.load_adapter(str(own.paths["x"]), "x")
    assert model._multilora.store.catalogue.entry("x").id == 3


def test_a_file_changed_behind_the_back_is_an_error_and_other_rows_go_on(family: Family, tmp_path: Path) -> None:
    own = Family(family.base, tmp_path, {"x": {"r": 3}, "y": {"r": 2}})
    model = own.model(max_loras=1, max_cpu_loras=1)
    check(own, model, ["y", None])
    save_adapter(own.base, own.paths["x"], seed=50)
    with pytest.raises(AdapterError, match="load_inplace=True"):
        logits(model, ids(2), ["x", None])
    check(own, model, ["y", None])
    model.load_adapter(str(own.paths["x"]), "x", load_inplace=True)
    check(own, model, ["x", None])


def test_what_a_call_uses_cannot_be_taken_away(family: Family) -> None:
    model = family.model("q", "one", "mlp", max_loras=2)
    with model.adapters(["q", None]):
        for change in (
            lambda: model.delete_adapter("q"),
            lambda: model.load_adapter(str(family.paths["q"]), "q", load_inplace=True),
        ):
            with pytest.raises(AdapterInUseError, match="'q' must not be"):
                change()
        with pytest.raises(CapacityError), model.adapters(["one", "mlp"]):
            pass
        check(family, model, ["one", None])
        check(family, model, ["mlp", None])
        with torch.no_grad():
            assert_rows(model(input_ids=same_ids(2)).logits, family.truth(same_ids(2), ["q", None]))
    model.delete_adapter("q")


def test_pins_hold_and_leave_the_rest_to_the_others(family: Family) -> None:
    model = family.model(max_loras=2)
    model.pin_adapter("wide")
    check(family, model, ["wide", None])
    for name in ("q", "one", "mlp"):
        check(family, model, [name, None])
        assert "wide" in model.memory_report().slots
    model.pin_adapter("q")
    with pytest.raises(CapacityError, match="max_loras=2"):
        model.pin_adapter("one")
    check(family, model, ["wide", None, "q"])
    model.unpin_adapter("wide")
    check(family, model, ["one", None, "q"])


# -- failures ---------------------------------------------------------------------------------------
def test_base_rows_need_no_room(family: Family) -> None:
    """The default has the one slot, which a pinned adapter waits for: base rows and a change back go on."""
    model = family.model(max_loras=1)
    model.set_adapter("wide")
    model.pin_adapter("q")
    check(family, model, [None, None])
    with pytest.raises(CapacityError):
        model.set_adapter("q")
    model.set_adapter(None)
    check(family, model, ["q", None])


def test_a_failed_copy_to_the_device_leaves_nothing(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    model = family.model("q", "one", "wide", max_loras=2)
    check(family, model, ["q", None])
    real: Callable[..., Any] = torch._foreach_copy_

    def broken(targets: Any, sources: Any) -> None:
        real(targets[:3], sources[:3])
        raise MemoryError("half way")

    monkeypatch.setattr(torch, "_foreach_copy_", broken)
    with pytest.raises(MemoryError):
        logits(model, ids(3), ["q", "wide", None])
    assert_clean(model)
    assert sorted(filter(None, model.memory_report().slots)) == ["q"]
    assert not model._multilora.routing.open
    monkeypatch.undo()
    check(family, model, ["q", "wide", None])


# -- the 64th costs what the 1st did ----------------------------------------------------------------
def operations(work: Callable[[], Any]) -> Counter[str]:
    """Calls of this package's functions, of torch's and of the file system's, while `work` runs."""
    count: Counter[str] = Counter()

    def note(frame: Any, event: str, arg: Any) -> None:
        if event == "call" and "hf_multilora" in frame.f_code.co_filename:
            count["python"] += 1
        elif event == "c_call" and getattr(arg, "__name__", "") in ("read", "readinto", "open", "get_tensor", "copy_"):
            count["reads"] += 1

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("host", [None, 8])
def test_registering_and_using_the_64th_adapter_costs_what_the_first_did(tmp_path: Path, host: int | None) -> None:
    own = Family(llama(num_hidden_layers=1), tmp_path, {f"t{i}": {"r": 2} for i in range(64)})
    model = MultiLoRAModel.from_pretrained(own.base, max_loras=4, max_cpu_loras=host)
    costs, uses = {}, {}
    for i, (name, path) in enumerate(own.paths.items()):
        if i in (1, 9, 63):  # the very first also adapts the modules
            costs[i] = operations(lambda path=path, name=name: model.load_adapter(str(path), name))
            logits(model, ids(2), [name, None])
            uses[i] = operations(lambda name=name: logits(model, ids(2), [name, None]))
        else:
            model.load_adapter(str(path), name)
    assert costs[1]["reads"] > 0 and costs[1]["python"] > 50
    for i in (9, 63):
        assert costs[i]["reads"] == costs[1]["reads"]
        assert costs[i]["python"] <= costs[1]["python"] + 30
        assert uses[i]["python"] <= uses[1]["python"] + 30
