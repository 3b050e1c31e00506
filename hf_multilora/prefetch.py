"""Adapters on their way to the device before a call needs them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import torch
from transformers.utils import logging

from .catalogue import Entry
from .host import HostAdapter
from .runtime import Runtime

logger = logging.get_logger(__name__)
BATCH_KEYS = ("adapter_names", "adapter_ids")


def prefetch(runtime: Runtime, ids: Sequence[int]) -> None:
    """See AdapterVerbs.prefetch. Holds the store's lock for as long as it takes to start copies."""
    if runtime.sharded:
        raise NotImplementedError(
            "prefetch needs a base in one process: of a sharded one, what is in memory would depend on the timing in "
            "each process; leave it out, calls load what they need"
        )
    store = runtime.store
    with store.lock:
        entries = [store.catalogue.by_id(i) for i in dict.fromkeys(ids) if i]
        wanted = [entry for entry in entries if entry.id not in store.slots][: store.max_loras]
        for entry in entries:
            for tier in (store.slots, store.hosted):
                if entry.id in tier:
                    tier.move_to_end(entry.id)
        store.expect(entry.id for entry in wanted)
        _give_up_others(runtime)
        for entry in wanted:
            if entry.host is not None:
                _bring(runtime, entry, entry.host)
            elif not store.reads.is_pending(entry):
                _read(runtime, entry)


def _give_up_others(runtime: Runtime) -> None:
    """What is awaited no more is not read any more, and loses what was brought of it."""
    store = runtime.store
    for adapter_id in [i for i in store.reads.pending if i not in store.awaited]:
        store.reads.forget(adapter_id)
    names = [store.catalogue.names[i] for i in store.awaited if i in store.catalogue.names]
    hosts = {host for name in names if (host := store.catalogue.entry(name).host) is not None}
    for staging in runtime.staging.values():
        staging.ahead.keep(hosts)


def _bring(runtime: Runtime, entry: Entry, host: HostAdapter) -> None:
    if runtime.routing.capturing:  # a graph must hold none of this, and its capture forbids some of it
        return
    try:
        runtime.bring(host)
    except torch.OutOfMemoryError:
        logger.warning_once(
            f"adapter {entry.name!r} was not brought to the device ahead of its use, a call that needs it will do it: "
            f"the device has no memory for {host.nbytes} more bytes"
        )


def _read(runtime: Runtime, entry: Entry) -> None:
    store = runtime.store

    def no_room() -> None:
        logger.warning_once(
            f"adapter {entry.name!r} was not read ahead of its use, a call that needs it will do it: host memory for "
            f"adapters is taken by those in slots, in use, pinned or prefetched (max_cpu_loras="
            f"{store.max_cpu_loras}); raise max_cpu_loras above max_loras={store.max_loras}"
        )

    def arrived(future: Future[HostAdapter]) -> None:
        """In the reading thread."""
        if future.cancelled():
            return
        with store.lock:
            if not store.reads.finish(entry, future):  # a call took it, or the adapter went
                return
            error = future.exception()
            if error is not None:
                logger.warning(f"a prefetch failed, a call that needs the adapter will read it again: {error}")
            elif not store.admit(entry, future.result()):
                no_room()
            elif entry.id in store.awaited:
                _bring(runtime, entry, future.result())

    if store.room_ahead(entry) is None:
        no_room()
    else:
        store.reads.start(entry, lambda: store.read(entry), arrived)


def prefetched(model: Any, batches: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """See AdapterVerbs.prefetched."""
    rest = iter(batches)
    missing = object()
    batch: Any = next(rest, missing)
    if batch is not missing:
        _prefetch_batch(model, batch)
    while batch is not missing:
        following: Any = next(rest, missing)
        if following is not missing:
            _prefetch_batch(model, following)
        yield batch
        batch = following


def _prefetch_batch(model: Any, batch: Mapping[str, Any]) -> None:
    given = {key: batch[key] for key in BATCH_KEYS if key in batch}
    if not given:
        raise ValueError(
            f"a batch must say whose adapters its rows need, in one of {BATCH_KEYS}, it has {sorted(batch)}; "
            f"MultiLoRACollator makes such batches"
        )
    model.prefetch(**given)
