"""Mixed batches of `generate` on mixture-of-experts models: every row's tokens are those of its merged model alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf

from tests.experts import MIXTURES, PAD, single
from tests.experts_family import NAMES, Family, Names, adapters_of

pytest_plugins = ("tests.experts_fixtures",)
Served = Callable[[str], tuple[Family, Any]]
GREEDY = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None, "pad_token_id": PAD}
WAYS: dict[str, dict[str, Any]] = {
    "static cache": {"cache_implementation": "static"},
    "beams": {"num_beams": 3},
    "beams, several sequences": {"num_beams": 3, "num_return_sequences": 2},
    "static cache with beams": {"num_beams": 2, "cache_implementation": "static"},
    "chunked prefill": {"prefill_chunk_size": 2},
    "no cache": {"use_cache": False},
}


def generated(model: Any, family: Family, names: Names, **settings: Any) -> list[torch.Tensor]:
    """New tokens [sequences, tokens] of each row of a mixed batch."""
    inputs = family.inputs(len(names))
    out = model.generate(**inputs, adapter_names=list(names), **settings)[:, inputs["input_ids"].shape[1] :]
    return list(out.unflatten(0, (len(names), -1)))


def check(model: Any, family: Family, names: Names = NAMES, **settings: Any) -> None:
    """Control: each row's neighbour in the names answers otherwise."""
    settings = GREEDY | settings
    got = generated(model, family, names, **settings)
    alone = {"compile_config", "adapter_names"}
    settings = {key: value for key, value in settings.items() if key not in alone}
    want = [family.generated(name, i, **settings) for i, name in enumerate(names)]
    assert [torch.equal(*pair) for pair in zip(got, want, strict=True)] == [True] * len(names), (got, want)
    turned = [*names[1:], names[0]]
    other = [family.generated(name, i, **settings) for i, name in enumerate(turned)]
    told = [torch.equal(a, b) for a, b, x, y in zip(got, other, names, turned, strict=True) if x != y]
    assert not any(told), "another adapter answers alike: the test could not fail"


@pytest.mark.parametrize("experts", ["grouped_mm", "eager"])
@pytest.mark.parametrize("name", [n for n, m in MIXTURES.items() if m.generates])
def test_greedy(served_mixture: Served, name: str, experts: str) -> None:
    """With grouped_mm Transformers changes to batched_mm for the decode steps, and back."""
    family, model = served_mixture(name)
    model.set_experts_implementation(experts)
    try:
        check(model, family)
        assert model.config.get_text_config()._experts_implementation == experts
    finally:
        model.set_experts_implementation("grouped_mm")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["mixtral", "gpt_oss", "deepseek_v3"])
def test_other_ways(served_mixture: Served, name: str, way: str) -> None:
    check(served_mixture(name)[1], served_mixture(name)[0], **WAYS[way])


def test_sampling_several_sequences(served_mixture: Served) -> None:
    """Rows of one adapter in all rows: the draws are those of the merged model on the same batch."""
    family, model = served_mixture("qwen3_moe")
    settings = GREEDY | {"do_sample": True, "num_return_sequences": 3, "top_k": 0}
    torch.manual_seed(1)
    got = generated(model, family, ["whole"], **settings)[0]
    torch.manual_seed(1)
    assert torch.equal(got, family.generated("whole", 0, **settings))
    assert len({tuple(row.tolist()) for row in got}) > 1


def test_one_adapter_for_all_rows_and_the_default(served_mixture: Served) -> None:
    family, model = served_mixture("olmoe")
    inputs = family.inputs()
    want = [family.generated("other", i, **GREEDY) for i in range(4)]
    got = generated(model, family, ["other"] * 4, **GREEDY)
    assert [torch.equal(*pair) for pair in zip(got, want, strict=True)] == [True] * 4
    model.set_adapter("other")
    try:
        out = model.generate(**inputs, **GREEDY)[:, inputs["input_ids"].shape[1] :]
    finally:
        model.set_adapter(None)
    assert [torch.equal(row[None], alone) for row, alone in zip(out, want, strict=True)] == [True] * 4


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_a_compiled_static_cache(name: str, tmp_path: Path) -> None:
    """The decode step that `generate` compiles serves any mix without being compiled again."""
    family = Family(single(name), tmp_path, adapters_of(name))
    model = family.model(experts="grouped_mm")
    graphs: list[int] = []

    def backend(graph: torch.fx.GraphModule, example: list[Any]) -> Any:
        graphs.append(len(example))
        return graph.forward

    torch._dynamo.reset()
    config = tf.CompileConfig(backend=backend, mode=None, fullgraph=True)
    config._compile_all_devices = True
    counts = []
    for names in (NAMES, ["other", "attention", None, "whole"], ["other"] * 4, [None] * 4):
        got = generated(model, family, names, **GREEDY, cache_implementation="static", compile_config=config)
        counts.append(len(graphs))
        want = [family.generated(one, i, **GREEDY) for i, one in enumerate(names)]
        assert [torch.equal(*pair) for pair in zip(got, want, strict=True)] == [True] * 4
    torch._dynamo.reset()
    assert counts[0] > 0 and counts[1:] == [counts[0]] * 3, f"graphs compiled after each mix: {counts}"
