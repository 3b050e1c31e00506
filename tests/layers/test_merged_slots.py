"""Adapters that come and go in linears of one buffer: ranks, pools, slots, sites, and siblings that are none."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from torch import nn

from hf_multilora import RoutingError
from hf_multilora.layers.augmented import WASTED
from hf_multilora.siblings import siblings_of
from tests.layers.trio import ALL_WAYS, LINEARS, MERGING, NAMES, Trio, family, setting, x_of
from tests.tiny import Family, assert_rows, ids, logits, same_ids

pytest_plugins = ("tests.layers.trio_fixtures",)
LAID = pytest.mark.parametrize("way", ["dense"])
ROWS = pytest.mark.parametrize("way", [way for way in ALL_WAYS if way.values[0] in ("dense", "rows")])


def host_of(trio: Trio, name: str) -> Any:
    return trio.model._multilora.store.catalogue.entry(name).host


def slot_of(trio: Trio, name: str) -> int:
    store = trio.model._multilora.store
    return store.slots[store.catalogue.entry(name).id]


def slots(trio: Trio, parent: str = "first") -> list[Any]:
    return [trio.module(child, parent)._lora for child in "qkv"]


# -- ranks and pools --------------------------------------------------------------------------------
@pytest.mark.parametrize("way", MERGING)
@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")
@torch.no_grad()
def test_rank_rows_of_others_do_not_count(trio: Trio, way: str) -> None:
    """Not those of other adapters, whatever they hold, nor those that nobody owns."""
    x = x_of(tokens=1)
    before = trio.call(x)
    wrong = slot_of(trio, "k")
    for site in slots(trio):
        free = torch.ones(len(site.a), dtype=torch.bool)
        for start, r in site.rows.spans.values():
            free[start : start + r] = False
        site.a[free] = torch.nan
        if wrong in site.rows.spans:
            site.a[slice(*(site.rows.spans[wrong][0] + i for i in (0, site.rows.spans[wrong][1])))] = torch.inf
    assert any(site.a.isnan().any() for site in slots(trio))
    with trio.open():
        after = {child: trio.module(child)(x) for child in "qkv"}
    for child, out in after.items():
        assert torch.equal(out[:3], before[child][:3]), child
    assert not after["k"][3].isfinite().any() and torch.equal(after["q"][3], before["q"][3])


@LAID
def test_pools_of_different_sizes(own: Family, way: str) -> None:
    """One grows, and is compacted, while its siblings stay as they are."""
    trio, x = Trio(own, way, max_loras=2), x_of(tokens=1)
    seen = []
    with torch.no_grad():
        for pair in (["a", "b"], ["k", "a"], ["wide", "b"], ["k", "wide"], ["b", "a"]):
            for names in ([pair[0], None, pair[1], None], [pair[1]] * 4):
                trio.call(x, names=names)
            assert trio.together() == ["qkv"]
            seen.append(tuple(site.rows.capacity for site in slots(trio)))
    assert len({capacity for capacities in seen for capacity in capacities}) > 1, "capacities must differ"
    assert trio.model._multilora.store.evictions > 3


@ROWS
@torch.no_grad()
def test_a_pool_that_grows_inside_a_request(own: Family, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trio, x = Trio(own, setting(monkeypatch, way), "a", "b", "k", max_loras=3), x_of(tokens=1)
    trio.lay(["a", None, "b", None])
    trio.factors |= Trio(own, "dense").factors
    with trio.open(["a", None, "b", None]):
        trio.ask(x, "q", ["a", None, "b", None])
        trio.model.load_adapter(str(own.paths["wide"]), "wide")
        with trio.open(["wide", "a", None, "b"]):
            assert trio.module("k")._lora.rows.capacity > 16
            trio.ask(x, "kvq", ["wide", "a", None, "b"])
        trio.ask(x, "kvq", ["a", None, "b", None])
    trio.call(x, names=["wide", "a", None, "b"])
    assert trio.together() == ["qkv"]


# -- loads ------------------------------------------------------------------------------------------
SAME: dict[str, dict[str, Any]] = {name: {"r": 3, "targets": LINEARS} for name in ("x", "y", "z")}


@pytest.fixture(scope="module")
def alike(tmp_path_factory: pytest.TempPathFactory) -> Family:
    return family(tmp_path_factory.mktemp("alike"), SAME)


@ROWS
@torch.no_grad()
def test_a_slot_that_is_filled_between_two_calls(alike: Family, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the same ranks, so that nothing moves."""
    trio, x, names = Trio(alike, setting(monkeypatch, way), max_loras=2), x_of(tokens=1), ["x", None, "z", "x"]
    trio.lay(names)
    runtime, slot = trio.model._multilora, slot_of(trio, "x")
    with trio.open(names):
        for old, new in (("x", "y"), ("y", "x")):
            trio.ask(x, "q", [old if name == "x" else name for name in names])
            runtime.fill(slot, host_of(trio, new))
            assert not runtime._stale
            trio.ask(x, "kv", [new if name == "x" else name for name in names])
        trio.ask(x, "q", names)
        runtime.empty(slot)
        runtime.refresh()
        trio.ask(x, "kv", [None, None, "z", None])
        runtime.fill(slot, host_of(trio, "x"))
        runtime.refresh()
    trio.call(x, names=names)


@LAID
@torch.no_grad()
def test_a_standing_adapter_replaced_in_place(alike: Family, way: str) -> None:
    trio, x = Trio(alike, way, "x", "z", max_loras=2), x_of(tokens=1)
    trio.lay(["x", None])
    trio.factors = Trio(alike, way).factors
    trio.model.set_adapter("x")
    trio.ask(x, "q", ["x"] * 4)
    trio.model.set_adapter("z")
    trio.ask(x, "kv", ["z"] * 4)
    trio.model.load_adapter(str(alike.paths["y"]), "x", load_inplace=True)
    trio.factors["x"] = trio.factors["y"]
    trio.ask(x, "kvq", ["z"] * 4)
    trio.model.set_adapter("x")
    trio.ask(x, "vkq", ["y"] * 4)
    trio.whole(ids(4, 1), ["x", None, "z", "x"])
    trio.model.set_adapter(None)
    trio.ask(x, "vkq", [None] * 4)


# -- sites ------------------------------------------------------------------------------------------
@ROWS
@torch.no_grad()
def test_a_sibling_that_is_adapted_later(own: Family, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trio, x = Trio(own, setting(monkeypatch, way), "b", max_loras=3), x_of(tokens=1)
    only = ["b", None, None, "b"]
    with trio.open(only):
        trio.ask(x, "qkv", only)
        assert trio.together() == ["qv"] and "_lora" not in trio.module("k").__dict__
        trio.ask(x, "q", only)
        trio.factors |= Trio(own, "dense").factors
        trio.model.load_adapter(str(own.paths["a"]), "a")
        assert "_lora" in trio.module("k").__dict__
        trio.ask(x, "kv", only)
        with trio.open(["a", None, "b", None]):
            trio.ask(x, "qkv", ["a", None, "b", None])
            assert trio.together() == ["qkv"]
        trio.ask(x, "vqk", only)
    trio.model.delete_adapter("a")
    trio.call(x, names=only)
    assert trio.together() == ["qkv"], "where none is resident in it, k is computed with its siblings all the same"


@LAID
@torch.no_grad()
def test_a_load_that_fails_after_a_sibling_was_adapted(own: Family, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trio, x, only = Trio(own, way, "b", max_loras=2), x_of(tokens=1), ["b", None, None, "b"]
    trio.call(x, names=only)
    store = trio.model._multilora.store
    with trio.open(only):
        trio.ask(x, "q", only)
        with monkeypatch.context() as patch:
            patch.setattr(store, "register", lambda *_: (_ for _ in ()).throw(MemoryError()))
            with pytest.raises(MemoryError):
                trio.model.load_adapter(str(own.paths["a"]), "a")
        assert "_lora" not in trio.module("k").__dict__ and type(trio.module("k")) is nn.Linear
        trio.ask(x, "kv", only)
    trio.call(x, names=only)
    assert trio.together() == ["qv"]


# -- no siblings after all --------------------------------------------------------------------------
@ROWS
@torch.no_grad()
def test_a_hint_that_is_wrong(trio: Trio, way: str) -> None:
    """Right all along; computed alone after a while, and together again in a model that is adapted anew."""
    with trio.counted() as runs, trio.open():
        for i in range(WASTED + 2):
            trio.ask(x_of(tokens=1, seed=i), "q")
        assert trio.merged("q").wasted == WASTED + 1
    assert len(runs) == WASTED + 2
    x = x_of(tokens=1)
    trio.call(x)
    assert trio.together() == ["k", "q", "v"] and trio.together("second") == ["qkv"]
    trio.call(x, parent="second")
    trio.model.unpatch()
    other = Trio(Family(trio.model, trio.family.paths["a"].parent, {}), way)
    other.family.paths = trio.family.paths
    again = Trio(other.family, way, max_loras=4)
    again.call(x)
    assert again.together() == ["qkv"]


@LAID
def test_inference_mode_outside_of_the_parents_forward(trio: Trio, way: str) -> None:
    """There an input that changes does not show, so siblings cannot share, and each is computed alone after a while."""
    with torch.inference_mode():
        x = x_of(tokens=1)
        with trio.counted() as runs:
            for _ in range(WASTED):
                trio.call(x, "q")
            trio.call(x, "kv")
        assert len(runs) == WASTED + 2
        trio.call(x)
        assert trio.together() == ["k", "q", "v"] and trio.together("second") == ["qkv"]


@LAID
@torch.no_grad()
def test_outputs_that_are_taken_in_time_are_no_waste(trio: Trio, way: str) -> None:
    for i in range(WASTED + 2):
        with trio.open():
            trio.ask(x_of(tokens=1, seed=i), "q")
            trio.ask(x_of(tokens=1, seed=-i - 1), "qkv")
    trio.call(x_of(tokens=1))
    assert trio.together() == ["qkv"]


def deberta() -> Any:
    settings: dict[str, Any] = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    settings |= {"intermediate_size": 20, "max_position_embeddings": 32, "relative_attention": True, "num_labels": 3}
    settings |= {"position_buckets": 4, "norm_rel_ebd": "layer_norm", "share_att_key": True, "initializer_range": 0.3}
    settings |= {"pos_att_type": ["p2c", "c2p"], "position_biased_input": False}
    return tf.DebertaV2ForSequenceClassification(tf.DebertaV2Config(**settings)).eval()


def test_siblings_whose_rows_cannot_be_told(tmp_path: Path) -> None:
    """DeBERTa's keys are called with positions too: adapters of values alone mix, others run one by one."""
    adapters: dict[str, dict[str, Any]]
    adapters = {"kv": {"targets": ("key_proj", "value_proj")}, "v": {"targets": ("value_proj",)}, "w": {"r": 5}}
    adapters["w"]["targets"] = ("value_proj",)
    own = Family(deberta(), tmp_path, adapters)
    model = own.model()
    attention = model.deberta.encoder.layer[0].attention.self
    assert {"key_proj", "value_proj"} & {child for group in siblings_of(attention) for child in group}
    for names in (["v", None, "w"], ["kv", None, "v"], ["kv"] * 3, ["w", "kv", None]):
        inputs = same_ids(3)
        got, want = logits(model, inputs, names), own.truth(inputs, names)
        if len(set(names)) > 1:
            assert_rows(got, want)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    with pytest.raises(RoutingError, match="key_proj"), model.adapters(["kv", None, "v"]):
        model(input_ids=inputs)


# -- threads and models -----------------------------------------------------------------------------
@LAID
@torch.no_grad()
def test_two_models_on_one_input(own: Family, way: str) -> None:
    one, other, x, turned = Trio(own, way, max_loras=4), Trio(own, way, max_loras=4), x_of(tokens=1), NAMES[::-1]
    with one.open(), other.open(turned):
        for child in "qkv":
            one.ask(x, child)
            other.ask(x, child, turned)


@LAID
def test_loads_in_another_thread(alike: Family, way: str) -> None:
    """They take away what siblings share, at any moment."""
    trio, x, names, stop = Trio(alike, way, max_loras=3), x_of(tokens=1), ["x", None, "z", "x"], threading.Event()
    trio.lay(["x", "y", "z", None])
    runtime, slot, host = trio.model._multilora, slot_of(trio, "y"), host_of(trio, "y")

    def load() -> None:
        while not stop.is_set():
            runtime.fill(slot, host)

    thread, interval = threading.Thread(target=load, daemon=True), sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with torch.no_grad(), trio.open(names):
            thread.start()
            for _ in range(12):
                trio.ask(x, "qkv", names)
    finally:
        stop.set()
        thread.join()
        sys.setswitchinterval(interval)
    trio.whole(ids(4, 1), ["x", None, "z", "y"])
