"""The host tier of the store: which adapters are in host memory, and which are read into it ahead of their use."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol

from .catalogue import Catalogue, Entry
from .formats import Adapter
from .host import HostAdapter, HostMemoryError


class CapacityError(RuntimeError):
    """More adapters than there are slots, than the pins leave, or than memory holds."""


class Device(Protocol):
    """Fills and empties the slots of all adapted modules. `fill` replaces what is in the slot."""

    def fill(self, slot: int, host: HostAdapter) -> None: ...
    def empty(self, slot: int) -> None: ...
    def pack(self, adapter: Adapter) -> HostAdapter: ...


class Reads:
    """Host copies that one thread reads ahead of their use, one after the other."""

    def __init__(self) -> None:
        self.pending: dict[int, tuple[Entry, Future[HostAdapter]]] = {}
        self.worker: ThreadPoolExecutor | None = None

    def __reduce__(self) -> tuple[type[Reads], tuple[()]]:
        """Copies of a model read their own."""
        return Reads, ()

    def start(self, entry: Entry, read: Callable[[], HostAdapter], done: Callable[[Future[HostAdapter]], None]) -> None:
        """`done` is called in the thread, after it. It may take locks, `read` must not: `take` waits for it."""
        if self.worker is None:
            self.worker = ThreadPoolExecutor(1, thread_name_prefix="hf_multilora-prefetch")
        future = self.worker.submit(read)
        self.pending[entry.id] = entry, future
        future.add_done_callback(done)

    def is_pending(self, entry: Entry) -> bool:
        return self.pending.get(entry.id, (None, None))[0] is entry

    def finish(self, entry: Entry, future: Future[HostAdapter]) -> bool:
        """Whether the read is still wanted, which it is once."""
        wanted = self.pending.get(entry.id, (None, None))[1] is future
        if wanted:
            del self.pending[entry.id]
        return wanted

    def take(self, entry: Entry) -> HostAdapter | None:
        """What was read, or is being read: waited for. None where that was not begun, or failed: the reason is logged
        by whoever started it, and who needs the adapter reads it again."""
        if not self.is_pending(entry):
            return None
        _, future = self.pending.pop(entry.id)
        if future.cancel() or future.exception() is not None:
            return None
        return future.result()

    def forget(self, adapter_id: int) -> None:
        if adapter_id in self.pending:
            self.pending.pop(adapter_id)[1].cancel()

    def clear(self) -> None:
        for adapter_id in list(self.pending):
            self.forget(adapter_id)


@dataclass
class HostTier:
    """At most max_cpu_loras adapters in host memory (None: host_bytes decides)."""

    device: Device
    max_loras: int
    max_cpu_loras: int | None
    host_bytes: int
    catalogue: Catalogue = field(default_factory=Catalogue)
    slots: OrderedDict[int, int] = field(default_factory=OrderedDict)  # id -> slot, least recently used first
    hosted: OrderedDict[int, int] = field(default_factory=OrderedDict)  # id -> bytes, least recently used first
    pins: set[int] = field(default_factory=set)
    awaited: dict[int, None] = field(default_factory=dict)  # ids: prefetched and not used yet, oldest first
    reads: Reads = field(default_factory=Reads)

    def _free_slot(self, entry: Entry) -> None:
        raise NotImplementedError

    def _entry(self, name: str, adapter_id: int, adapter: Adapter, reader: Callable[[], Adapter] | None) -> Entry:
        host = self._pack(name, adapter)
        ranks = {module: a.shape[0] for module, (a, _) in host.factors.items()}
        return Entry(
            name, adapter_id, adapter.digest, adapter.source, adapter.base_model, ranks,
            host.agreed[0] or host.nbytes, adapter.config, reader, host, labels=adapter.labels,
            max_rank=adapter.max_rank,
        )  # fmt: skip

    def _pack(self, name: str, adapter: Adapter) -> HostAdapter:
        try:
            return self.device.pack(adapter)
        except HostMemoryError as error:
            raise CapacityError(
                f"adapter {name!r} needs {error.nbytes} bytes of host memory, which could not be had; "
                f"{len(self.hosted)} adapters take {self.hosted_bytes} bytes of it (max_cpu_loras="
                f"{self.max_cpu_loras}); lower max_cpu_loras, or free host memory"
            ) from error

    def _host(self, entry: Entry) -> HostAdapter:
        """The adapter's host copy, read again from disk where it was dropped; then others go until the limit holds."""
        if entry.host is None:
            entry.host = self.reads.take(entry) or self.read(entry)
            entry.nbytes = entry.host.agreed[0] or entry.host.nbytes  # the base's dtype may have changed since
        self.hosted[entry.id] = entry.nbytes
        self.hosted.move_to_end(entry.id)
        self._trim(keep=entry)
        return entry.host

    def read(self, entry: Entry) -> HostAdapter:
        """A host copy from its files, which no tier knows yet. Raises as Entry.read does, and CapacityError."""
        return self._pack(entry.name, entry.read())

    def _drop_host(self, entry: Entry) -> None:
        self.hosted.pop(entry.id, None)
        self.awaited.pop(entry.id, None)
        self.reads.forget(entry.id)
        entry.host = None

    @property
    def hosted_bytes(self) -> int:
        return sum(self.hosted.values())

    def _trim(self, keep: Entry) -> None:
        """Drop least recently used host copies, and their slots with them, until the rest fits; prefetched ones that
        were not used yet last."""
        while self._over(len(self.hosted), self.hosted_bytes):
            victim = self._victim(keep, awaited=False) or self._victim(keep, awaited=True)
            if victim is None:
                return
            self._free_slot(victim)
            self._drop_host(victim)

    def _victim(self, keep: Entry, awaited: bool) -> Entry | None:
        hosted = map(self.catalogue.by_id, self.hosted)
        return next(
            (e for e in hosted if e is not keep and (e.id in self.awaited) == awaited and self._droppable(e)), None
        )

    def _droppable(self, entry: Entry) -> bool:
        return entry.id not in self.pins and not entry.in_flight and entry.reader is not None

    def _over(self, count: int, nbytes: int) -> bool:
        if self.max_cpu_loras is not None:
            return count > self.max_cpu_loras
        return count > self.max_loras and nbytes > self.host_bytes

    # -- ahead of use ----------------------------------------------------------------------------------------
    def expect(self, ids: Iterable[int]) -> None:
        """Calls will need these. Remembered are twice as many as there are slots: for this call and the next."""
        for adapter_id in ids:
            self.awaited.pop(adapter_id, None)
            self.awaited[adapter_id] = None
        while len(self.awaited) > 2 * self.max_loras:
            del self.awaited[next(iter(self.awaited))]

    def room_ahead(self, entry: Entry) -> list[Entry] | None:
        """Host copies that must go for one of `entry`, beside those that are being read, least recently used first.
        None where there are not enough: those in slots and those awaited stay."""
        coming = [entry, *(other for other, _ in self.reads.pending.values())]
        found, count = list[Entry](), len(self.hosted) + len(coming)
        nbytes = self.hosted_bytes + sum(e.nbytes for e in coming)
        for other in map(self.catalogue.by_id, self.hosted):
            if not self._over(count, nbytes):
                break
            if other.id not in self.slots and other.id not in self.awaited and self._droppable(other):
                found.append(other)
                count, nbytes = count - 1, nbytes - other.nbytes
        return None if self._over(count, nbytes) else found

    def admit(self, entry: Entry, host: HostAdapter) -> bool:
        """Take a host copy that was read ahead; False where there is no room for it."""
        victims = self.room_ahead(entry)
        for victim in victims or ():
            self._drop_host(victim)
        if victims is not None:
            entry.host, entry.nbytes, self.hosted[entry.id] = host, host.nbytes, host.nbytes
        return victims is not None
