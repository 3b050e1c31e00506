"""Prefetch on a host: adapters that left host memory are read in a thread before a call needs them."""

from __future__ import annotations

import copy
import logging
import pickle
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_multilora import AdapterError, UnknownAdapterError
from hf_multilora.catalogue import Entry
from hf_multilora.formats import Adapter
from tests.test_scarcity import pools, state
from tests.test_store import Bench
from tests.test_threads import WAIT, Meeting, NoLock, run_all
from tests.tiny import Family, assert_rows, llama, logits, same_ids

RANKS = {"a": 3, "b": 5, "c": 2, "d": 4, "e": 3}


class Disk:
    """Reads of adapters: counted by name, and stopped at a gate where a test closes it."""

    def __init__(self) -> None:
        self.reads: list[str] = []
        self.threads: set[str] = set()
        self.gate, self.begun = threading.Event(), threading.Event()
        self.gate.set()


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    made, real = Disk(), Entry.read

    def read(entry: Entry) -> Adapter:
        made.reads.append(entry.name)
        made.threads.add(threading.current_thread().name)
        made.begun.set()
        assert made.gate.wait(WAIT)
        return real(entry)

    monkeypatch.setattr(Entry, "read", read)
    yield made
    made.gate.set()


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Family:
    torch.manual_seed(0)
    return Family(llama(), tmp_path_factory.mktemp("adapters"), {name: {"r": r} for name, r in RANKS.items()})


def check(family: Family, model: Any, names: Any) -> None:
    inputs = same_ids(len(names))
    assert_rows(logits(model, inputs, names), family.truth(inputs, names))


def settle(model: Any) -> None:
    """Until the reading thread has nothing to do any more: it is one, and takes jobs in turn."""
    reads = model._multilora.store.reads
    if reads.worker is not None:
        reads.worker.submit(lambda: None).result(WAIT)


def in_memory(model: Any) -> set[str]:
    return {row["name"] for row in model.list_adapters() if row["in_host_memory"]}


def seated(family: Family, max_cpu_loras: int | None = 4) -> Any:
    """A model with a and b in its two slots, and no other adapter in host memory."""
    model = family.model(max_loras=2)
    check(family, model, ["a", None, "b"])
    store = model._multilora.store
    store.max_cpu_loras = max_cpu_loras
    for entry in store.catalogue:
        if entry.id not in store.slots:
            store._drop_host(entry)
    assert in_memory(model) == {"a", "b"}
    return model


# -- what it does -----------------------------------------------------------------------------------
def test_a_call_finds_what_was_prefetched(family: Family, disk: Disk) -> None:
    model = seated(family)
    rows, slots = pools(model), dict(model._multilora.store.slots)
    model.prefetch(["c", None, "__base__", "a", "c"])
    settle(model)
    assert disk.reads == ["c"] and in_memory(model) == {"a", "b", "c"}
    assert disk.threads == {"hf_multilora-prefetch_0"}
    assert pools(model) == rows and model._multilora.store.slots == slots, "no slot and no pool is touched"
    check(family, model, ["c", None, "b"])
    assert disk.reads == ["c"]
    check(family, model, ["d", None, "b"])
    assert disk.reads == ["c", "d"], "what was not prefetched is read"


@pytest.mark.parametrize("kind", [list, tuple, torch.tensor])
def test_by_ids(family: Family, disk: Disk, kind: Any) -> None:
    model = seated(family)
    numbers = [0, model._multilora.store.catalogue.entry("d").id, 0]
    model.prefetch(adapter_ids=kind(numbers))
    settle(model)
    assert disk.reads == ["d"] and "d" in in_memory(model)


def test_what_it_does_not_take(family: Family, disk: Disk) -> None:
    model = seated(family)
    before = state(model)
    with pytest.raises(UnknownAdapterError, match="no adapter is named 'x'"):
        model.prefetch(["c", "x"])
    with pytest.raises(UnknownAdapterError, match="no adapter has id 99"):
        model.prefetch(adapter_ids=[99])
    with pytest.raises(TypeError, match="must be a list with one name"):
        model.prefetch("c")
    with pytest.raises(TypeError, match="adapter_names or adapter_ids, got neither"):
        model.prefetch()
    with pytest.raises(ValueError, match="not both"):
        model.prefetch(["c"], adapter_ids=[1])
    settle(model)
    assert not disk.reads and state(model) == before
    model.prefetch([])
    model.prefetch([None])
    assert not disk.reads and not model._multilora.store.awaited


def test_adapters_in_slots_stay_for_longer(family: Family) -> None:
    model = seated(family)
    model.prefetch(["a"])
    check(family, model, ["c", None])
    assert sorted(filter(None, model.memory_report().slots)) == ["a", "c"], "b, which was used last, made room"


def test_the_first_of_them_where_they_are_more_than_slots(family: Family, disk: Disk) -> None:
    model = seated(family, max_cpu_loras=None)
    model.prefetch(["a", "e", "c", "d"])
    settle(model)
    assert disk.reads == ["e", "c"]


# -- host memory ------------------------------------------------------------------------------------
def test_host_copies_that_make_room_hold_no_slot(family: Family, disk: Disk) -> None:
    model = seated(family, max_cpu_loras=3)
    for name, want in (("c", "abc"), ("d", "abd"), ("e", "abe")):
        model._multilora.store.awaited.clear()  # as if a call had used it
        model.prefetch([name])
        settle(model)
        assert in_memory(model) == set(want)
    check(family, model, ["a", "b"])
    assert disk.reads == ["c", "d", "e"]


@pytest.mark.parametrize("limit", ["count", "bytes"])
def test_no_room_in_host_memory_is_said_once(
    family: Family, disk: Disk, caplog: pytest.LogCaptureFixture, limit: str
) -> None:
    model = seated(family, max_cpu_loras=2 if limit == "count" else None)
    if limit == "bytes":
        model._multilora.store.host_bytes = model.memory_report().host_bytes
    before = state(model)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            model.prefetch(["c"])
            settle(model)
    assert not disk.reads and state(model) == before
    said = [r.getMessage() for r in caplog.records if "'c' was not read ahead" in r.getMessage()]
    assert len(said) == (1 if limit == "count" else len(said)) and "raise max_cpu_loras above max_loras=2" in said[0]
    check(family, model, ["c", None, "b"])


def test_what_there_will_be_no_room_for_is_not_read(family: Family, disk: Disk) -> None:
    """One place is left, and an adapter is on its way to it."""
    model = seated(family, max_cpu_loras=3)
    disk.gate.clear()
    model.prefetch(["c", "d"])
    disk.gate.set()
    settle(model)
    assert disk.reads == ["c"] and in_memory(model) == set("abc")


def test_room_that_was_taken_while_it_was_read(family: Family, disk: Disk, caplog: pytest.LogCaptureFixture) -> None:
    model = seated(family, max_cpu_loras=3)
    disk.gate.clear()
    model.prefetch(["d"])
    assert disk.begun.wait(WAIT)
    model._multilora.store.max_cpu_loras = 2
    with caplog.at_level(logging.WARNING):
        disk.gate.set()
        settle(model)
    assert in_memory(model) == set("ab") and "'d' was not read ahead" in caplog.text
    check(family, model, ["d", None])


def test_prefetched_host_copies_go_last() -> None:
    bench = Bench("abcde", slots=2, host=3)
    bench.use("ab")
    bench.use("e")
    assert bench.hosted == "abe"
    bench.store.expect([bench.ids["a"]])
    bench.ids["f"] = bench.add("f", 9.0)
    assert bench.hosted == "aef", "without prefetch a would have gone, used longest ago"
    bench.disk.reads.clear()
    bench.use("a"), bench.use("b")
    assert bench.disk.reads == ["b"] and not bench.store.awaited, "a was used"
    bench.store.expect(bench.ids[n] for n in "ab")
    bench.store.expect(bench.ids[n] for n in "cde")
    assert list(bench.store.awaited) == [bench.ids[n] for n in "bcde"], "of twice as many as there are slots"
    bench.store.expect(bench.ids[n] for n in "fab")
    assert bench.hosted == "fab"
    bench.ids["g"] = bench.add("g", 10.0)
    assert bench.hosted == "abg", "where all are awaited, the one used longest ago goes"


def test_room_ahead_of_use() -> None:
    bench = Bench("abcdef", slots=2, host=4)
    entry = {name: bench.store.catalogue.entry(name) for name in "abcdef"}
    bench.use("ab"), bench.use("cd")
    assert bench.hosted == "abcd" and bench.resident == "cd"
    bench.store.expect([bench.ids["a"]])
    assert bench.store.room_ahead(entry["e"]) == [entry["b"]]
    host = bench.device.pack(bench.disk.adapter("e"))
    assert bench.store.admit(entry["e"], host) is True and bench.hosted == "acde" and entry["b"].host is None
    bench.store.pin("e")
    before = bench.state()
    assert bench.store.room_ahead(entry["f"]) is None, "prefetched, in slots, pinned"
    assert bench.store.admit(entry["f"], host) is False and bench.state() == before
    bench.store.unpin("e")
    assert bench.store.room_ahead(entry["f"]) == [entry["e"]]


# -- while it reads ---------------------------------------------------------------------------------
def test_a_call_waits_for_a_read_that_has_begun(family: Family, disk: Disk) -> None:
    model = seated(family)
    disk.gate.clear()
    model.prefetch(["c"])
    assert disk.begun.wait(WAIT)
    threading.Timer(0.2, disk.gate.set).start()
    check(family, model, ["c", None])
    assert disk.reads == ["c"], "not twice"


def test_a_call_does_not_wait_for_reads_of_others(family: Family, disk: Disk) -> None:
    """d is queued behind c: the call reads d itself, while c is still being read."""
    model = seated(family)
    disk.gate.clear()
    model.prefetch(["c", "d"])
    assert disk.begun.wait(WAIT)
    store, real = model._multilora.store, model._multilora.store.read

    def read(entry: Entry) -> Any:
        disk.gate.set() if threading.current_thread() is threading.main_thread() else None
        return real(entry)

    store.read = read
    check(family, model, ["d", None])
    settle(model)
    assert sorted(disk.reads) == ["c", "d"] and "MainThread" in disk.threads


@pytest.mark.parametrize("verb", ["delete", "replace", "move"])
def test_an_adapter_that_changes_while_it_is_read(family: Family, disk: Disk, verb: str) -> None:
    model = seated(family)
    disk.gate.clear()
    model.prefetch(["c", "d"])
    assert disk.begun.wait(WAIT)
    if verb == "delete":
        model.delete_adapter("c")
    elif verb == "replace":
        model.load_adapter(str(family.paths["e"]), "c", load_inplace=True)
    else:
        model.double()
    disk.gate.set()
    settle(model)
    assert "c" not in in_memory(model) or verb == "replace"
    if verb == "delete":
        with pytest.raises(UnknownAdapterError):
            logits(model, same_ids(1), ["c"])
        check(family, model, ["d", None])
    elif verb == "replace":
        inputs = same_ids(2)
        assert_rows(logits(model, inputs, ["c", None]), family.truth(inputs, ["e", None]))
    else:
        inputs = same_ids(2)
        truth = family.truth(inputs, ["c", None], base=copy.deepcopy(family.base).double())
        assert_rows(logits(model, inputs, ["c", None]), truth, 1e-8)
        assert model._multilora.store.catalogue.entry("c").host.factors.popitem()[1][0].dtype == torch.float64


@pytest.mark.parametrize("damage", ["gone", "other"])
def test_files_that_cannot_be_read(
    family: Family, tmp_path: Path, disk: Disk, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    """Logged, raised by the call that needs them, and forgotten once they are back."""
    own = Family(family.base, tmp_path, {name: {"r": r} for name, r in RANKS.items()})
    model = seated(own)
    file = own.paths["c"] / "adapter_model.safetensors"
    whole, before = file.read_bytes(), state(model)
    file.unlink() if damage == "gone" else file.write_bytes((own.paths["e"] / file.name).read_bytes())
    with caplog.at_level(logging.WARNING):
        model.prefetch(["c"])
        settle(model)
    said = [r.getMessage() for r in caplog.records if "a prefetch failed" in r.getMessage()]
    assert (len(said) == 1 and "adapter 'c'" in said[0]) or "adapter 'c' (" in said[0]
    assert state(model) == before and not model._multilora.store.reads.pending
    check(own, model, ["a", None, "b"])
    with pytest.raises(FileNotFoundError if damage == "gone" else AdapterError, match=r"delete_adapter|load_inplace"):
        logits(model, same_ids(2), ["c", None])
    file.write_bytes(whole)
    model.prefetch(["c"])
    settle(model)
    disk.reads.clear()
    check(own, model, ["c", None, "b"])
    assert not disk.reads


def test_a_failure_while_a_call_waits_for_it(family: Family, tmp_path: Path, disk: Disk) -> None:
    """The call tries itself, and its error is the usual one."""
    own = Family(family.base, tmp_path, {name: {"r": r} for name, r in RANKS.items()})
    model = seated(own)
    (own.paths["c"] / "adapter_model.safetensors").unlink()
    disk.gate.clear()
    model.prefetch(["c"])
    assert disk.begun.wait(WAIT)
    threading.Timer(0.2, disk.gate.set).start()
    with pytest.raises(FileNotFoundError, match=r"delete_adapter\('c'\)"):
        logits(model, same_ids(2), ["c", None])
    assert disk.reads == ["c", "c"]
    check(own, model, ["d", None, "b"])


# -- threads ----------------------------------------------------------------------------------------
def test_it_does_not_wait_for_a_running_call(family: Family, disk: Disk) -> None:
    model = seated(family)
    rows, started, done = pools(model), threading.Event(), threading.Event()
    inputs = {"input_ids": same_ids(3)}

    def generate() -> Any:
        step = Meeting(started, done, WAIT)
        settings = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
        return model.generate(**inputs, adapter_names=["a", None, "b"], logits_processor=[step], **settings)

    def ahead() -> bool:
        assert started.wait(WAIT)
        model.prefetch(["c", "d"])
        settle(model)
        during = model._multilora.routing.open and in_memory(model) == set("abcd") and pools(model) == rows
        done.set()
        return during

    got, during = run_all([generate, ahead])
    assert during is True
    want = family.model(max_loras=3)
    settings = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(got, want.generate(**inputs, adapter_names=["a", None, "b"], **settings))
    assert not torch.equal(got, want.generate(**inputs, adapter_names=["b", None, "a"], **settings))
    disk.reads.clear()
    check(family, model, ["c", None, "d"])
    assert not disk.reads


@pytest.mark.parametrize("locked", [True, False])
def test_tiers_are_not_walked_while_a_prefetch_changes_them(family: Family, locked: bool) -> None:
    """The store's lock keeps it out in the middle of a load; without it, the control, it gets in."""
    model = seated(family)
    store, inside = model._multilora.store, list[bool]()
    if not locked:
        store.lock = NoLock()
    real = model._multilora.fill

    def fill(slot: int, host: Any) -> None:
        thread = threading.Thread(target=lambda: model.prefetch(["d"]), daemon=True)
        thread.start()
        thread.join(0.5 if locked else WAIT)
        inside.append(not thread.is_alive())
        real(slot, host)

    model._multilora.fill = fill
    logits(model, same_ids(2), ["c", None])
    assert inside == [not locked]


def test_prefetches_and_calls_that_evict_each_other(family: Family, disk: Disk) -> None:
    """Three threads call, one prefetches and one registers and deletes: every answer is right, and nothing hangs."""
    model = seated(family, max_cpu_loras=3)
    mixes = [["a", "b", None], ["c", None, "d"], ["e", "a", None]]
    truth = {name: family.truth(same_ids(1), [name]) for name in (None, *RANKS)}
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)

    def call(mix: list[str | None]) -> list[float]:
        found = []
        for _ in range(8):
            got = logits(model, same_ids(3), mix)
            found += [float((got[i] - truth[name][0]).abs().max()) for i, name in enumerate(mix)]
        return found

    def ahead() -> bool:
        for i in range(60):
            model.prefetch([list(RANKS)[i % 5], list(RANKS)[(2 * i + 1) % 5], None])
        return True

    def load() -> bool:
        for k in range(6):
            model.load_adapter(str(family.paths["b"]), f"x{k}")
            model.prefetch([f"x{k}"])
            model.delete_adapter(f"x{k}")
        return True

    try:
        results = run_all([*(lambda mix=mix: call(mix) for mix in mixes), ahead, load])
    finally:
        sys.setswitchinterval(interval)
    assert results[3:] == [True, True]
    assert max(max(r) for r in results[:3]) < 1e-4, results
    assert float((truth["a"] - truth["b"]).abs().max()) > 1e-2
    settle(model)
    assert set(model._multilora.store.slots) <= set(model._multilora.store.hosted)
    assert len(model._multilora.store.hosted) <= 3


def test_a_model_s_copy_reads_its_own(family: Family, disk: Disk) -> None:
    model = seated(family)
    disk.gate.clear()
    model.prefetch(["c"])
    assert disk.begun.wait(WAIT)
    twins = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    disk.gate.set()
    settle(model)
    for twin in twins:
        assert not twin._multilora.store.awaited and not twin._multilora.store.reads.pending
        check(family, twin, ["c", None, "b"])
        twin.prefetch(["d"])
        settle(twin)
        assert "d" in in_memory(twin)
    assert "d" not in in_memory(model) and "c" in in_memory(model)


# -- batches ----------------------------------------------------------------------------------------
def test_batches_are_prefetched_one_ahead(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    model = seated(family)
    asked: list[Any] = []
    monkeypatch.setattr(type(model), "prefetch", lambda self, **given: asked.append(given))
    taken: list[int] = []

    def batches(count: int) -> Iterator[dict[str, Any]]:
        for i in range(count):
            taken.append(i)
            yield {"input_ids": None, ("adapter_names" if i % 2 else "adapter_ids"): [i]}

    for count in (0, 1, 4):
        asked.clear(), taken.clear()
        for i, batch in enumerate(model.prefetched(batches(count))):
            assert taken[-1] == min(i + 1, count - 1), "one more than was handed out"
            assert [next(iter(each.values())) for each in asked] == [[k] for k in range(len(taken))]
            assert batch[("adapter_names" if i % 2 else "adapter_ids")] == [i]
        assert len(asked) == count
    assert set(asked[1]) == {"adapter_names"} and set(asked[0]) == {"adapter_ids"}


def test_batches_with_calls_between_them(family: Family, disk: Disk) -> None:
    model = seated(family)
    rows = [["c", None], ["d", "b"], ["e", None], ["a", "c"]]
    batches = [{"input_ids": same_ids(2), "adapter_names": names} for names in rows]
    for batch in model.prefetched(batches):
        with torch.no_grad():
            assert_rows(model(**batch).logits, family.truth(same_ids(2), batch["adapter_names"]))
    with pytest.raises(ValueError, match=r"must say whose adapters .* it has \['input_ids'\]"):
        list(model.prefetched([{"input_ids": 1}]))
