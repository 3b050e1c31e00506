"""Mixed rows by one batched product with copies of their own A and B: chunks of rows, other slots' rows, hooks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from hf_multilora import layers
from hf_multilora.pool import BASE, Layout, RowTables
from tests.layers.bed import ROWS, SLOTS, Bed, K, N, check, linear

TOKENS = 30  # above the gated paths' tokens


def chunks(spans: dict[int, tuple[int, int]], slots: list[int]) -> tuple[Tensor, Tensor | None]:
    layout, table = Layout(16, 16, SLOTS, torch.device("cpu")), RowTables(len(slots), SLOTS, torch.device("cpu"))
    layout.take(spans)
    for rows in ([BASE] * len(slots), slots):  # what was made for other rows is not kept
        table.row_slots.copy_(torch.tensor(rows))
        layout.write(table, frozenset(rows))
        found = layout.chunks()
    assert layout.chunks() is found
    return found


@pytest.mark.parametrize(
    ("slots", "rows", "shut"),
    [
        ([0, 1, 0, 1], [[0, 1], [4, 5], [0, 1], [4, 5]], None),
        ([0, 0, 1, 1], [[0, 1], [4, 5]], None),
        ([0, 0, 0, 0, 1, 1], [[0, 1], [0, 1], [4, 5]], None),  # four and two: chunks of two
        ([1, 1, 1, 0, 0], [[4, 5], [4, 5], [4, 5], [0, 1], [0, 1]], None),
        ([2, 2, 0, 0], [[15, 15], [0, 1]], [[False, True], [False, False]]),  # nothing lies behind rank row 15
        ([2, 2], [[15]], None),
        ([BASE, 0], [[0, 1], [0, 1]], [[True, True], [False, False]]),
    ],
)
def test_chunks(slots: list[int], rows: list[list[int]], shut: list[list[bool]] | None) -> None:
    found, closed = chunks({0: (0, 2), 1: (4, 2), 2: (15, 1)}, slots)
    assert found.tolist() == rows
    assert (None if closed is None else closed.tolist()) == shut


@pytest.mark.parametrize("work", [1 << 22, 0], ids=["each", "grouped"])
@pytest.mark.parametrize("rows", [ROWS, [0, 0, 1, 1], [2, 1, 1, 1], [BASE, 2, 0, BASE]])
@torch.no_grad()
def test_both_ways_give_the_same(rows: list[int], work: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ways: list[str] = []
    for name in ("add_each", "_grouped"):
        plain = getattr(layers.linear, name)
        monkeypatch.setattr(layers.linear, name, lambda *a, plain=plain, name=name: (ways.append(name), plain(*a))[1])
    monkeypatch.setattr(layers.linear, "EACH_WORK", work)
    module, x = linear(), torch.randn(4, TOKENS, K)
    base = module(x).double()
    bed = Bed(module)
    got = bed(x, rows)
    want = base + bed.delta(x, rows)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(got.roll(1, 0).double(), want, rtol=0.1, atol=0.1)
    assert ways == ["add_each" if work else "_grouped"]
    for row, slot in enumerate(rows):
        if slot == BASE:
            assert torch.equal(got[row].double(), base[row])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.no_grad()
def test_sums_are_in_float32_and_rounded_once(dtype: torch.dtype) -> None:
    module, x = linear().to(dtype), torch.randn(4, TOKENS, K).to(dtype)
    base = module(x)
    bed = Bed(module, dtype=dtype)
    want = (base.double() + bed.delta(x)).to(dtype)
    got = bed(x)
    assert got.dtype == dtype
    off = (got - want).abs() > torch.finfo(dtype).eps * want.abs()
    assert off.sum() == 0 and (got.roll(1, 0) != want).float().mean() > 0.5


@torch.no_grad()
def test_an_overflow_in_rows_of_another_slot_stays_there() -> None:
    bed, x = Bed(linear()), torch.randn(4, TOKENS, K)
    want = bed(x)
    for slots in (bed.slots.a, bed.slots.b):
        slots[bed.slots.rows.spans[1][0]] = torch.inf  # the row behind those of slot 0, which has fewer than the widest
    got = bed(x)
    others = [0, 1, 3]
    assert torch.equal(got[others], want[others]) and not got[2].isfinite().any()


@pytest.mark.parametrize("rows", [ROWS, [1] * 4])
@torch.no_grad()
def test_what_others_hold_is_not_written_into(rows: list[int]) -> None:
    """Hooks and instance forwards may keep the base's output, which a plain linear's call may not outlive."""
    x, kept = torch.randn(4, TOKENS, K), []
    bed = Bed(linear())
    want = bed(x, rows)
    bed.module.register_forward_hook(lambda module, args, out: kept.append(out))
    assert torch.equal(bed(x, rows), want)
    assert torch.equal(kept[0], nn.functional.linear(x, bed.module.weight, bed.module.bias))
    assert not torch.allclose(kept[0], want)

    bed, cached = Bed(linear()), torch.randn(4, TOKENS, N)
    bed.module.forward = lambda x: cached
    before = cached.clone()
    assert torch.allclose(bed(x, rows).double(), before + bed.delta(x, rows), atol=1e-4)
    assert torch.equal(cached, before)


def test_gradients_after_a_call_in_inference_mode() -> None:
    module, x = linear(), torch.randn(4, TOKENS, K, requires_grad=True)
    module.requires_grad_(False)
    bed = Bed(module)
    with torch.inference_mode():
        bed(x)
    bed(x).sum().backward()
    want = torch.zeros_like(x)
    for row, slot in enumerate(ROWS):
        want[row] = module.weight.sum(0)
        if slot != BASE:
            a, b = bed.factors[slot]
            want[row] += b.sum(1) @ a
    torch.testing.assert_close(x.grad, want, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(want, want.roll(1, 0), rtol=0.1, atol=0.1)


@torch.no_grad()
def test_other_shapes_and_packed_rows() -> None:
    for shape in ((4, 5, 6, K), (4, TOKENS, K)):
        module, x = linear(), torch.randn(shape)
        base = module(x)
        check(Bed(module), x, base)


@pytest.mark.parametrize("most", [4, 128])
@torch.no_grad()
def test_few_tokens_beside_many_rank_rows_of_others(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One product over all slots' rank rows serves few tokens only while these are few too."""
    monkeypatch.setattr(layers.slots, "DENSE_ROWS_CPU", most)
    each, plain = [], layers.linear.add_each
    monkeypatch.setattr(layers.linear, "add_each", lambda *args: (each.append(1), plain(*args))[1])
    module, x = linear(), torch.randn(4, 1, K)
    base = module(x)
    bed = Bed(module)
    check(bed, x, base)
    assert bed.slots.layout is not None and bool(each) == (bed.slots.layout.width > most)
