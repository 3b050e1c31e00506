"""The expands of a gated MLP: act(gate) * up with both deltas, in one kernel.

Triton in its interpreter: float16 and float32. tests/gpu/test_gated.py has bfloat16, graphs and models.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

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
ACTS = {"silu": F.silu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh")}
SHAPES: dict[str, dict[str, Any]] = {  # width, and what differs from case()'s defaults
    "plain": {"width": 33},
    "one column": {"width": 1, "tokens": 1},
    "whole tiles": {"width": 128, "r": 16},
    "one slot": {"width": 20, "slots": 1},
    "many rows": {"width": 9, "rows": 19, "tokens": 1},
    "long rows": {"width": 300, "rows": 2, "tokens": 17},
    "bound above the ranks": {"width": 20, "bound": 33},
    "bound above what is multiplied at once": {"width": 20, "bound": 70},
}


def pair(dtype: torch.dtype, width: int = 24, **told: Any) -> Case:
    return case(dtype, **({"tokens": 3, "rows": 4, "r": 5} | told), widths=(width, width))


def inputs(c: Case) -> tuple[Tensor, Tensor, int]:
    """y and b as linears that are laid together have them, and where slice 1 begins in b."""
    assert c.slices is not None
    (right, width, _), (left, _, _) = c.slices
    used = len(c.a) // 2
    b = torch.zeros(2, used, width, dtype=c.b.dtype, device=c.b.device)
    for slot in range(len(c.starts[0])):
        for piece, _, _, _, flat in c.parts(slot):
            start, r = c.starts[piece][slot], c.ranks[piece][slot]
            b[piece, start : start + r] = c.b[flat].view(r, width)
    y = torch.cat((c.y[..., right : right + width], c.y[..., left : left + width]), 2)
    return y, b.flatten(), used * width


def laid(c: Case, piece: int, act: str, lanes: int = 2) -> Tensor:
    """[R, T, n] from [y | h], others' columns of which are NaN. lanes 1: h is there once for both."""
    (y, b, offset), (_, h) = inputs(c), own_columns(c)
    h.masked_fill_(closed(c)[None, :, None], torch.nan)
    both = torch.cat((y, h[0, ..., :: 2 // lanes]), 2).flatten(0, 1)
    slots = torch.tensor(c.rows, dtype=torch.int32, device=y.device)
    out = torch.full((*y.shape[:2], y.shape[2] // 2), torch.nan, dtype=y.dtype, device=y.device)
    make = backend(TRITON).gated_laid
    assert make is not None
    make(both, len(c.rows), b, slots, *c.tables(), offset, y.shape[2], c.max_rank, piece, act, lanes)(both, [out])
    return out


def after_shrink(c: Case, piece: int, act: str, lanes: int = 2) -> Tensor:
    """The same by shrink and expand."""
    (y, b, offset), kernels, (order, offsets, starts, ranks) = inputs(c), backend(TRITON), c.tables()
    out = torch.full((*y.shape[:2], y.shape[2] // 2), torch.nan, dtype=y.dtype, device=y.device)
    with nan_filled():
        of_h = order, offsets, starts[:lanes], ranks[:lanes]
        h = kernels.shrink(c.x, c.a[:: 2 // lanes], *of_h, c.max_rank, early=True)
    assert kernels.gated_parts is not None
    slots = torch.tensor(c.rows, dtype=torch.int32, device=y.device)
    kernels.gated_parts(y, h, out, b, slots, order, offsets, starts, ranks, offset, piece, act, lanes)
    return out


def want(c: Case, piece: int, act: str, dtype: torch.dtype, rows: list[int] | None = None) -> Tensor:
    assert c.slices is not None
    sums = by_rows(c, dtype, rows)[1]
    both = [sums[..., first : first + size] for first, size, _ in c.slices]
    return ACTS[act](both[piece]) * both[1 - piece]


def close(got: Tensor, exact: Tensor, own: Tensor) -> bool:
    """Within what the dtype allows: the largest error, and all of them together, which tell two activations apart. A
    product of two sums has the floor of both."""
    off, plain = ((some.double() - exact).norm() for some in (got, own))
    return within(got, exact, own, floor=4) and bool(off <= 2 * plain + torch.finfo(own.dtype).eps * exact.norm())


def check(c: Case, got: Tensor, piece: int, act: str) -> None:
    """Against float64; permuted slots, the other gate and the other activation must fail."""
    dtype, wide = c.y.dtype, torch.float64
    plain = want(c, piece, act, dtype)
    assert got.dtype == dtype and close(got, want(c, piece, act, wide), plain)
    other = next(name for name in ACTS if name != act)
    for p, a, rows in ((piece, act, others(c)), (1 - piece, act, None), (piece, other, None)):
        exact, own = (want(c, p, a, kind, rows) for kind in (wide, dtype))
        assert not close(got, exact, own), "a control passes: the check says nothing"
    assert c.slices is not None
    one, two = (c.y[..., first : first + size].double() for first, size, _ in c.slices)
    kind, eps = torch.finfo(dtype), torch.finfo(torch.float32).eps
    # in float32, 1 + tanh of a GELU far below zero has no digits left; small numbers of float16 are far apart
    bound = 4 * (
        kind.eps * plain.double().abs() + eps * (one * two).abs() + kind.tiny * kind.eps * (1 + c.y.abs().max())
    )
    near = (got.double() - plain.double()).abs() <= bound
    assert all(near[row].all() for row, slot in enumerate(c.rows) if slot == BASE)


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("r", [1, 8, 16, 40])
@pytest.mark.parametrize("tokens", [1, 3])
def test_equals_a_loop_over_rows(kernel: str, tokens: int, r: int, mix: str) -> None:
    c = pair(dtype_for(kernel, r in (1, 16)), tokens=tokens, r=r, mix=mix)
    piece, act = (r // 8) % 2, list(ACTS)[tokens % 2]
    check(c, laid(c, piece, act), piece, act)


@pytest.mark.parametrize("r", [16, 40])
@pytest.mark.parametrize(("tokens", "slots"), [(1, 5), (1, 3), (3, 4)])
def test_many_tokens_of_one_slot(monkeypatch: pytest.MonkeyPatch, tokens: int, slots: int, r: int) -> None:
    from hf_multilora.kernels import triton_laid

    monkeypatch.setattr(triton_laid, "FEW_PER_SLOT", 64)
    c = replace(pair(torch.float32, 40, r=r, tokens=tokens, rows=45, slots=slots), rows=crowded(slots))
    for piece, act in enumerate(ACTS):
        check(c, laid(c, piece, act), piece, act)
    c = with_one_a(c)
    check(c, laid(c, 0, "silu", lanes=1), 0, "silu")


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_shapes(kernel: str, shape: str, act: str) -> None:
    c = pair(dtype_for(kernel, shape in ("plain", "whole tiles")), **SHAPES[shape])
    for piece in (0, 1):
        check(c, laid(c, piece, act), piece, act)


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_after_a_shrink(kernel: str, shape: str, act: str) -> None:
    """h in several planes too, as K is cut in two."""
    more = {"k": 520} if shape == "plain" else {}
    c = pair(dtype_for(kernel, shape in ("plain", "whole tiles")), **SHAPES[shape], **more)
    for piece in (0, 1):
        check(c, after_shrink(c, piece, act), piece, act)


@pytest.mark.parametrize("tokens", [33, 150])
def test_prompts(tokens: int) -> None:
    """In one chunk, and in several."""
    c = pair(torch.float16, 140, rows=2, tokens=tokens)
    for piece, act in enumerate(ACTS):
        check(c, laid(c, piece, act), piece, act)
        check(c, after_shrink(c, piece, act), piece, act)


@pytest.mark.parametrize(
    ("shape", "mix"), [*((shape, "all distinct") for shape in SHAPES), *(("", mix) for mix in MIXES)]
)
def test_one_a_for_both(kernel: str, shape: str, mix: str) -> None:
    dtype = dtype_for(kernel, shape in ("plain", "whole tiles"))
    c = with_one_a(pair(dtype, **({"mix": mix} | SHAPES.get(shape, {"r": 40}))))
    for piece, act in ((0, "silu"), (1, "gelu_tanh")):
        check(c, laid(c, piece, act, 1), piece, act)
        check(c, after_shrink(c, piece, act, 1), piece, act)


def test_large_values(kernel: str) -> None:
    """exp overflows far from zero: silu is 0 or x there."""
    c = pair(dtype_for(kernel))
    assert c.slices is not None
    first, size, _ = c.slices[0]  # the gate's
    c.y[..., first : first + size] *= 200
    got, wide = laid(c, 0, "silu"), torch.float64
    assert got.isfinite().all() and close(got, want(c, 0, "silu", wide), want(c, 0, "silu", got.dtype))
    wrong, own = (want(c, 0, "silu", kind, others(c)) for kind in (wide, got.dtype))
    assert not close(got, wrong, own), "permuted slots pass: the check says nothing"
