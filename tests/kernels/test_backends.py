"""The kernels of every backend on the CPU: the torch backend in full, Triton's in its interpreter on small cases.

The interpreter computes tl.dot on bfloat16 wrongly, so there float16 and float32; tests/gpu/test_kernels.py has all.
"""

from __future__ import annotations

import pytest
import torch

from hf_multilora.kernels.backends import TORCH, TRITON, TRITON_FIXED, backend
from hf_multilora.kernels.torch_backend import add_one
from tests.kernels import properties
from tests.kernels.suite import BACKENDS, BASE, INTERPRETED, KERNELS, MIXES, SHAPES, case, run, within

HALVES = [torch.bfloat16, torch.float16]

ON_ALL = pytest.mark.parametrize("name", BACKENDS)
ON_KERNELS = pytest.mark.parametrize("name", KERNELS)


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("r", [1, 8, 13, 64, 128])
@pytest.mark.parametrize(
    ("dtype", "tokens"), [(torch.float32, 1), (torch.float32, 300), (torch.bfloat16, 7), (torch.float16, 7)]
)
def test_torch_equals_a_loop_over_rows(dtype: torch.dtype, r: int, tokens: int, mix: str) -> None:
    c = case(dtype, r, tokens, mix)
    properties.check_numbers(c, TORCH)
    properties.check_expand_gated(c)


@INTERPRETED
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("r", [1, 8, 13, 64, 128])
def test_triton_equals_a_loop_over_rows(r: int, mix: str) -> None:
    dtype = torch.float16 if r in (8, 128) else torch.float32
    properties.check_numbers(case(dtype, r, 2, mix, rows=5), TRITON, own=r == 13)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_shapes_with_torch(dtype: torch.dtype, shape: str) -> None:
    properties.check_numbers(case(dtype, **SHAPES[shape]), TORCH)


@ON_KERNELS
@pytest.mark.parametrize("shape", SHAPES)
def test_shapes_with_triton(shape: str, name: str) -> None:
    dtype = torch.float16 if shape in ("whole tiles", "larger tiles", "three slices") else torch.float32
    properties.check_numbers(case(dtype, **SHAPES[shape]), name)


@ON_KERNELS
@pytest.mark.parametrize("split", [3, 16])
def test_split(split: int, name: str) -> None:
    """16 ranges are more than K has blocks: the last ones hold zeros."""
    properties.check_numbers(case(tokens=1, rows=3, k=300, widths=(20, 31), r=3), name, split, own=False)


@ON_ALL
@pytest.mark.parametrize("k", [37, 2100])
def test_the_split_that_a_layer_gets(k: int, name: str) -> None:
    properties.check_chosen_split(case(tokens=1, rows=3, k=k, widths=(20,), r=3), name)


@ON_ALL
@pytest.mark.parametrize(
    "dtypes", [{"y": torch.float16}, {"a": torch.float16, "x": torch.float16, "b": torch.float16}], ids=["y", "factors"]
)
def test_factors_of_another_dtype(dtypes: dict[str, torch.dtype], name: str) -> None:
    properties.check_numbers(case(tokens=2).to(**dtypes), name, own="y" in dtypes)


@ON_ALL
@pytest.mark.parametrize("mix", MIXES)
def test_what_is_unspecified_does_not_matter(mix: str, name: str) -> None:
    properties.check_unspecified(case(tokens=3, mix=mix, slots=7, rows=5), name)


@ON_ALL
def test_what_is_unspecified_does_not_matter_in_slices(name: str) -> None:
    c = case(torch.float16, tokens=3, mix="skewed", slots=7, rows=5, widths=(9, 70, 16), epilogue=True)
    properties.check_unspecified(c, name)


@ON_ALL
@pytest.mark.parametrize("widths", [(51,), (9, 40)])
def test_run_again(widths: tuple[int, ...], name: str) -> None:
    properties.check_twice(case(torch.float16, epilogue=True, widths=widths), name)


@ON_ALL
def test_slots_change_tenants(name: str) -> None:
    properties.check_reuse(case(tokens=2), name)


@INTERPRETED
def test_fixed_answers_do_not_depend_on_the_batch() -> None:
    properties.check_fixed(case(torch.float16, tokens=1, rows=3, k=2100, widths=(30, 40), r=3))
    properties.check_fixed(case(tokens=3, rows=4, mix="skewed", epilogue=True))


@INTERPRETED
@pytest.mark.parametrize("k", [2100, 5000])
def test_fixed_layers_and_traced_ones_split_alike(k: int) -> None:
    c = case(tokens=1, rows=2, k=k, widths=(9,), r=3)
    fixed, tables = backend(TRITON_FIXED), c.tables()
    out = fixed.expand(c.y, fixed.shrink(c.x, c.a, *tables, c.max_rank), c.b, *tables)
    assert fixed.split(k) > 1 and torch.equal(out, run(c, TRITON_FIXED, split=fixed.split(k))[1])
    assert not torch.equal(out, run(c, TRITON_FIXED, split=1)[1]), "the split must be one that shows"


@ON_ALL
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("rows", "tokens"), [(0, 3), (1, 0), (2, 0)])
def test_nothing_to_do(rows: int, tokens: int, dtype: torch.dtype, name: str) -> None:
    c, kernels = case(dtype, rows=rows, tokens=tokens), backend(name)
    tables = c.tables()
    h = kernels.shrink(c.x, c.a, *tables, c.max_rank)
    assert h.shape[1:] == (rows, tokens, c.max_rank) and h.dtype == torch.float32
    assert kernels.expand(c.y, h, c.b, *tables).shape == c.y.shape


@ON_ALL
def test_no_input_features(name: str) -> None:
    c = case(k=0)
    h, out = run(c, name)
    assert torch.equal(out, c.y) and not h.nan_to_num(0).any()


@ON_ALL
def test_inputs_of_any_stride(name: str) -> None:
    c = case()
    wide = torch.randn(6, 7, 74)
    for x, y in (
        (wide[..., ::2], c.y.mT.contiguous().mT),
        (wide[:, -1:, :37].expand(6, 7, 37), c.y[:, :1].expand(6, 7, 51)),
        (wide.transpose(0, 1).contiguous().transpose(0, 1)[..., :37], c.y),
    ):
        properties.check_numbers(type(c)(**(c.__dict__ | {"x": x, "y": y})), name, own=False)


@pytest.mark.parametrize("shape", [(6, 7), (6,), ()])
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
def test_add_one_takes_any_shape(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    c = case(dtype, 13)
    (_, _, _, own, _), (_, _, _, other, _) = next(c.parts(0)), next(c.parts(2))
    x, y = {2: (c.x, c.y), 1: (c.x[:, 0], c.y[:, 0]), 0: (c.x[0, 0], c.y[0, 0])}[len(shape)]
    truth = y.double() + x.double() @ c.a[own].double().T @ c.b[own].double()
    plain = y + x @ c.a[own].T @ c.b[own]
    bound = 2 * float((plain.double() - truth).abs().max())
    bound += 2 * torch.finfo(dtype).eps * float(truth.abs().max())
    got = add_one(y, x, c.a[own], c.b[own])
    assert got.shape == y.shape and float((got.double() - truth).abs().max()) <= bound
    assert float((add_one(y, x, c.a[other], c.b[other]).double() - truth).abs().max()) > bound


def test_the_suite_notices_what_it_must() -> None:
    """Cases have what they are made for; the comparison fails on NaN and on rows that nobody wrote."""
    c = case(mix="skewed", widths=(51, 9))
    assert c.ranks[0][0] == 0 and c.ranks[1][0] > 0 and {BASE, 0, 1} == set(c.rows)
    order, offsets, *_ = c.tables()
    assert order.tolist() != sorted(order.tolist()) and offsets[-1] == sum(slot != BASE for slot in c.rows)
    truth, out = torch.ones(3, dtype=torch.float64), torch.ones(3)
    assert within(out, truth, out) and not within(out * torch.nan, truth, out) and not within(out + 1e-3, truth, out)
