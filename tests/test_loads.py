"""Loads into a slot that has a tenant: rows of the same rank stay where they are, and nothing of the tenant is left."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_multilora import CapacityError
from hf_multilora.filling import Filling
from hf_multilora.layers import ModuleSlots
from hf_multilora.pool import Layout
from hf_multilora.routing import Routing
from tests.test_residency import assert_clean, sites
from tests.test_scarcity import failing_at, is_pool
from tests.tiny import Family, assert_rows, beside, llama, logits, same_ids

ADAPTERS: dict[str, dict[str, Any]] = {
    "x": {"r": 3},
    "y": {"r": 3},
    "part": {"r": 3, "targets": ["q_proj", "up_proj"]},
    "mixed": {"r": {"q_proj": 3, "v_proj": 6, "up_proj": 1, "down_proj": 3}},
    "tall": {"r": {"q_proj": 3, "v_proj": 20, "up_proj": 3, "down_proj": 3}},
    "other": {"r": 2},
}


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Family:
    torch.manual_seed(0)
    return Family(llama(), tmp_path_factory.mktemp("adapters"), ADAPTERS)


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Calls of what changes rows, layouts and views."""
    count: Counter[str] = Counter()

    def count_calls(owner: Any, name: str) -> None:
        real: Callable[..., Any] = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            count[f"{owner.__name__}.{name}"] += 1
            return real(*args, **kwargs)

        monkeypatch.setattr(owner, name, call)

    for name in ("place", "clear", "settle", "look"):
        count_calls(ModuleSlots, name)
    for name in ("__init__", "take"):
        count_calls(Layout, name)
    count_calls(Routing, "relayout")
    return count


def seated(family: Family, first: str, *more: str) -> Any:
    """A model that has `first` and "other" in slots, weights laid; "other" stays, the next one takes first's slot."""
    model = family.model(first, "other", *more, max_loras=2)
    for _ in range(2):
        check(family, model, [first, None, "other"])
    assert all(slots.laid for slots in sites(model).values())
    model.pin_adapter("other")
    return model


def check(family: Family, model: Any, names: Any) -> None:
    inputs = same_ids(len(names))
    assert_rows(logits(model, inputs, names), family.truth(inputs, names))


def slot_of(model: Any, name: str) -> int:
    store = model._multilora.store
    return store.slots[store.catalogue.entry(name).id]


def host_of(model: Any, name: str) -> Any:
    return model._multilora.store.catalogue.entry(name).host


def spans(model: Any, slot: int) -> dict[str, tuple[int, int]]:
    """Module -> the rank rows of this slot."""
    return {name: slots.rows.spans[slot] for name, slots in sites(model).items() if slot in slots.rows.spans}


def bits(model: Any, owned: dict[str, tuple[int, int]]) -> Iterator[Tensor]:
    """The bits of these rank rows in A, in B, and in A beside the weight as the fast path reads it."""
    for name, (start, r) in owned.items():
        slots = sites(model)[name]
        assert slots.laid
        for rows in (slots.a, slots.b, beside(slots)):
            yield rows[start : start + r].view(torch.int32)


def assert_holds(model: Any, name: str) -> None:
    """Bit by bit what the host holds of the adapter, in its modules and no others."""
    slot, factors = slot_of(model, name), host_of(model, name).factors
    owned = spans(model, slot)
    assert owned.keys() == factors.keys()
    for module, (start, r) in owned.items():
        for rows, factor in zip(bits(model, {module: (start, r)}), (*factors[module], factors[module][0]), strict=True):
            assert torch.equal(rows, factor.view(torch.int32))
            assert not torch.equal(rows, factor.neg().view(torch.int32)), "other values pass: the check says nothing"


def kept(model: Any) -> dict[str, Any]:
    """What a load of the same ranks leaves alone: objects by identity, tensors by address."""
    routing = model._multilora.routing
    state: dict[str, Any] = {"": (list(map(id, routing.layouts)), routing.moves)}
    for name, s in sites(model).items():
        views = (
            s.a,
            s.b,
            s.a_used,
            s.b_used,
            s.merged.used[0],
            s.merged.joint.tables,
            *(view for slot in s.rows.spans for view in s.tenant(slot)),
        )
        state[name] = id(s.layout), list(s.rows.spans.items()), list(map(id, views)), [v.data_ptr() for v in views]
    return state


# -- the same ranks ---------------------------------------------------------------------------------
def test_a_load_of_the_same_ranks_leaves_layouts_and_views(family: Family, work: Counter[str]) -> None:
    model = seated(family, "x", "y", "mixed")
    slot, before, loads = slot_of(model, "x"), kept(model), model._multilora.store.loads
    assert_holds(model, "x")
    work.clear()
    for name in ("y", "x", "y"):
        check(family, model, [name, None, "other"])
        assert slot_of(model, name) == slot
        assert_holds(model, name)
        assert_holds(model, "other")
    assert model._multilora.store.loads == loads + 3
    assert not work and kept(model) == before
    check(family, model, ["mixed", None, "other"])
    assert set(work) == {f"ModuleSlots.{name}" for name in ("place", "clear", "settle", "look")} | {
        "Layout.__init__", "Layout.take", "Routing.relayout"
    }, "with other ranks there is all that work to see"  # fmt: skip
    assert kept(model) != before


def test_refresh_has_nothing_to_do_after_such_a_load(family: Family, work: Counter[str]) -> None:
    """Inside a request, the rows of which stay in force."""
    model = seated(family, "x", "y")
    runtime, slot, inputs = model._multilora, slot_of(model, "x"), same_ids(2)
    with torch.no_grad(), model.adapters(["other", None]):
        want = model(input_ids=inputs).logits
        for name in ("y", "x"):
            work.clear()
            runtime.fill(slot, host_of(model, name))
            assert not runtime._stale
            runtime.refresh()
            assert not work and torch.equal(model(input_ids=inputs).logits, want)
        runtime.empty(slot)
        assert runtime._stale
        runtime.refresh()
        assert work["Layout.take"] and work["Routing.relayout"] == 1, "an empty slot is written to layouts"
        assert torch.equal(model(input_ids=inputs).logits, want)
        runtime.fill(slot, host_of(model, "x"))
        runtime.refresh()
        before, runtime._stale = kept(model), True
        work.clear()
        runtime.refresh()
        assert work["Routing.relayout"] == 1 and not work["ModuleSlots.look"], "where nothing changed, views stay"
        assert kept(model) == before
    assert_rows(want, family.truth(inputs, ["other", None]))
    check(family, model, ["x", None, "other"])


@pytest.fixture
def searched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Modules in which a load looked for rows of its slot."""
    found, real = list[str](), Filling._stays

    def stays(filling: Filling, name: str, *args: Any) -> bool:
        found.append(name)
        return real(filling, name, *args)

    monkeypatch.setattr(Filling, "_stays", stays)
    return found


def test_a_load_of_the_same_shape_finds_its_rows_at_once(family: Family, searched: list[str]) -> None:
    model = seated(family, "x", "y")
    searched.clear()
    for name in ("y", "x", "y", "x"):
        check(family, model, [name, None, "other"])
        assert_holds(model, name)
        assert_holds(model, "other")
    assert len(searched) == 8, "the first of these loads does look: weights were laid since"
    twin = copy.deepcopy(model)
    check(family, twin, ["y", None, "other"])
    assert len(searched) == 16 and sites(twin).keys() == set(searched), "a copy looks for itself"
    assert_holds(twin, "y"), assert_holds(model, "x")


@pytest.mark.parametrize("change", ["nothing", "others", "dtype", "hook", "rows", "shape", "adapted"])
def test_what_changed_since_the_last_load_is_noticed(
    family: Family, tmp_path: Path, searched: list[str], change: str
) -> None:
    model = seated(family, "x", "y", "mixed")
    runtime, slot = model._multilora, slot_of(model, "x")
    for name in ("y", "x"):
        check(family, model, [name, None, "other"])
    module, slots = runtime.sites["model.layers.1.mlp.up_proj"]
    searched.clear()
    if change == "dtype":
        module.weight = torch.nn.Parameter(module.weight.double())
    elif change == "hook":
        module._hf_hook = SimpleNamespace(execution_device="cpu")
    elif change in ("rows", "others"):
        runtime.empty(slot if change == "rows" else slot_of(model, "other"))
    elif change == "adapted":
        one = Family(family.base, tmp_path, {"new": {"targets": ["o_proj"]}})
        model.load_adapter(str(one.paths["new"]), "new")
    runtime.fill(slot, host_of(model, "mixed" if change == "shape" else "y"))
    assert len(searched) == (0 if change in ("nothing", "others") else 8)
    assert runtime._stale == (change in ("dtype", "hook", "rows", "others", "shape"))
    assert slots.a.dtype == (torch.float64 if change == "dtype" else torch.float32)
    for name, (a, b) in host_of(model, "mixed" if change == "shape" else "y").factors.items():
        on_device = sites(model)[name].tenant(slot)
        assert torch.equal(on_device[0], a.to(on_device[0].dtype)) and torch.equal(
            on_device[1], b.to(on_device[1].dtype)
        )
    if change == "hook":
        del module._hf_hook


def test_modules_that_the_next_tenant_does_not_train_are_wiped(family: Family) -> None:
    model = seated(family, "x", "part")
    slot = slot_of(model, "x")
    old = spans(model, slot)
    addresses = {name: [rows.data_ptr() for rows in sites(model)[name].tenant(slot)] for name in old}
    assert all(rows.any() for rows in bits(model, old)), "there is something to wipe"
    check(family, model, ["part", None, "other"])
    assert slot_of(model, "part") == slot
    left = {name: span for name, span in old.items() if name.endswith(("v_proj", "down_proj"))}
    assert len(left) == 4 and not any(rows.any() for rows in bits(model, left))
    stayed = spans(model, slot)
    assert stayed == {name: span for name, span in old.items() if name not in left}
    for name in stayed:
        assert [rows.data_ptr() for rows in sites(model)[name].tenant(slot)] == addresses[name]
    assert all(slot not in sites(model)[name].layout.spans for name in left)
    assert_holds(model, "part")
    assert_clean(model)
    check(family, model, ["x", None, "other"])
    assert_holds(model, "x")


# -- other ranks ------------------------------------------------------------------------------------
@pytest.mark.parametrize(("first", "then"), list(combinations(("x", "part", "mixed", "tall"), 2)))
@pytest.mark.parametrize("turn", [False, True], ids=["first below", "first above"])
def test_a_tenant_of_other_ranks(family: Family, first: str, then: str, turn: bool) -> None:
    model = family.model(first, then, "other", max_loras=2)
    for _ in range(2):
        check(family, model, ["other", None, first] if turn else [first, None, "other"])
    model.pin_adapter("other")
    for old, new in ((first, then), (then, first)):
        slot = slot_of(model, old)
        before, ranks = spans(model, slot), model._multilora.store.catalogue.entry(new).ranks
        check(family, model, [new, None, "other"])
        assert slot_of(model, new) == slot
        check(family, model, [new, None, "other"])  # the second call finds weights laid where pools grew
        assert {n: r for n, (_, r) in spans(model, slot).items()} == ranks
        same = {n: span for n, span in before.items() if span[1] == ranks.get(n)}
        assert same and same.items() <= spans(model, slot).items(), "rows of the same rank stay"
        assert_clean(model)
        assert_holds(model, new)
        assert_holds(model, "other")


# -- failures ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("then", ["y", "mixed"])
@pytest.mark.parametrize("copied", [0, 1, 5])
@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
def test_a_load_that_fails_half_way(
    family: Family, monkeypatch: pytest.MonkeyPatch, then: str, copied: int, error: type[BaseException]
) -> None:
    model, inputs = seated(family, "x", then), same_ids(2)
    slot, real, hit = slot_of(model, "x"), torch._foreach_copy_, list[int]()
    old = spans(model, slot)
    addresses = {view.data_ptr() for name in old for view in sites(model)[name].tenant(slot)}

    def broken(targets: list[Tensor], sources: list[Tensor]) -> None:
        real(targets[:copied], sources[:copied]) if copied else None
        hit.append(sum(target.data_ptr() in addresses for target in targets))
        raise error

    with torch.no_grad(), model.adapters(["other", None]):
        want = model(input_ids=inputs).logits
        monkeypatch.setattr(torch, "_foreach_copy_", broken)
        with pytest.raises(error):
            logits(model, inputs, [then, None])
        monkeypatch.undo()
        assert len(hit) == 1 and hit[0] >= 8, "it was about rows that stayed in place"
        assert spans(model, slot) == {} and not any(rows.any() for rows in bits(model, old)), "the slot is wiped"
        assert_clean(model)
        assert_holds(model, "other")
        assert sorted(filter(None, model.memory_report().slots)) == ["other"]
        assert torch.equal(model(input_ids=inputs).logits, want)
        check(family, model, [then, None])
        assert slot_of(model, then) == slot
        assert torch.equal(model(input_ids=inputs).logits, want)
    assert_holds(model, then)
    check(family, model, ["x", None, "other"])


def test_a_pool_that_cannot_grow_after_rows_were_kept(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    model = seated(family, "x")
    model.load_adapter(str(family.paths["tall"]), "tall")
    slot, pools = slot_of(model, "x"), {name: (s.a.data_ptr(), s.rows.capacity) for name, s in sites(model).items()}
    old = spans(model, slot)
    monkeypatch.setattr(torch, "zeros", failing_at(3, torch.OutOfMemoryError("out"), torch.zeros, is_pool))
    with pytest.raises(CapacityError, match=r"'tall' .*layers\.1.*v_proj's pool of 32 rank rows"):
        logits(model, same_ids(2), ["tall", None])
    monkeypatch.undo()
    assert pools == {name: (s.a.data_ptr(), s.rows.capacity) for name, s in sites(model).items()}
    assert spans(model, slot) == {} and not any(rows.any() for rows in bits(model, old))
    assert_clean(model)
    check(family, model, ["other", None])
    check(family, model, ["tall", None, "other"])
    check(family, model, ["x", None, "other"])
    assert_holds(model, "x")


def test_a_reload_in_place_of_the_same_ranks(family: Family) -> None:
    model = seated(family, "x")
    model.load_adapter(str(family.paths["y"]), "x", load_inplace=True)
    inputs = same_ids(3)
    assert_rows(logits(model, inputs, ["x", None, "other"]), family.truth(inputs, ["y", None, "other"]))
    assert_holds(model, "x")


def test_rows_that_moved_within_their_memory_are_looked_for(tmp_path: Path, searched: list[str]) -> None:
    """Another slot's load closes the gaps between rows: no memory moves, but the kept way leads to others' rows."""
    torch.manual_seed(0)
    ranks = {"x": 14, "k": 3, "k2": 3, "w": 16}
    own = Family(llama(num_hidden_layers=1), tmp_path, {name: {"r": r} for name, r in ranks.items()})
    model = own.model(max_loras=2, max_lora_rank=16)
    for names in (["x", "k"], ["x", "k2"], ["x", "k"], ["x", "k2"]):
        check(own, model, names)
    slot, routing = slot_of(model, "k2"), model._multilora.routing
    before, moves = spans(model, slot), routing.moves
    check(own, model, ["w", "k2"])
    assert all(spans(model, slot)[name] != span for name, span in before.items()), "control: nothing was moved"
    assert routing.moves == moves, "control: memory moved"
    for name in ("k", "k2"):
        searched.clear()
        check(own, model, ["w", name])
        assert bool(searched) == (name == "k"), "looked for once"
        assert_holds(model, name), assert_holds(model, "w")
