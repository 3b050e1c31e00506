"""Pairs of tokens and experts: their keys, their order, and where each lies; the Triton kernels in the interpreter."""

from __future__ import annotations

import pytest
import torch

from hf_multilora.kernels.backends import TORCH, TRITON, backend, interpreted
from hf_multilora.kernels.torch_pairs import SHORT

# tokens, choices, rows, slots, experts; the last but one has keys beyond 16 bits
SIZES = [(12, 2, 4, 3, 5), (300, 8, 3, 8, 128), (1, 8, 1, 8, 128), (64, 8, 64, 300, 128), (0, 2, 1, 2, 4)]


def device(name: str) -> str:
    """Where a backend runs: compiled kernels on a GPU."""
    return "cpu" if name == TORCH or interpreted() else "cuda"


@pytest.mark.parametrize("name", [TORCH, TRITON])
@pytest.mark.parametrize(("tokens", "k", "rows", "slots", "experts"), SIZES)
def test_pairs_against_a_plain_loop(name: str, tokens: int, k: int, rows: int, slots: int, experts: int) -> None:
    torch.manual_seed(tokens)
    index = torch.stack([torch.randperm(experts + 1)[:k] for _ in range(max(tokens, 1))])[:tokens]  # others' too
    table = torch.randint(-1, slots, (rows,), dtype=torch.int32)
    chosen, width = backend(name), slots + 1
    index, table = index.to(device(name)), table.to(device(name))
    expected = []
    for token in range(tokens):
        slot = int(table[token // (tokens // rows)])
        expected += [int(expert) * width + (slots if slot < 0 else slot) for expert in index[token]]
    assert chosen.pair_keys(index, table, slots, experts).tolist() == expected
    keys, at, places, ends = chosen.sort_pairs(index, table, slots, experts)
    assert keys.tolist() == sorted(expected)
    assert keys[places.flatten().long()].tolist() == expected  # not merely in order: each pair at its own place
    assert sorted(places.flatten().tolist()) == list(range(tokens * k))
    assert at[places.flatten().long()].tolist() == [token for token in range(tokens) for _ in range(k)]
    assert ends.tolist() == [sum(key < (expert + 1) * width for key in expected) for expert in range(experts)]


def test_the_sizes_need_both_widths_of_keys() -> None:
    wide = {(experts + 1) * (slots + 1) >= SHORT for _, _, _, slots, experts in SIZES}
    assert wide == {True, False}


def test_another_row_gives_other_keys() -> None:
    index, table = torch.tensor([[0, 1], [1, 2]]), torch.tensor([0, -1], dtype=torch.int32)
    keys = backend(TORCH).pair_keys(index, table, 2, 3)
    assert keys.tolist() == [0, 3, 5, 8]
    assert backend(TORCH).pair_keys(index, table.flip(0), 2, 3).tolist() != keys.tolist()
