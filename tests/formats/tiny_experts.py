"""Adapters of tiny mixture-of-experts models, and what they add to each parameter: by PEFT, and by the sites read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers as tf
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from torch import Tensor

from hf_multilora.census import take_census
from hf_multilora.formats import Adapter, ModuleShape, read_adapter, split_half, split_site
from hf_multilora.patches.facts import facts_of
from hf_multilora.renames import checkpoint_renames
from tests.experts import BLOCK, MIXTURES
from tests.formats import tiny

Deltas = dict[str, Tensor]  # full path of a parameter -> what is added to it, in its own layout


# experts outside Transformers' interface
OUTSIDE = {
    "llama4": (
        tf.Llama4TextConfig,
        tf.Llama4ForCausalLM,
        {**BLOCK, "intermediate_size_mlp": 40, "num_local_experts": 6, "interleave_moe_layer_step": 1},
    ),
    "jetmoe": (
        tf.JetMoeConfig,
        tf.JetMoeForCausalLM,
        {**BLOCK, "num_local_experts": 6, "intermediate_size": 20, "kv_channels": 8},
    ),
}


def base(name: str, **settings: Any) -> Any:
    """The same weights at every call, in float64."""
    if name in OUTSIDE:
        torch.manual_seed(0)
        config, kind, own = OUTSIDE[name]
        return kind(config(**(own | settings))).double()
    mixture = MIXTURES[name]
    if settings:
        mixture = type(mixture)(**(vars(mixture) | {"settings": {**mixture.settings, **settings}}))
    return mixture.build(0).double()


def save(model: Any, folder: Path, **config: Any) -> Deltas:
    """An adapter that PEFT makes and saves; what PEFT says that it adds."""
    peft_model = tiny.save(model, folder, **({"target_modules": []} | config))
    return peft_deltas(peft_model)


def peft_deltas(peft_model: PeftModel, adapter: str = "default") -> Deltas:
    found = {}
    for name, module in peft_model.base_model.model.named_modules():
        if isinstance(module, LoraLayer):
            path = name.replace(".base_layer", "")
            found[f"{path}.{getattr(module, 'parameter_name', 'weight')}"] = module.get_delta_weight(adapter).detach()
    return found


def census(model: Any) -> dict[str, ModuleShape]:
    return take_census(model, facts_of(model.config))


def read(folder: Path, model: Any, **settings: Any) -> Adapter:
    """As a Runtime reads it."""
    prefix, renames = model.base_model_prefix, checkpoint_renames(model)
    return read_adapter(folder, census(model), **({"base_prefix": prefix, "renames": renames} | settings))


def deltas(adapter: Adapter, modules: Mapping[str, ModuleShape]) -> Deltas:
    """What the sites add: scaling * B A, of experts expert by expert."""
    found: Deltas = {}
    halves: dict[tuple[str, str], dict[str, Any]] = {}
    for site, pair in adapter.factors.items():
        path, role = split_site(site)
        if role == "lora":
            found[f"{path}.weight"] = pair.scaling * (pair.b.double() @ pair.a.double())
        else:
            projection, half = split_half(role)
            halves.setdefault((path, projection), {})[half] = pair
    for (path, name), held in halves.items():
        experts = modules[path].experts
        assert experts is not None
        own = experts.projections[name]
        delta = torch.stack([one_delta(held, e, experts.count) for e in range(experts.count)])  # [E, out, in]
        whole = own.parameter if own.parameter in experts.projections else name
        size = experts.projections[whole].out_features
        wide = delta.new_zeros(experts.count, size, own.in_features)
        wide[:, own.first : own.first + own.out_features] = delta
        if name.endswith("_bias"):
            wide = wide[:, :, 0]
        elif experts.transposed:
            wide = wide.transpose(1, 2)
        key = f"{path}.{own.parameter}"
        found[key] = found[key] + wide if key in found else wide
    return found


def one_delta(held: Mapping[str, Any], e: int, count: int) -> Tensor:
    """scaling * b_e a_e of one projection, from its site or its halves."""
    first = held.get("") or held.get(".a") or held[".a1"]
    second = held.get("") or held.get(".b") or held[".b1"]
    a = first.a if ".a1" in held else first.a.split(list(first.parts))[e]
    b = second.b if ".b1" in held else second.b.split(list(second.parts), 1)[e]
    return second.scaling * (b.double() @ a.double())


def assert_same(got: Deltas, expected: Deltas) -> None:
    """The same parameters and the same deltas, in float64."""
    assert sorted(got) == sorted(expected)
    for name, delta in expected.items():
        assert got[name].shape == delta.shape, name
        assert float(delta.abs().max()) > 1e-2, f"{name}: nothing to compare"
        torch.testing.assert_close(got[name], delta.double(), rtol=1e-12, atol=1e-12, msg=f"{name} differs")


def assert_near(got: Deltas, expected: Deltas) -> None:
    """As `assert_same`, within what float32 rounds."""
    assert sorted(got) == sorted(expected)
    for name, delta in expected.items():
        assert float(delta.abs().max()) > 1e-2, f"{name}: nothing to compare"
        torch.testing.assert_close(got[name].double(), delta, rtol=1e-5, atol=1e-5, msg=f"{name} differs")
