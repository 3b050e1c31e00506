"""The operations for experts' LoRA as registered ones, their gradients, and refusals."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from hf_multilora.kernels import ops_experts as ops
from hf_multilora.kernels import torch_experts
from hf_multilora.kernels.backends import TORCH, TRITON, backend
from tests.kernels.experts_suite import Case, by_pairs, by_tokens, case, poisoned_h, rotated, run
from tests.kernels.suite import BACKENDS, INTERPRETED

ON_ALL = pytest.mark.parametrize("name", BACKENDS[:2])  # triton-fixed has the same registration
NAMES = ("experts_shrink", "experts_expand", "experts_combine")


def calls(c: Case, name: str) -> dict[str, tuple[Any, tuple[Any, ...]]]:
    """The arguments of each operation, all in their places."""
    begins, ranks, keys, source = c.tables()
    h, op = torch.randn(len(c.keys), c.max_rank), torch.ops.hf_multilora
    places, weights = torch.randperm(len(c.y))[:24].view(8, 3), torch.rand(8, 3)
    return {
        "experts_shrink": (op.experts_shrink, (c.x, c.a, begins, ranks, keys, source, c.max_rank, name)),
        "experts_expand": (op.experts_expand, (c.y.clone(), h, c.b, begins, ranks, keys, None, c.first, name)),
        "experts_combine": (op.experts_combine, (c.y, places, weights, torch.bfloat16, name)),
    }


@ON_ALL
@pytest.mark.parametrize("form", NAMES)
def test_opcheck(form: str, name: str) -> None:
    """Ranks are all max_rank: opcheck compares runs, so all of h must be specified."""
    op, args = calls(case(ranks=(3,), n=26, m=9, first=2, extra=3), name)[form]
    torch.library.opcheck(op, args)


@ON_ALL
@pytest.mark.parametrize("form", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_fakes_promise_what_comes(form: str, dtype: torch.dtype, name: str) -> None:
    op, args = calls(case(dtype), name)[form]
    real = op(*args)
    with torch._subclasses.FakeTensorMode() as mode:
        fake = op(*(mode.from_tensor(a) if isinstance(a, Tensor) else a for a in args))
    if form == "experts_expand":
        assert real is None and fake is None
        return
    assert (fake.shape, fake.dtype, fake.stride()) == (real.shape, real.dtype, real.stride())


def layer(c: Case, name: str) -> Callable[..., Tensor]:
    """What a layer does with one projection; the routed sum takes the pairs two by two."""
    kernels = backend(name)

    def forward(x: Tensor, y: Tensor, weights: Tensor, tables: tuple[Tensor, ...]) -> Tensor:
        begins, ranks, keys, source = tables
        h = ops.shrink(kernels, x, c.a, begins, ranks, keys, source, c.max_rank)
        y = ops.expand(kernels, y + 1, h, c.b, begins, ranks, keys, None, c.first)
        places = torch.arange(y.shape[0], device=y.device).view(-1, 2)
        return ops.combine(kernels, y, places, weights, torch.float32)

    return forward


@ON_ALL
def test_traced_without_a_break_for_any_keys(name: str) -> None:
    c = case(m=9, first=2, extra=3)
    counter, weights, forward = CompileCounterWithBackend("aot_eager"), torch.rand(20, 2), layer(c, name)
    compiled, seen = torch.compile(forward, fullgraph=True, backend=counter), []
    for keys in (c.keys, rotated(c), c.keys[::-1]):
        now = replace(c, keys=keys)
        y = c.y.clone()
        with torch.no_grad():
            seen.append(compiled(c.x, y, weights, now.tables()))
        assert torch.equal(y, c.y)
        want = by_tokens(by_pairs(replace(now, y=c.y + 1), torch.float64)[1], torch.arange(40).view(20, 2), weights,
                         torch.float64)  # fmt: skip
        torch.testing.assert_close(seen[-1].double(), want, rtol=1e-4, atol=1e-4)
    assert counter.frame_count == 1 and not torch.allclose(seen[0], seen[1], rtol=1e-2, atol=1e-2)


@INTERPRETED
def test_a_traced_expand_writes_in_place() -> None:
    c = case()
    begins, ranks, keys, _ = c.tables()
    h, kernels = torch.randn(len(c.keys), c.max_rank), backend(TRITON)

    def both(y: Tensor) -> Tensor:
        return ops.expand(kernels, y, h, c.b, begins, ranks, keys, None, 0) * 2

    with torch.no_grad():
        y, z = c.y.clone(), c.y.clone()
        doubled = torch.compile(both, fullgraph=True, backend="aot_eager")(y)
        ops.experts_expand(z, h, c.b, begins, ranks, keys, None, 0, TRITON)
    assert torch.equal(y, z) and torch.equal(doubled, 2 * z) and not torch.equal(y, c.y)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("traced", [False, True], ids=["eager", "traced"])
@pytest.mark.parametrize("order", ["sorted", "shuffled", "no adapter"])
def test_gradients_are_those_of_the_loop(order: str, traced: bool, name: str) -> None:
    """Of x, y and the weights, whatever the backend, with an overflow in rank rows that nobody reads."""
    c = case(order=order, m=9, first=2, extra=3)
    read = {row for pair in range(40) for row in range(*c.own(pair).indices(len(c.a)))}
    unread = [row for row in range(len(c.a)) if row not in read]
    c.a[unread], c.b[unread] = torch.inf, torch.inf
    inputs = [c.x, c.y, torch.rand(20, 2)]
    wide = [t.double().requires_grad_() for t in inputs]
    inputs = [t.clone().requires_grad_() for t in inputs]
    toward = torch.randn(20, c.y.shape[1])
    many = replace(c, x=wide[0], y=wide[1] + 1, a=c.a.double(), b=c.b.double())
    (
        by_tokens(by_pairs(many, torch.float64)[1], torch.arange(40).view(20, 2), wide[2], torch.float64) * toward
    ).sum().backward()
    forward = layer(c, name)
    forward = torch.compile(forward, fullgraph=True, backend="aot_eager") if traced else forward
    (forward(*inputs, c.tables()) * toward).sum().backward()
    for got, want in zip(inputs, wide, strict=True):
        if want.grad is None:  # x, where no pair reads it
            assert order == "no adapter" and (got.grad is None or not got.grad.any())
            continue
        assert got.grad is not None
        torch.testing.assert_close(got.grad.double(), want.grad, rtol=1e-4, atol=1e-4)
        assert not torch.allclose(got.grad.roll(1, 0).double(), want.grad, rtol=1e-2, atol=1e-2)


def test_the_torch_expand_is_in_place_but_for_gradients() -> None:
    c = case()
    begins, ranks, keys, _ = c.tables()
    h = torch.randn(40, c.max_rank)
    y = c.y.clone()
    assert torch_experts.expand(y, h, c.b, begins, ranks, keys, None, 0) is y
    leaf = c.y.clone().requires_grad_()
    out = torch_experts.expand(leaf, h, c.b, begins, ranks, keys, None, 0)
    assert torch.equal(out, y) and torch.equal(leaf, c.y)


@INTERPRETED
def test_triton_refuses_gradients() -> None:
    c = case()
    with pytest.raises(NotImplementedError, match="no gradients; call it through ops_experts"):
        backend(TRITON).experts_shrink(c.x.requires_grad_(), c.a, *c.tables(), c.max_rank)


@ON_ALL
def test_autocast_changes_nothing(name: str) -> None:
    c = case()
    clean = run(c, name)
    with torch.autocast("cpu", torch.bfloat16):
        again = run(c, name)
    assert torch.equal(clean[1], again[1])
    assert torch.equal(poisoned_h(c, clean[0]).nan_to_num(0), poisoned_h(c, again[0]).nan_to_num(0))


# -- refusals --------------------------------------------------------------------------------------
def _broken(**changes: Any) -> dict[str, tuple[Any, ...]]:
    c = case()
    table: dict[str, Any] = dict(zip(("begins", "ranks", "keys", "source"), c.tables(), strict=True))
    table |= {"x": c.x, "a": c.a, "max_rank": c.max_rank, "y": c.y, "b": c.b, "h": torch.zeros(40, c.max_rank)}
    table |= {"first": 0, "places": torch.zeros(8, 3, dtype=torch.int64), "weights": torch.zeros(8, 3)}
    t = table | {key: change(table[key]) for key, change in changes.items()}
    tables = tuple(t[key] for key in ("begins", "ranks", "keys", "source"))
    return {
        "experts_shrink": (t["x"], t["a"], *tables, t["max_rank"]),
        "experts_expand": (t["y"], t["h"], t["b"], *tables, t["first"]),
        "experts_combine": (t["y"], t["places"], t["weights"], torch.float32),
    }


BOTH = NAMES[:2]
REFUSED: list[tuple[tuple[str, ...], dict[str, Any], str]] = [
    (BOTH, {"keys": lambda t: t.long()}, "keys must be contiguous int32 of 1 dimension, got torch.int64"),
    (BOTH, {"begins": lambda t: t[::2]}, "begins must be contiguous int32"),
    (BOTH, {"ranks": lambda t: t[None]}, "ranks must be contiguous int32 of 1"),
    (BOTH, {"ranks": lambda t: t[:-1]}, r"begins and ranks must be \[G\], got \(12,\) and \(11,\)"),
    (BOTH, {"source": lambda t: torch.zeros(39, dtype=torch.int64)}, "source must be .* got .* \\(39,\\)"),
    (BOTH, {"source": lambda t: torch.zeros(40)}, "source must be contiguous int32 or int64"),
    (NAMES[:1], {"x": lambda t: t[:, 1:]}, r"x must be \[m, K\] and a \[P, K\], got \(40, 36\)"),
    (NAMES[:1], {"x": lambda t: t[:-1]}, "x must have a row for each of 40 pairs, got 39"),
    (NAMES[:1], {"a": lambda t: t.half()}, "x and a must have one dtype, got torch.float32 and torch.float16"),
    (NAMES[:1], {"a": lambda t: t.mT.contiguous().mT}, "a must be contiguous"),
    (NAMES[:1], {"max_rank": lambda t: 0}, "max_rank must be positive, got 0"),
    (NAMES[1:2], {"first": lambda t: 1}, r"Y at least 1 \+ N"),
    (NAMES[1:2], {"first": lambda t: -1}, r"Y at least -1 \+ N"),
    (NAMES[1:2], {"y": lambda t: t.mT.contiguous().mT}, "y's rows must be contiguous"),
    (NAMES[1:2], {"y": lambda t: t[:-1]}, "must have a row for each of 40 pairs, got 39 and 40"),
    (NAMES[1:2], {"h": lambda t: t[:-1]}, "must have a row for each of 40 pairs, got 40 and 39"),
    (NAMES[1:2], {"h": lambda t: t.half()}, "h must be contiguous float32 or float64"),
    (NAMES[1:2], {"b": lambda t: t[:, ::2]}, "b must be contiguous"),
    (NAMES[2:], {"places": lambda t: t[:-1]}, r"places must be .* \[T, C\] and weights \[T, C\], got .*\(7, 3\)"),
    (NAMES[2:], {"places": lambda t: t.float()}, "places must be contiguous int32 or int64"),
    (NAMES[2:], {"y": lambda t: t[0]}, r"y must be \[n, H\], got \(51,\)"),
]


@pytest.mark.parametrize(("names", "changes", "message"), REFUSED)
def test_refused(names: tuple[str, ...], changes: dict[str, Any], message: str) -> None:
    for name in names:
        getattr(ops, name)(*_broken()[name])  # what it starts from is accepted
        with pytest.raises(ValueError, match=f"{name}: .*{message}"):
            getattr(ops, name)(*_broken(**changes)[name])


@INTERPRETED
def test_float64_needs_torch() -> None:
    c = case(torch.float64)
    with pytest.raises(ValueError, match="experts_shrink: float64 needs the torch backend, got 'triton'"):
        ops.experts_shrink(c.x, c.a, *c.tables(), c.max_rank, TRITON)
    assert ops.experts_shrink(c.x, c.a, *c.tables(), c.max_rank, TORCH).dtype == torch.float64
