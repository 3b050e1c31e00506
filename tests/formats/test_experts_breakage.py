"""Attempts to break the reading of experts' adapters that once did."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from hf_multilora.formats import AdapterError, write_adapter
from tests.experts import MIXTURES
from tests.experts_adapters import EACH, PACKED, Part, describe, write
from tests.formats import tiny_experts as moe


def silent(part: Part, half: int | None, experts: tuple[int, ...] | None) -> Part:
    """The part with B zero in that half, of these experts or all."""
    if part.half != half or part.parameter == "down_proj":
        return part
    b = part.b.clone()
    b[list(experts) if experts else slice(None)] = 0
    return replace(part, b=b)


@pytest.mark.parametrize(
    ("name", "layout", "pattern", "half", "experts"),
    [
        ("mixtral", EACH, r"experts\.[0-4]\.w1", 0, (0, 1, 2, 3, 4)),
        ("mixtral", EACH, "w1", 0, None),
        ("gpt_oss", PACKED, "w1", 0, None),  # gate and up are one site
        ("gpt_oss", PACKED, "w3", 1, None),
    ],
)
def test_alpha_zero_of_some(
    name: str, layout: str, pattern: str, half: int, experts: tuple[int, ...] | None, tmp_path: Path
) -> None:
    """Scales of one site are brought to one: never to zero while another is not."""
    model = MIXTURES[name].build(0)
    adapter = describe(MIXTURES[name], model, layout, r=3, seed=1, attention=False)
    modules = moe.census(model)
    write(replace(adapter, config={"alpha_pattern": {pattern: 0}}), model, tmp_path / "zero")
    parts = tuple(silent(part, half, experts) for part in adapter.parts)
    for folder, own in (("same", parts), ("all", adapter.parts)):
        write(replace(adapter, parts=own), model, tmp_path / folder)
    zero, same, full = (moe.read(tmp_path / folder, model) for folder in ("zero", "same", "all"))
    got, want = moe.deltas(zero, modules), moe.deltas(same, modules)
    moe.assert_near(got, want)
    assert any(not torch.allclose(got[key], delta) for key, delta in moe.deltas(full, modules).items())
    write_adapter(tmp_path / "written", zero, modules)
    moe.assert_near(moe.deltas(moe.read(tmp_path / "written", model), modules), want)


@pytest.mark.parametrize(
    "index", ["03", "-1", "+3", "\N{ARABIC-INDIC DIGIT THREE}", "9" * 5000], ids=lambda index: ascii(index)[:12]
)
def test_what_is_no_index_of_an_expert(index: str, tmp_path: Path) -> None:
    model = MIXTURES["olmoe"].build(0)
    adapter = describe(MIXTURES["olmoe"], model, EACH, r=3, seed=1, attention=False)
    file = write(adapter, model, tmp_path / "a") / "adapter_model.safetensors"
    assert moe.read(tmp_path / "a", model).factors
    save_file({key.replace("experts.3.", f"experts.{index}."): own for key, own in load_file(file).items()}, file)
    with pytest.raises(AdapterError, match=rf"no module \S*experts\.{re.escape(index)}\.down_proj"):
        moe.read(tmp_path / "a", model)
