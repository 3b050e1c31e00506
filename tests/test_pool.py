"""Rank rows of one module: spans without overlap, compaction, and few widths."""

from __future__ import annotations

import random

import pytest

from hf_multilora.pool import RankRows, bucket


def test_rank_rows_are_handed_out_without_overlap() -> None:
    rng, rows = random.Random(0), RankRows(40)
    content: list[int | None] = [None] * 40
    compacted = 0
    for _ in range(3000):
        if rows.spans and (len(rows.spans) == 8 or rng.random() < 0.4):
            slot = rng.choice(list(rows.spans))
            start, r = rows.free(slot)  # type: ignore[misc]
            assert content[start : start + r] == [slot] * r
            content[start : start + r] = [None] * r
        else:
            slot, r = rng.choice([s for s in range(9) if s not in rows.spans]), rng.choice([1, 2, 3, 5, 13])
            if rows.used + r > 40:
                assert rows.allocate(slot, r) is None
                continue
            start = rows.allocate(slot, r)
            if start is None:
                compacted += 1
                for old, new, width in rows.compact():
                    moved, content[old : old + width] = content[old : old + width], [None] * width
                    content[new : new + width] = moved
                assert rows.end == rows.used
                start = rows.allocate(slot, r)
            assert start is not None and content[start : start + r] == [None] * r
            content[start : start + r] = [slot] * r
        assert sum(c is not None for c in content) == rows.used
    assert compacted > 10


def test_rank_rows_refuse_misuse() -> None:
    rows = RankRows(4)
    rows.allocate(0, 2)
    with pytest.raises(ValueError, match="slot 0 must be freed before it gets rows"):
        rows.allocate(0, 1)
    with pytest.raises(ValueError, match="r must be positive, got 0"):
        rows.allocate(1, 0)
    assert rows.free(1) is None


def test_buckets_are_few() -> None:
    assert [bucket(n, 100) for n in (0, 1, 16, 17, 33, 65, 100)] == [16, 16, 16, 32, 64, 100, 100]
    assert bucket(5, 3) == 3
