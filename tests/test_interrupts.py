"""Calls cut short while slots change, by an error or an interrupt: what stays in force is right, nothing is lost."""

from __future__ import annotations

import copy
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hf_multilora import AdapterError, MultiLoRAModel, RoutingError
from hf_multilora.layers import ModuleSlots, augmented
from hf_multilora.pool import Layout, RankRows
from hf_multilora.routing import Routing
from tests.test_residency import ADAPTERS, assert_clean, sites
from tests.tiny import Family, cut_short, error, ids, llama, logits, same_ids, save_adapter


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Family:
    torch.manual_seed(0)
    return Family(llama(), tmp_path_factory.mktemp("adapters"), ADAPTERS)


@pytest.mark.parametrize("outer", ["block", "default"])
def test_a_call_that_fails_after_rows_were_moved(family: Family, tmp_path: Path, outer: str) -> None:
    """The first adapter of the failing call makes the pool close its gaps, the second one's files are gone."""
    own = Family(family.base, tmp_path, {"left": {"r": 5}, "kept": {"r": 1}, "right": {"r": 5}})
    model, inputs = own.model(max_loras=3, max_cpu_loras=3), same_ids(2)
    logits(model, ids(3), ["left", "kept", "right"])
    model.pin_adapter("kept")
    if outer == "default":
        model.set_adapter("kept")
    for name in ("left", "right"):
        model.delete_adapter(name)
    # Rank rows: 5 free, 1 kept, 10 free.
    late = Family(family.base, tmp_path / "late", {n: {"r": 11, "seed": 7} for n in ("wide", "gone", "other")})
    for name, path in late.paths.items():
        model.load_adapter(str(path), name)
    store = model._multilora.store
    rows = ["kept"] * 2 if outer == "default" else ["kept", None]
    with model.adapters(rows) if outer == "block" else nullcontext(), torch.no_grad():
        before = {name: slots.rows.spans.copy() for name, slots in sites(model).items()}
        store._drop_host(store.catalogue.entry("gone"))
        shutil.rmtree(late.paths["gone"])
        with pytest.raises(FileNotFoundError):
            model(input_ids=inputs, adapter_names=["wide", "gone"])
        slot = store.slots[store.catalogue.entry("kept").id]
        assert all(s.rows.spans[slot] != before[n][slot] for n, s in sites(model).items()), "nothing was moved"
        assert {s.rows.capacity for s in sites(model).values()} == {16}, "the pools grew"
        assert error(model(input_ids=inputs).logits, own.truth(inputs, rows)) < 1e-5


@pytest.mark.parametrize("where", ["clear", "place", "settle"])
@pytest.mark.parametrize("done", [False, True], ids=["before", "after"])
def test_an_interrupt_while_slots_change(family: Family, monkeypatch: Any, where: str, done: bool) -> None:
    """At the second module, before or after the step: later calls are right, nothing is held, no rows are lost."""
    model = family.model("wide", "q", "mlp", "one", max_loras=2)

    logits(model, ids(2), ["wide", "one"])
    model.set_adapter("one")
    monkeypatch.setattr(ModuleSlots, where, cut_short(getattr(ModuleSlots, where), done))
    with pytest.raises(KeyboardInterrupt):
        logits(model, ids(2), ["mlp", None])
    check_default(family, model, "one")
    for names in (["mlp", None], ["one", "q"], ["wide", "one"], ["mlp", "one"]):
        inputs = same_ids(2)
        assert error(logits(model, inputs, names), family.truth(inputs, names)) < 1e-5
        assert_clean(model)
    model.set_adapter(None)
    model.delete_adapter(["wide", "q", "mlp", "one"])


def test_an_interrupt_while_a_request_is_closed(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    model, pop, calls = family.model("q", "one"), Routing.pop, [0]

    def interrupted(routing: Routing, *args: Any) -> None:
        calls[0] += 1
        if calls[0] == 1:
            raise KeyboardInterrupt
        pop(routing, *args)

    monkeypatch.setattr(Routing, "pop", interrupted)
    with pytest.raises(KeyboardInterrupt):
        logits(model, ids(2), ["q", "one"])
    with torch.no_grad():
        assert error(model(input_ids=same_ids(2)).logits, family.truth(same_ids(2), [None, None])) < 1e-5


def test_an_interrupted_compaction_leaves_rows_where_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    slots = ModuleSlots("m", 4, 5, Routing(3))
    slots.reserve(5, torch.device("cpu"), torch.float32)
    for slot, r in ((0, 2), (1, 1), (2, 2)):
        for rows in slots.place(slot, r):
            rows.copy_(torch.randn(rows.shape))
    for slot in (0, 2):
        slots.clear(slot)
    kept = slots.a[2].clone(), slots.b[2].clone()
    compact = RankRows.compact

    def interrupted(rows: RankRows) -> None:
        assert compact(rows) == [(2, 0, 1)]
        raise KeyboardInterrupt

    monkeypatch.setattr(RankRows, "compact", interrupted)
    with pytest.raises(KeyboardInterrupt):
        slots.place(0, 4)
    monkeypatch.undo()
    for at in (2, 0):  # as it was; and moved, once nothing is in the way
        assert slots.rows.spans[1] == (at, 1)
        assert torch.equal(slots.a[at], kept[0]) and torch.equal(slots.b[at], kept[1])
        slots.place(0, 4) if at else None


def check_default(family: Family, model: Any, name: str) -> None:
    with torch.no_grad():
        assert error(model(input_ids=same_ids(2)).logits, family.truth(same_ids(2), [name] * 2)) < 1e-5


@torch.no_grad()
def test_a_part_of_the_model_called_after_beams_in_one_block(family: Family) -> None:
    """The base model has no entry of its own: it must get the block's rows, not those of the beams."""
    model, inputs = family.model("q", "one"), same_ids(2)
    with model.adapters(["q", "one"]):
        before = model.model(input_ids=inputs).last_hidden_state
        model.generate(input_ids=inputs, num_beams=2, max_new_tokens=2)
        assert torch.equal(model.model(input_ids=inputs).last_hidden_state, before)
        with pytest.raises(RoutingError):
            model.model(input_ids=same_ids(4))


@pytest.mark.parametrize("equal", [True, False])
def test_one_module_under_two_names_has_one_pair_of_factors(family: Family, tmp_path: Path, equal: bool) -> None:
    base = copy.deepcopy(family.base)
    base.model.layers[1].mlp = base.model.layers[0].mlp
    path = save_adapter(base, tmp_path / "a", targets=["up_proj"])
    file = path / "adapter_model.safetensors"
    own = load_file(file)
    second = {k.replace("layers.0", "layers.1"): v.clone() if equal else v + 1 for k, v in own.items()}
    save_file(own | second, file)
    if equal:
        assert MultiLoRAModel.from_pretrained(base, [str(path)]).verify("a")
        return
    with pytest.raises(AdapterError, match=r"layers\.1\.mlp\.up_proj and .*layers\.0\.mlp\.up_proj are one module"):
        MultiLoRAModel.from_pretrained(base, [str(path)])


def test_an_error_while_layouts_are_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call inside a block moves the block's rows and fails before their places are told: the block finds them."""
    torch.manual_seed(0)
    ranks = {"s": 3, "t": 5, "u": 12, "big": 17}
    own = Family(llama(num_hidden_layers=1), tmp_path, {name: {"r": r} for name, r in ranks.items()})
    model, inputs = own.model(max_loras=2), same_ids(2)
    for names in (["u", "s"], ["u", "t"]):
        logits(model, inputs, names)
    slot = model._multilora.store.slots[model._multilora.store.catalogue.entry("t").id]
    before = {name: slots.rows.spans[slot] for name, slots in sites(model).items()}
    with torch.no_grad(), model.adapters(["t", "t"]):
        with monkeypatch.context() as patch:
            patch.setattr(Layout, "take", failing(torch.OutOfMemoryError("out")))
            with pytest.raises(torch.OutOfMemoryError):
                model(input_ids=inputs, adapter_names=["big", "t"])
        assert all(slots.rows.spans[slot] != before[name] for name, slots in sites(model).items()), "nothing was moved"
        assert error(model(input_ids=inputs).logits, own.truth(inputs, ["t", "t"])) < 1e-5


def test_an_interrupt_while_weights_are_laid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After A and B moved to the buffer and before their views did: the next load goes to where they are."""
    torch.manual_seed(0)
    targets = ["q_proj", "k_proj", "v_proj"]
    own = Family(llama(num_hidden_layers=1), tmp_path, {name: {"r": 3, "targets": targets} for name in "st"})
    model, inputs, laying = own.model(max_loras=1), same_ids(2), list[bool]()
    lay, look = augmented.lay, ModuleSlots.look

    def marked(members: Any) -> None:
        laying.append(True)
        lay(members)

    for name in "st":
        logits(model, inputs, [name, None])
    weight = model.model.layers[0].self_attn.k_proj.weight
    weight.data = weight.data.clone()  # it left the buffer: all are laid anew
    with monkeypatch.context() as patch:
        patch.setattr(augmented, "lay", marked)
        patch.setattr(ModuleSlots, "look", lambda slots: failing(KeyboardInterrupt())() if laying else look(slots))
        with pytest.raises(KeyboardInterrupt):
            logits(model, inputs, ["s", None])
    assert laying
    for name in ("t", "s", "t"):
        assert error(logits(model, inputs, [name, None]), own.truth(inputs, [name, None])) < 1e-5


def test_an_interrupt_before_a_victim_goes(family: Family) -> None:
    """Its slot is emptied, so it must not pass for one that has a slot."""
    names = list(family.paths)[:2]
    model, inputs = family.model(*names, max_loras=1), same_ids(2)
    logits(model, inputs, [names[0], None])
    store = model._multilora.store

    class Slots(type(store.slots)):  # type: ignore[misc]
        __delitem__ = failing(KeyboardInterrupt())

    kept, store.slots = store.slots, Slots(store.slots)
    with pytest.raises(KeyboardInterrupt):
        logits(model, inputs, [names[1], None])
    assert not store.slots and kept
    store.slots = type(kept)(store.slots)
    for name in (names[0], names[1]):
        assert error(logits(model, inputs, [name, None]), family.truth(inputs, [name, None])) < 1e-5


def failing(error: BaseException) -> Any:
    """A function that raises it."""

    def fail(*args: Any) -> None:
        raise error

    return fail
