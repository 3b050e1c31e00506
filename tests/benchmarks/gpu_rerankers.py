"""Mixed rerankers at the shape of bge-reranker-v2-m3 on one GPU: python -m tests.benchmarks.gpu_rerankers --help.

An XLM-RoBERTa large with random weights and a small vocabulary (a lookup reads rows of it, not all) scores rows of one
length, each with its adapter: A and B on queries, keys and values, and a head of its own. The bare base is timed first
and last. No cell is timed before its answers are right. --tiny: a small model on the CPU, to try the script.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import XLMRobertaConfig, XLMRobertaForSequenceClassification
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from . import gpu_contenders as contenders
from . import gpu_timing as timing
from . import reranker_gate as gate
from .gate import GateError
from .gpu import brief, device_facts
from .gpu_contenders import Subject
from .registry import Mix, adapter_name
from .reranker_material import random_reranker, save_reranker
from .run import ROOT, environment

SHAPES = {
    "bge-reranker-v2-m3": {
        "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096,
        "max_position_embeddings": 8194, "vocab_size": 32000,
    },
    "tiny": {
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48,
        "max_position_embeddings": 40, "vocab_size": 64,
    },
}  # fmt: skip
TINY = (
    "--shape tiny --device cpu --dtype float32 --backend torch --rank 4 --rows 4 --tokens 6 3 --adapters 0 1 2 4 "
    "--steps 2 --replays 2"
)
TARGET = 64, 1.15  # distinct adapters, at most this ratio to the bare model
KINDS = ("eager", "graph")
UNPADDED = "sdpa_unpadded"


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--shape", choices=SHAPES, default="bge-reranker-v2-m3")
    add("--layers", type=int, help="instead of the shape's own number")
    add("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    add("--device", default="cuda")
    add("--backend", default="auto", help="of from_pretrained")
    add("--rank", type=int, default=16)
    add("--rows", type=int, default=64)
    add("--tokens", type=int, nargs="+", default=[512, 128, 32])
    add("--adapters", type=int, nargs="+", default=[0, 1, 8, 64], help="distinct in the batch, ascending")
    add("--checked", type=int, default=32, help="rows of a batch that are compared with the formula")
    add("--steps", type=int, default=20, help="eager calls")
    add("--replays", type=int, default=30, help="calls under a CUDA graph")
    add("--budget", type=float, default=1.5, help="seconds that the calls of one clock may take")
    add("--scratch", type=Path, help="folder for the adapters' checkpoints")
    add("--out", type=Path, default=ROOT / "bench-results" / "gpu-rerankers.json")
    add("--tiny", action="store_true", help=f"for {TINY}")
    settings = parser.parse_args(argv)
    if settings.tiny:
        out = [] if argv is None else argv
        settings = parser.parse_args([*TINY.split(), *(word for word in (out or sys.argv[1:]) if word != "--tiny")])
    if sorted(settings.adapters) != settings.adapters or settings.adapters[-1] > settings.rows:
        parser.error("--adapters must ascend, as adapters stay in their slots, and be at most --rows")
    return settings


def random_base(shape: str, layers: int | None, dtype: torch.dtype, device: str) -> Any:
    """Its attention is Transformers' sdpa without a mask, as there is no padding. Else Transformers 5.17 leaves the
    mask out of eager calls only, and the captured bare model, several times slower with it, is no fair unit.
    """
    ALL_ATTENTION_FUNCTIONS.register(UNPADDED, ALL_ATTENTION_FUNCTIONS["sdpa"])  # a name for which no masks are made
    own = SHAPES[shape] | ({} if layers is None else {"num_hidden_layers": layers})
    config = XLMRobertaConfig(
        **own, num_labels=1, pad_token_id=1, bos_token_id=0, eos_token_id=2, type_vocab_size=1, dtype=dtype,
        initializer_range=0.04, attn_implementation=UNPADDED,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device(device):
        model = XLMRobertaForSequenceClassification(config)
    return model.requires_grad_(False).eval().to(device=device, dtype=dtype)


class Bench:
    """One run: the base, its adapters, the batches by (tokens, distinct), and the results so far."""

    def __init__(self, settings: argparse.Namespace) -> None:
        self.settings, self.device = settings, settings.device
        self.started = time.perf_counter()
        dtype = getattr(torch, settings.dtype)
        self.base = random_base(settings.shape, settings.layers, dtype, self.device)
        self.adapters = {
            adapter_name(i): random_reranker(self.base, settings.rank, i, dtype, self.device)
            for i in range(settings.adapters[-1])
        }
        self.ids = {tokens: self.random_ids(tokens) for tokens in settings.tokens}
        self.cells = {  # few adapters first: those of a cell stay in their slots
            (tokens, distinct): (self.ids[tokens], Mix("", distinct).rows(list(self.adapters), settings.rows))
            for distinct in settings.adapters
            for tokens in settings.tokens
        }
        self.result: dict[str, Any] = {"bare": {}, "cells": {}, "error": None}

    def random_ids(self, tokens: int) -> Tensor:
        """[rows, tokens], without padding."""
        generator = torch.Generator().manual_seed(tokens)
        size = self.base.config.vocab_size
        return torch.randint(5, size, (self.settings.rows, tokens), generator=generator).to(self.device)

    def say(self, text: str) -> None:
        print(f"[{time.perf_counter() - self.started:5.0f} s] {text}", flush=True)

    def save(self) -> None:
        self.settings.out.parent.mkdir(parents=True, exist_ok=True)
        self.settings.out.write_text(json.dumps(self.result, indent=1) + "\n")

    def facts(self) -> None:
        """What every cell must give, and what the deltas cost at least."""
        self.result["attention"] = self.base.config._attn_implementation
        self.result["copy_bytes_per_ms"] = timing.bytes_per_ms(self.device)
        scaling = (2 * self.settings.rank + 1) / self.settings.rank
        self.truths = gate.truths(self.base, self.adapters, scaling, self.cells, self.settings.checked)
        if self.device.startswith("cuda"):
            torch.cuda.empty_cache()
        self.say("formula, errors: " + ", ".join(f"{truth.plain:.1e}" for truth in self.truths.values()))

    def floors(self, tokens: int, distinct: int) -> dict[str, float]:
        """Ratios to the bare model that no way of adding the deltas goes below.

        bytes: the adapters are read once. flops: those of the deltas on top of the base's. Not a bound, but that of a
        way which adds them in a pass of its own, activations: every adapted linear's input is read once more, its
        output read and written.
        """
        config, factors, rows = self.base.config, next(iter(self.adapters.values())), self.settings.rows
        total = rows * tokens
        sizes = [(a.shape[1], b.shape[0]) for a, b in factors.pairs.values()]
        linears = config.num_hidden_layers * (
            4 * config.hidden_size**2 + 2 * config.hidden_size * config.intermediate_size
        )
        flops = 2 * total * linears + 4 * total * tokens * config.hidden_size * config.num_hidden_layers
        ms = self.bare_ms("before", tokens, "graph") or self.bare_ms("before", tokens, "eager") or 0.0
        moved = total * sum(k + 2 * n for k, n in sizes) * self.base.dtype.itemsize
        speed = self.result["copy_bytes_per_ms"]
        live = distinct > 0
        return {
            "bytes": 1 + distinct * factors.nbytes / speed / ms,
            "flops": 1 + live * 2 * total * self.settings.rank * sum(k + n for k, n in sizes) / flops,
            "activations": 1 + live * moved / speed / ms,
        }

    def bare_ms(self, when: str, tokens: int, kind: str) -> float | None:
        ms: float | None = self.result["bare"].get(when, {}).get(str(tokens), {}).get(kind, {}).get("ms")
        return ms

    # -- cells ---------------------------------------------------------------------------------------------------
    def timed(self, subject: Subject, ids: Tensor, rows: contenders.Rows, bound: float | None = None) -> dict[str, Any]:
        """Times of one batch, eager and under a CUDA graph; bound: replays are checked, also under another mix."""
        settings, name = self.settings, subject.name
        why = timing.why_no_graph(self.device)
        found: dict[str, Any] = {}
        with subject.route(rows) as call:

            def score() -> Tensor:
                return subject.model(input_ids=ids, **call).logits[:, 0]

            found["eager"] = timing.steps(score, settings.steps, settings.budget, self.device)
            if why is not None:
                return found | {"graph": {"skipped": why}}
            eager = score().clone()
            try:
                graph, out = timing.capture(score)
            except RuntimeError as error:
                return found | {"graph": {"skipped": f"capture failed: {str(error).strip().splitlines()[0]}"}}
            graph.replay()
            first = out.clone()
            if bound is not None:
                found["graph_error"] = gate.check_replay(name, first, eager, bound)["error"]
            found["graph"] = timing.steps(graph.replay, settings.replays, settings.budget, self.device)
        if bound is not None and len(set(rows)) > 1:
            others = gate.moved(rows)
            others[0] = None
            with subject.route(others) as call:
                eager = subject.model(input_ids=ids, **call).logits[:, 0].clone()
                graph.replay()
                found["reroute"] = gate.check_replay(f"{name}, another mix", out, eager, bound, first)
        return found

    def bare(self, when: str) -> None:
        self.result["bare"][when] = {}
        for tokens, ids in self.ids.items():
            found = self.timed(contenders.bare(self.base), ids, [None] * len(ids))
            self.result["bare"][when][str(tokens)] = found
            self.say(f"bare {when}, {tokens} tokens: {brief(found)}")
        self.save()

    def ours(self, scratch: Path) -> None:
        settings = self.settings
        folders = {name: save_reranker(scratch / name, f, settings.rank) for name, f in self.adapters.items()}
        self.result["model"] = note = {}
        slots = len(folders)
        with contenders.ours(self.base, settings.backend, slots, settings.rank, folders, note) as subject:
            self.say(f"{subject.name}: {note['registered']} registered in {note['registering_s']:.1f} s")
            for (tokens, distinct), (ids, rows) in self.cells.items():
                name, truth = cell_name(tokens, distinct), self.truths[tokens, distinct]
                found = self.result["cells"][name] = {"floors": self.floors(tokens, distinct)}
                try:
                    found["errors"] = gate.check(subject, name, ids, rows, truth)
                    found |= self.timed(subject, ids, rows, truth.bound if distinct else None)
                except GateError as error:
                    found["failed"] = self.result["error"] = str(error)
                found["resident"] = subject.resident()
                self.say(f"{name}: {brief(found)}")
                self.save()


def cell_name(tokens: int, distinct: int) -> str:
    return f"{tokens} tokens, {distinct} adapter{'' if distinct == 1 else 's'}"


def table(bench: Bench) -> str:
    """One line per cell: ms of a call, ratios to the bare model before and after, and the floors."""
    lines = [f"{'':24}" + "".join(f"{kind:>10} {'/before':>7} {'/after':>7}" for kind in KINDS)]
    lines[0] += f"   floors: {'bytes':>6} {'flops':>6}   a pass over {'activations':>11}"
    verdicts = []
    for tokens, distinct in bench.cells:
        name = cell_name(tokens, distinct)
        cell: Mapping[str, Any] = bench.result["cells"].get(name, {})
        line = f"{name:24}"
        for kind in KINDS:
            ms = cell.get(kind, {}).get("ms")
            line += f"{'-' if ms is None else f'{ms:.3f}':>10}"
            for when in ("before", "after"):
                unit = bench.bare_ms(when, tokens, kind)
                ratio = None if ms is None or unit is None else ms / unit
                line += f" {'' if ratio is None else f'{ratio:.3f}':>7}"
                if ratio is not None and when == "before" and distinct == TARGET[0]:
                    met = "met" if ratio <= TARGET[1] else "MISSED"
                    verdicts.append(f"{name}, {kind}: at most {TARGET[1]} times the bare model: {ratio:.3f}, {met}")
        floors = cell.get("floors", {})
        line += f"   {'':7}" + "".join(f" {floors.get(kind, 0):6.3f}" for kind in ("bytes", "flops"))
        lines.append(
            line + f"   {'':11} {floors.get('activations', 0):11.3f}" + (" FAILED" if "failed" in cell else "")
        )
    return "\n".join([*lines, *verdicts]) + "\n"


@torch.no_grad()
def measure(settings: argparse.Namespace, scratch: Path) -> int:
    bench = Bench(settings)
    told = {name: value for name, value in vars(settings).items() if name not in ("out", "scratch")}
    bench.result |= environment() | device_facts(settings.device) | {"settings": told}
    size = sum(p.numel() for p in bench.base.parameters()) / 1e6
    bench.say(f"base {settings.shape}, {size:.0f} M random weights, {settings.dtype}, {len(bench.adapters)} adapters")
    bench.bare("before")
    bench.facts()
    bench.ours(scratch)
    bench.bare("after")
    bench.result["seconds"] = time.perf_counter() - bench.started
    bench.save()
    bench.say(f"all\n{table(bench)}")
    if bench.result["error"]:
        print(f"failed: {bench.result['error']}", file=sys.stderr)
    return 1 if bench.result["error"] else 0


def main(argv: list[str] | None = None) -> int:
    settings = arguments(argv)
    with tempfile.TemporaryDirectory(dir=settings.scratch) as scratch:
        return measure(settings, Path(scratch))


if __name__ == "__main__":
    sys.exit(main())
