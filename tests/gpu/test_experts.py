"""Experts' adapters on a CUDA device: mixed batches against merged weights, in half precision and in CUDA graphs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.experts import undecided
from tests.experts_adapters import PACKED, PEFT
from tests.experts_family import NAMES, Family, Names, adapters_of, check, error, errors, logits, require

Cuda = Callable[..., Family]
TOLERANCE = 1e-4  # of the largest logit, with fp32 products of full precision, as torch has them unless told otherwise
MIXES: list[Names] = [
    NAMES,
    ["attention", "other", None, "whole"],
    ["other", "other", "whole", "other"],
    ["whole"] * 4,
    [None] * 4,
    [None, None, "other", None],
]
FIXED = {"deterministic": True}
GREEDY: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}


@pytest.fixture(scope="module")
def cuda(tmp_path_factory: pytest.TempPathFactory) -> Cuda:
    """cuda("mixtral"): the family of that architecture, its base on the device."""
    made: dict[str, Family] = {}

    def get(name: str) -> Family:
        if name not in made:
            family = Family(require(name), tmp_path_factory.mktemp(name), adapters_of(name))
            made[name] = moved(family)
        return made[name]

    return get


def wide(name: str) -> dict[str, dict[str, Any]]:
    """Adapters of which one has a rank above what kernels take at once."""
    other = {"biases": True, "layout": PEFT} if name == "gpt_oss" else {"shared": True, "layout": PACKED}
    return {"whole": {"layout": PEFT, "r": 3}, "other": {"r": 20, **other}}


def moved(family: Family) -> Family:
    """The family with base and truth on the device."""
    family.base = family.base.cuda()
    family._alone, family._truth = {None: family.base}, {}
    return family


@pytest.mark.parametrize(
    ("experts", "settings"),
    [
        ("grouped_mm", {}),
        ("batched_mm", {}),
        ("eager", {}),
        ("grouped_mm", FIXED),
        ("grouped_mm", {"backend": "torch"}),
    ],
)
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "deepseek_v3", "granitemoe", "nemotron_h", "aria"])
def test_mixed_rows(cuda: Cuda, name: str, experts: str, settings: dict[str, Any]) -> None:
    family = cuda(name)
    model = family.model(experts=experts, **settings)
    for names in MIXES[:3]:
        check(family, model, names, TOLERANCE)
    for names in MIXES[3:]:
        assert max(errors(logits(model, family.inputs(), names), family.truth(names))) < TOLERANCE


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("experts", ["grouped_mm", "batched_mm"])
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_half_precision(name: str, experts: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """No further from float32 than the merged model. All experts get all tokens: rounding decides nothing."""
    adapters = wide(name)
    family = moved(Family(undecided(name), tmp_path, adapters))
    names = ["whole", None, "other", "whole"]
    model, want = family.model(experts=experts).to(dtype), family.truth(names)
    got = logits(model, family.inputs(), names)
    for i, one in enumerate(names):
        merged = copy.deepcopy(family.alone(one)).to(dtype)
        with torch.no_grad():
            own = merged(input_ids=family.rows[i][None].cuda()).logits[0]
        assert error(got[i], want[i]) < 2 * error(own, want[i]) + 1e-3
    turned = family.truth([*names[1:], "other"])
    assert min(errors(got, turned)) > 5 * max(errors(got, want))


@pytest.mark.parametrize("way", [{}, {"cache_implementation": "static"}, {"num_beams": 3}], ids=str)
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_generate_with_mixes_that_change(cuda: Cuda, name: str, way: dict[str, Any]) -> None:
    """With a static cache Transformers compiles the decode step and captures it in CUDA graphs."""
    family = cuda(name)
    model, inputs = family.model(experts="grouped_mm"), {k: v.cuda() for k, v in family.inputs().items()}
    alone = {key: value for key, value in way.items() if key != "cache_implementation"}
    for names in MIXES:
        got = model.generate(**inputs, adapter_names=list(names), **GREEDY, **way)[:, inputs["input_ids"].shape[1] :]
        want = [family.generated(one, i, **GREEDY, **alone)[0] for i, one in enumerate(names)]
        assert [torch.equal(*pair) for pair in zip(got, want, strict=True)] == [True] * 4, names


@torch.no_grad()
@pytest.mark.parametrize(
    ("dtype", "experts", "settings"),
    [
        (torch.float32, "batched_mm", {}),
        (torch.bfloat16, "batched_mm", {}),
        (torch.bfloat16, "grouped_mm", {}),
        (torch.bfloat16, "grouped_mm", FIXED),
    ],  # torch has no grouped product of float32 that can be captured
)
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_a_captured_decode_step_serves_other_mixes_and_later_loads(
    name: str, dtype: torch.dtype, experts: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    """One token per row, in a graph: mixes change between replays, then the adapters in the slots do. Of GPT-OSS the
    experts of a layer: Transformers 5.17 copies the mask of its attention from the CPU, which no graph may hold."""
    family = moved(Family(undecided(name), tmp_path, wide(name)))
    model = family.model(experts=experts, max_loras=2, **settings).to(dtype)
    ids = torch.tensor([[5], [9], [17]], device="cuda")
    mask, near = torch.ones_like(ids), TOLERANCE if dtype is torch.float32 else 5e-2
    path = family.mixture.paths(family.base, family.mixture.experts)[0]
    hidden = model.get_input_embeddings()(ids)[:, 0].detach()
    index, weights = torch.arange(4, device="cuda").repeat(3, 1), torch.full((3, 4), 0.25, device="cuda", dtype=dtype)

    def step(one: Any, rows: slice = slice(None)) -> torch.Tensor:
        """[rows, 1, out]: logits, or what the experts give."""
        if name != "gpt_oss":
            return one(input_ids=ids[rows], attention_mask=mask[rows], use_cache=False).logits
        own = next(one.parameters()).dtype
        return one.get_submodule(path)(hidden[rows].to(own), index[rows], weights[rows].to(own))[:, None]

    def truth(names: Names) -> list[torch.Tensor]:
        return [step(family.alone(one), slice(i, i + 1))[0] for i, one in enumerate(names)]

    with model.adapters(["whole", None, "other"]):
        for _ in range(3):
            step(model)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = step(model)
    mixes: list[Names] = [["whole", None, "other"], ["other", "whole", None], ["other"] * 3, [None] * 3]
    for names in [*mixes, ["whole", "whole", None]]:
        with model.adapters(names):
            graph.replay()
            got = list(out.clone())
        assert max(errors(got, truth(names))) < near, names
        if len(set(names)) > 1:
            assert max(errors(got, truth([*names[1:], names[0]]))) > 4 * near
    model.delete_adapter("whole")
    model.load_adapter(family.path("whole"), "whole again")
    with model.adapters(["whole again", "other", None]):
        graph.replay()
        assert max(errors(list(out), truth(["whole", "other", None]))) < near


@torch.no_grad()
def test_nothing_waits_for_the_device(cuda: Cuda) -> None:
    """A mixed batch through the experts' module without a synchronisation."""
    family = cuda("qwen3_moe")
    model = family.model(experts="grouped_mm").to(torch.bfloat16)
    module = model.get_submodule(family.mixture.paths(family.base, family.mixture.experts)[0])
    made = torch.Generator().manual_seed(1)
    x = torch.randn(4, 32, generator=made).to("cuda", torch.bfloat16)
    index = torch.stack([torch.randperm(6, generator=made)[:2] for _ in range(4)]).cuda()
    weights = torch.rand(4, 2, generator=made).to("cuda", torch.bfloat16)
    with model.adapters(NAMES):
        want = module(x, index, weights)
        torch.cuda.set_sync_debug_mode("error")
        try:
            got = module(x, index, weights)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    torch.testing.assert_close(got, want)
