"""Adapted linears: the augmented weight, the plain path and one adapter for all rows, on every kind and shape."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from transformers.models.falcon.modeling_falcon import FalconLinear
from transformers.pytorch_utils import Conv1D

from hf_multilora import RoutingError, layers
from hf_multilora.layers.augmented import is_laid
from hf_multilora.pool import BASE
from hf_multilora.routing import Request
from tests.layers.bed import ROWS, Bed, K, N, check, linear

SHAPES = [(4, 1, K), (4, 5, K), (4, K), (4, 2, 2, K), (4, 30, K)]  # the last is above the gated paths' tokens


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("bias", [True, False])
@torch.no_grad()
def test_linear(bias: bool, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    module, gated, plain = linear(bias), [], layers.linear.expand_gated
    monkeypatch.setattr(layers.linear, "expand_gated", lambda *args: (gated.append(1), plain(*args))[1])
    x = torch.randn(shape)
    base = module(x)
    bed = Bed(module)
    check(bed, x, base)
    assert is_laid(module, bed.slots) and bool(gated) == (x[0].numel() // K * 4 <= 32), "both paths are tested here"
    assert torch.equal(module.weight, bed.weight)
    torch.testing.assert_close(bed(x)[1], base[1])


@torch.no_grad()
def test_the_augmented_path_equals_the_plain_one() -> None:
    bed, x = Bed(linear()), torch.randn(4, 3, K)
    fast = bed(x)
    assert is_laid(bed.module, bed.slots)
    hook = bed.module.register_forward_hook(lambda *_: None)
    plain = bed(x)
    torch.testing.assert_close(fast, plain, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(fast.roll(1, 0), plain, rtol=0.1, atol=0.1)
    hook.remove()
    assert torch.equal(bed(x), fast)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.no_grad()
def test_half_precision_stays_within_twice_the_plain_error(dtype: torch.dtype) -> None:
    module = linear().to(dtype)
    x = torch.randn(4, 3, K).to(dtype)
    base = module(x)
    exact = nn.functional.linear(x.double(), module.weight.double(), module.bias.double())
    bed = Bed(module, dtype=dtype)
    want = exact + bed.delta(x)
    plain = base.clone()
    for row, slot in enumerate(ROWS):
        if slot != BASE:
            a, b = bed.factors[slot]
            plain[row] += (x[row] @ a.T) @ b
    bound = 2 * float((plain.double() - want).abs().max()) + torch.finfo(dtype).eps * float(want.abs().max())
    got = bed(x)
    assert is_laid(module, bed.slots) and got.dtype == dtype
    assert float((got.double() - want).abs().max()) <= bound
    assert float((got.roll(1, 0).double() - want).abs().max()) > bound
    bed.module.register_forward_hook(lambda *_: None)
    assert float((bed(x).double() - want).abs().max()) <= bound


@pytest.mark.parametrize("rows", [[0] * 4, [2] * 4, [BASE] * 4])
@pytest.mark.parametrize("shape", [(4, 3, K), (7, K), (K,), (2, 0, K)])
@torch.no_grad()
def test_one_adapter_for_all_takes_any_shape(shape: tuple[int, ...], rows: list[int]) -> None:
    module, x = linear(), torch.randn(shape)
    base = module(x)
    bed = Bed(module)
    got = bed(x, rows)
    if rows[0] == BASE:
        assert torch.equal(got, base)
        return
    a, b = bed.factors[rows[0]]
    torch.testing.assert_close(got, base + x @ a.T @ b, rtol=1e-5, atol=1e-5)
    if x.numel():
        assert not torch.allclose(got, base, rtol=0.1, atol=0.1)


@pytest.mark.parametrize("tokens", [2, 30])
@torch.no_grad()
def test_conv1d_and_foreign_linears_keep_their_forward(tokens: int) -> None:
    class Doubled(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return 2 * super().forward(input)

    for module in (Conv1D(N, K), FalconLinear(K, N), Doubled(K, N)):
        nn.init.normal_(module.weight)
        nn.init.normal_(module.bias)
        x = torch.randn(4, tokens, K)
        base = module(x)
        bed = Bed(module)
        check(bed, x, base)
        assert bed.slots.buffer is None, "only nn.Linear's own forward is replaced"


@pytest.mark.parametrize("shape", [(8, K), (3, 5, K), (1, 4, K), (K,)])
def test_rows_that_cannot_be_told_are_refused(shape: tuple[int, ...]) -> None:
    bed = Bed(linear())
    with pytest.raises(RoutingError, match=r"bed: the first dimension of its input must be the 4 rows"):
        bed(torch.randn(shape))
    assert not bed.routing.open


@torch.no_grad()
def test_a_call_that_the_class_refuses() -> None:
    bed, x = Bed(linear()), torch.randn(4, 1, K)
    check(bed, x, nn.functional.linear(x, bed.weight, bed.module.bias))  # type: ignore[arg-type]
    bed.routing.push(Request(tuple(ROWS)))
    try:
        for args, kwargs in (((), {}), ((x, 3), {}), (([1.0],), {}), ((), {"foo": x}), ((x,), {"foo": x})):
            with pytest.raises(TypeError):
                bed.module(*args, **kwargs)
        assert torch.equal(bed.module(input=x), bed.module(x))
    finally:
        bed.routing.pop()
