"""Modules saved in full: every tensor of PEFT's own copies is read, and the base with them gives PEFT's logits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf

from hf_multilora.census import take_census
from hf_multilora.formats import AdapterError, ModuleShape, adapter_from_tensors, read_adapter
from hf_multilora.patches.facts import facts_of
from tests.formats import tiny

Q = ["query"]


def tied() -> Any:
    return tiny.llama(tie_word_embeddings=True)


def answers() -> Any:
    return tiny.bert(tf.BertForQuestionAnswering, 2)


def labelled_tokens() -> Any:
    return tiny.bert(tf.BertForTokenClassification)


class Statistics(torch.nn.Module):
    """A batch norm behind an embedding: floating point and integer buffers."""

    base_model_prefix = ""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(40, 6)
        self.first = torch.nn.Linear(6, 6)
        self.norm = torch.nn.BatchNorm1d(6)


# name -> (base, what PEFT was told, the modules it saves)
CASES: dict[str, tuple[Callable[[], Any], dict[str, Any], list[str]]] = {
    "score": (tiny.scorer, {"task_type": "SEQ_CLS"}, ["score"]),
    "classifier": (tiny.bert, {"target_modules": Q, "task_type": "SEQ_CLS"}, ["classifier"]),
    "token classifier": (labelled_tokens, {"target_modules": Q, "task_type": "TOKEN_CLS"}, ["classifier"]),
    "qa_outputs": (answers, {"target_modules": Q, "task_type": "QUESTION_ANS"}, ["qa_outputs"]),
    "container": (
        tiny.roberta,
        {"target_modules": Q, "task_type": "SEQ_CLS"},
        ["classifier.dense", "classifier.out_proj"],
    ),
    "pooler": (
        tiny.bert,
        {"target_modules": Q, "modules_to_save": ["pooler", "classifier"]},
        ["bert.pooler.dense", "classifier"],
    ),
    # PEFT takes the names for ends of paths
    "norms": (
        tiny.llama,
        {"modules_to_save": ["norm"]},
        [f"model.layers.{n}.{norm}_layernorm" for n in range(3) for norm in ("input", "post_attention")]
        + ["model.norm"],
    ),
    "layer norms": (
        tiny.bert,
        {"target_modules": Q, "modules_to_save": ["output.LayerNorm"]},
        [f"bert.encoder.layer.{n}.{part}output.LayerNorm" for n in range(2) for part in ("attention.", "")],
    ),
    "block": (
        tiny.llama,
        {"modules_to_save": ["layers.1.mlp"]},
        [f"model.layers.1.mlp.{name}_proj" for name in ("gate", "up", "down")],
    ),
    "block with targets": (
        tiny.llama,
        {"target_modules": ["gate_proj", "q_proj"], "modules_to_save": ["layers.1.mlp"]},
        [f"model.layers.1.mlp.{name}_proj" for name in ("gate", "up", "down")],
    ),
    "conv1d": (tiny.gpt2, {"target_modules": ["c_attn"], "modules_to_save": ["c_fc"]}, ["0.mlp.c_fc", "1.mlp.c_fc"]),
    "square conv1d": (
        tiny.gpt2,
        {"target_modules": ["c_attn"], "modules_to_save": ["attn.c_proj"]},
        ["0.attn.c_proj", "1.attn.c_proj"],
    ),
    "embedding": (tiny.llama, {"modules_to_save": ["embed_tokens"]}, ["model.embed_tokens"]),
    "head": (tiny.llama, {"modules_to_save": ["lm_head"]}, ["lm_head"]),
    "both ends": (tiny.llama, {"modules_to_save": ["embed_tokens", "lm_head"]}, ["lm_head", "model.embed_tokens"]),
    # one end of a tied base alone leaves the other on the base's weight
    "embedding, tied": (tied, {"modules_to_save": ["embed_tokens"]}, ["model.embed_tokens"]),
    "head, tied": (tied, {"modules_to_save": ["lm_head"]}, ["lm_head"]),
    "both ends, tied": (tied, {"modules_to_save": ["embed_tokens", "lm_head"]}, ["lm_head", "model.embed_tokens"]),
    "embedding, tying kept": (
        tied,
        {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
        ["lm_head", "model.embed_tokens"],
    ),
    "head, tying kept": (
        tied,
        {"modules_to_save": ["lm_head"], "ensure_weight_tying": True},
        ["lm_head", "model.embed_tokens"],
    ),
    "embeddings of an encoder-decoder": (
        tiny.t5,
        {"target_modules": ["q"], "modules_to_save": ["embed_tokens"]},
        ["decoder.embed_tokens", "encoder.embed_tokens"],
    ),
    "full path": (tiny.llama, {"modules_to_save": ["model.layers.0.mlp.up_proj"]}, ["model.layers.0.mlp.up_proj"]),
}


def saved_of(adapter: Any) -> dict[str, Any]:
    return {site.removesuffix(":saved"): pair for site, pair in adapter.factors.items() if site.endswith(":saved")}


@pytest.mark.parametrize("case", CASES)
def test_every_tensor_is_read(case: str, tmp_path: Path) -> None:
    make, config, names = CASES[case]
    peft_model = tiny.save(tiny.twin(make), tmp_path, touch=tiny.touch_saved, **config)
    adapter = tiny.read(tmp_path, tiny.twin(make))
    modules, found = tiny.saved_modules(peft_model), saved_of(adapter)
    names = [f"transformer.h.{name}" if "c_" in name else name for name in names]
    assert sorted(found) == sorted(modules) == sorted(names)
    for name, module in modules.items():
        a, b = tiny.as_saved(module)
        pair = found[name]
        assert torch.equal(pair.a, a) and torch.equal(pair.b, b) and pair.scaling == 1.0, name
        assert pair.a.is_contiguous() and pair.b.is_contiguous() and pair.b.dtype == pair.a.dtype
    assert adapter.max_rank == 2
    tiny.assert_served(lambda: make(), adapter, peft_model)


def test_statistics_are_read_and_counters_are_not(tmp_path: Path) -> None:
    model = tiny.save(
        Statistics(), tmp_path, touch=tiny.touch_saved, target_modules=["first"], modules_to_save=["norm"]
    )
    pair = tiny.read(tmp_path, Statistics()).factors["norm:saved"]
    norm = tiny.saved_modules(model)["norm"]
    assert list(tiny.shapes(Statistics())["norm"].own) == ["weight", "bias", "running_mean", "running_var"]
    expected = torch.cat([norm.weight, norm.bias, norm.running_mean, norm.running_var])[None]
    assert torch.equal(pair.a, expected) and pair.b.shape == (0, 1)
    key = "base_model.model.norm.num_batches_tracked"
    tiny.edit_weights(tmp_path, lambda tensors: tensors | {key: tensors[key].float()})
    with pytest.raises(
        AdapterError, match=r"saves its num_batches_tracked.*no such tensor there \(it has weight, bias"
    ):
        tiny.read(tmp_path, Statistics())


@pytest.mark.parametrize("case", ["score", "container", "norms", "square conv1d", "both ends, tied"])
def test_the_census_tells_the_same(case: str, tmp_path: Path) -> None:
    """The other tests describe a model by themselves: `tiny.shapes`."""
    make, config, _ = CASES[case]
    tiny.save(tiny.twin(make), tmp_path, touch=tiny.touch_saved, **config)
    model = tiny.twin(make)
    got = read_adapter(tmp_path, take_census(model, facts_of(model.config))).factors
    want = tiny.read(tmp_path, model).factors
    assert sorted(got) == sorted(want)
    assert all(torch.equal(got[site].a, want[site].a) and torch.equal(got[site].b, want[site].b) for site in want)


@pytest.mark.parametrize("case", ["score", "container", "norms", "both ends", "embedding, tied"])
def test_raw_state_dicts(case: str, tmp_path: Path) -> None:
    """As get_peft_model_state_dict was not asked: with the adapter's name, and with PEFT's copies of the base."""
    make, config, _ = CASES[case]
    peft_model = tiny.save(tiny.twin(make), tmp_path, touch=tiny.touch_saved, **config)
    want = tiny.read(tmp_path, tiny.twin(make)).factors
    settings = peft_model.peft_config["default"].to_dict()
    settings["peft_type"] = "LORA"
    marks = ("lora_", "modules_to_save", "original_module")
    raw = {key: tensor for key, tensor in peft_model.state_dict().items() if any(mark in key for mark in marks)}
    assert any(".modules_to_save.default." in key for key in raw) and any(".original_module." in key for key in raw)
    got = adapter_from_tensors("memory", settings, raw, tiny.shapes(tiny.twin(make))).factors
    assert sorted(got) == sorted(want)
    assert all(torch.equal(got[site].a, want[site].a) and torch.equal(got[site].b, want[site].b) for site in want)
    two = raw | {key.replace(".default.", ".other."): tensor for key, tensor in raw.items() if "modules_to_save" in key}
    with pytest.raises(AdapterError, match="must hold one adapter, but its keys name default, other"):
        adapter_from_tensors("memory", settings, two, tiny.shapes(tiny.twin(make)))


def test_a_copy_of_the_base_without_the_saved_module(tmp_path: Path) -> None:
    peft_model = tiny.save(tiny.twin(tiny.bert), tmp_path, target_modules=Q, task_type="SEQ_CLS")
    tiny.edit_weights(
        tmp_path, lambda t: {k.replace("classifier", "classifier.original_module"): v for k, v in t.items()}
    )
    with pytest.raises(
        AdapterError, match=r"modules_to_save names classifier, which the base has.*holds nothing of it"
    ):
        tiny.read(tmp_path, tiny.twin(tiny.bert))
    assert "classifier" in tiny.saved_modules(peft_model)


def test_untrained_copies_are_left_out_one_by_one(tmp_path: Path) -> None:
    """A container's modules are sites of their own; within a module, one changed tensor keeps all."""

    def touch(model: Any) -> None:
        tiny.saved_modules(model)["classifier.out_proj"].bias.add_(1)

    for dtype in (torch.float32, torch.bfloat16):
        tiny.save(tiny.twin(tiny.roberta), tmp_path, touch=touch, target_modules=Q, task_type="SEQ_CLS")
        tiny.edit_weights(tmp_path, lambda tensors, dtype=dtype: {k: t.to(dtype) for k, t in tensors.items()})
        adapter = tiny.read(tmp_path, tiny.twin(tiny.roberta))
        assert list(saved_of(adapter)) == ["classifier.out_proj"]
        assert saved_of(adapter)["classifier.out_proj"].a.dtype == dtype
    # where the base's values are not known, nothing can be told to be a copy
    bare = {name: blank(shape) for name, shape in tiny.shapes(tiny.twin(tiny.roberta)).items()}
    assert list(saved_of(read_adapter(tmp_path, bare))) == ["classifier.dense", "classifier.out_proj"]


def blank(shape: ModuleShape) -> ModuleShape:
    return ModuleShape(**(vars(shape) | {"weight": None, "bias": None}))


def test_an_adapter_of_nothing_but_a_head(tmp_path: Path) -> None:
    tiny.save(tiny.twin(tiny.scorer), tmp_path, touch=tiny.touch_saved, task_type="SEQ_CLS")
    tiny.edit_weights(tmp_path, lambda tensors: {k: t for k, t in tensors.items() if "lora_" not in k})
    adapter = tiny.read(tmp_path, tiny.twin(tiny.scorer), max_rank=1, target_modules=["q_proj"])
    assert list(adapter.factors) == ["score:saved"] and adapter.max_rank == 0


def test_limits_of_lora_do_not_hold_for_saved_modules(tmp_path: Path) -> None:
    tiny.save(tiny.twin(tiny.scorer), tmp_path, touch=tiny.touch_saved, task_type="SEQ_CLS", target_modules=["q_proj"])
    adapter = tiny.read(tmp_path, tiny.twin(tiny.scorer), max_rank=2, target_modules=["q_proj"])
    assert adapter.max_rank == 2 and adapter.factors["score:saved"].r == 3
    with pytest.raises(AdapterError, match="rank must be at most 1"):
        tiny.read(tmp_path, tiny.twin(tiny.scorer), max_rank=1)


@pytest.mark.parametrize("dtypes", [("float16", "float32"), ("bfloat16", "float16"), ("float64", "bfloat16")])
def test_one_dtype_per_site(dtypes: tuple[str, str], tmp_path: Path) -> None:
    weight, bias = (getattr(torch, name) for name in dtypes)
    tiny.save(tiny.twin(tiny.bert), tmp_path, touch=tiny.touch_saved, target_modules=Q, task_type="SEQ_CLS")
    key = "base_model.model.classifier."
    tiny.edit_weights(tmp_path, tiny.changed(f"{key}weight", lambda t: t.to(weight)))
    tiny.edit_weights(tmp_path, tiny.changed(f"{key}bias", lambda t: t.to(bias)))
    pair = tiny.read(tmp_path, tiny.twin(tiny.bert)).factors["classifier:saved"]
    assert pair.a.dtype == pair.b.dtype == torch.promote_types(weight, bias)


def test_a_bias_that_the_base_has_not(tmp_path: Path) -> None:
    tiny.save(tiny.twin(tiny.scorer), tmp_path, touch=tiny.touch_saved, task_type="SEQ_CLS")
    tiny.edit_weights(tmp_path, lambda t: t | {"base_model.model.score.bias": torch.tensor([1.0, 2.0, 3.0])})
    pair = tiny.read(tmp_path, tiny.twin(tiny.scorer)).factors["score:saved"]
    assert pair.b.tolist() == [[1.0, 2.0, 3.0]]
    tiny.edit_weights(tmp_path, lambda t: t | {"base_model.model.score.bias": torch.ones(2)})
    with pytest.raises(AdapterError, match=r"module score: bias must have shape \[3\].*3 outputs, got \[2\]"):
        tiny.read(tmp_path, tiny.twin(tiny.scorer))


# -- other numbers of labels --------------------------------------------------------------------------------
@pytest.mark.parametrize("labels", [1, 2, 7])
def test_heads_of_other_widths(labels: int, tmp_path: Path) -> None:
    def wide() -> Any:
        return tiny.scorer(labels)

    peft_model = tiny.save(tiny.twin(wide), tmp_path, touch=tiny.touch_saved, task_type="SEQ_CLS")
    adapter = tiny.read(tmp_path, tiny.twin(tiny.scorer))
    assert torch.equal(adapter.factors["score:saved"].a, tiny.saved_modules(peft_model)["score"].weight)
    assert adapter.factors["score:saved"].b.shape == (1, labels)
    modules = tiny.shapes(tiny.twin(tiny.scorer))
    modules["score"] = ModuleShape(**(vars(modules["score"]) | {"resizable": False}))
    with pytest.raises(AdapterError, match=rf"module score: weight must have shape \[3, 16\].*\[{labels}, 16\]: only"):
        read_adapter(tmp_path, modules)


def test_a_head_of_another_width_of_its_input(tmp_path: Path) -> None:
    tiny.save(tiny.twin(tiny.scorer), tmp_path, touch=tiny.touch_saved, task_type="SEQ_CLS")
    tiny.edit_weights(tmp_path, tiny.changed("base_model.model.score.weight", lambda t: t[:, :8]))
    with pytest.raises(AdapterError, match=r"module score: weight must have shape \[3, 16\].*\[3, 8\].*another base"):
        tiny.read(tmp_path, tiny.twin(tiny.scorer))
