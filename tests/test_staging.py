"""Staging: one copy into a buffer that is kept. The device's route is run on the CPU, by a name that says "cuda"."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hf_multilora import staging as module
from hf_multilora.host import HostAdapter
from hf_multilora.staging import Staging
from tests.test_host import adapter_of, packed
from tests.tiny import Family, assert_rows, llama, logits, same_ids


class Device(str):
    """Tensors lie on the CPU, Staging takes it for a CUDA device."""

    type = "cuda"


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


def staging() -> Staging:
    device: Any = Device("cpu")
    return Staging(device)


def take(kept: Staging, host: HostAdapter, names: list[str] | None = None) -> list[torch.Tensor]:
    """What `take` gives, checked: bit by bit the host's, in the staging's buffer; other values would be seen."""
    names = list(host.places) if names is None else names
    views, want = kept.take(host, names), [factor for name in names for factor in host.factors[name]]
    start, end = kept.buffer.data_ptr(), kept.buffer.data_ptr() + kept.buffer.nbytes
    for got, factor in zip(views, want, strict=True):
        assert got.dtype == factor.dtype and torch.equal(got, factor) and not torch.equal(got, -factor)
        assert start <= got.data_ptr() and got.data_ptr() + got.nbytes <= end
    return views


class Operations(TorchDispatchMode):
    """Names of the operations inside, and the bytes that copies write."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.copied = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        self.copied += args[0].nbytes if self.names[-1] == "copy_" else 0
        return func(*args, **(kwargs or {}))


def test_adapters_of_one_shape_share_buffer_and_views() -> None:
    kept, hosts = staging(), [host_of(seed) for seed in range(3)]
    views = take(kept, hosts[0])
    before = kept.buffer.data_ptr()
    for host in (hosts[1], hosts[2], hosts[0]):
        with Operations() as seen:
            kept.take(host, list(host.places))
        assert seen.names.count("copy_") == 1 and seen.copied == host.nbytes
        assert "empty" not in seen.names and "as_strided" not in seen.names
        assert take(kept, host) is views and kept.buffer.data_ptr() == before
    with Operations() as seen:
        take(kept, host_of(1, r=9))
    assert {"empty", "as_strided"} <= set(seen.names), "what a new shape needs is seen"


def test_a_larger_adapter_gets_a_larger_buffer_and_smaller_ones_keep_it() -> None:
    kept, small, large = staging(), host_of(0), host_of(1, r=40)
    take(kept, small)
    assert kept.buffer.nbytes == small.nbytes < large.nbytes
    take(kept, large)
    assert kept.buffer.nbytes == large.nbytes
    before = kept.buffer.data_ptr()
    for host in (small, host_of(2, dtype=torch.bfloat16), large):
        take(kept, host)
        assert kept.buffer.data_ptr() == before and kept.buffer.nbytes == large.nbytes


@pytest.mark.parametrize("names", [["m0"], ["m3"], ["m1", "m2"], ["m2", "m1"], ["m0", "m3"]])
def test_some_modules_need_the_bytes_from_the_first_to_the_last(names: list[str]) -> None:
    kept, hosts = staging(), [host_of(seed) for seed in range(2)]
    places = [place for name in names for place in hosts[0].places[name]]
    span = max(p.end for p in places) - min(p.offset for p in places)
    for host in hosts:
        with Operations() as seen:
            kept.take(host, names)
        assert seen.copied == span == kept.buffer.nbytes
        take(kept, host, names)
    take(kept, hosts[0])
    take(kept, hosts[1], names)


def test_shapes_that_take_the_same_bytes_are_told_apart() -> None:
    kept = staging()
    one = packed(adapter_of({"m": (torch.randn(2, 32), torch.randn(64, 2), 1.0)}))
    two = packed(adapter_of({"m": (torch.randn(4, 16), torch.randn(32, 4), 1.0)}))
    assert one.nbytes == two.nbytes
    for host in (one, two, one):
        take(kept, host)


def test_factors_that_are_stored_once_are_copied_once() -> None:
    a, b = torch.randn(3, 64), torch.randn(64, 3)
    host, kept = packed(adapter_of({"q": (a, b, 2.0), "k": (a, b * 2, 2.0), "v": (a, b, 2.0)})), staging()
    with Operations() as seen:
        views = kept.take(host, list(host.places))
    assert seen.copied == host.nbytes == 3 * 3 * 64 * 4 and views[0].data_ptr() == views[2].data_ptr()
    take(kept, host)


@pytest.mark.parametrize("number", [1, 2])
def test_a_buffer_that_cannot_grow(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """The old one is given up first; afterwards both shapes can be had."""
    kept, small, large, calls = staging(), host_of(0), host_of(1, r=40), [0]
    take(kept, small)
    empty = torch.empty

    def refuse(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] == number:
            raise torch.OutOfMemoryError("out")
        return empty(*args, **kwargs)

    monkeypatch.setattr(torch, "empty", refuse)
    with pytest.raises(torch.OutOfMemoryError):
        kept.take(large, list(large.places))
    monkeypatch.undo()
    assert not kept.views and kept.buffer.nbytes == (small.nbytes if number == 1 else 0)
    for host in (small, large, small):
        take(kept, host)


def test_views_that_were_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    kept, one, two = staging(), host_of(0), host_of(1, r=5)
    take(kept, one)

    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "views_of", interrupted)
    with pytest.raises(KeyboardInterrupt):
        kept.take(two, list(two.places))
    monkeypatch.undo()
    for host in (two, one):
        take(kept, host)


def test_a_model_s_copy_has_stagings_of_its_own(tmp_path: Path) -> None:
    own = Family(llama(num_hidden_layers=1), tmp_path, {"x": {"r": 3}, "y": {"r": 2}})
    model = own.model(max_loras=1)
    logits(model, same_ids(2), ["x", None])
    twin = copy.deepcopy(model)
    assert model._multilora.staging and not twin._multilora.staging
    for each in (model, twin):
        assert_rows(logits(each, same_ids(2), ["y", None]), own.truth(same_ids(2), ["y", None]))
