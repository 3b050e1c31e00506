"""What the arguments of an operation must look like. Letters as in ops.py."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .backends import MOST_SLICES


def _must(condition: bool, what: str) -> None:
    if not condition:
        raise ValueError(what)


def check_dtypes(op: str, backend: str, *tensors: Tensor) -> None:
    """Raises ValueError for what only the torch backend computes."""
    wide = [t.dtype for t in tensors if t.dtype == torch.float64]
    _must(backend == "torch" or not wide, f"{op}: float64 needs the torch backend, got {backend!r}")


def check_tables(op: str, rows: int, order: Tensor, offsets: Tensor, starts: Tensor, ranks: Tensor) -> None:
    for name, table, dims in (("order", order, 1), ("offsets", offsets, 1), ("starts", starts, 2), ("ranks", ranks, 2)):
        _must(
            table.dim() == dims and table.dtype == torch.int32 and table.is_contiguous(),
            f"{op}: {name} must be int32 of {dims} dimension(s), got {table.dtype} {tuple(table.shape)}",
        )
    _must(
        starts.shape == ranks.shape and offsets.shape[0] == starts.shape[1] + 1,
        f"{op}: starts and ranks must be [L, S] and offsets [S + 1], got {tuple(starts.shape)}, {tuple(ranks.shape)}, "
        f"{tuple(offsets.shape)}",
    )
    _must(order.shape[0] == rows, f"{op}: order must list the {rows} rows of the batch, got {order.shape[0]}")


def check_shrink(
    x: Tensor, a: Tensor, order: Tensor, offsets: Tensor, starts: Tensor, ranks: Tensor, max_rank: int, split: int
) -> None:
    """Raises ValueError where the shapes or dtypes of a `lora_shrink` do not fit together."""
    _must(
        x.dim() == 3 and a.dim() == 2 and x.shape[2] == a.shape[1],
        f"lora_shrink: x must be [R, T, K] and a [P, K], got {tuple(x.shape)} and {tuple(a.shape)}",
    )
    check_tables("lora_shrink", x.shape[0], order, offsets, starts, ranks)
    _must(a.stride(1) == 1 or a.shape[1] <= 1, f"lora_shrink: a's rows must be contiguous, got strides {a.stride()}")
    _must(x.dtype == a.dtype, f"lora_shrink: x and a must have one dtype, got {x.dtype} and {a.dtype}")
    _must(max_rank >= 1 and split >= 1, f"lora_shrink: max_rank and split must be positive, got {max_rank}, {split}")


def check_expand(
    y: Tensor, h: Tensor, b: Tensor, order: Tensor, offsets: Tensor, starts: Tensor, ranks: Tensor,
    slices: Tensor | None, scale: Tensor | None, bias: Tensor | None, own_columns: bool,
) -> None:  # fmt: skip
    """Raises ValueError where the shapes or dtypes of a `lora_expand` do not fit together."""
    _must(
        y.dim() == 3 and h.dim() == 4 and y.shape[:2] == h.shape[1:3],
        f"lora_expand: y must be [R, T, N] and h [Z, R, T, W], got {tuple(y.shape)} and {tuple(h.shape)}",
    )
    check_tables("lora_expand", y.shape[0], order, offsets, starts, ranks)
    pieces, slots = starts.shape
    if slices is None:
        _must(
            pieces == 1 and b.dim() == 2 and b.shape[1] == y.shape[2],
            f"lora_expand: without slices b must be [P, {y.shape[2]}] and starts [1, S], got {tuple(b.shape)} and "
            f"{tuple(starts.shape)}",
        )
    else:
        _must(
            slices.shape == (pieces, 3) and slices.dtype == torch.int64 and slices.is_contiguous() and pieces > 1,
            f"lora_expand: slices must be contiguous int64 [L, 3] with L = {pieces} above 1, got {slices.dtype} "
            f"{tuple(slices.shape)}",
        )
    _must(b.is_contiguous(), f"lora_expand: b must be contiguous, got strides {b.stride()}")
    _must(
        own_columns or (h.dtype in (torch.float32, torch.float64) and h.shape[3] % pieces == 0),
        f"lora_expand: h must be float32 or float64 with as many columns for each of {pieces} slices, got {h.dtype} "
        f"{tuple(h.shape)}",
    )
    for name, table in (("scale", scale), ("bias", bias)):
        _must(
            table is None or (table.shape == (slots, y.shape[2]) and table.is_contiguous()),
            f"lora_expand: {name} must be contiguous [{slots}, {y.shape[2]}], got "
            f"{None if table is None else tuple(table.shape)}",
        )


def check_laid(
    both: Tensor, row_slots: Tensor, starts: Tensor, slices: Tensor | None, sizes: Sequence[int], lanes: int
) -> None:
    """Raises ValueError where the shapes of a `lora_expand_laid` do not fit together."""
    pieces = starts.shape[0]
    _must(
        both.dim() == 3
        and both.shape[2] >= sum(sizes)
        and len(sizes) == pieces <= MOST_SLICES
        and (slices is None) == (pieces == 1),
        f"lora_expand_laid: both must be [R, T, at least {sum(sizes)}], with slices for 2 to {MOST_SLICES} sizes, got "
        f"{tuple(both.shape)}, {len(sizes)} sizes and starts {tuple(starts.shape)}",
    )
    _check_columns("lora_expand_laid", both, row_slots, sum(sizes), pieces, lanes)


def check_gated(both: Tensor, row_slots: Tensor, starts: Tensor, n: int, piece: int, lanes: int) -> None:
    """Raises ValueError where the shapes of a `lora_gated_laid` do not fit together."""
    _must(
        both.dim() == 3 and both.shape[2] >= n and n % 2 == 0 and starts.shape[0] == 2 and piece in (0, 1),
        f"lora_gated_laid: both must be [R, T, at least {n}] for two slices of one width, the gate being 0 or 1, got "
        f"{tuple(both.shape)}, starts {tuple(starts.shape)}, gate {piece}",
    )
    _check_columns("lora_gated_laid", both, row_slots, n, 2, lanes)


def _check_columns(op: str, both: Tensor, row_slots: Tensor, n: int, pieces: int, lanes: int) -> None:
    _must(
        row_slots.shape == both.shape[:1] and row_slots.dtype == torch.int32,
        f"{op}: row_slots must be int32 [{both.shape[0]}], got {row_slots.dtype} {tuple(row_slots.shape)}",
    )
    _must(
        lanes in (1, pieces) and (both.shape[2] - n) % lanes == 0,
        f"{op}: lanes must be 1 or {pieces}, with as many columns of h in each, got {lanes} for "
        f"{both.shape[2] - n} columns",
    )
