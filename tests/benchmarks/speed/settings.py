"""The command line of the benchmark."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from hf_multilora.config import MultiLoRAConfig

from ..material import SHAPES
from ..run import ROOT


def arguments(argv: Sequence[str] | None, about: str | None, stages: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.speed", description=about,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )  # fmt: skip
    add = parser.add_argument
    add("--stages", nargs="+", default=["all"], metavar="STAGE", help=f"all, or some of {', '.join(stages)}")
    add("--cells", nargs="+", help="run these of a stage only, as they are called in its table")
    add("--shape", choices=SHAPES, default="llama-3-8b", help="of the base; tiny: small cells, for tests on a CPU")
    add("--layers", type=int, help="instead of the stage's own number")
    add("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    add("--device", default="cuda")
    add("--rank", type=int, default=16)
    add("--backend", default="auto", help="of from_pretrained")
    add("--rounds", type=int, default=1, help="of bare, ours, ours, bare")
    add("--replays", type=int, default=40, help="steps of a block under a CUDA graph")
    add("--prefills", type=int, default=2, help="prompts of a block")
    add("--tokens", type=int, default=24, help="that generate makes in a block")
    add("--batches", type=int, default=12, help="of a stream of requests")
    add("--registered", type=int, nargs="+", default=[5, 100, 1000, 2000], help="adapters of stage many")
    add("--requests", type=int, default=640, help="of stage many, for each number of adapters")
    add("--load", type=float, default=1.2, help="arrivals of stage many over what it can serve with few adapters")
    add("--cv", type=float, default=1.0, help="variation of the times between arrivals; 1: a Poisson process")
    add("--profile", action="store_true", help="kernels of a step of each side also where a target is met")
    add("--limit", type=float, default=450.0, help="seconds of a stage after which no further cell starts")
    add("--scratch", type=Path, help="folder for adapters' files, where a stage needs some")
    add(
        "--out",
        type=Path,
        default=ROOT / "bench-results" / "gpu-speed.json",
        help="where the results of stages are merged",
    )
    settings = parser.parse_args(argv)
    names = [name for some in settings.stages for name in some.split(",") if name]
    unknown = sorted({*names} - {*stages, "all"})
    if unknown or not names:
        parser.error(f"--stages must be among {['all', *stages]}, got {unknown or settings.stages}")
    settings.stages = list(stages) if "all" in names else list(dict.fromkeys(names))
    settings.small = settings.shape == "tiny"
    MultiLoRAConfig(backend=settings.backend)  # raises before any work where there is none of that name
    return settings
