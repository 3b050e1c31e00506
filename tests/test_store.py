"""The store alone, on a device that only writes down what it is told: tiers, pins, flight, identity, failures."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection
from typing import Any

import pytest
import torch

from hf_multilora import AdapterError, AdapterInUseError, CapacityError, UnknownAdapterError
from hf_multilora.formats import Adapter, LoraFactors
from hf_multilora.host import ALIGN, HostAdapter, pack
from hf_multilora.store import AdapterStore

BYTES = 2 * ALIGN  # of one adapter made here: two small factors


class Notes:
    """A device whose slots hold the adapter's mark, and which can be told to fail."""

    def __init__(self) -> None:
        self.held: dict[int, float] = {}
        self.log: list[tuple[str, int]] = []
        self.fails = False
        self.owned: Callable[[], Collection[int]] = tuple  # slots that have an owner: set by Bench

    def fill(self, slot: int, host: HostAdapter) -> None:
        self.log.append(("fill", slot))
        assert slot not in self.owned(), "a slot is nobody's when it is filled"
        if self.fails:
            raise MemoryError("no room on the device")
        self.held[slot] = float(host.factors["q"][0][0, 0])

    def empty(self, slot: int) -> None:
        self.log.append(("empty", slot))
        self.held.pop(slot, None)

    def pack(self, adapter: Adapter) -> HostAdapter:
        if adapter.source == "unpackable":
            raise AdapterError("cannot be packed")
        return pack(adapter, {"q": "q"}, {"q": torch.float32})


class Disk:
    """Adapters as files: reads are counted, content can change."""

    def __init__(self) -> None:
        self.marks: dict[str, float] = {}
        self.reads: list[str] = []

    def adapter(self, name: str) -> Adapter:
        mark = self.marks[name]
        factors = {"q": LoraFactors(torch.full((2, 3), mark), torch.ones(4, 2), 1.0)}
        return Adapter(name, f"digest {mark}", None, factors)

    def reader(self, name: str) -> Callable[[], Adapter]:
        def read() -> Adapter:
            self.reads.append(name)
            return self.adapter(name)

        return read


class Bench:
    def __init__(
        self, names: str = "abcd", *, slots: int = 2, host: int | None = None, host_bytes: int = 1 << 30
    ) -> None:
        self.device, self.disk = Notes(), Disk()
        self.store = AdapterStore(self.device, slots, host, host_bytes)
        self.device.owned = self.store.slots.values
        self.ids = {name: self.add(name, i + 1.0) for i, name in enumerate(names)}

    def add(self, name: str, mark: float) -> int:
        self.disk.marks[name] = mark
        return self.store.register(name, self.disk.adapter(name), self.disk.reader(name)).id

    def use(self, names: str) -> dict[str, int]:
        """One call with these adapters; checks that each slot holds its own."""
        ids = [self.ids[n] for n in names]
        slots = self.store.acquire(ids)
        for name in names:
            assert self.device.held[slots[self.ids[name]]] == self.disk.marks[name]
        self.store.release(ids)
        return {name: slots[self.ids[name]] for name in names}

    @property
    def resident(self) -> str:
        """Names in slots, least recently used first."""
        return "".join(self.store.catalogue.by_id(i).name for i in self.store.slots)

    @property
    def hosted(self) -> str:
        return "".join(self.store.catalogue.by_id(i).name for i in self.store.hosted)

    def state(self) -> Any:
        entries = [(e.name, e.id, e.digest, e.in_flight, e.host is not None) for e in self.store.catalogue]
        return (
            sorted(self.store.pins),
            entries,
            dict(self.store.slots),
            sorted(self.store.hosted),
            dict(self.device.held),
            self.store.hosted_bytes,
        )


# -- two tiers --------------------------------------------------------------------------------------
def test_slots_are_least_recently_used() -> None:
    bench = Bench()
    bench.use("ab"), bench.use("a"), bench.use("c")
    assert bench.resident == "ac" and (bench.store.loads, bench.store.evictions) == (3, 1)
    bench.use("a"), bench.use("d")
    assert bench.resident == "ad" and bench.disk.reads == []


def test_a_slot_is_free_before_the_next_tenant_and_filled_once() -> None:
    bench = Bench()
    first = bench.use("ab")
    bench.device.log.clear()
    bench.use("c")
    assert bench.device.log == [("fill", first["a"])], "which replaces what is in the slot"


def test_host_memory_is_least_recently_used_and_gives_up_the_slot_too() -> None:
    bench = Bench("abc", slots=2, host=3)
    bench.use("ab")
    bench.ids["d"] = bench.add("d", 4.0)
    assert bench.hosted == "abd" and bench.resident == "ab", "c was used last long ago: never"
    bench.use("b")
    bench.ids["e"] = bench.add("e", 5.0)
    assert bench.hosted == "dbe" and bench.resident == "b", "a left both tiers"
    bench.use("ab")
    assert bench.disk.reads == ["a"] and bench.hosted == "eab" and bench.resident == "ab"


def test_what_fits_in_host_bytes_stays_and_never_less_than_the_slots_hold() -> None:
    bench = Bench("abcdef", slots=2, host_bytes=4 * BYTES)
    assert bench.hosted == "cdef" and bench.store.hosted_bytes == 4 * BYTES
    tight = Bench("abcdef", slots=3, host_bytes=0)
    assert tight.hosted == "def"
    assert tight.use("abc") and tight.disk.reads == ["a", "b", "c"] and tight.hosted == "abc"


def test_an_adapter_without_a_file_is_never_dropped() -> None:
    bench = Bench("", slots=1, host=1)
    for mark, name in enumerate("ab", 1):
        bench.disk.marks[name] = float(mark)
        bench.ids[name] = bench.store.register(name, bench.disk.adapter(name), None).id
    for name in "abab":
        bench.use(name)
    assert bench.hosted == "ab"


def test_a_changed_file_is_not_taken_in_silence() -> None:
    bench = Bench("abc", slots=1, host=1)
    bench.disk.marks["a"] = 9.0
    before = bench.state()
    with pytest.raises(AdapterError, match=r"files of adapter 'a' .* changed; load_adapter\(.*load_inplace=True\)"):
        bench.use("a")
    assert bench.state() == before
    bench.use("b")
    bench.store.replace("a", bench.disk.adapter("a"), bench.disk.reader("a"))
    bench.use("b"), bench.use("a")


# -- pins and flight --------------------------------------------------------------------------------
def test_pinned_adapters_leave_neither_tier() -> None:
    bench = Bench("abcd", slots=2, host=2)
    bench.use("a")
    bench.store.pin("a")
    for name in "bcdbcd":
        bench.use(name)
    assert "a" in bench.resident and "a" in bench.hosted and bench.disk.reads.count("a") == 1
    bench.store.unpin("a")
    bench.use("b"), bench.use("c")
    assert "a" not in bench.resident and "a" not in bench.hosted


def test_a_pin_too_many() -> None:
    bench = Bench(slots=2)
    bench.store.pin("a"), bench.store.pin("b"), bench.store.pin("b")
    before = bench.state()
    with pytest.raises(CapacityError, match=r"at most max_loras=2 .*\['a', 'b'\] are; unpin one or raise"):
        bench.store.pin("c")
    assert bench.state() == before
    bench.store.delete("a")
    bench.store.pin("c")


def test_a_call_that_does_not_fit_says_what_it_needs() -> None:
    bench = Bench(slots=2)
    with pytest.raises(CapacityError, match=r"3 distinct adapters must fit in 2 free slots.*raise max_loras to 3"):
        bench.use("abc")
    bench.store.pin("d")
    with pytest.raises(CapacityError, match=r"2 distinct adapters must fit in 1 free slots.*raise max_loras to 3"):
        bench.use("ab")
    assert bench.store.room([bench.ids["d"]]) == (1, {bench.ids["d"]})
    bench.use("ad")


def test_adapters_in_flight_stay() -> None:
    bench = Bench(slots=2)
    held = bench.store.acquire([bench.ids["a"], 0, bench.ids["a"]])
    assert list(held) == [bench.ids["a"]] and bench.store.room([]) == (1, set())
    bench.use("b"), bench.use("c"), bench.use("d")
    assert bench.device.held[held[bench.ids["a"]]] == 1.0
    changes = {
        "deleted": lambda: bench.store.delete("a"),
        "replaced": lambda: bench.store.replace("a", bench.disk.adapter("b"), None),
    }
    for verb, change in changes.items():
        before = bench.state()
        with pytest.raises(AdapterInUseError, match=f"'a' must not be {verb} while a call uses it"):
            change()
        assert bench.state() == before
    with pytest.raises(CapacityError, match="2 distinct adapters must fit in 1"):
        bench.use("bc")
    bench.store.acquire([bench.ids["a"]])
    bench.store.release(held)
    with pytest.raises(AdapterInUseError):
        bench.store.delete("a")
    bench.store.release(held)
    bench.store.delete("a")
    assert len(bench.device.held) == len(bench.store.slots)


# -- identity ---------------------------------------------------------------------------------------
def test_hot_reload_keeps_the_id_and_changes_the_identity() -> None:
    bench = Bench()
    bench.store.pin("a")
    bench.use("a")
    old = bench.store.catalogue.entry("a").identity
    bench.disk.marks["a"] = 7.0
    bench.use("b")
    entry = bench.store.replace("a", bench.disk.adapter("a"), bench.disk.reader("a"))
    assert entry.id == bench.ids["a"] and entry.identity != old and entry.id in bench.store.pins
    assert bench.resident == "b" and bench.store.hosted_bytes == 4 * BYTES
    bench.use("a")
    assert bench.disk.reads == [], "one shot: not at each later call"


def test_ids_are_never_used_again() -> None:
    bench = Bench("ab")
    bench.store.delete("b")
    assert bench.add("c", 3.0) == 3
    bench.store.delete("c")
    assert bench.add("b", 4.0) == 4
    with pytest.raises(UnknownAdapterError, match="no adapter has id 2; 0 is the base"):
        bench.store.acquire([2])
    with pytest.raises(UnknownAdapterError, match="no adapter is named 'bb'; did you mean"):
        bench.store.delete("bb")


@pytest.mark.parametrize("name", ["", "  ", "__base__", None, 3])
def test_names_that_would_be_taken_for_the_base(name: Any) -> None:
    bench = Bench("a")
    with pytest.raises(ValueError, match="name must be a non-empty string other than '__base__'"):
        bench.store.register(name, bench.disk.adapter("a"), None)


# -- failures leave the store as it was ---------------------------------------------------------------
def test_a_failed_registration_changes_nothing() -> None:
    bench = Bench()
    bench.use("ab")
    before = bench.state()
    bad = Adapter("unpackable", "?", None, {})
    with pytest.raises(AdapterError, match="cannot be packed"):
        bench.store.register("new", bad, None)
    with pytest.raises(AdapterError, match="cannot be packed"):
        bench.store.replace("a", bad, None)
    with pytest.raises(ValueError, match=r"'a' is registered already \(from a\).*load_inplace=True"):
        bench.store.register("a", bench.disk.adapter("b"), None)
    assert bench.state() == before


def test_a_failed_fill_leaves_an_empty_slot_and_nothing_held() -> None:
    bench = Bench()
    bench.use("a")
    before = bench.state()
    bench.device.fails = True
    with pytest.raises(MemoryError):
        bench.use("ab")
    assert bench.state() == before
    bench.device.fails = False
    bench.use("ab")


# -- many -------------------------------------------------------------------------------------------
def test_random_calls_always_find_their_own() -> None:
    bench = Bench("", slots=4, host=9)
    names = [chr(0x4E00 + i) for i in range(200)]
    bench.ids = {name: bench.add(name, i + 1.0) for i, name in enumerate(names)}
    rng = random.Random(0)
    for _ in range(300):
        bench.use("".join(rng.sample(names, rng.randint(1, 4))))
        assert len(bench.store.slots) <= 4 and len(bench.store.hosted) <= 9
        assert set(bench.store.slots) <= set(bench.store.hosted) and len(bench.device.held) == len(bench.store.slots)
        assert bench.store.hosted_bytes == BYTES * len(bench.store.hosted)
    assert all(e.in_flight == 0 for e in bench.store.catalogue)
