"""Experts' LoRA on one GPU at the shape of a Qwen3-30B-A3B layer: python -m tests.benchmarks.gpu_experts --help.

First each launch on its own, with what its bytes would take at the rate of a copy; --sweep tries other tiles. Then the
experts of a layer with mixed adapters against the same experts bare. No answer is timed before it is right. Results are
printed and written as they come.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from . import gpu_experts_launches as launches
from . import gpu_timing as timing
from .gpu import device_facts
from .gpu_experts_launches import AMOUNTS, COPIES, LAUNCHES, Layer, Shape
from .gpu_experts_layer import LayerBench
from .run import ROOT, environment


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--experts", type=int, default=128)
    add("--choices", type=int, default=8, help="experts of a token")
    add("--hidden", type=int, default=2048)
    add("--inner", type=int, default=768)
    add("--rank", type=int, default=16)
    add("--adapters", type=int, default=8)
    add("--tokens", type=int, nargs="+", default=[64, 2048])
    add("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    add("--device", default="cuda")
    add("--sweep", action="store_true", help="time other tiles too")
    add("--launches", nargs="+", choices=LAUNCHES, default=list(LAUNCHES))
    add("--parts", nargs="+", choices=("launches", "layer"), default=["launches", "layer"])
    add("--backend", nargs="+", default=["auto"], help="of from_pretrained, for the layer")
    add("--replays", type=int, default=50)
    add("--rounds", type=int, default=7, help="of bare, ours, ours, bare")
    add("--scratch", type=Path, help="folder for the adapters' checkpoints")
    add("--out", type=Path, default=ROOT / "bench-results" / "gpu-experts.json")
    return parser.parse_args(argv)


class Bench:
    def __init__(self, settings: argparse.Namespace) -> None:
        self.settings, self.started = settings, time.perf_counter()
        self.shape = Shape(
            settings.experts, settings.choices, settings.hidden, settings.inner, settings.rank, settings.adapters
        )
        told = {name: value for name, value in vars(settings).items() if name not in ("out", "scratch")}
        facts = environment() | device_facts(settings.device)
        self.result: dict[str, Any] = facts | {"settings": told, "launches": {}, "layer": {}}
        self.rate = timing.bytes_per_ms(settings.device)
        self.result["copy_bytes_per_ms"] = self.rate

    def say(self, text: str) -> None:
        print(f"[{time.perf_counter() - self.started:5.0f} s] {text}", flush=True)

    def save(self) -> None:
        self.settings.out.parent.mkdir(parents=True, exist_ok=True)
        self.settings.out.write_text(json.dumps(self.result, indent=1) + "\n")

    def launches(self, tokens: int) -> None:
        """Each launch with the tiles for few and for many pairs: us, and the floor of its bytes."""
        settings, dtype = self.settings, getattr(torch, self.settings.dtype)
        layers = [Layer.random(self.shape, tokens, dtype, settings.device, seed) for seed in range(COPIES)]
        pairs = layers[0].keys.shape[0]
        taken = launches.triton_experts.amount(pairs, len(layers[0].ranks))
        found = self.result["launches"][str(tokens)] = {"pairs": pairs, "taken": taken}
        self.say(f"{tokens} tokens, {pairs} pairs, {len(layers[0].ranks)} keys, taken for {taken}")
        for launch in settings.launches:
            cell = found[launch] = {"floor_us": 1e3 * layers[0].least_bytes(launch) / self.rate}
            gate = launches.Gate(layers[0], launch)
            for amount in AMOUNTS:
                tile = launches.default(launch, amount)
                gate.check(tile)
                cell[amount] = launches.clock(layers, launch, tile, settings.device, settings.replays)
            line = ", ".join(f"{amount} {cell[amount]:.1f}" for amount in AMOUNTS)
            self.say(f"  {launch}: {line} us, floor {cell['floor_us']:.1f}")
            if settings.sweep:
                tried = launches.sweep(layers, gate, taken, settings.device)
                cell["sweep"] = [[us, str(tile)] for us, tile in tried]
                for us, tile in tried[:3]:
                    self.say(f"    {us:.1f} us {tile}")
            self.save()
        if settings.launches == list(LAUNCHES):
            total = sum(found[launch][taken] for launch in LAUNCHES)
            floor = sum(found[launch]["floor_us"] for launch in LAUNCHES)
            self.say(f"  all: {total:.1f} us, without combine {total - found['combine'][taken]:.1f}, floor {floor:.1f}")

    def layer(self) -> None:
        """The experts of one layer with mixed adapters, and bare: us and their ratio."""
        settings = self.settings
        bench = LayerBench(self.shape, getattr(torch, settings.dtype), settings.device)
        truths = {tokens: bench.truths(tokens) for tokens in settings.tokens}
        for backend in settings.backend:
            with tempfile.TemporaryDirectory(dir=settings.scratch) as scratch:
                with bench.ours(backend, Path(scratch)) as subject:
                    for tokens in settings.tokens:
                        found = bench.measure(subject, tokens, *truths[tokens], settings.rounds, settings.replays)
                        self.result["layer"][f"{backend}, {tokens}"] = found
                        self.say(f"experts, {backend}, {tokens} tokens in {found['rows']} rows, error "
                                 f"{found['error']:.1e} of {found['bound']:.1e}")  # fmt: skip
                        for kind in ("eager", "graph"):
                            if kind in found:
                                us = found[kind]
                                line = f"bare {us['bare']:.0f}, ours {us['ours']:.0f} us, ratio {us['ratio']:.3f}"
                                self.say(f"  {kind}: {line}")
                        self.save()


def main(argv: list[str] | None = None) -> int:
    bench = Bench(arguments(argv))
    with torch.no_grad():
        if "launches" in bench.settings.parts:
            for tokens in bench.settings.tokens:
                bench.launches(tokens)
        if "layer" in bench.settings.parts:
            bench.layer()
    bench.result["seconds"] = time.perf_counter() - bench.started
    bench.save()
    return 0


if __name__ == "__main__":
    sys.exit(main())
