"""What is read is what PEFT computes: scaling * B A of every module equals PEFT's own delta."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model_state_dict

from hf_multilora.formats import AdapterError, adapter_from_tensors
from tests.formats import tiny

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
PATTERNS = {
    "rank_pattern": {"q_proj": 4, r"layers\.1\.self_attn\.v_proj": 3, r".*mlp.*": 5},
    "alpha_pattern": {r"^model\.layers\.2\.self_attn\.q_proj": 32, "q_proj": 7},
}

CASES: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "plain": (tiny.llama, {}),
    "rslora": (tiny.llama, {"use_rslora": True, "r": 3}),
    "patterns": (tiny.llama, {"target_modules": ALL, **PATTERNS}),
    "patterns and rslora": (tiny.llama, {"target_modules": ALL, "use_rslora": True, **PATTERNS}),
    # an early general pattern hides a later special one, and a special one in front does not
    "first pattern wins": (tiny.llama, {"alpha_pattern": {r".*_proj": 5, "q_proj": 9}}),
    "special first": (tiny.llama, {"alpha_pattern": {r"layers\.0\..*": 5, "q_proj": 9}}),
    # a pattern is for whole components up to the end of the name
    "near misses": (tiny.llama, {"alpha_pattern": {"proj": 50, "q_pro": 60, r"layers\.1": 70, "v_proj": 9}}),
    "regex targets": (tiny.llama, {"target_modules": r".*\.[02]\.self_attn\.(q|o)_proj"}),
    "all-linear": (tiny.llama, {"target_modules": "all-linear"}),
    "layers_to_transform": (tiny.llama, {"layers_to_transform": [0, 2]}),
    "exclude_modules": (tiny.llama, {"exclude_modules": ["v_proj"]}),
    "embedding": (tiny.llama, {"target_modules": ["embed_tokens", "q_proj"]}),
    "embedding, patterns": (tiny.llama, {"target_modules": ["embed_tokens"], "rank_pattern": {"embed_tokens": 5}}),
    "lm_head": (tiny.llama, {"target_modules": ["lm_head"]}),
    "lm_head, tied": (lambda: tiny.llama(tie_word_embeddings=True), {"target_modules": ["lm_head", "q_proj"]}),
    "both ends, tied together": (
        lambda: tiny.llama(tie_word_embeddings=True),
        {"target_modules": ["embed_tokens"], "ensure_weight_tying": True},
    ),
    "conv1d": (tiny.gpt2, {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}),
    "conv1d, embeddings": (tiny.gpt2, {"target_modules": ["wte", "wpe"]}),
    "t5": (tiny.t5, {"target_modules": ["q", "wo", "relative_attention_bias"]}),
    "bert": (tiny.bert, {"target_modules": ["query", "value", "word_embeddings"]}),
    "classifier as a target": (tiny.bert, {"target_modules": ["query", "classifier"]}),
    "gaussian": (tiny.llama, {"init_lora_weights": "gaussian"}),
    "orthogonal": (tiny.llama, {"init_lora_weights": "orthogonal"}),
    "mica": (tiny.llama, {"init_lora_weights": "mica"}),
}


@pytest.mark.parametrize("case", CASES)
def test_deltas_equal_pefts(case: str, tmp_path: Path) -> None:
    make, config = CASES[case]
    expected = tiny.deltas(tiny.save(make(), tmp_path, **config))
    adapter = tiny.read(tmp_path, _twin(make))
    tiny.assert_same(adapter, expected)
    assert adapter.source == str(tmp_path)
    # negative control: one altered module and one altered scale are seen
    with pytest.raises(AssertionError):
        tiny.assert_same(adapter, expected | {next(iter(expected)): next(iter(expected.values())) * 1.001})
    with pytest.raises(AssertionError):
        tiny.assert_same(adapter, dict(list(expected.items())[1:]))


def _twin(make: Callable[[], Any]) -> Any:
    """The base as it was before PEFT touched it (the same seed gives the same weights)."""
    torch.manual_seed(0)
    return make()


def test_fan_in_fan_out_says_nothing_about_files(tmp_path: Path) -> None:
    expected = tiny.deltas(tiny.save(tiny.gpt2(), tmp_path, target_modules=["c_attn"], fan_in_fan_out=True))
    tiny.edit_config(tmp_path, fan_in_fan_out=False)
    tiny.assert_same(tiny.read(tmp_path, tiny.gpt2()), expected)


KEYS: dict[str, Callable[[str], str]] = {
    "no prefix": lambda key: key.removeprefix("base_model.model."),
    "compiled": lambda key: f"_orig_mod.{key}",
    "compiled layers": lambda key: key.replace(".self_attn.", "._orig_mod.self_attn."),
    "training name": lambda key: key.replace("lora_A.", "lora_A.default.").replace("lora_B.", "lora_B.default."),
    "confusing name": lambda key: key.replace(".weight", ".lora_B.weight"),
    "inner model": lambda key: key.replace("base_model.model.model.", "base_model.model."),
    "multimodal": lambda key: key.replace("model.model.layers", "model.model.language_model.layers"),
    "old multimodal": lambda key: key.replace("model.model.layers", "model.language_model.model.layers"),
}


@pytest.mark.parametrize("layout", KEYS)
def test_layouts_of_keys(layout: str, tmp_path: Path) -> None:
    config = {"r": 2, "alpha_pattern": {"q_proj": 9}}
    expected = tiny.deltas(tiny.save(tiny.llama(), tmp_path, **config))
    before = tiny.read(tmp_path, tiny.llama())
    tiny.rename_keys(tmp_path, KEYS[layout])
    after = tiny.read(tmp_path, tiny.llama())
    tiny.assert_same(after, expected)
    assert after.digest != before.digest


def test_embedding_keys_with_a_training_name(tmp_path: Path) -> None:
    expected = tiny.deltas(tiny.save(tiny.llama(), tmp_path, target_modules=["embed_tokens"]))
    tiny.rename_keys(tmp_path, lambda key: f"{key}.run1" if "lora_embedding" in key else key)
    tiny.assert_same(tiny.read(tmp_path, _twin(tiny.llama)), expected)


def test_trained_on_the_wrapped_model_used_on_the_inner_one_and_back(tmp_path: Path) -> None:
    wrapped = tiny.deltas(tiny.save(tiny.bert(), tmp_path / "wrapped", target_modules=["query"]))
    inner_model = tiny.bert().bert
    tiny.assert_same(
        tiny.read(tmp_path / "wrapped", inner_model), {name.removeprefix("bert."): d for name, d in wrapped.items()}
    )
    inner = tiny.deltas(tiny.save(tiny.bert().bert, tmp_path / "inner", target_modules=["query"]))
    tiny.assert_same(tiny.read(tmp_path / "inner", tiny.bert()), {f"bert.{name}": d for name, d in inner.items()})


def test_patterns_follow_the_names_of_training(tmp_path: Path) -> None:
    """A pattern anchored at the inner model's names still finds its module in the wrapped model."""
    pattern = {"^encoder.layer.0.attention.self.query": 11}
    inner = tiny.deltas(tiny.save(tiny.bert().bert, tmp_path, target_modules=["query"], alpha_pattern=pattern))
    adapter = tiny.read(tmp_path, tiny.bert())
    tiny.assert_same(adapter, {f"bert.{name}": delta for name, delta in inner.items()})
    assert adapter.factors["bert.encoder.layer.0.attention.self.query"].scaling == 5.5
    assert adapter.factors["bert.encoder.layer.1.attention.self.query"].scaling == 3.0


def test_an_alias_gets_the_factors_of_its_name(tmp_path: Path) -> None:
    delta = tiny.deltas(tiny.save(tiny.t5(), tmp_path, target_modules=["shared"]))["shared"]
    adapter = tiny.read(tmp_path, _twin(tiny.t5), aliases=tiny.SHARED)
    tiny.assert_same(adapter, dict.fromkeys(tiny.SHARED["shared"], delta))
    assert len({id(pair) for pair in adapter.factors.values()}) == 1  # held once


def test_renames_of_checkpoints(tmp_path: Path) -> None:
    expected = tiny.deltas(tiny.save(tiny.llama(), tmp_path))
    tiny.rename_keys(tmp_path, lambda key: key.replace("model.layers", "transformer.h"))
    with pytest.raises(AdapterError, match=r"q_proj, v_proj not found"):
        tiny.read(tmp_path, tiny.llama())
    tiny.assert_same(tiny.read(tmp_path, tiny.llama(), renames=((r"^transformer\.h\.", "model.layers."),)), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_factors_keep_the_files_dtype(dtype: torch.dtype, tmp_path: Path) -> None:
    tiny.save(tiny.llama(), tmp_path)
    tiny.edit_weights(tmp_path, lambda tensors: {key: tensor.to(dtype) for key, tensor in tensors.items()})
    adapter = tiny.read(tmp_path, tiny.llama())
    assert {(pair.a.dtype, pair.b.dtype) for pair in adapter.factors.values()} == {(dtype, dtype)}


def test_factors_do_not_map_the_file(tmp_path: Path) -> None:
    expected = tiny.deltas(tiny.save(tiny.llama(), tmp_path))
    adapter = tiny.read(tmp_path, tiny.llama())
    path = tmp_path / tiny.WEIGHTS
    size = path.stat().st_size
    with path.open("r+b") as stream:  # in place: what a map of the file would show
        stream.seek(size // 2)
        stream.write(bytes(size - size // 2))
    tiny.assert_same(adapter, expected)


def test_in_memory_equals_the_file_and_is_a_copy(tmp_path: Path) -> None:
    peft_model = tiny.save(tiny.llama(), tmp_path)
    config = peft_model.peft_config["default"].to_dict()
    assert isinstance(config["target_modules"], (set, list))
    tensors = get_peft_model_state_dict(peft_model)
    modules = tiny.shapes(tiny.llama())
    adapter = adapter_from_tensors("memory", config, tensors, modules)
    expected = {name: delta.clone() for name, delta in tiny.deltas(peft_model).items()}
    assert adapter.digest == adapter_from_tensors("memory", config, dict(reversed(tensors.items())), modules).digest
    with torch.no_grad():
        next(iter(tensors.values())).add_(1.0)
    tiny.assert_same(adapter, expected)
    assert adapter.digest != adapter_from_tensors("memory", config, tensors, modules).digest
    assert not any(pair.a.requires_grad or pair.b.requires_grad for pair in adapter.factors.values())


def test_the_digest_covers_config_and_weights(tmp_path: Path) -> None:
    tiny.save(tiny.llama(), tmp_path)
    digests = [tiny.read(tmp_path, tiny.llama()).digest for _ in range(2)]
    tiny.edit_config(tmp_path, lora_alpha=7)
    digests.append(tiny.read(tmp_path, tiny.llama()).digest)
    tiny.edit_weights(tmp_path, lambda tensors: {key: tensor * 2 for key, tensor in tensors.items()})
    digests.append(tiny.read(tmp_path, tiny.llama()).digest)
    assert digests[0] == digests[1] and len(set(digests)) == 3


def test_configs_of_other_versions(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    expected = tiny.deltas(tiny.save(tiny.llama(), tmp_path))
    tiny.edit_config(tmp_path, some_config=None, use_something=False, trainer_fixed=True, peft_version="9.9.9")
    with caplog.at_level(logging.WARNING, logger="hf_multilora"):
        tiny.assert_same(tiny.read(tmp_path, tiny.llama()), expected)
    assert "trainer_fixed=True" in caplog.text and "something" not in caplog.text and "some_config" not in caplog.text
    early = {"peft_type": "LORA", "r": 2, "lora_alpha": 6, "target_modules": ["q_proj", "v_proj"]}
    early |= {"enable_lora": None, "merge_weights": False, "bias": "none", "fan_in_fan_out": False}
    (tmp_path / tiny.CONFIG).write_text(json.dumps(early))
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="hf_multilora"):
        tiny.assert_same(tiny.read(tmp_path, tiny.llama()), expected)
    assert not caplog.text


def test_configs_that_peft_writes_today_warn_of_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tiny.save(tiny.llama(), tmp_path)
    with caplog.at_level(logging.WARNING, logger="hf_multilora"):
        tiny.read(tmp_path, tiny.llama())
    assert not caplog.text


def test_settings_that_a_config_lacks_are_pefts_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tiny.save(tiny.llama(), tmp_path)
    config = json.loads((tmp_path / tiny.CONFIG).read_text())
    del config["lora_alpha"]
    (tmp_path / tiny.CONFIG).write_text(json.dumps(config))
    with caplog.at_level(logging.WARNING, logger="hf_multilora"):
        adapter = tiny.read(tmp_path, tiny.llama())
    assert "no lora_alpha; PEFT's default 8" in caplog.text
    assert {pair.scaling for pair in adapter.factors.values()} == {LoraConfig().lora_alpha / 2}
