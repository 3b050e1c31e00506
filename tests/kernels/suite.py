"""Cases for the kernels, what they must answer, and how close. Letters as in kernels/ops.py.

Used by test_backends.py on the CPU (Triton in its interpreter) and by tests/gpu/test_kernels.py.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from hf_multilora.kernels import ops
from hf_multilora.kernels.backends import TORCH, TRITON, TRITON_FIXED, has_triton, interpreted

BASE = -1
MIXES = ("all base", "one", "all distinct", "skewed")
INTERPRETED = pytest.mark.skipif(
    not (has_triton() and interpreted()), reason="Triton on the CPU needs TRITON_INTERPRET=1 before its import"
)
KERNELS = [pytest.param(name, marks=INTERPRETED) for name in (TRITON, TRITON_FIXED)]  # on the CPU
BACKENDS = [TORCH, *KERNELS]
EXPANDS: dict[str, dict[str, int]] = {  # constants of triton_laid.py that make it choose a kernel
    "rows": {"FEW": 1 << 20, "FEW_PER_SLOT": 1 << 20},
    "wide": {"FEW": 0},  # for 16 bits
    "tiles": {"FEW": 0, "MOST_RANK": 0},
}
# What differs from case()'s defaults: R = 6, T = 7, K = 37, N = 51, S = 5, r = 8
SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "one token": {"tokens": 1, "r": 13},
    "one row": {"rows": 1},
    "one column": {"k": 1, "widths": (1,), "r": 1},
    "whole tiles": {"k": 128, "widths": (128,), "r": 16},
    "larger tiles": {"tokens": 300, "rows": 1, "mix": "one", "k": 20, "widths": (40,)},
    "one slot": {"slots": 1},
    "eight slots": {"slots": 8, "rows": 10, "tokens": 1},
    "64 slots": {"slots": 64, "rows": 9, "tokens": 1, "r": 3},
    "bound above the ranks": {"bound": 33},
    "epilogue": {"epilogue": True},
    "strided": {"strided": True},
    "two slices": {"widths": (64, 33)},
    "three slices": {"widths": (16, 130, 7), "r": 13, "epilogue": True, "strided": True},
}
Tables = tuple[Tensor, Tensor, Tensor, Tensor]


def mix_of(name: str, rows: int, slots: int) -> list[int]:
    """The slot of each row."""
    if name == "all base":
        return [BASE] * rows
    if name == "one":
        return [slots // 2] * rows
    if name == "skewed":  # most rows have one adapter; slot 0 lacks the module
        return [(BASE, 0)[row // 3 % 2] if row % 3 == 2 else 1 % slots for row in range(rows)]
    every = [*range(slots), BASE]
    random.Random(3).shuffle(every)
    return (every * rows)[:rows]


@dataclass(frozen=True)
class Case:
    """x [R, T, K], y [R, T, N], a [P * L, K], b [P, N], or flat with `slices`; starts, ranks: [L][S]."""

    x: Tensor
    y: Tensor
    a: Tensor
    b: Tensor
    rows: list[int]
    starts: list[list[int]]
    ranks: list[list[int]]
    max_rank: int
    slices: list[tuple[int, int, int]] | None = None
    scale: Tensor | None = None
    bias: Tensor | None = None

    def tables(self, rows: Sequence[int] | None = None) -> Tables:
        """order, offsets, starts, ranks, built row by row. Rows of one slot are listed in no order."""
        rows = self.rows if rows is None else rows
        slots = range(len(self.starts[0]))
        backwards = list(enumerate(rows))[::-1]
        order = [row for slot in [*slots, BASE] for row, own in backwards if own == slot]
        offsets = [sum(BASE < own < slot for own in rows) for slot in [*slots, len(slots)]]
        tables = (order, offsets, self.starts, self.ranks)
        return tuple(torch.tensor(t, dtype=torch.int32, device=self.x.device) for t in tables)  # type: ignore[return-value]

    def extras(self) -> dict[str, Any]:
        """The keywords of lora_expand."""
        slices = None if self.slices is None else torch.tensor(self.slices, device=self.x.device)
        return {"slices": slices, "scale": self.scale, "bias": self.bias}

    def parts(self, slot: int) -> Iterator[tuple[int, slice, slice, slice, slice]]:
        """Of each slice in which the slot owns rank rows: its number, its columns of y, of h, rank rows of A, where
        its B lies in the flat b."""
        for piece, (first, width, offset) in enumerate(self.slices or [(0, self.y.shape[2], 0)]):
            start, r = self.starts[piece][slot], self.ranks[piece][slot]
            if r:
                begin, column = offset + start * width, piece * self.max_rank
                columns, own = slice(first, first + width), slice(column, column + r)
                lanes = len(self.starts)
                rank_rows = slice(start * lanes + piece, (start + r - 1) * lanes + piece + 1, lanes)
                yield piece, columns, own, rank_rows, slice(begin, begin + r * width)

    def used(self, rows: Sequence[int] | None = None) -> set[int]:
        return set(self.rows if rows is None else rows) - {BASE}

    def on(self, device: str) -> Case:
        """With its tensors there."""
        tensors = {name: value.to(device) for name, value in self.__dict__.items() if isinstance(value, Tensor)}
        return replace(self, **tensors)

    def to(self, **dtypes: torch.dtype) -> Case:
        """With other dtypes of some tensors."""
        return replace(self, **{name: getattr(self, name).to(dtype) for name, dtype in dtypes.items()})


def case(
    dtype: torch.dtype = torch.float32,
    r: int = 8,
    tokens: int = 7,
    mix: str = "all distinct",
    *,
    rows: int = 6,
    slots: int = 5,
    k: int = 37,
    widths: tuple[int, ...] = (51,),
    epilogue: bool = False,
    strided: bool = False,
    bound: int = 0,
    device: str = "cpu",
) -> Case:
    """widths: of the slices, which lie in y in reverse order. epilogue: scale and bias. strided: x and y are columns of
    wider buffers. bound: max_rank, where it is above every rank."""
    pattern = [r, max(1, r - 5), r, max(1, r // 2), 1]
    ranks = [[pattern[(slot + piece) % 5] for slot in range(slots)] for piece in range(len(widths))]
    if mix == "skewed" and slots > 1:
        ranks[0][0] = 0  # and a slot may own rows in other slices alone
    starts, used = [[0] * slots for _ in widths], 2
    places = [(piece, slot) for piece in range(len(widths)) for slot in range(slots)]
    random.Random(5).shuffle(places)  # rank rows are not in the order of slots, and gaps lie between
    for piece, slot in places:
        starts[piece][slot] = used
        used += ranks[piece][slot] + 1
    n, extra = sum(widths), 5 if strided else 0
    slices, size, right = None, used * n, n
    if len(widths) > 1:
        slices, size = [], 0
        for piece, width in enumerate(widths):
            low = min(starts[piece])
            high = max(start + own for start, own in zip(starts[piece], ranks[piece], strict=True))
            right -= width
            slices.append((right, width, size - low * width))
            size += (high - low) * width
    x = torch.randn(rows, tokens, k + extra, device=device).to(dtype)[..., :k]
    y = torch.randn(rows, tokens, n + extra, device=device).to(dtype)[..., :n]
    lanes = len(widths)
    a, b = ((torch.randn(count, device=device) / 4).to(dtype) for count in (used * lanes * k, size))
    scale = bias = None
    if epilogue:
        scale, bias = ((torch.randn(slots, n, device=device) + 1).to(dtype) for _ in range(2))
    top = max(bound, max(map(max, ranks)))
    shaped = b.view(used, n) if slices is None else b
    return Case(
        x, y, a.view(used * lanes, k), shaped, mix_of(mix, rows, slots), starts, ranks, top, slices, scale, bias
    )


def crowded(slots: int = 3) -> list[int]:
    """Slots of 45 rows in no order: 34, 5, 3, 2 and 1 of them have one; beyond `slots` they are the base's."""
    counts = (34, 5, 3, 2, 1)
    rows = [slot if slot < slots else BASE for slot, count in enumerate(counts) for _ in range(count)]
    random.Random(3).shuffle(rows)
    return rows


def with_one_a(c: Case) -> Case:
    """The same for slices that have one A: all have the rank rows that the first one has."""
    assert c.slices is not None
    lanes, used, size, slices = len(c.starts), len(c.a) // len(c.starts), 0, []
    for first, width, _ in c.slices:
        slices.append((first, width, size))
        size += used * width
    a, b = c.a[::lanes].repeat_interleave(lanes, 0), (torch.randn(size, device=c.b.device) / 4).to(c.b.dtype)
    return replace(c, a=a, b=b, slices=slices, starts=c.starts[:1] * lanes, ranks=c.ranks[:1] * lanes)


def by_rows(c: Case, dtype: torch.dtype, rows: Sequence[int] | None = None) -> tuple[Tensor, Tensor]:
    """h [R, T, L * max_rank], NaN where nothing is specified, and the output; row by row in `dtype`."""
    h = torch.full((*c.x.shape[:2], len(c.starts) * c.max_rank), torch.nan, dtype=dtype, device=c.x.device)
    out = c.y.to(dtype).clone()
    for row, slot in enumerate(c.rows if rows is None else rows):
        for _, columns, own, rank_rows, flat in c.parts(slot) if slot != BASE else ():
            a, b = c.a[rank_rows].to(dtype), c.b.reshape(-1)[flat].to(dtype)
            some = c.x[row].to(dtype) @ a.T
            total = out[row][:, columns] + some @ b.view(len(a), -1)
            if c.scale is not None:
                total = total * c.scale[slot, columns].to(dtype)
            if c.bias is not None:
                total = total + c.bias[slot, columns].to(dtype)
            h[row][:, own], out[row][:, columns] = some, total
    return h, out


def dtype_for(kernel: str, half: bool = False) -> torch.dtype:
    """A case's for a kernel of EXPANDS: some take 16 bits only."""
    return torch.float16 if half or kernel == "wide" else torch.float32


def within(got: Tensor, truth: Tensor, plain: Tensor, floor: int = 2) -> bool:
    """Error against float64 at most twice that of the same formula in plain torch at the case's dtype, plus `floor`
    roundings of the largest number. What the truth leaves unspecified (NaN) is not compared; NaN elsewhere is an error.
    """
    told = ~truth.isnan()
    if not told.any():
        return True
    least = floor * torch.finfo(plain.dtype).eps * float(truth[told].abs().max())
    own = float((plain.double() - truth)[told].abs().max())
    return float((got.double() - truth)[told].abs().max()) <= 2 * own + least


@contextmanager
def nan_filled() -> Iterator[list[Tensor]]:
    """What torch.empty hands out meanwhile is full of NaN; yields these tensors."""
    real, made = torch.empty, []

    def empty(*args: Any, **kwargs: Any) -> Tensor:
        tensor = real(*args, **kwargs)
        made.append(tensor.fill_(torch.nan) if tensor.is_floating_point() else tensor)
        return tensor

    with mock.patch.object(torch, "empty", empty):
        yield made


def run(c: Case, backend: str, tables: Tables | None = None, split: int = 1) -> tuple[Tensor, Tensor]:
    """Both operations: h [R, T, L * max_rank], its planes added up, and the output.

    What is unspecified is NaN: all that torch.empty gives, h between the two operations.
    """
    tables = c.tables() if tables is None else tables
    with nan_filled():
        h = ops.lora_shrink(c.x, c.a, *tables, c.max_rank, split, backend)
        out = ops.lora_expand(c.y, poisoned_h(c, h, tables), c.b, *tables, **c.extras(), backend=backend)
    return h.sum(0), joined(c, out)


def joined(c: Case, out: Tensor) -> Tensor:
    """[R, T, N] of what lora_expand gives."""
    if c.slices is None:
        return out
    whole = torch.empty_like(c.y)
    rows, tokens = c.y.shape[:2]
    assert out.shape == (c.y.numel(),)
    for first, width, _ in c.slices:
        begin = rows * tokens * first
        whole[..., first : first + width] = out[begin : begin + rows * tokens * width].view(rows, tokens, width)
    return whole


def poisoned_h(c: Case, h: Tensor, tables: Tables) -> Tensor:
    """h with NaN where nothing is specified, as the tables say."""
    order, offsets, _, ranks = (t.tolist() for t in tables)
    left = torch.ones(h.shape[1:], dtype=torch.bool, device=h.device)
    for piece, of_slots in enumerate(ranks):
        for slot, r in enumerate(of_slots):
            for row in order[offsets[slot] : offsets[slot + 1]]:
                left[row, :, piece * c.max_rank : piece * c.max_rank + r] = False
    return h.masked_fill(left, torch.nan)


def own_columns(c: Case) -> tuple[Tensor, Tensor]:
    """y [R, T, N] and h [1, R, T, P * L] as views of one buffer, as a matmul with the augmented weight gives them. h
    has no error but its rounding: it is none of what is checked."""
    h = torch.matmul(c.x.cpu().double(), c.a.cpu().double().T)
    both = torch.cat((c.y, h.to(c.y)), 2)
    return both[..., : c.y.shape[2]], both[..., c.y.shape[2] :][None]


def closed(c: Case, rows: Sequence[int] | None = None) -> Tensor:
    """bool [R, P * L], True where a rank row is not the row's own."""
    mask = torch.ones(len(c.rows), len(c.a), dtype=torch.bool, device=c.x.device)
    for row, slot in enumerate(c.rows if rows is None else rows):
        for _, _, _, rank_rows, _ in c.parts(slot) if slot != BASE else ():
            mask[row, rank_rows] = False
    return mask


def run_own(c: Case, backend: str, tables: Tables | None = None, poison: float = torch.nan) -> Tensor:
    """lora_expand with the columns of all rank rows; those of others are poisoned."""
    y, h = own_columns(c)
    if tables is None:
        tables = c.tables()
        h.masked_fill_(closed(c)[None, :, None], poison)
    with nan_filled():
        out = ops.lora_expand(y, h, c.b, *tables, **c.extras(), own_columns=True, backend=backend)
    return joined(c, out)
