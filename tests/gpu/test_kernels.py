"""The kernels on a CUDA device: the suite of tests/kernels in full, addresses beyond 32 bits, captured graphs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from hf_multilora.kernels import ops
from hf_multilora.kernels.backends import TORCH, TRITON, TRITON_FIXED, backend
from tests.gpu.exact import exact  # noqa: F401 (a fixture for every test here)
from tests.kernels import properties
from tests.kernels.suite import BASE, MIXES, SHAPES, Case, by_rows, case, own_columns, run, within

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
NAMES = (TORCH, TRITON, TRITON_FIXED)
KERNELS = (TRITON, TRITON_FIXED)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LARGER: dict[str, dict[str, Any]] = {  # what differs from case()'s defaults
    "whole tiles": {"k": 512, "widths": (768,), "r": 16},
    "eight slots": {"slots": 8, "rows": 40, "tokens": 1, "k": 256, "widths": (256,)},
    "64 slots, many rows": {"slots": 64, "rows": 70, "tokens": 1, "r": 16, "k": 200, "widths": (136,)},
    "64 slots, long": {"slots": 64, "rows": 70, "tokens": 40, "r": 16, "k": 200, "widths": (136,)},
    "100 slots, one used": {"slots": 100, "rows": 9, "tokens": 1, "mix": "one"},
    "bound of 128": {"bound": 128},
    "strided, whole tiles": {"strided": True, "k": 64, "widths": (64,)},
    "strided, long": {"strided": True, "tokens": 300},
    "one slice wide": {"widths": (1000, 1), "tokens": 30},
    "three whole slices": {"widths": (256, 64, 64), "r": 13, "k": 256},
    "three odd slices": {"widths": (16, 130, 7), "r": 70, "epilogue": True, "strided": True, "tokens": 300},
}


def on_gpu(*args: Any, **kwargs: Any) -> Case:
    return case(*args, device="cuda", **kwargs)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("tokens", [1, 7, 300])
@pytest.mark.parametrize("r", [1, 8, 13, 64, 128])
@pytest.mark.parametrize("dtype", DTYPES)
def test_equals_a_loop_over_rows(dtype: torch.dtype, r: int, tokens: int, name: str) -> None:
    for mix in MIXES:
        properties.check_numbers(on_gpu(dtype, r, tokens, mix), name)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", SHAPES | LARGER)
@pytest.mark.parametrize("dtype", DTYPES)
def test_shapes(dtype: torch.dtype, shape: str, name: str) -> None:
    properties.check_numbers(on_gpu(dtype, **(SHAPES | LARGER)[shape]), name)


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("split", [2, 3, 16])
@pytest.mark.parametrize("dtype", DTYPES)
def test_split(dtype: torch.dtype, split: int, name: str) -> None:
    """16 ranges are more than K has blocks: the last ones hold zeros."""
    for k, widths in ((300, (20, 31)), (2048, (64,))):
        properties.check_numbers(on_gpu(dtype, k=k, widths=widths), name, split, own=False)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("rows", "tokens"), [(8, 1), (64, 1), (4, 200)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_split_that_a_layer_gets(dtype: torch.dtype, rows: int, tokens: int, name: str) -> None:
    """The shapes of an 8B model's layers."""
    for k, n in ((4096, 1024), (4096, 4096), (14336, 4096)):
        properties.check_chosen_split(on_gpu(dtype, 16, tokens, rows=rows, slots=8, k=k, widths=(n,)), name)


@pytest.mark.parametrize("name", NAMES)
def test_factors_of_another_dtype(name: str) -> None:
    for half in DTYPES[1:]:
        properties.check_numbers(on_gpu(tokens=2).to(y=half), name)
        properties.check_numbers(on_gpu(tokens=2).to(x=half, a=half, b=half), name, own=False)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_unspecified_does_not_matter(dtype: torch.dtype, name: str) -> None:
    for mix in MIXES:
        properties.check_unspecified(on_gpu(dtype, mix=mix, slots=7, rows=5), name)
        properties.check_unspecified(on_gpu(dtype, tokens=300, mix=mix, slots=7, k=128, widths=(128,)), name)
    sliced = on_gpu(dtype, mix="skewed", slots=7, widths=(9, 70, 16), epilogue=True)
    properties.check_unspecified(sliced, name)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_run_again(dtype: torch.dtype, name: str) -> None:
    properties.check_twice(on_gpu(dtype, epilogue=True), name)
    properties.check_twice(on_gpu(dtype, tokens=300, k=4096, widths=(512, 64)), name, 1 if name == TORCH else 4)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_slots_change_tenants(dtype: torch.dtype, name: str) -> None:
    properties.check_reuse(on_gpu(dtype), name)
    properties.check_reuse(on_gpu(dtype, widths=(40, 9)), name)


@pytest.mark.parametrize("dtype", DTYPES)
def test_fixed_answers_do_not_depend_on_the_batch(dtype: torch.dtype) -> None:
    for k, widths, rows, tokens in ((4096, (512,), 9, 1), (2100, (30, 140), 9, 7), (1024, (51,), 40, 30)):
        properties.check_fixed(on_gpu(dtype, tokens=tokens, rows=rows, k=k, widths=widths))
    properties.check_fixed(on_gpu(dtype, 64, 130, mix="skewed", epilogue=True))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "tokens", "k"), [(0, 3, 37), (1, 0, 37), (2, 0, 37), (2, 3, 0)])
def test_nothing_to_do(rows: int, tokens: int, k: int, dtype: torch.dtype, name: str) -> None:
    c = on_gpu(dtype, rows=rows, tokens=tokens, k=k)
    h, out = run(c, name)
    assert torch.equal(out, c.y) and h.shape == (rows, tokens, c.max_rank) and not h.nan_to_num(0).any()


@pytest.mark.parametrize("name", NAMES)
def test_gradients_and_a_traced_call(name: str) -> None:
    shrink, expand = torch.ops.hf_multilora.lora_shrink, torch.ops.hf_multilora.lora_expand

    def both(x: torch.Tensor, y: torch.Tensor, tables: tuple[torch.Tensor, ...]) -> torch.Tensor:
        h = shrink(x, c.a, *tables, c.max_rank, 1, name)
        return expand(y, h, c.b, *tables, None, None, None, False, name)

    c = on_gpu()
    x, y = c.x.double().requires_grad_(), c.y.double().requires_grad_()
    weight = torch.randn(c.y.shape, device="cuda")
    (by_rows(replace(c, x=x, y=y), torch.float64)[1] * weight).sum().backward()
    c.x.requires_grad_(), c.y.requires_grad_()
    (both(c.x, c.y, c.tables()) * weight).sum().backward()
    for got, want in ((c.x.grad, x.grad), (c.y.grad, y.grad)):
        assert got is not None and want is not None
        torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(c.x.grad.roll(1, 0).double(), x.grad, rtol=1e-2, atol=1e-2)
    with torch.no_grad():
        traced = torch.compile(both, fullgraph=True)(c.x.detach(), c.y.detach(), c.tables())
    assert torch.equal(traced, run(replace(c, x=c.x.detach(), y=c.y.detach()), name)[1])


# -- addresses beyond 32 bits ----------------------------------------------------------------------
WIDE, LONG = 262_144, 9_000  # 2^31 elements end within the sorted token 8,192
BEYOND = {
    "one row": (1, LONG, [2]),
    "adapter last": (9, 1_000, [4, 0, BASE, 3, 1, 2, BASE, 0, 1]),
    "base last": (9, 1_000, [4, 0, BASE, 3, 1, 2, 0, 1, BASE]),
}


@pytest.fixture
def much_memory() -> None:
    if torch.cuda.mem_get_info()[0] < 40 * 2**30:
        pytest.skip("needs 40 GiB of free GPU memory")


def beyond(which: str, **widths: Any) -> Case:
    rows, tokens, slots = BEYOND[which]
    return replace(on_gpu(torch.bfloat16, 16, tokens, rows=rows, **widths), rows=slots)


def sampled(c: Case) -> tuple[Case, list[int]]:
    """The case of a few tokens of each row, among them the last and those around 2^31 elements."""
    tokens = c.x.shape[1]
    wanted = {0, 1, tokens // 2, 191, 192, 193, 8_191, 8_192, 8_193, tokens - 2, tokens - 1}
    some = sorted(t for t in wanted if t < tokens)
    return replace(c, x=c.x[:, some], y=c.y[:, some]), some


def check_beyond(c: Case, outs: tuple[torch.Tensor, ...], which: int) -> None:
    """outs: h (which = 0) or the output (1) of all tokens."""
    few, some = sampled(c)
    truth, plain = (by_rows(few, dtype)[which] for dtype in (torch.float64, torch.bfloat16))
    wrong, wrong_plain = (
        by_rows(few, dtype, properties.others(few))[which] for dtype in (torch.float64, torch.bfloat16)
    )
    if which == 0:  # only where h is specified for either
        wrong = wrong.masked_fill(truth.isnan(), torch.nan)
    for out in outs:
        assert within(out[:, some], truth, plain)
        assert not within(out[:, some], wrong, wrong_plain)
        for row, slot in enumerate(c.rows if which else ()):
            assert not out[row].isnan().any(), "every token must be written"
            assert slot != BASE or torch.equal(out[row], c.y[row])


@pytest.mark.usefixtures("much_memory")
@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("which", BEYOND)
def test_expand_beyond_32_bits(which: str, name: str) -> None:
    c = beyond(which, k=64, widths=(WIDE,))
    check_beyond(c, (run(c, name)[1],), 1)
    y, h = own_columns(c)
    c = replace(c, y=y)
    out = ops.lora_expand(y, h, c.b, *c.tables(), own_columns=True, backend=name)
    check_beyond(c, (out,), 1)


@pytest.mark.usefixtures("much_memory")
@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("which", BEYOND)
def test_shrink_beyond_32_bits(which: str, name: str) -> None:
    c = beyond(which, k=WIDE, widths=(64,))
    chosen = backend(name).shrink(c.x, c.a, *c.tables(), c.max_rank).sum(0)
    check_beyond(c, (chosen, *(run(c, name, split=split)[0] for split in (1, 16))), 0)


@pytest.mark.usefixtures("much_memory")
@pytest.mark.parametrize("name", KERNELS)
def test_rank_rows_beyond_32_bits(name: str) -> None:
    """A pool of 9,000 rank rows of 262,144 elements, with the rows of all slots at its end; NaN before."""
    for k, n in ((WIDE, 64), (64, WIDE)):
        c = on_gpu(torch.bfloat16, 16, 2, k=k, widths=(n,))
        shift = LONG - len(c.a)
        a, b = (torch.full((LONG, t.shape[1]), torch.nan, dtype=t.dtype, device="cuda") for t in (c.a, c.b))
        a[shift:], b[shift:] = c.a, c.b
        far = replace(c, a=a, b=b, starts=[[start + shift for start in c.starts[0]]])
        assert min(far.starts[0]) * WIDE > 2**31
        properties.check_numbers(far, name, own=False)


@pytest.mark.usefixtures("much_memory")
@pytest.mark.parametrize("name", KERNELS)
def test_planes_beyond_32_bits(name: str) -> None:
    c = on_gpu(r=16, widths=(64,))
    planes = torch.randn(3, *c.x.shape[:2], c.max_rank, device="cuda")
    step = 1_200_000_000  # elements: the last plane begins beyond 2^31
    memory = torch.empty(2 * step + planes[0].numel(), device="cuda")
    far = memory.as_strided(planes.shape, (step, *planes.stride()[1:]))
    far.copy_(planes)
    outs = [ops.lora_expand(c.y, h, c.b, *c.tables(), backend=name) for h in (planes, far, far.flip(1))]
    assert torch.equal(outs[1], outs[0]) and not torch.equal(outs[2], outs[0])


# -- graphs ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("own", [False, True], ids=["grouped", "own columns"])
@pytest.mark.parametrize("tokens", [1, 40])
def test_a_captured_graph_serves_every_mix(tokens: int, own: bool, name: str) -> None:
    """Tables, factors and data are rewritten in place; the grid of the capture must cover any mix."""
    c = on_gpu(torch.bfloat16, 16, tokens, "all base", rows=12, slots=8, k=512, widths=(384,))
    kernels, tables = backend(name), c.tables()
    y, h = own_columns(c)
    x = c.x.clone()

    def step() -> torch.Tensor:
        if own:
            return kernels.expand(y, h, c.b, *tables, own_columns=True)
        return kernels.expand(y, kernels.shrink(x, c.a, *tables, c.max_rank), c.b, *tables)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    seen = []
    for turn, mix in enumerate(("all distinct", "skewed", "all base", "one", "all distinct")):
        now = on_gpu(torch.bfloat16, 16, tokens, mix, rows=12, slots=8, k=512, widths=(384,))
        if mix == "one":  # slots move to other rank rows
            now = replace(now, starts=[now.starts[0][::-1]], ranks=[now.ranks[0][::-1]])
        now = replace(now, a=c.a, b=c.b)
        if turn >= 3:
            c.a.copy_(torch.randn_like(c.a) / 4), c.b.copy_(torch.randn_like(c.b) / 4)
        for old, new in zip(tables, now.tables(), strict=True):
            old.copy_(new)
        x.copy_(now.x)
        both = own_columns(now)
        y.copy_(both[0]), h.copy_(both[1])
        out.fill_(torch.nan)
        graph.replay()
        seen.append(out.clone())
        truth, plain = by_rows(now, torch.float64)[1], by_rows(now, torch.bfloat16)[1]
        assert within(out, truth, plain), mix
        wrong, plain = (by_rows(now, dtype, properties.others(now))[1] for dtype in (torch.float64, torch.bfloat16))
        assert not within(out, wrong, plain), mix
        for row, slot in enumerate(now.rows):
            assert slot != BASE or torch.equal(out[row], now.y[row])
    assert not torch.equal(seen[0], seen[1])
