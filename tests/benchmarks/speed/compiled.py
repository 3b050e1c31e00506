"""Stage compiled: the decode step under torch.compile(mode="reduce-overhead", fullgraph=True), against the bare model
compiled alike. Other mixes and other adapters must find the graph as it is."""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.utils import counters

from .. import gpu_gate as gate
from .. import gpu_timing as timing
from ..gate import GateError
from ..gpu_contenders import CACHE, Batch, Rows, Subject
from ..gpu_gate import Truth
from ..material import prompts
from ..registry import Work, adapter_name
from ..timing import now
from . import clock
from .stage import Stage
from .steps import ROOM, without

LAYERS = 16  # half of the shape's: Inductor takes its time for every layer
WARM = 4  # calls that compile, warm up, record and replay
SPARE = 2  # adapters beyond the slots, to be loaded under the compiled step


def cells(settings: argparse.Namespace) -> dict[str, Work]:
    plan = ((5, 2, 2, 2), (5, 4, 4, 4)) if settings.small else ((128, 8, 8, 8), (128, 64, 8, 8), (128, 64, 64, 64))
    return {f"{rows},{n}": Work("decode", rows, tokens, n, slots) for tokens, rows, n, slots in plan}


def run(stage: Stage) -> None:
    shop, layers = stage.shop, stage.record["layers"]
    known = cells(stage.settings)
    works = {name: known[name] for name in stage.wanted(list(known))}
    if not stage.cuda:
        stage.note("no CUDA device: Dynamo traced the step, its eager backend ran it")
    elif layers:
        stage.note(f"{layers} layers, for the time it takes to compile: --layers 32 is the whole model")

    def ids(work: Work) -> Tensor:
        return prompts(work.rows, work.tokens + 1, shop.bare.config.vocab_size, stage.device)["input_ids"]

    adapters = shop.pairs(max(work.slots for work in works.values()) + SPARE)
    truths = gate.truths(shop.bare, adapters, shop.scaling, list(works.values()), ids)
    shop.empty_cache()
    torch._dynamo.reset()
    bares: dict[int, Compiled] = {}
    for slots in dict.fromkeys(work.slots for work in works.values()):
        some = {name: work for name, work in works.items() if work.slots == slots and stage.in_time(name)}
        if not some:
            continue
        with shop.ours(slots, dict(list(adapters.items())[: slots + SPARE])) as ours:
            for name, work in some.items():
                with stage.cell(name) as found:
                    if work.rows not in bares:
                        bares[work.rows] = Compiled(shop.plain(), without(work), ids(work), stage.device)
                    cell(stage, bares[work.rows], ours, work, ids(work), truths[work], found)
    bares.clear()
    torch._dynamo.reset()


class Compiled:
    """A subject's decode step, compiled; the first calls are made at once."""

    def __init__(self, subject: Subject, work: Work, ids: Tensor, device: str) -> None:
        self.subject, self.work, self.device = subject, work, device
        self.room = ROOM - work.tokens % 64
        self.batch = Batch(subject, work, ids, self.room)
        # what a step may look at: the prompt and its own token. Later steps of a block look at no more
        self.mask = torch.zeros(work.rows, 1, 1, self.batch.length, dtype=torch.bool, device=device)
        self.mask[..., : work.tokens + 1] = True
        how: dict[str, Any] = {"mode": "reduce-overhead"} if device.startswith("cuda") else {"backend": "eager"}
        self.call = torch.compile(subject.model, fullgraph=True, dynamic=False, **how)
        start = now(device)
        self.block(1, warm=WARM)
        self.compiling_s = now(device) - start

    def step(self) -> Tensor:
        if self.device.startswith("cuda"):
            torch.compiler.cudagraph_mark_step_begin()
        out = self.call(
            input_ids=self.batch.token, attention_mask=self.mask, use_cache=True, logits_to_keep=1,
            **{CACHE: self.batch.cache},
        )  # fmt: skip
        logits: Tensor = out.logits[:, -1]
        return logits

    def block(self, count: int, measure: Callable[..., Any] = timing.intervals, *, warm: int = 2) -> Any:
        """ms of `count` steps after the prompt, or what else `measure` gives of them."""
        with self.subject.route(self.work.mix()) as call:
            self.batch.prompt(call)
            for _ in range(warm):
                self.step()
            return measure(self.step, count, self.device)

    def answer(self, rows: Rows, *, eager: bool = False) -> Tensor:
        """Logits [rows, V] of the first step under any mix."""
        with self.subject.route(rows) as call:
            if eager:
                return self.batch.answer(call).clone()
            self.batch.prompt(call)
            return self.step().clone()


def cell(
    stage: Stage, bare: Compiled, ours: Subject, work: Work, ids: Tensor, truth: Truth, found: dict[str, Any]
) -> None:
    found["eager_errors"] = gate.check(ours, work, ids, truth, all_checks=True)
    start = time.perf_counter()
    side = Compiled(ours, work, ids, stage.device)
    found["compiling_s"] = {clock.BARE: bare.compiling_s, clock.OURS: time.perf_counter() - start}
    off = gate.errors(side.answer(work.mix()), truth.logits)
    found["errors"] = {
        "plain": truth.plain, "bound": truth.bound, "mixed": off.max().item(),
        "over_plain": gate.rms(off) / truth.plain_rms,
        "over_eager": gate.rms(off) / truth.plain_rms / found["eager_errors"]["over_plain"],
    }  # fmt: skip
    if not off.max().item() <= truth.bound:
        raise GateError(
            f"{work.name}: the compiled step must be within {truth.bound:.3g} of the formula in {truth.logits.dtype}, "
            f"it differs by {off.max().item():.3g}"
        )
    before = counts(stage.cuda)
    count = min(stage.settings.replays, side.room - 2)
    jobs = {clock.BARE: lambda: bare.block(count), clock.OURS: lambda: side.block(count)}
    timed = clock.palindrome(jobs, stage.settings.rounds)
    found |= timed | {"kind": "compiled", "value": clock.ratio(timed)}
    nbytes = work.distinct * stage.shop.adapter_bytes()
    found["floor"] = stage.shop.floor(nbytes, found["bare"]["ms"])
    stage.profile(found, {clock.BARE: bare.block, clock.OURS: side.block})
    found["counts"] = {"timed": before}
    for what, rows in changes(work).items():
        found["counts"][what] = served(side, what, rows, truth.bound)
    more = {key: counts(stage.cuda)[key] - before[key] for key in before}
    found["recompiled"] = more
    found["note"] = f"compiled in {found['compiling_s'][clock.OURS]:.0f} s, after other mixes and loads " + ", ".join(
        f"{number} more {key}" for key, number in more.items()
    )
    if any(more.values()):
        raise GateError(f"{work.name}: another mix or other adapters must find the compiled step as it is, got {more}")


def changes(work: Work) -> Mapping[str, Rows]:
    """Mixes that come after the one that was compiled: others, the base alone, adapters that must be loaded first."""
    rows = work.mix()
    spare: dict[str | None, str] = {adapter_name(i): adapter_name(work.slots + i) for i in range(SPARE)}
    return {
        "another mix": [None, *gate.moved(rows)[1:]],
        "all base": [None] * len(rows),
        "after loads": [spare.get(name, name) for name in rows],
    }


def served(side: Compiled, what: str, rows: Rows, bound: float) -> dict[str, int]:
    """One compiled step of that mix against an eager one; raises GateError. The counts after it."""
    eager = side.answer(rows, eager=True)
    gate.check_replay(side.subject, side.work, what, side.answer(rows), eager, bound)
    return counts(side.device.startswith("cuda"))


def counts(cuda: bool) -> dict[str, int]:
    """What Dynamo and Inductor have made so far."""
    found = {
        "graphs": int(counters["stats"].get("unique_graphs", 0)), "breaks": sum(counters["graph_break"].values()),
        "skips of CUDA graphs": int(counters["inductor"].get("cudagraph_skips", 0)),
    }  # fmt: skip
    if cuda:
        from torch._inductor.cudagraph_trees import get_container

        manager = get_container(torch.cuda.current_device()).tree_manager
        told = re.search(r"\d+", repr(manager.graph_counter)) if manager is not None else None
        found["CUDA graphs"] = int(told.group()) if told else 0
    return found
