"""The host tier: flat buffers, what is stored once, page-locking, copies, and how much memory it may take."""

from __future__ import annotations

import copy
import mmap
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from hf_multilora.formats import Adapter, AdapterError, LoraFactors
from hf_multilora.host import ALIGN, FEW_ROWS, HostAdapter, HostMemoryError, own_pages, pack
from hf_multilora.staging import Staging
from tests.tiny import Family, assert_rows, llama, logits, same_ids

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def adapter_of(factors: Mapping[str, tuple[torch.Tensor, torch.Tensor, float]]) -> Adapter:
    return Adapter("source", "digest", None, {name: LoraFactors(*pair) for name, pair in factors.items()})


def random_adapter(dtype: torch.dtype = torch.float32, modules: int = 5) -> Adapter:
    made = torch.Generator().manual_seed(0)
    sizes = {f"m{i}": (1 + 3 * i, 17 + 40 * i, 23 + i) for i in range(modules)}
    return adapter_of(
        {
            name: (torch.randn(r, k, generator=made).to(dtype), torch.randn(n, r, generator=made).to(dtype), 0.3 * r)
            for name, (r, k, n) in sizes.items()
        }
    )


def packed(adapter: Adapter, dtype: torch.dtype = torch.float32) -> HostAdapter:
    return pack(adapter, {name: name for name in adapter.factors}, dict.fromkeys(adapter.factors, dtype))


def assert_holds(host: HostAdapter, adapter: Adapter, dtype: torch.dtype = torch.float32) -> None:
    """Every factor bit by bit, as a view of the one buffer; and the check would see another scale."""
    at = host.flat.data_ptr()
    assert list(host.factors) == list(adapter.factors)
    for name, (a, b) in host.factors.items():
        pair = adapter.factors[name]
        assert a.dtype == b.dtype == dtype and a.is_contiguous() and b.is_contiguous()
        assert torch.equal(a, pair.a.to(dtype))
        assert torch.equal(b, (pair.b.float() * pair.scaling).t().to(dtype))
        assert not torch.equal(b, (pair.b.float() * (pair.scaling + 0.1)).t().to(dtype))
        for factor in (a, b):
            assert at <= factor.data_ptr() and factor.data_ptr() + factor.nbytes <= at + host.nbytes
            assert (factor.data_ptr() - at) % ALIGN == 0


# -- one flat buffer --------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stored", DTYPES)
def test_a_flat_buffer_holds_every_factor(dtype: torch.dtype, stored: torch.dtype) -> None:
    adapter = random_adapter(stored)
    host = packed(adapter, dtype)
    assert_holds(host, adapter, dtype)
    sizes = [factor.nbytes for pair in host.factors.values() for factor in pair]
    assert host.nbytes == host.flat.nbytes == sum(-(-size // ALIGN) * ALIGN for size in sizes)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stored", DTYPES)
@pytest.mark.parametrize("rank", [1, FEW_ROWS, FEW_ROWS + 1, 70])
def test_every_way_to_write_gives_the_same_bits(dtype: torch.dtype, stored: torch.dtype, rank: int) -> None:
    made = torch.Generator().manual_seed(rank)
    a, b = (torch.randn(*size, generator=made).to(stored) for size in ((rank, 75), (83, rank)))
    a[0, 0], b[82, -1] = -0.0, -0.0
    adapter = adapter_of({"scaled": (a, b, 2.0625), "plain": (a, b, 1.0), "other": (b.t(), a.t(), 2.0625)})
    host = packed(adapter, dtype)
    for name, pair in adapter.factors.items():
        want = pair.a.to(dtype), (pair.b.t().to(torch.float32) * pair.scaling).to(dtype)
        for got, factor in zip(host.factors[name], want, strict=True):
            assert torch.equal(got.view(torch.uint8), factor.contiguous().view(torch.uint8))
    assert not torch.equal(host.factors["scaled"][1], host.factors["plain"][1])


@pytest.mark.parametrize("names", [["m0"], ["m3", "m4"], ["m4", "m1"], ["m0", "m1", "m2", "m3", "m4"]])
def test_on_a_host_an_adapter_is_where_it_is(names: list[str]) -> None:
    host = packed(random_adapter())
    want = [factor for name in names for factor in host.factors[name]]
    staging = Staging(torch.device("cpu"))
    targets = [torch.zeros_like(factor) for factor in want]
    staging.move(host, names, targets)
    assert all(map(torch.equal, targets, want))
    staging.move(HostAdapter(host.flat.flip(0), host.places), names, targets)
    assert not any(map(torch.equal, targets, want)), "those of another adapter are told apart"
    assert staging.nbytes == 0 and not staging.fits, "a host needs no other buffer"


def test_modules_of_different_dtypes() -> None:
    adapter = random_adapter()
    dtypes = {name: DTYPES[i % 3] for i, name in enumerate(adapter.factors)}
    host = pack(adapter, {name: name for name in dtypes}, dtypes)
    for name, (a, b) in host.factors.items():
        assert a.dtype == b.dtype == dtypes[name] and torch.equal(a, adapter.factors[name].a.to(dtypes[name]))


class Peak(TorchDispatchMode):
    """Most bytes of tensors made inside that lived at once."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[int, tuple[StorageWeakRef, int]] = {}
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            storage = result.untyped_storage()
            self.seen[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.seen = {key: value for key, value in self.seen.items() if not value[0].expired()}
        self.most = max(self.most, sum(size for _, size in self.seen.values()))
        return result


def test_packing_holds_the_buffer_and_one_module_more() -> None:
    made = torch.Generator().manual_seed(0)
    size = 8 * 4096 * 4
    adapter = adapter_of(
        {f"m{i}": (torch.randn(8, 4096, generator=made), torch.randn(4096, 8, generator=made), 2.0) for i in range(20)}
    )
    given = sum(t.nbytes for pair in adapter.factors.values() for t in (pair.a, pair.b))
    with Peak() as peak:
        host = packed(adapter, torch.bfloat16)
    assert host.nbytes == 20 * size
    assert host.nbytes < peak.most - given < host.nbytes + 4 * size + 2 * mmap.PAGESIZE
    with Peak() as naive:
        kept = [p.b.float() * 2 for p in adapter.factors.values()]
    assert kept and naive.most >= 20 * size, "the measure sees copies that pile up"


# -- stored once ------------------------------------------------------------------------------------
def shared(change: Any = None, *, scale: float = 2.0) -> HostAdapter:
    """Three modules that share an A, two of them a B: as objects or as bits; `change` is made to the last module's."""
    made = torch.Generator().manual_seed(0)
    a, b, other = (torch.randn(*size, generator=made) for size in ((4, 64), (64, 4), (64, 4)))
    last = (a.clone(), b.clone())
    if change is not None:
        change(*last)
    return packed(adapter_of({"q": (a, b, 2.0), "k": (a, other, 2.0), "v": (*last, scale)}))


def test_factors_that_are_the_same_are_stored_once() -> None:
    host = shared()
    one = 4 * 64 * 4
    assert host.nbytes == 3 * one
    assert host.places["q"] == host.places["v"] and host.places["q"][0] == host.places["k"][0]
    assert host.places["q"][1] != host.places["k"][1]
    assert host.factors["q"][0].data_ptr() == host.factors["v"][0].data_ptr()


def test_factors_that_nearly_are_the_same_are_not() -> None:
    def nudge(a: torch.Tensor, b: torch.Tensor) -> None:
        a[3, 60] = a[3, 60].nextafter(torch.tensor(9.0))

    def negative_zero(a: torch.Tensor, b: torch.Tensor) -> None:
        b[60, 3] *= -1

    once = shared().nbytes
    for made in (shared(nudge), shared(negative_zero), shared(scale=3.0)):
        assert made.nbytes == once + 4 * 64 * 4
    zeros = adapter_of(
        {"q": (torch.zeros(2, 8), torch.ones(8, 2), 1.0), "k": (-torch.zeros(2, 8), torch.ones(8, 2), 1.0)}
    )
    host = packed(zeros)
    assert (
        host.nbytes == 3 * ALIGN and host.factors["k"][0].signbit().all() and not host.factors["q"][0].signbit().any()
    )


def test_an_adapter_with_shared_factors_answers_right(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    own = Family(llama(), tmp_path, {"x": {"r": 3, "targets": ["q_proj", "k_proj", "v_proj"]}})
    file = own.paths["x"] / "adapter_model.safetensors"
    tensors = load_file(file)
    for key in tensors:
        if "k_proj.lora_A" in key or "v_proj.lora_A" in key:
            tensors[key] = tensors[key.replace("k_proj", "q_proj").replace("v_proj", "q_proj")].clone()
    save_file(tensors, file)
    model = own.model()
    assert_rows(logits(model, same_ids(2), ["x", None]), own.truth(same_ids(2), ["x", None]))
    places = model._multilora.store.catalogue.entry("x").host.places
    assert len({pair[0] for pair in places.values()}) == 2 and len({pair[1] for pair in places.values()}) == 6


# -- refusals ---------------------------------------------------------------------------------------
def test_one_module_under_two_names() -> None:
    a, b = torch.randn(2, 8), torch.randn(8, 2)
    names, dtypes = {"one": "m", "two": "m"}, {"m": torch.bfloat16}
    host = pack(adapter_of({"one": (a, b, 1.0), "two": (a + 1e-8, b, 1.0)}), names, dtypes)
    assert list(host.factors) == ["m"] and host.nbytes == 2 * ALIGN
    for wrong in ((a + 1, b, 1.0), (a, b + 1, 1.0), (a, b, 2.0)):
        with pytest.raises(AdapterError, match=r"two and m are one module .*source must hold the same factors"):
            pack(adapter_of({"one": (a, b, 1.0), "two": wrong}), names, dtypes)


def test_values_out_of_range() -> None:
    huge = adapter_of({"m": (torch.ones(2, 8), torch.full((8, 2), 3e4), 4.0)})
    assert packed(huge, torch.bfloat16).factors["m"][1].isfinite().all()
    with pytest.raises(AdapterError, match=r"m: the factors of source must be finite in torch\.float16"):
        packed(huge, torch.float16)


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory")])
def test_no_memory_for_the_buffer(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise error

    adapter = random_adapter()
    need = packed(adapter).nbytes
    monkeypatch.setattr(torch, "empty", refuse)
    with pytest.raises(HostMemoryError, match=str(need)) as raised:
        packed(adapter)
    assert raised.value.nbytes == need and raised.value.__cause__ is error
    error = RuntimeError("something else")
    with pytest.raises(RuntimeError, match="something else"):
        packed(adapter)


# -- copies of a model ------------------------------------------------------------------------------
class Cudart:
    """The part of CUDA's runtime that registers memory."""

    def __init__(self, code: int = 0) -> None:
        self.code, self.registered, self.calls = code, dict[int, int](), 0

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        self.calls += 1
        assert flags == 1 and address % mmap.PAGESIZE == 0
        if not self.code:
            self.registered[address] = size
        return self.code

    def cudaHostUnregister(self, address: int) -> int:
        del self.registered[address]
        return 0

    def cudaGetErrorString(self, code: int) -> str:
        return f"error {code} of the driver"


@pytest.mark.parametrize("how", [copy.deepcopy, lambda host: pickle.loads(pickle.dumps(host))], ids=["copy", "pickle"])
def test_a_copy_is_another_buffer(monkeypatch: pytest.MonkeyPatch, how: Any) -> None:
    adapter = random_adapter()
    host = packed(adapter)
    monkeypatch.setattr(torch.cuda, "cudart", Cudart)
    host.pin()
    other = how(host)
    assert_holds(other, adapter)
    assert host.pinned and not other.pinned and other.flat.data_ptr() % mmap.PAGESIZE == 0
    host.flat.zero_()
    assert_holds(other, adapter)
    other.pin()
    assert other.pinned


def test_buffers_share_no_memory_page() -> None:
    sizes = [1, ALIGN, mmap.PAGESIZE, mmap.PAGESIZE + 1, 3 * mmap.PAGESIZE, 7, 7, 7]
    buffers = [own_pages(size) for size in sizes]
    assert [buffer.nbytes for buffer in buffers] == sizes
    pages = [
        page
        for b in buffers
        for page in range(b.data_ptr() // mmap.PAGESIZE, (b.data_ptr() + b.nbytes - 1) // mmap.PAGESIZE + 1)
    ]
    assert len(pages) == len(set(pages)) == 11
    for buffer in buffers:
        storage = buffer.untyped_storage()
        last = -(-(buffer.data_ptr() + buffer.nbytes) // mmap.PAGESIZE) * mmap.PAGESIZE
        assert buffer.data_ptr() % mmap.PAGESIZE == 0 and last <= storage.data_ptr() + storage.nbytes()
