"""Gated MLPs computed as one on a CUDA device: kernels at real widths, whole models, graphs."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from tests.gpu.exact import exact  # noqa: F401 (a fixture for every test here)
from tests.gpu.test_host import model_of
from tests.kernels.suite import EXPANDS
from tests.kernels.test_gated import ACTS, after_shrink, check, laid, pair
from tests.layers.test_gated import ADAPTERS, MIXES, asked  # noqa: F401 (a fixture)
from tests.tiny import Family, assert_rows, llama, logits, same_ids

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
# rows, tokens, width, rank
SHAPES = [
    (1, 1, 14336, 16),
    (8, 1, 3072, 16),
    (64, 1, 3072, 64),
    (4, 300, 1000, 16),
    (3, 77, 130, 40),
    (2, 2100, 512, 8),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "tokens", "width", "r"), SHAPES)
@torch.no_grad()
def test_kernels(rows: int, tokens: int, width: int, r: int, dtype: torch.dtype, monkeypatch: Any) -> None:
    from hf_multilora.kernels import triton_laid

    mix = "one" if rows == 1 else "all distinct"
    c = pair(dtype, width, rows=rows, tokens=tokens, r=r, k=256, mix=mix, device="cuda")
    for piece, act in enumerate(ACTS):
        check(c, laid(c, piece, act), piece, act)
        check(c, after_shrink(c, piece, act), piece, act)
    for how in EXPANDS.values():
        for name, value in how.items():
            monkeypatch.setattr(triton_laid, name, value)
        check(c, laid(c, 0, "silu"), 0, "silu")
        check(c, after_shrink(c, 0, "silu"), 0, "silu")


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Family:
    torch.manual_seed(0)
    return Family(llama(hidden_size=256, intermediate_size=512), tmp_path_factory.mktemp("adapters"), ADAPTERS)


@pytest.mark.parametrize("tokens", [1, 9, 600])
@torch.no_grad()
def test_models(family: Family, asked: list[bool], tokens: int) -> None:  # noqa: F811
    model, inputs = model_of(family), same_ids(4, tokens)
    for names in (*MIXES[:2], MIXES[3]):
        assert_rows(logits(model, inputs.cuda(), names).cpu(), family.truth(inputs, names), 1e-4)
    assert all(asked) and len(asked) == 6


@pytest.mark.parametrize("dtype", DTYPES[:2])
@torch.no_grad()
def test_half_precision_errs_no_more_than_steps(
    family: Family,
    asked: list[bool],  # noqa: F811
    dtype: torch.dtype,
    monkeypatch: Any,
) -> None:
    """The kernel rounds where the class's forward does, so that its answers may even be the same."""
    from hf_multilora.layers import gated

    model, inputs, names = model_of(family, dtype=dtype), same_ids(4, 40), MIXES[0]
    truth, got = family.truth(inputs, names), logits(model, inputs.cuda(), names).float().cpu()
    assert all(asked) and asked
    monkeypatch.setattr(gated, "product", lambda *args: None)
    steps = logits(model, inputs.cuda(), names).float().cpu()
    bare = copy.deepcopy(family.base).to("cuda", dtype)(input_ids=inputs.cuda()).logits.float().cpu()
    wrong = family.truth(inputs, MIXES[1])
    assert 5 * (got - truth).norm() < (got - wrong).norm(), "control: another mix"
    assert (got - truth).norm() <= 1.1 * (steps - truth).norm()
    assert (got[1] - truth[1]).norm() <= 1.2 * (bare[1] - truth[1]).norm(), "a row of the base errs as the bare model"


@pytest.mark.parametrize("tokens", [1, 300])
@torch.no_grad()
def test_a_captured_step_serves_every_mix(
    family: Family,
    asked: list[bool],  # noqa: F811
    tokens: int,
) -> None:
    model, inputs = model_of(family, max_loras=3, max_lora_rank=32), same_ids(4, tokens)
    on_device = inputs.cuda()
    with model.adapters(MIXES[0]):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                model(input_ids=on_device, use_cache=False)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = model(input_ids=on_device, use_cache=False).logits
    assert all(asked) and len(asked) == 6
    for names in (MIXES[0], MIXES[1], MIXES[3], ["b", "a", None, "b"]):
        captured.fill_(torch.nan)
        with model.adapters(names):
            graph.replay()
            got = captured.cpu()
        assert_rows(got, family.truth(inputs, names), 1e-4)
