"""Mixed batches on mixture-of-experts models: every row equals the model with its adapter merged by hand, run alone.

The material is checked first: what is merged by hand answers as PEFT does, wherever PEFT reads the layout rightly.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel

from tests.experts import MIXTURES, PROJ
from tests.experts_adapters import EACH, PACKED, PEFT, PEFT_18
from tests.experts_family import FAR, NAMES, TOLERANCE, Family, check, error, errors, logits, require

pytest_plugins = ("tests.experts_fixtures",)
Mixtures = Callable[[str], Family]
IMPLEMENTATIONS = ("eager", "batched_mm", "grouped_mm")
FIRST_TWO = [f"experts.{e}.{name}" for e in range(2) for name in PROJ]
# layout -> how the adapter is made: on every architecture that is named for it
LAYOUTS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "PEFT": ({"layout": PEFT}, ("mixtral", "gpt_oss")),
    "PEFT, square": ({"layout": PEFT, "projections": ("up_proj",), "attention": False}, ("qwen3_moe",)),
    "PEFT 0.18": ({"layout": PEFT_18}, ("mixtral", "olmoe", "gpt_oss", "nemotron_h")),
    "PEFT 0.18, square": ({"layout": PEFT_18, "projections": ("up_proj",), "attention": False}, ("qwen3_moe",)),
    "one parameter: down": ({"layout": PEFT, "projections": ("down_proj",)}, ("mixtral", "gpt_oss")),
    "one parameter: gate and up": ({"layout": PEFT, "projections": ("up_proj",)}, ("olmoe", "gpt_oss")),
    "PEFT, rsLoRA": ({"layout": PEFT, "rslora": True}, ("qwen2_moe", "gpt_oss")),
    "biases": ({"layout": PEFT, "biases": True}, ("gpt_oss", "privacy_filter")),
    "biases without a weight of theirs": (
        {"layout": PEFT, "biases": True, "projections": ("down_proj",)},
        ("gpt_oss", "privacy_filter"),
    ),
    "each expert": ({"layout": EACH}, ("mixtral", "qwen3_moe")),
    "each expert, rsLoRA": ({"layout": EACH, "rslora": True}, ("mixtral", "nemotron_h")),
    "some experts": ({"layout": EACH, "experts": (1, 4, 5)}, ("mixtral", "nemotron_h")),
    "the first experts, named": (
        {"layout": EACH, "experts": (0, 1), "target_modules": [*FIRST_TWO, "q_proj", "o_proj"]},
        ("qwen3_moe", "olmoe"),
    ),
    "gate without up": ({"layout": EACH, "projections": ("gate_proj", "down_proj")}, ("mixtral", "qwen3_moe")),
    "up alone": ({"layout": EACH, "projections": ("up_proj",)}, ("olmoe", "nemotron_h")),
    "packed": ({"layout": PACKED}, ("mixtral", "aria", "gpt_oss")),
    "packed, shared": ({"layout": PACKED, "shared": True}, ("qwen3_moe", "privacy_filter")),
    "packed, up without gate, shared": (
        {"layout": PACKED, "shared": True, "projections": ("up_proj", "down_proj")},
        ("mixtral", "muse_spark", "gpt_oss"),
    ),
    "with dense layers and shared experts": ({"layout": EACH, "others": True}, ("deepseek_v3", "qwen2_moe")),
    "without experts": ({"layout": PEFT, "others": True, "projections": ()}, ("deepseek_v3", "qwen2_moe")),
}
MATERIAL = [*((n, PEFT) for n in MIXTURES if MIXTURES[n].generates),
            *((n, EACH) for n in ("mixtral", "qwen3_moe", "olmoe", "deepseek_v3", "glm4_moe"))]  # fmt: skip


@pytest.mark.parametrize(("name", "layout"), MATERIAL)
def test_the_hand_merged_truth_is_what_peft_answers(name: str, layout: str, tmp_path: Path) -> None:
    made = Family(require(name), tmp_path, {"a": {"layout": layout, "r": 3, "biases": name == "gpt_oss"}})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peft = PeftModel.from_pretrained(copy.deepcopy(made.base), made.path("a")).eval()
    with torch.no_grad():
        got = [peft(input_ids=row[None]).logits[0] for row in made.rows]
    assert max(errors(got, made.truth(["a"] * 4))) < TOLERANCE
    assert min(errors(got, made.truth([None] * 4))) > FAR


@pytest.mark.parametrize("experts", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", MIXTURES)
def test_a_mixed_batch_is_each_row_alone(mixtures: Mixtures, name: str, experts: str) -> None:
    family = mixtures(name)
    model = family.model(experts=experts)
    check(family, model)
    check(family, model, ["other", "whole", "whole", None])
    for one in family.adapters:  # one adapter for all rows is another way through the layers
        assert max(errors(logits(model, family.inputs(), [one] * 4), family.truth([one] * 4))) < TOLERANCE
    model.set_adapter("other")
    inputs = family.inputs()
    assert max(errors(logits(model, inputs), family.truth(["other"] * 4))) < TOLERANCE
    assert min(errors(logits(model, inputs), family.truth(["whole"] * 4))) > FAR
    bare = copy.deepcopy(family.base)
    bare.set_experts_implementation(experts)
    model.set_adapter(None)
    for got in (logits(model, inputs, [None] * 4), logits(model, inputs)):
        assert all(torch.equal(one, own) for one, own in zip(got, logits(bare, inputs), strict=True))


@pytest.mark.parametrize(("name", "layout"), [(n, layout) for layout, (_, names) in LAYOUTS.items() for n in names])
def test_every_layout(name: str, layout: str, tmp_path: Path) -> None:
    """Beside another layout in one batch, loaded before it and after it."""
    settings, _ = LAYOUTS[layout]
    family = Family(require(name), tmp_path, {"one": {"r": 4, **settings}, "two": {"layout": PEFT, "r": 3, "seed": 9}})
    for order in (["one", "two"], ["two", "one"]):
        model = family.model(*order, experts="grouped_mm")
        check(family, model, ["one", None, "two", "one"])
        check(family, model, [None, "one", "one", "two"])


def test_all_rows_alike_differ_by_their_adapters_only(mixtures: Mixtures) -> None:
    family = mixtures("qwen3_moe")
    model, names = family.model(), ["whole", None, "other", "attention", "whole"]
    row = family.rows[1][None].repeat(len(names), 1)
    got = logits(model, {"input_ids": row, "attention_mask": torch.ones_like(row)}, names)
    want = [family.row(name, 1) for name in names]
    assert max(errors(got, want)) < TOLERANCE
    assert min(error(one, want[i - 1]) for i, one in enumerate(got) if i) > FAR


@pytest.mark.parametrize("name", ["qwen2_moe", "gpt_oss"])
def test_single_rows_and_single_tokens(mixtures: Mixtures, name: str) -> None:
    family = mixtures(name)
    model = family.model(experts="grouped_mm")
    for i, one in enumerate(NAMES):
        for count in (1, len(family.rows[i])):
            row = family.rows[i][None, :count]
            got = logits(model, {"input_ids": row, "attention_mask": torch.ones_like(row)}, [one])[0]
            assert error(got, family.row(one, i)[:count]) < TOLERANCE


def test_gradients_reach_the_input(mixtures: Mixtures) -> None:
    family = mixtures("qwen3_moe")
    row = family.rows[1][None].repeat(4, 1)
    for experts in IMPLEMENTATIONS:
        model = family.model(experts=experts)

        def gradient(of: Any, ids: torch.Tensor, **named: Any) -> torch.Tensor:
            embeds = of.get_input_embeddings()(ids).detach().requires_grad_()
            of(inputs_embeds=embeds, **named).logits.square().sum().backward()
            assert embeds.grad is not None
            return embeds.grad

        got = gradient(model, row, adapter_names=list(NAMES))
        want = [gradient(family.alone(name), row[:1])[0] for name in NAMES]
        assert max(errors(list(got), want)) < 1e-4
        assert min(errors(list(got.roll(1, 0)), want)) > FAR
