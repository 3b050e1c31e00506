"""Linears with one A through what is done to a model: gradients, copies, files, dtypes, compilation, whole models."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F

from hf_multilora import MultiLoRAModel
from hf_multilora.layers import slots as slots_file
from tests.layers.shared_a import MIX, ROWS, is_one, share, sites
from tests.layers.test_merged_gradients import check_gradient, loss
from tests.layers.trio import ALL_WAYS, LINEARS, MERGING, Trio, copied, setting, x_of
from tests.tiny import Family, assert_rows, error, ids, llama, logits, merged, same_ids

pytest_plugins = ("tests.layers.shared_a_fixtures",)


# -- what is done to a model ------------------------------------------------------------------------
@pytest.mark.parametrize("way", [way for way in ALL_WAYS if way.values[0] in ("dense", "alone", "rows", "grouped")])
def test_gradients_of_the_input(shared: Trio, way: str) -> None:
    shared.lay(MIX)
    assert is_one(shared)
    x = x_of(tokens=1).requires_grad_()
    with shared.open(MIX):
        loss(shared.ask(x, names=MIX)).backward()
    check_gradient(shared, x.grad, MIX)


def pickled(model: Any) -> Any:
    file = io.BytesIO()
    pickle.dump(model, file)
    return pickle.loads(file.getvalue())


@ROWS
@pytest.mark.parametrize("copier", [copy.deepcopy, pickled])
@torch.no_grad()
def test_copies(shared: Trio, way: str, copier: Callable[[Any], Any]) -> None:
    x = x_of(tokens=1)
    shared.call(x, names=MIX)
    other = copied(shared, copier(shared.model))
    for one, names in ((other, MIX), (other, ["own", "s", "t", None]), (shared, MIX)):
        one.call(x, names=names)
    assert is_one(shared) and not is_one(other)
    again = copied(shared, copier(shared.model))
    again.call(x, names=MIX)
    assert is_one(again) and sites(again)[0].a.data_ptr() != sites(shared)[0].a.data_ptr()


@ROWS
@torch.no_grad()
def test_unpatch_and_state(shared: Trio, way: str) -> None:
    before = {key: value.clone() for key, value in shared.family.base.state_dict().items()}
    shared.call(x_of(tokens=1), names=MIX)
    state = shared.model.state_dict()
    assert state.keys() == before.keys() and all(torch.equal(state[key], value) for key, value in before.items())
    shared.model.unpatch()
    for key, value in shared.model.state_dict().items():
        assert torch.equal(value, before[key]) and value.untyped_storage().nbytes() == value.nbytes


@ROWS
@torch.no_grad()
def test_each_exports_its_own_a(shared: Trio, way: str, tmp_path: Path) -> None:
    shared.call(x_of(tokens=1), names=MIX)
    shared.model.save_adapter("s", tmp_path / "s")
    saved = load_file(tmp_path / "s" / "adapter_model.safetensors")
    assert {key for key in saved if "lora_A" in key} == {key for key in shared.factors["s"] if "lora_A" in key}
    for key in saved:
        if "lora_A" in key:
            torch.testing.assert_close(saved[key], shared.factors["s"][key])


@ROWS
@torch.no_grad()
def test_one_linear_in_another_dtype_and_back(shared: Trio, way: str) -> None:
    """It has lost digits of A, which the others must not get."""
    x = x_of(tokens=1)
    shared.call(x, names=MIX)
    shared.module("k").half().float()
    with shared.open(MIX):
        shared.ask(x, "qv", MIX)
        assert error(shared.module("k")(x), shared.want("k", x, MIX)) < 1e-2
    assert not is_one(shared) and is_one(shared, "second")
    shared.model.double().float()
    shared.call(x, names=MIX)


@ROWS
@torch.no_grad()
def test_nothing_is_left_behind(shared: Trio, way: str) -> None:
    x = x_of(tokens=1)
    shared.call(x, names=MIX)
    group = shared.merged("q")
    assert bool(group.buffer[group.n :].any())
    shared.model.delete_adapter("s")
    shared.call(x, names=["t", None, "t", None])
    shared.module("k").weight.data = shared.module("k").weight.data.clone()  # q and v lie there still
    shared.call(x, names=["t", None, "t", None])
    assert shared.merged("q") is not group and not group.buffer[group.n :].any()
    old = shared.merged("q")
    shared.call(x, names=["own", None, "t", None])
    assert shared.merged("q") is not old and not old.buffer[old.n :].any()
    for name in ("own", "t"):
        shared.model.delete_adapter(name)
    now = shared.merged("q")
    assert not now.buffer[now.n :].any() and not now.b.any()


@ROWS
@torch.no_grad()
def test_a_member_that_leaves_alone(shared: Trio, way: str) -> None:
    """The others compute with A while it is elsewhere."""
    x = x_of(tokens=1)
    shared.call(x, names=MIX)
    with shared.open(MIX):
        shared.module("k").double().float()
        shared.ask(x, "qkv", MIX)
    shared.call(x, names=MIX)
    assert shared.together() == ["qkv"]


# -- memory and graphs ------------------------------------------------------------------------------
@ROWS
@torch.no_grad()
def test_captured_graphs_are_told(shared: Trio, way: str, caplog: pytest.LogCaptureFixture) -> None:
    x, told = x_of(tokens=1), "capture it again"
    shared.call(x, names=MIX)
    shared.routing.captured_at = shared.routing.moves  # as `enter` notes while a graph is captured
    with caplog.at_level("WARNING"):
        shared.call(x, names=["t", "s", None, None])
        assert told not in caplog.text
        shared.call(x, names=["t", "own", None, "s"])
        assert caplog.text.count(told) == 1


@ROWS
@torch.no_grad()
def test_a_captured_call_covers_the_whole_pool(shared: Trio, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is loaded later lies in rank rows that are free now."""
    x, multiplied, linear, mm = x_of(tokens=1), list[int](), F.linear, torch.addmm
    shared.call(x, names=MIX)
    rows = sites(shared)[0].rows.capacity
    monkeypatch.setattr(shared.routing, "on_cuda", True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(F, "linear", lambda x, w, b: multiplied.append(len(w)) or linear(x, w, b))
    monkeypatch.setattr(torch, "addmm", lambda b, x, w: multiplied.append(w.shape[1]) or mm(b, x, w))
    with shared.open(MIX):
        shared.routing.enter(4)
        shared.ask(x, "qkv", MIX)
    assert rows > 16 and 24 + 9 + 5 + rows in multiplied
    multiplied.clear()
    monkeypatch.setattr(slots_file, "DENSE_WORK", 4 * rows - 1)  # the whole pool is too much for 4 tokens
    with shared.open(MIX):
        shared.routing.enter(4)
        shared.ask(x, "qkv", MIX)
    assert (24 + 9 + 5 + rows in multiplied) == (way == "dense")


@ROWS
@torch.no_grad()
def test_memory_counts_it_once(shared: Trio, way: str) -> None:
    shared.call(x_of(tokens=1), names=MIX)
    report, plan = shared.model.memory_report(), MultiLoRAModel.plan(shared.model, {}, max_loras=3)
    rows = sites(shared)[0].rows.capacity
    a, b = 20 * 4, sum((24, 9, 5)) * 4
    assert report.device_bytes == 2 * rows * (a + b) and plan.device_bytes > report.device_bytes
    assert sum(report.slot_bytes) == 2 * (3 + 5) * (a + b)
    assert report.per_module["first.k_proj"] == rows * 9 * 4
    shared.call(x_of(tokens=1), names=["own", "s", "t", None])
    assert shared.model.memory_report().device_bytes == 2 * rows * (3 * a + b)


# -- traced code, and whole models ------------------------------------------------------------------
@ROWS
@torch.no_grad()
def test_compiled(shared: Trio, way: str) -> None:
    torch._dynamo.reset()
    shared.model.first.forward = torch.compile(shared.model.first.forward, backend="eager", fullgraph=True)
    for names in (MIX, ["own", "s", "t", None], MIX):
        for rows, tokens in ((4, 1), (4, 7)):
            inputs = ids(rows, tokens)
            shared.whole(inputs, names)
    assert not is_one(shared)
    torch._dynamo.reset()


GROUPS = (LINEARS, ("gate_proj", "up_proj"))
ALL = [*LINEARS, "gate_proj", "up_proj", "down_proj"]


@pytest.fixture(scope="module")
def llamas(tmp_path_factory: pytest.TempPathFactory) -> Family:
    torch.manual_seed(0)
    given = {"s": {"r": 3, "targets": ALL}, "t": {"r": 8, "targets": ALL}, "own": {"r": 3, "targets": ALL}}
    made = Family(llama(num_hidden_layers=1), tmp_path_factory.mktemp("adapters"), given)
    for name in ("s", "t"):
        share(made.paths[name], GROUPS)
    return made


@pytest.mark.parametrize("tokens", [1, 9])
@pytest.mark.parametrize("way", MERGING)
@torch.no_grad()
def test_a_llama(llamas: Family, way: str, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its gated MLP, short and long prompts, and generation."""
    backend = "torch" if setting(monkeypatch, way) == "dense" else "triton"
    model, inputs = llamas.model(backend=backend, max_loras=3), same_ids(4, tokens)
    layer = model.model.layers[0]
    flags = []
    for names in (MIX, ["s", "own", "t", None], ["t", "s", None, "s"]):
        assert_rows(logits(model, inputs, names), llamas.truth(inputs, names))
        flags.append([layer.self_attn.k_proj._lora.merged.one_a, layer.mlp.up_proj._lora.merged.one_a])
    assert flags == [[True, True], [False, False], [False, False]]
    model, settings = llamas.model("s", "t", backend=backend), {"max_new_tokens": 2, "do_sample": False}
    out = model.generate(ids(4), adapter_names=MIX, pad_token_id=0, **settings)
    for row, name in enumerate(MIX):
        bare = llamas.base if name is None else merged(llamas.base, llamas.paths[name])
        assert torch.equal(out[row], bare.generate(ids(4)[row : row + 1], pad_token_id=0, **settings)[0])
    assert model.model.layers[0].mlp.gate_proj._lora.merged.one_a
