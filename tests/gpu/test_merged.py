"""Linears in one buffer on a CUDA device: layers of real shapes in bfloat16, graphs, launches that are kept."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.gpu.exact import exact  # noqa: F401 (a fixture for every test here)
from tests.kernels.suite import EXPANDS, case, with_one_a
from tests.kernels.suite import MIXES as KINDS
from tests.kernels.test_laid import (
    after_shrink,
    after_shrink_with_one_a,
    check,
    even,
    laid,
    laid_with_one_a,
    outputs,
    own_columns,
    whole,
)
from tests.layers.trio import LINEARS, NAMES, Trio, bare, setting, x_of
from tests.tiny import Family, Names, ids

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-4}
SHAPES = {  # in, and the outputs of three that one input feeds
    "8B q, k, v": (4096, (4096, 1024, 1024)),
    "0.6B q, k, v": (1024, (2048, 1024, 1024)),
    "0.6B gate, up, and a narrow one": (1024, (3072, 3072, 8)),
    "odd": (257, (130, 51, 7)),
}
RANKS: dict[str, dict[str, Any]] = {
    "a": {"r": {"q_proj": 16, "k_proj": 8, "v_proj": 5}, "targets": LINEARS},
    "b": {"r": 16, "targets": ("q_proj", "v_proj")},
    "k": {"r": 2, "targets": ("k_proj",)},
    "wide": {"r": {"q_proj": 3, "k_proj": 40, "v_proj": 16}, "targets": LINEARS},
    "like a": {"r": {"q_proj": 16, "k_proj": 8, "v_proj": 5}, "targets": LINEARS},
}
MIXES: list[Names] = [NAMES, ["wide", "a", None, "b"], ["b", None, "b", "b"], [None] * 4, ["a"] * 4, ["wide"] * 4]


def made(folder: Path, shape: str, dtype: torch.dtype, *names: str, way: str = "rows", **settings: Any) -> Trio:
    k, widths = SHAPES[shape]
    base = bare(inputs=(k,) * 3, widths=widths, biases=(True, False, False)).to("cuda", dtype)
    trio = Trio(Family(base, folder, RANKS), way, *(names or ("a", "b", "k", "wide")), **({"max_loras": 4} | settings))
    trio.lay(["a", "b", "k", "wide"])
    assert trio.together() == ["qkv"]
    return trio


def given(trio: Trio, rows: int, tokens: int) -> Tensor:
    weight = trio.module("q").weight
    return x_of(rows, tokens, weight.shape[1]).to("cuda", weight.dtype)


def ask(trio: Trio, x: Tensor, names: Names) -> dict[str, Tensor]:
    """The outputs, checked in the tolerance of their dtype."""
    outs = {child: trio.module(child)(x) for child in "qkv"}
    for child, out in outs.items():
        trio.check(out, child, x, names, tolerance=TOLERANCE[x.dtype])
    return outs


# -- kernels ----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("dtype", "r"),
    [(torch.bfloat16, 1), (torch.bfloat16, 16), (torch.bfloat16, 40), (torch.float16, 8), (torch.float32, 13)],
)
@pytest.mark.parametrize(("rows", "tokens"), [(1, 1), (6, 1), (64, 1), (6, 11), (4, 300)])
def test_kernels(dtype: torch.dtype, r: int, rows: int, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from hf_multilora.kernels import triton_laid

    for how in EXPANDS.values():
        c = case(dtype, r, tokens, rows=rows, widths=(256, 64, 64), device="cuda")
        with monkeypatch.context() as patch:
            for name, value in how.items():
                patch.setattr(triton_laid, name, value)
            check(c, laid)
            check(c, after_shrink)
    for mix in KINDS:
        for widths in ((51,), (256, 64, 64), (16, 130, 7, 20)):
            c = case(dtype, r, tokens, mix, rows=rows, widths=widths, device="cuda")
            check(c, laid)
            check(c, after_shrink)
            if len(widths) > 1:
                c = with_one_a(c)
                check(c, laid_with_one_a)
                check(c, after_shrink_with_one_a)


@pytest.mark.parametrize("tokens", [1, 70])
def test_launches_that_are_kept(tokens: int) -> None:
    """Of several dtypes, with aligned and unaligned tensors, on another stream: the same answers each time."""
    from hf_multilora.kernels.backends import TRITON, backend

    kernel = backend(TRITON).expand_laid
    assert kernel is not None
    for dtype in (*DTYPES, *DTYPES):
        c = case(dtype, tokens=tokens, rows=8, widths=(128, 32, 16), device="cuda")
        y, h = own_columns(c)
        both = torch.cat((y, h[0]), 2).flatten(0, 1)
        tables = torch.tensor(c.rows, dtype=torch.int32, device="cuda"), *c.tables(), c.extras()["slices"]
        run = kernel(both, 8, c.b, *tables, y.shape[2], c.max_rank, even(c), 3)
        check(c, laid)
        want = laid(c)
        for odd in (False, True, False):
            some, outs = both, outputs(c)
            if odd:  # one number off, so not on a multiple of 16 bytes
                some = torch.cat((both.new_zeros(1), both.flatten()))[1:].view(both.shape)
                outs = [torch.empty(out.numel() + 1, dtype=dtype, device="cuda")[1:].view(out.shape) for out in outs]
            assert bool(some.data_ptr() % 16) == odd
            run(some, outs)
            for got, own in zip(outs, want, strict=True):
                torch.testing.assert_close(got, own, rtol=2e-2, atol=1e-2)
        stream, outs = torch.cuda.Stream(), outputs(c)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.cuda._sleep(10_000_000)
            late = both.clone()
            run(late, outs)
        torch.cuda.current_stream().wait_stream(stream)
        assert torch.equal(whole(c, outs), whole(c, want)), "it must run after what is before it on its own stream"


# -- layers -----------------------------------------------------------------------------------------
@pytest.mark.parametrize("way", ["rows", "tiles", "grouped"])
@pytest.mark.parametrize("shape", SHAPES)
@torch.no_grad()
def test_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: str, way: str) -> None:
    setting(monkeypatch, way)
    for dtype in DTYPES if shape == "odd" else DTYPES[:1]:
        trio = made(tmp_path / str(dtype), shape, dtype, way=way)
        for tokens in (1, 16, 300):
            x = given(trio, 4, tokens)
            for names in MIXES:
                with trio.open(names), trio.counted() as runs:
                    ask(trio, x, names)
                assert len(runs) == (names != [None] * 4), "one run for all three"


@pytest.mark.parametrize("tokens", [1, 16, 300])
@torch.no_grad()
def test_one_adapter_for_all_equals_rows_that_have_it_each(tmp_path: Path, tokens: int) -> None:
    trio, names = made(tmp_path, "0.6B q, k, v", torch.bfloat16), ["a"] * 4
    x = given(trio, 4, tokens)
    with trio.open(names):
        one = ask(trio, x, names)
        assert trio.routing.uniform is not None
        trio.routing.uniform, trio.routing.stamp = None, trio.routing.stamp + 1  # as if rows differed
        each = ask(trio, x, names)
    for child in "qkv":
        if 4 * tokens <= 64:
            assert torch.equal(one[child], each[child])
        torch.testing.assert_close(one[child], each[child], rtol=2e-2, atol=1e-2 * float(one[child].abs().max()))


@torch.no_grad()
def test_another_stream_and_other_dtypes(tmp_path: Path) -> None:
    trio = made(tmp_path, "0.6B q, k, v", torch.bfloat16)
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.bfloat16):
        trio.model.to(dtype)
        for names in (NAMES, [None, "b", "a", "wide"]):
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream), trio.open(names):
                x = given(trio, 4, 1)
                torch.cuda._sleep(10_000_000)
                ask(trio, x, names)
                ask(trio, x + 1, names)
            torch.cuda.current_stream().wait_stream(stream)
            with trio.open(names):
                ask(trio, x, names)
    x = given(trio, 4, 1)
    with trio.open(), torch.autocast("cuda", torch.float16):
        ask(trio, x, NAMES)
        assert trio.module("q")(x).dtype == torch.float16
    with trio.open():
        assert ask(trio, x, NAMES)["q"].dtype == torch.bfloat16


def test_gradients_of_the_input(tmp_path: Path) -> None:
    trio = made(tmp_path, "odd", torch.float32)
    for names in MIXES:
        x = given(trio, 4, 2).requires_grad_()
        with trio.open(names):
            loss = sum(out.square().sum() for out in ask(trio, x, names).values())
            loss.backward()  # type: ignore[union-attr]
        plain = x.detach().double().requires_grad_()
        outs = []
        for row, name in enumerate(names):
            for child in "qkv":
                weight = trio.module(child).weight.detach().double()
                key = f"base_model.model.first.{child}_proj.lora_"
                if name is not None and f"{key}A.weight" in trio.factors[name]:
                    a, b = (trio.factors[name][f"{key}{half}.weight"].cuda().double() for half in "AB")
                    weight = weight + 2 * b @ a
                bias = trio.module(child).bias
                outs.append(torch.nn.functional.linear(plain[row], weight, None if bias is None else bias.double()))
        sum(out.square().sum() for out in outs).backward()  # type: ignore[union-attr]
        assert x.grad is not None and plain.grad is not None
        bound = 1e-4 * float(plain.grad.abs().max())
        assert float((x.grad.double() - plain.grad).abs().max()) < bound
        assert len(set(names)) == 1 or float((x.grad.double().roll(1, 0) - plain.grad).abs().max()) > 20 * bound


# -- graphs -----------------------------------------------------------------------------------------
def addresses(trio: Trio) -> list[int]:
    """Of all that a captured step reads."""
    found: list[int] = []
    for parent in ("first", "second"):
        merged = trio.merged("q", parent)
        tensors = (merged.buffer, merged.used[0], merged.b, merged.slices, merged.joint.tables)
        found += [tensor.data_ptr() for tensor in tensors] + [id(merged), id(merged.joint), len(merged.used[0])]
    return found


@pytest.mark.parametrize("way", ["rows", "tiles", "grouped"])
@pytest.mark.parametrize("tokens", [1, 20])
@torch.no_grad()
def test_a_captured_graph_serves_every_mix_and_what_is_loaded_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tokens: int, way: str
) -> None:
    """Tables, slots and rank rows are rewritten in place: other rows, all base, one adapter, another in a slot."""
    setting(monkeypatch, way)
    trio = made(tmp_path, "0.6B q, k, v", torch.bfloat16, *RANKS, way=way, max_lora_rank=40)
    inputs = ids(4, tokens).cuda()
    with trio.open():
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                trio.model(input_ids=inputs)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with trio.counted() as runs, torch.cuda.graph(graph):
            captured = trio.model(input_ids=inputs).logits
        assert len(runs) == 2, "both parents' linears are computed together in the graph"
    before, x, widths = addresses(trio), trio.model.embed(inputs), SHAPES["0.6B q, k, v"][1]
    loads = trio.model._multilora.store.loads
    later: list[Names] = [["like a", None, "b", "wide"], ["b", "like a", None, "like a"], NAMES, [None] * 4]
    with caplog.at_level(logging.WARNING, logger="hf_multilora.residency"):
        for names in (*MIXES, *later):
            captured.fill_(torch.nan)
            with trio.open(names):
                graph.replay()
                got = captured.clone()
            parts = [(child, parent) for parent in ("first", "second") for child in "qkv"]
            for out, (child, parent) in zip(got.split(widths * 2, -1), parts, strict=True):
                trio.check(out, child, x, names, parent, tolerance=TOLERANCE[torch.bfloat16])
    assert trio.model._multilora.store.loads > loads, "an adapter came into a slot after the capture"
    assert addresses(trio) == before and "captured" not in caplog.text
    assert trio.routing.shared is None
