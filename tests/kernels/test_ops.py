"""lora_shrink, lora_expand and their dense forms against float64 and a loop over rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from hf_multilora.kernels import ops
from hf_multilora.kernels.torch_backend import add_one, expand_gated

K, N, SLOTS, ROWS = 37, 51, 5, 6  # no multiples of a tile
MIXES = {
    "all base": [-1] * ROWS,
    "one": [2] * ROWS,
    "all distinct": [4, 0, 3, 1, 2, -1],
    "skewed": [1, 1, -1, 1, 0, 1],
}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@dataclass
class Case:
    x: Tensor  # [R, T, K]
    y: Tensor  # [R, T, N]
    a: Tensor  # [P, K]
    b: Tensor  # [P, N]
    slots: list[int]
    starts: list[int]
    ranks: list[int]

    def tables(self, slots: Sequence[int] | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """order, offsets, starts, ranks, built row by row."""
        slots = self.slots if slots is None else slots
        order = [row for s in range(SLOTS) for row, own in enumerate(slots) if own == s]
        offsets = [sum(own in range(s) for own in slots) for s in range(SLOTS + 1)]
        order += [row for row, own in enumerate(slots) if own == -1]
        return tuple(torch.tensor(t, dtype=torch.int32) for t in (order, offsets, self.starts, self.ranks))  # type: ignore[return-value]

    def span(self, slot: int) -> slice:
        return slice(self.starts[slot], self.starts[slot] + self.ranks[slot])

    def closed(self, slots: Sequence[int] | None = None) -> Tensor:
        closed = torch.ones(ROWS, self.a.shape[0], dtype=torch.bool)
        for row, slot in enumerate(self.slots if slots is None else slots):
            if slot >= 0:
                closed[row, self.span(slot)] = False
        return closed

    @property
    def max_rank(self) -> int:
        return max(self.ranks)


def case(dtype: torch.dtype = torch.float32, r: int = 8, tokens: int = 7, mix: str = "all distinct") -> Case:
    ranks = [0 if mix == "skewed" else r, 3, r, max(1, r // 2), 1]  # exact; a slot may lack the module
    starts = [5, 5 + r, 9 + r, 9 + 2 * r, 0]  # gaps, and not in the order of slots
    rows = 9 + 3 * r + 2
    x, y = torch.randn(ROWS, tokens, K), torch.randn(ROWS, tokens, N)
    a, b = torch.randn(rows, K) / 4, torch.randn(rows, N) / 4
    return Case(*(t.to(dtype) for t in (x, y, a, b)), MIXES[mix], starts, ranks)


def by_rows(c: Case, dtype: torch.dtype, slots: Sequence[int] | None = None) -> tuple[Tensor, Tensor]:
    """h [R, T, max_rank] in the batch's own order and y + B^T h, row by row in `dtype`."""
    h = torch.zeros(*c.x.shape[:2], c.max_rank, dtype=dtype)
    out = c.y.to(dtype).clone()
    for row, slot in enumerate(c.slots if slots is None else slots):
        if slot >= 0:
            a, b = c.a[c.span(slot)].to(dtype), c.b[c.span(slot)].to(dtype)
            h[row, :, : len(a)] = c.x[row].to(dtype) @ a.T
            out[row] = out[row] + h[row, :, : len(a)] @ b
    return h, out


def within(got: Tensor, c: Case, which: int) -> bool:
    """Error against float64 at most twice that of the same formula in plain torch at the case's dtype, plus a floor."""
    truth, plain = by_rows(c, torch.float64)[which], by_rows(c, c.x.dtype)[which]
    floor = 2 * torch.finfo(c.x.dtype).eps * float(truth.abs().max())
    own = float((plain.double() - truth).abs().max())
    return float((got.double() - truth).abs().max()) <= 2 * own + floor


def grouped(c: Case, slots: Sequence[int] | None = None) -> tuple[Tensor, Tensor]:
    """Both operations; h put back in the batch's order."""
    tables = c.tables(slots)
    h = ops.lora_shrink(c.x, c.a, *tables, c.max_rank)
    back = torch.empty_like(h)
    back[tables[0].long()] = h
    return back, ops.lora_expand(c.y, h, c.b, *tables)


def dense(c: Case, slots: Sequence[int] | None = None) -> Tensor:
    return expand_gated(c.y, torch.matmul(c.x, c.a.T), c.b, c.closed(slots))


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("tokens", [1, 7, 300])
@pytest.mark.parametrize("r", [1, 8, 13, 64])
@pytest.mark.parametrize("dtype", DTYPES)
def test_operations_equal_a_loop_over_rows(dtype: torch.dtype, r: int, tokens: int, mix: str) -> None:
    c = case(dtype, r, tokens, mix)
    h, out = grouped(c)
    assert h.dtype == torch.float32 and within(h, c, 0)
    assert out.dtype == dtype and within(out, c, 1)
    assert within(dense(c), c, 1)
    for row, slot in enumerate(c.slots):
        if slot == -1 or c.ranks[slot] == 0:
            assert torch.equal(out[row], c.y[row]) and not h[row].any()
            assert torch.equal(dense(c)[row], c.y[row])
    if len(set(c.slots)) > 1:
        swapped = c.slots[1:] + c.slots[:1]
        h, out = grouped(c, swapped)
        assert not within(h, c, 0) and not within(out, c, 1) and not within(dense(c, swapped), c, 1)


@pytest.mark.parametrize("shape", [(ROWS, 7), (ROWS,), ()])
@pytest.mark.parametrize("dtype", DTYPES)
def test_add_one_takes_any_shape(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    c = case(dtype, 13)
    span, other = c.span(0), c.span(2)
    index = (0,) * (2 - len(shape))
    x, y = (c.x, c.y) if not index else (c.x[(slice(None), 0)], c.y[(slice(None), 0)])
    x, y = (x[0], y[0]) if len(shape) == 0 else (x, y)
    truth = y.double() + x.double() @ c.a[span].double().T @ c.b[span].double()
    plain = y + x @ c.a[span].T @ c.b[span]
    bound = 2 * float((plain.double() - truth).abs().max())
    bound += 2 * torch.finfo(dtype).eps * float(truth.abs().max())
    got = add_one(y, x, c.a[span], c.b[span])
    assert got.shape == y.shape and float((got.double() - truth).abs().max()) <= bound
    assert float((add_one(y, x, c.a[other], c.b[other]).double() - truth).abs().max()) > bound


def poisoned(c: Case) -> Case:
    used = torch.zeros(c.a.shape[0], dtype=torch.bool)
    for slot in set(c.slots) - {-1}:
        used[c.span(slot)] = True
    assert not used.all()
    a, b = c.a.clone(), c.b.clone()
    a[~used], b[~used] = torch.nan, torch.inf
    return Case(c.x, c.y, a, b, c.slots, c.starts, c.ranks)


@pytest.mark.parametrize("mix", ["all base", "one", "skewed"])
def test_rank_rows_of_nobody_in_the_batch_are_not_read(mix: str) -> None:
    c = case(mix=mix)
    for got, want in zip(grouped(poisoned(c)), grouped(c), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
def test_closed_columns_do_not_reach_the_row(poison: float) -> None:
    c = case()
    h, closed = torch.matmul(c.x, c.a.T), c.closed()
    bad = torch.where(closed[:, None, :], poison, h)
    assert torch.equal(expand_gated(c.y, bad, c.b, closed), dense(c))
    assert not torch.equal(expand_gated(c.y, bad, c.b, c.closed(c.slots[::-1])), dense(c))


def test_inputs_are_left_alone() -> None:
    c = case()
    before = [t.clone() for t in (c.x, c.y, c.a, c.b)]
    grouped(c), dense(c)
    assert all(torch.equal(old, new) for old, new in zip(before, (c.x, c.y, c.a, c.b), strict=True))


def test_strided_input() -> None:
    c = case()
    wide = Case(torch.randn(ROWS, 7, 2 * K)[..., ::2], c.y.mT.contiguous().mT, c.a, c.b, c.slots, c.starts, c.ranks)
    assert not wide.x.is_contiguous() and not wide.y.is_contiguous()
    assert within(grouped(wide)[1], wide, 1) and within(dense(wide), wide, 1)


# -- what torch.compile needs ----------------------------------------------------------------------
def calls(c: Case) -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
    h = torch.randn(*c.x.shape[:2], c.max_rank)
    return {
        "lora_shrink": (torch.ops.hf_multilora.lora_shrink, (c.x, c.a, *c.tables(), c.max_rank)),
        "lora_expand": (torch.ops.hf_multilora.lora_expand, (c.y, h, c.b, *c.tables())),
    }


@pytest.mark.parametrize("name", ["lora_shrink", "lora_expand"])
@pytest.mark.parametrize("needs_grad", [False, True])
def test_opcheck(name: str, needs_grad: bool) -> None:
    op, args = calls(case(r=3, tokens=2))[name]
    torch.library.opcheck(op, (args[0].requires_grad_(needs_grad), *args[1:]))


@pytest.mark.parametrize("name", ["lora_shrink", "lora_expand"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_fakes_promise_what_comes(name: str, dtype: torch.dtype) -> None:
    op, args = calls(case(dtype))[name]
    real = op(*args)
    with torch._subclasses.FakeTensorMode() as mode:
        fake = op(*(mode.from_tensor(a) if isinstance(a, Tensor) else a for a in args))
    assert (fake.shape, fake.dtype, fake.stride()) == (real.shape, real.dtype, real.stride())


def test_gradients_are_those_of_the_loop() -> None:
    c = case()
    x, y = c.x.double().requires_grad_(), c.y.double().requires_grad_()
    c64 = Case(x, y, c.a.double(), c.b.double(), c.slots, c.starts, c.ranks)
    weight = torch.randn(ROWS, 7, N)
    (by_rows(c64, torch.float64)[1] * weight).sum().backward()
    c.x.requires_grad_(), c.y.requires_grad_()
    h = torch.ops.hf_multilora.lora_shrink(c.x, c.a, *c.tables(), c.max_rank)
    out = torch.ops.hf_multilora.lora_expand(c.y, h, c.b, *c.tables())
    (out * weight).sum().backward()
    torch.testing.assert_close(c.x.grad.double(), x.grad, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(c.y.grad.double(), y.grad, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(c.x.grad.roll(1, 0).double(), x.grad, rtol=1e-2, atol=1e-2)


def test_traced_without_a_break_for_any_mix() -> None:
    def both(x: Tensor, y: Tensor, tables: tuple[Tensor, ...]) -> Tensor:
        h = torch.ops.hf_multilora.lora_shrink(x, c.a, *tables, c.max_rank)
        return torch.ops.hf_multilora.lora_expand(y, h, c.b, *tables)

    c = case()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(both, fullgraph=True, backend=counter)
    for slots in MIXES.values():
        assert torch.equal(compiled(c.x, c.y, c.tables(slots)), grouped(c, slots)[1])
    assert counter.frame_count == 1


# -- refusals --------------------------------------------------------------------------------------
def _broken(**changes: Any) -> tuple[Any, ...]:
    c = case()
    order, offsets, starts, ranks = c.tables()
    table = {"order": order, "offsets": offsets, "starts": starts, "ranks": ranks}
    table |= {"x": c.x, "a": c.a, "max_rank": c.max_rank, "y": c.y, "b": c.b, "h": torch.zeros(ROWS, 7, c.max_rank)}
    t = table | {key: change(table[key]) for key, change in changes.items()}
    tail = (t["order"], t["offsets"], t["starts"], t["ranks"])
    return (t["x"], t["a"], *tail, t["max_rank"]), (t["y"], t["h"], t["b"], *tail)


TABLES = [
    ({"order": lambda t: t.long()}, "order must be int32"),
    ({"offsets": lambda t: t[None]}, "offsets must be int32"),
    ({"offsets": lambda t: t[:-1]}, r"offsets \[S \+ 1\]"),
    ({"starts": lambda t: t[:-1]}, r"starts and ranks must be \[S\]"),
    ({"order": lambda t: t[:-1]}, "order must list the 6 rows"),
]
SHRINK = [
    ({"x": lambda t: t[0]}, r"x must be \[R, T, K\]"),
    ({"a": lambda t: t[:, 1:]}, r"x must be \[R, T, K\] and a \[P, K\]"),
    ({"a": lambda t: t.half()}, "one dtype"),
    ({"max_rank": lambda t: 0}, "max_rank must be at least 1"),
]
EXPAND = [
    ({"y": lambda t: t[0]}, r"y must be \[R, T, N\]"),
    ({"h": lambda t: t[:, 1:]}, r"h \[R, T, max_rank\]"),
    ({"b": lambda t: t[:, 1:]}, r"b must be \[P, 51\]"),
    ({"h": lambda t: t.half()}, "h must be float32 or float64"),
]


@pytest.mark.parametrize(("changes", "message"), TABLES + SHRINK)
def test_shrink_refuses(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"lora_shrink: .*{message}"):
        ops.lora_shrink(*_broken(**changes)[0])


@pytest.mark.parametrize(("changes", "message"), TABLES + EXPAND)
def test_expand_refuses(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"lora_expand: .*{message}"):
        ops.lora_expand(*_broken(**changes)[1])
