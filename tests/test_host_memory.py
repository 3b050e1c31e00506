"""Host memory that is page-locked, and how much of it adapters may take."""

from __future__ import annotations

import ctypes
import gc
import logging
import mmap
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from hf_multilora.host import HOST_SHARE, HUGE, host_budget, own_pages
from tests.test_host import Cudart, assert_holds, packed, random_adapter
from tests.tiny import Family, llama


# -- page-locking -----------------------------------------------------------------------------------
@pytest.fixture
def cudart(monkeypatch: pytest.MonkeyPatch) -> Cudart:
    runtime = Cudart()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    return runtime


def test_a_buffer_is_registered_once_and_let_go_of(cudart: Cudart) -> None:
    host = packed(random_adapter())
    host.pin(), host.pin()
    assert host.pinned and cudart.calls == 1
    assert cudart.registered == {host.flat.data_ptr(): host.nbytes}, "its exact bytes"
    memory, view = StorageWeakRef(host.flat.untyped_storage()), host.factors["m1"][0]
    want = view.clone()
    del host
    gc.collect()
    assert cudart.registered == {} and not memory.expired() and torch.equal(view, want)
    del view
    assert memory.expired()


def test_memory_lives_until_it_is_unregistered(cudart: Cudart, monkeypatch: pytest.MonkeyPatch) -> None:
    host, alive = packed(random_adapter()), []
    memory = StorageWeakRef(host.flat.untyped_storage())
    monkeypatch.setattr(cudart, "cudaHostUnregister", lambda address: alive.append(not memory.expired()) or 0)
    host.pin()
    del host
    gc.collect()
    assert alive == [True] and memory.expired()


def test_memory_that_copies_still_read_is_not_unregistered(cudart: Cudart, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the adapter goes in a ring of garbage, with whoever started the copy."""
    order: list[str] = []
    unregister = cudart.cudaHostUnregister
    monkeypatch.setattr(cudart, "cudaHostUnregister", lambda address: order.append("out") or unregister(address))
    host = packed(random_adapter())
    host.pin()
    for i in range(2):
        host.readers[torch.device("cuda", i)] = SimpleNamespace(synchronize=lambda i=i: order.append(f"copy {i}"))
    ring: dict[str, Any] = {"host": host}
    ring["self"] = ring
    del host, ring
    gc.collect()
    assert order == ["copy 0", "copy 1", "out"] and cudart.registered == {}


def test_a_driver_that_refuses_is_named_once(
    cudart: Cudart, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    taken: list[int] = []
    monkeypatch.setattr("hf_multilora.host.take_cuda_error", lambda: taken.append(1))
    cudart.code = 2001
    hosts = [packed(random_adapter()) for _ in range(2)]
    with caplog.at_level(logging.WARNING):
        for host in hosts:
            host.pin()
    assert [("error 2001 of the driver" in r.message, "ulimit -l" in r.message) for r in caplog.records] == [
        (True, True)
    ]
    assert not any(host.pinned for host in hosts) and taken == [1, 1]
    assert_holds(hosts[0], random_adapter())
    cudart.code = 0
    hosts[0].pin()
    assert hosts[0].pinned


def test_adapters_of_a_cuda_model_are_pinned_when_loaded(
    tmp_path: Path, cudart: Cudart, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = Family(llama(num_hidden_layers=1), tmp_path, {"x": {"r": 3}, "y": {"r": 2}})
    model = own.model("x")
    assert model.memory_report().host_pinned_bytes == 0 and cudart.registered == {}
    monkeypatch.setattr("hf_multilora.filling.home_of", lambda module: torch.device("cuda", 0))
    model.load_adapter(str(own.paths["y"]), "y")
    report, host = model.memory_report(), model._multilora.store.catalogue.entry("y").host
    assert report.host_pinned_bytes == host.nbytes < report.host_bytes and report.host_adapters == 2
    assert cudart.registered == {host.flat.data_ptr(): host.nbytes} and "pinned" in str(report)
    del host
    model.delete_adapter("y")
    assert cudart.registered == {} and model.memory_report().host_pinned_bytes == 0


# -- how much ---------------------------------------------------------------------------------------
V2 = ("memory.max", "memory.current")
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes")
STAT = "anon 1\ninactive_file {}\ntotal_inactive_file {}"


@pytest.mark.parametrize(
    ("lines", "groups", "room"),
    [
        ("", {}, 1000),
        ("0::/a/b", {"a/b": (V2, "max", 7, 0)}, 1000),
        ("0::/a/b", {"a/b": (V2, 900, 500, 0)}, 400),
        ("0::/a/b", {"a/b": (V2, 900, 500, 300)}, 700),
        ("0::/a/b", {"a/b": (V2, 900, 500, 0), "a": (V2, 600, 550, 0)}, 50),
        ("0::/seen/from/outside", {".": (V2, 900, 500, 0)}, 400),
        (
            "9:name=a:/\n4:cpu,memory:/x\n0::/",
            {"memory/x": (V1, 800, 600, 40), "memory": (V1, 1 << 63, 1, 0)},
            240,
        ),
        ("0::/", {".": (V2, 10, 50, 0)}, 0),
    ],
    ids=["no group", "no limit", "v2", "file cache", "parent", "container", "v1", "above the limit"],
)
def test_the_share_of_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: str, groups: Mapping[str, Any], room: int
) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1000))
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(lines)
    for name, (files, limit, used, cache) in groups.items():
        group = tmp_path / "sys/fs/cgroup" / name
        group.mkdir(parents=True, exist_ok=True)
        for file, value in zip(files, (limit, used), strict=True):
            (group / file).write_text(f"{value}\n")
        own = (cache, 0) if files is V2 else (9, cache)
        (group / "memory.stat").write_text(STAT.format(*own))
    assert host_budget(tmp_path) == int(room * HOST_SHARE)


def test_the_share_of_a_machine_without_control_groups(tmp_path: Path) -> None:
    assert 0 < host_budget(tmp_path) <= psutil.virtual_memory().total * HOST_SHARE


def test_the_share_on_this_machine() -> None:
    assert 0 < host_budget() <= psutil.virtual_memory().total * HOST_SHARE


def advised(buffer: torch.Tensor) -> int:
    """Bytes of the buffer in mappings for which huge pages were asked (`hg` among the flags of smaps)."""
    first, end, total, span = buffer.data_ptr(), buffer.data_ptr() + buffer.nbytes, 0, (0, 0)
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if "-" in words[0] and not words[0].endswith(":"):
            low, high = (int(word, 16) for word in words[0].split("-"))
            span = low, high
        elif words[0] == "VmFlags:" and "hg" in words:
            total += max(0, min(end, span[1]) - max(first, span[0]))
    return total


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux, which has huge pages")
def test_large_buffers_lie_in_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, int, int]] = []
    kernel = Path("/sys/kernel/mm/transparent_hugepage/enabled").exists()

    class Libc:
        def __init__(self, name: None) -> None:
            self.own = CDLL(name)

        def madvise(self, start: Any, size: Any, advice: int) -> int:
            calls.append((start.value, size.value, advice))
            return self.own.madvise(start, size, advice)

    CDLL = ctypes.CDLL
    monkeypatch.setattr(ctypes, "CDLL", Libc)
    for size, huge in {4 * HUGE - 1: 0, 4 * HUGE: 4 * HUGE, 9 * HUGE + 5: 9 * HUGE}.items():
        calls.clear()
        buffer = own_pages(size)
        first = buffer.data_ptr()
        assert buffer.nbytes == size and first % (HUGE if huge else mmap.PAGESIZE) == 0
        assert calls == ([(first, huge, mmap.MADV_HUGEPAGE)] if huge else []), "the last would reach past the end"
        assert advised(buffer) >= huge or not kernel
        buffer.fill_(7)
        assert int(buffer.sum()) == 7 * size
