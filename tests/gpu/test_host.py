"""From host memory to a CUDA device: page-locking, one copy per fill, memory that runs out or stays flat."""

from __future__ import annotations

import copy
import gc
import mmap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from hf_multilora import CapacityError, MultiLoRAModel
from hf_multilora.host import HostAdapter
from tests.tiny import Family, assert_rows, beside, llama, logits, same_ids

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
ADAPTERS: dict[str, dict[str, Any]] = {"a": {"r": 3}, "b": {"r": 5}, "c": {"r": 2}, "d": {"r": 8}}
TOLERANCE = 1e-4  # float32 against float32 on the CPU


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Family:
    torch.manual_seed(0)
    return Family(llama(), tmp_path_factory.mktemp("adapters"), ADAPTERS)


def model_of(family: Family, *names: str, device: str = "cuda", dtype: Any = torch.float32, **settings: Any) -> Any:
    base = copy.deepcopy(family.base).to(device, dtype)
    paths = {name: str(family.paths[name]) for name in names or family.paths}
    return MultiLoRAModel.from_pretrained(base, paths, **settings)


def check(family: Family, model: Any, names: Any) -> None:
    got = logits(model, same_ids(len(names)).cuda(), names).cpu()
    assert_rows(got, family.truth(same_ids(len(names)), names), TOLERANCE)


def host_of(model: Any, name: str) -> HostAdapter:
    return model._multilora.store.catalogue.entry(name).host


def events(work: Any) -> list[str]:
    """Names of what devices do while `work` runs."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        work()
        torch.cuda.synchronize()
    return [event.name for event in seen.events() if event.device_type == torch.autograd.DeviceType.CUDA]


def transfers(work: Any) -> list[str]:
    """Names of the copies from the host to a device while `work` runs."""
    return [name for name in events(work) if "Memcpy HtoD" in name]


def locked(tensor: Any) -> bool:
    """Whether a copy of it to the device is one from page-locked memory (torch's is_pinned knows only its own)."""
    (name,) = transfers(lambda: tensor.to("cuda", non_blocking=True))
    return "Pinned" in name


# -- page-locking -----------------------------------------------------------------------------------
def test_host_copies_are_page_locked_and_let_go_of(family: Family) -> None:
    model = model_of(family, "a", "b")
    report = model.memory_report()
    assert report.host_pinned_bytes == report.host_bytes > 0 and report.host_adapters == 2
    host = host_of(model, "a")
    assert host.pinned and locked(host.flat) and host.flat.data_ptr() % mmap.PAGESIZE == 0
    view = host.factors["model.layers.0.self_attn.q_proj"][0]
    del host
    model.delete_adapter("a")
    gc.collect()
    assert not locked(view) and view.any(), "a view that is left is ordinary memory"
    check(family, model, ["b", None])


def test_host_copies_of_a_model_that_moves_to_the_device_are_pinned_at_use(family: Family) -> None:
    model = model_of(family, "a", "b", device="cpu")
    assert model.memory_report().host_pinned_bytes == 0
    model.cuda()
    check(family, model, ["a", None])
    assert locked(host_of(model, "a").flat) and not locked(host_of(model, "b").flat)


def test_copies_of_a_model_are_not_pinned_until_they_are_used(family: Family) -> None:
    model = model_of(family, "a", "b")
    check(family, model, ["a", None, "b"])
    other = copy.deepcopy(model)
    assert other.memory_report().host_pinned_bytes == 0 < model.memory_report().host_pinned_bytes
    other.delete_adapter("b")
    del model
    gc.collect()
    check(family, other, ["a", None])


def test_memory_that_cannot_be_registered_is_used_as_it_is(family: Family) -> None:
    """The same bytes twice: the driver refuses, and its error is not left for the next kernel to raise."""
    model = model_of(family, "a")
    host = host_of(model, "a")
    again = HostAdapter(host.flat, host.places)
    again.pin()
    assert host.pinned and not again.pinned
    assert torch.ones(3, device="cuda").sum().item() == 3
    check(family, model, ["a", None])


# -- one copy ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("backend", ["triton", "torch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_fill_is_one_copy_and_bit_by_bit_what_the_host_holds(
    family: Family, dtype: torch.dtype, backend: str
) -> None:
    """And one launch that takes the factors apart, which brings its table."""
    model = model_of(family, dtype=dtype, max_loras=3, max_lora_rank=8, backend=backend)
    runtime = model._multilora
    for name in ("a", "b", "c"):
        runtime.fill({"a": 0, "b": 1, "c": 2}[name], host_of(model, name))
    host = host_of(model, "d")
    runtime.fill(0, host)
    runtime.fill(0, host_of(model, "a"))
    seen = events(lambda: runtime.fill(1, host))  # of another rank than what is in the slot: that is wiped
    copies = [name for name in seen if "Memcpy HtoD" in name]
    assert all("Pinned" in name for name in copies), copies
    launches = sum("scatter_kernel" in name for name in seen)
    assert (len(copies), launches) == ((3, 2) if backend == "triton" else (1, 0)), seen
    seen = events(lambda: runtime.fill(1, host))  # over itself: its table is there
    copies, launches = [n for n in seen if "Memcpy HtoD" in n], [n for n in seen if "scatter_kernel" in n]
    assert (len(copies), len(launches)) == ((1, 1) if backend == "triton" else (1, 0)), seen
    factors = [factor for pair in host.factors.values() for factor in pair]
    assert len(transfers(lambda: [factor.to("cuda") for factor in factors])) == len(factors), "copies are seen"
    for slot, name in ((0, "a"), (1, "d"), (2, "c")):
        for module, (a, b) in host_of(model, name).factors.items():
            on_device = runtime.sites[module][1].tenant(slot)
            assert torch.equal(on_device[0].cpu(), a) and torch.equal(on_device[1].cpu(), b)
    assert not torch.equal(on_device[0].cpu(), host.factors[module][0][:2]), "another adapter is told apart"


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_a_model_on_two_devices_gets_one_copy_each(family: Family) -> None:
    from accelerate import dispatch_model

    parts = {"model.embed_tokens": 0, "model.layers.0": 0, "model.layers.1": 1, "model.norm": 1, "lm_head": 1}
    base = dispatch_model(copy.deepcopy(family.base), parts | {"model.rotary_emb": 0})
    model = MultiLoRAModel.from_pretrained(base, {n: str(p) for n, p in family.paths.items()}, max_loras=2)
    runtime, host = model._multilora, host_of(model, "b")
    runtime.fill(0, host_of(model, "a"))
    assert len(transfers(lambda: runtime.fill(1, host))) == 4, "an adapter's bytes and a table on each"
    assert sorted(device.index for device in runtime.staging) == [0, 1]
    for module, (a, b) in host.factors.items():
        on_device = runtime.sites[module][1].tenant(1)
        assert on_device[0].get_device() == int("layers.1" in module)
        assert torch.equal(on_device[0].cpu(), a) and torch.equal(on_device[1].cpu(), b)


# -- staging ----------------------------------------------------------------------------------------
def assert_in_slot(model: Any, slot: int, name: str) -> None:
    """Bit by bit what the host holds."""
    for module, (a, b) in host_of(model, name).factors.items():
        on_device = model._multilora.sites[module][1].tenant(slot)
        assert torch.equal(on_device[0].cpu(), a) and torch.equal(on_device[1].cpu(), b)
        assert not torch.equal(on_device[0].cpu(), -a), "other values pass: the check says nothing"


@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_staging_is_kept_for_adapters_of_one_shape_and_grows_for_a_larger_one(
    family: Family, tmp_path: Path, backend: str
) -> None:
    own = Family(family.base, tmp_path, {"x": {"r": 3}, "y": {"r": 3}, "z": {"r": 4}, "large": {"r": 20}})
    model = model_of(own, max_loras=1, max_lora_rank=20, backend=backend)
    runtime = model._multilora
    check(own, model, ["x", None])
    (staging,) = runtime.staging.values()
    small, large = host_of(model, "x").nbytes, host_of(model, "large").nbytes
    assert staging.buffer.is_cuda and staging.buffer.nbytes == small < large - 4096
    buffer, fits, views, tables = staging.buffer.data_ptr(), dict(staging.fits), staging.views[2], 2048
    for name, table in (("y", 1), ("x", 0), ("y", 0)):  # the first load saw memory move and kept no table
        copies = transfers(lambda name=name: runtime.fill(0, host_of(model, name)))
        assert len(copies) == 1 + (table if backend == "triton" else 0), copies
        assert all("Pinned" in each for each in copies), copies
        assert staging.buffer.data_ptr() == buffer and staging.fits == fits and staging.views[2] is views
        assert_in_slot(model, 0, name)
    del views  # which would keep the old buffer
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    start = torch.cuda.memory_allocated()
    runtime.fill(0, host_of(model, "large"))
    assert staging.buffer.nbytes == large
    assert large - small - tables <= torch.cuda.memory_allocated() - start <= large - small + 1024
    assert small > tables, "which is told from tables"
    assert torch.cuda.max_memory_allocated() - start <= large - small + tables, "the old buffer is given up first"
    assert_in_slot(model, 0, "large")
    buffer = staging.buffer.data_ptr()
    for name in ("z", "x", "large", "y"):
        runtime.fill(0, host_of(model, name))
        assert staging.buffer.data_ptr() == buffer and staging.buffer.nbytes == large
        assert_in_slot(model, 0, name)
    runtime.empty(0)
    runtime.refresh()
    model.delete_adapter("x")  # whose slot the store believed this to be
    check(own, model, ["y", None])
    check(own, model, ["large", None])


def test_memory_stays_flat_while_staging_is_kept(family: Family, tmp_path: Path) -> None:
    own = Family(family.base, tmp_path, {"x": {"r": 3}, "y": {"r": 3}, "large": {"r": 20}})
    model = model_of(own, max_loras=1, max_lora_rank=20)
    for name in ("large", "x", "y", "large", "y"):  # as below: for the last one no table is kept
        check(own, model, [name, None])
    gc.collect()
    (staging,) = model._multilora.staging.values()
    device, buffer, loads = torch.cuda.memory_allocated(), staging.buffer.data_ptr(), model._multilora.store.loads
    for _ in range(10):
        for name in ("x", "y", "large", "y"):
            check(own, model, [name, None])
    gc.collect()
    assert model._multilora.store.loads == loads + 40
    assert torch.cuda.memory_allocated() == device and staging.buffer.data_ptr() == buffer


@pytest.mark.parametrize("waits", [True, False])
def test_nobody_waits_for_a_load_but_what_comes_on_other_streams(family: Family, waits: bool) -> None:
    """The load's stream is kept busy: the load has not begun when another stream reads the slot."""
    model = model_of(family, max_loras=1, max_lora_rank=8)
    check(family, model, ["a", None])
    runtime, side = model._multilora, torch.cuda.Stream()
    (staging,) = runtime.staging.values()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        runtime.fill(0, host_of(model, "d"))
        torch.cuda.synchronize()
        torch.cuda._sleep(200_000_000)
        runtime.fill(0, host_of(model, "a"))
    assert not staging.last[1].query(), "the load is done: the check says nothing"
    if not waits:  # the control
        staging.last = None
    runtime.refresh()  # as before every request
    name, (_, slots) = next(iter(runtime.sites.items()))
    got = slots.tenant(0)[0].clone()
    torch.cuda.synchronize()
    assert torch.equal(got.cpu(), host_of(model, "a").factors[name][0]) == waits
    check(family, model, ["a", None])


def test_host_memory_that_a_load_reads_is_let_go_of_after_it(family: Family) -> None:
    model = model_of(family, "a", "b", max_loras=1, max_lora_rank=8)
    check(family, model, ["b", None])
    runtime, host = model._multilora, host_of(model, "a")
    for name in ("a", "b"):  # takes the page-locked memory for tables, since that may wait for the device
        runtime.fill(0, host_of(model, name))
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)
    runtime.fill(0, host)
    (event,) = host.readers.values()
    model.delete_adapter("a")
    assert not event.query(), "the load is done: the check says nothing"
    del host
    gc.collect()
    assert event.query(), "it was waited for"


@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_a_load_that_fails_half_way_leaves_an_empty_slot(
    family: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    """After rows of the same rank were kept and some of them written."""
    from hf_multilora.kernels import triton_scatter

    own = Family(family.base, tmp_path, {"x": {"r": 3}, "y": {"r": 3}, "other": {"r": 2}})
    model, real, launch = model_of(own, max_loras=2, backend=backend), torch._foreach_copy_, triton_scatter.Way.__call__
    for _ in range(2):
        check(own, model, ["x", None, "other"])
    model.pin_adapter("other")
    slot = model._multilora.store.slots[model._multilora.store.catalogue.entry("x").id]
    sites = [slots for _, slots in model._multilora.sites.values()]
    old = [(slots, *slots.rows.spans[slot]) for slots in sites]

    def broken(targets: Any, sources: Any) -> None:
        real(targets[:3], sources[:3])
        raise MemoryError("half way")

    def broken_way(way: Any, source: Any) -> None:
        way.pieces //= 2
        way.launchers.clear()
        launch(way, source)
        raise MemoryError("half way")

    monkeypatch.setattr(torch, "_foreach_copy_", broken)
    monkeypatch.setattr(triton_scatter.Way, "__call__", broken_way)
    with pytest.raises(MemoryError):
        logits(model, same_ids(2).cuda(), ["y", None])
    monkeypatch.undo()
    for slots, start, r in old:
        assert slots.laid and slot not in slots.rows.spans
        for rows in (slots.a, slots.b, beside(slots)):
            assert not rows[start : start + r].view(torch.int32).any()
    check(own, model, ["other", None])
    check(own, model, ["y", None, "other"])
    check(own, model, ["x", None, "other"])


# -- memory -----------------------------------------------------------------------------------------
def pools(model: Any) -> Any:
    return {name: (s.a.data_ptr(), s.b.data_ptr(), s.rows.capacity) for name, (_, s) in model._multilora.sites.items()}


def test_device_memory_that_runs_out_is_given_back(tmp_path: Path) -> None:
    """Pools must grow by 4 MiB in each of 8 modules, and there is room for one segment of 20 MiB: it fails half way."""
    torch.manual_seed(0)
    base = llama(hidden_size=1024, intermediate_size=1024, num_attention_heads=8, num_key_value_heads=8)
    own = Family(base, tmp_path, {"a": {"r": 8}, "b": {"r": 4}, "big": {"r": 512}})
    model = model_of(own, "a", "b", max_loras=3)
    inputs = same_ids(3).cuda()
    before = logits(model, inputs, ["a", None, "b"])
    model.load_adapter(str(own.paths["big"]), "big")
    held, rows, start = None, pools(model), torch.cuda.memory_allocated()
    total = torch.cuda.get_device_properties(0).total_memory
    gc.collect(), torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (24 << 20)) / total)
    try:
        for _ in range(3):
            with pytest.raises(
                CapacityError, match=r"'big' .*on cuda:0, which has \d+ free; .*lower max_loras"
            ) as raised:
                logits(model, inputs, ["a", "big", None])
            assert isinstance(raised.value.__cause__, torch.OutOfMemoryError)
            del raised
            gc.collect()
            assert pools(model) == rows
            held = held or torch.cuda.memory_allocated()
            assert held - start < 1 << 20
            assert torch.cuda.memory_allocated() == held, "a failed load keeps no memory"
        torch.testing.assert_close(logits(model, inputs, ["a", None, "b"]), before)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    after = logits(model, inputs, ["a", "big", "b"])
    assert pools(model) != rows
    torch.testing.assert_close(after[[0, 2]], before[[0, 2]], atol=1e-2, rtol=1e-3)
    assert (after[1] - before[1]).abs().max() > 1, "the row of the large adapter is not the base's"


@pytest.mark.parametrize("host", [None, 3])
def test_memory_is_flat_over_many_loads(family: Family, host: int | None) -> None:
    model = model_of(family, max_loras=2, max_cpu_loras=host, max_lora_rank=8)
    names = list(family.paths)

    def use(turn: int) -> None:
        check(family, model, [names[turn % 4], None, names[(turn + 1 + turn // 4 % 2) % 4]])

    for turn in range(8):
        use(turn)
    gc.collect()
    device, report, loads = torch.cuda.memory_allocated(), model.memory_report(), model._multilora.store.loads
    for turn in range(50):
        use(turn)
    gc.collect()
    assert model._multilora.store.loads > loads + 25, "adapters came and went"
    assert torch.cuda.memory_allocated() == device
    now = model.memory_report()
    assert (now.device_bytes, now.host_adapters) == (report.device_bytes, report.host_adapters)
    assert now.host_pinned_bytes == now.host_bytes
