"""The pairs of a call in the order of experts, in plain torch.

A pair is a token and one of its K chosen experts: n = T * K. Its key is expert * (slots + 1) + slot, the slot that of
its token's row, `slots` for the base; experts from `count` on (other devices') count as one, the last.
"""

from __future__ import annotations

import torch
from torch import Tensor

SHORT = 1 << 15  # keys below it are sorted as 16 bits, in half the passes


def pair_keys(index: Tensor, row_slots: Tensor, slots: int, count: int) -> Tensor:
    """int32 [n] keys, token after token: index [T, K], row_slots int32 [R] with T a multiple of R, -1 for the base."""
    tokens, k = index.shape
    own = torch.where(row_slots < 0, slots, row_slots)[:, None, None].expand(-1, tokens // row_slots.shape[0], k)
    return (index.clamp(max=count) * (slots + 1) + own.reshape(tokens, k)).view(-1).to(torch.int32)


def sort_pairs(index: Tensor, row_slots: Tensor, slots: int, count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Pairs sorted by key: keys int32 [n], the token of each int32 [n], places int32 [T, K] (where the pairs of each
    token lie), ends int32 [count] (one past each expert's last pair)."""
    keys, (tokens, k) = pair_keys(index, row_slots, slots, count), index.shape
    n, width = tokens * k, slots + 1
    keys, order = torch.sort(keys.to(torch.int16) if (count + 1) * width < SHORT else keys)
    keys = keys.to(torch.int32)
    bounds = torch.arange(1, count + 1, device=keys.device, dtype=torch.int32) * width
    ends = torch.searchsorted(keys, bounds, out_int32=True)
    places = torch.empty(n, dtype=torch.int32, device=keys.device)
    places[order] = torch.arange(n, device=keys.device, dtype=torch.int32)
    return keys, (order // k).to(torch.int32), places.view(tokens, k), ends
