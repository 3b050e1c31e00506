"""Loads that run out of host memory, device memory or files: an error with the numbers, and the model goes on."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_multilora import AdapterError, CapacityError
from tests.tiny import Family, assert_rows, ids, llama, logits, same_ids

ADAPTERS: dict[str, dict[str, Any]] = {"a": {"r": 3}, "b": {"r": 5}, "c": {"r": 2}, "big": {"r": 20}}
CPU_OUT = "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Family:
    torch.manual_seed(0)
    return Family(llama(), tmp_path_factory.mktemp("adapters"), ADAPTERS)


def check(family: Family, model: Any, names: Any) -> None:
    inputs = same_ids(len(names))
    assert_rows(logits(model, inputs, names), family.truth(inputs, names))


def pools(model: Any) -> dict[str, Any]:
    """Where the rank rows of every module lie, how many there are, and whose."""
    return {
        name: (s.a.data_ptr(), s.b.data_ptr(), s.a.shape, s.laid, s.rows.capacity, dict(s.rows.spans))
        for name, (_, s) in model._multilora.sites.items()
    }


def state(model: Any) -> Any:
    store = model._multilora.store
    entries = [(e.name, e.id, e.id in store.pins, e.in_flight, e.host is not None) for e in store.catalogue]
    return entries, dict(store.slots), sorted(store.hosted), store.hosted_bytes, set(model._multilora.sites)


def failing_at(number: int, error: BaseException, real: Callable[..., Any], when: Any = None) -> Callable[..., Any]:
    """`real`, but its call of that number (from 1; only those for which `when` holds count) raises."""
    calls = [0]

    def call(*args: Any, **kwargs: Any) -> Any:
        if when is None or when(*args, **kwargs):
            calls[0] += 1
            if calls[0] == number:
                raise error
        return real(*args, **kwargs)

    return call


def is_pool(*size: Any, **kwargs: Any) -> bool:
    return len(size) == 2 and "device" in kwargs


def is_buffer(*size: Any, **kwargs: Any) -> bool:
    return kwargs.get("dtype") == torch.uint8


# -- host memory ------------------------------------------------------------------------------------
@pytest.mark.parametrize("out", [MemoryError(), RuntimeError(CPU_OUT)], ids=["MemoryError", "allocator"])
def test_no_host_memory_for_a_new_adapter(family: Family, monkeypatch: pytest.MonkeyPatch, out: Exception) -> None:
    model = family.model("a", "b", max_loras=2, max_cpu_loras=3)
    check(family, model, ["a", None, "b"])
    before, rows = state(model), pools(model)
    need, hosted = 2 * 2 * 4 * 256, model.memory_report().host_bytes
    for load in (
        lambda: model.load_adapter(str(family.paths["c"]), "c"),
        lambda: model.load_adapter(str(family.paths["c"]), "a", load_inplace=True),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(torch, "empty", failing_at(1, out, torch.empty, is_buffer))
            with pytest.raises(CapacityError) as raised:
                load()
        said = str(raised.value)
        assert f"needs {need} bytes of host memory" in said and f"2 adapters take {hosted} bytes" in said
        assert ("adapter 'c'" in said or "adapter 'a'" in said) and "lower max_cpu_loras, or free host memory" in said
        assert state(model) == before and pools(model) == rows
    check(family, model, ["a", None, "b"])
    model.load_adapter(str(family.paths["c"]), "c")
    check(family, model, ["a", None, "c"])


def test_no_host_memory_to_read_an_adapter_again(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    model = family.model("c", "a", "b", max_loras=2, max_cpu_loras=2)
    check(family, model, ["a", None, "b"])
    before, rows = state(model), pools(model)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", failing_at(1, MemoryError(), torch.empty, is_buffer))
        with pytest.raises(CapacityError, match=r"adapter 'c' needs \d+ bytes .*max_cpu_loras=2"):
            logits(model, ids(2), ["c", None])
    assert state(model) == before and pools(model) == rows
    check(family, model, ["a", None, "b"])
    check(family, model, ["c", None, "b"])


# -- device memory ----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "out", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError(CPU_OUT)], ids=["cuda", "cpu"]
)
@pytest.mark.parametrize("number", [1, 2, 7])  # A of the first module, its B, A of the fourth
def test_no_device_memory_for_larger_pools(
    family: Family, monkeypatch: pytest.MonkeyPatch, number: int, out: Exception
) -> None:
    model = family.model("a", "b", max_loras=3)
    check(family, model, ["a", None, "b"])
    model.load_adapter(str(family.paths["big"]), "big")
    before, rows = state(model), pools(model)
    assert {capacity for *_, capacity, _ in rows.values()} == {16}, "3 + 5 in sixteens; with 20 more it will be 32"
    with monkeypatch.context() as patch:
        patch.setattr(torch, "zeros", failing_at(number, out, torch.zeros, is_pool))
        with pytest.raises(CapacityError) as raised:
            logits(model, ids(3), ["a", "big", None])
    said, name = str(raised.value), list(rows)[(number - 1) // 2]
    slots = model._multilora.sites[name][1]
    total = sum(32 * (s.in_features + s.out_features) * 4 for _, s in model._multilora.sites.values())
    assert f"adapter 'big' cannot be brought to its slot: {name}'s pool of 32 rank rows" in said
    assert f"needs {32 * (slots.in_features + slots.out_features) * 4} bytes on cpu" in said
    assert f"need {total} bytes as planned ({32 * len(rows)} rank rows, max_loras=3, max_lora_rank=None)" in said
    assert "lower max_loras or max_lora_rank" in said and raised.value.__cause__ is out
    assert state(model) == before and pools(model) == rows, "pools that had grown are as they were"
    check(family, model, ["a", None, "b"])
    assert pools(model) == rows
    check(family, model, ["a", "big", None])
    assert {capacity for *_, capacity, _ in pools(model).values()} == {32}, "with memory they grow"


def test_no_device_memory_for_the_copy(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pools grew already, an adapter made room: who stayed answers as before, who left comes back."""
    model = family.model("c", "a", max_loras=2)
    check(family, model, ["c", None, "a"])
    model.load_adapter(str(family.paths["big"]), "big")
    sizes, out = {name: pool[:5] for name, pool in pools(model).items()}, torch.OutOfMemoryError("CUDA out of memory")
    with monkeypatch.context() as patch:
        patch.setattr(torch, "_foreach_copy_", failing_at(1, out, torch._foreach_copy_))
        with pytest.raises(CapacityError, match=r"'big' .*: the copy of its factors needs \d+ bytes on cpu"):
            logits(model, ids(2), ["a", "big"])
    assert {name: pool[:5] for name, pool in pools(model).items()} == sizes
    assert sorted(filter(None, model.memory_report().slots)) == ["a"]
    check(family, model, ["c", None, "a"])
    assert {name: pool[:5] for name, pool in pools(model).items()} == sizes
    check(family, model, ["big", None, "a"])
    assert [pool[4] for pool in pools(model).values()] == [2 * pool[4] for pool in sizes.values()], "the pools grow"


def test_an_error_that_is_not_about_memory_stays_what_it_is(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    model = family.model("a", max_loras=2)
    for real, name in ((torch.zeros, "zeros"), (torch._foreach_copy_, "_foreach_copy_")):
        with monkeypatch.context() as patch:
            patch.setattr(torch, name, failing_at(1, RuntimeError("broken"), real))
            with pytest.raises(RuntimeError, match="broken") as raised:
                logits(model, ids(2), ["a", None])
        assert type(raised.value) is RuntimeError
        assert all(capacity == 0 for *_, capacity, _ in pools(model).values())
    check(family, model, ["a", None])


def test_a_failed_load_does_not_hurt_a_copy(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    model = family.model("a", "b", max_loras=3)
    check(family, model, ["a", None, "b"])
    model.load_adapter(str(family.paths["big"]), "big")
    with monkeypatch.context() as patch:
        patch.setattr(torch, "zeros", failing_at(3, torch.OutOfMemoryError("out"), torch.zeros, is_pool))
        with pytest.raises(CapacityError):
            logits(model, ids(2), ["big", None])
    twin = copy.deepcopy(model)
    check(family, twin, ["a", "big", None])
    assert {capacity for *_, capacity, _ in pools(twin).values()} == {32}, (
        "the load that failed is one that grows pools"
    )


def test_a_rank_that_cannot_fit_has_numbers(family: Family) -> None:
    model = family.model("a", max_loras=2, max_lora_rank=7)
    with pytest.raises(AdapterError, match=r"rank must be at most 7 \(max_lora_rank\), got 20; raise max_lora_rank"):
        model.load_adapter(str(family.paths["big"]), "big")
    check(family, model, ["a", None])


# -- files ------------------------------------------------------------------------------------------
def vanish(folder: Path, other: Path) -> None:
    folder.rename(other)


def one_file_less(folder: Path, other: Path) -> None:
    shutil.copytree(folder, other)
    (folder / "adapter_model.safetensors").unlink()


def unreadable(folder: Path, other: Path) -> None:
    """For root every file is readable, so the config becomes a folder."""
    shutil.copytree(folder, other)
    (folder / "adapter_config.json").unlink()
    (folder / "adapter_config.json").mkdir()


@pytest.mark.parametrize("damage", [vanish, one_file_less, unreadable])
def test_files_that_are_gone_when_they_are_needed_again(
    family: Family, tmp_path: Path, damage: Callable[[Path, Path], None]
) -> None:
    own = Family(family.base, tmp_path, {"x": {"r": 3}, "y": {"r": 2}, "z": {"r": 4}})
    model = own.model(max_loras=2, max_cpu_loras=2)
    check(own, model, ["y", None, "z"])
    before, rows, folder = state(model), pools(model), own.paths["x"]
    damage(folder, tmp_path / "away")
    for _ in range(2):
        with pytest.raises(FileNotFoundError) as raised:
            logits(model, ids(2), ["x", None])
        said = str(raised.value)
        assert "adapter 'x' left host memory" in said and str(folder) in said
        assert "put the files back, or delete_adapter('x')" in said
        assert state(model) == before and pools(model) == rows
    check(own, model, ["y", None, "z"])
    shutil.rmtree(folder, ignore_errors=True)
    (tmp_path / "away").rename(folder)
    check(own, model, ["x", None, "z"])


def test_a_file_that_was_cut_when_it_is_needed_again(family: Family, tmp_path: Path) -> None:
    own = Family(family.base, tmp_path, {"x": {"r": 3}, "y": {"r": 2}})
    model = own.model(max_loras=1, max_cpu_loras=1)
    file = own.paths["x"] / "adapter_model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:100])
    with pytest.raises(AdapterError, match=r"adapter 'x' left host memory .*cut or damaged.*delete_adapter\('x'\)"):
        logits(model, ids(2), ["x", None])
    check(own, model, ["y", None])
    file.write_bytes(whole)
    check(own, model, ["x", None])
    file.unlink()
    model.delete_adapter("x")
    check(own, model, ["y", None])


def test_adapters_are_looked_through_once_where_pools_grow(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not at all where they need not: with thousands registered it must not be once per module."""
    model, scans = family.model("a", "b", max_loras=2), [0]
    capacities = type(model._multilora).capacities

    def count(runtime: Any) -> dict[str, int]:
        scans[0] += 1
        return capacities(runtime)

    monkeypatch.setattr(type(model._multilora), "capacities", count)
    for names, want in ((["a", None], 1), (["b", "a"], 1), ([None, "b"], 1)):
        check(family, model, names)
        assert scans == [want]
    model.load_adapter(str(family.paths["big"]), "big")
    check(family, model, ["big", None])
    assert scans == [2]
