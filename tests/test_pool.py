"""RankRows hands out rank rows, Layout opens to each row of a batch its own."""

from __future__ import annotations

import pytest
import torch

from hf_multilora.pool import BASE, FREE, Layout, RankRows, bucket


def opened(layout: Layout) -> list[list[int]]:
    """Per row, the rank rows that are open to it."""
    return [(~row).nonzero().flatten().tolist() for row in layout.closed]


def test_rank_rows_are_handed_out_first_fit_and_compacted() -> None:
    rows = RankRows(10)
    assert [rows.allocate(slot, r) for slot, r in ((0, 4), (1, 2), (2, 3))] == [0, 4, 6]
    assert rows.allocate(3, 2) is None and rows.used == 9 and rows.end == 9
    assert rows.free(1) == (4, 2) and rows.free(1) is None
    assert rows.allocate(3, 3) is None, "3 rows are free, but not side by side"
    assert rows.compact() == [(6, 4, 3)] and rows.compact() == []
    assert rows.allocate(3, 3) == 7 and rows.spans == {0: (0, 4), 2: (4, 3), 3: (7, 3)}


def test_rank_rows_refuse_what_would_overlap() -> None:
    rows = RankRows(4)
    rows.allocate(0, 2)
    with pytest.raises(ValueError, match=r"slot 0 must be freed before it gets rows, it owns \(0, 2\)"):
        rows.allocate(0, 1)
    with pytest.raises(ValueError, match="r must be positive, got 0"):
        rows.allocate(1, 0)
    assert rows.spans == {0: (0, 2)}


def test_buckets_are_few_and_never_beyond_the_pool() -> None:
    assert [bucket(n, 100) for n in (0, 1, 16, 17, 33, 65, 100)] == [16, 16, 16, 32, 64, 100, 100]
    assert bucket(3, 5) == 5


def test_a_layout_opens_to_each_row_its_own_rank_rows_only() -> None:
    layout = Layout(((0, 0, 3), (2, 3, 2)), 6, 4, torch.device("cpu"))
    assert layout.owner.tolist() == [0, 0, 0, 2, 2, FREE]
    assert layout.starts.tolist() == [0, 0, 3, 0] and layout.ranks.tolist() == [3, 0, 2, 0] and layout.max_rank == 3
    layout.write(torch.tensor([2, BASE, 0, 1], dtype=torch.int32), frozenset({0, 1, 2}))
    assert layout.live and opened(layout) == [[3, 4], [], [0, 1, 2], []]
    layout.write(torch.tensor([BASE, 1], dtype=torch.int32), frozenset({1}))
    assert opened(layout) == [[], []] and not layout.live, "slot 1 has no rank rows in these modules"
