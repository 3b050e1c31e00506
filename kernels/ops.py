"""Schemas of the operations, their shape rules and fakes. Backends register kernels for them, tests run on all.

Letters: R rows of the batch, T tokens per row, K in, N out, P rank rows of the pool, S slots, r rank of one slot,
p rows with an adapter. `order` int32 [R] lists the rows sorted by slot (base rows last), `offsets` int32 [S + 1] says
that the rows of slot s are order[offsets[s]:offsets[s + 1]], so p = offsets[S]; `starts`, `ranks` int32 [S] say that
slot s owns the rank rows starts[s]:starts[s] + ranks[s] of A and B. Base rows cost nothing and keep their value.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .torch_backend import expand, shrink

NAMESPACE = "hf_multilora"

SHRINK = (
    "lora_shrink(Tensor x, Tensor a, Tensor order, Tensor offsets, Tensor starts, Tensor ranks, int max_rank) -> Tensor"
)
EXPAND = (
    "lora_expand(Tensor y, Tensor h, Tensor b, Tensor order, Tensor offsets, Tensor starts, Tensor ranks) -> Tensor"
)

_library = torch.library.Library(NAMESPACE, "DEF")
_library.define(SHRINK)
_library.define(EXPAND)


def _must(condition: bool, what: str) -> None:
    if not condition:
        raise ValueError(what)


def check_tables(op: str, order: Tensor, offsets: Tensor, starts: Tensor, ranks: Tensor) -> None:
    for name, table in {"order": order, "offsets": offsets, "starts": starts, "ranks": ranks}.items():
        _must(
            table.dim() == 1 and table.dtype == torch.int32,
            f"{op}: {name} must be int32 [n], got {table.dtype} {tuple(table.shape)}",
        )
    _must(
        starts.shape == ranks.shape and offsets.shape[0] == starts.shape[0] + 1,
        f"{op}: starts and ranks must be [S] and offsets [S + 1], got {tuple(starts.shape)}, {tuple(ranks.shape)}, "
        f"{tuple(offsets.shape)}",
    )


def check_shrink(
    x: Tensor, a: Tensor, order: Tensor, offsets: Tensor, starts: Tensor, ranks: Tensor, max_rank: int
) -> None:
    """Raises ValueError where the shapes or dtypes of a `lora_shrink` do not fit together."""
    check_tables("lora_shrink", order, offsets, starts, ranks)
    _must(
        x.dim() == 3 and a.dim() == 2 and x.shape[2] == a.shape[1],
        f"lora_shrink: x must be [R, T, K] and a [P, K], got {tuple(x.shape)} and {tuple(a.shape)}",
    )
    _must(
        order.shape[0] == x.shape[0],
        f"lora_shrink: order must list the {x.shape[0]} rows of x, got {order.shape[0]}",
    )
    _must(x.dtype == a.dtype, f"lora_shrink: x and a must have one dtype, got {x.dtype} and {a.dtype}")
    _must(max_rank >= 1, f"lora_shrink: max_rank must be at least 1, got {max_rank}")


def check_expand(
    y: Tensor, h: Tensor, b: Tensor, order: Tensor, offsets: Tensor, starts: Tensor, ranks: Tensor
) -> None:
    """Raises ValueError where the shapes or dtypes of a `lora_expand` do not fit together."""
    check_tables("lora_expand", order, offsets, starts, ranks)
    _must(
        y.dim() == 3 and h.dim() == 3 and y.shape[:2] == h.shape[:2],
        f"lora_expand: y must be [R, T, N] and h [R, T, max_rank], got {tuple(y.shape)} and {tuple(h.shape)}",
    )
    _must(
        b.dim() == 2 and b.shape[1] == y.shape[2],
        f"lora_expand: b must be [P, {y.shape[2]}], got {tuple(b.shape)}",
    )
    _must(
        order.shape[0] == y.shape[0],
        f"lora_expand: order must list the {y.shape[0]} rows of y, got {order.shape[0]}",
    )
    _must(h.dtype in (torch.float32, torch.float64), f"lora_expand: h must be float32 or float64, got {h.dtype}")


def lora_shrink(
    x: Tensor, a: Tensor, order: Tensor, offsets: Tensor, starts: Tensor, ranks: Tensor, max_rank: int
) -> Tensor:
    """h[i, t, :r] = A_s x[order[i], t] for the sorted row i of slot s; zero beyond r and in base rows.

    x [R, T, K], a [P, K] of x's dtype -> float32 (float64 for float64) [R, T, max_rank], in sorted order.
    """
    check_shrink(x, a, order, offsets, starts, ranks, max_rank)
    return shrink(x, a, order, offsets, starts, ranks, max_rank)


def lora_expand(
    y: Tensor, h: Tensor, b: Tensor, order: Tensor, offsets: Tensor, starts: Tensor, ranks: Tensor
) -> Tensor:
    """out[order[i], t] = y[order[i], t] + B_s^T h[i, t, :r] for the sorted row i of slot s; base rows keep y.

    y [R, T, N], h [R, T, max_rank] from `lora_shrink`, b [P, N] -> a new tensor like y. The sum is in the wider
    dtype of y and h.
    """
    check_expand(y, h, b, order, offsets, starts, ranks)
    return expand(y, h, b, order, offsets, starts, ranks)


def _fake_shrink(
    x: Tensor, a: Tensor, order: Tensor, offsets: Tensor, starts: Tensor, ranks: Tensor, max_rank: int
) -> Tensor:
    check_shrink(x, a, order, offsets, starts, ranks, max_rank)
    return x.new_empty((x.shape[0], x.shape[1], max_rank), dtype=torch.promote_types(x.dtype, torch.float32))


def _fake_expand(
    y: Tensor, h: Tensor, b: Tensor, order: Tensor, offsets: Tensor, starts: Tensor, ranks: Tensor
) -> Tensor:
    check_expand(y, h, b, order, offsets, starts, ranks)
    return y.new_empty(y.shape)


def _keep_shrink(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, a, *tables, _ = inputs
    ctx.dtype = x.dtype
    ctx.save_for_backward(a, *tables)


def _shrink_backward(ctx: Any, grad_h: Tensor) -> tuple[Tensor | None, ...]:
    """dx[order[i], t] = A_s^T dh[i, t]: an expand. Factors are frozen, so A gets no gradient."""
    a, *tables = ctx.saved_tensors
    zeros = grad_h.new_zeros((*grad_h.shape[:2], a.shape[1]), dtype=ctx.dtype)
    return torch.ops.hf_multilora.lora_expand(zeros, grad_h, a, *tables), *[None] * 6


def _keep_expand(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, h, b, *tables = inputs
    ctx.max_rank = h.shape[2]
    ctx.save_for_backward(b, *tables)


def _expand_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """dy = dout and dh[i, t] = B_s dout[order[i], t]: a shrink. Factors are frozen, so B gets no gradient."""
    b, *tables = ctx.saved_tensors
    grad_h = torch.ops.hf_multilora.lora_shrink(grad.to(b.dtype), b, *tables, ctx.max_rank)
    return grad, grad_h, *[None] * 5


_library.impl("lora_shrink", lora_shrink, "CompositeExplicitAutograd")
_library.impl("lora_expand", lora_expand, "CompositeExplicitAutograd")
torch.library.register_fake(f"{NAMESPACE}::lora_shrink", _fake_shrink, lib=_library)
torch.library.register_fake(f"{NAMESPACE}::lora_expand", _fake_expand, lib=_library)
torch.library.register_autograd(f"{NAMESPACE}::lora_shrink", _shrink_backward, setup_context=_keep_shrink, lib=_library)
torch.library.register_autograd(f"{NAMESPACE}::lora_expand", _expand_backward, setup_context=_keep_expand, lib=_library)
