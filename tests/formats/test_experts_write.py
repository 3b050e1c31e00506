"""Adapters of experts written back: PEFT loads them, and reading them again gives the same deltas."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel

from hf_multilora.formats import Adapter, AdapterError, LoraFactors, write_adapter
from tests.experts import MIXTURES
from tests.experts_adapters import EACH, PACKED, PEFT, PEFT_18, describe, write
from tests.formats import tiny
from tests.formats import tiny_experts as moe

EXPERTS = "model.layers.0.mlp.experts"
# name -> (model, how the adapter is made)
MADE: dict[str, tuple[str, dict[str, Any]]] = {
    "nested": ("qwen3_moe", {"layout": PEFT}),
    "nested of old": ("mixtral", {"layout": PEFT_18}),
    "biases, transposed": ("gpt_oss", {"layout": PEFT, "biases": True}),
    "halves": ("qwen3_moe", {"layout": EACH}),
    "one half": ("olmoe", {"layout": EACH, "projections": ("up_proj", "down_proj")}),
    "some experts": ("olmoe", {"layout": EACH, "experts": (1, 4)}),
    "router": ("mixtral", {"layout": EACH, "router": True}),
    "shared": ("qwen2_moe", {"layout": PACKED, "shared": True, "others": True}),
    "dense beside": ("deepseek_v3", {"layout": EACH, "others": True, "router": True}),
    "dense only": ("glm4_moe", {"layout": EACH, "others": True, "projections": ()}),
    "ungated": ("nemotron_h", {"layout": PEFT}),
    "rslora": ("olmoe", {"layout": EACH, "rslora": True}),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", MADE)
def test_peft_and_the_reader_find_the_same(kind: str, tmp_path: Path) -> None:
    name, made = MADE[kind]
    model = MIXTURES[name].build(0)
    write(describe(MIXTURES[name], model, **({"r": 3, "seed": 1} | made)), model, tmp_path / "from")
    modules = moe.census(model)
    adapter = moe.read(tmp_path / "from", model)
    want = moe.deltas(adapter, modules)
    write_adapter(tmp_path / "to", adapter, modules)
    again = moe.read(tmp_path / "to", model)
    moe.assert_same(moe.deltas(again, modules), want)
    loaded = PeftModel.from_pretrained(model.double(), tmp_path / "to")
    got = {k: v for k, v in moe.peft_deltas(loaded).items() if v.any()}
    moe.assert_near(got, want)
    assert json.loads((tmp_path / "to" / tiny.CONFIG).read_text())["use_rslora"] == made.get("rslora", False)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["llama4", "jetmoe"])
def test_experts_outside_the_interface(name: str, tmp_path: Path) -> None:
    targets = ["experts.gate_up_proj", "experts.down_proj", "mlp.input_linear.weight"]
    want = moe.save(moe.base(name), tmp_path / "from", target_parameters=targets)
    modules = moe.census(moe.base(name))
    write_adapter(tmp_path / "to", moe.read(tmp_path / "from", moe.base(name)), modules)
    moe.assert_same(moe.deltas(moe.read(tmp_path / "to", moe.base(name)), modules), want)
    moe.assert_same(moe.peft_deltas(PeftModel.from_pretrained(moe.base(name), tmp_path / "to")), want)


def read(tmp_path: Path, name: str = "olmoe", **made: Any) -> tuple[Adapter, Any]:
    model = MIXTURES[name].build(0)
    write(describe(MIXTURES[name], model, **({"r": 3, "seed": 1, "attention": False} | made)), model, tmp_path / "from")
    adapter = moe.read(tmp_path / "from", model)
    return adapter, moe.census(model)


def test_bits_are_kept(tmp_path: Path) -> None:
    adapter, modules = read(tmp_path, layout=PEFT)
    write_adapter(tmp_path / "to", adapter, modules)
    again = moe.read(tmp_path / "to", MIXTURES["olmoe"].build(0))
    assert list(again.factors) == list(adapter.factors)
    for site, pair in adapter.factors.items():
        other = again.factors[site]
        assert torch.equal(pair.a, other.a) and torch.equal(pair.b, other.b) and pair.scaling == other.scaling
        assert pair.parts == other.parts


def test_scales_and_ranks_of_several_parameters(tmp_path: Path) -> None:
    adapter, modules = read(tmp_path, layout=EACH)
    made = dict(adapter.factors)
    for i, site in enumerate(made):  # each its own scale; and up_proj has more rank rows in one expert
        made[site] = replace(made[site], scaling=0.5 + i)
    wide = made[f"{EXPERTS}:up_proj"]
    parts = (5, *(3,) * 5)
    made[f"{EXPERTS}:up_proj"] = LoraFactors(torch.randn(20, 32), torch.randn(20, 20), wide.scaling, parts)
    adapter = replace(adapter, factors=made)
    write_adapter(tmp_path / "to", adapter, modules)
    again = moe.read(tmp_path / "to", MIXTURES["olmoe"].build(0))
    assert again.factors[f"{EXPERTS}:gate_up_proj"].parts == (8,) * 6
    moe.assert_near(moe.deltas(again, modules), moe.deltas(adapter, modules))


def test_biases_of_which_nothing_is_shared(tmp_path: Path) -> None:
    adapter, modules = read(tmp_path, "gpt_oss", layout=PEFT)
    out = modules[EXPERTS].experts.projections["gate_up_proj_bias"].out_features
    pair = LoraFactors(torch.randn(7, 1), torch.randn(out, 7), 0.5, (1, 2, 0, 1, 2, 1))
    adapter = replace(adapter, factors={f"{EXPERTS}:gate_up_proj_bias": pair})
    write_adapter(tmp_path / "to", adapter, modules)
    again = moe.read(tmp_path / "to", MIXTURES["gpt_oss"].build(0))
    moe.assert_near(moe.deltas(again, modules), moe.deltas(adapter, modules))


def test_square_experts_say_which_peft_they_are_for(tmp_path: Path) -> None:
    model = MIXTURES["qwen3_moe"].build(0)
    adapter = moe.read(
        write(
            describe(MIXTURES["qwen3_moe"], model, EACH, r=3, seed=1, projections=("gate_proj",)), model, tmp_path / "a"
        ),
        model,
    )
    write_adapter(tmp_path / "to", adapter, moe.census(model))
    assert json.loads((tmp_path / "to" / tiny.CONFIG).read_text())["peft_version"] == "0.19.1"
    moe.assert_same(
        moe.deltas(moe.read(tmp_path / "to", model), moe.census(model)), moe.deltas(adapter, moe.census(model))
    )


def test_half_a_projection_is_no_adapter(tmp_path: Path) -> None:
    adapter, modules = read(tmp_path, layout=PEFT)
    pair = LoraFactors(torch.randn(18, 20), torch.zeros(0, 18), 1.0, (3,) * 6)
    broken = replace(adapter, factors={f"{EXPERTS}:down_proj.a": pair})
    with pytest.raises(AdapterError, match=r"site model\.layers\.0\.mlp\.experts:down_proj must have A and B"):
        write_adapter(tmp_path / "to", broken, modules)
    for parts in ((3,) * 5, (3,) * 5 + (4,), None):
        odd = LoraFactors(torch.randn(18, 20), torch.zeros(0, 18), 1.0, None)
        object.__setattr__(odd, "parts", parts)
        one = LoraFactors(torch.zeros(3, 0), torch.randn(32, 3), 1.0)
        sites = {f"{EXPERTS}:down_proj.a": odd, f"{EXPERTS}:down_proj.b1": one}
        with pytest.raises(AdapterError, match=r"must have rank rows for each of 6 experts"):
            write_adapter(tmp_path / "to", replace(adapter, factors=sites), modules)
    with pytest.raises(AdapterError, match=r"experts has no gate_down, which the adapter trains"):
        write_adapter(tmp_path / "to", replace(adapter, factors={f"{EXPERTS}:gate_down": pair}), modules)
    with pytest.raises(AdapterError, match=r"norm holds no experts"):
        write_adapter(tmp_path / "to", replace(adapter, factors={"model.norm:down_proj": pair}), modules)
    assert not (tmp_path / "to").exists()
