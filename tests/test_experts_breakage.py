"""Attempts to break experts' adapters that once did: each fault with the smallest case that shows it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_multilora import MultiLoRAModel
from tests.experts_adapters import PACKED, PEFT, Adapter, describe, merge, write
from tests.experts_family import FAR, TOLERANCE, Family, errors

pytest_plugins = ("tests.experts_fixtures",)
Mixtures = Callable[[str], Family]
IMPLEMENTATIONS = ("eager", "batched_mm", "grouped_mm")


def all_shared(family: Family, r: int, seed: int) -> Adapter:
    """A and B of every projection are one for all experts."""
    made = describe(family.mixture, family.base, PACKED, r=r, seed=seed, attention=False)
    return replace(made, parts=tuple(replace(part, a=part.a[:1], b=part.b[:1]) for part in made.parts))


def served(family: Family, folder: Path, adapters: dict[str, Adapter], **settings: Any) -> Any:
    """A model of the family's base with these adapters."""
    paths = {name: str(write(adapter, family.base, folder / name)) for name, adapter in adapters.items()}
    return MultiLoRAModel.from_pretrained(copy.deepcopy(family.base), paths, **settings)


@torch.no_grad()
def check_experts(model: Any, family: Family, adapters: dict[str, Adapter], names: Sequence[str | None]) -> None:
    """The first layer's experts, one token a row, against those of each row's merged model."""
    path, made = family.mixture.paths(family.base, family.mixture.experts)[0], torch.Generator().manual_seed(5)
    bare, n = family.base.get_submodule(path), len(names)
    x, weights = torch.randn(n, 32, generator=made), torch.rand(n, 2, generator=made)
    index = torch.randint(0, bare.num_experts, (n, 2), generator=made)
    alone = {name: merge(family.base, adapters[name]).get_submodule(path) if name else bare for name in set(names)}
    want = [alone[name](x[i : i + 1], index[i : i + 1], weights[i : i + 1])[0] for i, name in enumerate(names)]
    for experts in IMPLEMENTATIONS:
        model.set_experts_implementation(experts)
        with model.adapters(list(names)):
            got = list(model.get_submodule(path)(x, index, weights))
        assert max(errors(got, want)) < TOLERANCE, experts
        assert min(errors(got[1:] + got[:1], want)) > FAR


@pytest.mark.parametrize("name", ["qwen2_moe", "nemotron_h"])
def test_shared_b_beside_an_a_of_each_expert(mixtures: Mixtures, name: str, tmp_path: Path) -> None:
    """B of down is one for all experts in both adapters, A in one of them only, and that has the smaller rank."""
    family = mixtures(name)
    adapters = {
        "all": all_shared(family, 7, 1),
        "some": describe(family.mixture, family.base, PACKED, r=2, seed=2, attention=False, shared=True),
        "none": describe(family.mixture, family.base, PEFT, r=3, seed=3, attention=False),
    }
    model = served(family, tmp_path, adapters)
    for names in (["all", "some", None, "none"], ["some", "all"], ["all", "none", "some", "all", None]):
        check_experts(model, family, adapters, names)
