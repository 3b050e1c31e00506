"""For tests of numerics on a GPU: `from tests.gpu.exact import exact`."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def exact() -> Iterator[None]:
    """float32 products in float32, not TF32; no memory kept for the next test."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)
    gc.collect()
    torch.cuda.empty_cache()
