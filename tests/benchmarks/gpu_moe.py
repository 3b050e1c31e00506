"""A model of the shape of Qwen3-30B-A3B decodes a mixed batch, against its bare self on one GPU:
python -m tests.benchmarks.gpu_moe --help.

Adapters train all experts and the queries and values. Truth is the base in float32 with one adapter merged into its
weights, row by row; nothing is timed before the answers agree. Decoding is timed with the implementation of experts
that `generate` takes for it on a GPU (batched_mm) and with that of the prompt (grouped_mm), the prompt with the latter.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from . import gpu_contenders as contenders
from . import gpu_gate as gate
from . import gpu_timing as timing
from .gate import GateError
from .gpu import device_facts
from .gpu_contenders import Batch, Subject
from .material import _ready, prompts
from .moe_material import Factors, merge, random_factors, save_factors
from .registry import Work
from .run import ROOT, environment

SHAPES = {
    "qwen3-30b-a3b": {
        "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128,
        "num_experts_per_tok": 8, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
        "vocab_size": 151936, "num_hidden_layers": 48, "max_position_embeddings": 4096,
    },
    "tiny": {
        "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 24, "num_experts": 4,
        "num_experts_per_tok": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
        "vocab_size": 64, "num_hidden_layers": 2, "max_position_embeddings": 256,
    },
}  # fmt: skip
KINDS = ("eager", "graph")
CELLS = (("decode", "batched_mm"), ("decode", "grouped_mm"), ("prefill", "grouped_mm"))  # phase, implementation


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--shape", choices=SHAPES, default="qwen3-30b-a3b", help="of the base, whose weights are random")
    add("--layers", type=int, default=8, help="instead of the shape's own number")
    add("--rows", type=int, default=32)
    add("--adapters", type=int, default=8)
    add("--rank", type=int, default=16)
    add("--prompt-tokens", type=int, default=64)
    add("--steps", type=int, default=20, help="eager steps of decode")
    add("--replays", type=int, default=50, help="steps of decode under a CUDA graph")
    add("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    add("--device", default="cuda")
    add("--scratch", type=Path, help="folder for the adapters' checkpoints")
    add("--out", type=Path, default=ROOT / "bench-results" / "gpu-moe.json")
    return parser.parse_args(argv)


class Bench:
    """The base, its adapters, the cells, and the results so far."""

    def __init__(self, settings: argparse.Namespace) -> None:
        self.settings, self.device, self.started = settings, settings.device, time.perf_counter()
        self.dtype = getattr(torch, settings.dtype)
        torch.manual_seed(0)
        config = Qwen3MoeConfig(**SHAPES[settings.shape] | {"num_hidden_layers": settings.layers})
        with torch.device(self.device):
            self.base = _ready(Qwen3MoeForCausalLM._from_config(config, dtype=self.dtype), self.device)
        self.adapters: dict[str, Factors] = {
            f"adapter-{i}": random_factors(self.base, settings.rank, i) for i in range(settings.adapters)
        }
        rows, tokens = settings.rows, settings.prompt_tokens
        count = settings.adapters
        self.works = {phase: Work(phase, rows, tokens, count, count) for phase in ("decode", "prefill")}
        self.mix = [f"adapter-{i % settings.adapters}" for i in range(rows)]
        told = {name: value for name, value in vars(settings).items() if name not in ("out", "scratch")}
        self.result: dict[str, Any] = environment() | device_facts(self.device) | {"settings": told, "cells": {}}

    def say(self, text: str) -> None:
        print(f"[{time.perf_counter() - self.started:5.0f} s] {text}", flush=True)

    def save(self) -> None:
        self.settings.out.parent.mkdir(parents=True, exist_ok=True)
        self.settings.out.write_text(json.dumps(self.result, indent=1) + "\n")

    def ids(self, work: Work) -> Tensor:
        tokens = work.tokens + (work.phase == "decode")
        return prompts(work.rows, tokens, self.base.config.vocab_size, self.device)["input_ids"]

    # -- what must come out --------------------------------------------------------------------------------------
    def truths(self, ids: Tensor) -> tuple[Tensor, float]:
        """(logits [rows, V] of each row's adapter merged into a wider copy, the same in the base's dtype is off by)."""
        torch.set_float32_matmul_precision("highest")  # no TF32
        wide: Any = copy.deepcopy(self.base).to(gate.WIDER[self.dtype])
        wide.set_experts_implementation("eager")
        wanted = self.merged_rows(wide, ids)
        plain = self.merged_rows(self.base, ids)
        return wanted, gate.errors(plain, wanted).max().item()

    def merged_rows(self, model: Any, ids: Tensor) -> Tensor:
        logits: dict[int, Tensor] = {}
        for name, factors in self.adapters.items():
            rows = [i for i, own in enumerate(self.mix) if own == name]
            with merge(model, factors):
                for i in rows:
                    logits[i] = model(input_ids=ids[i : i + 1], use_cache=False, logits_to_keep=1).logits[0, -1]
        return torch.stack([logits[i] for i in range(len(self.mix))])

    def check(self, subject: Subject, work: Work, ids: Tensor, truth: Tensor, bound: float) -> dict[str, float]:
        def answer(rows: list[str | None]) -> Tensor:
            with subject.route(rows) as call:
                return Batch(subject, work, ids, steps=1).answer(call)

        error = gate.errors(answer([*self.mix]), truth).max().item()
        other = gate.errors(answer([*self.mix[1:], self.mix[0]]), truth).median().item()
        if not error <= bound < other:  # NaN too
            raise GateError(
                f"{subject.name}, {work.phase}: logits must be within {bound:.3g} of the merged models, they differ by "
                f"{error:.3g}; with each row's neighbour's adapter by {other:.3g}"
            )
        return {"error": error, "bound": bound, "control": other}

    # -- clocks --------------------------------------------------------------------------------------------------
    def clock(self, subject: Subject, work: Work, implementation: str) -> dict[str, Any]:
        settings, found = self.settings, dict[str, Any]()
        rows: list[str | None] = [*self.mix]
        batch = Batch(subject, work, self.ids(work), 2 * timing.WARM_UP + max(settings.steps, settings.replays))
        with subject.route(rows) as call:

            def prompt() -> None:
                self.base.set_experts_implementation("grouped_mm")  # as generate does: batched_mm has no memory for it
                batch.prompt(call)
                self.base.set_experts_implementation(implementation)

            step = (lambda: batch.step(call)) if work.phase == "decode" else (lambda: batch.prompt(call))
            prompt()
            found["eager"] = timing.steps(step, settings.steps, 5.0, self.device)
            if work.phase == "decode" and timing.why_no_graph(self.device) is None:
                prompt()
                captured, _ = timing.capture(step)
                prompt()
                found["graph"] = timing.steps(captured.replay, settings.replays, 5.0, self.device)
        return found

    def run(self, name: str, subject: Subject) -> None:
        for phase, implementation in CELLS:
            cell = self.result["cells"].setdefault(f"{phase}, {implementation}", {})
            cell[name] = self.clock(subject, self.works[phase], implementation)
            line = ", ".join(f"{kind} {found['ms']:.3f} ms" for kind, found in cell[name].items())
            self.say(f"{name}, {phase}, {implementation}: {line}")
            self.save()


@contextmanager
def ours(bench: Bench, scratch: Path) -> Iterator[Subject]:
    settings, folders = bench.settings, dict[str, Path]()
    for name, factors in bench.adapters.items():
        folders[name] = save_factors(scratch / name, factors, settings.rank)
    note: dict[str, Any] = {}
    with contenders.ours(bench.base, "auto", settings.adapters, settings.rank, folders, note) as subject:
        bench.say(f"{note['registered']} adapters registered in {note['registering_s']:.1f} s")
        report = subject.model.memory_report
        with subject.route([*bench.mix]):
            bench.result["pool_bytes"], bench.result["slot_bytes"] = report().device_bytes, report().slot_bytes
        yield subject


def table(result: Mapping[str, Any]) -> str:
    """ms of a step or a prompt, and its ratio to the mean of the bare model's before and after."""
    lines = [f"{'':40}" + "".join(f"{kind:>12}{'ratio':>8}" for kind in KINDS)]
    for name, cell in result["cells"].items():
        for who, found in cell.items():
            line = f"{f'{name}, {who}':40}"
            for kind in (kind for kind in KINDS if kind in found):
                unit = mean(cell[bare][kind]["ms"] for bare in ("bare", "bare after"))
                line += f"{found[kind]['ms']:12.3f}{found[kind]['ms'] / unit:8.3f}"
            lines.append(line)
    return "\n".join(lines)


def measure(settings: argparse.Namespace, scratch: Path) -> int:
    bench = Bench(settings)
    bench.result["adapter_bytes"] = sum(t.nbytes for pair in bench.adapters["adapter-0"].values() for t in pair)
    bench.result["weight_bytes"] = sum(p.nbytes for p in bench.base.parameters())
    bench.say(f"base of {settings.layers} layers, {bench.result['weight_bytes'] / 1e9:.1f} GB; an adapter "
              f"{bench.result['adapter_bytes'] / 1e6:.0f} MB")  # fmt: skip
    with torch.no_grad():
        truths = {phase: bench.truths(bench.ids(work)) for phase, work in bench.works.items()}
        bare = contenders.bare(bench.base)
        bench.run("bare", bare)
        with ours(bench, scratch) as subject:
            for phase, implementation in CELLS:
                bench.base.set_experts_implementation(implementation)
                work, (truth, plain) = bench.works[phase], truths[phase]
                bound = 2 * plain + gate.FLOOR[bench.dtype]
                found = bench.check(subject, work, bench.ids(work), truth, bound) | {"plain": plain}
                bench.result.setdefault("errors", {})[f"{phase}, {implementation}"] = found
                bench.say(f"{phase}, {implementation}: {found}")
            bench.run("ours", subject)
        bench.run("bare after", bare)
    bench.result["seconds"] = time.perf_counter() - bench.started
    bench.save()
    bench.say(table(bench.result))
    return 0


def main(argv: list[str] | None = None) -> int:
    settings = arguments(argv)
    with tempfile.TemporaryDirectory(dir=settings.scratch) as scratch:
        return measure(settings, Path(scratch))


if __name__ == "__main__":
    sys.exit(main())
