"""Experts and routers trained by PEFT itself (target_parameters): the sites read add what PEFT adds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hf_multilora.formats import AdapterError
from tests.formats import tiny
from tests.formats import tiny_experts as moe

GATE_UP, DOWN = "experts.gate_up_proj", "experts.down_proj"
BIASES = ["experts.gate_up_proj_bias", "experts.down_proj_bias"]
# name -> (model, config); the order in target_parameters says nothing
MADE: dict[str, tuple[str, dict[str, Any]]] = {
    "both": ("mixtral", {"target_parameters": [DOWN, GATE_UP]}),
    "gate_up only": ("qwen3_moe", {"target_parameters": [GATE_UP]}),
    "down only": ("qwen3_moe", {"target_parameters": ["mlp.experts.down_proj"]}),
    "one layer": ("olmoe", {"target_parameters": ["layers.1.mlp.experts.gate_up_proj"]}),
    "full path": ("qwen3_moe", {"target_parameters": ["model.layers.0.mlp.experts.down_proj"]}),
    "transposed": ("gpt_oss", {"target_parameters": [GATE_UP, DOWN]}),
    "biases": ("gpt_oss", {"target_parameters": [*BIASES, GATE_UP, DOWN]}),
    "one bias": ("gpt_oss", {"target_parameters": [BIASES[0]]}),
    "bias and weight": ("gpt_oss", {"target_parameters": [BIASES[1], GATE_UP]}),
    "router": ("mixtral", {"target_parameters": ["mlp.gate.weight", GATE_UP]}),
    "biased router": ("gpt_oss", {"target_parameters": ["mlp.router.weight"]}),
    "halves in line, transposed": ("aria", {"target_parameters": [GATE_UP, DOWN]}),
    "ungated": ("nemotron_h", {"target_parameters": ["experts.up_proj", DOWN]}),
    "in and out taken for each other": ("llama4", {"target_parameters": [GATE_UP, DOWN]}),
    "the same, square": ("llama4", {"target_parameters": [DOWN], "settings": {"intermediate_size": 32}}),
    "one parameter per module": ("jetmoe", {"target_parameters": ["mlp.input_linear.weight", "output_linear.weight"]}),
    "elsewhere": ("granitemoe", {"target_parameters": [GATE_UP, DOWN, "router.weight"]}),
    "beside attention": ("olmoe", {"target_parameters": [DOWN], "target_modules": ["q_proj", "v_proj"]}),
    "dense and shared": (
        "deepseek_v3",
        {"target_parameters": [GATE_UP, "shared_experts.up_proj.weight", "gate.weight"]},
    ),
    "rslora": ("mixtral", {"target_parameters": [GATE_UP, DOWN], "use_rslora": True}),
    "patterns": (
        "mixtral",
        {
            "target_parameters": [GATE_UP, DOWN, "gate.weight"],
            "rank_pattern": {"gate_up_proj": 3, "layers.0.mlp.gate.weight": 1, "gate": 7, "experts": 9},
            "alpha_pattern": {r"model\.layers\.1\.mlp\.experts\.down_proj": 11, "gate": 13},
        },
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", MADE)
def test_as_peft(kind: str, tmp_path: Path) -> None:
    name, config = MADE[kind]
    config = dict(config)
    settings = config.pop("settings", {})
    if not any(shape.kind == "experts" for shape in moe.census(moe.base(name, **settings)).values()):
        pytest.skip("the installed Transformers has these experts in another form")
    expected = moe.save(moe.base(name, **settings), tmp_path, **config)
    adapter = moe.read(tmp_path, moe.base(name, **settings))
    moe.assert_same(moe.deltas(adapter, moe.census(moe.base(name, **settings))), expected)
    for site, pair in adapter.factors.items():
        assert pair.a.is_contiguous() and pair.b.is_contiguous() and pair.a.dtype == torch.float64
        assert pair.rank <= 3 and (pair.parts is None or set(pair.parts) == {pair.rank}), site


def test_columns_of_b_are_rank_major(tmp_path: Path) -> None:
    """Negative control: columns in the order of the rows of A give other deltas."""
    expected = moe.save(moe.base("mixtral"), tmp_path, target_parameters=[DOWN])
    key = "base_model.model.model.layers.0.mlp.experts.lora_B.weight"
    tiny.edit_weights(tmp_path, tiny.changed(key, lambda b: b.reshape(32, 2, 6).transpose(1, 2).reshape(32, 12)))
    got = moe.deltas(moe.read(tmp_path, moe.base("mixtral")), moe.census(moe.base("mixtral")))
    with pytest.raises(AssertionError, match=r"layers\.0\.mlp\.experts\.down_proj differs"):
        moe.assert_same(got, expected)


@pytest.mark.parametrize("targets", [[GATE_UP], [DOWN], [GATE_UP, DOWN]])
def test_parameters_are_told_by_shape_where_the_config_names_none(targets: list[str], tmp_path: Path) -> None:
    expected = moe.save(moe.base("olmoe"), tmp_path, target_parameters=targets)
    tiny.edit_config(tmp_path, target_parameters=None)
    moe.assert_same(moe.deltas(moe.read(tmp_path, moe.base("olmoe")), moe.census(moe.base("olmoe"))), expected)


def test_parameters_that_shapes_do_not_tell(tmp_path: Path) -> None:
    square = {"moe_intermediate_size": 32}  # up_proj and down_proj have one shape
    moe.save(moe.base("nemotron_h", **square), tmp_path, target_parameters=["experts.up_proj"])
    moe.read(tmp_path, moe.base("nemotron_h", **square))
    tiny.edit_config(tmp_path, target_parameters=None)
    with pytest.raises(AdapterError, match=r"could be those of up_proj or down_proj .*no target_parameters"):
        moe.read(tmp_path, moe.base("nemotron_h", **square))


@pytest.mark.parametrize("prefix", ["", "base_model.model._orig_mod."])
def test_names_of_other_wrappings(prefix: str, tmp_path: Path) -> None:
    expected = moe.save(moe.base("olmoe"), tmp_path, target_parameters=[GATE_UP, DOWN])
    tiny.rename_keys(tmp_path, lambda key: key.replace("base_model.model.", prefix))
    moe.assert_same(moe.deltas(moe.read(tmp_path, moe.base("olmoe")), moe.census(moe.base("olmoe"))), expected)


def test_the_inner_model_reads_an_adapter_of_the_whole_one(tmp_path: Path) -> None:
    moe.save(moe.base("olmoe"), tmp_path, target_parameters=["model.layers.0.mlp.experts.gate_up_proj"])
    adapter = moe.read(tmp_path, moe.base("olmoe").model)
    assert list(adapter.factors) == ["layers.0.mlp.experts:gate_up_proj"]


def test_a_convs_weight_as_a_parameter(tmp_path: Path) -> None:
    """PEFT takes GPT-2's weight [in, out] for that of a linear."""
    expected = moe.save(tiny.gpt2().double(), tmp_path, target_parameters=["attn.c_attn.weight"])
    adapter = tiny.read(tmp_path, tiny.gpt2().double())
    assert adapter.factors["transformer.h.0.attn.c_attn"].a.shape == (2, 16)
    moe.assert_same({f"{m}.weight": delta.T for m, delta in tiny.ours(adapter).items()}, expected)


@pytest.mark.filterwarnings("ignore")
def test_a_single_expert(tmp_path: Path) -> None:
    one = {"num_experts": 1, "num_experts_per_tok": 1}
    expected = moe.save(moe.base("olmoe", **one), tmp_path, target_parameters=[GATE_UP, DOWN])
    adapter = moe.read(tmp_path, moe.base("olmoe", **one))
    assert {pair.parts for pair in adapter.factors.values()} == {(2,)}
    got = moe.deltas(adapter, moe.census(moe.base("olmoe", **one)))
    moe.assert_same({name: delta[0] for name, delta in got.items()}, expected)


def test_a_bias_of_a_router_is_no_target(tmp_path: Path) -> None:
    moe.save(moe.base("gpt_oss"), tmp_path, target_parameters=["router.weight"])
    tiny.edit_config(tmp_path, target_parameters=["router.bias"])
    with pytest.raises(AdapterError, match=r"target_parameters trains model\.layers\.0\.mlp\.router\.bias"):
        moe.read(tmp_path, moe.base("gpt_oss"))
