"""Where the rank rows of several linears lie that are computed together."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..pool import Layout, fixed, upload


class Joint:
    """starts and ranks of L linears that may have different rank rows: int32 [L, slots] each, at fixed addresses.

    name: as the routing's `joints` have it. layouts: of each, None where it has no rank rows. first: one of them, whose
    `table` holds the rows of the call.
    """

    @torch.inference_mode(False)  # else the tables could never be written again
    def __init__(self, layouts: Sequence[Layout | None]) -> None:
        self.name = ""
        first = next(layout for layout in layouts if layout is not None)
        self.layouts, self.first = tuple(layouts), first
        self.tables = torch.zeros(2, len(layouts), first.starts.shape[1], dtype=torch.int32, device=first.device)
        self.starts, self.ranks = self.tables.unbind()
        fixed(self.starts, self.ranks)
        self.take()

    @torch.inference_mode(False)
    def take(self) -> None:
        """The spans as they now are, by one copy."""
        self.bound = max(layout.no_rows.shape[1] for layout in self.layouts if layout is not None)
        self.most = max(layout.most for layout in self.layouts if layout is not None)
        _, pieces, slots = self.tables.shape
        starts, ranks = ([[0] * slots for _ in range(pieces)] for _ in range(2))  # lists: 10 us instead of 100
        for i, layout in enumerate(self.layouts):
            for slot, (start, r) in {} if layout is None else layout.spans.items():
                starts[i][slot], ranks[i][slot] = start, r
        upload(self.tables, torch.tensor([starts, ranks], dtype=torch.int32))
