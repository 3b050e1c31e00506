"""Catalogue -> host memory -> device slots: two LRUs, pins, and what running calls use.

The store knows nothing of layers: the model hands it a `Device`, which fills and empties slots.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from .catalogue import Catalogue, Entry, UnknownAdapterError, check_name
from .formats import Adapter
from .host import HostAdapter
from .hosting import CapacityError, HostTier


class AdapterInUseError(RuntimeError):
    """A change to an adapter that a running call uses."""


@dataclass
class AdapterStore(HostTier):
    """max_loras slots; at most max_cpu_loras adapters in host memory (None: host_bytes decides)."""

    held: set[int] = field(default_factory=set)  # ids: all that calls use, perhaps more
    loads: int = 0
    evictions: int = 0

    def __post_init__(self) -> None:
        self.lock = threading.RLock()

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles carry no running calls."""
        catalogue = Catalogue({e.name: replace(e, in_flight=0) for e in self.catalogue}, dict(self.catalogue.names))
        catalogue.next_id = self.catalogue.next_id
        return {k: v for k, v in self.__dict__.items() if k != "lock"} | {"catalogue": catalogue, "awaited": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.lock = threading.RLock()

    # -- registration ----------------------------------------------------------------------------------------
    def register(self, name: str, adapter: Adapter, reader: Callable[[], Adapter] | None) -> Entry:
        """Add an adapter that was read; it takes a slot when a call first needs it."""
        with self.lock:
            check_name(name)
            self.refuse_taken(name)
            entry = self._entry(name, self.catalogue.next_id, adapter, reader)
            self.catalogue.put(entry)
            try:
                self._host(entry)
            except BaseException:  # an interrupt while others make room
                self._drop_host(entry)
                self.catalogue.drop(entry)
                raise
            return entry

    def refuse_taken(self, name: str) -> None:
        """Raises ValueError where the name is taken."""
        if name in self.catalogue:
            raise ValueError(
                f"an adapter named {name!r} is registered already (from {self.catalogue.entry(name).source}); choose "
                f"another adapter_name, or pass load_inplace=True to replace its weights"
            )

    def replace(self, name: str, adapter: Adapter, reader: Callable[[], Adapter] | None) -> Entry:
        """New content under a registered name and its id; the slot is filled anew at the next use."""
        with self.lock:
            old = self.catalogue.entry(name)
            self._require_idle(old, "replaced")
            entry = self._entry(name, old.id, adapter, reader)
            self._free_slot(old)
            self._drop_host(old)
            self.catalogue.put(entry)
            self._host(entry)
            return entry

    def delete(self, *names: str) -> None:
        """Forget adapters: all of them, or on an error none."""
        with self.lock:
            entries = [self.catalogue.entry(name) for name in dict.fromkeys(names)]
            for entry in entries:
                self._require_idle(entry, "deleted")
            for entry in entries:
                self._free_slot(entry)
                self._drop_host(entry)
                self.pins.discard(entry.id)
                self.catalogue.drop(entry)

    def pin(self, name: str) -> None:
        """Keep the adapter in both tiers. Raises CapacityError where more would be pinned than there are slots."""
        with self.lock:
            self.refuse_pin(name)
            entry = self.catalogue.entry(name)
            self._host(entry)
            self.pins.add(entry.id)

    def refuse_pin(self, name: str) -> None:
        """Raises CapacityError where a pin of `name`, registered or not, would be one too many."""
        pinned = [known for known in map(self.catalogue.names.__getitem__, sorted(self.pins)) if known != name]
        if len(pinned) >= self.max_loras:
            raise CapacityError(
                f"at most max_loras={self.max_loras} adapters can be pinned, {pinned} are; unpin one or raise max_loras"
            )

    def unpin(self, name: str) -> None:
        with self.lock:
            self.pins.discard(self.catalogue.entry(name).id)

    # -- residency -------------------------------------------------------------------------------------------
    def room(self, wanted: Iterable[int]) -> tuple[int, frozenset[int]]:
        """(slots for adapters that hold none, those of `wanted` that hold one): running calls, the default and pins do.

        The first may be negative: pins wait for slots that calls use.
        """
        with self.lock:
            holding = {i for i in self.slots if self.catalogue.by_id(i).in_flight} | self.pins
            return self.max_loras - len(holding), frozenset(holding.intersection(wanted))

    def acquire(self, ids: Iterable[int], *, before_pins: bool = False) -> dict[int, int]:
        """Bring adapters into slots and hold them there: id -> slot (the base has none). Undo with `release`.

        before_pins: also into slots that pinned adapters wait for. Raises CapacityError where they do not fit beside
        what is pinned or in use. On any error nothing is held.
        """
        with self.lock:
            wanted = list(dict.fromkeys(i for i in ids if i))
            entries = [self.catalogue.by_id(i) for i in wanted]
            new = [i for i in wanted if i not in self.slots]
            stay = {i for i in self.slots if i in wanted or self.catalogue.by_id(i).in_flight}
            pins = self.pins & self.slots.keys() if before_pins else self.pins
            room = self.max_loras - len((stay | pins).difference(new))
            if len(new) > max(room, 0):
                fit = max(len(wanted) - len(new) + room, 0)
                raise CapacityError(
                    f"{len(wanted)} distinct adapters must fit in {fit} free slots (max_loras={self.max_loras}, the "
                    f"rest is pinned, in use or the default); raise max_loras to {self.max_loras + len(new) - room}"
                )
            self.held.update(wanted)
            for entry in entries:
                entry.in_flight += 1
            try:
                for entry in entries:
                    self._seat(entry)
            except BaseException:
                self.release(wanted)
                raise
            return {i: self.slots[i] for i in wanted}

    def release(self, ids: Iterable[int]) -> None:
        with self.lock:
            for adapter_id in ids:
                if adapter_id:
                    self.catalogue.by_id(adapter_id).in_flight -= 1

    def hold_only(self, ids: Collection[int]) -> None:
        """When no call runs: let go of what an interrupted one left held, but for these."""
        with self.lock:
            for adapter_id in self.held & self.catalogue.names.keys():
                self.catalogue.by_id(adapter_id).in_flight = int(adapter_id in ids)
            self.held = set(ids)

    def _seat(self, entry: Entry) -> None:
        if entry.id in self.slots:
            self.slots.move_to_end(entry.id)
            if entry.host is not None:
                self.hosted.move_to_end(entry.id)
            return
        host = self._host(entry)
        taken = set(self.slots.values())
        slot = next((s for s in range(self.max_loras) if s not in taken), None)
        victim = None
        if slot is None:
            victim = next(e for e in map(self.catalogue.by_id, self.slots) if e.id not in self.pins and not e.in_flight)
            slot = self.slots[victim.id]
        try:
            if victim is not None:  # its slot is free from here on; `fill` replaces what is in it
                del self.slots[victim.id]
                self.evictions += 1
            self.device.fill(slot, host)
        except BaseException as error:
            if victim is not None:  # also where an interrupt came before it had gone
                self.slots.pop(victim.id, None)
            self.device.empty(slot)
            if isinstance(error, CapacityError):
                raise CapacityError(
                    f"adapter {entry.name!r} cannot be brought to its slot: {error}"
                ) from error.__cause__
            raise
        self.slots[entry.id] = slot
        self.awaited.pop(entry.id, None)
        self.loads += 1

    def _free_slot(self, entry: Entry) -> None:
        slot = self.slots.pop(entry.id, None)
        if slot is not None:
            self.device.empty(slot)

    def forget(self, outdated: Callable[[HostAdapter], bool], *, slots: bool, idle: bool) -> None:
        """Drop outdated host copies and their slots, or with `slots` all slots; the next use reads or loads again.

        idle: no call runs, so nothing but the default is in use, which goes too; else what is in use stays.
        """
        with self.lock:
            self.reads.clear()
            for entry in self.catalogue:
                if entry.in_flight and not idle:
                    continue
                drop = entry.host is not None and entry.reader is not None and outdated(entry.host)
                if drop or slots:
                    self._free_slot(entry)
                if drop:
                    self._drop_host(entry)

    @staticmethod
    def _require_idle(entry: Entry, verb: str) -> None:
        if entry.in_flight:
            raise AdapterInUseError(
                f"adapter {entry.name!r} must not be {verb} while a call uses it; wait for the call to end"
            )


__all__ = ["AdapterInUseError", "AdapterStore", "CapacityError", "UnknownAdapterError"]
