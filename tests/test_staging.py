"""Staging: one copy into a buffer that is kept, and from there to the targets. The device's route is run on the CPU,
by a name that says "cuda", with the kernel (in Triton's interpreter) and without."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hf_multilora import staging as module
from hf_multilora.ahead import Arrival, Bytes
from hf_multilora.host import HostAdapter
from hf_multilora.kernels.backends import has_triton, interpreted
from hf_multilora.staging import FITS, Staging
from tests.test_host import adapter_of, packed
from tests.tiny import Family, assert_rows, llama, logits, same_ids

KERNELS = pytest.mark.skipif(
    not (has_triton() and interpreted()), reason="Triton on the CPU needs TRITON_INTERPRET=1 before its import"
)


class Device(str):
    """Tensors lie on the CPU, Staging takes it for a CUDA device."""

    type = "cuda"


class Waited:
    """An event, or a stream, that does nothing on the CPU."""

    waited = False

    def wait_event(self, event: Any) -> None:
        event.waited = True

    def record(self, stream: Any) -> None:
        self.stream = stream

    def query(self) -> bool:
        return self.waited

    def synchronize(self) -> None:
        pass


def use_stream(monkeypatch: pytest.MonkeyPatch, stream: Waited) -> None:
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)


@pytest.fixture(params=[False, pytest.param(True, marks=KERNELS)], ids=["copies", "kernel"])
def kept(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Staging:
    use_stream(monkeypatch, Waited())
    monkeypatch.setattr(torch.cuda, "Event", Waited)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    device: Any = Device("cpu")
    return Staging(device, kernel=request.param)


def host_of(seed: int, r: int = 3, modules: int = 4, dtype: torch.dtype = torch.float32) -> HostAdapter:
    made = torch.Generator().manual_seed(seed)
    return packed(
        adapter_of(
            {
                f"m{i}": (torch.randn(r + i, 17, generator=made), torch.randn(23, r + i, generator=made), 0.5)
                for i in range(modules)
            }
        ),
        dtype,
    )


def targets_of(host: HostAdapter, names: list[str]) -> list[Tensor]:
    """Places in pools: rows of A lie in turns with another module's, those of B together."""
    found = []
    for name in names:
        for i, factor in enumerate(host.factors[name]):
            pool = torch.full((3 * (factor.shape[0] + 2), factor.shape[1]), 7, dtype=factor.dtype)
            found.append(pool[1::3][1:-1] if i == 0 else pool[1 : 1 + factor.shape[0]])
    return found


def move(kept: Staging, host: HostAdapter, names: list[str] | None = None) -> None:
    """Moves, and checks the targets: bit by bit the host's; other values would be seen."""
    names = list(host.places) if names is None else names
    targets = targets_of(host, names)
    kept.move(host, names, targets)
    want = [factor for name in names for factor in host.factors[name]]
    for got, factor in zip(targets, want, strict=True):
        assert got.dtype == factor.dtype and torch.equal(got, factor) and not torch.equal(got, -factor)


class Operations(TorchDispatchMode):
    """Names of the operations inside, and the bytes that each copy writes into the buffer."""

    def __init__(self, kept: Staging) -> None:
        super().__init__()
        self.kept = kept
        self.names: list[str] = []
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        if self.names[-1] == "copy_" and args[0].untyped_storage().data_ptr() == self.kept.buffer.data_ptr():
            if args[1].data_ptr() != args[0].data_ptr():  # Triton's interpreter copies its arguments onto themselves
                self.sizes.append(args[0].nbytes)
        return func(*args, **(kwargs or {}))


def copied(kept: Staging, host: HostAdapter, names: list[str] | None = None) -> int:
    """Bytes that are copied to the buffer."""
    names = list(host.places) if names is None else names
    targets = targets_of(host, names)
    with Operations(kept) as seen:
        kept.move(host, names, targets)
    return sum(seen.sizes)


def test_adapters_of_one_shape_share_buffer_and_what_follows_from_their_shape(kept: Staging) -> None:
    hosts = [host_of(seed) for seed in range(3)]
    move(kept, hosts[0])
    before, fits, views = kept.buffer.data_ptr(), dict(kept.fits), kept.views[2]
    for host in (hosts[1], hosts[2], hosts[0]):
        targets = targets_of(host, list(host.places))
        with Operations(kept) as seen:
            kept.move(host, list(host.places), targets)
        assert seen.sizes == [host.nbytes] and "as_strided" not in seen.names and "cat" not in seen.names
        move(kept, host)
        assert kept.buffer.data_ptr() == before and kept.fits == fits and kept.views[2] is views
    with Operations(kept) as seen:
        move(kept, host_of(1, r=9))
    assert {"empty", "cat" if kept.kernel else "as_strided"} <= set(seen.names), "what a new shape needs is seen"
    assert len(kept.fits) == 2


def test_shapes_that_come_again_are_known(kept: Staging) -> None:
    hosts = [host_of(r, r=r) for r in range(1, FITS + 3)]
    for host in hosts:
        move(kept, host)
    assert list(kept.fits) == [host.key for host in hosts[-FITS:]]
    first = kept.fits[hosts[2].key]
    move(kept, hosts[2])
    assert kept.fits[hosts[2].key] is first and list(kept.fits)[-1] == hosts[2].key
    move(kept, hosts[0])
    assert len(kept.fits) == FITS and hosts[3].key not in kept.fits, "the least recently used one went"


def test_a_larger_adapter_gets_a_larger_buffer_and_smaller_ones_keep_it(kept: Staging) -> None:
    small, large = host_of(0), host_of(1, r=40)
    move(kept, small)
    assert kept.buffer.nbytes == small.nbytes < large.nbytes
    move(kept, large)
    assert kept.buffer.nbytes == large.nbytes == kept.nbytes
    before = kept.buffer.data_ptr()
    for host in (small, host_of(2, dtype=torch.bfloat16), large):
        move(kept, host)
        assert kept.buffer.data_ptr() == before and kept.buffer.nbytes == large.nbytes


@pytest.mark.parametrize("names", [["m0"], ["m3"], ["m1", "m2"], ["m2", "m1"], ["m0", "m3"]])
def test_some_modules_need_the_bytes_from_the_first_to_the_last(kept: Staging, names: list[str]) -> None:
    hosts = [host_of(seed) for seed in range(2)]
    places = [place for name in names for place in hosts[0].places[name]]
    span = max(p.end for p in places) - min(p.offset for p in places)
    for host in hosts:
        assert copied(kept, host, names) == span == kept.buffer.nbytes
        move(kept, host, names)
    move(kept, hosts[0])
    move(kept, hosts[1], names)


def test_shapes_that_take_the_same_bytes_are_told_apart(kept: Staging) -> None:
    one = packed(adapter_of({"m": (torch.randn(2, 32), torch.randn(64, 2), 1.0)}))
    two = packed(adapter_of({"m": (torch.randn(4, 16), torch.randn(32, 4), 1.0)}))
    assert one.nbytes == two.nbytes
    for host in (one, two, one):
        move(kept, host)
    one.key = two.key  # two shapes of one hash
    for host in (one, two, one):
        move(kept, host)


def test_factors_that_are_stored_once_are_copied_once(kept: Staging) -> None:
    a, b = torch.randn(3, 64), torch.randn(64, 3)
    host = packed(adapter_of({"q": (a, b, 2.0), "k": (a, b * 2, 2.0), "v": (a, b, 2.0)}))
    assert copied(kept, host) == host.nbytes == 3 * 3 * 64 * 4
    move(kept, host)


def test_targets_of_another_dtype_get_converted_values(kept: Staging) -> None:
    """A host copy that is finer than the module is kept, and rounded on its way."""
    host = host_of(0)
    targets = [target.bfloat16() for target in targets_of(host, list(host.places))]
    for _ in range(2):
        kept.move(host, list(host.places), targets)
        want = [factor.bfloat16() for name in host.places for factor in host.factors[name]]
        assert all(map(torch.equal, targets, want))
    move(kept, host)


# -- begun early, or ahead --------------------------------------------------------------------------
@pytest.mark.parametrize("whole", [True, False])
def test_a_copy_that_was_begun_is_not_made_again(kept: Staging, whole: bool) -> None:
    first, second = host_of(0), host_of(1)
    second._unpin = True  # pinned
    names = ["m1", "m2"]
    move(kept, first, None if whole else names)
    with Operations(kept) as seen:
        kept.begin(second, whole)
    places = [place for name in second.places if whole or name in names for place in second.places[name]]
    assert seen.sizes == [max(p.end for p in places) - min(p.offset for p in places)]
    targets = targets_of(second, names)
    with Operations(kept) as seen:
        kept.move(second, names, targets)
    assert not seen.sizes
    assert all(map(torch.equal, targets, [factor for name in names for factor in second.factors[name]]))
    kept.finish(second)
    kept.begin(second, whole)
    move(kept, first)  # another one than what was begun
    kept.begin(first, whole)
    assert kept.here is None, "what is not page-locked is not begun"
    move(kept, second)


def arrive(kept: Staging, host: HostAdapter, first: int = 0, end: int | None = None) -> Waited:
    event = Waited()
    kept.ahead.arrivals[host] = Arrival(Bytes(host.flat[first:end].clone(), first), event)
    return event


def test_bytes_that_came_ahead_are_used_once_and_not_copied(kept: Staging) -> None:
    one, two, names = host_of(0), host_of(1), list(host_of(0).places)
    move(kept, one)
    event, before = arrive(kept, two), kept.nbytes
    assert before == one.nbytes + two.nbytes
    kept.begin(one, True)
    assert kept.here is None and not event.waited, "they are another's"
    kept.begin(two, True)
    assert event.waited and not kept.ahead.arrivals
    kept.here[1].data.neg_()  # marks them: the flipped bits must be what is found
    targets, want = targets_of(two, names), HostAdapter(kept.here[1].data, two.places)
    with Operations(kept) as seen:
        kept.move(two, names, targets)
    assert not seen.sizes
    factors = [factor for name in names for factor in want.factors[name]]
    assert all(torch.equal(t.view(torch.int32), f.view(torch.int32)) for t, f in zip(targets, factors, strict=True))
    kept.ahead.stream = side = Waited()
    kept.finish(two)
    assert side.waited is False and two.readers[kept.device].waited, "what is brought later comes after it"
    assert kept.nbytes == one.nbytes
    move(kept, two)


def test_bytes_that_came_ahead_and_do_not_suffice(kept: Staging) -> None:
    host = host_of(0)
    arrive(kept, host, host.places["m1"][0].offset, host.places["m2"][1].end)
    kept.begin(host, True)
    move(kept, host)
    arrive(kept, host, host.places["m1"][0].offset, host.places["m2"][1].end)
    kept.begin(host, True)
    assert copied(kept, host, ["m2"]) == 0, "here they do"


def test_an_adapter_that_goes_takes_its_bytes_along(kept: Staging) -> None:
    one, two = host_of(0), host_of(1)
    arrive(kept, one), arrive(kept, two)
    size = two.nbytes
    del one
    assert kept.nbytes == size and list(kept.ahead.arrivals) == [two]
    assert kept.ahead.keep({two}) is False and kept.nbytes == size
    assert kept.ahead.keep(()) is True and kept.nbytes == 0


# -- nobody waits -----------------------------------------------------------------------------------
def load(kept: Staging, host: HostAdapter) -> None:
    host._unpin = True  # pinned
    kept.begin(host, whole=True)
    move(kept, host)
    kept.finish(host)


def test_a_load_is_waited_for_by_other_streams_and_by_who_frees_its_host_memory(
    kept: Staging, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two, first, other = host_of(0), host_of(1), Waited(), Waited()
    use_stream(monkeypatch, first)
    for host in (one, two):
        load(kept, host)
        kept.join()
        event = host.readers[kept.device]
        assert event.stream is first and not event.waited, "calls on the same stream come after it anyway"
    buffer = kept.buffer.data_ptr()
    load(kept, one)
    assert kept.buffer.data_ptr() == buffer
    last = one.readers[kept.device]
    use_stream(monkeypatch, other)
    kept.join()
    assert last.waited and not two.readers[kept.device].waited
    last.waited = False
    load(kept, two)
    assert last.waited and two.readers[kept.device].stream is other, "the buffer is read until then"
    assert not kept.ways


def test_a_copy_that_still_reads_the_same_host_memory_is_not_forgotten(kept: Staging) -> None:
    host = host_of(0)
    for done in (True, False):
        earlier = host.readers[kept.device] = Waited()
        earlier.query = lambda done=done: done
        load(kept, host)
        assert earlier.waited == (not done) and host.readers[kept.device] is not earlier


@pytest.mark.parametrize("why", ["pinned", "pageable", "captured"])
def test_who_must_wait(kept: Staging, monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    """Pageable memory may be read at any time; while a graph is captured, CUDA refuses to wait, as it must."""
    host, waits = host_of(0), list[int]()
    move(kept, host)
    monkeypatch.setattr(Waited, "synchronize", lambda stream: waits.append(1))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: why == "captured")
    if why == "pageable":
        kept.finish(host)
    else:
        host._unpin = True
        kept.begin(host, whole=True)
        assert len(waits) == (why == "captured"), "before any copy"
        kept.finish(host)
    assert bool(waits) == (why != "pinned")


@KERNELS
def test_the_way_to_targets_that_stay(kept: Staging) -> None:
    if not kept.kernel:
        pytest.skip("copies need views")
    hosts, names = [host_of(seed) for seed in range(3)], list(host_of(0).places)
    targets = targets_of(hosts[0], names)
    assert not kept.again(hosts[0], names, 5) and not any((target != 7).any() for target in targets)
    kept.move(hosts[0], names, targets, slot=5)
    for host in (hosts[1], hosts[2], hosts[0]):
        assert kept.again(host, names, 5)
        factors = [factor for name in names for factor in host.factors[name]]
        assert all(map(torch.equal, targets, factors)) and not torch.equal(targets[0], -factors[0])
    assert not kept.again(hosts[0], names, 4) and not kept.again(host_of(0, r=9), names, 5)
    assert not kept.again(hosts[0], names[::-1], 5)


# -- failures ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("number", [1, 2])
def test_a_buffer_that_cannot_grow(kept: Staging, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """The old one is given up first; afterwards both shapes can be had."""
    small, large, calls = host_of(0), host_of(1, r=40), [0]
    move(kept, small)
    empty, targets = torch.empty, targets_of(large, list(large.places))

    def refuse(*args: Any, **kwargs: Any) -> Any:
        calls[0] += kwargs.get("dtype") == torch.uint8
        if calls[0] == number:
            raise torch.OutOfMemoryError("out")
        return empty(*args, **kwargs)

    monkeypatch.setattr(torch, "empty", refuse)
    with pytest.raises(torch.OutOfMemoryError):
        kept.move(large, list(large.places), targets)
    monkeypatch.setattr(torch, "empty", empty)
    assert not kept.views[2] and kept.buffer.nbytes == (small.nbytes if number == 1 else 0)
    for host in (small, large, small):
        move(kept, host)


@pytest.mark.parametrize("what", ["views_of", "span_of"])
def test_a_shape_that_was_interrupted(kept: Staging, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    one, two = host_of(0), host_of(1, r=5)
    move(kept, one)
    if kept.kernel and what == "views_of":
        pytest.skip("the kernel needs no views")

    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(module, what, interrupted)
        with pytest.raises(KeyboardInterrupt):
            move(kept, two)
    for host in (two, one):
        move(kept, host)


# -- zeros ------------------------------------------------------------------------------------------
def test_zeros_are_written_to_targets_alone(kept: Staging) -> None:
    targets = targets_of(host_of(0), ["m0", "m3"])
    whole = [target.as_strided((target.untyped_storage().nbytes() // 4,), (1,), 0) for target in targets]
    before = [int((pool == 7).sum()) for pool in whole]
    kept.wipe(targets)
    assert not any(target.any() for target in targets)
    left = [int((pool == 7).sum()) for pool in whole]
    assert left == [n - target.numel() for n, target in zip(before, targets, strict=True)] and all(left)


@KERNELS
def test_zeros_without_memory_for_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    device: Any = Device("cpu")
    kept, targets = Staging(device, kernel=True), targets_of(host_of(0), ["m0", "m3"])
    asked: list[int] = []

    def refuse(rows: Any) -> bool:
        asked.append(len(rows))
        raise torch.OutOfMemoryError("out")

    monkeypatch.setattr("hf_multilora.kernels.triton_scatter.Wipe", lambda: refuse)
    kept.wipe(targets)
    assert asked == [4] and not any(target.any() for target in targets)


def test_a_model_s_copy_has_stagings_of_its_own(tmp_path: Path) -> None:
    own = Family(llama(num_hidden_layers=1), tmp_path, {"x": {"r": 3}, "y": {"r": 2}})
    model = own.model(max_loras=1)
    logits(model, same_ids(2), ["x", None])
    twin = copy.deepcopy(model)
    assert model._multilora.staging and not twin._multilora.staging
    for each in (model, twin):
        assert_rows(logits(each, same_ids(2), ["y", None]), own.truth(same_ids(2), ["y", None]))
