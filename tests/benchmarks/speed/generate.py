"""Stage generate: Transformers' own `generate`, eager and with a static cache (which it compiles), and PEFT's steps."""

from __future__ import annotations

import argparse
import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.utils import counters

from .. import gpu_contenders as contenders
from .. import gpu_gate as gate
from .. import gpu_timing as timing
from ..gate import GateError
from ..gpu_contenders import Subject
from ..material import prompts, save_adapter
from ..registry import LINEARS, Work
from . import clock
from .sides import Side, check_replays
from .stage import Stage
from .steps import ROOM

EAGER, STATIC, PEFT = "eager", "static", "peft"
MODES: dict[str, dict[str, Any]] = {EAGER: {}, STATIC: {"cache_implementation": "static"}}
ROUNDS = 3  # of bare, ours, ours, bare: the host's pace drifts
PEFT_STEPS = 2  # of a block: a step of PEFT takes seconds where there are many adapters


def cells(settings: argparse.Namespace) -> dict[str, tuple[str, Work]]:
    small = settings.small
    tokens, plan = (5, ((2, 2, 2), (4, 4, 4))) if small else (128, ((64, 8, 8), (64, 64, 64)))
    rows = 2 if small else 8
    found = {f"{EAGER} {rows},{n}": (EAGER, Work("decode", rows, tokens, n, rows)) for n in (rows, 0)}
    found[f"{STATIC} {rows},{rows}"] = STATIC, Work("decode", rows, tokens, rows, rows)
    for r, distinct, slots in plan:
        found[f"{PEFT} {r},{distinct}"] = PEFT, Work("decode", r, tokens, distinct, slots)
    return found


def run(stage: Stage) -> None:
    known = cells(stage.settings)
    picked = {name: known[name] for name in stage.wanted(list(known))}
    generated = {name: cell for name, cell in picked.items() if cell[0] != PEFT}
    with no_cudnn_attention(stage.cuda):
        if generated:
            slots = max(work.slots for _, work in generated.values())
            adapters = stage.shop.pairs(slots)
            with stage.shop.ours(slots, adapters) as ours:
                for name, (mode, work) in generated.items():
                    if stage.in_time(name):
                        with stage.cell(name) as found:
                            generate(stage, ours, mode, work, found)
        stage.shop.bare.__dict__.pop("_compiled_call", None)
        torch._dynamo.reset()
        for name, (mode, work) in picked.items():
            if mode == PEFT and stage.in_time(name):
                with stage.cell(name) as found:
                    against_peft(stage, work, found)


@contextmanager
def no_cudnn_attention(cuda: bool) -> Iterator[None]:
    """In eager steps cuDNN plans each new length of the cache for 37 ms: both sides go without it."""
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(before and not cuda)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


# -- generate ------------------------------------------------------------------------------------------------------
def generate(stage: Stage, ours: Subject, mode: str, work: Work, found: dict[str, Any]) -> None:
    """ABBA of whole calls of `generate`: the median interval between two tokens."""
    shop, count = stage.shop, stage.settings.tokens
    if mode == STATIC and not stage.cuda:
        stage.note("static: Transformers compiles on a CUDA device only, here the same calls ran uncompiled")
    inputs = prompts(work.rows, work.tokens, shop.bare.config.vocab_size, stage.device)
    more = {clock.BARE: dict(MODES[mode]), clock.OURS: MODES[mode] | {"adapter_names": work.mix()}}
    models = {clock.BARE: shop.bare, clock.OURS: ours.model}
    found["errors"] = check(stage, models, inputs, more, work, count)
    jobs = {
        side: lambda side=side: clock.generated(models[side], inputs, more[side], count, stage.device)  # type: ignore[misc]
        for side in models
    }
    for job in jobs.values():
        job()  # a call with stopping criteria, before the clock starts
    before = graphs()
    timed = clock.palindrome(jobs, ROUNDS * stage.settings.rounds)
    found |= timed | {"kind": mode, "value": clock.ratio(timed)}

    def call(side: str, _: int, measure: Any) -> Any:
        told = more[side] | {"max_new_tokens": count}
        return measure(lambda: models[side].generate(**inputs, **told), 1, stage.device)

    stage.profile(found, {side: partial(call, side) for side in models})
    if "profile" in found:
        busy = [sum(us for _, us in kernels.values()) / count / 1e3 for kernels in found["profile"].values()]
        found["note"] = (
            f"kernels of a call, its prompt too, {busy[0]:.2f} and {busy[1]:.2f} ms a token, the rest is the host"
        )
    if mode == STATIC:
        again(stage, ours.model, inputs, more[clock.OURS], work, count, before, found)


def again(
    stage: Stage, model: Any, inputs: Mapping[str, Tensor], more: dict[str, Any], work: Work, count: int, before: int,
    found: dict[str, Any],
) -> None:  # fmt: skip
    """Other mixes must find the compiled step as it is. Raises GateError."""
    for rows in ([None, *gate.moved(work.mix())[1:]], [None] * work.rows):
        clock.generated(model, inputs, more | {"adapter_names": rows}, count, stage.device)
    found["recompiled"] = graphs() - before
    found["note"] = "; ".join(
        [*filter(None, [found.get("note")]), f"{found['recompiled']} graphs more after other mixes"]
    )
    if found["recompiled"]:
        raise GateError(f"generate compiled {found['recompiled']} graphs more when the mix changed, none must be")


def graphs() -> int:
    """Graphs that Dynamo has compiled."""
    return int(counters["stats"].get("unique_graphs", 0))


def check(
    stage: Stage, models: Mapping[str, Any], inputs: Mapping[str, Tensor], more: Mapping[str, dict[str, Any]],
    work: Work, count: int,
) -> dict[str, float]:  # fmt: skip
    """Logits of every token that `generate` made, against the formula in the wider dtype along those same tokens.
    Raises GateError, also where neighbours' adapters would pass."""
    shop, prompt = stage.shop, inputs["input_ids"]
    told = {"return_dict_in_generate": True, "output_logits": True, "max_new_tokens": count}
    made = models[clock.OURS].generate(**inputs, **more[clock.OURS], **told)
    models[clock.BARE].generate(**inputs, **more[clock.BARE], **told)  # compiled and warm, as ours
    logits = torch.stack(made.logits, 1)  # [rows, count, V]
    ids = made.sequences[:, :-1]
    if ids.shape[1] != prompt.shape[1] + count - 1:
        raise GateError(f"generate must make {count} tokens, it made {ids.shape[1] - prompt.shape[1] + 1}")
    wide = copy.deepcopy(shop.bare).to(gate.WIDER[shop.dtype])

    def answer(model: Any, some: Tensor) -> Tensor:
        out: Tensor = model(input_ids=some, use_cache=False, logits_to_keep=count).logits
        return out

    adapters = shop.pairs(max(1, work.distinct))
    exact = gate.truth(wide, shop.bare, adapters, shop.scaling, work.mix(), ids, answer)
    off = gate.errors(logits, exact.logits)
    found = {
        "plain": exact.plain, "bound": exact.bound, "mixed": off.max().item(),
        "over_plain": gate.rms(off) / exact.plain_rms,
    }  # fmt: skip
    if not found["mixed"] <= exact.bound:
        raise GateError(
            f"generate, {work.name}: logits of the tokens must be within {exact.bound:.3g} of the formula in "
            f"{exact.logits.dtype}, they differ by {found['mixed']:.3g}"
        )
    if work.distinct:
        with gate.formula(shop.bare, adapters, shop.scaling, gate.moved(work.mix())):
            found["control"] = gate.errors(answer(shop.bare, ids), exact.logits).min().item()
        if not found["control"] > exact.bound:
            raise GateError(
                f"generate, {work.name}: other adapters must change every row by more than {exact.bound:.3g}, one "
                f"differs by {found['control']:.3g} only"
            )
    return found


# -- PEFT ----------------------------------------------------------------------------------------------------------
def against_peft(stage: Stage, work: Work, found: dict[str, Any]) -> None:
    """ms of a decode step: PEFT's mixed batch, which cannot be captured, over ours under a CUDA graph, and eager."""
    shop, adapters = stage.shop, stage.shop.pairs(work.slots)
    ids = prompts(work.rows, work.tokens + 1, shop.bare.config.vocab_size, stage.device)["input_ids"]
    truth = gate.truths(shop.bare, adapters, shop.scaling, [work], lambda work: ids)[work]
    shop.empty_cache()
    room = ROOM - work.tokens % 64
    with shop.ours(work.slots, adapters) as ours:
        found["errors"] = gate.check(ours, work, ids, truth, all_checks=False)
        side = Side(ours, work, ids, room, stage.device)
        side.block(2)
        found["ours eager"] = clock.summary([side.block(8), side.block(8)])
        if timing.why_no_graph(stage.device) is None:
            side.capture()
            found["replays"] = check_replays(side, truth.bound)
            found["ours"] = clock.summary([side.block(min(stage.settings.replays, room - 2))])
        else:
            found["ours"] = found["ours eager"]
        del side
    folders = {}
    for name in list(adapters)[:2]:
        folder = stage.settings.folder / f"{work.distinct}-{name}"
        folders[name] = save_adapter(folder, adapters[name], stage.settings.rank, LINEARS)
    note: dict[str, Any] = {}
    with contenders.peft(shop.bare, adapters, folders, note) as peft:
        peft.prepare(work.distinct)
        found["peft_errors"] = gate.check(peft, work, ids, truth, all_checks=False)
        side = Side(peft, replace(work), ids, room, stage.device)
        with peft.route(work.mix()) as call:
            side.batch.prompt(call)
            side.batch.step(call)
            found["peft"] = clock.summary(
                [timing.intervals(lambda: side.batch.step(call), PEFT_STEPS, stage.device) for _ in range(2)]
            )
    shop.empty_cache()
    found |= {"load_adapter_ms": note["load_adapter_ms"], "kind": PEFT}
    found["value"] = found["peft"]["ms"] / found["ours"]["ms"]
    found["value_eager"] = found["peft"]["ms"] / found["ours eager"]["ms"]
    off, own = found["errors"]["over_plain"], found["peft_errors"]["over_plain"]
    found["note"] = (
        f"PEFT {found['peft']['ms']:.0f} ms, ours eager {found['ours eager']['ms']:.1f} ms "
        f"({found['value_eager']:.1f}x); error over PEFT's own {off / own:.3f}"
    )
