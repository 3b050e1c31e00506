"""Stage accuracy: errors against float64 of what this gives and of what PEFT gives in the same dtype, in every regime.

A few layers of the shape, so that float64 is affordable. Nothing is timed.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .. import gpu_contenders as contenders
from .. import gpu_gate as gate
from .. import gpu_timing as timing
from ..gpu_contenders import Batch, Subject
from ..material import prompts, save_adapter
from ..registry import LINEARS, Work
from .compiled import Compiled
from .sides import Side, check_bare, check_base_rows
from .stage import Stage
from .steps import ROOM, without

LAYERS = 2


def cells(settings: argparse.Namespace) -> dict[str, Work]:
    if settings.small:
        plan = [("decode", 2, 5, 2, 2), ("prefill", 4, 7, 4, 4)]
    else:
        plan = [
            ("decode", 8, 128, 8, 8), ("decode", 64, 128, 8, 8), ("prefill", 8, 256, 8, 8), ("prefill", 8, 1024, 8, 8),
            ("decode", 64, 128, 64, 64), ("prefill", 64, 128, 64, 64),
        ]  # fmt: skip
    works = [Work(*row) for row in plan]
    return {
        f"{w.phase} {w.rows}" + (f"x{w.tokens}" if w.phase == "prefill" else "") + f",{w.distinct}": w for w in works
    }


def run(stage: Stage) -> None:
    shop, known = stage.shop, cells(stage.settings)
    works = {name: known[name] for name in stage.wanted(list(known))}
    stage.note(
        f"value: root mean square of relative errors against float64, over PEFT's own; at least {few(stage)} prompts"
    )
    adapters, exact = shop.pairs(max(work.slots for work in works.values())), dict[tuple[Work, int], gate.Truth]()
    for seed in range(max(repeats(stage, work) for work in works.values())):
        some = [work for work in works.values() if seed < repeats(stage, work)]
        asked = list({*some, *(map(without, some) if not seed else ())})
        found = gate.truths(
            shop.bare, adapters, shop.scaling, asked, partial(ids, stage, seed=seed), wider=torch.float64
        )
        exact |= {(work, seed): truth for work, truth in found.items()}
    shop.empty_cache()
    answers: dict[str, dict[str, Tensor]] = {}
    for slots in dict.fromkeys(work.slots for work in works.values()):
        with shop.ours(slots, dict(list(adapters.items())[:slots])) as ours:
            for name, work in works.items():
                if work.slots == slots:
                    with stage.cell(name) as cell:
                        answers[name] = of_ours(stage, ours, work, exact, cell)
    torch._dynamo.reset()
    folders = {}
    for name in list(adapters)[:2]:
        folder = stage.settings.folder / f"accuracy-{name}"
        folders[name] = save_adapter(folder, adapters[name], stage.settings.rank, LINEARS)
    with contenders.peft(shop.bare, adapters, folders, {}) as peft:
        for name in answers:
            work, kept = works[name], stage.record["cells"][name]
            with stage.cell(name) as cell:
                cell |= kept
                peft.prepare(work.distinct)
                seeds = range(repeats(stage, work))
                with peft.route(work.mix()) as call:
                    got = [Batch(peft, work, ids(stage, work, seed=seed), 1).answer(call) for seed in seeds]
                truths = [exact[work, seed] for seed in seeds]
                compare(answers[name], torch.cat(got), truths, cell)


def few(stage: Stage) -> int:
    """Prompts over which an error is averaged: that of 8 rows changes by 2% from one prompt to the next."""
    return 4 if stage.small else 64


def repeats(stage: Stage, work: Work) -> int:
    return -(-few(stage) // work.rows)


def ids(stage: Stage, work: Work, seed: int = 0) -> Tensor:
    tokens = work.tokens + (work.phase == "decode")
    return prompts(work.rows, tokens, stage.shop.bare.config.vocab_size, stage.device, seed + 1)["input_ids"]


def of_ours(
    stage: Stage, ours: Subject, work: Work, exact: dict[tuple[Work, int], gate.Truth], found: dict[str, Any]
) -> dict[str, Tensor]:
    """Logits of all prompts by every way in which such a batch runs; the gates first."""
    found["errors"] = gate.check(ours, work, ids(stage, work), exact[work, 0], all_checks=True)
    room = ROOM - work.tokens % 64 if work.phase == "decode" else 1
    made: dict[str, list[Tensor]] = {}
    for seed in range(repeats(stage, work)):
        some = ids(stage, work, seed)
        side = Side(ours, work, some, room, stage.device)
        if not seed:
            bare, base = Side(stage.shop.plain(), work, some, room, stage.device), exact[without(work), 0]
            found["base_rows"] = check_base_rows(side, bare, base)
            found["base_batch"] = check_bare(side, bare, base)
        made.setdefault("eager", []).append(side.answer(work.mix()))
        if timing.why_no_graph(stage.device) is None:
            side.capture()
            made.setdefault("graph", []).append(side.replayed(work.mix()))
    if work.phase == "decode":
        compiled = Compiled(ours, work, ids(stage, work), stage.device)
        for seed in range(repeats(stage, work)):
            compiled.batch.give(ids(stage, work, seed))
            made.setdefault("compiled", []).append(compiled.answer(work.mix()))
    return {way: torch.cat(logits) for way, logits in made.items()}


def compare(made: dict[str, Tensor], peft: Tensor, truths: list[gate.Truth], found: dict[str, Any]) -> None:
    """Errors of all ways over PEFT's; value: the largest."""
    exact = torch.cat([truth.logits for truth in truths])
    own = gate.rms(gate.errors(peft, exact))
    found["rms"] = {"peft": own, "formula": sum(truth.plain_rms**2 for truth in truths) ** 0.5 / len(truths) ** 0.5}
    found["rms"] |= {way: gate.rms(gate.errors(logits, exact)) for way, logits in made.items()}
    over = {way: found["rms"][way] / own for way in made}
    found["value"] = max(over.values())
    identical = "bit for bit" if found["base_batch"]["identical"] else "not bit for bit"
    found["note"] = (
        ", ".join(f"{way} {number:.3f}" for way, number in over.items())
        + f"; PEFT {own:.2e}; base rows beside adapters {found['base_rows']['over_bare']:.3f} of the bare model's "
        f"error, a batch without adapters {identical} the bare model"
    )
