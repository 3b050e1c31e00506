"""The benchmark of several devices on tiny bases: it fills its table, and times nothing that is wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from .bases import RECENT
from .processes import ROOT, SECONDS, environment

TINY = "--layers 2 --device cpu --dtype float32 --rows 4 --tokens 5 --distinct 2 --ranks 4 --steps 2".split()


@pytest.mark.parametrize(
    ("shape", "size", "modes"),
    [
        ("tiny", 2, ("parts", "fully")),
        ("tiny", 1, ("parts",)),
        pytest.param(
            "tiny-experts", 2, ("parts",), marks=pytest.mark.skipif(not RECENT, reason="ep_size: Transformers 5.20")
        ),
    ],
)
def test_benchmark(shape: str, size: int, modes: tuple[str, ...], tmp_path: Path) -> None:
    out, start = tmp_path / "found.json", ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size)]
    command = [sys.executable, *start, "-m", "tests.benchmarks.parallel", *TINY, "--shape", shape, "--out", str(out)]
    done = subprocess.run(
        command, cwd=ROOT, env=environment(), timeout=SECONDS, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-5000:]
    ((title, found),) = json.loads(out.read_text()).items()
    assert title == f"{shape}, 2 layers, {size} processes"
    wanted = {f"rank 4, 2 adapters, {mode}, {phase}" for mode in modes for phase in ("decode", "prefill")}
    assert set(found["cells"]) == wanted and all(name in done.stdout for name in wanted)
    for cell in found["cells"].values():
        assert cell["value"] > 0 and cell["checks"]["error"] <= cell["checks"]["bound"] and cell["bytes"] > 0
