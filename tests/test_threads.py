"""Threads on one model: calls wait for each other, loading does not wait for a call, and rows never mix."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers as tf

from hf_multilora import RoutingError
from tests.models import NEW, Family, prompts, right_rows

pytest_plugins = ("tests.fixtures",)

MIXES = [["a", None, "b", "c"], ["c", "b", None, "a"], ["b", "a", "c", None]]
INPUTS = prompts([3, 7, 5, 4])
WAIT = 60.0  # seconds after which a thread that should have gone on is taken for hung


class NoLock(contextlib.nullcontext[None]):
    """A lock that keeps nobody out: the control."""

    def acquire(self, *args: Any, **kwargs: Any) -> bool:
        return True

    def release(self) -> None: ...


class Meeting(tf.LogitsProcessor):
    """At the second token, lets the other thread go on and waits for it, as long as it could be running."""

    def __init__(self, mine: threading.Event, other: threading.Event, seconds: float) -> None:
        self.mine, self.other, self.seconds = mine, other, seconds
        self.calls = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls == 2:
            self.mine.set()
            self.other.wait(self.seconds)
        return scores


def run_all(tasks: list[Callable[[], Any]]) -> list[Any]:
    """Every task in a thread of its own; their results, or the first error."""
    results: list[Any] = [None] * len(tasks)

    def run(i: int) -> None:
        try:
            results[i] = tasks[i]()
        except Exception as error:
            results[i] = error

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(len(tasks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT)
        assert not thread.is_alive(), "a thread hangs"
    return results


@pytest.fixture
def switching() -> Iterator[None]:
    """Threads take turns far more often than they would by themselves."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.parametrize("name", ["llama", "t5"])
def test_generate_and_forward_from_several_threads(family: Callable[[str], Family], switching: None, name: str) -> None:
    made = family(name)
    model, prompt = made.model(max_loras=3), 0 if made.seq2seq else 7
    extra = {"decoder_input_ids": torch.tensor([[3, 4, 5]] * 4)} if made.seq2seq else {}

    def work(names: list[str | None]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        sequences, logits = [], []
        with torch.no_grad():
            for _ in range(3):
                sequences.append(model.generate(**INPUTS, adapter_names=names, max_new_tokens=NEW)[:, prompt:])
                logits.append(model(**INPUTS, **extra, adapter_names=names).logits)
        return sequences, logits

    results = run_all([lambda names=names: work(names) for names in MIXES])
    with torch.no_grad():
        alone = [model(**INPUTS, **extra, adapter_names=names).logits for names in MIXES]
    for i, (names, (sequences, logits)) in enumerate(zip(MIXES, results, strict=True)):
        truth = made.truth(names, INPUTS, max_new_tokens=NEW)
        assert all(all(right_rows(s, truth)) for s in sequences)
        for got in logits:
            torch.testing.assert_close(got, alone[i], atol=1e-5, rtol=1e-5)
            assert (got - alone[i - 1]).abs().max() > 1e-2
    assert not model._multilora.routing.open


@pytest.mark.parametrize("locked", [True, False])
def test_a_second_call_waits_for_the_first(family: Callable[[str], Family], locked: bool) -> None:
    """The first call stops at its second token until the second call has been there as well, which the lock prevents.
    Without the lock, the control, the calls overlap: one has the other's rows."""
    made = family("llama")
    model = made.model()
    if not locked:
        model._multilora.lock = NoLock()
    met = [threading.Event(), threading.Event()]
    seconds = 0.5 if locked else WAIT

    def work(i: int) -> torch.Tensor:
        step = Meeting(met[i], met[1 - i], seconds)
        return model.generate(**INPUTS, adapter_names=MIXES[i], logits_processor=[step], max_new_tokens=NEW)[:, 7:]

    results = run_all([lambda: work(0), lambda: work(1)])
    right = [
        not isinstance(got, Exception) and all(right_rows(got, made.truth(names, INPUTS, max_new_tokens=NEW)))
        for got, names in zip(results, MIXES, strict=False)
    ]
    assert all(right) == locked, results


def test_a_block_keeps_other_tasks_out(family: Callable[[str], Family]) -> None:
    """asyncio tasks take turns in one thread, for which the lock is no bar: an error, no other task's rows."""
    made = family("llama")
    model, turns = made.model(), []

    async def block() -> None:
        with torch.no_grad(), model.adapters(MIXES[0]):
            before = model(**INPUTS).logits
            await asyncio.sleep(0)
            turns.append(torch.equal(before, model(**INPUTS).logits))

    async def other(names: Any) -> None:
        for call in (model, model.generate):
            with pytest.raises(RoutingError, match="asyncio task"):
                call(**INPUTS, adapter_names=names)
        turns.append("refused")

    async def main() -> None:
        await asyncio.gather(block(), other(None), other(MIXES[0]))
        model(**INPUTS, adapter_names=MIXES[0])

    asyncio.run(main())
    assert turns == ["refused", "refused", True] and not model._multilora.routing.open


def test_generators_that_leave_their_blocks_in_turns_are_told(family: Callable[[str], Family]) -> None:
    model = family("llama").model()

    def run(name: str) -> Iterator[None]:
        with model.adapters([name]):
            yield

    first, second = run("a"), run("b")
    next(first), next(second)
    with pytest.raises(RoutingError, match="opposite order"):
        first.close()
    second.close()
    assert not model._multilora.routing.open and all(not e.in_flight for e in model._multilora.store.catalogue)


def test_a_block_keeps_other_threads_out(family: Callable[[str], Family]) -> None:
    made = family("llama")
    model = made.model()
    inside, done = threading.Event(), threading.Event()

    def other() -> torch.Tensor:
        inside.wait(WAIT)
        got = model.generate(**INPUTS, max_new_tokens=NEW)  # names none: must get the base, not the block's rows
        done.set()
        return got[:, 7:]

    def block() -> torch.Tensor:
        with model.adapters(MIXES[0]):
            inside.set()
            assert not done.wait(0.3), "the other thread ran inside this block"
            return model.generate(**INPUTS, max_new_tokens=NEW)[:, 7:]

    base, mixed = run_all([other, block])
    assert all(right_rows(base, made.truth([None] * 4, INPUTS, max_new_tokens=NEW)))
    assert all(right_rows(mixed, made.truth(MIXES[0], INPUTS, max_new_tokens=NEW)))


@pytest.mark.parametrize("verbs", ["load", "load, pin and delete"])
def test_loading_does_not_wait_for_a_running_call(family: Callable[[str], Family], verbs: str) -> None:
    """An adapter of modules that had none is loaded while a call stands at its second token; it is right afterwards."""
    made = family("llama")
    folder = str(made.adapter("b"))  # adapts all linears and the embedding; "a" has q and v only
    model = made.model(["a"])
    started, loaded = threading.Event(), threading.Event()
    names = ["a", None, "a", None]

    def generate() -> torch.Tensor:
        step = Meeting(started, loaded, WAIT)
        return model.generate(**INPUTS, adapter_names=names, logits_processor=[step], max_new_tokens=NEW)[:, 7:]

    def load() -> bool:
        assert started.wait(WAIT)
        model.load_adapter(folder, "new", pinned=verbs != "load")
        if verbs != "load":
            model.load_adapter(folder, "gone")
            model.delete_adapter("gone")
        waited = model._multilora.routing.open
        loaded.set()
        return waited

    got, during = run_all([generate, load])
    assert during is True, "the call was over before the adapter was loaded"
    assert all(right_rows(got, made.truth(names, INPUTS, max_new_tokens=NEW)))
    after = model.generate(**INPUTS, adapter_names=["new", "a", None, "new"], max_new_tokens=NEW)[:, 7:]
    assert all(right_rows(after, made.truth(["b", "a", None, "b"], INPUTS, max_new_tokens=NEW)))
    assert not any(right_rows(after, made.truth(["a", "b", "b", None], INPUTS, max_new_tokens=NEW)))


class Watched(dict[str, Any]):
    """Sites that let another thread at them in the middle of a walk over them."""

    during: Callable[[], None]

    def values(self) -> Any:
        for i, value in enumerate(super().values()):
            if i == 1:
                self.during()
            yield value


@pytest.mark.parametrize("locked", [True, False])
def test_sites_are_not_walked_while_a_load_adds_some(family: Callable[[str], Family], locked: bool) -> None:
    """Walks over the adapted modules hold the store's lock; without it, the control, a load disturbs them."""
    made = family("llama")
    model = made.model(["a"])
    runtime = model._multilora
    if not locked:
        runtime.store.lock = NoLock()
    tried: list[threading.Thread] = []

    def load_now() -> None:
        if not tried:
            tried.append(threading.Thread(target=lambda: model.load_adapter(str(made.adapter("b")), "b"), daemon=True))
            tried[0].start()
            tried[0].join(1.0 if locked else WAIT)

    runtime.sites = Watched(runtime.sites)
    runtime.sites.during = load_now
    if locked:
        got = model.generate(**INPUTS, adapter_names=["a"] * 4, max_new_tokens=NEW)[:, 7:]
        tried[0].join(WAIT)
        assert all(right_rows(got, made.truth(["a"] * 4, INPUTS, max_new_tokens=NEW)))
        got = model.generate(**INPUTS, adapter_names=["b", "a", "b", None], max_new_tokens=NEW)[:, 7:]
        assert all(right_rows(got, made.truth(["b", "a", "b", None], INPUTS, max_new_tokens=NEW)))
    else:
        with pytest.raises(RuntimeError, match="changed size during iteration"):
            model.generate(**INPUTS, adapter_names=["a"] * 4, max_new_tokens=NEW)
    assert tried


def test_loads_and_calls_that_evict_each_other(family: Callable[[str], Family], switching: None) -> None:
    """Two slots, three adapters, three threads, and a fourth that registers and deletes: every answer is right."""
    made = family("llama")
    model = made.model(max_loras=2)
    truth = {n: made.truth([n] * 4, INPUTS, max_new_tokens=3) for n in (None, "a", "b", "c")}
    names = [["a", "b", None, "a"], ["c", None, "a", "c"], ["b", "c", "c", None]]

    def call(mix: list[str | None]) -> list[bool]:
        got = [model.generate(**INPUTS, adapter_names=mix, max_new_tokens=3)[:, 7:] for _ in range(5)]
        return [r for g in got for r in right_rows(g, [truth[n][i] for i, n in enumerate(mix)])]

    def load() -> list[bool]:
        for k in range(6):
            model.load_adapter(str(made.adapter("b")), f"x{k}")
            model.delete_adapter(f"x{k}")
        return [True]

    results = run_all([*(lambda mix=mix: call(mix) for mix in names), load])
    assert results == [[True] * 20] * 3 + [[True]]
    assert model._multilora.store.evictions > 0
