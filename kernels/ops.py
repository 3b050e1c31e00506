"""Schemas of the operations, their meaning, fakes and gradients. Backends compute them, the same tests run on all.

Letters: R rows of the batch, T tokens per row, K in, N out, P rank rows of the pool, S slots, r rank of one slot,
L slices (modules fed by one input; else 1), Z partial sums.

Tables, on the device of the data: `order` int32 [R] lists the rows sorted by slot (base rows last), `offsets`
int32 [S + 1] says that the rows of slot s are order[offsets[s]:offsets[s + 1]]; `starts`, `ranks` int32 [L, S] say that
slot s owns the rank rows starts[l, s]:starts[l, s] + ranks[l, s] in slice l. Rank row p of slice l is row p * L + l of
a, and column p * L + l of an h that holds all rank rows: interleaved, so that the first rows of a hold the first rank
rows of every slice. `slices` int64 [L, 3]: first column in y, columns n, and where in b, taken as flat, rank row 0 of
that slice would lie; a rank row of the slice has n elements. The slices cover all columns of y. Triton has float16,
bfloat16 and float32, torch float64 too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .backends import backend as backend_named
from .checks import check_dtypes, check_expand, check_shrink

NAMESPACE = "hf_multilora"
TABLES = "Tensor order, Tensor offsets, Tensor starts, Tensor ranks"
SHRINK = f"lora_shrink(Tensor x, Tensor a, {TABLES}, int max_rank, int split, str backend) -> Tensor"
EXPAND = (
    f"lora_expand(Tensor y, Tensor h, Tensor b, {TABLES}, Tensor? slices, Tensor? scale, Tensor? bias, "
    f"bool own_columns, str backend) -> Tensor"
)

_library = torch.library.Library(NAMESPACE, "DEF")
_library.define(SHRINK)
_library.define(EXPAND)


def lora_shrink(
    x: Tensor, a: Tensor, order: Tensor, offsets: Tensor, starts: Tensor, ranks: Tensor, max_rank: int,
    split: int = 1, backend: str = "torch",
) -> Tensor:  # fmt: skip
    """sum over z of h[z, i, t, l * max_rank : l * max_rank + r] = A_s x[i, t] for row i of slot s, in slice l.

    x [R, T, K], a [P * L, K] of x's dtype -> float32 (float64 for float64) [split, R, T, L * max_rank]. What lies
    beyond r and in base rows is not specified, and nothing reads it. K is summed in `split` ranges, one per z (torch:
    1).
    """
    check_shrink(x, a, order, offsets, starts, ranks, max_rank, split)
    check_dtypes("lora_shrink", backend, x)
    return backend_named(backend).shrink(x, a, order, offsets, starts, ranks, max_rank, split)


def lora_expand(
    y: Tensor, h: Tensor, b: Tensor, order: Tensor, offsets: Tensor, starts: Tensor, ranks: Tensor,
    slices: Tensor | None = None, scale: Tensor | None = None, bias: Tensor | None = None, own_columns: bool = False,
    backend: str = "torch",
) -> Tensor:  # fmt: skip
    """out[i, t] = scale_s * (y[i, t] + B_s^T h[i, t, :r]) + bias_s for row i of slot s; other rows keep y.

    y [R, T, N], h [Z, R, T, L * max_rank] from `lora_shrink`, b [P, N] (with slices: flat) -> a new tensor like y; with
    slices flat [R * T * N]: that of each slice, [R, T, n], at R * T * its first column. The sums over z and r are in
    float32 or wider. own_columns: h [1, R, T, P * L] of any dtype holds a column for every rank row, as a matmul with
    the augmented weight gives them, and only the row's own r are read. scale, bias: [S, N], of slots that own rank rows
    in that slice.
    """
    check_expand(y, h, b, order, offsets, starts, ranks, slices, scale, bias, own_columns)
    check_dtypes("lora_expand", backend, y, h, b)
    return backend_named(backend).expand(y, h, b, order, offsets, starts, ranks, slices, scale, bias, own_columns)


def _fake_shrink(
    x: Tensor, a: Tensor, order: Tensor, offsets: Tensor, starts: Tensor, ranks: Tensor, max_rank: int, split: int,
    backend: str,
) -> Tensor:  # fmt: skip
    check_shrink(x, a, order, offsets, starts, ranks, max_rank, split)
    shape = (split, x.shape[0], x.shape[1], starts.shape[0] * max_rank)
    return x.new_empty(shape, dtype=torch.promote_types(x.dtype, torch.float32))


def _fake_expand(
    y: Tensor, h: Tensor, b: Tensor, order: Tensor, offsets: Tensor, starts: Tensor, ranks: Tensor,
    slices: Tensor | None, scale: Tensor | None, bias: Tensor | None, own_columns: bool, backend: str,
) -> Tensor:  # fmt: skip
    check_expand(y, h, b, order, offsets, starts, ranks, slices, scale, bias, own_columns)
    return y.new_empty(y.shape if slices is None else (y.numel(),))


def _keep_shrink(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, a, *tables, _, _, ctx.backend = inputs
    ctx.dtype, ctx.pieces = x.dtype, tables[2].shape[0]
    ctx.save_for_backward(a, *tables)


def _shrink_backward(ctx: Any, grad_h: Tensor) -> tuple[Tensor | None, ...]:
    """dx[i, t] = A_s^T dh[i, t]: an expand. Whoever reads h adds up its planes, so each has the same gradient.
    Factors are frozen, so A gets none."""
    a, *tables = ctx.saved_tensors
    _require_plain("lora_shrink", ctx.pieces == 1)
    zeros = grad_h.new_zeros((*grad_h.shape[1:3], a.shape[1]), dtype=ctx.dtype)
    grad = torch.ops.hf_multilora.lora_expand(
        zeros, grad_h[:1].contiguous(), a.contiguous(), *tables, None, None, None, False, ctx.backend
    )
    return grad, *[None] * 8


def _keep_expand(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, h, b, *tables, slices, scale, bias, own_columns, ctx.backend = inputs
    ctx.planes, ctx.max_rank = h.shape[0], h.shape[3]
    ctx.plain = slices is None and scale is None and bias is None and not own_columns
    ctx.save_for_backward(b, *tables)


def _expand_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """dy = dout and dh[z, i, t] = B_s dout[i, t]: a shrink. Factors are frozen, so B gets no gradient."""
    b, *tables = ctx.saved_tensors
    _require_plain("lora_expand", ctx.plain)
    grad_h = torch.ops.hf_multilora.lora_shrink(grad.to(b.dtype), b, *tables, ctx.max_rank, 1, ctx.backend)
    order, offsets, _, ranks = tables
    at = torch.arange(ctx.max_rank, device=b.device)
    slots = torch.searchsorted(offsets[1:].contiguous(), torch.arange(len(order), device=b.device), right=True)
    own = torch.nn.functional.pad(ranks[0], (0, 1))[slots]  # ranks of the sorted rows, 0 for base rows
    live = torch.zeros(len(order), ctx.max_rank, dtype=torch.bool, device=b.device)
    live[order.long()] = at < own[:, None]
    grad_h = grad_h.masked_fill(~live[:, None, :], 0)  # unspecified values must not flow back
    return grad, grad_h.expand(ctx.planes, -1, -1, -1), *[None] * 10


def _require_plain(op: str, plain: bool) -> None:
    if not plain:
        raise NotImplementedError(f"{op}: gradients need one slice, no scale or bias, and h from lora_shrink")


for _name, _function, _fake in (("lora_shrink", lora_shrink, _fake_shrink), ("lora_expand", lora_expand, _fake_expand)):
    _library.impl(_name, _function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{_name}", _fake, lib=_library)
torch.library.register_autograd(f"{NAMESPACE}::lora_shrink", _shrink_backward, setup_context=_keep_shrink, lib=_library)
torch.library.register_autograd(f"{NAMESPACE}::lora_expand", _expand_backward, setup_context=_keep_expand, lib=_library)
