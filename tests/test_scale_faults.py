"""Faults of residency that the stress tests once found, as small as they get."""

from __future__ import annotations

import copy
import shutil
import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hf_multilora import AdapterError, MultiLoRAModel
from hf_multilora.layers import ModuleSlots
from hf_multilora.residency import Residency
from tests.test_scale import check
from tests.tiny import Family, error, ids, llama, logits, same_ids, save_adapter

# an adapter among the rows of a call that holds a slot anyway
HELD = {
    "pinned": lambda model: model.pin_adapter("a"),
    "default": lambda model: model.set_adapter("a"),
    "block": lambda model: model.adapters(["a", None]),
}


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Family:
    torch.manual_seed(0)
    return Family(llama(), tmp_path_factory.mktemp("adapters"), {name: {"r": 1 + i} for i, name in enumerate("abcd")})


@pytest.mark.parametrize("how", HELD)
def test_a_held_adapter_among_the_rows_of_a_call_in_passes(family: Family, how: str) -> None:
    model = family.model(max_loras=2)
    block = HELD[how](model)
    with block if how == "block" else nullcontext():
        check(family, model, ["b", "a", None, "c", "d"])


def test_the_default_by_its_name_while_a_pin_waits(family: Family) -> None:
    model = family.model(max_loras=1)
    model.set_adapter("a")
    model.pin_adapter("b")
    check(family, model, ["a", None])


def test_the_default_is_read_again_at_a_finer_dtype(family: Family) -> None:
    base = copy.deepcopy(family.base).bfloat16()
    model = MultiLoRAModel.from_pretrained(copy.deepcopy(base), {n: str(family.paths[n]) for n in "ab"})
    model.set_adapter("a")
    model.float()
    model.set_adapter(None)  # not even then
    check(family, model, ["a", None, "b"], base.float())


def test_a_default_that_a_dtype_cannot_hold_is_an_error(family: Family, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(family.paths["a"], tmp_path / "huge"))
    file = folder / "adapter_model.safetensors"
    save_file({k: v * 1e6 for k, v in load_file(file).items()}, file)
    model = MultiLoRAModel.from_pretrained(copy.deepcopy(family.base), {"huge": str(folder)})
    model.set_adapter("huge")
    with pytest.raises(AdapterError, match=r"finite in torch\.float16"):
        model.half()
        logits(model, ids(1), ["huge"])
    assert logits(model, ids(2), [None, None]).isfinite().all()


def test_an_interrupt_while_a_new_adapter_displaces_others(
    family: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = family.model("a", "b", max_loras=1, max_cpu_loras=1)
    logits(model, ids(1), ["b"])
    late = save_adapter(family.base, tmp_path / "late", targets=["o_proj"])

    def interrupted(residency: Residency, slot: int) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Residency, "empty", interrupted)
        model.load_adapter(str(late), "late")
    assert "late" not in model._multilora.store.catalogue
    model.load_adapter(str(late), "late")
    assert error(logits(model, same_ids(1), ["late"]), family.base(same_ids(1)).logits) > 1e-3


def test_an_interrupt_while_modules_are_adapted(
    family: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = family.model("a")

    class Interrupted(dict[str, Any]):
        def __setitem__(self, name: str, value: Any) -> None:
            if "layers.1" in name:
                raise KeyboardInterrupt
            super().__setitem__(name, value)

    runtime = model._multilora
    before, runtime.parents = set(runtime.sites), Interrupted(runtime.parents)
    late = save_adapter(family.base, tmp_path / "late", targets=["o_proj"])
    with pytest.raises(KeyboardInterrupt):
        model.load_adapter(str(late), "late")
    assert set(runtime.sites) == before


@pytest.mark.parametrize("reader", ["call", "report"])
def test_an_adapter_is_deleted_while_another_thread_walks_the_slots(family: Family, reader: str) -> None:
    model = family.model(max_loras=4)
    logits(model, ids(4), list("abcd"))
    catalogue, seen = model._multilora.store.catalogue, []
    by_id, first = catalogue.by_id, {"call": 3, "report": 1}[reader]  # a call looks its own two up before the slots

    def slowly(adapter_id: int) -> Any:
        if threading.current_thread() is threading.main_thread():
            seen.append(adapter_id)
            if len(seen) == first:
                deleter.start()
                deleter.join(1)
        return by_id(adapter_id)

    deleter = threading.Thread(target=lambda: model.delete_adapter("b"), daemon=True)
    catalogue.by_id = slowly
    try:
        if reader == "call":
            check(family, model, ["a", "c"])
        else:
            assert set(model.memory_report().slots) - {None} in (set("abcd"), set("acd"))
    finally:
        del catalogue.by_id
    deleter.join(10)
    assert not deleter.is_alive() and "b" not in catalogue


@pytest.mark.parametrize(
    ("name", "number"), [("merged", 0), ("merged", 1), ("a", 0), ("b", 1), ("laid", 0), ("laid", 2)]
)
def test_an_interrupt_while_weights_are_laid(
    family: Family, monkeypatch: pytest.MonkeyPatch, name: str, number: int
) -> None:
    """lay() has moved some weights of siblings and not others, or a weight and not its rank rows."""
    model, names = family.model("a", "b", max_loras=2), ["a", None, "b"]
    armed, count = [False], [0]

    def interrupted(slots: ModuleSlots, attribute: str, value: Any) -> None:
        armed[0] |= attribute == "merged" and value is not None  # which lay() alone sets
        if armed[0] and attribute == name:
            count[0] += 1
            if count[0] == number + 1:
                raise KeyboardInterrupt
        object.__setattr__(slots, attribute, value)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(ModuleSlots, "__setattr__", interrupted)
        logits(model, ids(3), names)
    check(family, model, names)
    assert all(slots.laid for _, slots in model._multilora.sites.values())


def test_an_interrupt_while_a_module_takes_its_layout(
    family: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, look, calls = family.model(max_loras=2, max_lora_rank=32), ModuleSlots.look, [0]
    logits(model, ids(2), ["a", "b"])
    own = Family(family.base, tmp_path, {"wide": {"r": 30}})
    model.load_adapter(str(own.paths["wide"]), "wide")

    def interrupted(slots: ModuleSlots) -> None:
        calls[0] += 1
        if calls[0] == 2:
            raise KeyboardInterrupt
        look(slots)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(ModuleSlots, "look", interrupted)
        logits(model, ids(2), ["wide", None])
    own.paths |= family.paths
    for names in (["wide", None], ["wide", "b"], ["a", "b"]):
        check(own, model, names)


class Late(list[Any]):
    """A stack of requests: the interrupt comes right after the first one was put on it."""

    def append(self, request: Any) -> None:
        super().append(request)
        raise KeyboardInterrupt


def test_an_interrupt_while_a_request_is_opened(family: Family) -> None:
    model = family.model(max_loras=2)
    routing = model._multilora.routing
    routing.stack = Late()
    with pytest.raises(KeyboardInterrupt):
        logits(model, ids(3), ["a", None, "b"])
    routing.stack = list(routing.stack)
    check(family, model, ["b", "a"])
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids(3)).logits, family.base(input_ids=ids(3)).logits)
