"""Experts' adapters through all that is done to a model: few slots, loads, copies, moves, and the bare model again."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from hf_multilora import MultiLoRAModel
from hf_multilora.host import ALIGN
from tests.experts import MIXTURES, undecided
from tests.experts_adapters import EACH, PACKED, PEFT, PEFT_18, write
from tests.experts_family import FAR, TOLERANCE, Family, check, error, errors, logits
from tests.tiny import snapshot

pytest_plugins = ("tests.experts_fixtures",)
Mixtures = Callable[[str], Family]
MANY: dict[str, dict[str, Any]] = {
    "a": {"layout": PEFT, "r": 3},
    "b": {"layout": EACH, "r": 5, "experts": (0, 2, 3)},
    "c": {"layout": PACKED, "r": 2, "shared": True, "others": True},
    "d": {"layout": PEFT_18, "r": 4, "projections": ("down_proj",)},
    "e": {"layout": PEFT, "r": 7, "projections": ()},
}


@pytest.fixture(scope="module", params=["qwen2_moe", "nemotron_h"])
def many(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    """Five adapters of as many layouts."""
    return Family(MIXTURES[request.param], tmp_path_factory.mktemp("many"), MANY)


def test_few_slots(many: Family) -> None:
    """Adapters come and go; ranks and layouts change in the slots."""
    model = many.model(max_loras=2, experts="grouped_mm")
    for names in (["a", None, "b", "a"], ["c", "d", "c", None], ["e", "b", "b", "e"], ["d", "a", None, "d"], ["c"] * 4):
        check(many, model, names)
        assert sum(name is not None for name in model.memory_report().slots) <= 2


def test_passes(many: Family) -> None:
    """More adapters in a batch than slots."""
    model = many.model(max_loras=2)
    check(many, model, ["a", "b", "c", "d"])
    check(many, model, ["e", None, "c", "b"])
    settings: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    names = ["a", "b", "e", "d"]
    got = model.generate(**many.inputs(), adapter_names=names, **settings)[:, -3:]
    want = [many.generated(name, i, **settings)[0] for i, name in enumerate(names)]
    assert [torch.equal(*pair) for pair in zip(got, want, strict=True)] == [True] * 4


def test_deleted_loaded_and_replaced(many: Family, tmp_path: Path) -> None:
    model = many.model("a", "b", "c", max_loras=3)
    check(many, model, ["a", "b", "c", None])
    model.delete_adapter("b")
    model.load_adapter(many.path("d"), "b2")
    got = logits(model, many.inputs(), ["b2", "a", None, "c"])
    assert max(errors(got, many.truth(["d", "a", None, "c"]))) < TOLERANCE
    model.load_adapter(many.path("b"), "a", load_inplace=True)
    got = logits(model, many.inputs(), ["a", "b2", None, "a"])
    assert max(errors(got, many.truth(["b", "d", None, "b"]))) < TOLERANCE
    assert min(errors(got[:1], many.truth(["a"]))) > FAR
    model.delete_adapter(["a", "b2", "c"])
    assert max(errors(logits(model, many.inputs(), [None] * 4), many.truth([None] * 4))) < TOLERANCE


def test_verify(many: Family) -> None:
    model = many.model(max_loras=2, experts="grouped_mm")
    for name in many.adapters:
        report = model.verify(name)
        assert report and report.effect > 100 * report.tolerance, str(report)
    check(many, model, ["a", None, "b", "a"])


def test_saved_and_loaded_again(many: Family, tmp_path: Path) -> None:
    model = many.model()
    for name in many.adapters:
        model.save_adapter(name, str(tmp_path / name))
    again = {f"{name} again": str(tmp_path / name) for name in many.adapters}
    other = MultiLoRAModel.from_pretrained(copy.deepcopy(many.base), again)
    for names in (["a", "b", "c", None], ["d", "e", None, "a"]):
        got = logits(other, many.inputs(), [name and f"{name} again" for name in names])
        assert max(errors(got, many.truth(names))) < TOLERANCE


def test_an_adapter_costs_its_own_bytes(many: Family) -> None:
    """Exact ranks per expert, none for experts it did not train, and what all share is there once."""
    for name in many.adapters:
        model = many.model(name, max_loras=1)
        logits(model, many.inputs(), [name] * 4)
        report = model.memory_report()
        assert report.slot_bytes == [many.adapters[name].nbytes]
        assert 0 <= report.host_bytes - many.adapters[name].nbytes < 2 * ALIGN * len(report.per_module)
        pools = sum(size for site, size in report.per_module.items() if ".experts:" in site)
        assert pools == sum(part.a.nbytes + part.b.nbytes for part in many.adapters[name].parts if part.a.dim() == 3)
        on_disk = sum(t.nbytes for t in load_file(f"{many.path(name)}/adapter_model.safetensors").values())
        assert on_disk == many.adapters[name].nbytes
        (row,) = model.list_adapters()
        assert row["max_rank"] == many.adapters[name].r


@pytest.mark.parametrize("name", ["qwen2_moe", "gpt_oss", "nemotron_h", "deepseek_v3", "gemma4"])
def test_unpatch_gives_back_exactly_what_was_there(mixtures: Mixtures, name: str) -> None:
    family = mixtures(name)
    base, inputs = copy.deepcopy(family.base), family.inputs()
    before, want, state = snapshot(base), logits(base, inputs), {k: v.clone() for k, v in base.state_dict().items()}
    configs = {path: id(m.config) for path, m in base.named_modules() if hasattr(m, "config")}
    model = MultiLoRAModel.from_pretrained(base, {key: family.path(key) for key in family.adapters})
    check(family, model)
    assert model.state_dict().keys() == state.keys()
    assert all(torch.equal(model.state_dict()[key], value) for key, value in state.items())
    model.set_adapter("whole")
    assert model.unpatch() is base
    after = snapshot(base)
    assert after.keys() == before.keys()
    assert not [key for key, value in before.items() if after[key] != value]
    assert {path: id(m.config) for path, m in base.named_modules() if hasattr(m, "config")} == configs
    assert base.config.get_text_config()._experts_implementation == "eager"
    assert all(torch.equal(one, own) for one, own in zip(logits(base, inputs), want, strict=True))
    again = MultiLoRAModel.from_pretrained(base, {key: family.path(key) for key in family.adapters})
    check(family, again)


@pytest.mark.parametrize("way", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])
def test_copies_answer_and_are_independent(many: Family, way: Callable[[Any], Any]) -> None:
    model = many.model("a", "b", "c", max_loras=3)
    want = check(many, model, ["a", "b", "c", None])
    other = way(model)
    got = logits(other, many.inputs(), ["a", "b", "c", None])
    assert all(torch.equal(one, own) for one, own in zip(got, want, strict=True))
    other.delete_adapter("a")
    other.load_adapter(many.path("d"), "d")
    check(many, other, ["d", "b", None, "c"])
    check(many, model, ["c", "b", "a", None])
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    check(many, model, ["a", "b", "c", None])


def test_the_implementation_may_change_between_calls(many: Family) -> None:
    model = many.model("a", "b", "c", max_loras=3)
    for experts in ("grouped_mm", "eager", "batched_mm", "grouped_mm"):
        model.set_experts_implementation(experts)
        check(many, model, ["a", "b", None, "c"])
        assert model.config._experts_implementation == experts
    with model.adapters(["a", "b", None, "c"]):
        model.set_experts_implementation("batched_mm")
    check(many, model, ["c", "b", None, "a"])


def test_other_weights_are_seen(many: Family) -> None:
    """The base's experts are read at each call: nothing of them is kept."""
    model = many.model("a", "b", "c", max_loras=3)
    check(many, model, ["a", "b", None, "c"])
    path = many.mixture.paths(many.base, many.mixture.experts)[0]
    bare = copy.deepcopy(many.base)
    with torch.no_grad():
        for each in (model, bare):
            each.get_submodule(path).down_proj.mul_(-1.5)
    row = {key: value[:1] for key, value in many.inputs(1).items()}
    assert error(logits(model, row, [None])[0], logits(bare, row)[0]) < TOLERANCE
    assert error(logits(model, row, [None])[0], many.row(None, 0)) > FAR


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_other_dtypes(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """No further from float32 than the merged model in this dtype; and back."""
    adapters = {"whole": {"layout": PEFT, "r": 3}, "other": {"layout": PACKED, "r": 4, "shared": True}}
    if name == "gpt_oss":
        adapters["other"] = {"layout": PEFT, "r": 4, "biases": True}
    family = Family(undecided(name), tmp_path, adapters)
    names = ["whole", None, "other", "whole"]
    model = family.model(experts="batched_mm").to(dtype)
    got, want = logits(model, family.inputs(), names), family.truth(names)
    assert {row.dtype for row in got} == {dtype}
    for i, name in enumerate(names):
        merged = copy.deepcopy(family.alone(name)).to(dtype)
        with torch.no_grad():
            own = merged(input_ids=family.rows[i][None]).logits[0]
        assert error(got[i], want[i]) < 2 * error(own, want[i]) + TOLERANCE
    assert min(errors(got, family.truth([*names[1:], "other"]))) > 5 * max(errors(got, want))


def test_a_config_of_another_scale(mixtures: Mixtures, tmp_path: Path) -> None:
    """rank_pattern and alpha_pattern of the experts' layers, as PEFT reads them."""
    family = mixtures("mixtral")
    write(family.adapters["whole"], family.base, tmp_path)
    settings = json.loads((tmp_path / "adapter_config.json").read_text())
    settings["lora_alpha"] = 2 * settings["lora_alpha"]
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
    model = family.model("attention")
    model.load_adapter(str(tmp_path), "twice")
    assert min(errors(logits(model, family.inputs(1), ["twice"]), family.truth(["whole"]))) > FAR
