"""Two processes of a test, on one machine."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SECONDS = 240.0  # a hang must not become that of the whole run


def environment() -> dict[str, str]:
    own = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TRITON_INTERPRET": "0", "CUDA_VISIBLE_DEVICES": ""}
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return os.environ | own | {"PYTHONPATH": paths}


def torchrun(scenario: str, folder: Path) -> list[dict[str, Any]]:
    """What both processes found, started as users start them."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "tests.parallel.worker", scenario, str(folder)]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=environment(),
        timeout=SECONDS,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def first_of_two(scenario: str, folder: Path) -> dict[str, Any]:
    """What process 0 found, whatever became of the other: torchrun would end it too."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    shared = environment() | {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    command = [sys.executable, "-m", "tests.parallel.worker", scenario, str(folder)]
    both = [
        subprocess.Popen(
            command, cwd=ROOT, env=shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        said, _ = both[0].communicate(timeout=SECONDS)
    finally:
        for process in both:
            process.kill()
    assert (folder / "0.json").is_file(), said[-6000:]
    return json.loads((folder / "0.json").read_text())  # type: ignore[no-any-return]
