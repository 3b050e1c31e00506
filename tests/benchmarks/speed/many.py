"""Stage many: up to thousands of registered adapters, requests that arrive at random, throughput as their number grows.

As in S-LoRA: gaps between arrivals from a gamma distribution (cv 1: a Poisson process), adapters by a power law, the
rate the same for every number of adapters. The names share a few files, so that disk suffices; each has a host copy of
its own.
"""

from __future__ import annotations

import argparse
from statistics import mean, median
from typing import Any

from .. import gpu_gate as gate
from ..material import prompts, save_adapter
from ..registry import LINEARS, Work, adapter_name
from ..timing import now
from .sides import Side
from .stage import Stage
from .streams import Server, arrivals, check_batches, drawn

LAYERS = 4  # an adapter then takes 10.5 MB, and 2,000 of them 21 GB of host memory
EXPONENT = 1.0
FULL = {"tokens": 64, "rows": 16, "slots": 32, "files": 64, "steps": 16}
SMALL = {"tokens": 5, "rows": 2, "slots": 3, "files": 4, "steps": 2}
PASSES = 2


def counts_of(settings: argparse.Namespace) -> list[int]:
    return [4, 9] if settings.small else sorted(settings.registered)


def cells(settings: argparse.Namespace) -> list[str]:
    return [f"{count} registered" for count in counts_of(settings)]


def run(stage: Stage) -> None:
    shop, sizes, settings = stage.shop, SMALL if stage.small else FULL, stage.settings
    counts = [count for count in counts_of(settings) if f"{count} registered" in stage.wanted(cells(settings))]
    rows, tokens, requests = sizes["rows"], sizes["tokens"], 24 if stage.small else settings.requests
    ids = prompts(rows, tokens + 1, shop.bare.config.vocab_size, stage.device)["input_ids"]
    files = []
    for i in range(sizes["files"]):
        files.append(save_adapter(settings.folder / f"file-{i}", shop.make(i), settings.rank, LINEARS))
    stage.note(
        f"{sizes['files']} files of {shop.adapter_bytes() / 1e6:.1f} MB, {sizes['slots']} slots; batches of at most "
        f"{rows} requests from the queue, a prompt of {tokens} tokens and {sizes['steps']} replays of a decode step "
        f"each, one batch after the other"
    )
    names: list[str] = []
    rate = unit = 0.0
    with shop.ours(sizes["slots"], {}, hosted=counts[-1]) as ours:
        server: Any = None
        for count in counts:
            cell = f"{count} registered"
            if not stage.in_time(cell):
                continue
            with stage.cell(cell) as found:
                found["registering"] = register(stage, ours.model, files, names, count)
                if server is None:
                    first = Work("decode", rows, tokens, 1, sizes["slots"], tuple(mix(names, rows, 0)))
                    server = Server(Side(ours, first, ids, 64 - tokens % 64, stage.device), sizes["steps"])
                found["errors"] = check(stage, server, ids, names, len(files))
                if not rate:
                    rate = settings.load * capacity(server, names)
                asked = drawn(names, EXPONENT, requests, count)
                times = arrivals(rate, settings.cv, requests, count)
                passes = [server.queue(asked, times, prefetch=server.can_prefetch) for _ in range(PASSES)]
                speed = mean(found["requests_s"] for found in passes)
                unit = unit or speed
                found |= {"passes": passes, "rate": rate, "requests_s": speed, "value": speed / unit}
                found["note"] = (
                    f"{speed:.1f} requests/s of {rate:.1f} that arrive, hit rate {passes[-1]['hit_rate']:.2f}, "
                    f"batches of {passes[-1]['mean_batch']:.1f}, a registration "
                    f"{found['registering']['median_ms']:.0f} ms (the last ones {found['registering']['last_ms']:.0f})"
                    + ("" if server.can_prefetch else ", no prefetch")
                )


def register(stage: Stage, model: Any, files: list[Any], names: list[str], count: int) -> dict[str, float]:
    """More names until there are `count`; ms of each `load_adapter`."""
    took = []
    for i in range(len(names), count):
        start = now(stage.device)
        model.load_adapter(str(files[i % len(files)]), adapter_name(i))
        took.append(1e3 * (now(stage.device) - start))
        names.append(adapter_name(i))
    return {
        "count": len(took), "seconds": sum(took) / 1e3, "median_ms": median(took), "first_ms": median(took[:16]),
        "last_ms": median(took[-16:]),
    }  # fmt: skip


def mix(names: list[str], rows: int, start: int) -> list[str]:
    """Names from all of the list, the last among them; those of start 0 and 1 have no file in common, row by row."""
    step = max(1, len(names) // rows)
    return [names[(len(names) - 1 - start - i * step) % len(names)] for i in range(rows)]


def check(stage: Stage, server: Server, ids: Any, names: list[str], files: int) -> dict[str, float]:
    """Two batches over all that is registered, against the formula with the files' own factors."""
    shop, work = stage.shop, server.side.work
    known = list(shop.pairs(files).values())
    adapters = {name: known[i % files] for i, name in enumerate(names)}
    works = [
        Work("decode", work.rows, work.tokens, 1, work.slots, tuple(mix(names, work.rows, start))) for start in (0, 1)
    ]
    truths = gate.truths(shop.bare, adapters, shop.scaling, works, lambda work: ids)
    shop.empty_cache()
    return check_batches(server, works, truths, prefetch=server.can_prefetch)


def capacity(server: Server, names: list[str]) -> float:
    """Requests per second in full batches without loads."""
    few = [name for name in names[: min(len(names), 4)]]
    batch: list[str | None] = [few[i % len(few)] for i in range(server.rows)]
    return server.stream([batch] * 8, lead=2, prefetch=False)["requests_s"]
