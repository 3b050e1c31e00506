"""What holds for every backend and case of experts' LoRA. Each check has a control that a wrong kernel fails."""

from __future__ import annotations

from dataclasses import replace

import torch

from hf_multilora.kernels import ops_experts as ops
from hf_multilora.kernels.backends import TRITON_FIXED
from tests.kernels.experts_suite import Case, by_pairs, by_tokens, poisoned_h, rotated, run, specified
from tests.kernels.suite import nan_filled, within


def check_numbers(c: Case, name: str) -> None:
    """h and output against float64; against rotated keys each must fail."""
    wide = torch.promote_types(c.x.dtype, torch.float32)
    truth, at_x, at_y = by_pairs(c, torch.float64), by_pairs(c, c.x.dtype)[0], by_pairs(c, c.y.dtype)[1]
    h, out = run(c, name)
    assert h.dtype == wide and h.shape == truth[0].shape
    assert within(h, truth[0], at_x)
    assert within(out, truth[1], at_y)
    moved = rotated(c)
    if any(c.ranks[key] for key in (*c.keys, *moved)) and len(c.ranks) > 1:
        wrong, wrong_h, wrong_y = (by_pairs(c, dtype, moved) for dtype in (torch.float64, c.x.dtype, c.y.dtype))
        both = wrong[0].masked_fill(truth[0].isnan(), torch.nan)  # where h is specified for either
        assert both.isnan().all() or not within(h, both, wrong_h[0])
        assert not within(out, wrong[1], wrong_y[1])
    for pair, key in enumerate(c.keys):
        if not c.ranks[key]:
            assert torch.equal(out[pair], c.y[pair]), "pairs without an adapter keep their bits"
    left, right = c.first, c.first + c.b.shape[1]
    assert torch.equal(out[:, :left], c.y[:, :left]) and torch.equal(out[:, right:], c.y[:, right:])


def check_source_of_h(c: Case, name: str) -> None:
    """The expand may read h through a source map of its own."""
    n = len(c.keys)
    begins, ranks, keys, _ = c.tables()
    turn = [(pair * 7 + 3) % n for pair in range(n)]
    place = [turn.index(pair) for pair in range(n)] if len(set(turn)) == n else list(range(n))
    h = poisoned_h(c, run(c, name)[0])
    for index in (torch.int32, torch.int64):
        at = torch.tensor(place, dtype=index, device=h.device)
        mixed = torch.empty_like(h)
        mixed[at.long()] = h
        direct, mapped = c.y.clone(), c.y.clone()
        ops.experts_expand(direct, h, c.b, begins, ranks, keys, None, c.first, name)
        ops.experts_expand(mapped, mixed, c.b, begins, ranks, keys, at, c.first, name)
        assert torch.equal(direct, mapped) and not torch.equal(mapped, c.y)


def check_unread(c: Case, name: str) -> None:
    """Poison in rank rows, rows of x and rows of y that nobody reads changes nothing; what is read is noticed."""
    clean_h, clean = run(c, name)
    read = {row for pair in range(len(c.keys)) for row in range(*c.own(pair).indices(len(c.a)))}
    unread = [row for row in range(len(c.a)) if row not in read]
    for poison in (torch.nan, torch.inf, -torch.inf):
        a, b, x, y = c.a.clone(), c.b.clone(), c.x.clone(), c.y.clone()
        a[unread], b[unread] = poison, poison
        used = {c.row(pair) for pair, key in enumerate(c.keys) if c.ranks[key]}
        x[[row for row in range(len(x)) if row not in used]] = poison
        bare = [pair for pair, key in enumerate(c.keys) if not c.ranks[key]]
        y[bare] = poison
        h, out = run(replace(c, a=a, b=b, x=x, y=y), name)
        assert unread and torch.equal(specified(c, h), specified(c, clean_h))
        some = [pair for pair in range(len(c.keys)) if pair not in bare]
        assert torch.equal(out[some], clean[some])
        assert torch.equal(out[bare].nan_to_num(7.5), y[bare].nan_to_num(7.5))
    sick = next((pair for pair, key in enumerate(c.keys) if c.ranks[key]), None)
    if sick is not None:
        x = c.x.clone()
        x[c.row(sick)] = torch.nan
        out = run(replace(c, x=x), name)[1]
        assert out[sick].isnan().any(), "what a pair does read must be noticed"
        rest = [pair for pair in range(len(c.keys)) if c.row(pair) != c.row(sick)]
        assert torch.equal(out[rest], clean[rest])


def check_twice(c: Case, name: str) -> None:
    """Bit for bit the same a second time; inputs are left alone."""
    before = [t.clone() for t in (c.x, c.a, c.b, c.y)]
    first, again = run(c, name), run(c, name)
    assert torch.equal(specified(c, first[0]), specified(c, again[0])) and torch.equal(first[1], again[1])
    assert all(torch.equal(old, new) for old, new in zip(before, (c.x, c.a, c.b, c.y), strict=True))


def check_fixed(c: Case) -> None:
    """triton-fixed: a pair alone, in reverse and under a higher bound gives bit for bit what it gives in the batch."""
    n = len(c.keys)
    h, out = run(c, TRITON_FIXED)
    back = run(c.only(list(range(n))[::-1]), TRITON_FIXED)
    assert torch.equal(specified(c, back[0].flip(0)), specified(c, h)) and torch.equal(back[1].flip(0), out)
    for pair in {0, 1, n // 3, n - 1} & set(range(n)):
        alone = replace(c.only([pair]), max_rank=2 * c.max_rank + 3)
        own_h, own = run(alone, TRITON_FIXED)
        r = c.ranks[c.keys[pair]]
        assert torch.equal(own_h[0, :r], h[pair, :r]) and torch.equal(own[0], out[pair])
    assert not torch.equal(run(replace(c, keys=rotated(c)), TRITON_FIXED)[1], out)


def check_combine(
    dtype: torch.dtype, name: str, *, tokens: int = 9, choices: int = 3, width: int = 70, device: str = "cpu",
    index: torch.dtype = torch.int64, out_dtype: torch.dtype | None = None, weights_dtype: torch.dtype | None = None,
) -> None:  # fmt: skip
    out_dtype, weights_dtype = out_dtype or dtype, weights_dtype or dtype
    y = torch.randn(tokens * choices, width, device=device).to(dtype)
    places = torch.randperm(tokens * choices, device=device).view(tokens, choices).to(index)
    weights = torch.rand(tokens, choices, device=device).to(weights_dtype)
    with nan_filled():
        out = ops.experts_combine(y, places, weights, out_dtype, name)
    assert out.dtype == out_dtype and out.shape == (tokens, width)
    truth, plain = (by_tokens(y, places, weights, wide) for wide in (torch.float64, out_dtype))
    assert within(out, truth, plain)
    if tokens * choices > 1:
        other = places.flatten().roll(1).view_as(places)
        assert not within(out, *(by_tokens(y, other, weights, wide) for wide in (torch.float64, out_dtype)))
