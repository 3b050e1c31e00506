"""The operations for experts' LoRA on the CPU, Triton in its interpreter: float16 and float32 there."""

from __future__ import annotations

import pytest
import torch

from hf_multilora.kernels import ops_experts as ops
from hf_multilora.kernels import torch_experts
from hf_multilora.kernels.backends import TORCH, TRITON, TRITON_FIXED
from tests.kernels import experts_properties as properties
from tests.kernels.experts_suite import ORDERS, SHAPES, case
from tests.kernels.suite import BACKENDS, INTERPRETED

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
ON_ALL = pytest.mark.parametrize("name", BACKENDS)
FORMS = pytest.mark.parametrize("copies", [False, True], ids=["runs", "copies"])  # of the torch backend


@FORMS
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_torch_equals_a_loop_over_pairs(
    dtype: torch.dtype, order: str, copies: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_experts, "_asks_nothing", lambda keys, gradients: copies)
    properties.check_numbers(case(dtype, order), TORCH)


@FORMS
@pytest.mark.parametrize("shape", SHAPES)
def test_shapes_with_torch(shape: str, copies: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_experts, "_asks_nothing", lambda keys, gradients: copies)
    monkeypatch.setattr(torch_experts, "COPIED", 5000)  # several chunks
    for order in ("sorted", "shuffled"):
        properties.check_numbers(case(order=order, **SHAPES[shape]), TORCH)


@FORMS
@pytest.mark.parametrize("order", ["sorted", "shuffled", "no adapter"])
def test_torch_reads_nothing_else(order: str, copies: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_experts, "_asks_nothing", lambda keys, gradients: copies)
    properties.check_unread(case(order=order, m=15), TORCH)


def test_no_pool_at_all() -> None:
    c = case(order="no adapter")
    h = torch_experts.shrink(c.x, c.a[:0], *c.tables()[:3], None, 4)
    y = torch_experts.expand(c.y.clone(), h, c.b[:0], *c.tables()[:3], None, 0)
    assert h.shape == (40, 4) and torch.equal(y, c.y)


@ON_ALL
def test_h_through_a_source_map(name: str) -> None:
    properties.check_source_of_h(case(n=17), name)


@ON_ALL
def test_run_again(name: str) -> None:
    properties.check_twice(case(order="shuffled", n=17, m=7), name)


@ON_ALL
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_combine(dtype: torch.dtype, name: str) -> None:
    properties.check_combine(dtype, name)
    properties.check_combine(dtype, name, tokens=1, choices=1, width=1, index=torch.int32)
    properties.check_combine(dtype, name, choices=8, width=300, out_dtype=torch.float32, weights_dtype=torch.float32)


@ON_ALL
@pytest.mark.parametrize("tokens", [0, 3])
def test_nothing_to_do(tokens: int, name: str) -> None:
    c = case(n=0, m=tokens)
    h = ops.experts_shrink(c.x, c.a, *c.tables(), c.max_rank, name)
    ops.experts_expand(c.y, h, c.b, *c.tables(), 0, name)
    assert h.shape == (0, c.max_rank)
    out = ops.experts_combine(c.y, torch.zeros(0, 2, dtype=torch.int64), torch.zeros(0, 2), torch.float32, name)
    assert out.shape == (0, c.y.shape[1])


@pytest.fixture(params=["few", "many"])
def amount(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What Triton takes the pairs of any case for."""
    triton_experts = pytest.importorskip("hf_multilora.kernels.triton_experts")
    monkeypatch.setattr(triton_experts, "amount", lambda n, groups: request.param)
    return str(request.param)


@INTERPRETED
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_triton_equals_a_loop_over_pairs(dtype: torch.dtype, order: str, amount: str) -> None:
    properties.check_numbers(case(dtype, order), TRITON)


@INTERPRETED
@pytest.mark.parametrize("shape", SHAPES)
def test_shapes_with_triton(shape: str, amount: str) -> None:
    properties.check_numbers(case(**SHAPES[shape]), TRITON)


@INTERPRETED
def test_many_rank_blocks_with_triton(amount: str) -> None:
    properties.check_numbers(case(ranks=(70, 0, 130, 1), n=20, groups=5), TRITON)


@INTERPRETED
@pytest.mark.parametrize(("shape", "order"), [("plain", "sorted"), ("one pair", "sorted"), ("strided", "shuffled")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_triton_fixed_equals_a_loop_over_pairs(dtype: torch.dtype, shape: str, order: str) -> None:
    properties.check_numbers(case(dtype, order, **SHAPES[shape]), TRITON_FIXED)


@INTERPRETED
@pytest.mark.parametrize("order", ["sorted", "shuffled"])
def test_triton_reads_nothing_else(order: str, amount: str) -> None:
    properties.check_unread(case(order=order, n=17, m=7), TRITON)


@INTERPRETED
@pytest.mark.parametrize("order", ["sorted", "shuffled"])
def test_triton_fixed_reads_nothing_else(order: str) -> None:
    properties.check_unread(case(order=order, n=17, m=7), TRITON_FIXED)


@INTERPRETED
@pytest.mark.parametrize("order", ["sorted", "shuffled"])
def test_what_a_pair_gets_does_not_depend_on_the_batch(order: str) -> None:
    properties.check_fixed(case(order=order, k=300, n=19))
    properties.check_fixed(case(order=order, k=64, n=19, m=9, ranks=(16, 2, 0, 40)))
