"""The rank rows of a LoRA site, and the views that its dense path reads."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import CodeType
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..kernels.backends import TORCH, TRITON
from ..parallel import ALL, Shard
from ..pool import BUCKET, fixed
from ..routing import Routing
from .rows import SlotRows

if TYPE_CHECKING:
    from .merged import Merged

# Tokens of a call up to which one dense matmul over the rank rows of all slots is used, beyond it grouped operations.
# On a CPU the dense one was faster at 8 tokens and 8 adapters, the grouped ones at 512.
DENSE_TOKENS_CPU = 32
DENSE_ROWS_CPU = 128  # of its rank rows, beyond which those of other slots cost more than a copy of the rows' own
# With Triton the augmented weight serves tokens x rank rows up to DENSE_WORK, in all linears of an 8B shape on an H200
# faster than shrink + expand, or as fast; beyond, the other slots' rank rows cost more than they save.
DENSE_WORK = 1 << 20
# These are read whatever the batch holds: 1,024 of them cost 8 rows of an 8B shape 7%, shrink + expand cost them 10%.
# 4,096 cost 256 tokens as much as seven linears, shrink + expand by tiles 2.4 times that. In between by interpolation.
DENSE_ROWS, DENSE_ROWS_PER_TOKEN = 1536, 16


def dense_tokens(width: int, on_cuda: bool) -> int:
    """Tokens of a call up to which the torch backend multiplies them with the rank rows of all slots, `width` rows of
    each module."""
    return sys.maxsize if on_cuda else DENSE_TOKENS_CPU if width <= DENSE_ROWS_CPU else 0


def dense(backend: str, tokens: int, width: int, on_cuda: bool) -> bool:
    """Whether so many tokens of a call are multiplied with the rank rows of all slots: the measured rule. backend: its
    name."""
    if backend == TORCH:
        return tokens <= dense_tokens(width, on_cuda)
    most = max(DENSE_ROWS, DENSE_ROWS_PER_TOKEN * tokens)
    return backend == TRITON and width <= most and tokens * width <= DENSE_WORK


class ModuleSlots(SlotRows):
    """A [P, in] and B [P, out] of one module.

    Linear: delta = B^T (A x). Embedding: A's columns are looked up by token id. Scales are already folded into B.
    """

    role = "lora"
    gated = True
    unit = BUCKET
    shard: Shard = ALL  # what this process holds of them

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
        self.merged: Merged | None = None  # while the weight is laid with A: see augmented.py
        self.index = 0  # among the members of `merged`
        self.laid = False  # A and B lie in its buffers too
        self.alone = False  # its siblings turned out not to get its input
        self.fed_by: CodeType | None = None  # the `forward` whose source says that they do
        self.dense_tokens = 0  # for the torch backend, where the weight is not laid
        super().__init__(name, in_features, out_features, routing, flat=flat, mixable=mixable)

    @property
    def buffer(self) -> Tensor | None:
        return None if self.merged is None else self.merged.buffer

    def of_one_a(self) -> Sequence[SlotRows]:
        found = [] if self.merged is None else self.merged.of_one_a()
        return found if self in found else (self,)

    def look(self) -> None:
        """Set the views of the occupied prefix, w rank rows wide, that the dense path reads, and how far it goes.

        Views and not widths, since a traced graph takes tensors as inputs and would be traced anew for a number.
        """
        self.looked = False  # an interrupt half way must not leave views of two states
        width = 0 if self.layout is None else self.layout.width
        self.a_used, self.b_used = self.a[:width], self.b[:width]  # [w, K], [w, N]
        fixed(self.a_used, self.b_used)
        self._see()
        self.dense_tokens = dense_tokens(width, self.a.is_cuda) if self.backend.name == TORCH else 0
        if self.merged is not None:
            self.merged.look()
        self.looked = True

    def covered(self) -> tuple[Tensor, Tensor, Tensor]:
        """A [w, K], B [w, N] and `closed` [R, w] of the occupied prefix; while a graph is captured, of the whole pool:
        what is loaded later must be there."""
        assert self.layout is not None
        if self.routing.capturing:
            return self.a, self.b, self.layout.shut
        return self.a_used, self.b_used, self.layout.closed

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles carry the rank rows, not the weight they lie with; it is laid anew at the next call."""
        own = {"b": self.b.detach().clone(), "merged": None, "laid": False, "fed_by": None}
        return super().__getstate__() | dict.fromkeys(("a_used", "b_used")) | own
