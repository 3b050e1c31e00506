"""What holds for every backend and case. Each check has a control that a wrong kernel would not pass."""

from __future__ import annotations

import math
from dataclasses import fields, replace

import torch
from torch import Tensor

from hf_multilora.kernels.backends import TORCH, TRITON_FIXED, backend
from hf_multilora.kernels.torch_backend import expand_gated
from tests.kernels.suite import BASE, Case, by_rows, closed, joined, nan_filled, run, run_own, within


def others(c: Case) -> list[int]:
    """The slots permuted: -1 becomes 0, 0 becomes 1, ..., the last one -1."""
    return [(slot + 2) % (len(c.starts[0]) + 1) - 1 for slot in c.rows]


def check_numbers(c: Case, name: str, split: int = 1, own: bool = True) -> None:
    """h, output and the output from all columns, against float64; against permuted slots each must fail."""
    h, out = run(c, name, split=split)
    check_answers(c, h, [out, run_own(c, name)] if own else [out])


def check_answers(c: Case, h: Tensor, outs: list[Tensor]) -> None:
    """The same of answers that are there."""
    wide = torch.promote_types(c.x.dtype, torch.float32)
    truth, at_x, at_y = by_rows(c, torch.float64), by_rows(c, c.x.dtype)[0], by_rows(c, c.y.dtype)[1]
    wrong, wrong_x, wrong_y = (by_rows(c, dtype, others(c)) for dtype in (torch.float64, c.x.dtype, c.y.dtype))
    assert h.dtype == wide and h.shape == truth[0].shape
    assert within(h, truth[0], at_x)
    both = wrong[0].masked_fill(truth[0].isnan(), torch.nan)  # where h is specified for either
    assert both.isnan().all() or not within(h, both, wrong_x[0])
    for got in outs:
        assert got.dtype == c.y.dtype and got.shape == c.y.shape and got.is_contiguous()
        assert within(got, truth[1], at_y)
        assert not within(got, wrong[1], wrong_y[1])
    for row, slot in enumerate(c.rows):
        if slot == BASE or not list(c.parts(slot)):
            assert all(torch.equal(got[row], c.y[row]) for got in outs), "base rows come back bitwise"


def equal(got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> bool:
    """Bitwise, and NaN where NaN is wanted."""
    return all(torch.equal(g.nan_to_num(7.5), w.nan_to_num(7.5)) for g, w in zip(got, want, strict=True))


def answers(c: Case, name: str, split: int = 1, own: bool = True) -> tuple[Tensor, ...]:
    """(h where specified, output, output from all columns)."""
    h, out = run(c, name, split=split)
    h = h.masked_fill(by_rows(c, torch.float64)[0].isnan(), 0)
    return (h, out, run_own(c, name)) if own else (h, out)


def poisoned(c: Case) -> Case:
    """NaN and Inf in all that no row of the batch reads: rank rows, scales and biases of others, x of base rows."""
    x, a, b = c.x.clone(), torch.full_like(c.a, torch.nan), torch.full_like(c.b, torch.inf)
    tables = {name: torch.full_like(t, torch.nan) for name in ("scale", "bias") if (t := getattr(c, name)) is not None}
    for slot in c.used():
        for _, columns, _, rank_rows, flat in c.parts(slot):
            a[rank_rows], b.view(-1)[flat] = c.a[rank_rows], c.b.view(-1)[flat]
            for name, table in tables.items():
                table[slot, columns] = getattr(c, name)[slot, columns]
    for row, slot in enumerate(c.rows):
        if slot == BASE:
            x[row] = torch.nan
    return replace(c, x=x, a=a, b=b, **tables)


def check_unspecified(c: Case, name: str, own: bool = True) -> None:
    """Poison in what no row reads changes nothing; in what one row reads, that row alone."""
    bad, clean = poisoned(c), answers(c, name, own=own)
    assert bad.a.isnan().any()
    h, out = run(bad, name)
    assert equal((h.masked_fill(by_rows(c, torch.float64)[0].isnan(), 0), out), clean[:2])
    assert not out.isnan().any()
    if own:
        for poison in (torch.nan, torch.inf, -torch.inf):
            # h itself is that of the clean rank rows: run_own poisons the columns of others
            assert equal(
                (run_own(replace(c, b=bad.b, scale=bad.scale, bias=bad.bias), name, poison=poison),), clean[2:]
            )
    sick = [row for row, slot in enumerate(c.rows) if slot != BASE and list(c.parts(slot))][:1]
    for row in sick:
        x = c.x.clone()
        x[row] = torch.nan
        out = run(replace(c, x=x), name)[1]
        assert out[row].isnan().any(), "what a row does read must be noticed"
        rest = [other for other in range(len(c.rows)) if other != row]
        assert torch.equal(out[rest], clean[1][rest])


def check_twice(c: Case, name: str, split: int = 1) -> None:
    """The same answer bitwise from a second run, other memory and poisoned memory; inputs are left alone."""
    tensors = {f.name: getattr(c, f.name) for f in fields(c) if isinstance(getattr(c, f.name), Tensor)}
    tables, before = c.tables(), {key: tensor.clone() for key, tensor in tensors.items()}
    kept = [table.clone() for table in tables]
    first, again = run(c, name, tables, split), run(c, name, tables, split)
    assert equal(first, again)
    kernels, count = backend(name), 1 if name == TORCH else split
    h = kernels.shrink(c.x, c.a, *tables, c.max_rank, count)
    assert torch.equal(joined(c, kernels.expand(c.y, h, c.b, *tables, **c.extras())), first[1])
    with nan_filled() as made:
        kernels.expand(c.y, kernels.shrink(c.x, c.a, *tables, c.max_rank, count), c.b, *tables, **c.extras())
    assert len(made) >= 2 or name == TORCH, "this test must fill what the kernels write"
    assert all(torch.equal(tensors[key], before[key]) for key in tensors)
    assert all(torch.equal(old, new) for old, new in zip(kept, tables, strict=True))


def check_chosen_split(c: Case, name: str) -> None:
    """What a layer calls: the backend itself, which chooses the split."""
    kernels, tables = backend(name), c.tables()
    out = joined(c, kernels.expand(c.y, kernels.shrink(c.x, c.a, *tables, c.max_rank), c.b, *tables, **c.extras()))
    assert within(out, by_rows(c, torch.float64)[1], by_rows(c, c.y.dtype)[1])
    assert not within(out.roll(1, 0), by_rows(c, torch.float64)[1], by_rows(c, c.y.dtype)[1])


def check_reuse(c: Case, name: str) -> None:
    """Slots change tenants: tables and rank rows are rewritten in place, as eviction and compaction do."""
    c = replace(c, a=c.a.clone(), b=c.b.clone())
    tables, slots = c.tables(), len(c.starts[0])
    before = run(c, name, tables)[1]
    assert within(before, by_rows(c, torch.float64)[1], by_rows(c, c.y.dtype)[1])
    moved = replace(
        c,
        starts=[of[1:] + of[:1] for of in c.starts],  # each slot gets the rank rows of the next: other place, other r
        ranks=[of[1:] + of[:1] for of in c.ranks],
        rows=[BASE if slot == 0 else slot for slot in c.rows],  # slot 0 was evicted
    )
    a, b = torch.randn_like(c.a.float()) / 4, torch.randn_like(c.b.float()) / 4
    c.a.copy_(a), c.b.copy_(b)
    assert slots > 1 and moved.rows != c.rows
    for old, new in zip(tables, moved.tables(), strict=True):
        old.copy_(new)
    truth, plain = by_rows(moved, torch.float64)[1], by_rows(moved, c.y.dtype)[1]
    assert within(run(moved, name, tables)[1], truth, plain)
    assert not within(before, truth, plain)


def alone(c: Case, row: int, tokens: int, bound: int) -> Case:
    """That row in a batch of its own, padded to so many tokens, its adapter in a pool of its own."""
    slot, padding = c.rows[row], tokens - c.x.shape[1]
    x, y = (torch.nn.functional.pad(t[row : row + 1], (0, 0, 0, padding), value=3.0) for t in (c.x, c.y))
    if slot == BASE:
        return replace(c, x=x, y=y, rows=[BASE], max_rank=bound)
    starts, ranks = ([[of[slot]] for of in table] for table in (c.starts, c.ranks))
    scale, bias = (None if t is None else t[slot : slot + 1].contiguous() for t in (c.scale, c.bias))
    return replace(c, x=x, y=y, rows=[0], starts=starts, ranks=ranks, max_rank=bound, scale=scale, bias=bias)


def fixed(c: Case, rows: list[int] | None = None) -> tuple[Tensor, Tensor]:
    """h [Z, R, T, L * max_rank] and output as a layer gets them, by the split that the backend chooses."""
    kernels, tables = backend(TRITON_FIXED), c.tables(rows)
    with nan_filled():
        h = kernels.shrink(c.x, c.a, *tables, c.max_rank)
        return h, joined(c, kernels.expand(c.y, h, c.b, *tables, **c.extras()))


def check_fixed(c: Case) -> None:
    """triton-fixed: a row's answer is bitwise the same alone, padded, among other rows and residents."""
    tokens, many = c.x.shape[1], fixed(c)
    reordered = [*range(len(c.rows))][::-1]
    turned = replace(c, x=c.x[reordered], y=c.y[reordered], rows=[c.rows[row] for row in reordered])
    back = fixed(turned)
    for row, slot in enumerate(c.rows):
        for longer, bound in ((0, c.max_rank), (math.ceil(tokens / 2) + 17, 2 * c.max_rank + 3)):
            one = alone(c, row, tokens + longer, bound)
            h, out = fixed(one)
            assert torch.equal(out[0, :tokens], many[1][row])
            for piece, _, own, _, _ in c.parts(slot) if slot != BASE else ():
                mine = slice(piece * bound, piece * bound + own.stop - own.start)
                assert torch.equal(h[:, 0, :tokens, mine], many[0][:, row][..., own])
        assert torch.equal(back[1][reordered.index(row)], many[1][row])
        assert row == 0 or not torch.equal(many[1][row], many[1][0])
    assert not torch.equal(fixed(c, others(c))[1], many[1])


def check_expand_gated(c: Case) -> None:
    """The dense form of the torch backend: one matmul, closed columns replaced."""
    truth, plain = by_rows(c, torch.float64)[1], by_rows(c, c.y.dtype)[1]
    y, h = c.y, torch.matmul(c.x, c.a.T)
    got = expand_gated(y, h, c.b, closed(c))
    assert within(got, truth, plain)
    assert not within(expand_gated(y, h, c.b, closed(c, others(c))), truth, plain)
    for poison in (torch.nan, torch.inf, -torch.inf):
        assert torch.equal(expand_gated(y, torch.where(closed(c)[:, None], poison, h), c.b, closed(c)), got)
    for row, slot in enumerate(c.rows):
        if slot == BASE:
            assert torch.equal(got[row], y[row])
