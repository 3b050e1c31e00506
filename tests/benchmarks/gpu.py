"""Mixed batches at the shape of an 8B model on one GPU: python -m tests.benchmarks.gpu --help.

The bare base is timed first and last, the contenders patch that same base in turns. No cell is timed before its
answers are right. Results are printed and written as they come; exit status 1 where a contender failed.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_multilora.config import MultiLoRAConfig

from . import gpu_contenders as contenders
from . import gpu_gate as gate
from . import gpu_timing as timing
from .gpu_contenders import Batch, Subject
from .gpu_table import table
from .material import SHAPES, Pairs, prompts, random_adapter, random_base, save_adapter
from .registry import LINEARS, PLANS, Work, adapter_name
from .run import ROOT, environment


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--shape", choices=SHAPES, default="llama-3-8b", help="of the base, whose weights are random")
    add("--layers", type=int, help="instead of the shape's own number")
    add("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    add("--device", default="cuda")
    add("--plan", choices=PLANS, default="full", help="the cells")
    add("--rank", type=int, default=16)
    add("--backend", nargs="*", default=["auto"], help="of from_pretrained; several are timed one after the other")
    add("--peft", action=argparse.BooleanOptionalAction, default=True)
    add("--steps", type=int, default=20, help="eager steps of decode")
    add("--replays", type=int, default=50, help="steps of decode under a CUDA graph")
    add("--prefills", type=int, default=5)
    add("--budget", type=float, default=3.0, help="seconds that the steps of one clock may take")
    add("--scratch", type=Path, help="folder for the adapters' checkpoints")
    add("--out", type=Path, default=ROOT / "bench-results" / "gpu.json")
    settings = parser.parse_args(argv)
    for backend in settings.backend:
        MultiLoRAConfig(backend=backend)  # raises before any work where there is none of that name
    return settings


class Bench:
    """One run: the base, its adapters, what the cells must give, and the results so far."""

    def __init__(self, settings: argparse.Namespace, scratch: Path) -> None:
        self.settings, self.scratch, self.device = settings, scratch, settings.device
        self.started = time.perf_counter()
        self.works: tuple[Work, ...] = PLANS[settings.plan]
        self.result: dict[str, Any] = {"bare": {}, "contenders": {}}
        dtype = getattr(torch, settings.dtype)
        self.base = random_base(settings.shape, settings.layers, dtype, self.device)
        self.adapters: dict[str, Pairs] = {
            adapter_name(i): random_adapter(self.base, settings.rank, LINEARS, i, dtype, self.device)
            for i in range(max(work.slots for work in self.works) + 1)  # one more than fit: loads are timed
        }
        self.folders: dict[str, Path] = {}

    def say(self, text: str) -> None:
        print(f"[{time.perf_counter() - self.started:5.0f} s] {text}", flush=True)

    def save(self) -> None:
        self.settings.out.parent.mkdir(parents=True, exist_ok=True)
        self.settings.out.write_text(json.dumps(self.result, indent=1) + "\n")

    def ids(self, work: Work) -> Tensor:
        tokens = work.tokens + (work.phase == "decode")
        return prompts(work.rows, tokens, self.base.config.vocab_size, self.device)["input_ids"]

    def written(self, count: int) -> dict[str, Path]:
        """Folders of the first `count` adapters."""
        for name in list(self.adapters)[:count]:
            if name not in self.folders:
                pairs = self.adapters[name]
                self.folders[name] = save_adapter(self.scratch / name, pairs, self.settings.rank, LINEARS)
        return dict(list(self.folders.items())[:count])

    def facts(self) -> None:
        """Bytes, what the device can do at best, and what every cell must give."""
        pairs = next(iter(self.adapters.values()))
        tied = self.base.config.tie_word_embeddings
        skipped = 0 if tied else self.base.get_input_embeddings().weight.nbytes  # of which a step reads a row
        adapter_bytes = sum(a.nbytes + b.nbytes for a, b in pairs.values())
        self.result |= {
            "weight_bytes": sum(p.nbytes for p in self.base.parameters()) - skipped,
            "adapter_bytes": adapter_bytes,
            "pinned_copy_ms": timing.pinned_copy_ms(adapter_bytes, self.device),
            "copy_bytes_per_ms": timing.bytes_per_ms(self.device),
        }
        scaling = (2 * self.settings.rank + 1) / self.settings.rank  # as in material.lora_config
        self.truths = gate.truths(self.base, self.adapters, scaling, self.works, self.ids)
        self.empty_cache()
        errors = ", ".join(f"{truth.plain:.1e}" for truth in self.truths.values())
        self.say(f"cells computed in the wider dtype; errors of the plain formula in {self.settings.dtype}: {errors}")

    def empty_cache(self) -> None:
        if self.device.startswith("cuda"):
            torch.cuda.empty_cache()

    # -- one cell ------------------------------------------------------------------------------------------------
    def cell(self, subject: Subject, work: Work, *, graph: bool, bound: float | None = None) -> dict[str, Any]:
        """Times of one cell: "eager", for decode "graph"; bound: replays are checked, also under another mix."""
        settings = self.settings
        most = settings.steps if work.phase == "decode" else settings.prefills
        batch = Batch(subject, work, self.ids(work), 2 * timing.WARM_UP + max(most, settings.replays))
        found: dict[str, Any] = {}
        with subject.route(work.mix()) as call:
            if work.phase == "prefill":
                return {"eager": timing.steps(lambda: batch.prompt(call), most, settings.budget, self.device)}
            batch.prompt(call)
            found["eager"] = timing.steps(lambda: batch.step(call), most, settings.budget, self.device)
            found["max_cache_len"] = batch.length
            if not graph:
                return found
            why = timing.why_no_graph(self.device)
            if why is not None:
                return found | {"graph": {"skipped": why}}
            eager = batch.answer(call)
            try:
                captured, out = timing.capture(lambda: batch.step(call))
            except RuntimeError as error:
                return found | {"graph": {"skipped": f"capture failed: {str(error).strip().splitlines()[0]}"}}
            replayed = self.replay(batch, call, captured, out)
            if bound is not None:
                found["graph_error"] = gate.check_replay(subject, work, "first mix", replayed, eager, bound)["error"]
            batch.prompt(call)
            found["graph"] = timing.steps(captured.replay, settings.replays, settings.budget, self.device)
        if bound is not None and work.distinct > 1:
            rows = gate.moved(work.mix())
            rows[0] = None
            with subject.route(rows) as call:
                eager = batch.answer(call)
                again = self.replay(batch, call, captured, out)
            try:
                found["reroute"] = gate.check_replay(subject, work, "another mix", again, eager, bound, replayed)
            except gate.GateError as error:
                found["reroute"] = {"failed": str(error)}
        return found

    def replay(self, batch: Batch, call: Mapping[str, Any], captured: Any, out: Tensor) -> Tensor:
        batch.prompt(call)
        captured.replay()
        return out.clone()

    # -- contenders ----------------------------------------------------------------------------------------------
    def bare(self, when: str) -> None:
        shapes = {work.shape: work for work in self.works}
        found = self.result["bare"][when] = {}
        for shape, work in shapes.items():
            plain = Work(work.phase, work.rows, work.tokens, 0, 0)
            found[shape] = self.cell(contenders.bare(self.base), plain, graph=True)
            self.say(f"bare {when}, {shape}: {brief(found[shape])}")
        self.save()
        self.empty_cache()

    def run(self, subject: Subject, works: list[Work], cells: dict[str, Any], *, mine: bool) -> None:
        """Check and time cells, those that fail the check not; mine: with all checks and under a CUDA graph."""
        for work in works:
            subject.prepare(work.distinct)
            found = cells[work.name] = {}
            try:
                truth = self.truths[work]
                found["errors"] = gate.check(subject, work, self.ids(work), truth, all_checks=mine)
                found |= self.cell(subject, work, graph=mine, bound=truth.bound)
            except gate.GateError as error:
                found["failed"] = str(error)
            found["resident"] = subject.resident()
            self.say(f"{subject.name}, {work.name}: {brief(found)}")
            self.save()

    def ours(self, backend: str) -> None:
        with self.recorded(f"hf_multilora, {backend}") as record:
            for slots in dict.fromkeys(work.slots for work in self.works):
                note: dict[str, Any] = {}
                record["models"][f"{slots} slots"] = note
                folders = self.written(slots + 1)
                with contenders.ours(self.base, backend, slots, self.settings.rank, folders, note) as subject:
                    self.say(f"{subject.name}: {note['registered']} registered in {note['registering_s']:.1f} s")
                    works = [work for work in self.works if work.slots == slots]
                    self.run(subject, works, record["cells"], mine=True)
                    note["slot"] = timing.slot_loads(subject, list(folders), min(slots + 1, 12), self.device)
                    self.say(f"{subject.name}, {slots} slots: one adapter to its slot {note['slot']['load_ms']:.2f} ms")
                self.empty_cache()

    def peft(self) -> None:
        with self.recorded("peft") as record:
            once = {(w.phase, w.rows, w.tokens, w.distinct): w for w in reversed(self.works) if w.distinct}
            works = [work for work in self.works if work in once.values()]
            with contenders.peft(self.base, self.adapters, self.written(2), record) as subject:
                self.run(subject, works, record["cells"], mine=False)
        self.empty_cache()

    @contextmanager
    def recorded(self, name: str) -> Iterator[dict[str, Any]]:
        """A contender that fails is recorded and the others go on: time on a GPU is dear."""
        record: dict[str, Any] = {"models": {}, "cells": {}, "error": None}
        self.result["contenders"][name] = record
        try:
            with torch.no_grad():
                yield record
        except Exception as error:
            record["error"] = f"{type(error).__name__}: {error}"
            traceback.print_exc()
        wrong = [cell for cell, found in record["cells"].items() if "failed" in found]
        wrong += [cell for cell, found in record["cells"].items() if "failed" in found.get("reroute", {})]
        if wrong and record["error"] is None:
            record["error"] = f"wrong answers in {wrong}"
        self.save()
        self.say(f"after {name}\n{table(self.result, self.works)}")


def brief(found: Mapping[str, Any]) -> str:
    """The cell in one line."""
    parts = [f"{kind} {error:.1e}" for kind, error in found.get("errors", {}).items()]
    for kind in ("eager", "graph"):
        if kind in found:
            parts.append(
                f"{kind} " + (f"{found[kind]['ms']:.3f} ms" if "ms" in found[kind] else found[kind]["skipped"])
            )
    if "reroute" in found:
        parts.append(found["reroute"].get("failed", "the graph serves another mix"))
    if "failed" in found:
        parts.append(f"FAILED: {found['failed']}")
    return ", ".join(parts)


def device_facts(device: str) -> dict[str, Any]:
    found: dict[str, Any] = {"triton": version("triton") if find_spec("triton") else None, "device": device}
    if device.startswith("cuda"):
        found |= {"device": torch.cuda.get_device_name(device), "cuda": torch.version.cuda}
    return found


def measure(settings: argparse.Namespace, scratch: Path) -> int:
    bench = Bench(settings, scratch)
    told = {name: value for name, value in vars(settings).items() if name not in ("out", "scratch")}
    bench.result |= environment() | device_facts(settings.device) | {"settings": told}
    bench.say(f"base {settings.shape}, {len(bench.adapters)} adapters of rank {settings.rank}, {settings.dtype}")
    with torch.no_grad():
        bench.bare("before")
        bench.facts()
    for backend in settings.backend:
        bench.ours(backend)
    if settings.peft:
        bench.peft()
    with torch.no_grad():
        bench.bare("after")
        bench.say(f"all\n{table(bench.result, bench.works)}")
        if settings.peft and timing.why_no_graph(settings.device) is None:
            bench.result["peft_under_a_graph"] = contenders.peft_capture(settings.device)
            bench.say(f"peft under a CUDA graph: {bench.result['peft_under_a_graph']}")
    bench.result["seconds"] = time.perf_counter() - bench.started
    bench.save()
    failed = [name for name, record in bench.result["contenders"].items() if record["error"]]
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def main(argv: list[str] | None = None) -> int:
    settings = arguments(argv)
    with tempfile.TemporaryDirectory(dir=settings.scratch) as scratch:
        return measure(settings, Path(scratch))


if __name__ == "__main__":
    sys.exit(main())
