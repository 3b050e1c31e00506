"""One adapted module alone, with an adapter in each slot, and what it must answer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hf_multilora.layers import ModuleSlots, wrap
from hf_multilora.layers.augmented import prepare
from hf_multilora.pool import BASE, Layout
from hf_multilora.routing import Request, Routing

K, N, SLOTS = 19, 23, 3
ROWS = [0, BASE, 1, 2]  # the slot of each batch row
RANKS = {0: 2, 1: 5, 2: 1}


class Bed:
    """One adapted module alone, with an adapter in each slot."""

    def __init__(self, module: nn.Module, kind: str = "linear", dtype: torch.dtype = torch.float32, k: int = K) -> None:
        self.module, self.bare_class = module.to(dtype), type(module)
        self.weight = module.weight.detach().clone()  # type: ignore[operator]
        self.routing = Routing(SLOTS)
        self.slots = ModuleSlots("bed", k, N, self.routing)
        self.slots.reserve(sum(RANKS.values()) + 4, torch.device("cpu"), dtype)
        self.factors: dict[int, tuple[Tensor, Tensor]] = {}
        for slot, r in RANKS.items():
            a, b = torch.randn(r, k).to(dtype), torch.randn(r, N).to(dtype)
            for rows, own in zip(self.slots.place(slot, r), (a, b), strict=True):
                rows.copy_(own)
            self.factors[slot] = (a, b)
        layout = Layout(self.slots.rows.end, 16, SLOTS, torch.device("cpu"))
        layout.take(self.slots.rows.spans)
        self.slots.settle(layout)
        self.routing.relayout([layout])
        wrap(module, kind, self.slots)

    def __call__(self, x: Tensor, rows: list[int] | None = None) -> Any:
        prepare([(self.module, self.slots)])  # as Runtime.request does
        self.routing.push(Request(tuple(ROWS if rows is None else rows)))
        try:
            return self.module(x)
        finally:
            self.routing.pop()

    def delta(self, x: Tensor, rows: list[int] | None = None) -> Tensor:
        """float64, row by row."""
        out = torch.zeros(*x.shape[:-1], N, dtype=torch.float64)
        for row, slot in enumerate(ROWS if rows is None else rows):
            if slot != BASE:
                a, b = (f.double() for f in self.factors[slot])
                out[row] = x[row].double() @ a.T @ b
        return out


def linear(bias: bool = True) -> nn.Linear:
    return nn.Linear(K, N, bias=bias)


def check(bed: Bed, x: Tensor, base: Tensor, tolerance: float = 1e-5) -> None:
    """Base + delta with the adapters' own rows; permuted rows would fail."""
    with torch.no_grad():
        got = bed(x)
    want = base.double() + bed.delta(x)
    scale = float(want.abs().max())
    assert float((got.double() - want).abs().max()) < tolerance * scale
    shifted = base.double() + bed.delta(x, ROWS[1:] + ROWS[:1])
    assert float((got.double() - shifted).abs().max()) > 20 * tolerance * scale
