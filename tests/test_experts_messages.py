"""What users of experts are told, and what the setting all-linear lets in."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_multilora import MultiLoRAModel
from hf_multilora.formats import AdapterError
from hf_multilora.verify import VerifyReport

from .experts import MIXTURES
from .experts_adapters import PEFT, describe, write

PARAMETERS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


@pytest.fixture(scope="module")
def base() -> Any:
    return MIXTURES["mixtral"].build(1)


@pytest.fixture
def folder(base: Any, tmp_path: Path) -> Path:
    """An adapter of all experts."""
    adapter = describe(MIXTURES["mixtral"], base, PEFT, r=2, seed=3, attention=False)
    return write(adapter, base, tmp_path / "adapter")


def edit(folder: Path, **settings: Any) -> str:
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | settings))
    return str(folder)


def test_a_misspelt_parameter_is_named(base: Any, folder: Path) -> None:
    path = edit(folder, target_parameters=["mlp.experts.gateup_proj", *PARAMETERS[1:]])
    with pytest.raises(
        AdapterError, match=r"names down_proj of it \(and mlp\.experts\.gateup_proj, which the base lacks\)"
    ):
        MultiLoRAModel.from_pretrained(copy.deepcopy(base), {"a": path})


def test_all_linear_lets_experts_in_and_plans_without_them(base: Any, folder: Path) -> None:
    """PEFT takes them for linears in models whose files it converts from Transformers 4."""
    model = MultiLoRAModel.from_pretrained(copy.deepcopy(base), {"a": str(folder)}, target_modules="all-linear")
    assert model.verify("a")
    planned = MultiLoRAModel.plan(base, max_lora_rank=4, target_modules="all-linear").per_module
    assert planned and not [site for site in planned if "experts" in site or site.endswith("mlp.gate")]
    assert MultiLoRAModel.plan(base, max_lora_rank=4, target_modules=["experts"]).expert_bytes > 0
    with pytest.raises(AdapterError, match=r"target_modules=\[q_proj\] does not allow"):
        MultiLoRAModel.from_pretrained(copy.deepcopy(base), {"a": str(folder)}, target_modules=["q_proj"])


def test_a_plan_refuses_the_registered_adapter_that_loading_would(base: Any, folder: Path) -> None:
    """Each projection that it trains must be allowed, not one of them."""
    model = MultiLoRAModel.from_pretrained(copy.deepcopy(base), {"a": str(folder)})
    assert MultiLoRAModel.plan(model, target_modules=["gate_up_proj", "experts.down_proj"]).expert_bytes > 0
    with pytest.raises(AdapterError, match=r"'a' trained .*experts:down_proj.* does not allow that"):
        MultiLoRAModel.plan(model, target_modules=["experts.gate_up_proj"])


def test_a_plan_names_what_is_near(base: Any) -> None:
    with pytest.raises(
        ValueError,
        match=r"experts' parameters .*got mlp\.experts\.gate_up; the base has e\.g\. gate_proj, gate_up_proj",
    ):
        MultiLoRAModel.plan(base, max_lora_rank=4, target_modules=["mlp.experts.gate_up"])


def test_half_precision_may_choose_other_experts(base: Any, folder: Path) -> None:
    model = MultiLoRAModel.from_pretrained(copy.deepcopy(base).to(torch.bfloat16), {"a": str(folder)})
    assert model.verify("a").routed
    assert not MultiLoRAModel.from_pretrained(copy.deepcopy(base), {"a": str(folder)}).verify("a").routed
    wrong = VerifyReport("a", False, 0.2, 0.0, 0.5, 0.08, None, routed=True)
    assert "DIFFERS from" in str(wrong) and "load the base in float32 to know" in str(wrong)
    assert "float32" not in str(VerifyReport("a", False, 0.2, 0.0, 0.5, 0.08, "lm_head"))
