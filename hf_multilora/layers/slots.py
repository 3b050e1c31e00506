"""The rank rows of a LoRA site, and the views that its dense path reads."""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor

from ..kernels.backends import TORCH
from ..pool import BUCKET
from ..routing import Routing
from .rows import SlotRows

# Tokens of a call up to which one dense matmul over the rank rows of all slots is used, beyond it grouped operations.
# On a CPU the dense one was faster at 8 tokens and 8 adapters, the grouped ones at 512.
DENSE_TOKENS_CPU = 32
DENSE_ROWS_CPU = 128  # of its rank rows, beyond which those of other slots cost more than a copy of the rows' own
# With Triton the augmented weight serves tokens x rank rows up to DENSE_WORK, in all linears of an 8B shape on an H200
# faster than shrink + expand, or as fast; beyond, the other slots' rank rows cost more than they save.
DENSE_WORK = 1 << 20
DENSE_ROWS = 4096  # and these are read whatever the batch holds


class ModuleSlots(SlotRows):
    """A [P, in] and B [P, out] of one module.

    Linear: delta = B^T (A x). Embedding: A's columns are looked up by token id. Scales are already folded into B.
    """

    role = "lora"
    gated = True
    unit = BUCKET

    def __init__(
        self,
        name: str,
        in_features: int,
        out_features: int,
        routing: Routing,
        *,
        flat: bool = False,
        tied: bool = False,
        mixable: bool = True,
    ) -> None:
        self.tied = tied  # other modules use its weight, so it stays where it is
        self.buffer: Tensor | None = None  # [N + P, K] while the weight is laid with A: see augmented.py
        self.bias_buffer: Tensor | None = None  # [N + P]
        self.laid = False  # A lies in the buffer too
        self.dense_tokens = 0
        super().__init__(name, in_features, out_features, routing, flat=flat, mixable=mixable)

    def look(self) -> None:
        """Set the views of the occupied prefix, w rank rows wide, that the dense path reads, and how far it goes.

        Views and not widths, since a traced graph takes tensors as inputs and would be traced anew for a number.
        """
        self.looked = False  # an interrupt half way must not leave views of two states
        width = 0 if self.layout is None else self.layout.width
        end = self.out_features + width
        self.a_used, self.b_used = self.a[:width], self.b[:width]  # [w, K], [w, N]
        self.buffer_used = None if self.buffer is None else self.buffer[:end]  # [N + w, K]
        self.bias_used = None if self.bias_buffer is None else self.bias_buffer[:end]  # [N + w]
        self._see(self.a_used.data_ptr(), self.b_used.data_ptr(), width)
        if self.backend.name == TORCH:
            few = DENSE_TOKENS_CPU if width <= DENSE_ROWS_CPU else 0
            self.dense_tokens = sys.maxsize if self.a.is_cuda else few
        else:
            dense = self.laid and not self.backend.fixed and width <= DENSE_ROWS
            self.dense_tokens = DENSE_WORK // max(width, 1) if dense else 0
        self.looked = True

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles carry the rank rows, not the weight they lie with; it is laid anew at the next call."""
        views = dict.fromkeys(("a_used", "b_used", "buffer_used", "bias_used"))
        return super().__getstate__() | views | {"buffer": None, "bias_buffer": None, "laid": False}
