"""Speed of mixed batches on one GPU, as ratios to the bare model in the same run: `make bench-gpu`, or python -m
tests.benchmarks.speed --help.

Stages run one after the other and merge their results into one file. Nothing is timed before its answers are right;
contenders take turns (bare, ours, ours, bare). Exit status 1 where an answer was wrong or a stage failed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from . import accuracy, compiled, generate, linears, loads, many, sanitize, steps
from .results import Results
from .settings import arguments
from .stage import Run, Stage
from .table import table
from .workshop import Workshop


@dataclass(frozen=True)
class Plan:
    """A stage: what it runs, the names of its cells, and its base.

    shape: instead of the command line's; None: the stage makes a base of its own. layers: unless the command line says.
    """

    run: Run
    cells: Callable[[argparse.Namespace], Iterable[str]]
    shape: str | None = ""
    layers: int | None = None


PLANS: dict[str, Plan] = {
    "decode": Plan(steps.decode, steps.decode_cells),
    "prefill": Plan(steps.prefill, steps.prefill_cells),
    "generate": Plan(generate.run, generate.cells),
    "loads": Plan(loads.run, loads.cells),
    "linears": Plan(linears.linears, linears.linears_cells, None, linears.LAYERS),
    "popularity": Plan(linears.popularity, linears.popularity_cells, None, linears.LAYERS),
    "many": Plan(many.run, many.cells, layers=many.LAYERS),
    "compiled": Plan(compiled.run, compiled.cells, layers=compiled.LAYERS),
    "accuracy": Plan(accuracy.run, accuracy.cells, layers=accuracy.LAYERS),
    "sanitize": Plan(sanitize.run, sanitize.cells, None),
    "decode-small": Plan(steps.decode, steps.decode_cells, "qwen3-0.6b"),
}


def chosen(settings: argparse.Namespace) -> list[str]:
    """The stages that have cells to run. Raises SystemExit for a cell that none of the stages has."""
    if settings.cells is None:
        return list(settings.stages)
    known = {name: list(PLANS[name].cells(settings)) for name in settings.stages}
    unknown = set(settings.cells) - {cell for cells in known.values() for cell in cells}
    if unknown:
        raise SystemExit(f"--cells must name cells of the stages, {known}, got {sorted(unknown)}")
    return [name for name, cells in known.items() if not set(settings.cells).isdisjoint(cells)]


def run_stage(name: str, stage: Stage, plan: Plan, shape: str, layers: int | None) -> None:
    """One stage; an error that is none of a cell is recorded, and the next stage goes on."""
    try:
        with torch.no_grad():
            if plan.shape is not None:
                stage.shop.use(shape, layers)
            plan.run(stage)
    except Exception as error:
        stage.record["error"] = f"{type(error).__name__}: {error}"
        traceback.print_exc()
        stage.shop.clear()
    stage.save()


def main(argv: Sequence[str] | None = None) -> int:
    settings = arguments(argv, __doc__, list(PLANS))
    started = time.perf_counter()

    def say(text: str) -> None:
        print(f"[{time.perf_counter() - started:5.0f} s] {text}", flush=True)

    results, shop, failed = Results(settings.out, settings.device), Workshop(settings, say), []
    with tempfile.TemporaryDirectory(dir=settings.scratch) as scratch:
        settings.folder = Path(scratch)
        small = settings.small
        for name in chosen(settings):
            plan = PLANS[name]
            shape = settings.shape if small or not plan.shape else plan.shape
            layers = settings.layers if settings.layers or small else plan.layers
            facts = {key: getattr(settings, key) for key in ("dtype", "rank", "backend", "rounds", "replays")}
            stage = Stage(name, settings, shop, results, {"shape": shape, "layers": layers} | facts)
            run_stage(name, stage, plan, shape, layers)
            say(f"\n{table(name, stage.record)}")
            failed += [f"{name}: {what}" for what in stage.failed]
    if failed:
        print("failed:\n" + "\n".join(failed), file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
