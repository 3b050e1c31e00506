"""Bytes that come to a device ahead of their use. The route of a CUDA device is run on the CPU: a stream's copies are
made when its event is waited for, so that who does not wait finds other bytes."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hf_multilora import CapacityError
from hf_multilora import filling as filling_module
from hf_multilora import staging as staging_module
from hf_multilora.host import HostAdapter
from hf_multilora.kernels.backends import KernelError, has_triton, interpreted
from tests.test_prefetch import RANKS, settle
from tests.test_scarcity import failing_at, is_buffer, is_pool, pools
from tests.tiny import Family, assert_rows, llama, logits, same_ids


class Deferred(TorchDispatchMode):
    """Copies inside are written down, to be made later."""

    def __init__(self) -> None:
        super().__init__()
        self.copies: list[Callable[[], Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ != "copy_":
            return func(*args, **(kwargs or {}))
        args[0].fill_(77)  # what is read too early
        self.copies.append(lambda: func(*args, **(kwargs or {})))
        return args[0]


class Side:
    """A stream beside the current one. Entered as a context: the current one."""

    current: Deferred | None = None

    def __init__(self, device: Any) -> None:
        self.device = device

    def wait_event(self, event: Event) -> None:
        event.synchronize()


class Event:
    def __init__(self) -> None:
        self.copies: list[Callable[[], Any]] = []

    def record(self, stream: Any = None) -> None:
        if stream is None:
            assert Side.current is not None
            self.copies, Side.current.copies = Side.current.copies, []

    def query(self) -> bool:
        return not self.copies

    def synchronize(self) -> None:
        while self.copies:
            self.copies.pop()()


class Current:
    """The stream of whoever computes."""

    waits = True

    def wait_event(self, event: Event) -> None:
        if self.waits:
            event.synchronize()

    def synchronize(self) -> None:
        pass


@contextlib.contextmanager
def entered(stream: Side) -> Iterator[None]:
    with Deferred() as Side.current:
        yield
    Side.current = None


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Family:
    torch.manual_seed(0)
    return Family(llama(), tmp_path_factory.mktemp("adapters"), {name: {"r": r} for name, r in RANKS.items()})


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU is taken for a device to which bytes are brought."""
    for module in (staging_module, filling_module):
        monkeypatch.setattr(module, "remote", lambda device: True)
    for name, fake in {"Stream": Side, "stream": entered, "Event": Event}.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    current = Current()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(HostAdapter, "pin", lambda host: None)


def model_of(family: Family, **settings: Any) -> Any:
    """A model with a and b in its two slots, all adapters in host memory."""
    model = family.model(**({"max_loras": 2, "backend": "torch"} | settings))
    check(family, model, ["a", None, "b"])
    return model


def check(family: Family, model: Any, names: Any) -> None:
    inputs = same_ids(len(names))
    assert_rows(logits(model, inputs, names), family.truth(inputs, names))


def host_of(model: Any, name: str) -> HostAdapter:
    return model._multilora.store.catalogue.entry(name).host


def ahead(model: Any) -> list[str]:
    """Adapters whose bytes are on the device ahead of their use, oldest first."""
    names = {id(entry.host): entry.name for entry in model._multilora.store.catalogue}
    (staging,) = model._multilora.staging.values()
    return [names.get(id(host), "?") for host in staging.ahead.arrivals]


class Copied(TorchDispatchMode):
    """Bytes that copies from host copies of adapters take."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        hosts = [entry.host for entry in model._multilora.store.catalogue if entry.host is not None]
        self.hosts, self.bytes = {host.flat.untyped_storage().data_ptr() for host in hosts}, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ == "copy_" and args[1].untyped_storage().data_ptr() in self.hosts:
            self.bytes += args[1].nbytes
        return func(*args, **(kwargs or {}))


KERNEL = pytest.param(
    "auto", marks=pytest.mark.skipif(not (has_triton() and interpreted()), reason="Triton must run on the CPU")
)


# -- what it does -----------------------------------------------------------------------------------
@pytest.mark.parametrize("backend", ["torch", KERNEL])
def test_a_call_moves_what_came_ahead_to_its_slot(family: Family, device: None, backend: str) -> None:
    model = model_of(family, backend=backend)  # "auto": computed by torch on a CPU, moved by the kernel
    rows, slots, base = pools(model), dict(model._multilora.store.slots), model.memory_report().staging_bytes
    model.prefetch(["c", "a", None, "d"])
    assert ahead(model) == ["c", "d"]
    assert pools(model) == rows and model._multilora.store.slots == slots
    c, d = host_of(model, "c").nbytes, host_of(model, "d").nbytes
    assert model.memory_report().staging_bytes == base + c + d
    with Copied(model) as seen:
        check(family, model, ["c", None, "d"])
    assert seen.bytes == c + d, "what was brought, which here is copied when it is waited for, and no more"
    assert ahead(model) == [] and not model._multilora.store.awaited
    with Copied(model) as seen:
        check(family, model, ["e", None, "d"])
    assert seen.bytes >= host_of(model, "e").nbytes, "a copy that was not made ahead is seen"
    model.prefetch(["c"])
    check(family, model, ["c", None, "e"])


def test_who_does_not_wait_finds_other_bytes(family: Family, device: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control."""
    model = model_of(family)
    model.prefetch(["c"])
    monkeypatch.setattr(Current, "waits", False)
    got = logits(model, same_ids(1), ["c"])
    assert not torch.allclose(got, family.truth(same_ids(1), ["c"]), atol=1e-2)


def test_again_and_again(family: Family, device: None) -> None:
    """A stream of batches; memory stays what it was."""
    model = model_of(family, max_lora_rank=8)
    names, sizes = list(RANKS), set[int]()
    batches = [{"adapter_names": [names[i % 5], None, names[(2 * i + 1) % 5]]} for i in range(25)]
    for i, batch in enumerate(model.prefetched(batches)):
        check(family, model, batch["adapter_names"])
        if i >= 10:
            sizes.add(model.memory_report().staging_bytes)
    most = sum(sorted(host_of(model, name).nbytes for name in names)[-2:])
    assert max(sizes) <= min(sizes) + most


def test_what_was_asked_for_last_stays(family: Family, device: None) -> None:
    model = model_of(family, max_loras=1)
    check(family, model, ["a", None])
    for names, want in ((["b"], "b"), (["b"], "b"), (["c"], "bc"), (["d"], "cd"), (["c"], "dc"), (["e"], "ce")):
        model.prefetch(names)
        assert "".join(sorted(ahead(model))) == "".join(sorted(want)), "at most 2 x max_loras"
    model.prefetch(["a"])
    assert sorted(ahead(model)) == ["c", "e"], "which is in a slot"
    for name in RANKS:
        check(family, model, [name, None])
    assert ahead(model) == []


def test_it_is_read_and_brought(family: Family, device: None) -> None:
    """An adapter that left host memory: the thread reads it, and brings it."""
    model = model_of(family)
    store = model._multilora.store
    store._drop_host(store.catalogue.entry("c"))
    model.prefetch(["c", "d"])
    settle(model)
    assert sorted(ahead(model)) == ["c", "d"]
    with Copied(model) as seen:
        check(family, model, ["c", None, "d"])
    assert seen.bytes == host_of(model, "c").nbytes + host_of(model, "d").nbytes


def test_while_a_graph_is_captured_nothing_is_brought(family: Family, device: None) -> None:
    model = model_of(family)
    model._multilora.routing.capturing = True
    model.prefetch(["c"])
    assert ahead(model) == []
    model._multilora.routing.capturing = False
    check(family, model, ["c", None])


# -- identity ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("change", ["replace", "delete", "evict", "dtype"])
def test_bytes_of_what_an_adapter_was_are_never_used(family: Family, device: None, change: str) -> None:
    model = model_of(family)
    model.load_adapter(str(family.paths["c"]), "x")
    model.prefetch(["x", "d"])
    assert sorted(ahead(model)) == ["d", "x"]
    store = model._multilora.store
    if change == "replace":
        model.load_adapter(str(family.paths["e"]), "x", load_inplace=True)
    elif change == "delete":
        model.delete_adapter("x")
        model.load_adapter(str(family.paths["e"]), "x")
    elif change == "evict":
        store._drop_host(store.catalogue.entry("x"))
    else:
        model.double()
        assert not model._multilora.staging, "none of it"
    if change != "dtype":
        assert ahead(model) == ["d"], "the memory is free"
        inputs, truth = same_ids(2), ["c" if change == "evict" else "e", None]
        assert_rows(logits(model, inputs, ["x", None]), family.truth(inputs, truth))
    else:
        got = logits(model, same_ids(2), ["x", None])
        want = model_of(family).double()
        torch.testing.assert_close(got, logits(want, same_ids(2), ["c", None]), atol=1e-9, rtol=1e-9)


# -- memory that runs out ---------------------------------------------------------------------------
def test_no_device_memory_ahead_of_use(
    family: Family, device: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = model_of(family)
    out = torch.OutOfMemoryError("CUDA out of memory")
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(torch, "empty", failing_at(1, out, torch.empty, is_buffer))
        model.prefetch(["c", "d"])
    said = [r.getMessage() for r in caplog.records if "ahead of its use" in r.getMessage()]
    assert len(said) == 1 and "'c'" in said[0] and f"{host_of(model, 'c').nbytes} more bytes" in said[0]
    assert ahead(model) == ["d"], "the next one had room"
    check(family, model, ["c", None, "d"])


@pytest.mark.parametrize("number", [1, 7])
def test_what_came_ahead_gives_way_to_pools(
    family: Family, device: None, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Pools that find no memory to grow find it where other adapters' bytes were."""
    model = model_of(family)
    model.prefetch(["c", "d"])
    tall = Family(family.base, family.paths["a"].parent / f"more{number}", {"tall": {"r": 20}})
    model.load_adapter(str(tall.paths["tall"]), "tall")
    with monkeypatch.context() as patch:
        patch.setattr(torch, "zeros", failing_at(number, torch.OutOfMemoryError("out"), torch.zeros, is_pool))
        got = logits(model, same_ids(2), ["tall", None])
    assert_rows(got, tall.truth(same_ids(2), ["tall", None]))
    assert ahead(model) == []
    check(family, model, ["c", None, "d"])


def test_memory_that_is_short_all_the_same(family: Family, device: None, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(family)
    model.prefetch(["c", "d"])
    tall = Family(family.base, family.paths["a"].parent / "most", {"tall": {"r": 20}})
    model.load_adapter(str(tall.paths["tall"]), "tall")
    rows, real = {name: pool[:5] for name, pool in pools(model).items()}, torch.zeros

    def refuse(*size: Any, **kwargs: Any) -> Any:
        if is_pool(*size, **kwargs):
            raise torch.OutOfMemoryError("out")
        return real(*size, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "zeros", refuse)
        with pytest.raises(CapacityError, match=r"'tall' cannot be brought to its slot: .*; lower max_loras"):
            logits(model, same_ids(2), ["tall", "a"])
    assert {name: pool[:5] for name, pool in pools(model).items()} == rows
    check(family, model, ["c", None, "a"])


def test_no_memory_for_the_move_itself(family: Family, device: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes that were there when it failed are brought again."""
    model = model_of(family)
    model.prefetch(["c"])
    out = torch.OutOfMemoryError("CUDA out of memory")
    with monkeypatch.context() as patch:
        patch.setattr(torch, "_foreach_copy_", failing_at(1, out, torch._foreach_copy_))
        with pytest.raises(CapacityError, match=r"'c' .*: the copy of its factors needs \d+ bytes on cpu"):
            logits(model, same_ids(2), ["c", "a"])
    assert ahead(model) == []
    check(family, model, ["c", None, "a"])


def test_a_kernel_that_cannot_be_built(family: Family, device: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its error is the usual one, the slot is empty, and the base answers; with the kernel built, all is as before."""
    pytest.importorskip("triton")
    if not interpreted():
        pytest.skip("Triton must run on the CPU")
    model = model_of(family, backend="auto")
    calls: list[tuple[int, ...]] = []

    def broken(kernel: Any, grid: tuple[int, ...], *_: Any) -> None:
        calls.append(grid)
        raise KernelError("the Triton kernel scatter_kernel must compile on this machine, it did not")

    model.prefetch(["c"])
    with monkeypatch.context() as patch:
        patch.setattr("hf_multilora.kernels.launch.launch", broken)
        with pytest.raises(KernelError, match="must compile on this machine"):
            logits(model, same_ids(2), ["c", "a"])
        assert calls and sorted(filter(None, model.memory_report().slots)) == ["a"]
        check(family, model, ["a", None])
    check(family, model, ["c", None, "a"])
