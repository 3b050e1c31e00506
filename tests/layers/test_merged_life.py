"""Linears in one buffer through what is done to a model: weights, dtypes, biases, ties, copies, files, unpatch."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from hf_multilora.layers import augmented
from tests.layers.trio import ALL_WAYS, K, Narrow, Trio, bare, copied, family, setting, x_of
from tests.tiny import Family

pytest_plugins = ("tests.layers.trio_fixtures",)
LAID = pytest.mark.parametrize("way", ["dense"])
ROWS = [way for way in ALL_WAYS if way.values[0] == "rows"]


def storages(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Bytes behind tensors that are not theirs."""
    return {name: left for name, t in tensors.items() if (left := t.untyped_storage().nbytes() - t.nbytes)}


# -- weights ----------------------------------------------------------------------------------------
def state_of(trio: Trio) -> dict[str, Tensor]:
    return {key: torch.randn_like(value) for key, value in trio.model.state_dict().items()}


def of_k(trio: Trio, assign: bool) -> None:
    state = {key: torch.randn_like(value) for key, value in trio.module("k").state_dict().items()}
    trio.module("k").load_state_dict(state, assign=assign)


def there_and_back(trio: Trio, move: Callable[[Any], Any]) -> None:
    with torch.no_grad():
        move(trio.module("k")).to(torch.float32)


CHANGES: dict[str, tuple[Callable[[Trio], Any], str]] = {  # and who lies in the old buffer still
    "a new parameter": (lambda t: setattr(t.module("k"), "weight", nn.Parameter(torch.randn(9, K), False)), "qv"),
    "data": (lambda t: setattr(t.module("k").weight, "data", torch.randn(9, K)), "qv"),
    "in place": (lambda t: t.module("k").weight.mul_(-2), "qkv"),
    "loaded": (lambda t: t.model.load_state_dict(state_of(t)), "qkv"),
    "assigned": (lambda t: t.model.load_state_dict(state_of(t), assign=True), ""),
    "k loaded": (lambda t: of_k(t, False), "qkv"),
    "k assigned": (lambda t: of_k(t, True), "qv"),
    "k to another dtype and back": (lambda t: there_and_back(t, lambda k: k.double()), "qv"),
    "k to the same dtype": (lambda t: t.module("k").float(), "qkv"),
    "all to another dtype and back": (lambda t: t.model.double().float(), ""),
    "a new bias": (lambda t: setattr(t.module("k"), "bias", nn.Parameter(torch.ones(9), False)), "qv"),
    "no bias": (lambda t: setattr(t.module("k"), "bias", None), "qv"),
    "shared memory": (lambda t: t.model.share_memory(), ""),
}


@pytest.mark.parametrize(("name", "way"), [*((n, "dense") for n in CHANGES), ("assigned", "rows"), ("no bias", "rows")])
@pytest.mark.parametrize("inside", [False, True], ids=["before a request", "inside"])
def test_weights_and_biases_that_change(trio: Trio, name: str, inside: bool) -> None:
    change, left = CHANGES[name]
    x = x_of(tokens=1)
    with trio.open():
        before = trio.ask(x)
        if inside:
            change(trio)
            lies = [c for c in "qkv" if augmented.lies(trio.module(c), trio.module(c)._lora)]
            assert "".join(lies) == left
            trio.ask(x)
    if not inside:
        change(trio)
    after = trio.call(x)
    assert trio.together() == trio.together("second") == ["qkv"]
    same = torch.allclose(after["k"], before["k"], rtol=1e-3, atol=1e-3)
    assert same == (name in ("k to the same dtype", "shared memory") or "back" in name)
    assert not storages(trio.model.state_dict())


@LAID
def test_one_sibling_of_another_dtype(trio: Trio) -> None:
    """It is computed alone, in its own."""
    trio.module("k").double()
    x = x_of(tokens=1)
    with trio.open():
        assert trio.together() == ["k", "qv"]
        trio.ask(x, "qv")
        trio.check(trio.module("k")(x.double()), "k", x, tolerance=1e-6)
    trio.module("k").float()
    trio.call(x)
    assert trio.together() == ["qkv"]


# -- biases, ties, odd siblings ---------------------------------------------------------------------
@pytest.mark.parametrize("way", ALL_WAYS)
@pytest.mark.parametrize("biases", [(True, False, False), (False, False, False), (False, True, True)])
def test_biases_of_some(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, biases: Any, way: str) -> None:
    trio = Trio(family(tmp_path, biases=biases), setting(monkeypatch, way), max_loras=4)
    trio.call(x_of(tokens=1))
    assert trio.together() == ["qkv"]
    for child, bias in zip("qkv", biases, strict=True):
        assert (trio.module(child).bias is not None) == bias


def test_a_tied_sibling_is_left_alone(tmp_path: Path) -> None:
    base = bare()
    base.second.k_proj.weight = base.first.k_proj.weight
    trio = Trio(Family(base, tmp_path, {"a": {"targets": ["q_proj", "k_proj", "v_proj"]}}), "dense")
    x = x_of(2, tokens=1)
    with torch.no_grad():
        for parent in ("first", "second"):
            trio.call(x, names=["a", None], parent=parent)
    assert trio.together() == trio.together("second") == ["qv"]
    assert trio.module("k").weight is trio.module("k", "second").weight
    assert not storages({"k": trio.module("k").weight})


def test_tied_by_hand_after_laying(tmp_path: Path) -> None:
    trio, x = Trio(family(tmp_path), "dense", max_loras=4), x_of(tokens=1)
    trio.lay()
    trio.module("k", "second").weight = trio.module("k").weight
    with torch.no_grad():
        for parent in ("first", "second") * 2:
            trio.call(x, parent=parent)
    assert trio.module("k").weight is trio.module("k", "second").weight
    assert not storages(trio.model.state_dict())


def test_one_module_under_two_names(tmp_path: Path) -> None:
    """It is called twice with one input, and computed for each."""
    base = bare()
    base.first.v_proj = base.first.k_proj
    trio = Trio(Family(base, tmp_path, {"a": {"targets": ["q_proj", "k_proj"]}}), "dense")
    x = x_of(2, tokens=1)
    with torch.no_grad(), trio.open(["a", None]), trio.counted() as runs:
        trio.ask(x, "qk", ["a", None])
        trio.check(trio.module("v")(x), "k", x, ["a", None])
    assert len(runs) == 2 and len(trio.merged("q").members) == 2


@pytest.mark.parametrize("name", ["narrow", "parametrized", "deterministic"])
def test_siblings_that_cannot_lie_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    way = setting(monkeypatch, "rows" if name == "deterministic" else "dense")
    settings = {"parent": Narrow, "inputs": (K, K - 8, K)} if name == "narrow" else {}
    own = family(tmp_path, **settings)
    if name == "parametrized":
        parametrizations.weight_norm(own.base.first.k_proj)
    trio = Trio(own, way, max_loras=4, deterministic=name == "deterministic")
    x = x_of(tokens=1)
    with torch.no_grad(), trio.open(), trio.counted() as runs:
        if name == "narrow":
            trio.ask(x, "qv")
            trio.ask(x[..., : K - 8].contiguous(), "k")
        else:
            trio.ask(x)
    together = {"narrow": ["k", "qv"], "parametrized": ["qv"], "deterministic": ["qkv"]}
    assert trio.together() == together[name] and bool(runs) == (name != "deterministic")


# -- copies and files -------------------------------------------------------------------------------
COPIES: dict[str, Callable[[Any], Any]] = {"deepcopy": copy.deepcopy, "pickle": lambda m: pickle.loads(pickle.dumps(m))}


@pytest.mark.parametrize("way", ["dense", *ROWS])
@pytest.mark.parametrize("when", ["before", "after", "inside"])
@pytest.mark.parametrize("how", COPIES)
def test_copies(own: Family, monkeypatch: pytest.MonkeyPatch, how: str, when: str, way: str) -> None:
    trio, x = Trio(own, setting(monkeypatch, way), max_loras=4), x_of(tokens=1)
    with torch.no_grad():
        if when == "before":
            other = copied(trio, COPIES[how](trio.model))
        else:
            trio.lay()
            with trio.open():
                trio.ask(x, "q")
                if when == "inside":
                    other = copied(trio, COPIES[how](trio.model))
            if when == "after":
                other = copied(trio, COPIES[how](trio.model))
        assert other.routing.shared is None and not storages(dict(other.model.named_parameters()))
        for parameter in trio.model.parameters():
            parameter.zero_()
        other.call(x)
        trio.call(x)
        assert other.together() == trio.together() == ["qkv"]
        assert not torch.equal(other.module("k").weight, trio.module("k").weight)


@LAID
def test_files_hold_the_base_only(trio: Trio, tmp_path: Path) -> None:
    want = {key: value.clone() for key, value in trio.family.base.state_dict().items()}
    trio.call(x_of(tokens=1))
    trio.model.save_pretrained(tmp_path)
    safetensors.torch.save_file(trio.model.state_dict(), str(tmp_path / "state"))
    safetensors.torch.save_model(trio.model, str(tmp_path / "model"))
    for file in ("model.safetensors", "state", "model"):
        found = safetensors.torch.load_file(str(tmp_path / file))
        assert {*found} == {*want} and all(torch.equal(found[key], want[key]) for key in want)
    for saved in (trio.model.state_dict(), trio.module("k").state_dict()):
        file = io.BytesIO()
        torch.save(saved, file)
        assert not storages(saved) and len(file.getvalue()) < 2 * sum(t.nbytes for t in saved.values()) + 5000
    assert storages(dict(trio.model.named_parameters())), "the weights themselves do lie in buffers"
