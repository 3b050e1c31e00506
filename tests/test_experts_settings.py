"""Ranks and scales of experts' adapters, and how their base is loaded: what the files and arguments may say."""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

from hf_multilora import MultiLoRAModel
from tests.experts_adapters import EACH, describe, merge, write
from tests.experts_family import FAR, NAMES, TOLERANCE, Family, check, errors, logits

pytest_plugins = ("tests.experts_fixtures",)
Mixtures = Callable[[str], Family]
BOTH = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


@torch.no_grad()
@pytest.mark.parametrize(
    "patterns",
    [
        {},
        {"rank_pattern": {"experts.down_proj": 5}, "alpha_pattern": {"experts.down_proj": 3}},
        {"rank_pattern": {"gate_up_proj": 2}, "alpha_pattern": {"down_proj": 9}, "use_rslora": True},
        {"rank_pattern": {r"layers\.1\.mlp\.experts\.gate_up_proj": 6}},
        {"rank_pattern": {"experts": 6}, "alpha_pattern": {"experts": 2}},
        {"rank_pattern": {"q_proj": 7}, "target_modules": ["q_proj"]},
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["olmoe", "gpt_oss"])
def test_patterns_as_peft_reads_them(mixtures: Mixtures, name: str, patterns: dict[str, Any], tmp_path: Path) -> None:
    family = mixtures(name)
    settings = {"target_modules": [], "target_parameters": BOTH} | patterns
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peft = get_peft_model(copy.deepcopy(family.base), LoraConfig(r=4, lora_alpha=5, **settings)).eval()
        made = torch.Generator().manual_seed(4)
        for key, weight in peft.named_parameters():
            if "lora_" in key:
                weight.copy_(torch.randn(weight.shape, generator=made) * 0.25)
        peft.save_pretrained(tmp_path)
    model = family.model("other")
    model.load_adapter(str(tmp_path), "trained")
    got = logits(model, family.inputs(), ["trained", None, "other", "trained"])
    want = family.truth([None, None, "other", None])
    for i in (0, 3):
        want[i] = peft(input_ids=family.rows[i][None]).logits[0]
    assert max(errors(got, want)) < TOLERANCE
    assert min(errors(got[:1], family.truth([None]))) > FAR


def test_experts_of_different_ranks(mixtures: Mixtures, tmp_path: Path) -> None:
    """Of Transformers 4's keys: one expert's linear has another rank, which alone changes its scale."""
    family = mixtures("mixtral")
    adapter = describe(family.mixture, family.base, EACH, r=4, seed=11)
    write(adapter, family.base, tmp_path)
    tensors, parts = load_file(tmp_path / "adapter_model.safetensors"), list(adapter.parts)
    for key in [key for key in tensors if "experts.2.w2" in key]:
        tensors[key] = (tensors[key][:2] if "lora_A" in key else tensors[key][:, :2]).contiguous()
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    config = tmp_path / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"rank_pattern": {r"experts\.2\.w2": 2}}))
    for i, part in enumerate(parts):
        if part.parameter == "down_proj":  # alpha / 2, where the others have alpha / 4
            b = part.b.clone()
            b[2, :, :2], b[2, :, 2:] = 2 * part.b[2, :, :2], 0
            parts[i] = replace(part, b=b)
    model, truth = family.model("whole"), merge(family.base, replace(adapter, parts=tuple(parts)))
    model.load_adapter(str(tmp_path), "uneven")
    got = logits(model, family.inputs(), ["uneven", "whole", None, "uneven"])
    want = family.truth([None, "whole", None, None])
    other = merge(family.base, adapter)
    for i in (0, 3):
        with torch.no_grad():
            want[i] = truth(input_ids=family.rows[i][None]).logits[0]
            assert min(errors([other(input_ids=family.rows[i][None]).logits[0]], [want[i]])) > 1e-3
    assert max(errors(got, want)) < TOLERANCE
    (row,) = [row for row in model.list_adapters() if row["name"] == "uneven"]
    assert row["max_rank"] == 4


@pytest.mark.parametrize("experts", ["eager", "batched_mm"])
def test_a_base_from_a_folder(mixtures: Mixtures, experts: str, tmp_path: Path) -> None:
    family = mixtures("qwen2_moe")
    family.base.save_pretrained(tmp_path)
    paths = {key: family.path(key) for key in family.adapters}
    model = MultiLoRAModel.from_pretrained(str(tmp_path), paths, experts_implementation=experts, dtype=torch.float32)
    assert model.config._experts_implementation == experts
    check(family, model.eval())


def test_a_plan_says_what_is_taken(mixtures: Mixtures, tmp_path: Path) -> None:
    family = mixtures("deepseek_v3")
    family.base.save_pretrained(tmp_path)
    paths = {key: family.path(key) for key in family.adapters}
    plan = MultiLoRAModel.plan(str(tmp_path), paths, max_loras=3, dtype=torch.float32)
    model = MultiLoRAModel.from_pretrained(str(tmp_path), paths, max_loras=3, dtype=torch.float32)
    check(family, model.eval(), NAMES)
    report = model.memory_report()
    assert {site: module.bytes for site, module in plan.per_module.items()} == report.per_module
    assert plan.device_bytes == report.device_bytes and 0 < plan.shared_expert_bytes < plan.expert_bytes
