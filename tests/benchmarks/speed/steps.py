"""Stages decode, decode-small and prefill: mixed batches against the bare model, under a CUDA graph."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from .. import gpu_gate as gate
from .. import gpu_timing as timing
from ..material import prompts
from ..registry import Work
from . import clock
from .sides import WARM, Side, check_bare, check_base_rows, check_replays
from .stage import Stage

Cells = dict[str, Work]
ROOM = 64  # steps after the prompt: the length of the cache is a multiple of 64
PROMPT_ROUNDS = 4  # of short blocks: prompts draw so much power that the clocks change within a second


def _decode(tokens: int, *cells: tuple[int, int, int]) -> Cells:
    return {f"{rows},{distinct}": Work("decode", rows, tokens, distinct, slots) for rows, distinct, slots in cells}


def _prefill(*cells: tuple[int, int, int, int]) -> Cells:
    return {f"{r}x{t},{distinct}": Work("prefill", r, t, distinct, slots) for r, t, distinct, slots in cells}


# In the order in which they run: (rows, distinct adapters, slots). Those without adapters come first, before any is in
# a slot: a captured step must serve every mix, so with adapters there it computes them.
DECODE = _decode(128, (8, 0, 8), (64, 0, 8), (1, 1, 8), (8, 8, 8), (32, 8, 8), (64, 8, 8), (64, 64, 64))
DECODE_SMALL = _decode(5, (2, 0, 2), (1, 1, 2), (2, 2, 2), (4, 4, 4))
# (rows, tokens, distinct adapters, slots)
PREFILL = _prefill(
    (8, 256, 0, 8), (8, 1024, 0, 8), (8, 256, 1, 8), (8, 256, 8, 8), (8, 1024, 1, 8), (8, 1024, 8, 8), (64, 32, 64, 64),
    (64, 128, 64, 64),
)  # fmt: skip
PREFILL_SMALL = _prefill((2, 7, 0, 2), (2, 7, 1, 2), (4, 7, 4, 4))


def decode_cells(settings: argparse.Namespace) -> Cells:
    return DECODE_SMALL if settings.small else DECODE


def prefill_cells(settings: argparse.Namespace) -> Cells:
    return PREFILL_SMALL if settings.small else PREFILL


def decode(stage: Stage) -> None:
    run(stage, decode_cells(stage.settings))


def prefill(stage: Stage) -> None:
    run(stage, prefill_cells(stage.settings))


def run(stage: Stage, cells: Cells) -> None:
    shop, settings = stage.shop, stage.settings
    works = {name: cells[name] for name in stage.wanted(list(cells))}
    vocabulary = shop.bare.config.vocab_size

    def ids(work: Work) -> Any:
        return prompts(work.rows, work.tokens + (work.phase == "decode"), vocabulary, stage.device)["input_ids"]

    adapters = shop.pairs(max(work.slots for work in works.values()))
    exact = {work if work.distinct else without(work) for work in works.values()} | {*map(without, works.values())}
    truths = gate.truths(shop.bare, adapters, shop.scaling, list(exact), ids)
    shop.empty_cache()
    stage.say(f"{len(truths)} batches computed in the wider dtype")
    for slots in dict.fromkeys(work.slots for work in works.values()):
        some = {name: work for name, work in works.items() if work.slots == slots and stage.in_time(name)}
        if not some:
            continue
        with shop.ours(slots, dict(list(adapters.items())[:slots])) as ours:
            for name, work in some.items():
                if not stage.in_time(name):
                    continue
                with stage.cell(name) as found:
                    room = ROOM - work.tokens % 64 if work.phase == "decode" else 1
                    count = min(settings.replays, room - WARM) if work.phase == "decode" else settings.prefills
                    sides = {
                        clock.BARE: Side(shop.plain(), without(work), ids(work), room, stage.device),
                        clock.OURS: Side(ours, work, ids(work), room, stage.device),
                    }
                    checks(sides, truths, ids(work), found)
                    time_cell(stage, sides, count, found)
                    found["resident"] = ours.resident()
                    nbytes = work.distinct * shop.adapter_bytes()
                    found["floor"] = shop.floor(nbytes, found["bare"]["ms"])
                    del sides
                shop.empty_cache()


def without(work: Work) -> Work:
    """The same batch without adapters."""
    return replace(work, distinct=0, slots=0, names=None)


def checks(sides: dict[str, Side], truths: Mapping[Work, gate.Truth], ids: Any, found: dict[str, Any]) -> None:
    """Everything that must hold of a cell before it is timed. Raises GateError."""
    ours, bare = sides[clock.OURS], sides[clock.BARE]
    base = truths[without(ours.work)]
    if not ours.work.distinct:
        found["errors"] = check_bare(ours, bare, base)
        found["note"] = "bit for bit the bare model" if found["errors"]["identical"] else "not bit for bit"
        return
    found["errors"] = gate.check(ours.subject, ours.work, ids, truths[ours.work], all_checks=True)
    if ours.work.rows > 1:
        found["base_rows"] = check_base_rows(ours, bare, base)


def time_cell(stage: Stage, sides: dict[str, Side], count: int, found: dict[str, Any]) -> None:
    """ABBA of what users wait for: decode under a CUDA graph, prompts eager. Both must serve other mixes when
    captured."""
    ours, rounds = sides[clock.OURS], stage.settings.rounds
    skipped = timing.why_no_graph(stage.device)
    if skipped is None:
        try:
            for side in sides.values():
                side.capture()
        except RuntimeError as error:
            if ours.decode:
                raise
            skipped = f"capture failed: {str(error).strip().splitlines()[0]}"
        else:
            found["replays"] = check_replays(ours, found["errors"]["bound"])
    if skipped is not None:
        found["graph"] = {"skipped": skipped}
    if not ours.decode:
        rounds *= PROMPT_ROUNDS
        for side in sides.values():
            side.replay = side.out = None
    blocks = {name: side.block for name, side in sides.items()}
    timed = clock.palindrome({name: partial(block, count) for name, block in blocks.items()}, rounds)
    captured = ours.replay is not None
    found |= timed | {"kind": "graph" if captured else "eager", "value": clock.ratio(timed)}
    if stage.cuda:
        stage.profile(found, blocks)
