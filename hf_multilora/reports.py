"""What is registered, what it costs, and what a warm-up did."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .runtime import Runtime


@dataclass(frozen=True)
class MemoryReport:
    """Bytes taken by adapters. per_module: pools of rank rows on the device, device_bytes in all; slots: adapter in
    each (None: free). staging_bytes: where adapters arrive on CUDA devices, as large as the largest one that came.

    host_bytes: the host copies of `host_adapters` adapters; host_pinned_bytes: those of them that are page-locked.
    """

    per_module: dict[str, int]
    device_bytes: int
    staging_bytes: int
    host_bytes: int
    host_pinned_bytes: int
    host_adapters: int
    rank_rows: int
    rank_rows_used: int
    slots: list[str | None]

    def __str__(self) -> str:
        used = sum(name is not None for name in self.slots)
        return (
            f"device {self.device_bytes / 2**20:.1f} MiB in {len(self.per_module)} modules "
            f"({self.rank_rows_used} of {self.rank_rows} rank rows, {used} of {len(self.slots)} slots), "
            f"host {self.host_bytes / 2**20:.1f} MiB in {self.host_adapters} adapters "
            f"({self.host_pinned_bytes / 2**20:.1f} pinned)"
        )


@dataclass(frozen=True)
class WarmupReport:
    """What `warmup` did. shapes: (rows, tokens) -> seconds of the first call; skipped: left out, after max_seconds or
    longer than the model takes."""

    adapters: list[str]  # that were in slots; dummies where none is registered
    shapes: dict[tuple[int, int], float]
    skipped: list[tuple[int, int]]
    seconds: float

    def __str__(self) -> str:
        left = f", {len(self.skipped)} left out" if self.skipped else ""
        return f"warmed {len(self.shapes)} shapes with {len(self.adapters)} adapters in {self.seconds:.1f} s{left}"


def memory_report(runtime: Runtime) -> MemoryReport:
    """See MultiLoRAModel.memory_report."""
    store = runtime.store
    names: list[str | None] = [None] * store.max_loras
    with store.lock:
        sites = {name: slots for name, (_, slots) in runtime.sites.items()}
        for adapter_id, slot in store.slots.items():
            names[slot] = store.catalogue.by_id(adapter_id).name
        hosts = [e.host for e in store.catalogue if e.host is not None]
    per_module = {name: slots.nbytes for name, slots in sites.items()}
    return MemoryReport(
        per_module=per_module,
        device_bytes=sum(per_module.values()),
        staging_bytes=sum(staging.buffer.nbytes for staging in runtime.staging.values()),
        host_bytes=sum(host.nbytes for host in hosts),
        host_pinned_bytes=sum(host.nbytes for host in hosts if host.pinned),
        host_adapters=len(hosts),
        rank_rows=sum(slots.rows.capacity for slots in sites.values()),
        rank_rows_used=sum(slots.rows.used for slots in sites.values()),
        slots=names,
    )


def list_adapters(runtime: Runtime) -> list[dict[str, Any]]:
    """See MultiLoRAModel.list_adapters."""
    store = runtime.store
    return [
        {
            "name": e.name,
            "id": e.id,
            "source": e.source,
            "base_model": e.base_model,
            "digest": e.digest,
            "max_rank": max(e.ranks.values()),
            "modules": len(e.ranks),
            "bytes": e.nbytes,
            "on_device": e.id in store.slots,
            "in_host_memory": e.host is not None,
            "pinned": e.id in store.pins,
            "default": e.name == runtime.default,
        }
        for e in store.catalogue
    ]
