"""Stage sanitize: calls of the kernels under compute-sanitizer where the machine has it, and between guards of NaN."""

from __future__ import annotations

import argparse
import os
import shutil
import site
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from ..gate import GateError
from ..run import ROOT
from . import kernel_calls
from .stage import Stage

# The dtypes of its models for each tool. A bfloat16 matmul of cuBLAS breaks compute-sanitizer 2025.3's racecheck off,
# before any kernel of ours runs; ours of 16 bits it sees in calls of their own.
TOOLS = {"memcheck": ("float32", "bfloat16"), "racecheck": ("float32",)}
FOUND = 86  # the exit status of the tool where it found something
KERNELS = ("lora_", "scatter_kernel")  # parts of the names of ours: others are not watched
SECONDS = 200.0  # for one tool
POISONED = "poisoned"
PLACES = ("/usr/local/cuda/bin", "/usr/local/cuda/compute-sanitizer", "/opt/cuda/bin")


def cells(settings: argparse.Namespace) -> list[str]:
    return [POISONED, *TOOLS]


def program() -> str | None:
    """Where compute-sanitizer is: on the path, beside CUDA, or in a package of Python."""
    found = shutil.which("compute-sanitizer", path=os.pathsep.join([os.environ.get("PATH", ""), *PLACES]))
    if found is not None:
        return found
    folders = [Path(folder) / "nvidia" for folder in [*site.getsitepackages(), site.getusersitepackages()]]
    return next((str(path) for folder in folders for path in folder.glob("**/compute-sanitizer")), None)


def run(stage: Stage) -> None:
    wanted, where = stage.wanted(cells(stage.settings)), program() if stage.cuda else None
    if POISONED in wanted:
        with stage.cell(POISONED) as found:
            backend = stage.shop.settings.backend
            try:
                count = kernel_calls.run(stage.shop, (torch.float32, torch.bfloat16), guarded=True)
            finally:
                stage.shop.settings.backend = backend
            found["note"] = (
                f"{count} calls on {stage.device}, inputs and outputs between NaN: right, nothing beside them"
            )
    for tool in TOOLS:
        if tool in wanted and stage.in_time(tool):
            with stage.cell(tool) as found:
                if where is None:
                    missing = "compute-sanitizer is not on this machine" if stage.cuda else "it needs a CUDA device"
                    found["skipped"] = f"{missing}; {POISONED} stands in for it"
                else:
                    watched(where, tool, found)


def watched(where: str, tool: str, found: dict[str, Any]) -> None:
    """The calls in a process of their own under the tool. Raises GateError where it found something or an answer was
    wrong; says so where the tool does not run here."""
    command = [where, "--tool", tool, "--error-exitcode", str(FOUND), "--show-backtrace", "no"]
    for name in KERNELS:
        command += ["--kernel-name", f"kns={name}"]
    command += [sys.executable, "-m", kernel_calls.__name__, "--models", *TOOLS[tool]]
    # every tensor has an allocation of its own, so that its end is known to the tool
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=SECONDS,
        )
    except subprocess.TimeoutExpired:
        found["skipped"] = f"{tool} did not end within {SECONDS:.0f} s"
        return
    lines, tail = done.stdout.splitlines(), done.stdout[-3000:]
    report, summary = [line for line in lines if line.startswith("====")], [line for line in lines if "SUMMARY" in line]
    found |= {"status": done.returncode, "summary": summary[-1:], "report": report[:40], "tail": tail}
    if done.returncode == FOUND:
        raise GateError("\n".join([f"{tool} found errors:", *report[:20], *summary[-1:]]))
    if done.returncode == 0 and kernel_calls.DONE in done.stdout:
        found["note"] = f"clean under compute-sanitizer --tool {tool}"
        return
    if "AssertionError" in done.stdout or "GateError" in done.stdout:
        raise GateError(f"under {tool} an answer was wrong:\n{tail}")
    found["skipped"] = f"{tool} does not run here (status {done.returncode}): {tail.strip().splitlines()[-1:]}"
