"""What is registered, what it costs, and what a warm-up did."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .display import Bar, Tenant, bar_picture, html_table
from .formats import LORA, split_site
from .layers.rows import SlotRows
from .runtime import Runtime


@dataclass(frozen=True)
class ModuleKind:
    """Modules of one name that adapters train in one role: "lora", "saved" (in full) or "tokens" (rows of a table).

    rank_rows: what the pools of these modules hold together. used: slot -> how many of them its adapter owns.
    """

    name: str
    role: str
    modules: int
    rank_rows: int
    used: dict[int, int]
    bytes: int

    def __str__(self) -> str:
        return f"{self.name} \N{MULTIPLICATION SIGN}{self.modules}" + (f" {self.role}" if self.role != LORA else "")


@dataclass(frozen=True)
class MemoryReport:
    """Bytes taken by adapters. per_module: pools of rank rows on the device, by site (`path`, `path:saved` for a module
    trained in full, `path:tokens` for token rows), device_bytes in all; kinds: the same by kind of module. An A that is
    there once for several linears counts in the first of them.
    slots: adapter in each (None: free); slot_ids: its id; slot_bytes: its rank rows. staging_bytes: where adapters
    arrive on CUDA devices: a buffer as large as the largest one that came, and those that were prefetched and not used.

    host_bytes: the host copies of `host_adapters` adapters; host_pinned_bytes: those of them that are page-locked.
    pinned: names of pinned adapters.
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
    slot_ids: list[int | None]
    slot_bytes: list[int]
    kinds: list[ModuleKind]
    pinned: list[str]

    def __str__(self) -> str:
        return f"device {self._device()}, host {self._host()}"

    def _device(self) -> str:
        used = sum(name is not None for name in self.slots)
        return (
            f"{mib(self.device_bytes)} MiB in {len(self.per_module)} modules "
            f"({self.rank_rows_used} of {self.rank_rows} rank rows, {used} of {len(self.slots)} slots)"
        )

    def _host(self) -> str:
        return f"{mib(self.host_bytes)} MiB in {self.host_adapters} adapters ({mib(self.host_pinned_bytes)} pinned)"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """What IPython shows as text."""
        printer.text(str(self))

    def _repr_html_(self) -> str:
        """A bar per kind of module: the rank rows that each slot's adapter owns, and what is free."""
        tenants = {
            slot: Tenant(
                name, f"{name}{' (pinned)' if name in self.pinned else ''} {size(self.slot_bytes[slot])}", number
            )
            for slot, (name, number) in enumerate(zip(self.slots, self.slot_ids, strict=True))
            if name is not None and number is not None
        }
        bars = [
            Bar(
                str(kind),
                kind.used,
                kind.rank_rows,
                f"{sum(kind.used.values())} of {kind.rank_rows} rows",
                size(kind.bytes),
            )
            for kind in self.kinds
        ]
        return bar_picture(f"Device: {self._device()}", tenants, bars, f"Host: {self._host()}")


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


class AdapterList(list[dict[str, Any]]):
    """Rows of `list_adapters`, which notebooks show as a table."""

    def _repr_html_(self) -> str:
        header = ["adapter", "rank", "modules", "size", "where", "source"]
        rows = [
            [
                row["name"],
                str(row["max_rank"]),
                str(row["modules"]),
                size(row["bytes"]),
                _whereabouts(row),
                row["source"],
            ]
            for row in self
        ]
        return html_table(header, rows)


def _whereabouts(row: dict[str, Any]) -> str:
    place = "slot" if row["on_device"] else "host memory" if row["in_host_memory"] else "disk"
    return ", ".join([place, *(word for word in ("pinned", "default") if row[word])])


def mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.1f}"


def size(nbytes: int) -> str:
    """Bytes as a person reads them."""
    return f"{nbytes / 2**20:.1f} MiB" if nbytes >= 2**20 else f"{nbytes / 2**10:.1f} KiB"


def memory_report(runtime: Runtime) -> MemoryReport:
    """See MultiLoRAModel.memory_report."""
    with runtime.store.lock:  # slots and rank rows must be of one moment
        return _report(runtime)


def _report(runtime: Runtime) -> MemoryReport:
    store = runtime.store
    names: list[str | None] = [None] * store.max_loras
    ids: list[int | None] = [None] * store.max_loras
    slot_bytes = [0] * store.max_loras
    order = {name: i for i, (name, _) in enumerate(runtime.model.named_modules())}
    in_order = sorted(runtime.sites, key=lambda site: order.get(split_site(site)[0], len(order)))
    sites = {site: runtime.sites[site][1] for site in in_order}
    for adapter_id, slot in store.slots.items():
        ids[slot], names[slot] = adapter_id, store.catalogue.by_id(adapter_id).name
    for slots in sites.values():
        for slot, (_, r) in slots.rows.spans.items():
            slot_bytes[slot] += r * slots.nbytes // slots.rows.capacity
    entries = list(store.catalogue)
    hosts = [e.host for e in entries if e.host is not None]
    per_module = {site: slots.nbytes for site, slots in sites.items()}
    return MemoryReport(
        per_module=per_module,
        device_bytes=sum(per_module.values()),
        staging_bytes=sum(staging.nbytes for staging in runtime.staging.values()),
        host_bytes=sum(host.nbytes for host in hosts),
        host_pinned_bytes=sum(host.nbytes for host in hosts if host.pinned),
        host_adapters=len(hosts),
        rank_rows=sum(slots.rows.capacity for slots in sites.values()),
        rank_rows_used=sum(slots.rows.used for slots in sites.values()),
        slots=names,
        slot_ids=ids,
        slot_bytes=slot_bytes,
        kinds=_kinds(sites),
        pinned=[e.name for e in entries if e.id in store.pins],
    )


def _kinds(sites: Mapping[str, SlotRows]) -> list[ModuleKind]:
    """Sites by the last part of their path and their role, in the order in which the kinds first occur."""
    groups: dict[tuple[str, str], list[SlotRows]] = {}
    for site, slots in sites.items():
        path, role = split_site(site)
        groups.setdefault((path.rpartition(".")[2], role), []).append(slots)
    kinds = []
    for (name, role), members in groups.items():
        used: Counter[int] = Counter()
        for slots in members:
            used.update({slot: r for slot, (_, r) in slots.rows.spans.items()})
        capacity, size = sum(slots.rows.capacity for slots in members), sum(slots.nbytes for slots in members)
        kinds.append(ModuleKind(name, role, len(members), capacity, dict(sorted(used.items())), size))
    return kinds


def list_adapters(runtime: Runtime) -> list[dict[str, Any]]:
    """See MultiLoRAModel.list_adapters."""
    store = runtime.store
    return AdapterList(
        {
            "name": e.name,
            "id": e.id,
            "source": e.source,
            "base_model": e.base_model,
            "digest": e.digest,
            "max_rank": e.max_rank,
            "modules": len({split_site(site)[0] for site in e.ranks}),
            "bytes": e.nbytes,
            "on_device": e.id in store.slots,
            "in_host_memory": e.host is not None,
            "pinned": e.id in store.pins,
            "default": e.name == runtime.default,
        }
        for e in store.catalogue
    )
