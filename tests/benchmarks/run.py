"""Mixed batches against the bare base and PEFT: `make bench`, or python -m tests.benchmarks.run --help.

Contenders take turns inside one process; figures are medians over the rounds, ratios are taken round by round. Nothing
is timed before the answers agree: exit status 1 where they do not.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
if __package__ in (None, ""):  # run as a file
    sys.path.insert(0, str(ROOT))
    __package__ = "tests.benchmarks"

from . import gate, timing  # noqa: E402
from .material import base_loader, prompts, write_adapter  # noqa: E402
from .registry import BARE, CONTENDERS, LINEARS, MODES, OURS, PEFT, Cell, Mix, cells  # noqa: E402


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--base", default="auto", help="auto: SmolLM2-135M-Instruct; random:SHAPE; a folder or Hub id")
    add("--device", default="cpu")
    add("--rank", type=int, default=8)
    add("--targets", nargs="+", default=list(LINEARS))
    add("--rows", type=int, default=8)
    add("--adapters", type=int, nargs="+", default=[1, 4, 8], help="distinct adapters in the batch")
    add("--prompt-tokens", type=int, default=64)
    add("--new-tokens", type=int, default=24)
    add("--rounds", type=int, default=7)
    add("--threads", type=int, nargs="+", default=[torch.get_num_threads()], help="each number is a run of its own")
    add("--mode", choices=MODES, default="dynamic", help="the cache of generate")
    add("--registered", type=int, default=64, help="adapters to register, 0: skip")
    add("--out", type=Path, default=ROOT / "bench-results" / "mixed.json")
    settings = parser.parse_args(argv)
    if settings.new_tokens < 3 or settings.rounds < 1 or min(settings.adapters) < 1:
        parser.error("--new-tokens must be at least 3, --rounds and --adapters at least 1")
    return settings


def environment() -> dict[str, Any]:
    """Commit, date, versions and processor."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", "-c", "safe.directory=*", *words], cwd=ROOT, capture_output=True, text=True)
        return done.stdout.strip() if done.returncode == 0 else "unknown"

    cpu = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        models = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
        cpu = models[0].partition(":")[2].strip() if models else cpu
    return {
        "commit": git("rev-parse", "HEAD"),
        "changed": git("status", "--porcelain", "--", "hf_multilora", "kernels", "patches") != "",
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "versions": {name: version(name) for name in ("torch", "transformers", "peft")}
        | {"python": platform.python_version()},
        "cpu": f"{cpu}, {os.cpu_count()} cores",
        "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
    }


def measure(settings: argparse.Namespace, folder: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """Build, check and time everything; raises gate.GateError."""
    which, load = base_loader(settings.base, settings.device)
    say(f"base: {which}, float32, {settings.device}")
    bare = load()

    def write(path: Path, seed: int) -> Path:
        return write_adapter(path, bare, settings.rank, settings.targets, seed)

    folders = {f"adapter-{i}": write(folder / f"adapter-{i}", i) for i in range(max(settings.adapters))}
    models = {c.name: c.build(bare if c.name == BARE else load(), folders) for c in CONTENDERS}
    inputs = prompts(settings.rows, settings.prompt_tokens, bare.config.vocab_size, settings.device)
    table = cells([Mix(f"{n} adapter{'s' if n > 1 else ''}", n) for n in settings.adapters])

    rows = {cell.mix: cell.mix.rows(list(folders), settings.rows) for cell in table}
    errors = {mix.name: gate.check(models, mix, inputs, names) for mix, names in rows.items()}
    for mix, found in errors.items():
        say(f"logits, {mix}: " + ", ".join(f"{against} {error:.1e}" for against, error in found.items()))

    def job(cell: Cell) -> Callable[[], tuple[float, float]]:
        call = cell.contender.call(rows[cell.mix]) | MODES[settings.mode]
        model = models[cell.contender.name]
        return lambda: timing.timed_generate(model, inputs, call, settings.new_tokens, settings.device)

    runs = []
    for threads in settings.threads:
        torch.set_num_threads(threads)
        samples = timing.interleave({cell.name: job(cell) for cell in table}, settings.rounds, say)
        found = timing.summary(samples, BARE)
        for cell in table:
            if cell.contender.name == OURS and cell.mix.distinct:
                peft = next(c.name for c in table if c.contender.name == PEFT and c.mix == cell.mix)
                for index, phase in enumerate(("prefill", "decode")):
                    found[cell.name][f"{phase}_peft_over_this"] = timing.ratio(samples, peft, cell.name, index)
        runs.append({"threads": threads, "cells": found, "samples_ms": samples})
        say(show(found, threads))
    result = {"base": which, "logits": errors, "runs": runs}
    if settings.registered:
        models.clear()
        model = next(c for c in CONTENDERS if c.name == OURS).build(load(), {})
        result["registration"] = timing.registration(
            model, settings.registered, lambda path, i: write(path, 1000 + i), folder, settings.device
        )
        r = result["registration"]
        say(
            f"registering {r['count']} adapters: first {r['first_ms']:.0f} ms, last {r['last_ms']:.0f} ms; medians of "
            f"the first and the last 8: {r['first_median_ms']:.0f} and {r['last_median_ms']:.0f} ms ({r['ratio']:.2f}x)"
        )
    return result


def show(found: dict[str, dict[str, float]], threads: int) -> str:
    """The table of one run."""
    columns = f"{'/bare':>6} {'peft/':>6}"
    lines = [
        f"\n{threads} thread(s)",
        f"{'':26} {'prefill':>9} {columns}   {'decode':>9} {columns}",
        f"{'':26} {'ms':>9} {'':6} {'this':>6}   {'ms/token':>9} {'':6} {'this':>6}",
    ]
    for name, row in found.items():
        parts = []
        for phase in ("prefill", "decode"):
            faster = row.get(f"{phase}_peft_over_this")
            parts.append(
                f"{row[f'{phase}_ms']:9.1f} {row[f'{phase}_ratio']:6.2f} {'' if faster is None else f'{faster:.2f}':>6}"
            )
        lines.append(f"{name:26} " + "   ".join(parts))
    return "\n".join(lines) + "\n"


def main(argv: list[str] | None = None) -> int:
    settings = arguments(argv)
    told = {name: value for name, value in vars(settings).items() if name not in ("out", "base")}
    header = environment() | {"settings": told}
    with tempfile.TemporaryDirectory() as scratch:
        try:
            result = measure(settings, Path(scratch), lambda text: print(text, flush=True))
        except gate.GateError as error:
            print(f"not timed, the answers differ: {error}", file=sys.stderr)
            return 1
    settings.out.parent.mkdir(parents=True, exist_ok=True)
    settings.out.write_text(json.dumps(header | result, indent=1) + "\n")
    print(f"written: {os.path.relpath(settings.out)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
