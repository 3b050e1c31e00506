"""The operations for experts' LoRA: schemas, meaning, checks, fakes, and what a layer calls. Letters and tables:
torch_experts.py, which specifies them. Triton has float16, bfloat16 and float32, torch float64 too.

A layer calls `shrink`, `expand` and `combine` here: they go straight to the backend, in traced code through the
registered operations. Gradients are the torch backend's: the registered operations have none.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import torch_experts, torch_pairs
from .backends import Backend
from .backends import backend as backend_named
from .checks import _must, check_dtypes
from .ops import NAMESPACE, _library

TABLES = "Tensor begins, Tensor ranks, Tensor keys, Tensor? source"
SHRINK = f"experts_shrink(Tensor x, Tensor a, {TABLES}, int max_rank, str backend) -> Tensor"
EXPAND = f"experts_expand(Tensor(a!) y, Tensor h, Tensor b, {TABLES}, int first, str backend) -> ()"
COMBINE = "experts_combine(Tensor y, Tensor places, Tensor weights, ScalarType dtype, str backend) -> Tensor"
INDICES = (torch.int32, torch.int64)

for _schema in (SHRINK, EXPAND, COMBINE):
    _library.define(_schema)


# -- what a layer calls ------------------------------------------------------------------------------
def shrink(
    backend: Backend, x: Tensor, a: Tensor, begins: Tensor, ranks: Tensor, keys: Tensor, source: Tensor | None,
    max_rank: int,
) -> Tensor:  # fmt: skip
    """As `experts_shrink`, without its checks."""
    if torch_experts.wants_gradient(x):
        return torch_experts.shrink(x, a, begins, ranks, keys, source, max_rank)
    if torch.compiler.is_compiling():
        return torch.ops.hf_multilora.experts_shrink(x, a, begins, ranks, keys, source, max_rank, backend.name)
    return backend.experts_shrink(x, a, begins, ranks, keys, source, max_rank)


def expand(
    backend: Backend, y: Tensor, h: Tensor, b: Tensor, begins: Tensor, ranks: Tensor, keys: Tensor,
    source: Tensor | None, first: int,
) -> Tensor:  # fmt: skip
    """As `experts_expand`, without its checks. Returns y, written in place; with gradients a new tensor."""
    if torch_experts.wants_gradient(y, h):
        return torch_experts.expand(y, h, b, begins, ranks, keys, source, first)
    if torch.compiler.is_compiling():
        torch.ops.hf_multilora.experts_expand(y, h, b, begins, ranks, keys, source, first, backend.name)
        return y
    return backend.experts_expand(y, h, b, begins, ranks, keys, source, first)


def combine(backend: Backend, y: Tensor, places: Tensor, weights: Tensor, dtype: torch.dtype) -> Tensor:
    """As `experts_combine`, without its checks."""
    if torch_experts.wants_gradient(y, weights):
        return torch_experts.combine(y, places, weights, dtype)
    if torch.compiler.is_compiling():
        return torch.ops.hf_multilora.experts_combine(y, places, weights, dtype, backend.name)
    return backend.experts_combine(y, places, weights, dtype)


def sort_pairs(
    backend: Backend, index: Tensor, row_slots: Tensor, slots: int, count: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See torch_pairs.py, which traced code runs through."""
    sort = torch_pairs.sort_pairs if torch.compiler.is_compiling() else backend.sort_pairs
    return sort(index, row_slots, slots, count)


def pair_keys(backend: Backend, index: Tensor, row_slots: Tensor, slots: int, count: int) -> Tensor:
    """See torch_pairs.py, which traced code runs through."""
    name = torch_pairs.pair_keys if torch.compiler.is_compiling() else backend.pair_keys
    return name(index, row_slots, slots, count)


# -- the operations ----------------------------------------------------------------------------------
def experts_shrink(
    x: Tensor, a: Tensor, begins: Tensor, ranks: Tensor, keys: Tensor, source: Tensor | None, max_rank: int,
    backend: str = "torch",
) -> Tensor:  # fmt: skip
    """h[i, :r] = A_k x[source[i]] for k = keys[i].

    x [m, K], a [P, K] of x's dtype -> float32 (float64 for float64) [n, max_rank]. What lies beyond r is not specified,
    and nothing reads it. No r may be above max_rank.
    """
    check_shrink(x, a, begins, ranks, keys, source, max_rank)
    check_dtypes("experts_shrink", backend, x)
    return backend_named(backend).experts_shrink(x, a, begins, ranks, keys, source, max_rank)


def experts_expand(
    y: Tensor, h: Tensor, b: Tensor, begins: Tensor, ranks: Tensor, keys: Tensor, source: Tensor | None, first: int,
    backend: str = "torch",
) -> None:  # fmt: skip
    """y[i, first : first + N] += B_k^T h[source[i], :r] for k = keys[i], in place; the other pairs keep their bits.

    y [n, Y], h [m, max_rank] from `experts_shrink`, b [P, N]. Summed in float32 or wider, rounded once.
    """
    check_expand(y, h, b, begins, ranks, keys, source, first)
    check_dtypes("experts_expand", backend, y, h, b)
    with torch.no_grad():
        backend_named(backend).experts_expand(y, h, b, begins, ranks, keys, source, first)


def experts_combine(y: Tensor, places: Tensor, weights: Tensor, dtype: torch.dtype, backend: str = "torch") -> Tensor:
    """out[t] = sum over c of weights[t, c] * y[places[t, c]]: what a mixture of experts gives token t.

    y [n, H], places int32 or int64 [T, C], weights [T, C] -> [T, H] of `dtype`. Summed in float32 or wider in the order
    of c, rounded once.
    """
    check_combine(y, places, weights)
    check_dtypes("experts_combine", backend, y, weights)
    return backend_named(backend).experts_combine(y, places, weights, dtype)


# -- checks ------------------------------------------------------------------------------------------
def _check_tables(op: str, begins: Tensor, ranks: Tensor, keys: Tensor, source: Tensor | None) -> None:
    for name, table in (("begins", begins), ("ranks", ranks), ("keys", keys)):
        _must(
            table.dim() == 1 and table.dtype == torch.int32 and table.is_contiguous(),
            f"{op}: {name} must be contiguous int32 of 1 dimension, got {table.dtype} {tuple(table.shape)}",
        )
    _must(
        begins.shape == ranks.shape,
        f"{op}: begins and ranks must be [G], got {tuple(begins.shape)} and {tuple(ranks.shape)}",
    )
    _must(
        source is None or (source.shape == keys.shape and source.dtype in INDICES and source.is_contiguous()),
        f"{op}: source must be contiguous int32 or int64 {tuple(keys.shape)} as keys, got "
        f"{None if source is None else (source.dtype, tuple(source.shape))}",
    )


def check_shrink(
    x: Tensor, a: Tensor, begins: Tensor, ranks: Tensor, keys: Tensor, source: Tensor | None, max_rank: int
) -> None:
    """Raises ValueError where the shapes or dtypes of an `experts_shrink` do not fit together."""
    op = "experts_shrink"
    _must(
        x.dim() == 2 and a.dim() == 2 and x.shape[1] == a.shape[1],
        f"{op}: x must be [m, K] and a [P, K], got {tuple(x.shape)} and {tuple(a.shape)}",
    )
    _must(x.dtype == a.dtype, f"{op}: x and a must have one dtype, got {x.dtype} and {a.dtype}")
    _must(a.is_contiguous(), f"{op}: a must be contiguous, got strides {a.stride()}")
    _must(max_rank >= 1, f"{op}: max_rank must be positive, got {max_rank}")
    _check_tables(op, begins, ranks, keys, source)
    _must(
        source is not None or x.shape[0] == keys.shape[0],
        f"{op}: without source x must have a row for each of {keys.shape[0]} pairs, got {x.shape[0]}",
    )


def check_expand(
    y: Tensor, h: Tensor, b: Tensor, begins: Tensor, ranks: Tensor, keys: Tensor, source: Tensor | None, first: int
) -> None:
    """Raises ValueError where the shapes or dtypes of an `experts_expand` do not fit together."""
    op = "experts_expand"
    _must(
        y.dim() == 2 and b.dim() == 2 and 0 <= first <= y.shape[1] - b.shape[1],
        f"{op}: y must be [n, Y] with Y at least {first} + N and b [P, N], got {tuple(y.shape)} and {tuple(b.shape)}",
    )
    _must(y.stride(1) == 1 or y.shape[1] <= 1, f"{op}: y's rows must be contiguous, got strides {y.stride()}")
    _must(b.is_contiguous(), f"{op}: b must be contiguous, got strides {b.stride()}")
    _must(
        h.dim() == 2 and h.dtype in (torch.float32, torch.float64) and h.is_contiguous(),
        f"{op}: h must be contiguous float32 or float64 [m, max_rank], got {h.dtype} {tuple(h.shape)}",
    )
    _check_tables(op, begins, ranks, keys, source)
    _must(
        y.shape[0] == keys.shape[0] and (source is not None or h.shape[0] == keys.shape[0]),
        f"{op}: y, and without source h, must have a row for each of {keys.shape[0]} pairs, got {y.shape[0]} and "
        f"{h.shape[0]}",
    )


def check_combine(y: Tensor, places: Tensor, weights: Tensor) -> None:
    """Raises ValueError where the shapes or dtypes of an `experts_combine` do not fit together."""
    op = "experts_combine"
    _must(y.dim() == 2 and (y.stride(1) == 1 or y.shape[1] <= 1), f"{op}: y must be [n, H], got {tuple(y.shape)}")
    _must(
        places.dim() == 2 and places.shape == weights.shape and places.dtype in INDICES and places.is_contiguous(),
        f"{op}: places must be contiguous int32 or int64 [T, C] and weights [T, C], got {places.dtype} "
        f"{tuple(places.shape)} and {tuple(weights.shape)}",
    )


# -- registration ------------------------------------------------------------------------------------
def _fake_shrink(
    x: Tensor, a: Tensor, begins: Tensor, ranks: Tensor, keys: Tensor, source: Tensor | None, max_rank: int,
    backend: str,
) -> Tensor:  # fmt: skip
    check_shrink(x, a, begins, ranks, keys, source, max_rank)
    return x.new_empty((keys.shape[0], max_rank), dtype=torch.promote_types(x.dtype, torch.float32))


def _fake_expand(
    y: Tensor, h: Tensor, b: Tensor, begins: Tensor, ranks: Tensor, keys: Tensor, source: Tensor | None, first: int,
    backend: str,
) -> None:  # fmt: skip
    check_expand(y, h, b, begins, ranks, keys, source, first)


def _fake_combine(y: Tensor, places: Tensor, weights: Tensor, dtype: torch.dtype, backend: str) -> Tensor:
    check_combine(y, places, weights)
    return y.new_empty((places.shape[0], y.shape[1]), dtype=dtype)


_OPERATIONS: tuple[tuple[str, Any, Any], ...] = (
    ("experts_shrink", experts_shrink, _fake_shrink),
    ("experts_expand", experts_expand, _fake_expand),
    ("experts_combine", experts_combine, _fake_combine),
)
for _name, _function, _fake in _OPERATIONS:
    _library.impl(_name, _function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{_name}", _fake, lib=_library)
