"""Routers in mixed batches: an adapter that trained what scores the experts sends its own rows to other experts."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.experts import MIXTURES
from tests.experts_adapters import EACH, PEFT
from tests.experts_family import TOLERANCE, Family, check, errors, logits, require

pytest_plugins = ("tests.experts_fixtures",)
NAMES = ["experts too", None, "alone", "without"]


def adapters_of(name: str) -> dict[str, dict[str, Any]]:
    """A router beside experts, a router and nothing else, and no router."""
    both = {"layout": EACH if MIXTURES[name].old else PEFT, "router": True, "r": 3}
    return {
        "experts too": both,
        "alone": {"layout": PEFT, "router": True, "projections": (), "attention": False, "r": 4},
        "without": {"layout": PEFT, "r": 2},
    }


@pytest.mark.parametrize("name", MIXTURES)
def test_mixed_rows(name: str, tmp_path: Path) -> None:
    family = Family(require(name), tmp_path, adapters_of(name))
    model = family.model(experts="grouped_mm")
    check(family, model, NAMES)
    check(family, model, ["alone", "experts too", "without", "alone"])
    for one in family.adapters:
        assert max(errors(logits(model, family.inputs(), [one] * 4), family.truth([one] * 4))) < TOLERANCE
    report = model.verify("alone")
    assert report and report.effect > 100 * report.tolerance, str(report)
    bare, given = copy.deepcopy(family.base), family.inputs()
    bare.set_experts_implementation("grouped_mm")
    for got in (logits(model, given, [None] * 4), logits(model.unpatch(), given)):
        assert all(torch.equal(one, own) for one, own in zip(got, logits(bare, given), strict=True))


@pytest.mark.parametrize("name", ["mixtral", "deepseek_v3", "gemma4"])
def test_generate(name: str, tmp_path: Path) -> None:
    family = Family(require(name), tmp_path, adapters_of(name))
    model = family.model(experts="grouped_mm")
    settings: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    for way in ({}, {"num_beams": 2}, {"cache_implementation": "static"}):
        got = model.generate(**family.inputs(), adapter_names=NAMES, **settings, **way)[:, -8:]
        want = [family.generated(one, i, **settings, **way)[0] for i, one in enumerate(NAMES)]
        assert [torch.equal(*pair) for pair in zip(got, want, strict=True)] == [True] * 4
        turned = [family.generated(one, i, **settings, **way)[0] for i, one in enumerate([*NAMES[1:], NAMES[0]])]
        assert sum(torch.equal(*pair) for pair in zip(got, turned, strict=True)) <= 1, "the control says too little"
