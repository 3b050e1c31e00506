"""Calls of linears that are computed together: each row is as if it were alone, whatever happens between the calls."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.layers.trio import ALL_WAYS, FEW_WAYS, MERGING, NAMES, K, Trio, table, x_of
from tests.tiny import Family, ids

pytest_plugins = ("tests.layers.trio_fixtures",)

MIXES = {
    "mixed": NAMES,
    "uneven": ["wide", "a", None, "a"],
    "two of three": ["b", None, "b", "b"],  # k lacks rank rows
    "one of three": ["k", None, None, "k"],
    "all base": [None] * 4,
    "uniform": ["a"] * 4,
    "uniform, two of three": ["b"] * 4,
}


# -- mixes and shapes -------------------------------------------------------------------------------
@table(MIXES, MIXES)
@torch.no_grad()
def test_every_mix(trio: Trio, way: str, name: str) -> None:
    names = MIXES[name]
    uniform = len(set(names)) == 1
    with trio.counted() as runs:
        trio.call(x_of(tokens=1), names=names)
    assert len(runs) == int(names != [None] * 4 and not (uniform and way == "dense"))


@pytest.mark.parametrize("way", [way for way in ALL_WAYS if way not in FEW_WAYS])
@torch.no_grad()
def test_some_mixes_in_other_ways(trio: Trio, way: str) -> None:
    with trio.counted() as runs:
        for mix, order in (("uneven", "qkv"), ("two of three", "vkq"), ("uniform", "kqv")):
            trio.call(x_of(tokens=1), order, MIXES[mix])
    assert len(runs) == (0 if way == "alone" else 3)


SHAPES: dict[str, Callable[[Tensor], Tensor]] = {
    "a token": lambda x: x[:, :1],
    "no dimension of tokens": lambda x: x[:, 0],
    "four dimensions": lambda x: x.view(4, 1, 2, K),
    "transposed": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "columns of a wider one": lambda x: torch.cat((x, x), -1)[..., 3 : 3 + K],
    "expanded": lambda x: x[:1].expand(4, -1, -1),
    "no tokens": lambda x: x[:, :0],
}


@table(SHAPES, ("four dimensions", "columns of a wider one"), MERGING[1:])
@torch.no_grad()
def test_every_shape(trio: Trio, name: str) -> None:
    x = SHAPES[name](x_of(tokens=2))
    with trio.counted() as runs:
        trio.call(x)
    assert len(runs) == 1


@pytest.mark.parametrize("way", FEW_WAYS)
@torch.no_grad()
def test_other_ways_to_call(trio: Trio) -> None:
    x = x_of(tokens=1)
    with trio.open(), trio.counted() as runs:
        outs = {child: trio.module(child)(input=x) for child in "qkv"}
    for child, out in outs.items():
        trio.check(out, child, x)
    assert len(runs) == 1
    store = trio.model._multilora.store
    packed = ["a", "a", None, "b", "k", "k"]
    numbers = [0 if name is None else store.catalogue.entry(name).id for name in packed]
    x = x_of(1, len(packed))
    with trio.model._multilora.request(numbers, ragged=True), trio.counted() as runs:
        for child in "qkv":
            trio.check(trio.module(child)(x)[0], child, x[0], packed)
    assert len(runs) == 1


@pytest.mark.parametrize("way", ALL_WAYS[:3])
@torch.no_grad()
def test_whole_models(trio: Trio, way: str) -> None:
    for context, mix in ((torch.no_grad, "mixed"), (torch.inference_mode, "two of three")):
        with context(), trio.counted() as runs:
            trio.whole(ids(4, 1), MIXES[mix])
            assert len(runs) == (0 if way == "alone" else 2), "one for each parent"
    for merged in (trio.merged("q"), trio.merged("q", "second")):
        assert merged.wasted == 0


# -- orders -----------------------------------------------------------------------------------------
ORDERS = {"qkv": 1, "vkq": 1, "k": 1, "qk": 1, "qqkv": 2, "qkqkv": 2, "qkvqkv": 2, "qkvv": 2}


@table(ORDERS, ("vkq", "qkqkv"))
@torch.no_grad()
def test_orders(trio: Trio, name: str) -> None:
    x = x_of(tokens=1)
    with trio.counted() as runs, trio.open():
        for child in name:
            trio.ask(x, child)
        all_taken = sorted(name[-3:]) == ["k", "q", "v"]
        assert (trio.routing.shared is None) == all_taken and trio.merged("q").wasted == 0
    assert len(runs) == ORDERS[name]
    assert trio.routing.shared is None


@pytest.mark.parametrize("way", FEW_WAYS)
@torch.no_grad()
def test_two_parents_in_turns(trio: Trio) -> None:
    x = x_of(tokens=1)
    with trio.counted() as runs, trio.open():
        for child in "qkv":
            for parent in ("first", "second"):
                trio.ask(x, child, parent=parent)
    assert runs == [trio.merged("q"), trio.merged("q", "second")] * 3


@pytest.mark.parametrize("way", FEW_WAYS)
@torch.no_grad()
def test_the_same_tensor_with_other_rows(trio: Trio) -> None:
    x, turned = x_of(tokens=1), NAMES[::-1]
    with trio.counted() as runs:
        with trio.open():
            trio.ask(x, "q")
            with trio.open(turned):
                trio.ask(x, "kv", turned)
                trio.ask(x, "q", turned)
            trio.ask(x, "kv")
            trio.routing.enter(4)
            trio.ask(x, "q")
        with trio.open(turned):
            trio.ask(x, "kv", turned)
    assert len(runs) == 5
    trio.model.set_adapter("a")
    trio.ask(x, "q", ["a"] * 4)
    trio.model.set_adapter("b")
    trio.ask(x, "kvq", ["b"] * 4)
    trio.model.set_adapter(None)
    trio.ask(x, "kvq", [None] * 4)


# -- what is held -----------------------------------------------------------------------------------
@pytest.mark.parametrize("way", FEW_WAYS)
@torch.no_grad()
def test_an_error_in_a_sibling_leaves_nothing(trio: Trio) -> None:
    def fail(*_: Any) -> None:
        raise KeyError("k")

    x = x_of(tokens=1)
    alive, remove = weakref.ref(x), trio.module("k").register_forward_pre_hook(fail).remove
    with pytest.raises(KeyError), trio.open():
        trio.ask(x, "q")
        trio.module("k")(x)
    del x
    gc.collect()
    assert alive() is None and trio.routing.shared is None
    remove()
    trio.call(x_of(tokens=1))
    assert trio.together() == ["qkv"]


@pytest.mark.parametrize("way", FEW_WAYS)
@torch.no_grad()
def test_nothing_is_held_after_the_last_sibling_or_the_request(trio: Trio) -> None:
    for order, held in (("q", True), ("qkv", False)):
        x = x_of(tokens=1)
        alive = weakref.ref(x)
        with trio.open():
            outs = [weakref.ref(out) for out in trio.ask(x, order).values()]
            del x
            assert (alive() is not None) == held
            assert all(out() is None for out in outs), "an output is its caller's"
        assert alive() is None
    trio.whole(ids(4, 1))


# -- modes ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("way", FEW_WAYS)
@torch.no_grad()
def test_autocast_and_inference_mode_between_calls(trio: Trio) -> None:
    dtype = torch.float16 if trio.way == "rows" else torch.bfloat16
    x = x_of(tokens=1)
    with trio.open():
        with torch.autocast("cpu", dtype):
            first = trio.module("q")(x)
        second = trio.ask(x, "kv")
        with torch.autocast("cpu", dtype):
            third = trio.module("q")(x)
        assert (first.dtype, second["k"].dtype, third.dtype) == (dtype, torch.float32, dtype)
        for out in (first, third):
            trio.check(out, "q", x, tolerance=2e-2)
        if trio.way == "dense":  # of two dtypes
            for child, other in (("q", torch.float16), ("k", torch.bfloat16)):
                with torch.autocast("cpu", other):
                    assert trio.module(child)(x).dtype == other
    with torch.inference_mode(), trio.open():
        inside = x_of(tokens=1)
        trio.ask(inside, "q")
        inside.mul_(3)
        trio.ask(inside, "kv")
        trio.ask(x, "q")
        with torch.inference_mode(False):
            outs = trio.ask(x, "kv")
        assert not outs["k"].is_inference() and not outs["v"].is_inference()


def test_outputs_may_be_changed_in_place(own: Family) -> None:
    trio, x = Trio(own, "dense", max_loras=4), x_of(tokens=2)
    with torch.no_grad(), trio.open():
        outs = {child: trio.module(child)(x) for child in "qkv"}
        outs["q"].mul_(0), outs["v"].add_(1)
    trio.check(outs["k"], "k", x)
    trio.check(outs["v"] - 1, "v", x)
