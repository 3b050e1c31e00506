"""The operations for experts' LoRA on a CUDA device: the suite of tests/kernels, real sizes, far addresses, graphs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_multilora.kernels import ops_experts as ops
from hf_multilora.kernels import torch_experts
from hf_multilora.kernels.backends import TORCH, TRITON, TRITON_FIXED, backend
from tests.gpu.exact import exact  # noqa: F401 (a fixture for every test here)
from tests.kernels import experts_properties as properties
from tests.kernels.experts_suite import ORDERS, SHAPES, Case, by_pairs, case, rotated, run, specified
from tests.kernels.suite import within

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
NAMES = (TORCH, TRITON, TRITON_FIXED)
KERNELS = (TRITON, TRITON_FIXED)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LARGER: dict[str, dict[str, Any]] = {
    "a layer of a small model": {"k": 512, "columns": 768, "ranks": (16, 8, 0), "n": 300, "m": 75, "groups": 72},
    "odd sizes": {"k": 333, "columns": 517, "ranks": (33, 64, 0, 1), "n": 150, "groups": 20},
    "many rank blocks": {"k": 256, "columns": 320, "ranks": (256, 0, 70, 130), "n": 100, "groups": 9},
    "biases": {"k": 1, "columns": 512, "ranks": (16, 1), "n": 100},
    "narrow results": {"k": 512, "columns": 8, "ranks": (16, 1), "n": 100},
}


@pytest.fixture(params=["few", "many"])
def amount(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What Triton takes the pairs of any case for."""
    triton_experts = pytest.importorskip("hf_multilora.kernels.triton_experts")
    monkeypatch.setattr(triton_experts, "amount", lambda n, groups: request.param)
    return str(request.param)


def on_gpu(*args: Any, **kwargs: Any) -> Case:
    return case(*args, device="cuda", **kwargs)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_equals_a_loop_over_pairs(dtype: torch.dtype, order: str, name: str, amount: str) -> None:
    properties.check_numbers(on_gpu(dtype, order), name)


@pytest.mark.parametrize("shape", SHAPES | LARGER)
@pytest.mark.parametrize("dtype", DTYPES)
def test_shapes(dtype: torch.dtype, shape: str, amount: str) -> None:
    for name in KERNELS:
        for order in ("sorted", "shuffled"):
            properties.check_numbers(on_gpu(dtype, order, **(SHAPES | LARGER)[shape]), name)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_unread_does_not_matter(dtype: torch.dtype, name: str, amount: str) -> None:
    for order in ("sorted", "shuffled"):
        properties.check_unread(on_gpu(dtype, order, m=15), name)
        properties.check_unread(on_gpu(dtype, order, m=40, n=200, k=256, columns=128, ranks=(16, 0)), name)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_source_map_of_h_and_run_again(dtype: torch.dtype, name: str, amount: str) -> None:
    properties.check_source_of_h(on_gpu(dtype), name)
    properties.check_twice(on_gpu(dtype, "shuffled", m=15), name)
    properties.check_twice(on_gpu(dtype, n=3000, m=400, groups=1161, k=512, columns=768, ranks=(16, 8)), name)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_a_pair_gets_does_not_depend_on_the_batch(dtype: torch.dtype) -> None:
    for order in ("sorted", "shuffled"):
        properties.check_fixed(on_gpu(dtype, order, n=500, m=70, k=2048, columns=768, ranks=(16,), groups=200))
        properties.check_fixed(on_gpu(dtype, order, n=100, k=300, ranks=(40, 0, 3, 130)))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_combine(dtype: torch.dtype, name: str) -> None:
    for tokens, choices, width in ((9, 3, 70), (64, 8, 2048), (1, 1, 1), (5, 2, 16), (300, 8, 771)):
        properties.check_combine(dtype, name, tokens=tokens, choices=choices, width=width, device="cuda")
    properties.check_combine(dtype, name, device="cuda", index=torch.int32, out_dtype=torch.float32)
    properties.check_combine(dtype, name, device="cuda", weights_dtype=torch.float32)


# -- the sizes of a layer of Qwen3-30B-A3B ---------------------------------------------------------
SIDES = {"up": (2048, 1536), "down": (768, 2048)}


def layer_case(side: str, tokens: int, dtype: torch.dtype = torch.bfloat16, slots: int = 8) -> Case:
    """128 experts, 8 of each token, adapters of rank 16 in all slots and a base row; up reads through a source map."""
    k, columns = SIDES[side]
    n, groups = 8 * tokens, 128 * (slots + 1)
    c = on_gpu(dtype, n=2, k=k, columns=columns, ranks=(16,), groups=2)
    experts = torch.rand(tokens, 128, device="cuda").topk(8).indices
    rows = torch.arange(tokens, device="cuda") % (slots + 1)
    keys, order = torch.sort((experts * (slots + 1) + rows[:, None]).flatten())
    a, b = (torch.randn(16 * groups, width, device="cuda").to(dtype) / 4 for width in (k, columns))
    x = torch.randn(tokens if side == "up" else n, k, device="cuda").to(dtype)
    y = torch.randn(n, columns, device="cuda").to(dtype)
    begins = [16 * key for key in range(groups)]
    ranks = [0 if key % (slots + 1) == slots else 16 for key in range(groups)]
    source = (order // 8).tolist() if side == "up" else None
    return replace(c, x=x, y=y, a=a, b=b, begins=begins, ranks=ranks, keys=keys.tolist(), source=source, max_rank=16)


def by_torch(c: Case, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """h and y by the torch backend, whose own numbers are checked above."""
    begins, ranks, keys, source = c.tables()
    x, y, a, b = (t.to(dtype, copy=True) for t in (c.x, c.y, c.a, c.b))
    h = torch_experts.shrink(x, a, begins, ranks, keys, source, c.max_rank)
    return h, torch_experts.expand(y, h, b, begins, ranks, keys, None, c.first)


def plain(c: Case, truth: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """The truth with the error of the case's dtype."""
    return by_torch(c, c.x.dtype) if c.x.dtype == torch.float32 else tuple(t.to(c.x.dtype) for t in truth)


def check_layer(c: Case, got: tuple[Tensor, Tensor]) -> None:
    turned = replace(c, keys=rotated(c))
    truth, wrong = by_torch(c), by_torch(turned)
    mine, others = plain(c, truth), plain(turned, wrong)
    for which in (0, 1):
        told = specified(c, got[which]) if which == 0 else got[which]
        assert within(told, truth[which], mine[which])
        assert not within(told, wrong[which], others[which])
    none = torch.tensor([not c.ranks[key] for key in c.keys], device="cuda")
    assert none.any() and torch.equal(got[1][none], c.y[none])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("tokens", [1, 64, 300, 2048])
@pytest.mark.parametrize("side", SIDES)
def test_layers_of_a_large_model(side: str, tokens: int, name: str) -> None:
    c = layer_case(side, max(tokens, 1))
    if tokens == 1:
        c = c.only(list(range(8)))
        got, truth = run(c, name), by_torch(c)
        assert within(got[1], truth[1], truth[1].to(torch.bfloat16))
        return
    check_layer(c, run(c, name))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("side", SIDES)
def test_layers_in_other_dtypes(side: str, dtype: torch.dtype, amount: str) -> None:
    c = layer_case(side, 128, dtype)
    for name in KERNELS:
        check_layer(c, run(c, name))


# -- traced calls and graphs -----------------------------------------------------------------------
@pytest.mark.parametrize("name", NAMES)
def test_traced_by_inductor(name: str) -> None:
    c, kernels = on_gpu(torch.bfloat16, m=9, k=64, columns=128), backend(name)
    weights = torch.rand(20, 2, device="cuda")

    def forward(x: Tensor, y: Tensor, tables: tuple[Tensor, ...]) -> Tensor:
        begins, ranks, keys, source = tables
        h = ops.shrink(kernels, x, c.a, begins, ranks, keys, source, c.max_rank)
        y = ops.expand(kernels, y * 1, h, c.b, begins, ranks, keys, None, 0)
        return ops.combine(kernels, y, torch.arange(40, device=y.device).view(20, 2), weights, torch.bfloat16)

    compiled = torch.compile(forward, fullgraph=True)
    with torch.no_grad():
        seen = []
        for keys in (c.keys, rotated(c)):
            now = replace(c, keys=keys)
            seen.append(compiled(c.x, c.y, now.tables()))
            torch.testing.assert_close(seen[-1], forward(c.x, c.y, now.tables()), rtol=2e-2, atol=2e-2)
    assert not torch.allclose(seen[0], seen[1], rtol=0.1, atol=0.1)


def test_gradients_on_the_device() -> None:
    c = on_gpu(m=9)
    x, y = c.x.double().requires_grad_(), c.y.double().requires_grad_()
    toward = torch.randn_like(c.y)
    (by_pairs(replace(c, x=x, y=y), torch.float64)[1] * toward).sum().backward()
    c.x.requires_grad_(), c.y.requires_grad_()
    begins, ranks, keys, source = c.tables()
    h = ops.shrink(backend(TRITON), c.x, c.a, begins, ranks, keys, source, c.max_rank)
    (ops.expand(backend(TRITON), c.y, h, c.b, begins, ranks, keys, None, 0) * toward).sum().backward()
    for got, want in ((c.x.grad, x.grad), (c.y.grad, y.grad)):
        assert got is not None and want is not None
        torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("tokens", [4, 512])
@pytest.mark.parametrize("side", SIDES)
def test_a_captured_graph_serves_every_routing(side: str, tokens: int, name: str) -> None:
    """Keys, tables, factors and data are rewritten in place between replays."""
    c, kernels = layer_case(side, tokens), backend(name)
    begins, ranks, keys, source = c.tables()
    x, y, base = c.x.clone(), c.y.clone(), c.y.clone()

    def step() -> Tensor:
        y.copy_(base)
        h = kernels.experts_shrink(x, c.a, begins, ranks, keys, source, c.max_rank)
        return kernels.experts_expand(y, h, c.b, begins, ranks, keys, None, c.first)

    with torch.no_grad():
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = step()
        seen = []
        for turn in range(4):
            now = replace(layer_case(side, tokens), a=c.a, b=c.b)
            if turn == 1:  # keys move to other rank rows, and lie in no order
                now = replace(now, begins=now.begins[::-1], keys=now.keys[::-1], ranks=now.ranks[::-1])
            if turn == 2:
                c.a.copy_(torch.randn_like(c.a) / 4), c.b.copy_(torch.randn_like(c.b) / 4)
            if turn == 3:  # lower ranks
                now = replace(now, ranks=[min(r, 5) for r in now.ranks])
            for old, new in zip((begins, ranks, keys, source), now.tables(), strict=True):
                if old is not None and new is not None:
                    old.copy_(new)
            x.copy_(now.x), base.copy_(now.y)
            out.fill_(torch.nan)
            graph.replay()
            seen.append(out.clone())
            truth, wrong = by_torch(now)[1], by_torch(replace(now, keys=rotated(now)))[1]
            assert within(out, truth, truth.bfloat16()) and not within(out, wrong, wrong.bfloat16())
    assert not torch.equal(seen[0], seen[1])


# -- addresses beyond 32 bits ----------------------------------------------------------------------
@pytest.fixture
def much_memory() -> None:
    if torch.cuda.mem_get_info()[0] < 40 * 2**30:
        pytest.skip("needs 40 GiB of free GPU memory")


@pytest.mark.usefixtures("much_memory")
@pytest.mark.parametrize("side", SIDES)
def test_rank_rows_beyond_32_bits(side: str, amount: str) -> None:
    """The rank rows of all keys at the end of a pool of more than 2^31 elements, NaN before."""
    c = layer_case(side, 32)
    rows = 2**31 // min(SIDES[side]) + 32_768
    a, b = (torch.full((rows, t.shape[1]), torch.nan, dtype=t.dtype, device="cuda") for t in (c.a, c.b))
    shift = rows - len(c.a)
    a[shift:], b[shift:] = c.a, c.b
    far = replace(c, a=a, b=b, begins=[begin + shift for begin in c.begins])
    for name in KERNELS:
        for got, want in zip(run(far, name), run(c, name), strict=True):
            assert torch.equal(got.nan_to_num(7.5), want.nan_to_num(7.5))
    assert not torch.equal(run(replace(far, keys=rotated(far)), TRITON)[1], run(c, TRITON)[1])


@pytest.mark.usefixtures("much_memory")
def test_pairs_beyond_32_bits(amount: str) -> None:
    """x, y and the routed sum's y have more than 2^31 elements; the last pairs are those of a small case."""
    c = layer_case("down", 32, slots=2)
    some = len(c.keys)
    n = 2**31 // 2048 + some
    keys = torch.full((n,), 2, dtype=torch.int32, device="cuda")  # expert 0, base
    begins, ranks, small, _ = c.tables()
    keys[n - some :] = small
    a = torch.randn(len(c.a), 2048, device="cuda").bfloat16() / 4
    x = torch.zeros(n, 2048, dtype=torch.bfloat16, device="cuda")
    x[n - some :].normal_()
    for name in KERNELS:
        h = ops.experts_shrink(x, a, begins, ranks, keys, None, 16, name)
        near = ops.experts_shrink(x[n - some :], a, begins, ranks, small, None, 16, name)
        live = (ranks[small.long()] > 0)[:, None]
        assert torch.equal(torch.where(live, h[n - some :], 0), torch.where(live, near, 0)) and near[live[:, 0]].any()
        y = x.clone()
        ops.experts_expand(y, h, c.b, begins, ranks, keys, None, 0, name)
        want = x[n - some :].clone()
        ops.experts_expand(want, near, c.b, begins, ranks, small, None, 0, name)
        assert torch.equal(y[n - some :], want) and not torch.equal(want, x[n - some :])
        assert torch.equal(y[: n - some], x[: n - some])
        del y, h
    places = torch.arange(n, device="cuda")[n - some :].view(-1, 8)
    weights = torch.rand(places.shape, device="cuda")
    got = ops.experts_combine(x, places, weights, torch.bfloat16, TRITON)
    want = ops.experts_combine(x[n - some :], places - (n - some), weights, torch.bfloat16, TRITON)
    assert torch.equal(got, want) and got.any()
