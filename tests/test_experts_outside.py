"""Experts outside Transformers' experts interface: mixed batches are right, or the adapter is refused by name.

The truth is PEFT with one adapter on its own, one row of the same padded batch at a time; for Llama 4 and for the
linears of Switch and NLLB also the weights that PEFT merges.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor

from hf_multilora import AdapterError, MultiLoRAModel
from tests.architecture_table import ARCHITECTURES
from tests.architectures import Inputs, row_of
from tests.tiny import error, snapshot

NAMES = ["a", None, "b", "a"]
TOLERANCE = 5e-5
# architecture -> what PEFT trains
WORKS: Mapping[str, dict[str, Any]] = {
    "llama4": {"target_parameters": ["feed_forward.experts.gate_up_proj", "feed_forward.experts.down_proj"]},
    "llama4, one parameter": {"target_parameters": ["feed_forward.experts.down_proj"]},
    "jetmoe": {"target_parameters": ["mlp.input_linear.weight", "mlp.output_linear.weight"]},
    "jetmoe, experts of attention": {
        "target_parameters": ["experts.input_linear.weight", "experts.output_linear.weight"],
    },
    "switch_transformers": {"target_modules": r".*(expert_\d\.w[io]|SelfAttention\.q)"},
    "nllb_moe": {"target_modules": r".*(expert_\d\.fc[12]|self_attn\.q_proj)"},
}  # fmt: skip
REFUSED: Mapping[str, tuple[dict[str, Any], str]] = {
    "dbrx": ({"target_parameters": ["experts.mlp.w1", "experts.mlp.w2"]}, r"blocks\.0\.ffn\.experts\.mlp"),
}


def trained(base: Any, settings: Mapping[str, Any], folder: Path, r: int) -> Any:
    """PEFT's own model with random factors, saved in the folder."""
    torch.manual_seed(r)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = LoraConfig(r=r, lora_alpha=2 * r, **({"target_modules": []} | dict(settings)))
        peft = get_peft_model(copy.deepcopy(base), config)
        with torch.no_grad():
            for key, weight in peft.named_parameters():
                if "lora_" in key:
                    weight.normal_(std=0.3)
        peft.save_pretrained(folder)
    return peft.eval()


@torch.no_grad()
def answers(model: Any, inputs: Inputs, **named: Any) -> Tensor:
    """Logits, zero where the input is padding."""
    out, mask = model(**inputs, **named).logits, inputs.get("attention_mask")
    return out.masked_fill(mask[..., None] == 0, 0.0) if mask is not None and mask.shape == out.shape[:2] else out


@pytest.mark.parametrize("case", WORKS)
def test_mixed_rows(case: str, tmp_path: Path) -> None:
    arch = ARCHITECTURES[case.split(",")[0]]
    base, settings = arch.build(), WORKS[case]
    alone = {name: trained(base, settings, tmp_path / name, r) for name, r in (("a", 2), ("b", 3))}
    truths = {None: base, **{name: peft.get_base_model() for name, peft in alone.items()}}
    model = MultiLoRAModel.from_pretrained(copy.deepcopy(base), {name: str(tmp_path / name) for name in alone})

    def truth(inputs: Inputs, names: Sequence[str | None]) -> list[Tensor]:
        return [answers(truths[name], row_of(inputs, i, len(names)))[0] for i, name in enumerate(names)]

    for tokens in (6, 4):
        torch.manual_seed(tokens)
        inputs = arch.inputs(len(NAMES), tokens)
        for names in (NAMES, ["b", "a", None, "b"], ["a"] * 4, [None] * 4):
            got, want = answers(model, inputs, adapter_names=names), truth(inputs, names)
            assert max(error(one, own) for one, own in zip(got, want, strict=True)) < TOLERANCE
        turned = truth(inputs, [*NAMES[1:], NAMES[0]])
        told = [error(one, own) for one, own in zip(turned, truth(inputs, NAMES), strict=True)]
        assert min(told[:3]) > 1e-3, "another adapter would pass"
    for name in alone:
        report = model.verify(name, arch.inputs(2, 5))
        assert report and report.effect > 10 * report.tolerance, str(report)
    if not arch.silent:
        inputs = {key: value for key, value in arch.inputs(len(NAMES), 6).items() if key != "decoder_input_ids"}
        given = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
        out = model.generate(**inputs, adapter_names=NAMES, **given)
        rows = [truths[name].generate(**row_of(inputs, i, len(NAMES)), **given) for i, name in enumerate(NAMES)]
        assert torch.equal(out, torch.cat(rows))


@pytest.mark.parametrize("case", WORKS)
def test_unpatch(case: str, tmp_path: Path) -> None:
    arch = ARCHITECTURES[case.split(",")[0]]
    base, inputs = arch.build(), arch.inputs(3, 5)
    trained(base, WORKS[case], tmp_path, 2)
    want = answers(base, inputs)  # before the snapshot: routers keep the dtype of their last input
    before = snapshot(base)
    model = MultiLoRAModel.from_pretrained(base, {"a": str(tmp_path)})
    got = answers(model, inputs, adapter_names=["a", None, "a"])
    assert error(got[1], want[1]) < TOLERANCE and error(got[0], want[0]) > 1e-3
    assert torch.equal(answers(model, inputs), want)
    model.unpatch()
    after = snapshot(base)
    assert after.keys() == before.keys() and not [key for key, value in before.items() if after[key] != value]
    assert torch.equal(answers(base, inputs), want)


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(name: str, tmp_path: Path) -> None:
    settings, named = REFUSED[name]
    base = ARCHITECTURES[name].build()
    trained(base, settings, tmp_path, 2)
    before = snapshot(base)
    with pytest.raises(AdapterError, match=named):
        MultiLoRAModel.from_pretrained(base, {"a": str(tmp_path)})
    after = snapshot(base)
    assert after.keys() == before.keys() and not [key for key, value in before.items() if after[key] != value]
    model = MultiLoRAModel.from_pretrained(base)
    before = snapshot(base)
    with pytest.raises(AdapterError, match=named):
        model.load_adapter(str(tmp_path))
    assert snapshot(base) == before and not model.list_adapters()


@pytest.mark.parametrize("name", ["switch_transformers", "llama4"])
def test_the_truth_is_also_what_peft_merges(name: str, tmp_path: Path) -> None:
    arch = ARCHITECTURES[name]
    base, inputs = arch.build(), arch.inputs(2, 5)
    peft = trained(base, WORKS[name], tmp_path, 2)
    want = answers(peft.get_base_model(), inputs)
    again = PeftModel.from_pretrained(copy.deepcopy(base), str(tmp_path)).merge_and_unload()
    assert error(answers(again, inputs), want) < TOLERANCE < 1e-3 < error(answers(base, inputs), want)
