"""Residency at scale and at its edges: a thousand adapters, and all that can come between a call and its slots."""

from __future__ import annotations

import copy
import io
import random
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_multilora import AdapterError, CapacityError
from hf_multilora.layers import ModuleSlots
from tests.scale import Fleet, Life, Marks, assert_flat, long_life
from tests.test_residency import assert_clean, sites
from tests.tiny import Family, error, ids, llama, logits, same_ids, save_adapter


def test_a_thousand_adapters(tmp_path: Path) -> None:
    assert_flat(long_life(tmp_path, "cpu", 1e-5))


def test_what_is_kept_shows(tmp_path: Path) -> None:
    """The control of the marks: one host copy, one open file."""
    fleet = Fleet(tmp_path, 3)
    model = fleet.model(max_loras=1, max_cpu_loras=1)
    Life(fleet, model, most=1).batch()
    before = Marks.take()
    kept = next(e.host for e in model._multilora.store.catalogue if e.host is not None)
    for name in fleet.paths:
        logits(model, ids(1), [name])
    views = [factor[:1] for pair in kept.factors.values() for factor in pair]
    with (tmp_path / "t1" / "adapter_model.safetensors").open("rb"):
        after = Marks.take()
    assert after.objects["HostAdapter"] == before.objects["HostAdapter"] + 1
    assert after.tensors - before.tensors >= len(views) > 0
    assert after.files is None or after.files == before.files + 1


@pytest.mark.parametrize("bounds", [(1, 1), (2, 2), (3, None), (5, 6)], ids=str)
def test_few_slots(tmp_path: Path, bounds: tuple[int, int | None]) -> None:
    fleet = Fleet(tmp_path, 14, seed=1)
    life = Life(fleet, fleet.model(max_loras=bounds[0], max_cpu_loras=bounds[1]), most=6)
    for i in range(40):
        life.change()
        life.batch(generate=i % 8 == 7)
        life.without_names()
        life.check(whole=True)
    assert life.seen["passes"] > 5 and life.seen["deletes"] and life.seen["reloads"]


# -- rank rows ------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Family:
    torch.manual_seed(0)
    return Family(llama(), tmp_path_factory.mktemp("adapters"), {name: {"r": 1 + i} for i, name in enumerate("abcdef")})


def check(family: Family, model: Any, names: Any, base: Any = None) -> None:
    inputs = same_ids(len(names))
    got, want = logits(model, inputs, names), family.truth(inputs, names, base)
    assert error(got, want) < 1e-5
    if len(set(names)) > 1:
        assert error(got, want[[*range(1, len(names)), 0]]) > 2e-4, "the check says nothing"


@pytest.mark.parametrize("block", [False, True], ids=["", "block"])
def test_wide_and_narrow_adapters_in_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: bool) -> None:
    """Ranks 1 and 64 leave gaps that pools must close, also under the rows of a block; they never grow."""
    ranks = [64, 1, 63, 2, 64, 1, 62, 3, 64]
    torch.manual_seed(0)
    own = Family(llama(num_hidden_layers=1), tmp_path, {f"r{i}": {"r": r} for i, r in enumerate(ranks)})
    model = own.model(max_loras=3, max_lora_rank=64)
    moves, compact = [0], ModuleSlots._compact

    def counted(slots: ModuleSlots) -> None:
        moves[0] += 1
        compact(slots)

    monkeypatch.setattr(ModuleSlots, "_compact", counted)
    rng, inputs, want = random.Random(0), same_ids(2), own.truth(same_ids(2), ["r6", None])
    check(own, model, ["r7", "r6", "r1"])  # 3 and 62 rows: two adapters of 64 fit only once the 62 have moved
    with model.adapters(["r6", None]) if block else nullcontext():
        for _ in range(40):
            check(own, model, [*rng.sample([n for n in own.paths if n != "r6"], 2), None])
            assert_clean(model)
            if block:
                with torch.no_grad():
                    assert error(model(input_ids=inputs).logits, want) < 1e-5
    assert moves[0] >= len(sites(model)), "no gap was closed"
    assert {site.rows.capacity for site in sites(model).values()} == {3 * 64}


def test_nested_blocks_over_more_adapters_than_slots(family: Family) -> None:
    """Each block holds its own; what is inside runs in passes through the slots that are left, and no block may take
    the last one of another."""
    model, inputs = family.model(max_loras=3), same_ids(2)
    with torch.no_grad(), model.adapters(["a", None]):
        check(family, model, ["b", "c", "d", None, "e"])
        with model.adapters([None, "b"]):
            check(family, model, ["c", "d", None, "e"])
            with model.adapters(["f", "f"]):
                with pytest.raises(CapacityError, match=r"0 free slots \(max_loras=3"):
                    check(family, model, ["c", None])
                with pytest.raises(CapacityError), model.adapters(["c", "d"]):
                    pass
                check(family, model, ["a", "f", "b"])
            assert error(model(input_ids=inputs).logits, family.truth(inputs, [None, "b"])) < 1e-5
        assert error(model(input_ids=inputs).logits, family.truth(inputs, ["a", None])) < 1e-5
    check(family, model, ["c", "d", "e", "f", "a", "b", None])
    assert not any(e.in_flight for e in model._multilora.store.catalogue)


def test_pins_in_all_slots(family: Family) -> None:
    model = family.model(max_loras=2, max_cpu_loras=3)
    for name in "ab":
        model.pin_adapter(name)
    for names in (["a", "b", None], [None, None], ["b", "a"]):
        check(family, model, names)
    for names in (["c", None], ["c", "d", None]):
        with pytest.raises(CapacityError, match=r"0 free slots|needs max_loras"):
            logits(model, ids(len(names)), names)
        assert sorted(model.memory_report().slots) == ["a", "b"] and not model._multilora.routing.open
        check(family, model, ["a", None, "b"])
    model.delete_adapter("a")
    check(family, model, ["c", "b", None])


# -- files between passes ---------------------------------------------------------------------------
@pytest.mark.parametrize("what", ["changed", "gone"])
def test_files_that_change_between_the_passes_of_a_call(family: Family, tmp_path: Path, what: str) -> None:
    """The first pass has run, the second finds other files or none: an error, and nothing of the call is left."""
    shutil.copytree(family.paths["a"].parent, tmp_path / "all")
    own = copy.copy(family)
    own.paths = {name: tmp_path / "all" / name for name in family.paths}
    model, names = own.model(max_loras=2, max_cpu_loras=2), ["c", "a", None, "d", "b"]
    kept, steps = tmp_path / "kept", []
    check(own, model, ["d", "b"])

    def between(*args: Any) -> None:
        steps.append(args)
        if len(steps) == 1:
            own.paths["d"].rename(kept)
            if what == "changed":
                save_adapter(own.base, own.paths["d"], seed=90)

    hook = model.model.layers[1].register_forward_hook(between)
    kind, says = (AdapterError, "load_inplace") if what == "changed" else (FileNotFoundError, "put the files back")
    with pytest.raises(kind, match=says):
        logits(model, ids(5), names)
    assert len(steps) == 1, "the first pass ran, the second did not"
    hook.remove()
    store = model._multilora.store
    assert not model._multilora.routing.open and not any(e.in_flight for e in store.catalogue)
    assert len(store.hosted) <= 2 and set(store.slots) <= set(store.hosted)
    check(own, model, ["a", "c", None, "b"])
    assert_clean(model)
    shutil.rmtree(own.paths["d"], ignore_errors=True)
    kept.rename(own.paths["d"])
    check(own, model, names)


# -- copies and moves ---------------------------------------------------------------------------------
def pickled(model: Any) -> Any:
    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    return torch.load(stream, weights_only=False)


@pytest.mark.parametrize("way", [copy.deepcopy, pickled], ids=["deepcopy", "pickle"])
def test_a_copy_lives_on_alone(tmp_path: Path, way: Callable[[Any], Any]) -> None:
    """Made between batches, with pins and a default: both then change, and neither sees the other's changes."""
    fleet = Fleet(tmp_path / "one", 20, seed=2)
    life = Life(fleet, fleet.model(max_loras=6, max_cpu_loras=7), most=8)
    for _ in range(10):
        life.change()
        life.batch()
    twin = copy.deepcopy(fleet)
    other = Life(twin, way(life.model), most=8)
    other.default, other.pinned = life.default, [*life.pinned]
    for each in [life, other] * 10:
        each.batch()
        each.without_names()
        each.check(whole=True)
    twin.folder = tmp_path / "two"  # new files go there
    for each in [life, other] * 15:
        if each is other:
            each.change()
        each.batch()
        each.check(whole=True)


def test_moves_between_batches(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, 20, seed=3)
    life = Life(fleet, fleet.model(max_loras=4, max_cpu_loras=5), most=6)
    for dtype, tolerance in [
        (torch.float64, 1e-5), (torch.float32, 1e-5), (torch.bfloat16, None), (torch.float32, 1e-5),
        (torch.float16, None), (torch.float64, 1e-9), (torch.float32, 1e-5),
    ]:  # fmt: skip
        life.model.to(dtype)
        fleet.base.to(dtype)
        for _ in range(4):
            life.change()
            if tolerance is None:  # only that it runs: rounding at these dtypes is the layers' tests' to judge
                logits(life.model, ids(2), [life.rng.choice(list(fleet.paths)), None])
            else:
                life.tolerance = tolerance
                life.batch()
            life.check(whole=True)
