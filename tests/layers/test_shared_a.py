"""Linears of one buffer whose adapters have one A for all of them: held and multiplied once, until one has others."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_multilora import CapacityError
from hf_multilora.layers import ModuleSlots
from hf_multilora.layers.rows import SlotRows
from hf_multilora.pool import RankRows
from tests.layers.shared_a import ADAPTERS, MIX, ROWS, is_one, share, sites
from tests.layers.trio import ALL_WAYS, LINEARS, MERGING, Trio, family, setting, x_of
from tests.tiny import Family, Names, cut_short

pytest_plugins = ("tests.layers.shared_a_fixtures",)


# -- numbers ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("names", [MIX, ["t"] * 4, ["s", "t", "t", None]], ids=["mix", "one", "two"])
@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("way", MERGING)
@torch.no_grad()
def test_rows_are_right_and_a_lies_once(shared: Trio, way: str, tokens: int, names: Names) -> None:
    with shared.counted() as runs:
        shared.call(x_of(tokens=tokens), names=names)
        shared.call(x_of(tokens=tokens), "vkq", names, "second")
    assert is_one(shared) and is_one(shared, "second")
    assert bool(runs) == (way != "dense" or len(set(names)) > 1)
    step = shared.merged("q").step
    if step is not None:
        assert step.weight.shape[0] == sum((24, 9, 5)) + 16
    other = Trio(shared.family, way, max_loras=3)
    other.call(x_of(tokens=tokens), names=["own", None, "t", "s"])
    assert not is_one(other), "control: an adapter with an A for each"


@pytest.mark.parametrize("way", ALL_WAYS)
@torch.no_grad()
def test_others_come_and_go(shared: Trio, way: str) -> None:
    """Rows of adapters that were there stay right."""
    x, found = x_of(tokens=1), []
    mixes = [
        MIX,
        ["s", "own", "t", None],
        MIX,
        ["big", "s", None, "own"],
        ["big", "s", None, "t"],
        ["qv", "s", "t", None],
    ]
    for names in mixes:
        for parent in ("first", "second"):
            shared.call(x, names=names, parent=parent)
        found.append(is_one(shared))
    assert found == [True, False, False, False, False, False], "own keeps it so: nothing has been laid anew for big"
    again = Trio(shared.family, way, max_loras=3)
    again.call(x, names=["s", "t", "big", None])
    again.model.delete_adapter("t")
    again.call(x, names=["s", "big", "big", None])
    assert is_one(again)


@pytest.mark.parametrize("name", ["own", "qv", "uneven"])
@ROWS
@torch.no_grad()
def test_one_that_differs(shared: Trio, way: str, name: str) -> None:
    """In a free slot, and in that of an adapter of its ranks, whose rows it takes."""
    x = x_of(tokens=1)
    shared.call(x, names=MIX)
    shared.call(x, names=[name, None, "t", "s"])
    assert not is_one(shared)
    full = Trio(shared.family, way, max_loras=2)
    full.call(x, names=MIX)
    assert is_one(full)
    full.call(x, names=[name, None, "t", "t"])  # in the slot of s
    assert not is_one(full) and full.model._multilora.store.evictions == 1
    full.call(x, names=MIX)


@ROWS
@torch.no_grad()
def test_a_group_is_looked_at_again_when_it_is_laid_anew(shared: Trio, way: str) -> None:
    x = x_of(tokens=1)
    for names in (["own", None, "t", "t"], MIX):
        shared.call(x, names=names)
    shared.model.delete_adapter("own")
    shared.call(x, names=MIX)
    assert not is_one(shared), "while nothing makes it move"
    shared.module("k").weight.data = shared.module("k").weight.data.clone()
    shared.call(x, names=MIX)
    assert is_one(shared) and not is_one(shared, "second")


@pytest.mark.parametrize("way", ["dense"])
@torch.no_grad()
def test_rank_rows_that_start_elsewhere(shared: Trio, way: str) -> None:
    """Those of s lie behind those of an adapter that is gone, of another rank in each."""
    x = x_of(tokens=1)
    shared.call(x, names=["uneven", None, "uneven", "s"])
    shared.model.delete_adapter("uneven")
    for child in "qk":
        shared.module(child).weight.data = shared.module(child).weight.data.clone()
        shared.call(x, names=["s", None, "s", None])
        assert len({str(site.rows.spans) for site in sites(shared)}) == 3 and not is_one(shared)


@torch.no_grad()
def test_pools_of_different_sizes(tmp_path: Path) -> None:
    """Where gaps are closed at other times in one of them."""
    own = family(tmp_path, {"s": {"r": 3, "targets": LINEARS}, "q": {"r": 30, "targets": ("q_proj",)}})
    share(own.paths["s"])
    shared, x = Trio(own, "dense", max_loras=2), x_of(tokens=1)
    shared.call(x, names=["s", None, "s", None])
    assert {site.rows.capacity for site in sites(shared)} == {16, 48} and not is_one(shared)
    shared.call(x, names=["s", None, "q", None])


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("way", ["dense"])
@torch.no_grad()
def test_any_order(shared_family: Family, way: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With evictions, gaps that are closed, and pools that grow; the last one with adapters that differ."""
    shared, choice, x = Trio(shared_family, way, max_loras=2), random.Random(seed), x_of(tokens=1)
    known, compactions, flags = list(ADAPTERS) if seed == 2 else ["s", "t", "u", "big"], list[RankRows](), list[bool]()
    compact = RankRows.compact
    monkeypatch.setattr(RankRows, "compact", lambda rows: compactions.append(rows) or compact(rows))
    for _ in range(40):
        pair = choice.sample([*known, None], 2)
        shared.call(x, names=[pair[0], None, pair[1], pair[0]])
        flags.append(is_one(shared))
    assert compactions and shared.model._multilora.store.evictions > 10
    assert all(flags) if seed < 2 else not all(flags)
    assert seed == 2 or len(compactions) % 6 == 0


@ROWS
@torch.no_grad()
def test_gaps_are_closed_once(shared_family: Family, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A moves once, B in each linear, and all of it is undone where that is interrupted."""
    shared, x = Trio(shared_family, setting(monkeypatch, way), max_loras=2), x_of(tokens=1)
    for name in ("s", "t"):
        shared.call(x, names=["u", None, name, name])
    assert [dict(site.rows.spans) for site in sites(shared)] == [{0: (0, 12), 1: (12, 5)}] * 3
    a, compact = sites(shared)[0].a.clone(), RankRows.compact

    def interrupted(rows: RankRows) -> Any:
        compact(rows)
        if rows is sites(shared)[2].rows:
            raise KeyboardInterrupt
        return []

    with monkeypatch.context() as patch:
        patch.setattr(RankRows, "compact", interrupted)
        with pytest.raises(KeyboardInterrupt):
            shared.call(x, names=["big", None, "t", "t"])
    assert [dict(site.rows.spans) for site in sites(shared)] == [{1: (12, 5)}] * 3
    assert torch.equal(sites(shared)[0].a[12:17], a[12:17])
    shared.call(x, names=["t", None, "t", None])
    shared.call(x, names=["big", None, "t", "t"])
    assert is_one(shared) and [dict(site.rows.spans) for site in sites(shared)] == [{1: (0, 5), 0: (5, 17)}] * 3
    moved = sites(shared)[0].a
    assert torch.equal(moved[:5], a[12:17]) and not moved[22:].any()


# -- loads ------------------------------------------------------------------------------------------
@ROWS
@torch.no_grad()
def test_a_load_that_fails_leaves_it_as_it_was(shared: Trio, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, reserve = x_of(tokens=1), SlotRows.reserve
    shared.call(x, names=MIX)
    places = [site.a.data_ptr() for site in sites(shared)]

    def full(slots: SlotRows, *args: Any) -> Any:
        if slots.name == "second.k_proj":
            raise torch.OutOfMemoryError("no memory")
        return reserve(slots, *args)

    with monkeypatch.context() as patch:
        patch.setattr(SlotRows, "reserve", full)
        with pytest.raises(CapacityError, match=r"second\.k_proj's pool of 48 rank rows needs \d+ bytes"):
            shared.call(x, names=["own", None, "t", "s"])
    assert is_one(shared) and [site.a.data_ptr() for site in sites(shared)] == places
    shared.call(x, names=MIX)
    shared.call(x, names=["own", None, "t", "s"])
    assert not is_one(shared)


@pytest.mark.parametrize("where", ["clear", "place", "settle", "tenant"])
@pytest.mark.parametrize("done", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("way", ["dense"])
@torch.no_grad()
def test_an_interrupt(shared_family: Family, way: str, monkeypatch: pytest.MonkeyPatch, where: str, done: bool) -> None:
    """At the second linear, before or after the step: what one of them has and the others have not is nobody's."""
    shared, x = Trio(shared_family, way, max_loras=2), x_of(tokens=1)
    shared.call(x, names=["s", "u", None, "s"])
    with monkeypatch.context() as patch:
        patch.setattr(ModuleSlots, where, cut_short(getattr(ModuleSlots, where), done))
        with pytest.raises(KeyboardInterrupt):
            shared.call(x, names=["u", "t", None, None])
    for names in (["u", None], ["t", "u"], ["t", "s"], ["big", "t"], ["own", "t"], ["s", "u"]):
        shared.call(x, names=[*names, *names])
        is_one(shared)


@pytest.mark.parametrize("way", ["dense"])
@torch.no_grad()
def test_linears_whose_rank_rows_differ(shared: Trio, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As an interrupt may leave them: an adapter that comes then has rows of A where another linear's are."""
    x, clear, cleared = x_of(tokens=1), ModuleSlots.clear, list[ModuleSlots]()
    runtime, store = shared.model._multilora, shared.model._multilora.store

    def interrupted(slots: ModuleSlots, slot: int) -> None:
        cleared.append(slots)
        if len(cleared) == 2:
            raise KeyboardInterrupt
        clear(slots, slot)

    shared.call(x, names=["s", "u", None, "s"])
    entry = store.catalogue.entry("s")
    slot = store.slots.pop(entry.id)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(ModuleSlots, "clear", interrupted)
        runtime.empty(slot)
    runtime.fill(2, entry.host)
    assert len({str(site.rows.spans) for site in sites(shared)}) == 2
    runtime.empty(slot)
    store.slots[entry.id] = 2
    runtime.refresh()
    shared.call(x, names=["s", "u", None, "s"])
    assert not is_one(shared)


@ROWS
@torch.no_grad()
def test_inside_a_request(shared: Trio, way: str) -> None:
    """No weight moves while it is open, and its rows are right."""
    x = x_of(tokens=1)
    with shared.open(MIX):
        shared.ask(x, "q", MIX)
        with shared.open(["own", "s", None, "t"]):
            shared.ask(x, "qkv", ["own", "s", None, "t"])
        shared.ask(x, "kv", MIX)
    assert not is_one(shared)
