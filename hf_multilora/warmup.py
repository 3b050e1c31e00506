"""Warm-up: what the first requests would otherwise wait for."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .formats import Adapter, LoraFactors, split_site
from .planning import allowed_sites
from .reports import WarmupReport
from .runtime import Runtime
from .sites import widths
from .verify import random_ids

DUMMY = "warmup-{}"


def warmup(
    model: Any,
    inputs: Mapping[str, Any] | None,
    rows: Sequence[int] | None,
    tokens: Sequence[int],
    max_seconds: float,
    generate_kwargs: Mapping[str, Any],
) -> WarmupReport:
    """See MultiLoRAModel.warmup."""
    runtime: Runtime = model._multilora
    rows = sorted({1, runtime.config.max_loras} if rows is None else rows)
    if not rows or not tokens or min(*rows, *tokens) < 1 or not max_seconds > 0:
        raise ValueError(
            f"rows, tokens and max_seconds must be positive, got {rows}, {list(tokens)} and {max_seconds!r}"
        )
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None) or sys.maxsize
    start = time.perf_counter()
    shapes: dict[tuple[int, int], float] = {}
    skipped: list[tuple[int, int]] = []
    with runtime.lock, _resident(runtime) as names, torch.no_grad():
        for count in rows:
            mix = [names[i % len(names)] for i in range(count)]
            for length in sorted(tokens):
                began = time.perf_counter()
                late = began - start >= max_seconds
                if runtime.agreement is not None:  # all processes must make the same calls
                    late = bool(runtime.agreement.most(late))
                if late or (inputs is None and length > longest):
                    skipped.append((count, length))
                    continue
                batch = random_ids(model, count, length) if inputs is None else _repeat(inputs, count)
                model(**batch, adapter_names=mix)
                if generate_kwargs:
                    model.generate(**batch, adapter_names=mix, **generate_kwargs)
                if model.device.type == "cuda":
                    torch.cuda.synchronize(model.device)
                shapes[count, length] = time.perf_counter() - began
                if inputs is not None:
                    break  # the inputs have a length of their own
    return WarmupReport(list(names), shapes, skipped, time.perf_counter() - start)


def _repeat(inputs: Mapping[str, Any], rows: int) -> dict[str, Any]:
    """One row of inputs as many."""
    odd = {k: tuple(v.shape) for k, v in inputs.items() if isinstance(v, Tensor) and v.dim() and v.shape[0] != 1}
    if odd:
        raise ValueError(f"inputs of a warm-up must have one row, got {odd}; rows says how many of it to try")
    return {
        k: v.expand(rows, *v.shape[1:]).contiguous() if isinstance(v, Tensor) and v.dim() else v
        for k, v in inputs.items()
    }


@contextmanager
def _resident(runtime: Runtime) -> Iterator[list[str]]:
    """Names of adapters to warm up with, as many as slots can be had for: pinned ones, those in slots, those in host
    memory, others; where none is registered, dummies that change nothing in all slots, taken away at the end."""
    store = runtime.store
    if not store.catalogue.entries:
        with _dummies(runtime) as names:
            yield names
        return
    known = dict.fromkeys([*store.pins, *reversed(store.slots), *reversed(store.hosted), *store.catalogue.names])
    room, held = store.room(known)
    free = [i for i in known if i not in held][: max(room, 0)]
    yield [store.catalogue.by_id(i).name for i in known if i in held or i in free]


@contextmanager
def _dummies(runtime: Runtime) -> Iterator[list[str]]:
    """An adapter of rank max_lora_rank for every module that may be adapted, in every slot."""
    config, store = runtime.config, runtime.store
    if config.max_lora_rank is None:
        raise ValueError("warmup needs registered adapters, or max_lora_rank to stand in for any; there is neither")
    probe = runtime
    if config.target_modules is None:
        probe = Runtime(runtime.model, replace(config, target_modules="all-linear"), runtime.facts, runtime.renames)
    census = runtime.census()
    zero, factors = torch.zeros(1, 1), dict[str, LoraFactors]()
    tiny = [torch.full((1, 1), i * 2.0**-24) for i in range(8)]  # unlike in neighbours: with one A they lie otherwise
    for number, site in enumerate(allowed_sites(probe, census)):
        path, role = split_site(site)
        shape = census[path]
        parts = None if shape.experts is None else (config.max_lora_rank,) * shape.experts.count
        r, (inside, out) = sum(parts) if parts else config.max_lora_rank, widths(role, shape)
        factors[site] = LoraFactors(tiny[number % 8].expand(r, inside), zero.expand(out, r), 1.0, parts)
    next_id, names = store.catalogue.next_id, [DUMMY.format(i) for i in range(config.max_loras)]
    try:
        for name in names:
            runtime.register(name, Adapter(name, name, None, factors), None, replace=False)
        yield names
    finally:
        store.delete(*(name for name in names if name in store.catalogue))
        if store.catalogue.next_id == next_id + len(names):  # nobody has seen these ids
            store.catalogue.next_id = next_id
