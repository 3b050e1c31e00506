"""Loads on a CUDA device: the scatter kernel, and adapters that come ahead of their use while a call computes."""

from __future__ import annotations

import copy
import gc
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.test_host import ADAPTERS, assert_in_slot, check, events, host_of, model_of, transfers
from tests.kernels.test_scatter import *  # noqa: F403  (its tests, on the device)
from tests.test_prefetch import settle
from tests.test_scarcity import failing_at, is_pool
from tests.test_threads import WAIT, Meeting, run_all
from tests.tiny import Family, assert_rows, llama, logits, same_ids

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
BIG = {"hidden_size": 1024, "intermediate_size": 2048, "num_attention_heads": 8, "num_key_value_heads": 8}


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Family:
    torch.manual_seed(0)
    return Family(llama(), tmp_path_factory.mktemp("adapters"), ADAPTERS)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Family:
    """Adapters of megabytes, of one shape, and one of another."""
    torch.manual_seed(0)
    ranks = {"x": {"r": 128}, "y": {"r": 128}, "z": {"r": 128}, "other": {"r": 16}}
    return Family(llama(**BIG), tmp_path_factory.mktemp("large"), ranks)


def ahead(model: Any) -> set[str]:
    """Adapters whose bytes are on the device ahead of their use."""
    names = {id(entry.host): entry.name for entry in model._multilora.store.catalogue}
    stagings = model._multilora.staging.values()
    return {names.get(id(host), "?") for staging in stagings for host in staging.ahead.arrivals}


def near(family: Family, model: Any, names: Any, truth: Any = None) -> None:
    """truth: whose answers, where not those of `names`."""
    got = logits(model, same_ids(len(names)).cuda(), names).cpu()
    assert_rows(got, family.truth(same_ids(len(names)), names if truth is None else truth), 2e-3)


# -- graphs -----------------------------------------------------------------------------------------
@pytest.mark.parametrize("tokens", [1, 300])
@torch.no_grad()
def test_a_captured_step_serves_what_is_loaded_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, tokens: int
) -> None:
    """Captured while one adapter of rank 2 is there; then others take the rest of the pool, with larger ranks."""
    torch.manual_seed(0)
    family = Family(llama(), tmp_path, {"a": {"r": 2}, "b": {"r": 5}, "c": {"r": 30}, "d": {"r": 32}})
    model, inputs = model_of(family, max_loras=4, max_lora_rank=32), same_ids(4, tokens)
    first, on_device = ["a", None, None, None], inputs.cuda()
    with model.adapters(first):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            model(input_ids=on_device, use_cache=False)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = model(input_ids=on_device, use_cache=False).logits
    sites = [slots for _, slots in model._multilora.sites.values()]
    assert {(slots.layout.width, slots.layout.bound) for slots in sites} == {(16, 16)}
    for names in (first, ["b", "a", None, "c"], ["d", "c", "b", "a"], [None, "d", None, "b"]):
        captured.fill_(torch.nan)
        with model.adapters(names):
            graph.replay()
            got = captured.cpu()
        assert_rows(got, family.truth(inputs, names), 1e-4)
    assert all(slots.layout.width > 16 and slots.layout.bound == 32 for slots in sites), "control: the prefix has grown"
    assert "capture it again" not in caplog.text


@torch.no_grad()
def test_rows_in_other_slots_wait_for_nothing(large: Family) -> None:
    """A request writes its tables behind what the device still does, and calls on another stream come after them."""
    model, inputs, side = model_of(large, max_loras=3), same_ids(2).cuda(), torch.cuda.Stream()
    for names in (["x", "y"], ["z", None], ["x", "y"]):
        logits(model, inputs, names)
    for other in (False, True):
        torch.cuda.synchronize()
        torch.cuda._sleep(200_000_000)
        with model.adapters(["y", "z"] if other else [None, "x"]):
            assert not torch.cuda.current_stream().record_event().query(), "the host waited"
            with torch.cuda.stream(side if other else torch.cuda.current_stream()):
                got = model(input_ids=inputs).logits
        torch.cuda.synchronize()
        assert_rows(got.cpu(), large.truth(same_ids(2), ["y", "z"] if other else [None, "x"]), 2e-3)


@torch.no_grad()
def test_a_call_on_another_stream_comes_after_the_load(large: Family) -> None:
    """No row changes its slot: the load alone is what the call must wait for."""
    model, inputs, side = model_of(large, max_loras=1), same_ids(2).cuda(), torch.cuda.Stream()
    for name in ("x", "y", "x", "z"):
        logits(model, inputs, [name, None])
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)
    with model.adapters(["x", None]), torch.cuda.stream(side):
        got = model(input_ids=inputs).logits
        event = side.record_event()
    assert not event.query(), "control: the load has not begun yet"
    torch.cuda.synchronize()
    assert_rows(got.cpu(), large.truth(same_ids(2), ["x", None]), 2e-3)


# -- slots ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_loads_of_megabytes(large: Family, dtype: torch.dtype) -> None:
    """Into slots one after the other, of one rank and of others, between those of neighbours."""
    model = model_of(large, dtype=dtype, max_loras=2)
    for names in (["x", None, "y"], ["other", "y", None], ["z", "other", None], ["y", "x"]):
        logits(model, same_ids(len(names)).cuda(), names)
        logits(model, same_ids(len(names)).cuda(), names)  # laid with the weights: A's rows lie in turns
        store = model._multilora.store
        for name in filter(None, names):
            assert_in_slot(model, store.slots[store.catalogue.entry(name).id], name)
    model._multilora.empty(0)
    for _, slots in model._multilora.sites.values():
        owned = torch.zeros(slots.rows.capacity, dtype=torch.bool)
        for start, r in slots.rows.spans.values():
            owned[start : start + r] = True
        assert not slots.a[~owned].any() and not slots.b[~owned].any() and slots.a[owned].any()


# -- ahead ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_a_call_moves_what_came_ahead_to_its_slot(large: Family, backend: str) -> None:
    model = model_of(large, max_loras=2, backend=backend)
    runtime = model._multilora
    near(large, model, ["x", None, "other"])
    base, before = model.memory_report().staging_bytes, torch.cuda.memory_allocated()
    copies = transfers(lambda: model.prefetch(["y", "z", None, "x"]))
    assert len(copies) == 2 and all("Pinned" in name for name in copies)
    assert ahead(model) == {"y", "z"}
    report, want = model.memory_report(), host_of(model, "y").nbytes + host_of(model, "z").nbytes
    assert report.staging_bytes == base + want and sorted(filter(None, report.slots)) == ["other", "x"]
    assert want <= torch.cuda.memory_allocated() - before <= want + (1 << 22)
    seen = events(lambda: runtime.fill(0, host_of(model, "y")))
    assert_in_slot(model, 0, "y")
    kernel = backend == "triton"
    assert sum("Memcpy HtoD" in name for name in seen) == kernel, "a table at most"
    assert sum("scatter_kernel" in name for name in seen) == kernel
    assert len(transfers(lambda: runtime.fill(0, host_of(model, "x")))) == 1, "what did not come ahead is seen"
    runtime.refresh()
    near(large, model, ["z", None, "x"])
    near(large, model, ["y", None, "z"])
    assert ahead(model) == set() and model.memory_report().staging_bytes == base


def test_bytes_are_waited_for(large: Family) -> None:
    """The side stream is kept busy: the copy has not begun when the call needs its bytes."""
    model = model_of(large, max_loras=1)
    near(large, model, ["x", None])
    (staging,) = model._multilora.staging.values()
    for waits in (True, False):
        model.prefetch(["y"])  # makes the stream
        near(large, model, ["y", None])
        near(large, model, ["x", None])
        with torch.cuda.stream(staging.ahead.stream):
            torch.cuda._sleep(200_000_000)
        model.prefetch(["y"])
        (arrival,) = staging.ahead.arrivals.values()
        if not waits:  # the control
            arrival.bytes.data.zero_()
            staging.ahead.arrivals[host_of(model, "y")] = arrival._replace(event=torch.cuda.Event())
        model._multilora.fill(0, host_of(model, "y"))
        name, (_, slots) = next(iter(model._multilora.sites.items()))
        assert torch.equal(slots.tenant(0)[0].cpu(), host_of(model, "y").factors[name][0]) == waits
        torch.cuda.synchronize()
        model._multilora.empty(0)
        model._multilora.refresh()
        model.delete_adapter("x"), model.load_adapter(str(large.paths["x"]), "x")
        near(large, model, ["x", None])


def test_while_generate_runs(family: Family) -> None:
    """Slots, pools and answers are what they would be; then the adapters that came ahead are right."""
    model = model_of(family, max_loras=2)
    check(family, model, ["a", None, "b"])
    store = model._multilora.store
    store._drop_host(store.catalogue.entry("d"))  # will be read from its files
    inputs = {"input_ids": same_ids(3).cuda()}
    settings = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "adapter_names": ["a", None, "b"]}
    want = model.generate(**inputs, **settings)
    started, done = threading.Event(), threading.Event()

    def generate() -> Any:
        return model.generate(**inputs, **settings, logits_processor=[Meeting(started, done, WAIT)])

    def other() -> Any:
        assert started.wait(WAIT)
        model.prefetch(["c", "d"])
        settle(model)
        during = model._multilora.routing.open, ahead(model)
        done.set()
        return during

    got, during = run_all([generate, other])
    assert during == (True, {"c", "d"}) and torch.equal(got, want)
    check(family, model, ["c", None, "d"])
    assert ahead(model) == set()


@pytest.mark.parametrize("change", ["replace", "delete", "evict", "move"])
def test_bytes_of_what_an_adapter_was_are_never_used(large: Family, change: str) -> None:
    """And they go, also while they are being copied."""
    model = model_of(large, "x", "z", "other", max_loras=1)
    near(large, model, ["other", None])
    store = model._multilora.store
    for _ in range(3):
        before = torch.cuda.memory_allocated()
        model.prefetch(["x"]), settle(model)  # a host copy that was dropped is read first, by another thread
        assert ahead(model) == {"x"} and torch.cuda.memory_allocated() > before
        if change == "replace":
            model.load_adapter(str(large.paths["z"]), "x", load_inplace=True)
        elif change == "delete":
            model.delete_adapter("x")
            model.load_adapter(str(large.paths["z"]), "x")
        elif change == "evict":
            store._drop_host(store.catalogue.entry("x"))
            model.prefetch(["x"]), settle(model)
            store._drop_host(store.catalogue.entry("x"))
        else:
            model.cpu().cuda()
        gc.collect()
        assert ahead(model) == set()
    near(large, model, ["x", None], ["x" if change in ("evict", "move") else "z", None])


def test_a_stream_of_batches_takes_flat_memory(family: Family) -> None:
    model = model_of(family, max_loras=2, max_lora_rank=8)
    names = list(family.paths)
    rows = [[names[i % 4], None, names[(i + 1 + i // 4 % 2) % 4]] for i in range(60)]
    held, loads = set[int](), model._multilora.store.loads
    for i, batch in enumerate(model.prefetched([{"adapter_names": each} for each in rows])):
        check(family, model, batch["adapter_names"])
        if i > 15:
            held.add(torch.cuda.memory_allocated() - model.memory_report().staging_bytes)
    assert model._multilora.store.loads > loads + 30
    assert max(held) - min(held) <= 1 << 14, "beside the bytes that the report shows"


# -- memory that runs out ---------------------------------------------------------------------------
def limited(extra: int) -> None:
    gc.collect(), torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + extra) / total)


def test_no_memory_to_bring_an_adapter_ahead(large: Family, caplog: pytest.LogCaptureFixture) -> None:
    """Said, and the call that needs it does it: the buffer that it has is large enough."""
    model = model_of(large, max_loras=2)
    near(large, model, ["x", None, "other"])
    limited(1 << 20)
    try:
        with caplog.at_level("WARNING"):
            model.prefetch(["y", "z"])
        assert ahead(model) == set()
        said = [r.getMessage() for r in caplog.records if "ahead of its use" in r.getMessage()]
        assert [("'y'" in line, "'z'" in line) for line in said] == [(True, False), (False, True)]
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    near(large, model, ["y", None, "z"])


def test_what_came_ahead_gives_way_to_pools(family: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pools that find no memory to grow find it where other adapters' bytes were."""
    own = Family(family.base, tmp_path, {"a": {"r": 3}, "c": {"r": 2}, "tall": {"r": 40}})
    model = model_of(own, "a", "c", max_loras=1)
    check(own, model, ["a", None])
    model.prefetch(["c"])
    model.load_adapter(str(own.paths["tall"]), "tall")
    assert ahead(model) == {"c"}
    with monkeypatch.context() as patch:
        patch.setattr(torch, "zeros", failing_at(3, torch.OutOfMemoryError("out"), torch.zeros, is_pool))
        check(own, model, ["tall", None])
    assert ahead(model) == set()
    check(own, model, ["c", None])


def test_a_copy_of_a_model_brings_its_own(family: Family) -> None:
    model = model_of(family, max_loras=2)
    check(family, model, ["a", None, "b"])
    model.prefetch(["c"])
    twin = copy.deepcopy(model)
    assert not twin._multilora.staging
    for each in (twin, model):
        each.prefetch(["d"])
        check(family, each, ["c", None, "d"])
