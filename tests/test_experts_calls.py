"""Experts' adapters under other ways to call, place and take over a model, each against merged weights."""

from __future__ import annotations

import copy
import threading
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload, disk_offload
from peft import PeftModel

from hf_multilora import AdapterError, MultiLoRAModel
from tests.experts import MIXTURES
from tests.experts_adapters import EACH, PACKED, PEFT
from tests.experts_family import FAR, NAMES, TOLERANCE, Family, check, error, errors, logits
from tests.tiny import error as distance

pytest_plugins = ("tests.experts_fixtures",)
Mixtures = Callable[[str], Family]


@torch.no_grad()
def test_ids_and_a_block(mixtures: Mixtures) -> None:
    family = mixtures("olmoe")
    model, inputs = family.model(experts="grouped_mm"), family.inputs()
    mask, want = inputs["attention_mask"], family.truth(NAMES)
    inputs["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)
    known = {row["name"]: row["id"] for row in model.list_adapters()}
    out = model(**inputs, adapter_ids=torch.tensor([known.get(name, 0) for name in NAMES])).logits
    with model.adapters(NAMES):
        again = model(**inputs).logits
    for got in (out, again):
        assert max(errors([row[own.bool()] for row, own in zip(got, mask, strict=True)], want)) < TOLERANCE


@torch.no_grad()
@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3"])
def test_sequences_packed_into_one_row(mixtures: Mixtures, name: str) -> None:
    family = mixtures(name)
    model = family.model(experts="grouped_mm")
    lengths = [len(row) for row in family.rows]
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    out = model(input_ids=torch.cat(family.rows)[None], position_ids=positions, adapter_names=NAMES).logits[0]
    got, want = list(out.split(lengths)), family.truth(NAMES)
    assert max(errors(got, want)) < TOLERANCE
    assert min(errors(got, family.truth([*NAMES[1:], NAMES[0]]))) > FAR


@torch.no_grad()
def test_router_logits_of_each_row(mixtures: Mixtures) -> None:
    family = mixtures("qwen3_moe")
    model, count = family.model(experts="grouped_mm"), len(family.rows[1])
    rows = family.rows[1][None].repeat(4, 1)
    got = model(input_ids=rows, adapter_names=NAMES, output_router_logits=True).router_logits
    for layer, found in enumerate(got):
        for row, name in zip(found.view(4, count, -1), NAMES, strict=True):
            alone = copy.deepcopy(family.alone(name))  # which keeps what was asked for
            want = alone(input_ids=rows[:1], output_router_logits=True).router_logits[layer]
            assert distance(row, want) < TOLERANCE


@pytest.mark.parametrize("offload", ["cpu", "disk"])
def test_offloaded_weights(mixtures: Mixtures, offload: str, tmp_path: Path) -> None:
    """accelerate has the experts' weights on the device during their call only."""
    family = mixtures("qwen2_moe")
    base = copy.deepcopy(family.base)
    base.set_experts_implementation("grouped_mm")
    if offload == "cpu":
        cpu_offload(base, torch.device("cpu"))
    else:
        disk_offload(base, str(tmp_path), torch.device("cpu"))
    path = family.mixture.paths(base, family.mixture.experts)[0]
    assert base.get_submodule(path).down_proj.is_meta
    model = MultiLoRAModel.from_pretrained(base, {key: family.path(key) for key in family.adapters})
    check(family, model)
    check(family, model, ["other", "whole", None, "other"])


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_a_peft_model_is_taken_over(mixtures: Mixtures, name: str) -> None:
    family = mixtures(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peft = PeftModel.from_pretrained(copy.deepcopy(family.base), family.path("whole"), adapter_name="whole").eval()
    model = MultiLoRAModel.from_pretrained(peft)
    model.load_adapter(family.path("other"), "other")
    check(family, model, ["whole", None, "other", "whole"])
    assert not [path for path, _ in model.named_modules() if "lora" in path or "base_layer" in path]


def test_threads(mixtures: Mixtures) -> None:
    family = mixtures("mixtral")
    model, wrong = family.model(experts="grouped_mm"), list[Any]()

    def work(names: Any) -> None:
        for _ in range(5):
            got = logits(model, family.inputs(), names)
            if max(errors(got, family.truth(names))) > TOLERANCE:
                wrong.append(names)

    mixes = [NAMES, ["other"] * 4, [None] * 4, ["attention", "whole", "other", None]]
    for names in mixes:  # the truth, which is kept
        family.truth(names)
    threads = [threading.Thread(target=work, args=(names,)) for names in mixes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_bound_on_ranks(mixtures: Mixtures) -> None:
    family = mixtures("glm4_moe")
    check(family, family.model(max_lora_rank=5, max_loras=2), ["whole", None, "other", "whole"])
    with pytest.raises((AdapterError, ValueError), match=r"max_lora_rank|rank"):
        family.model(max_lora_rank=4)


def test_modules_that_are_not_wanted(mixtures: Mixtures) -> None:
    family = mixtures("mixtral")
    with pytest.raises(AdapterError, match="target_modules"):
        family.model(target_modules=["q_proj", "o_proj"])
    model = family.model("attention", target_modules=["q_proj", "o_proj"])
    check(family, model, ["attention", None, "attention", None])


def test_the_base_is_saved_as_it_is(mixtures: Mixtures, tmp_path: Path) -> None:
    family = mixtures("deepseek_v3")
    model = family.model()
    check(family, model)
    model.save_pretrained(tmp_path / "served")
    family.base.save_pretrained(tmp_path / "bare")
    again = type(family.base).from_pretrained(tmp_path / "served")
    again.set_experts_implementation("eager")
    assert max(errors(logits(again.eval(), family.inputs()), family.truth([None] * 4))) < TOLERANCE
    configs = [(tmp_path / one / "config.json").read_text() for one in ("served", "bare")]
    assert configs[0] == configs[1]


def test_more_than_a_thousand_pairs_of_expert_and_adapter(tmp_path: Path) -> None:
    settings = {**MIXTURES["qwen3_moe"].settings, "num_experts": 300, "num_experts_per_tok": 8}
    settings |= {"moe_intermediate_size": 8, "num_hidden_layers": 1}
    adapters: dict[str, dict[str, Any]] = {
        "a": {"layout": PEFT, "r": 1}, "b": {"layout": EACH, "r": 3}, "c": {"layout": PACKED, "r": 2, "shared": True},
        "d": {"layout": EACH, "r": 2, "experts": tuple(range(0, 300, 7))},
    }  # fmt: skip
    family = Family(replace(MIXTURES["qwen3_moe"], settings=settings, sharp=0.6), tmp_path, adapters, margin=1e-6)
    model = family.model(experts="grouped_mm", max_loras=4)
    check(family, model, ["a", "b", "c", "d"])
    check(family, model, ["c", None, "a", "b"])


def test_one_expert_gets_all_tokens(mixtures: Mixtures) -> None:
    """Experts without tokens, and one with those of all adapters."""
    family = mixtures("qwen3_moe")
    model = family.model(experts="grouped_mm")
    path = family.mixture.paths(family.base, family.mixture.experts)[0]
    module, made = model.get_submodule(path), torch.Generator().manual_seed(2)
    x = torch.randn(4, 32, generator=made)
    index, weights = torch.tensor([[3, 1]]).expand(4, 2), torch.rand(4, 2, generator=made)
    for experts in ("grouped_mm", "batched_mm", "eager"):
        model.set_experts_implementation(experts)
        with torch.no_grad(), model.adapters(NAMES):
            got = module(x, index, weights)
        for i, name in enumerate(NAMES):
            with torch.no_grad():
                alone = family.alone(name).get_submodule(path)(x[i : i + 1], index[:1], weights[i : i + 1])
            assert error(got[i], alone[0]) < TOLERANCE
