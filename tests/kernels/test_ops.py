"""lora_shrink and lora_expand as registered operations: what torch.compile and autograd need, and refusals."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from hf_multilora.kernels import ops
from hf_multilora.kernels.backends import TORCH
from tests.kernels.suite import BACKENDS, BASE, MIXES, Case, by_rows, case, mix_of, own_columns, run

SHRINK, EXPAND = torch.ops.hf_multilora.lora_shrink, torch.ops.hf_multilora.lora_expand
ON_ALL = pytest.mark.parametrize("name", BACKENDS[:2])  # triton-fixed has the same registration
FORMS = ["lora_shrink", "lora_expand", "three slices", "own columns"]


def calls(c: Case, name: str) -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
    """The arguments of each form, all in their places."""
    sliced = case(c.x.dtype, r=3, tokens=2, widths=(9, 4, 30), epilogue=True)
    extras, planes = sliced.extras().values(), 1 if name == TORCH else 2
    y, h = own_columns(c)
    return {
        "lora_shrink": (SHRINK, (c.x, c.a, *c.tables(), c.max_rank, planes, name)),
        "lora_expand": (EXPAND, (c.y, columns(c), c.b, *c.tables(), None, None, None, False, name)),
        "three slices": (EXPAND, (sliced.y, columns(sliced), sliced.b, *sliced.tables(), *extras, False, name)),
        "own columns": (EXPAND, (y, h, c.b, *c.tables(), None, None, None, True, name)),
    }


def columns(c: Case, planes: int = 2) -> Tensor:
    return torch.randn(planes, *c.x.shape[:2], len(c.starts) * c.max_rank)


@ON_ALL
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("needs_grad", [False, True])
def test_opcheck(form: str, name: str, needs_grad: bool) -> None:
    """One adapter of rank max_rank for all rows: opcheck compares runs, so all of h must be specified."""
    op, args = calls(case(r=1, tokens=2, mix="one"), name)[form]
    if needs_grad and form in FORMS[2:]:
        with pytest.raises(NotImplementedError, match="lora_expand: gradients need one slice, no scale or bias"):
            op(args[0].detach().requires_grad_(), *args[1:]).sum().backward()
        return
    torch.library.opcheck(op, (args[0].detach().requires_grad_(needs_grad), *args[1:]))


@ON_ALL
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_fakes_promise_what_comes(form: str, dtype: torch.dtype, name: str) -> None:
    op, args = calls(case(dtype), name)[form]
    real = op(*args)
    with torch._subclasses.FakeTensorMode() as mode:
        fake = op(*(mode.from_tensor(a) if isinstance(a, Tensor) else a for a in args))
    assert (fake.shape, fake.dtype, fake.stride()) == (real.shape, real.dtype, real.stride())
    assert not any(real.data_ptr() == a.data_ptr() for a in args if isinstance(a, Tensor))


@ON_ALL
@pytest.mark.parametrize("mix", ["all distinct", "skewed"])
def test_gradients_are_those_of_the_loop(mix: str, name: str) -> None:
    c = case(mix=mix, tokens=3)
    x, y = c.x.double().requires_grad_(), c.y.double().requires_grad_()
    wide = Case(x, y, c.a.double(), c.b.double(), c.rows, c.starts, c.ranks, c.max_rank)
    weight = torch.randn(c.y.shape)
    (by_rows(wide, torch.float64)[1] * weight).sum().backward()
    c.x.requires_grad_(), c.y.requires_grad_()
    h = SHRINK(c.x, c.a, *c.tables(), c.max_rank, 1 if name == TORCH else 2, name)
    (EXPAND(c.y, h, c.b, *c.tables(), None, None, None, False, name) * weight).sum().backward()
    assert x.grad is not None and y.grad is not None and c.x.grad is not None and c.y.grad is not None
    torch.testing.assert_close(c.x.grad.double(), x.grad, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(c.y.grad.double(), y.grad, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(c.x.grad.roll(1, 0).double(), x.grad, rtol=1e-2, atol=1e-2)
    for row, slot in enumerate(c.rows):
        assert bool(c.x.grad[row].any()) == (slot != BASE and c.ranks[0][slot] > 0)


@ON_ALL
def test_gradients_of_h_are_zero_where_nothing_is_specified(name: str) -> None:
    c = case(tokens=2)
    h, truth = columns(c).requires_grad_(), by_rows(c, torch.float64)[0]
    EXPAND(c.y, h, c.b, *c.tables(), None, None, None, False, name).sum().backward()
    assert h.grad is not None and h.grad.shape == h.shape and torch.equal(h.grad[0], h.grad[1])
    assert torch.equal(h.grad[0] != 0, ~truth.isnan())


@ON_ALL
def test_gradients_need_one_slice(name: str) -> None:
    c = case(tokens=2, widths=(9, 4))
    x = c.x.requires_grad_()
    with pytest.raises(NotImplementedError, match="lora_shrink: gradients need one slice"):
        SHRINK(x, c.a, *c.tables(), c.max_rank, 1, name).sum().backward()


@ON_ALL
def test_traced_without_a_break_for_any_mix(name: str) -> None:
    def both(x: Tensor, y: Tensor, tables: tuple[Tensor, ...]) -> Tensor:
        h = SHRINK(x, c.a, *tables, c.max_rank, 1, name)
        return EXPAND(y, h, c.b, *tables, None, None, None, False, name)

    c = case(tokens=2)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(both, fullgraph=True, backend=counter)
    seen = []
    for mix in MIXES:
        other = replace(c, rows=mix_of(mix, len(c.rows), 5))
        seen.append(compiled(c.x, c.y, other.tables()))
        assert torch.equal(seen[-1], run(other, name)[1])
    assert counter.frame_count == 1 and not torch.equal(seen[1], seen[2])


# -- refusals --------------------------------------------------------------------------------------
def _broken(**changes: Any) -> tuple[Any, ...]:
    c = case()
    order, offsets, starts, ranks = c.tables()
    table = {"order": order, "offsets": offsets, "starts": starts, "ranks": ranks, "slices": None, "own": False}
    table |= {"x": c.x, "a": c.a, "max_rank": c.max_rank, "split": 1, "y": c.y, "b": c.b, "h": columns(c, 1)}
    table |= {"scale": torch.ones(5, 51), "bias": None}
    t = table | {key: change(table[key]) for key, change in changes.items()}
    tail = (t["order"], t["offsets"], t["starts"], t["ranks"])
    after = (t["slices"], t["scale"], t["bias"], t["own"])
    return (t["x"], t["a"], *tail, t["max_rank"], t["split"]), (t["y"], t["h"], t["b"], *tail, *after)


TABLES: list[tuple[dict[str, Any], str]] = [
    ({"order": lambda t: t.long()}, "order must be int32"),
    ({"order": lambda t: torch.stack((t, t), 1)[:, 0]}, "order must be int32"),
    ({"offsets": lambda t: t[None]}, "offsets must be int32"),
    ({"offsets": lambda t: t[:-1]}, r"offsets \[S \+ 1\]"),
    ({"starts": lambda t: t[0]}, r"starts must be int32 of 2"),
    ({"ranks": lambda t: t[:, :-1]}, r"starts and ranks must be \[L, S\]"),
    ({"order": lambda t: t[:-1]}, "order must list the 6 rows of the batch, got 5"),
]
BAD_SHRINK: list[tuple[dict[str, Any], str]] = [
    ({"x": lambda t: t[0]}, r"x must be \[R, T, K\]"),
    ({"a": lambda t: t[:, 1:]}, r"x must be \[R, T, K\] and a \[P, K\], got \(6, 7, 37\)"),
    ({"a": lambda t: t.mT.contiguous().mT}, "a's rows must be contiguous"),
    ({"a": lambda t: t.half()}, "x and a must have one dtype, got torch.float32 and torch.float16"),
    ({"max_rank": lambda t: 0}, "max_rank and split must be positive, got 0, 1"),
    ({"split": lambda t: 0}, "max_rank and split must be positive, got 8, 0"),
]
TWICE = {"starts": lambda t: t.repeat(2, 1), "ranks": lambda t: t.repeat(2, 1)}
BAD_EXPAND: list[tuple[dict[str, Any], str]] = [
    ({"y": lambda t: t[0]}, r"y must be \[R, T, N\]"),
    ({"h": lambda t: t[:, :, 1:]}, r"h \[Z, R, T, W\]"),
    ({"h": lambda t: t[0]}, r"h \[Z, R, T, W\]"),
    ({"h": lambda t: t.half()}, "h must be float32 or float64"),
    ({"b": lambda t: t[:, 1:]}, r"without slices b must be \[P, 51\]"),
    ({"b": lambda t: torch.cat((t, t), 1)[:, :51]}, "b must be contiguous"),
    (TWICE, r"without slices .* starts \[1, S\]"),
    ({"slices": lambda t: torch.zeros(1, 3, dtype=torch.int64)}, "slices must be .* L = 1 above 1"),
    ({"slices": lambda t: torch.zeros(3, 3, dtype=torch.int64), **TWICE}, r"slices must be .* L = 2 .* \(3, 3\)"),
    ({"slices": lambda t: torch.zeros(2, 3, dtype=torch.int32), **TWICE}, r"slices must be .* got torch.int32"),
    ({"slices": lambda t: torch.zeros(3, 2, dtype=torch.int64).mT, **TWICE}, "slices must be contiguous"),
    ({"scale": lambda t: t[:-1]}, r"scale must be contiguous \[5, 51\], got \(4, 51\)"),
    ({"scale": lambda t: t.mT.contiguous().mT}, r"scale must be contiguous"),
    ({"bias": lambda t: torch.ones(5, 50)}, r"bias must be contiguous \[5, 51\], got \(5, 50\)"),
]


def test_what_the_refused_arguments_start_from_is_accepted() -> None:
    shrink, expand = _broken()
    assert ops.lora_expand(*expand).shape == expand[0].shape and ops.lora_shrink(*shrink).shape == expand[1].shape


@pytest.mark.parametrize(("changes", "message"), TABLES + BAD_SHRINK)
def test_shrink_refuses(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"lora_shrink: .*{message}"):
        ops.lora_shrink(*_broken(**changes)[0])


@pytest.mark.parametrize(("changes", "message"), TABLES + BAD_EXPAND)
def test_expand_refuses(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"lora_expand: .*{message}"):
        ops.lora_expand(*_broken(**changes)[1])


def test_the_torch_backend_does_not_split() -> None:
    with pytest.raises(ValueError, match="split must be 1, got 2"):
        ops.lora_shrink(*_broken(split=lambda t: 2)[0])


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(ValueError, match=r"backend must be one of .*triton-fixed.*, got 'cuda'"):
        ops.lora_shrink(*_broken()[0], "cuda")
