"""The kernels compile for GPUs, with tiles that fit: in a process of its own, since this one may interpret them."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.tree import ROOT


@pytest.mark.parametrize("target", [90])
def test_kernels_compile(target: int) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernels.compile_all", str(target)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert done.stdout.count("shrink") == 6 and done.stdout.count("own columns") == 18
    counts = {"expand_rows": 10, "expand_wide": 5, "gated_rows": 8, "gated_wide": 4}
    assert {name: done.stdout.count(name) for name in counts} == counts
