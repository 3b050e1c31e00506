"""Adapted embeddings: looked up by (token, slot), scaled as the base scales."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.layers.bed import RANKS, Bed, K, N


class Scaled(nn.Embedding):
    """As Gemma's: a buffer; as BART's: a float."""

    def __init__(self, scale: float | Tensor) -> None:
        super().__init__(K, N)
        self.embed_scale = scale

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * self.embed_scale


@pytest.mark.parametrize("scale", [None, 3.0, torch.tensor(3.0)])
@pytest.mark.parametrize("tokens", [2, 30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_embedding(dtype: torch.dtype, tokens: int, scale: Any) -> None:
    module = (nn.Embedding(K, N) if scale is None else Scaled(scale)).to(dtype)
    ids = torch.randint(0, K, (1, tokens)).repeat(4, 1)
    base = module(ids)
    bed = Bed(module, "embedding", dtype)
    want = base.double() + bed.delta(nn.functional.one_hot(ids, K)) * (1.0 if scale is None else 3.0)
    got = bed(ids)
    tolerance = (1e-5 if dtype == torch.float32 else 2e-2) * float(want.abs().max())
    assert got.dtype == dtype and float((got.double() - want).abs().max()) < tolerance
    assert float((got.roll(1, 0).double() - want).abs().max()) > 5 * tolerance
    assert torch.equal(got[1], base[1])
    for slot in RANKS:  # one for all rows
        rows = [slot] * 4
        delta = bed.delta(nn.functional.one_hot(ids, K), rows) * (1.0 if scale is None else 3.0)
        one = bed(ids, rows)
        assert one.dtype == dtype and float((one.double() - base.double() - delta).abs().max()) < 2 * tolerance


@torch.no_grad()
def test_positions_shared_by_all_rows_get_each_rows_table() -> None:
    module, positions = nn.Embedding(K, N), torch.arange(5)[None]
    base = module(positions)
    bed = Bed(module, "embedding")
    got = bed(positions)
    want = base.expand(4, -1, -1) + bed.delta(nn.functional.one_hot(positions.expand(4, -1), K))
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(got[0], got[2])
