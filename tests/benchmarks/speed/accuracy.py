"""Stage accuracy: errors against float64 of what this gives and of what PEFT gives in the same dtype, in every regime.

A few layers of the shape, so that float64 is affordable. Nothing is timed.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
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
    vocabulary = shop.bare.config.vocab_size
    stage.note("value: root mean square of the rows' relative errors against float64, over PEFT's own")

    def ids(work: Work) -> Tensor:
        return prompts(work.rows, work.tokens + (work.phase == "decode"), vocabulary, stage.device)["input_ids"]

    adapters = shop.pairs(max(work.slots for work in works.values()))
    exact = gate.truths(
        shop.bare,
        adapters,
        shop.scaling,
        list({*works.values(), *map(without, works.values())}),
        ids,
        wider=torch.float64,
    )
    shop.empty_cache()
    answers: dict[str, dict[str, Tensor]] = {}
    for slots in dict.fromkeys(work.slots for work in works.values()):
        with shop.ours(slots, dict(list(adapters.items())[:slots])) as ours:
            for name, work in works.items():
                if work.slots == slots:
                    with stage.cell(name) as found:
                        answers[name] = of_ours(stage, ours, work, ids(work), exact, found)
    torch._dynamo.reset()
    folders = {}
    for name in list(adapters)[:2]:
        folder = stage.settings.folder / f"accuracy-{name}"
        folders[name] = save_adapter(folder, adapters[name], stage.settings.rank, LINEARS)
    with contenders.peft(shop.bare, adapters, folders, {}) as peft:
        for name in answers:
            work, kept = works[name], stage.record["cells"][name]
            with stage.cell(name) as found:
                found |= kept
                peft.prepare(work.distinct)
                with peft.route(work.mix()) as call:
                    got = Batch(peft, work, ids(work), 1).answer(call)
                compare(answers[name], got, exact[work], found)


def of_ours(
    stage: Stage, ours: Subject, work: Work, ids: Tensor, exact: dict[Work, gate.Truth], found: dict[str, Any]
) -> dict[str, Tensor]:
    """Logits by every way in which such a batch runs; the gates first."""
    found["errors"] = gate.check(ours, work, ids, exact[work], all_checks=True)
    room = ROOM - work.tokens % 64 if work.phase == "decode" else 1
    side, bare = (Side(some, work, ids, room, stage.device) for some in (ours, stage.shop.plain()))
    found["base_rows"] = check_base_rows(side, bare, exact[without(work)])
    found["base_batch"] = check_bare(side, bare, exact[without(work)])
    rows, made = work.mix(), {"eager": side.answer(work.mix())}
    if timing.why_no_graph(stage.device) is None:
        side.capture()
        made["graph"] = side.replayed(rows)
    ways: dict[str, Callable[[], Tensor]] = {}
    if work.phase == "decode":
        ways["compiled"] = lambda: Compiled(ours, work, ids, stage.device).answer(rows)
    return made | {way: answer() for way, answer in ways.items()}


def compare(made: dict[str, Tensor], peft: Tensor, truth: gate.Truth, found: dict[str, Any]) -> None:
    """Errors of all ways over PEFT's; value: the largest."""
    own = gate.rms(gate.errors(peft, truth.logits))
    found["rms"] = {"peft": own, "formula": truth.plain_rms}
    found["rms"] |= {way: gate.rms(gate.errors(logits, truth.logits)) for way, logits in made.items()}
    over = {way: found["rms"][way] / own for way in made}
    found["value"] = max(over.values())
    identical = "bit for bit" if found["base_batch"]["identical"] else "not bit for bit"
    found["note"] = (
        ", ".join(f"{way} {number:.3f}" for way, number in over.items())
        + f"; PEFT {own:.2e}; base rows beside adapters {found['base_rows']['over_bare']:.3f} of the bare model's "
        f"error, a batch without adapters {identical} the bare model"
    )
