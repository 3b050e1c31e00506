"""lora_expand_laid as a registered operation, and the plain formula that traced code has for few tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_multilora.kernels import ops_laid
from hf_multilora.kernels.backends import TORCH
from hf_multilora.kernels.torch_backend import expand_own
from tests.kernels.suite import BACKENDS, BASE, MIXES, Case, by_rows, case, closed, own_columns, with_one_a, within

LAID = torch.ops.hf_multilora.lora_expand_laid
ON_ALL = pytest.mark.parametrize("name", BACKENDS[:2])


def in_order(c: Case) -> Case:
    """Its slices one after the other in y."""
    if c.slices is None:
        return c
    first, slices = 0, []
    for _, width, offset in c.slices:
        slices.append((first, width, offset))
        first += width
    return replace(c, slices=slices)


def arguments(c: Case, name: str, poison: float = torch.nan, lanes: int = 0) -> tuple[Any, ...]:
    """lanes 1: h is there once for all slices; 0: for each."""
    y, h = own_columns(c)
    h.masked_fill_(closed(c)[None, :, None], poison)
    rows = torch.tensor(c.rows, dtype=torch.int32, device=c.x.device)
    sizes = [c.y.shape[2]] if c.slices is None else [width for _, width, _ in c.slices]
    lanes = lanes or len(sizes)
    both = torch.cat((y, h[0, ..., :: len(sizes) // lanes]), 2)
    return both, c.b, rows, *c.tables(), c.extras()["slices"], sizes, c.max_rank, False, lanes, name


@ON_ALL
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("widths", [(51,), (64, 33), (16, 130, 7)])
def test_equals_a_loop_over_rows(name: str, mix: str, widths: tuple[int, ...]) -> None:
    c = in_order(case(mix=mix, widths=widths, tokens=2))
    got = torch.cat(LAID(*arguments(c, name)), 2)
    truth, plain = by_rows(c, torch.float64)[1], by_rows(c, torch.float32)[1]
    assert within(got, truth, plain)
    if len({*c.rows}) > 1:
        assert not within(got.roll(1, 0), truth, plain)


@ON_ALL
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("widths", [(64, 33), (16, 130, 7)])
def test_one_a_for_all(name: str, mix: str, widths: tuple[int, ...]) -> None:
    c = with_one_a(in_order(case(mix=mix, widths=widths, tokens=2)))
    given = arguments(c, name, lanes=1)
    got = torch.cat(LAID(*given), 2)
    truth, plain = by_rows(c, torch.float64)[1], by_rows(c, torch.float32)[1]
    assert given[0].shape[2] == sum(widths) + len(c.a) // len(widths)
    assert within(got, truth, plain)
    if len({*c.rows}) > 1:
        assert not within(got.roll(1, 0), truth, plain)


@ON_ALL
@pytest.mark.parametrize("widths", [(51,), (9, 4, 30)])
def test_opcheck(name: str, widths: tuple[int, ...]) -> None:
    torch.library.opcheck(LAID, arguments(in_order(case(r=3, tokens=2, mix="one", widths=widths)), name, 1.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mix", MIXES)
def test_the_plain_formula(dtype: torch.dtype, mix: str) -> None:
    c = case(dtype, mix=mix, tokens=2)
    y, h = own_columns(c)
    h.masked_fill_(closed(c)[None, :, None], torch.nan)
    starts, ranks = (
        torch.tensor([0 if slot == BASE else of[slot] for slot in c.rows], dtype=torch.int32)
        for of in (c.starts[0], c.ranks[0])
    )
    got: Tensor = expand_own(y, h[0], c.b, starts, ranks, 2 * c.max_rank)
    truth, plain = by_rows(c, torch.float64)[1], by_rows(c, dtype)[1]
    assert got.dtype == dtype and within(got, truth, plain)
    if len({*c.rows}) > 1:
        assert not within(got.roll(1, 0), truth, plain)


def test_refusals() -> None:
    both, b, rows, *rest = arguments(in_order(case(widths=(9, 4))), TORCH)
    with pytest.raises(ValueError, match=r"lora_expand_laid: both must be \[R, T, at least 13\], .* got \(6, 7, 12\)"):
        ops_laid.lora_expand_laid(both[..., :12], b, rows, *rest)
    with pytest.raises(ValueError, match=r"row_slots must be int32 \[6\], got torch.int64 \(6,\)"):
        ops_laid.lora_expand_laid(both, b, rows.long(), *rest)
    *others, lanes, name = rest
    for wrong in (0, lanes + 1):
        with pytest.raises(ValueError, match=rf"lanes must be 1 or 2, .* got {wrong} for "):
            ops_laid.lora_expand_laid(both, b, rows, *others, wrong, name)
    with pytest.raises(ValueError, match=r"with as many columns of h in each, got 2 for \d+ columns"):
        ops_laid.lora_expand_laid(both[..., :-1], b, rows, *rest)
