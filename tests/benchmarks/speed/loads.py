"""Stage loads: an adapter to its slot, and streams of requests over many more adapters than there are slots."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from statistics import mean
from typing import Any

from .. import gpu_gate as gate
from .. import gpu_timing as timing
from ..gpu_contenders import Rows
from ..material import Pairs, prompts
from ..registry import Work, adapter_name
from .sides import Side
from .stage import Stage
from .streams import Server, check_batches, drawn, resident

SLOT, PREFETCH = "slot", ", prefetch"
EXPONENTS = {"uniform": 0.0, "zipf": 1.1}
STEPS = 32  # tokens of a request after its prompt of TOKENS
TOKENS, ROWS, SLOTS, ADAPTERS = 128, 8, 16, 256
SMALL = {"tokens": 5, "rows": 2, "slots": 4, "adapters": 12, "steps": 2}
FULL = {"tokens": TOKENS, "rows": ROWS, "slots": SLOTS, "adapters": ADAPTERS, "steps": STEPS}
LEAD = 2  # batches before the clock starts


def cells(settings: argparse.Namespace) -> list[str]:
    return [SLOT, *[kind + how for kind in EXPONENTS for how in ("", PREFETCH)]]


def run(stage: Stage) -> None:
    shop, sizes = stage.shop, SMALL if stage.small else FULL
    wanted = stage.wanted(cells(stage.settings))
    slots, rows, tokens = sizes["slots"], sizes["rows"], sizes["tokens"]
    count = sizes["adapters"] if wanted != [SLOT] else slots + 1
    names = [adapter_name(i) for i in range(count)]
    works = [Work("decode", rows, tokens, rows, slots, tuple(names[i * rows : (i + 1) * rows])) for i in range(2)]
    ids = prompts(rows, tokens + 1, shop.bare.config.vocab_size, stage.device)["input_ids"]
    truths = gate.truths(shop.bare, shop.pairs(2 * rows), shop.scaling, works, lambda work: ids)
    shop.empty_cache()

    def each() -> Iterator[tuple[str, Pairs]]:
        for i, name in enumerate(names):
            yield name, shop.make(i)

    with shop.ours(slots, each(), hosted=count) as ours:
        server = Server(Side(ours, works[0], ids, 64 - tokens % 64, stage.device), sizes["steps"])
        if SLOT in wanted:
            with stage.cell(SLOT) as found:
                found["errors"] = check_batches(server, works, truths, prefetch=False)
                slot(stage, ours, names[: slots + 1], found)
        for kind, exponent in EXPONENTS.items():
            some = [name for name in wanted if name.startswith(kind) and stage.in_time(name)]
            if some:
                batches = [
                    list[str | None](drawn(names, exponent, rows, 100 * i + 7))
                    for i in range(LEAD + stage.settings.batches)
                ]
                streams(stage, server, works, truths, some, batches, names)


def slot(stage: Stage, ours: Any, names: list[str], found: dict[str, Any]) -> None:
    """ms from host memory to the slot: a request with a load less one without."""
    nbytes = stage.shop.adapter_bytes()
    pinned = timing.pinned_copy_ms(nbytes, stage.device)
    loads = timing.slot_loads(ours, names, min(len(names), 12), stage.device)
    found |= {"slot": loads, "value": loads["load_ms"], "unit": "ms", "nbytes": nbytes}
    if pinned is not None:
        found["floor"] = pinned
    found["note"] = (
        f"{nbytes / 1e6:.1f} MB; request with a load {loads['ms']:.2f} ms, without {loads['resident_ms']:.2f}"
    )


def streams(
    stage: Stage, server: Server, works: list[Work], truths: Any, cells: list[str], batches: list[Rows],
    names: list[str],
) -> None:  # fmt: skip
    """Throughput of a stream over that of the same batches with adapters that stay in their slots: in turns, resident,
    plain, prefetched, prefetched, plain, resident."""
    same = resident(batches, names[::-1])  # the least popular, so that they are no help to the stream
    passes: dict[str, list[dict[str, float]]] = {"resident": []}
    checked: dict[str, Any] = {}
    for name in cells:
        prefetch = name.endswith(PREFETCH)
        with stage.cell(name) as found:
            if prefetch and not server.can_prefetch:
                found["skipped"] = "the model has no prefetch"
                continue
            checked[name] = found["errors"] = check_batches(server, works, truths, prefetch=prefetch)
            passes[name] = []
    if len(passes) == 1:
        return
    for name in [*passes, *reversed(passes)] * stage.settings.rounds:
        if name == "resident":
            passes[name].append(server.stream(same, lead=LEAD, prefetch=False))
        else:
            passes[name].append(server.stream(batches, lead=LEAD, prefetch=name.endswith(PREFETCH)))
    unit = mean(found["requests_s"] for found in passes["resident"])
    for name, found_passes in passes.items():
        if name == "resident":
            continue
        with stage.cell(name) as found:
            found |= {"errors": checked[name], "passes": found_passes, "resident": passes["resident"]}
            speed, hits = (mean(found[key] for found in found_passes) for key in ("requests_s", "hit_rate"))
            found |= {"requests_s": speed, "hit_rate": hits, "value": speed / unit}
            found["note"] = (
                f"{speed:.1f} requests/s, resident {unit:.1f}; hit rate {hits:.2f}, "
                f"{found_passes[0]['loads']:.0f} loads in {len(batches) - LEAD} batches of {server.rows} requests of "
                f"{server.steps} tokens"
            )
