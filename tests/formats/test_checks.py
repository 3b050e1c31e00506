"""Checks of single tensors, where one value in many counts."""

from __future__ import annotations

import math

import pytest
import torch

from hf_multilora.formats.checks import DTYPES, is_finite

ODD = (math.nan, -math.nan, math.inf, -math.inf)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 67), (67, 3), (2, 5, 13)], ids=str)
def test_one_value_that_is_not_finite_is_found_at_every_place(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    limits = torch.finfo(dtype)
    for i in range(math.prod(shape)):
        tensor = torch.ones(shape, dtype=dtype)
        for value in (limits.max, limits.min, limits.tiny, -0.0):
            tensor.view(-1)[i] = value
            assert is_finite(tensor) and is_finite(tensor.mT if len(shape) > 1 else tensor), (i, value)
        for value in ODD:
            tensor.view(-1)[i] = value
            assert not is_finite(tensor) and not is_finite(tensor.mT if len(shape) > 1 else tensor), (i, value)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_in_a_tensor_that_several_threads_share(dtype: torch.dtype) -> None:
    made = torch.Generator().manual_seed(0)
    tensor = torch.randn(1 << 18, generator=made).to(dtype)
    assert is_finite(tensor)
    for i in (0, 1, 32767, 32768, 99999, (1 << 17) - 1, 1 << 17, (1 << 18) - 1):
        for value in ODD:
            other = tensor.clone()
            other[i] = value
            assert not is_finite(other), (i, value)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_every_pattern_of_16_bits_is_told_as_torch_tells_it(dtype: torch.dtype) -> None:
    patterns = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)
    want = torch.isfinite(patterns).tolist()
    assert [is_finite(pattern) for pattern in patterns.unbind()] == want
    assert 0 < sum(not finite for finite in want) < len(want)


def test_what_holds_no_floats_is_finite() -> None:
    assert is_finite(torch.empty(0, 3)) and is_finite(torch.tensor([[1, 2]]))
    trained = torch.ones(3, requires_grad=True)
    assert is_finite(trained) and not is_finite(trained * math.nan)
