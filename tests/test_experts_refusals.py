"""Experts' adapters that cannot be served: refused by name when they are loaded, the model as it was before."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from hf_multilora import AdapterError, MultiLoRAModel
from tests.experts_adapters import EACH, PACKED, PEFT, describe, write
from tests.experts_family import TOLERANCE, Family, check, errors, logits
from tests.tiny import snapshot

pytest_plugins = ("tests.experts_fixtures",)
Mixtures = Callable[[str], Family]

Files = tuple[dict[str, Tensor], dict[str, Any]]  # tensors and config, to be changed
PREFIX = "base_model.model.model.layers.0.mlp.experts"


def without(pattern: str) -> Callable[[Files], None]:
    def change(files: Files) -> None:
        found = [key for key in files[0] if pattern in key]
        assert found
        for key in found:
            del files[0][key]

    return change


def renamed(old: str, new: str) -> Callable[[Files], None]:
    def change(files: Files) -> None:
        for key in [key for key in files[0] if old in key]:
            files[0][key.replace(old, new)] = files[0].pop(key)

    return change


def cut(pattern: str, dim: int) -> Callable[[Files], None]:
    """One entry less along a dimension."""

    def change(files: Files) -> None:
        for key in [key for key in files[0] if pattern in key]:
            files[0][key] = files[0][key].narrow(dim, 0, files[0][key].shape[dim] - 1).contiguous()

    return change


def both_layouts(files: Files) -> None:
    files[0][f"{PREFIX}.0.down_proj.lora_A.weight"] = torch.zeros(4, 16)
    files[0][f"{PREFIX}.0.down_proj.lora_B.weight"] = torch.zeros(32, 4)


def infinite(files: Files) -> None:
    files[0][f"{PREFIX}.lora_B.weight"][3, 2] = torch.inf


SQUARE = {"projections": ("up_proj",), "attention": False}
# what is wrong -> (architecture, adapter, change, what the error must say)
BAD: Mapping[str, tuple[str, dict[str, Any], Callable[[Files], Any], str]] = {
    "more experts": ("qwen3_moe", {"layout": EACH}, renamed("experts.0.", "experts.9."), r"expert.*9|9.*expert"),
    "other experts, nested": ("qwen3_moe", {"layout": PEFT}, cut("lora_A", 0), r"experts"),
    "other experts, packed": ("qwen3_moe", {"layout": PACKED}, cut("w2.lora", 0), r"w2|down_proj"),
    "no version, square": (
        "qwen3_moe", {"layout": PEFT, **SQUARE}, lambda files: files[1].pop("peft_version"), r"peft_version",
    ),
    "A without B": ("qwen3_moe", {"layout": EACH}, without("experts.2.up_proj.lora_B"), r"experts\.2\.up_proj"),
    "an expert's other width": ("qwen3_moe", {"layout": EACH}, cut("experts.1.down_proj.lora_A", 1), r"experts\.1"),
    "two layouts at once": ("qwen3_moe", {"layout": PEFT}, both_layouts, r"down_proj"),
    "experts of a dense layer": (
        "deepseek_v3", {"layout": PEFT}, renamed("layers.1.mlp", "layers.0.mlp"), r"layers\.0",
    ),
    "experts of no layer": ("qwen3_moe", {"layout": EACH}, renamed("layers.1.mlp", "layers.7.mlp"), r"layers\.7"),
    # of another base, which has fewer? or trained on these only?
    "the first experts alone": (
        "qwen3_moe", {"layout": EACH, "experts": (0, 1)}, lambda files: None, r"2 experts .*has 6.*target_modules",
    ),
    "infinite": ("qwen3_moe", {"layout": PEFT}, infinite, r"finite"),
    "one parameter too deep": (
        "qwen3_moe", {"layout": PEFT}, renamed("experts.base_layer.", "experts.base_layer.base_layer."), r"base_layer",
    ),
    "a projection that is not there": ("nemotron_h", {"layout": EACH}, renamed(".up_proj", ".gate_proj"), r"gate_proj"),
    "DoRA": ("qwen3_moe", {"layout": PEFT}, lambda files: files[1].update(use_dora=True), r"DoRA"),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_bad_files(mixtures: Mixtures, what: str, tmp_path: Path) -> None:
    name, settings, change, says = BAD[what]
    family = mixtures(name)
    adapter = describe(family.mixture, family.base, **({"r": 4, "seed": 7} | settings))
    write(adapter, family.base, tmp_path)
    weights, config = tmp_path / "adapter_model.safetensors", tmp_path / "adapter_config.json"
    files = load_file(weights), json.loads(config.read_text())
    change(files)
    save_file(files[0], weights)
    config.write_text(json.dumps(files[1]))
    base = copy.deepcopy(family.base)
    before = snapshot(base)
    with pytest.raises(AdapterError, match=says):
        MultiLoRAModel.from_pretrained(base, {"bad": str(tmp_path)})
    after = snapshot(base)
    assert after.keys() == before.keys() and not [key for key, value in before.items() if after[key] != value]
    model = family.model()
    want = check(family, model)
    known, report = model.list_adapters(), model.memory_report()
    with pytest.raises(AdapterError, match=says):
        model.load_adapter(str(tmp_path), "bad")
    with pytest.raises(AdapterError, match=says):
        model.load_adapter(str(tmp_path), "whole", load_inplace=True)
    assert model.list_adapters() == known and model.memory_report() == report
    assert all(torch.equal(one, own) for one, own in zip(check(family, model), want, strict=True))


def test_an_implementation_that_is_not_known(mixtures: Mixtures) -> None:
    """An error that says what to do, and no base output; base rows and attention are served as ever."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, batched_mm_experts_forward

    family = mixtures("mixtral")
    ALL_EXPERTS_FUNCTIONS.register("of_another_package", batched_mm_experts_forward)
    try:
        model = family.model(experts="of_another_package")
        names = ["attention", None, "attention", None]
        assert max(errors(logits(model, family.inputs(), names), family.truth(names))) < TOLERANCE
        with pytest.raises(NotImplementedError, match="set_experts_implementation"):
            logits(model, family.inputs(), ["whole", None, "other", "attention"])
        model.set_experts_implementation("grouped_mm")
        check(family, model)
    finally:
        ALL_EXPERTS_FUNCTIONS._global_mapping.pop("of_another_package", None)
