"""A PeftModel with adapters of experts is taken over as PEFT computes it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from hf_multilora import MultiLoRAModel

from .experts import MIXTURES

IDS = torch.tensor([[3, 5, 7, 9, 11], [2, 4, 6, 8, 10]])


@pytest.mark.parametrize("version", [None, "0.18.0"])  # what the file of an adapter that PEFT loaded may have said
def test_square_factors_lie_as_the_installed_peft_computes_them(version: str | None) -> None:
    base = MIXTURES["qwen3_moe"].build(1)  # whose gate_up_proj is square
    config = LoraConfig(r=3, target_modules=[], target_parameters=["mlp.experts.gate_up_proj"], init_lora_weights=False)
    peft_model: Any = get_peft_model(copy.deepcopy(base), config)
    with torch.no_grad():
        wanted, bare = peft_model(input_ids=IDS).logits, base(input_ids=IDS).logits
        peft_model.peft_config["default"].peft_version = version
        model = MultiLoRAModel.from_pretrained(peft_model)
        got = model(input_ids=IDS, adapter_names=["default", None]).logits
    scale = wanted.abs().max()
    assert (got[0] - wanted[0]).abs().max() <= 1e-5 * scale
    assert (got[1] - bare[1]).abs().max() <= 1e-5 * scale
    assert (wanted[0] - bare[0]).abs().max() > 1e-2 * scale
