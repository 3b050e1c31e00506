"""Linears whose adapters have one A for all of them, on a CUDA device: kernels in bfloat16, layers, graphs."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.gpu.exact import exact  # noqa: F401 (a fixture for every test here)
from tests.kernels import test_gated as gated
from tests.kernels.suite import case, with_one_a
from tests.layers.shared_a import is_one, share
from tests.layers.trio import LINEARS, Trio, bare, setting
from tests.tiny import Family, Names, ids

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
K, WIDTHS = 1024, (2048, 1024, 1024)
TOLERANCE = 1e-2  # of bfloat16
ADAPTERS: dict[str, dict[str, Any]] = {
    "a": {"r": 16, "targets": LINEARS},
    "like a": {"r": 16, "targets": LINEARS},
    "wide": {"r": 40, "targets": LINEARS},
    "own": {"r": 16, "targets": LINEARS},
}
MIXES: list[Names] = [["a", None, "wide", "a"], ["wide", "like a", None, "a"], ["a"] * 4, [None] * 4]


@pytest.mark.parametrize(("dtype", "r"), [(torch.bfloat16, 16), (torch.bfloat16, 40), (torch.float32, 13)])
@pytest.mark.parametrize(("rows", "tokens"), [(6, 1), (6, 11)])
def test_gated_kernels(dtype: torch.dtype, r: int, rows: int, tokens: int) -> None:
    for width in (33, 256):
        c = with_one_a(case(dtype, r, tokens, rows=rows, widths=(width, width), device="cuda"))
        for piece, act in ((0, "silu"), (1, "gelu_tanh")):
            gated.check(c, gated.laid(c, piece, act, 1), piece, act)
            gated.check(c, gated.after_shrink(c, piece, act, 1), piece, act)


def made(folder: Path, way: str) -> Trio:
    family = Family(bare(inputs=(K,) * 3, widths=WIDTHS).to("cuda", torch.bfloat16), folder, ADAPTERS)
    for name in ("a", "like a", "wide"):
        share(family.paths[name])
    trio = Trio(family, way, max_loras=4, max_lora_rank=40)
    trio.lay(MIXES[0])
    assert is_one(trio) and is_one(trio, "second")
    return trio


def compare(trio: Trio, got: Tensor, x: Tensor, names: Names) -> None:
    parts = [(child, parent) for parent in ("first", "second") for child in "qkv"]
    for out, (child, parent) in zip(got.split(WIDTHS * 2, -1), parts, strict=True):
        trio.check(out, child, x, names, parent, tolerance=TOLERANCE)


@pytest.mark.parametrize("way", ["rows", "tiles", "grouped"])
@torch.no_grad()
def test_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    setting(monkeypatch, way)
    trio = made(tmp_path, way)
    for names in (*MIXES, ["own", "a", None, "wide"], *MIXES):
        for tokens in (1, 16, 300):
            inputs = ids(4, tokens).cuda()
            got = trio.model(input_ids=inputs, adapter_names=list(names)).logits
            compare(trio, got, trio.model.embed(inputs), names)
    assert not is_one(trio)


def capture(trio: Trio, inputs: Tensor, names: Names) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    with trio.open(names):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                trio.model(input_ids=inputs)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = trio.model(input_ids=inputs).logits
    return graph, captured


@pytest.mark.parametrize("way", ["rows", "grouped"])
@torch.no_grad()
def test_graphs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, way: str) -> None:
    """One serves every mix of adapters with one A; where another comes it is told, and a new one serves all."""
    setting(monkeypatch, way)
    trio, inputs, told = made(tmp_path, way), ids(4, 1).cuda(), "capture it again"
    x, mixes = trio.model.embed(inputs), list(MIXES)
    graph, captured = capture(trio, inputs, mixes[0])
    with caplog.at_level(logging.WARNING, logger="hf_multilora.residency"):
        for round_ in range(2):
            for names in mixes:
                captured.fill_(torch.nan)
                with trio.open(names):
                    graph.replay()
                    got = captured.clone()
                compare(trio, got, x, names)
            assert caplog.text.count(told) == round_ and is_one(trio) == (not round_)
            mixes.append(["own", "like a", None, "a"])
            if not round_:
                trio.lay(mixes[-1])
                graph, captured = capture(trio, inputs, mixes[-1])
