"""The example of a sharded base, as its users start it: by torchrun, in two processes, on CPUs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaModel

from tests.tree import ROOT

EXAMPLE = ROOT / "examples" / "tensor_parallel.py"
LAUNCH = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
PART = {"embed_tokens": 1.0, "q_proj": 0.75, "o_proj": 0.75, "down_proj": 2 / 3, "lm_head": 0.6}  # of all its bytes


def run(*arguments: str, folder: Path) -> str:
    """What both processes print; raises where they fail or take more than 240 s."""
    process = subprocess.Popen(
        [*LAUNCH, str(EXAMPLE), *arguments], env=os.environ | ENVIRONMENT, cwd=folder, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        printed, _ = process.communicate(timeout=240)
    except subprocess.TimeoutExpired:
        process.terminate()  # torchrun then ends its processes; killed, it would leave them
        printed, _ = process.communicate()
        raise AssertionError(f"not done within 240 s: {printed[-4000:]}") from None
    assert process.returncode == 0, printed[-4000:]
    return printed


def test_two_processes_answer_as_one_and_hold_less(tmp_path: Path) -> None:
    pytest.importorskip("rich", reason="the example prints with rich: pip install -e '.[demo]'")
    printed = run("--max-new-tokens", "6", folder=tmp_path)
    assert "DIFFER" not in printed, printed
    for mode in ("sharded", "fully_sharded_loras"):  # once: the second process prints nothing
        assert printed.count(f"{mode}: answers of 2 processes EQUAL those of one process\n") == 1, printed
    answers = re.findall(r"│ (\(base\)|attention|mlp|all) +│ (\[[\d, ]+\])", printed)
    assert [name for name, _ in answers] == ["(base)", "attention", "mlp", "all"], printed
    assert len({tokens for _, tokens in answers}) == 4, "rows that answer alike say nothing about their adapters"

    rows = re.findall(r"│ (\w+) +│ ([\d,]+) +│ ([\d,]+) +│ ([\d,]+) +│", printed)
    sizes = {kind: [int(number.replace(",", "")) for number in numbers] for kind, *numbers in rows}
    whole, sharded, fully = sizes.pop("all")
    assert len(sizes) == 9 and whole > sharded > fully >= whole / 2, printed
    assert [sum(column) for column in zip(*sizes.values(), strict=True)] == [whole, sharded, fully]
    for kind, part in PART.items():
        assert sizes[kind][1] == pytest.approx(part * sizes[kind][0]), kind
    with torch.device("meta"):
        plan = LlamaModel(LlamaConfig(num_hidden_layers=1))._tp_plan
    embedding = 0.6 if "embed_tokens" in plan else 1.0  # of an embedding, A alone is in parts, if its plan cuts it
    for kind, (one, _, half) in sizes.items():
        assert half == pytest.approx((embedding if kind == "embed_tokens" else 0.5) * one), kind


def test_one_process_is_told_how_to_start_it(tmp_path: Path) -> None:
    pytest.importorskip("rich", reason="the example prints with rich: pip install -e '.[demo]'")
    alone = {name: text for name, text in os.environ.items() if name != "WORLD_SIZE"} | ENVIRONMENT
    done = subprocess.run(
        [sys.executable, EXAMPLE], env=alone, cwd=tmp_path, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 2 and "torchrun --standalone --nproc-per-node 2" in done.stderr, done.stderr
