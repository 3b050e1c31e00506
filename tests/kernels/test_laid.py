"""The expands of linears in one buffer: own columns of [y | h] and after a shrink, into an output for each slice.

Triton in its interpreter: float16 and float32. tests/gpu/test_merged.py has bfloat16 and graphs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_multilora.kernels.backends import TRITON, backend
from tests.kernels.properties import others
from tests.kernels.suite import (
    BASE,
    INTERPRETED,
    MIXES,
    Case,
    by_rows,
    case,
    closed,
    crowded,
    dtype_for,
    nan_filled,
    own_columns,
    with_one_a,
    within,
)

pytestmark = INTERPRETED
SHAPES: dict[str, dict[str, Any]] = {  # widths, and what differs from case()'s defaults
    "one": {"widths": (51,)},
    "two": {"widths": (64, 33)},
    "three": {"widths": (16, 140, 7)},
    "four": {"widths": (16, 3, 7, 20), "tokens": 1},
    "whole": {"widths": (128, 32, 32), "tokens": 1},
    "one slot": {"widths": (9, 20), "slots": 1},
    "many rows": {"widths": (9, 20), "rows": 19, "tokens": 1},
    "long rows": {"widths": (9, 20), "rows": 2, "tokens": 5},
    "bound above the ranks": {"widths": (9, 20), "bound": 33},
    "bound above what is multiplied at once": {"widths": (9, 20), "bound": 70},
}
RANKS = (1, 8, 13, 16, 40)


def laid(c: Case, name: str = TRITON, rows: list[int] | None = None, lanes: int | None = None) -> list[Tensor]:
    """Outputs of the slices, [R, T, n] each, in the order of the slices; others' columns are NaN. lanes 1: h is there
    once for all of them."""
    y, h = own_columns(c)
    h.masked_fill_(closed(c, rows)[None, :, None], torch.nan)
    lanes = lanes or len(c.starts)
    both = torch.cat((y, h[0, ..., :: len(c.starts) // lanes]), 2).flatten(0, 1)
    outs = outputs(c)
    slots = torch.tensor(c.rows if rows is None else rows, dtype=torch.int32, device=c.x.device)
    tables = slots, *c.tables(rows), c.extras()["slices"]
    run = backend(name).expand_laid
    assert run is not None
    run(both, len(c.rows), c.b, *tables, y.shape[2], c.max_rank, even(c), lanes)(both, outs)
    return outs


def after_shrink(c: Case, name: str = TRITON, lanes: int | None = None) -> list[Tensor]:
    """The same by shrink and expand."""
    kernels, (order, offsets, starts, ranks), outs = backend(name), c.tables(), outputs(c)
    lanes = lanes or len(c.starts)
    a = c.a[:: len(c.starts) // lanes]
    with nan_filled():
        h = kernels.shrink(c.x, a, order, offsets, starts[:lanes], ranks[:lanes], c.max_rank, early=True)
    assert kernels.expand_parts is not None
    tables = order, offsets, starts, ranks, c.extras()["slices"]
    kernels.expand_parts(
        c.y, h, outs, c.b, torch.tensor(c.rows, dtype=torch.int32, device=c.x.device), *tables, even(c), lanes
    )
    return outs


def laid_with_one_a(c: Case) -> list[Tensor]:
    return laid(c, lanes=1)


def after_shrink_with_one_a(c: Case) -> list[Tensor]:
    return after_shrink(c, lanes=1)


def even(c: Case) -> bool:
    return all(number % 16 == 0 for row in c.slices or [(0, c.y.shape[2], 0)] for number in row)


def outputs(c: Case) -> list[Tensor]:
    rows, tokens = c.y.shape[:2]
    sizes = [size for _, size, _ in c.slices or [(0, c.y.shape[2], 0)]]
    return [torch.full((rows, tokens, size), torch.nan, dtype=c.y.dtype, device=c.y.device) for size in sizes]


def whole(c: Case, outs: list[Tensor]) -> Tensor:
    """[R, T, N] of the slices' outputs."""
    if c.slices is None:
        return outs[0]
    joined = torch.empty_like(c.y)
    for (first, size, _), out in zip(c.slices, outs, strict=True):
        joined[..., first : first + size] = out
    return joined


def check(c: Case, run: Any) -> None:
    """Against float64, with permuted slots as control; base rows are copies."""
    truth, plain = by_rows(c, torch.float64)[1], by_rows(c, c.y.dtype)[1]
    wrong, wrong_plain = (by_rows(c, dtype, others(c))[1] for dtype in (torch.float64, c.y.dtype))
    got = whole(c, run(c))
    assert within(got, truth, plain)
    assert not within(got, wrong, wrong_plain), "permuted slots pass: the check says nothing"
    for row, slot in enumerate(c.rows):
        if slot == BASE:
            assert torch.equal(got[row], c.y[row])


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("r", RANKS)
@pytest.mark.parametrize("tokens", [1, 3])
def test_equals_a_loop_over_rows(kernel: str, tokens: int, r: int, mix: str) -> None:
    dtype = dtype_for(kernel, r in (1, 16))
    check(case(dtype, r, tokens, mix, rows=4, widths=(16, 40, 7)[: 1 + RANKS.index(r) % 3]), laid)


@pytest.mark.parametrize("r", [16, 40])
@pytest.mark.parametrize(("tokens", "slots"), [(1, 5), (1, 3), (3, 4)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_many_tokens_of_one_slot(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, tokens: int, slots: int, r: int
) -> None:
    """Above rank 16 they are computed together, as many as fit; fewer, and those of the base, by themselves."""
    from hf_multilora.kernels import triton_laid

    monkeypatch.setattr(triton_laid, "FEW_PER_SLOT", 64)
    c = case(dtype, r, tokens, rows=45, slots=slots, widths=(16, 40, 7))
    check(replace(c, rows=crowded(slots)), laid)
    check(replace(with_one_a(c), rows=crowded(slots)), laid_with_one_a)


@pytest.mark.parametrize("shape", SHAPES)
def test_shapes(kernel: str, shape: str) -> None:
    dtype = dtype_for(kernel, shape in ("two", "four", "whole"))
    check(case(dtype, **({"tokens": 3, "rows": 4, "r": 5} | SHAPES[shape])), laid)


@pytest.mark.parametrize("shape", SHAPES)
def test_after_a_shrink(kernel: str, shape: str) -> None:
    """h in several planes too, as K is cut in two."""
    dtype = dtype_for(kernel, shape in ("two", "four", "whole"))
    c = case(dtype, **({"tokens": 3, "rows": 4, "r": 5} | SHAPES[shape] | ({"k": 520} if shape == "two" else {})))
    check(c, after_shrink)


@pytest.mark.parametrize("tokens", [33, 150])
@pytest.mark.parametrize("r", [16, 40])
def test_prompts(r: int, tokens: int) -> None:
    """In one chunk, and in several."""
    c = case(torch.float16, r, tokens, rows=3, widths=(140, 7))
    check(c, laid)
    check(c, after_shrink)


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize(("r", "widths"), [(1, (16, 40)), (13, (64, 32, 33)), (16, (16, 3, 7, 20)), (40, (16, 32))])
def test_one_a_for_all(kernel: str, widths: tuple[int, ...], r: int, mix: str) -> None:
    dtype = dtype_for(kernel, r in (1, 16))
    c = with_one_a(case(dtype, r, 3, mix, rows=4, widths=widths))
    check(c, laid_with_one_a)
    check(c, after_shrink_with_one_a)
    if mix == "one":  # rank rows of A that lie one further
        wrong = replace(c, a=c.a.roll(len(widths), 0))
        truth, plain = by_rows(c, torch.float64)[1], by_rows(c, dtype)[1]
        assert not any(within(whole(c, run(wrong)), truth, plain) for run in (laid_with_one_a, after_shrink_with_one_a))


@pytest.mark.parametrize("shape", [name for name in SHAPES if len(SHAPES[name]["widths"]) > 1])
def test_shapes_with_one_a(kernel: str, shape: str) -> None:
    c = with_one_a(case(torch.float16, **({"tokens": 3, "rows": 4, "r": 5} | SHAPES[shape])))
    check(c, laid_with_one_a)
    check(c, after_shrink_with_one_a)


@pytest.mark.parametrize("kernel", ["rows", "tiles"], indirect=True)
def test_y_of_another_dtype_than_b(kernel: str) -> None:
    """Under autocast [y | h] is coarser than B."""
    check(case(tokens=1, rows=4, widths=(16, 9)).to(y=torch.float16), laid)


def test_a_launch_that_is_kept_serves_every_mix(kernel: str) -> None:
    """Tables are rewritten in place, slots get other rank rows; [y | h] and outputs are other tensors each time."""
    dtype = dtype_for(kernel)
    c = case(dtype, tokens=1, rows=6, widths=(16, 9), mix="all base")
    y, _ = own_columns(c)
    slots, tables = torch.tensor(c.rows, dtype=torch.int32), c.tables()
    laid = backend(TRITON).expand_laid
    assert laid is not None
    both = torch.zeros(6, y.shape[2] + len(c.a), dtype=dtype)
    run = laid(both, 6, c.b, slots, *tables, c.extras()["slices"], y.shape[2], c.max_rank, even(c), 2)
    for mix in MIXES:
        now = case(dtype, tokens=1, rows=6, widths=(16, 9), mix=mix)
        if mix == "one":
            now.starts[0].reverse(), now.ranks[0].reverse()
        now = Case(**(now.__dict__ | {"a": c.a, "b": c.b, "slices": c.slices}))
        slots.copy_(torch.tensor(now.rows))
        for old, new in zip(tables, now.tables(), strict=True):
            old.copy_(new)

        def again(given: Case) -> list[Tensor]:
            y, h = own_columns(given)
            h.masked_fill_(closed(given)[None, :, None], torch.nan)
            both, outs = torch.cat((y, h[0]), 2).flatten(0, 1), outputs(given)
            run(both, outs)
            return outs

        check(now, again)
