"""Mixed rerankers on a CPU: `make bench-rerankers`, or python -m tests.benchmarks.rerankers --help.

The same pairs are scored by the bare cross-encoder, by this package with an adapter per pair in one batch, and by PEFT
with one adapter after the other. Contenders take turns; figures are medians over the rounds, ratios are taken round by
round. Nothing is timed before the answers agree: exit status 1 where they do not.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from . import reranker_contenders as contenders
from .gate import GateError
from .registry import TOLERANCE, Mix, adapter_name
from .reranker_contenders import BARE, OURS, PEFT, Contender, Rows, Work
from .reranker_material import base_folder, random_reranker, save_reranker, text_pairs
from .run import ROOT, environment
from .timing import interleave, ratio

KINDS = ("predict", "forward")  # with tokenizing and sorting; the model alone
# (tokens, adapters, what, bound); None: any number of tokens
TARGETS = (
    (None, 16, "at most {} times the bare base", 1.25),
    (128, 16, "at least {} times PEFT's throughput", 0.95),
    (32, 16, "at least {} times PEFT's throughput", 1.7),
)


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--base", default="auto", help="auto: the MS MARCO cross-encoder; random:SHAPE; a folder or Hub id")
    add("--rank", type=int, default=16, help="on query, key and value; each adapter has a head of its own")
    add("--rows", type=int, default=64, help="pairs of a batch")
    add("--tokens", type=int, nargs="+", default=[128, 32], help="of a pair")
    add("--adapters", type=int, nargs="+", default=[1, 4, 16], help="distinct adapters in the batch")
    add("--rounds", type=int, default=7)
    add("--threads", type=int, nargs="+", default=[torch.get_num_threads()], help="each number is a run of its own")
    add("--out", type=Path, default=ROOT / "bench-results" / "rerankers.json")
    settings = parser.parse_args(argv)
    if settings.rounds < 1 or min(settings.adapters) < 1 or min(settings.tokens) < 5:
        parser.error("--rounds and --adapters must be at least 1, --tokens at least 5")
    return settings


@torch.inference_mode()
def check(models: Mapping[str, Contender], work: Work, rows: Rows) -> dict[str, float]:
    """Largest differences of the logits; raises GateError where they are not what they must be.

    base: rows without adapter against the bare model. predict, forward: the mixed batch against PEFT with one adapter
    at a time. control: the same against PEFT with the rows' adapters moved on by one, which must differ (with one
    adapter: against the bare base).
    """
    none: Rows = [None] * len(rows)
    moved = [*rows[1:], rows[0]]
    other = models[PEFT].predict(work, moved) if moved != list(rows) else models[BARE].predict(work, none)
    mixed = models[OURS].predict(work, rows)
    errors = {
        "base": _difference(models[OURS].predict(work, none), models[BARE].predict(work, none)),
        "predict": _difference(mixed, models[PEFT].predict(work, rows)),
        "forward": _difference(models[OURS].forward(work, rows), models[PEFT].forward(work, rows)),
    }
    for against, error in errors.items():
        if not error <= TOLERANCE:  # also NaN
            raise GateError(f"{against}: logits must be within {TOLERANCE} of the others', they differ by {error:.3g}")
    errors["control"] = _difference(mixed, other)
    if not errors["control"] > TOLERANCE:
        raise GateError(
            f"other adapters must change the logits, they differ by {errors['control']:.3g} only: the comparison would "
            f"not notice an adapter in the wrong row"
        )
    return errors


def _difference(a: Tensor, b: Tensor) -> float:
    return (a.float() - b.float()).abs().max().item()


def cell_name(contender: str, tokens: int, mix: Mix | None = None) -> str:
    return f"{tokens} tokens, {contender}" + ("" if mix is None else f", {mix.name}")


def job(model: Contender, work: Work, rows: Rows) -> Callable[[], tuple[float, float]]:
    """ms of one `predict` and one `forward`."""

    @torch.inference_mode()
    def once() -> tuple[float, float]:
        marks = [time.perf_counter()]
        for score in (model.predict, model.forward):
            score(work, rows)
            marks.append(time.perf_counter())
        return 1e3 * (marks[1] - marks[0]), 1e3 * (marks[2] - marks[1])

    return once


def summary(
    samples: Mapping[str, list[tuple[float, float]]], settings: argparse.Namespace, mixes: list[Mix]
) -> dict[str, dict[str, float]]:
    """Per cell and kind: median ms, pairs a second, ratio to the bare base, and how many times faster than PEFT."""
    found = {}
    for tokens in settings.tokens:
        bare = cell_name(BARE, tokens)
        cells = {bare: None} | {cell_name(who, tokens, mix): mix for mix in mixes for who in (OURS, PEFT)}
        for name, mix in cells.items():
            row = found[name] = {}
            for index, kind in enumerate(KINDS):
                row[f"{kind}_ms"] = median(sample[index] for sample in samples[name])
                row[f"{kind}_pairs_per_s"] = 1e3 * settings.rows / row[f"{kind}_ms"]
                row[f"{kind}_ratio"] = ratio(samples, name, bare, index)
                if mix is not None and name == cell_name(OURS, tokens, mix):
                    row[f"{kind}_peft_over_this"] = ratio(samples, cell_name(PEFT, tokens, mix), name, index)
    return found


def targets(found: Mapping[str, Mapping[str, float]], settings: argparse.Namespace, mixes: list[Mix]) -> list[str]:
    """What is aimed at and what was measured, a line each."""
    lines = []
    for wanted, distinct, text, bound in TARGETS:
        for tokens in settings.tokens if wanted is None else [t for t in settings.tokens if t == wanted]:
            for mix in (mix for mix in mixes if mix.distinct == distinct):
                row, least = found[cell_name(OURS, tokens, mix)], "least" in text
                for kind in KINDS:
                    value = row[f"{kind}_peft_over_this" if least else f"{kind}_ratio"]
                    met = "met" if (value >= bound if least else value <= bound) else "MISSED"
                    lines.append(f"{tokens} tokens, {mix.name}, {kind}: {text.format(bound)}: {value:.2f}, {met}")
    return lines


def show(found: Mapping[str, Mapping[str, float]], threads: int) -> str:
    """The table of one run."""
    columns = f"{'ms':>9} {'pairs/s':>8} {'/bare':>6} {'peft/':>6}"
    lines = [f"\n{threads} thread(s)", f"{'':42}" + "".join(f"   {kind:32}" for kind in KINDS).rstrip()]
    lines.append(f"{'':42}   {columns}   {columns}   (peft/: PEFT's time over this one's)")
    for name, row in found.items():
        line = f"{name:42}"
        for kind in KINDS:
            faster = row.get(f"{kind}_peft_over_this")
            line += f"   {row[f'{kind}_ms']:9.1f} {row[f'{kind}_pairs_per_s']:8.1f} {row[f'{kind}_ratio']:6.3f}"
            line += f" {'' if faster is None else f'{faster:.2f}':>6}"
        lines.append(line.rstrip())
    return "\n".join(lines) + "\n"


def measure(settings: argparse.Namespace, scratch: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """Build, check and time everything; raises GateError."""
    which, folder = base_folder(settings.base, scratch)
    say(f"base: {which}, float32")
    length = max(settings.tokens)
    plain = contenders.encoder(folder, length)
    paths = {
        adapter_name(i): save_reranker(
            scratch / f"{i}", random_reranker(plain.model, settings.rank, i, torch.float32, "cpu"), settings.rank
        )
        for i in range(max(settings.adapters))
    }
    models = {
        BARE: contenders.bare(folder, length),
        OURS: contenders.ours(folder, length, paths),
        PEFT: contenders.peft(folder, length, paths),
    }
    works = {t: contenders.work(plain, text_pairs(plain.tokenizer, settings.rows, t)) for t in settings.tokens}
    mixes = [Mix(f"{n} adapter{'s' if n > 1 else ''}", n) for n in settings.adapters]
    rows = {mix: mix.rows(list(paths), settings.rows) for mix in mixes}
    errors = {}
    for tokens, work in works.items():
        for mix in mixes:
            name = f"{tokens} tokens, {mix.name}"
            errors[name] = check(models, work, rows[mix])
            say(f"logits, {name}: " + ", ".join(f"{against} {error:.1e}" for against, error in errors[name].items()))
    runs = []
    for threads in settings.threads:
        torch.set_num_threads(threads)
        samples: dict[str, list[tuple[float, float]]] = {}
        for tokens, work in works.items():
            jobs = {cell_name(BARE, tokens): job(models[BARE], work, [None] * settings.rows)}
            for mix in mixes:
                jobs |= {cell_name(w, tokens, mix): job(models[w], work, rows[mix]) for w in (OURS, PEFT)}
            samples |= interleave(jobs, settings.rounds, lambda text, t=tokens: say(f"{t} tokens, {text}"))
        found = summary(samples, settings, mixes)
        lines = targets(found, settings, mixes)
        runs.append({"threads": threads, "cells": found, "targets": lines, "samples_ms": samples})
        say("\n".join([show(found, threads), *lines]))
    return {"base": which, "logits": errors, "runs": runs}


def main(argv: list[str] | None = None) -> int:
    settings = arguments(argv)
    header = environment() | {"settings": {k: v for k, v in vars(settings).items() if k not in ("out", "base")}}
    header["versions"]["sentence-transformers"] = version("sentence-transformers")
    with tempfile.TemporaryDirectory() as scratch:
        try:
            result = measure(settings, Path(scratch), lambda text: print(text, flush=True))
        except GateError as error:
            print(f"not timed, the answers differ: {error}", file=sys.stderr)
            return 1
    settings.out.parent.mkdir(parents=True, exist_ok=True)
    settings.out.write_text(json.dumps(header | result, indent=1) + "\n")
    print(f"written: {os.path.relpath(settings.out)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
