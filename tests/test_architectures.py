"""A sweep over architectures: every module that may be adapted is, and mixed batches equal PEFT alone, row by row.

The truth is PEFT with one adapter active, on one row of the same padded batch. What cannot be attributed to rows must
be known as such (`unmixable`), what is never called must be refused: both are facts in patches/facts.py.
"""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from hf_multilora import MultiLoRAModel
from hf_multilora.census import take_census
from hf_multilora.formats import AdapterError
from hf_multilora.patches.facts import facts_of
from hf_multilora.store import CapacityError

from .architecture_table import ARCHITECTURES
from .architectures import Architecture, Inputs, row_of

TOLERANCE = 5e-5  # of the largest value of an output
EFFECT = 2e-4  # what taking one module's delta away must at least change: four times what the comparison forgives
ROWS = ["a", None, "b", "c"]
TOKENS = (6, 4)  # other than the number of rows, and equal to it: a time-first layout shows only in the second


def outputs(model: Any, inputs: Inputs, **names: Any) -> dict[str, Tensor]:
    """All outputs with one entry per row, zero where the input is padding."""
    with torch.no_grad():
        out = model(**inputs, **names)
    mask = inputs.get("attention_mask")
    found = {}
    for name, value in out.items():
        if not isinstance(value, Tensor) or name.startswith("logits_per_"):  # CLIP compares all rows with all
            continue
        tokens = mask is not None and value.dim() == 3 and value.shape[:2] == mask.shape
        found[name] = value.masked_fill(mask[..., None] == 0, 0.0) if tokens else value
    return found


def distance(got: dict[str, Tensor], want: dict[str, Tensor]) -> float:
    """The largest difference of two sets of outputs, each relative to its largest value."""
    assert got.keys() == want.keys() and got, (got.keys(), want.keys())
    return max(float((got[k] - want[k]).abs().max() / want[k].abs().max().clamp_min(1e-6)) for k in want)


class Tenants:
    """PEFT's own adapters on a copy of the model: made, saved, and run one by one as the truth."""

    def __init__(self, model: Any, targets: dict[str, list[str]], folder: Path) -> None:
        self.folder = folder
        self.bare = copy.deepcopy(model)
        self.targets = targets
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for i, (name, modules) in enumerate(targets.items()):
                config = LoraConfig(r=i + 2, lora_alpha=i + 3, target_modules=modules)
                if i:
                    self.peft.add_adapter(name, config)
                else:
                    self.peft = get_peft_model(copy.deepcopy(model), config, adapter_name=name)
            self.peft.eval()
            with torch.no_grad():
                for key, weight in self.peft.named_parameters():
                    if "lora_" in key:
                        side = weight.shape[0] if "lora_embedding_A" in key else weight.shape[1]
                        weight.normal_(std=0.5 if "embedding" in key else side**-0.5)
            try:
                embeddings = model.get_input_embeddings() is not None
            except NotImplementedError:  # audio models
                embeddings = False
            self.peft.save_pretrained(
                folder, selected_adapters=list(targets), save_embedding_layers="auto" if embeddings else False
            )

    def path(self, name: str) -> str:
        return str(self.folder / name)

    def alone(self, name: str | None) -> Any:
        """The model to run for a row of `name`."""
        if name is None:
            return self.bare
        self.peft.set_adapter(name)
        return self.peft.get_base_model()

    def truth(self, inputs: Inputs, rows: Sequence[str | None]) -> dict[str, Tensor]:
        single = [outputs(self.alone(name), row_of(inputs, i, len(rows))) for i, name in enumerate(rows)]
        return {key: torch.cat([out[key] for out in single]) for key in single[0]}

    def without_effect(self, inputs: Inputs, unused: str) -> dict[str, float]:
        """Modules whose delta, taken away alone, changes too little to be seen by the comparison."""
        model = self.alone("a")
        with torch.no_grad():
            full, weak = outputs(model, inputs), {}
            for module in self.targets["a"]:
                if unused and re.search(f"{unused}$", module):
                    continue
                layer = model.get_submodule(module)
                pool = layer.lora_B if "a" in layer.lora_B else layer.lora_embedding_B
                weight = pool["a"].weight if hasattr(pool["a"], "weight") else pool["a"]
                kept = weight.clone()
                weight.zero_()
                change = distance(outputs(model, inputs), full)
                weight.copy_(kept)
                if change < EFFECT:
                    weak[module] = change
        return weak


def accepted(model: Any) -> tuple[list[str], list[str]]:
    """Modules that PEFT's target_modules may name here: whose rows mix, and whose rows do not. Experts and routers:
    tests/test_experts.py, tests/test_experts_sweep.py."""
    facts = facts_of(model.config)
    census = take_census(model, facts)
    kinds = ("linear", "embedding")
    names = [n for n, _ in model.named_modules() if n and census[n].kind in kinds and census[n].refused is None]
    names = [n for n in names if n not in facts.aliases_in(census)]
    return [n for n in names if census[n].mixable], [n for n in names if not census[n].mixable]


def called_though_refused(model: Any, inputs: Inputs) -> list[str]:
    """Modules that are refused because they are never called, and are called."""
    census, called = take_census(model, facts_of(model.config)), []
    hooks = [
        module.register_forward_pre_hook(lambda *_, name=name: called.append(name))
        for name, module in model.named_modules()
        if name and re.search("never called|without calling", census[name].refused or "")
    ]
    outputs(model, inputs)
    for hook in hooks:
        hook.remove()
    return called


def built(name: str) -> tuple[Architecture, Any]:
    arch = ARCHITECTURES[name]
    if arch.missing:
        pytest.skip(f"Transformers {transformers.__version__} has no {arch.missing}")
    return arch, arch.build()


def rotated(rows: Sequence[str | None]) -> list[str | None]:
    return [*rows[1:], rows[0]]


@pytest.fixture(autouse=True)
def _names_as_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """PEFT takes `gate_proj` of a dense layer for one of the experts, in models whose experts were fused."""
    monkeypatch.setattr("peft.utils.transformers_weight_conversion.convert_peft_config_for_transformers", _no_change)


def _no_change(*args: Any, **kwargs: Any) -> None: ...


def check_forward(model: Any, tenants: Tenants, inputs: Inputs, rows: Sequence[str | None]) -> None:
    want = tenants.truth(inputs, rows)
    got = outputs(model, inputs, adapter_names=list(rows))
    assert distance(got, want) < TOLERANCE
    wrong = outputs(model, inputs, adapter_names=rotated(rows))
    assert distance(wrong, want) > 500 * TOLERANCE  # the comparison can fail


def check_generate(model: Any, tenants: Tenants, inputs: Inputs) -> None:
    inputs = {k: v for k, v in inputs.items() if k != "decoder_input_ids"}
    settings = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "num_beams": 1}
    single = [tenants.alone(name).generate(**row_of(inputs, i, len(ROWS)), **settings) for i, name in enumerate(ROWS)]
    got = model.generate(**inputs, **settings, adapter_names=ROWS)
    assert torch.equal(got, torch.cat(single))
    wrong = model.generate(**inputs, **settings, adapter_names=rotated(ROWS))
    assert not torch.equal(wrong, torch.cat(single))


def served(
    arch: Architecture, model: Any, targets: dict[str, list[str]], inputs: Inputs, folder: Path
) -> tuple[Any, Tenants]:
    """(model, tenants) with PEFT-made adapters on `targets`, every module of "a" seen to matter to the output."""
    tenants = Tenants(model, targets, folder)
    weak = tenants.without_effect(inputs, arch.unused)
    assert not weak, f"their delta has no effect, so they are never called: refuse them in patches/facts.py: {weak}"
    return MultiLoRAModel.from_pretrained(model, {name: tenants.path(name) for name in targets}), tenants


@pytest.mark.parametrize("name", [n for n, a in ARCHITECTURES.items() if not a.whole])
def test_mixed_rows_equal_peft_alone(name: str, tmp_path: Path) -> None:
    arch, model = built(name)
    mixable, unmixable = accepted(model)
    assert mixable
    batches = [arch.inputs(len(ROWS), tokens) for tokens in TOKENS]
    assert not called_though_refused(model, batches[0])
    targets = {"a": mixable, "b": mixable[::2], "c": mixable[:1] + mixable[1::2]}
    model, tenants = served(arch, model, targets, batches[0], tmp_path / "mixable")
    for inputs in batches:
        check_forward(model, tenants, inputs, ROWS)
    if not arch.silent:
        check_generate(model, tenants, batches[0])
    if not unmixable:
        return
    targets = {"a": unmixable, "b": mixable[:1] + unmixable[::2], "c": mixable[:2]}
    model, tenants = served(arch, model.unpatch(), targets, batches[0], tmp_path / "unmixable")
    for inputs in batches:
        if arch.splits:
            check_forward(model, tenants, inputs, ROWS)
            continue
        with suppress(CapacityError):  # refused, or right
            assert distance(outputs(model, inputs, adapter_names=ROWS), tenants.truth(inputs, ROWS)) < TOLERANCE
        for one in ("a", "b"):
            same = [one] * len(ROWS)
            assert distance(outputs(model, inputs, adapter_names=same), tenants.truth(inputs, same)) < TOLERANCE


@pytest.mark.parametrize("name", [n for n, a in ARCHITECTURES.items() if a.whole])
def test_models_that_cannot_be_served_refuse_every_adapter(name: str, tmp_path: Path) -> None:
    _, model = built(name)
    linears = [n for n, module in model.named_modules() if isinstance(module, nn.Linear)]
    tenants = Tenants(model, {"a": linears}, tmp_path)
    with pytest.raises(AdapterError, match="puts time before rows"):
        MultiLoRAModel.from_pretrained(model, {"a": tenants.path("a")})
