"""Warm-up: what it leaves ready, that it leaves nothing else, and what it says where it cannot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hf_multilora import MultiLoRAModel
from tests.tiny import LINEARS, Family, assert_rows, bert, error, gpt2, llama, logits, same_ids

ADAPTERS: dict[str, dict[str, Any]] = {"one": {"r": 1}, "three": {"r": 3}, "two": {"r": 2, "targets": ["q_proj"]}}


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Family:
    torch.manual_seed(0)
    return Family(llama(), tmp_path_factory.mktemp("adapters"), ADAPTERS)


def sites(model: Any) -> dict[str, Any]:
    return {name: slots for name, (_, slots) in model._multilora.sites.items()}


def test_dummies_leave_full_pools_and_laid_weights_and_nothing_else(family: Family) -> None:
    model = MultiLoRAModel.from_pretrained(llama(), max_loras=3, max_lora_rank=11, target_modules=list(LINEARS))
    model.load_state_dict(family.base.state_dict())
    assert not sites(model)
    report = model.warmup(rows=(1, 3, 5), tokens=(1, 7))
    assert set(report.shapes) == {(rows, tokens) for rows in (1, 3, 5) for tokens in (1, 7)} and not report.skipped
    assert len(report.adapters) == 3 and "6 shapes with 3 adapters" in str(report)
    assert model.list_adapters() == [] and model.memory_report().slots == [None] * 3
    ready = sites(model)
    assert len(ready) == 2 * len(LINEARS) and all(s.rows.capacity == 48 and not s.rows.used for s in ready.values())
    before = {name: (s.a.data_ptr(), s.b.data_ptr(), s.buffer.data_ptr()) for name, s in ready.items()}
    names = ["one", "three", None, "two"]
    for name in ADAPTERS:
        model.load_adapter(str(family.paths[name]), name)
    assert [row["id"] for row in model.list_adapters()] == [1, 2, 3], "the dummies' ids were never seen"
    inputs = same_ids(4)
    got, want = logits(model, inputs, names), family.truth(inputs, names)
    assert error(got, want) < 1e-5
    assert_rows(got, want)
    after = {name: (s.a.data_ptr(), s.b.data_ptr(), s.buffer.data_ptr()) for name, s in sites(model).items()}
    assert after == before, "the first request finds pools and weights where the warm-up put them"


def test_registered_adapters_fill_the_slots(family: Family) -> None:
    model = family.model(max_loras=2)
    assert model.memory_report().slots == [None, None]
    report = model.warmup(tokens=(5,))
    assert set(report.shapes) == {(1, 5), (2, 5)} and sorted(report.adapters) == ["three", "two"], "the latest"
    assert sorted(model.memory_report().slots) == ["three", "two"]
    loads = model._multilora.store.loads
    logits(model, same_ids(2), ["two", "three"])
    assert model._multilora.store.loads == loads
    assert all(slots.laid for slots in sites(model).values())


def test_no_shape_starts_after_the_time_is_up(family: Family) -> None:
    report = family.model().warmup(rows=(2,), tokens=(1, 2, 3), max_seconds=1e-9)
    assert not report.shapes and report.skipped == [(2, 1), (2, 2), (2, 3)] and "3 left out" in str(report)


def test_generation_and_other_inputs(family: Family) -> None:
    model = family.model()
    seen: list[int] = []
    handle = model.lm_head.register_forward_hook(lambda m, i, o: seen.append(o.shape[1]))
    model.warmup(rows=(2,), tokens=(3,), max_new_tokens=4, do_sample=False)
    handle.remove()
    assert len(seen) == 1 + 4
    report = model.warmup({"inputs_embeds": torch.randn(1, 6, 16)}, rows=(1, 3))
    assert [rows for rows, _ in report.shapes] == [1, 3]


@pytest.mark.parametrize("build", [gpt2, bert])
def test_other_architectures(build: Any) -> None:
    model = MultiLoRAModel.from_pretrained(build(), max_loras=2, max_lora_rank=9)
    model.warmup(tokens=(3,))
    assert sites(model) and all(slots.rows.capacity == 32 for slots in sites(model).values())


def test_refusals(family: Family) -> None:
    with pytest.raises(ValueError, match="warmup needs registered adapters, or max_lora_rank"):
        MultiLoRAModel.from_pretrained(llama()).warmup()
    model = family.model()
    for wrong in ({"rows": ()}, {"rows": (0,)}, {"tokens": ()}, {"max_seconds": 0}):
        with pytest.raises(ValueError, match="rows, tokens and max_seconds must be positive"):
            model.warmup(**wrong)
    with pytest.raises(ValueError, match=r"inputs of a warm-up must have one row, got \{'input_ids': \(2, 3\)\}"):
        model.warmup({"input_ids": torch.ones(2, 3, dtype=torch.long)})


def test_a_warm_up_that_fails_leaves_no_dummy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = MultiLoRAModel.from_pretrained(llama(), max_loras=2, max_lora_rank=2)
    with pytest.raises(TypeError):
        model.warmup(tokens=(3,), max_new_tokens="many")
    assert model.list_adapters() == [] and model.memory_report().slots == [None, None]
    assert not model._multilora.routing.open
    model.warmup(tokens=(3,))
