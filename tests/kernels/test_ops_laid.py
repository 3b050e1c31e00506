"""lora_expand_laid and lora_gated_laid as registered operations."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from hf_multilora.kernels import ops_laid
from hf_multilora.kernels.backends import TORCH, TRITON, KernelError
from tests.kernels.suite import (
    BACKENDS,
    INTERPRETED,
    MIXES,
    Case,
    by_rows,
    case,
    closed,
    own_columns,
    with_one_a,
    within,
)
from tests.kernels.test_gated import check, inputs, pair

LAID, GATED = torch.ops.hf_multilora.lora_expand_laid, torch.ops.hf_multilora.lora_gated_laid
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


@pytest.mark.parametrize("piece", [0, 1])
@pytest.mark.parametrize(("tokens", "lanes"), [(1, 2), (40, 2), (2, 1)])
@INTERPRETED
def test_a_gated_mlp(tokens: int, lanes: int, piece: int) -> None:
    c = pair(torch.float32, 33, tokens=tokens)
    c = with_one_a(c) if lanes == 1 else c
    check(c, GATED(*gated_arguments(c, piece, lanes=lanes)), piece, "silu")


@INTERPRETED
def test_opcheck_of_a_gated_mlp() -> None:
    torch.library.opcheck(GATED, gated_arguments(pair(torch.float32, r=3, tokens=2, mix="one"), 1, 1.0))


def gated_arguments(c: Case, piece: int, poison: float = torch.nan, lanes: int = 2) -> tuple[Any, ...]:
    (y, b, offset), (_, h) = inputs(c), own_columns(c)
    h.masked_fill_(closed(c)[None, :, None], poison)
    rows = torch.tensor(c.rows, dtype=torch.int32)
    both = torch.cat((y, h[0, ..., :: 2 // lanes]), 2)
    return both, b, rows, *c.tables(), offset, y.shape[2], c.max_rank, piece, "silu", lanes, TRITON


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
    both, b, rows, *rest = gated_arguments(pair(torch.float32), 0)
    with pytest.raises(ValueError, match=r"lora_gated_laid: both must be \[R, T, at least 48\] .* got \(4, 3, 47\)"):
        ops_laid.lora_gated_laid(both[..., :47], b, rows, *rest)
    with pytest.raises(ValueError, match=r"lora_gated_laid: row_slots must be int32 \[4\], got torch.int64 \(4,\)"):
        ops_laid.lora_gated_laid(both, b, rows.long(), *rest)
    with pytest.raises(ValueError, match=r"lora_gated_laid: lanes must be 1 or 2, .* got 3 for \d+ columns"):
        ops_laid.lora_gated_laid(both, b, rows, *rest[:-2], 3, TRITON)
    with pytest.raises(KernelError, match="lora_gated_laid must be computed by backend='triton', got 'torch'"):
        ops_laid.lora_gated_laid(both, b, rows, *rest[:-1], TORCH)
