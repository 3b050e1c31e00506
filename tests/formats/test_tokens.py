"""Trained token rows: read with their ids, tied as PEFT ties them, and the base with them gives PEFT's logits."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from safetensors.torch import load_file

from hf_multilora.formats import AdapterError, ModuleShape, adapter_from_tensors, read_adapter
from tests.formats import tiny

E, HEAD = "model.embed_tokens", "lm_head"
IDS = [7, 2, 30]


def tied() -> Any:
    return tiny.llama(tie_word_embeddings=True)


def gemma() -> Any:
    """An embedding that multiplies its rows by a scale, tied."""
    settings = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "head_dim": 8}
    return tf.Gemma3ForCausalLM(tf.Gemma3TextConfig(**settings, num_attention_heads=2, num_key_value_heads=1))


def bart() -> Any:
    settings = {"vocab_size": 40, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1}
    settings |= {"encoder_ffn_dim": 8, "decoder_ffn_dim": 8, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    return tf.BartForConditionalGeneration(tf.BartConfig(**settings, max_position_embeddings=32))


# name -> (base, what PEFT was told, module -> the tokens whose rows it gets)
CASES: dict[str, tuple[Callable[[], Any], dict[str, Any], dict[str, list[int]]]] = {
    "list": (tiny.llama, {"trainable_token_indices": IDS}, {E: IDS}),
    "list, tied": (tied, {"trainable_token_indices": IDS}, {E: IDS, HEAD: IDS}),
    "list, tying kept": (tied, {"trainable_token_indices": IDS, "ensure_weight_tying": True}, {E: IDS, HEAD: IDS}),
    "by name": (tiny.llama, {"trainable_token_indices": {"embed_tokens": IDS}}, {E: IDS}),
    "by name, tied": (tied, {"trainable_token_indices": {"embed_tokens": IDS}}, {E: IDS, HEAD: IDS}),
    "by path": (tied, {"trainable_token_indices": {"model.embed_tokens": IDS}}, {E: IDS, HEAD: IDS}),
    "head": (tiny.llama, {"trainable_token_indices": {"lm_head": IDS}}, {HEAD: IDS}),
    "head, tied": (tied, {"trainable_token_indices": {"lm_head": IDS}}, {HEAD: IDS}),
    "both": (tiny.llama, {"trainable_token_indices": {"embed_tokens": IDS, "lm_head": [3]}}, {E: IDS, HEAD: [3]}),
    "both alike, tied": (
        tied,
        {"trainable_token_indices": {"embed_tokens": IDS, "lm_head": IDS}},
        {E: IDS, HEAD: IDS},
    ),
    "both, tied": (
        tied,
        {"trainable_token_indices": {"embed_tokens": IDS, "lm_head": [3, 7]}},
        {E: IDS, HEAD: [3, 7]},
    ),
    "scaled": (gemma, {"trainable_token_indices": IDS}, {E: IDS, HEAD: IDS}),
    "gpt2": (
        tiny.gpt2,
        {"trainable_token_indices": {"wte": IDS}, "target_modules": ["c_attn"]},
        {"transformer.wte": IDS, HEAD: IDS},
    ),
    "encoder-decoder": (
        tiny.t5,
        {"trainable_token_indices": IDS, "target_modules": ["q"]},
        {"encoder.embed_tokens": IDS, "decoder.embed_tokens": IDS, HEAD: IDS},
    ),
    "scaled encoder-decoder": (
        bart,
        {"trainable_token_indices": IDS},
        {"model.encoder.embed_tokens": IDS, "model.decoder.embed_tokens": IDS, HEAD: IDS},
    ),
    "encoder": (
        tiny.bert,
        {"trainable_token_indices": IDS, "target_modules": ["query"]},
        {"bert.embeddings.word_embeddings": IDS},
    ),
    "positions": (
        tiny.gpt2,
        {"trainable_token_indices": {"wpe": [0, 4]}, "target_modules": ["c_attn"]},
        {"transformer.wpe": [0, 4]},
    ),
    "saved head": (
        tiny.llama,
        {"trainable_token_indices": IDS, "modules_to_save": ["lm_head"]},
        {E: IDS},
    ),
}


def rows_of(adapter: Any) -> dict[str, Any]:
    return {site.removesuffix(":tokens"): pair for site, pair in adapter.factors.items() if site.endswith(":tokens")}


def save(make: Callable[[], Any], folder: Path, **config: Any) -> Any:
    """PEFT's adapter; its rows, which copies of the base's start as, are random."""
    return tiny.save(tiny.twin(make), folder, touch=tiny.touch_saved, **config)


def read(folder: Path, make: Callable[[], Any], **settings: Any) -> Any:
    shapes = tiny.shapes(tiny.twin(make))
    prefix = "model." if "model.shared" in shapes else ""
    aliases = {prefix + k: tuple(prefix + n for n in v) for k, v in tiny.SHARED.items() if prefix + k in shapes}
    return read_adapter(folder, shapes, aliases=aliases, **settings)


@pytest.mark.parametrize("case", CASES)
def test_as_peft(case: str, tmp_path: Path) -> None:
    make, config, places = CASES[case]
    peft_model = save(make, tmp_path, **config)
    adapter = read(tmp_path, make)
    found, tensors = rows_of(adapter), load_file(tmp_path / tiny.WEIGHTS)
    assert sorted(found) == sorted(places)
    for module, ids in places.items():
        pair = found[module]
        name = module if f"base_model.model.{module}.token_adapter.trainable_tokens_delta" in tensors else None
        keys = [k for k in tensors if k.endswith("trainable_tokens_delta") and (name is None or f".{name}." in k)]
        rows = tensors[keys[0]]
        assert pair.b.tolist() == [sorted(ids)] and pair.b.dtype == torch.int64 and pair.scaling == 1.0
        assert torch.equal(pair.a, rows[torch.tensor(ids).argsort()])
    tiny.assert_served(make, adapter, peft_model)
    # negative control: rows of other tokens
    swapped = {
        site: type(pair)(pair.a.flip(0) if site.endswith(":tokens") else pair.a, pair.b, pair.scaling)
        for site, pair in adapter.factors.items()
    }
    with pytest.raises(AssertionError):
        tiny.assert_served(make, type(adapter)(**(vars(adapter) | {"factors": swapped})), peft_model)


@pytest.mark.parametrize("case", ["list", "list, tied", "both, tied", "encoder-decoder"])
def test_raw_state_dicts(case: str, tmp_path: Path) -> None:
    make, config, _ = CASES[case]
    peft_model = save(make, tmp_path, **config)
    want = read(tmp_path, make).factors
    settings = json.loads((tmp_path / tiny.CONFIG).read_text())
    raw = {k: t for k, t in peft_model.state_dict().items() if "lora_" in k or "token_adapter" in k}
    assert any("delta.default" in key for key in raw) and any("base_layer.weight" in key for key in raw)
    aliases = tiny.SHARED if case == "encoder-decoder" else {}
    got = adapter_from_tensors("memory", settings, raw, tiny.shapes(tiny.twin(make)), aliases=aliases).factors
    assert sorted(got) == sorted(want)
    assert all(torch.equal(got[site].a, want[site].a) and torch.equal(got[site].b, want[site].b) for site in want)


def test_nothing_but_rows(tmp_path: Path) -> None:
    save(tiny.llama, tmp_path, trainable_token_indices=IDS)
    tiny.edit_weights(tmp_path, lambda tensors: {k: t for k, t in tensors.items() if "lora_" not in k})
    adapter = read(tmp_path, tiny.llama, max_rank=1, target_modules=["q_proj"])
    assert list(adapter.factors) == [f"{E}:tokens"] and adapter.max_rank == 0


def test_rows_keep_the_files_dtype(tmp_path: Path) -> None:
    save(tiny.llama, tmp_path, trainable_token_indices=IDS)
    tiny.edit_weights(tmp_path, lambda tensors: {k: t.to(torch.bfloat16) for k, t in tensors.items()})
    assert rows_of(read(tmp_path, tiny.llama))[E].a.dtype == torch.bfloat16


DELTA = f"base_model.model.{E}.token_adapter.trainable_tokens_delta"


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([7, 2], r"must have shape \[2, 16\].*names 2 tokens\), got shape \[3, 16\]"),
        ([7, 2, 2], r"must hold different token ids of at least 0, got \[7, 2, 2\]"),
        ([7, 2, -1], "must hold different token ids of at least 0"),
        ([7, 2, 40], r"must be token ids below 40, got 40: .*resized vocabulary"),
        ([7, 2, 3.0], "must be a list of token ids"),
        ([7, 2, True], "must be a list of token ids"),
        ("7, 2, 3", "must be a list of token ids"),
        ({"embed_tokens": "7"}, r"trainable_token_indices\['embed_tokens'\] must be a list of token ids"),
        ({"embed_tokens": IDS, "lm_head": [1]}, "names lm_head, but the file holds no rows for it"),
        ({"wte": IDS}, "does not say of which tokens"),
        (None, "does not say of which tokens"),
        ([], "does not say of which tokens"),
    ],
)
def test_indices_that_do_not_fit(ids: Any, message: str, tmp_path: Path) -> None:
    save(tiny.llama, tmp_path, trainable_token_indices=IDS)
    read(tmp_path, tiny.llama)  # without the change it loads
    tiny.edit_config(tmp_path, trainable_token_indices=ids)
    with pytest.raises(AdapterError, match=message):
        read(tmp_path, tiny.llama)


ROWS: dict[str, tuple[Callable[[tiny.Tensors], tiny.Tensors], str]] = {
    "none": (lambda tensors: {k: t for k, t in tensors.items() if k != DELTA}, "the file holds no rows for it"),
    "another width": (tiny.changed(DELTA, lambda rows: rows[:, :8]), r"must have shape \[3, 16\].*\[3, 8\]"),
    "empty": (tiny.changed(DELTA, lambda rows: rows[:0]), r"must have shape \[n, 16\], got the empty shape"),
    "integers": (tiny.changed(DELTA, lambda rows: rows.to(torch.int32)), "must be float32"),
    "NaN": (tiny.changed(DELTA, lambda rows: rows * float("nan")), "got NaN"),
    "Inf": (tiny.changed(DELTA, lambda rows: rows / 0), "got (NaN|Inf)"),
    "unknown module": (
        lambda t: t | {DELTA.replace("embed_tokens", "wte"): t[DELTA]},
        r"model\.wte, which the base does",
    ),
    "two keys": (lambda t: t | {DELTA.removeprefix("base_model.model."): t[DELTA]}, "two keys land on"),
    "two names": (lambda t: t | {f"{DELTA}.one": t[DELTA], f"{DELTA}.two": t[DELTA]}, "keys name None, one, two"),
    "a norm": (
        lambda t: t | {DELTA.replace("embed_tokens", "norm"): t[DELTA]},
        r"module model\.norm: trained token rows must be for an embedding",
    ),
    "something else": (lambda t: t | {DELTA.replace("delta", "scale"): t[DELTA]}, "token rows.*is not supported"),
    "LoRA as well": (
        lambda t: (
            t
            | {f"base_model.model.{E}.lora_embedding_A": torch.ones(2, 40), f"{E}.lora_embedding_B": torch.ones(16, 2)}
        ),
        rf"module {E}: .*trained token rows.*and trains it with LoRA",
    ),
}


@pytest.mark.parametrize("fault", ROWS)
def test_rows_that_cannot_be_served(fault: str, tmp_path: Path) -> None:
    save(tiny.llama, tmp_path, trainable_token_indices=IDS)
    change, message = ROWS[fault]
    tiny.edit_weights(tmp_path, change)
    with pytest.raises(AdapterError, match=message):
        read(tmp_path, tiny.llama)


def test_lora_on_the_tied_head(tmp_path: Path) -> None:
    """PEFT adds the head's delta to logits of the trained rows; a site of each would replace these logits instead."""
    config = {"trainable_token_indices": IDS, "target_modules": ["lm_head", "q_proj"]}
    save(tied, tmp_path, **config)
    with pytest.raises(AdapterError, match=r"module lm_head: .*trained token rows.*and trains it with LoRA"):
        read(tmp_path, tied)
    save(tiny.llama, tmp_path / "untied", **config)
    assert "lm_head" in read(tmp_path / "untied", tiny.llama).factors


def test_a_module_saved_in_full_as_well(tmp_path: Path) -> None:
    """PEFT writes such a file, but cannot compute with it."""
    peft_model = save(tiny.llama, tmp_path, trainable_token_indices=IDS, modules_to_save=["embed_tokens"])
    with pytest.raises(ValueError, match="wraps an unknown layer"):
        tiny.outputs(peft_model)
    with pytest.raises(AdapterError, match=rf"module {E}: .*trained token rows.*and saves it in full"):
        read(tmp_path, tiny.llama)


def test_heads_with_a_bias(tmp_path: Path) -> None:
    """PEFT forgets the bias of a head that it gives token rows."""

    def masked() -> Any:
        return tiny.bert(tf.BertForMaskedLM)

    peft_model = save(masked, tmp_path, trainable_token_indices=IDS, target_modules=["query"])
    head = peft_model.base_model.model.cls.predictions.decoder
    x = torch.ones(1, 16)
    before = head(x)
    with torch.no_grad():
        head.token_adapter.base_layer.bias.add_(1)
    assert torch.equal(head(x), before)
    with pytest.raises(AdapterError, match=r"module cls\.predictions\.decoder: PEFT leaves out the bias"):
        read(tmp_path, masked)


def test_modules_that_the_model_refuses(tmp_path: Path) -> None:
    save(tied, tmp_path, trainable_token_indices=IDS)
    for name in (E, HEAD):
        modules = tiny.shapes(tiny.twin(tied))
        modules[name] = ModuleShape(**(vars(modules[name]) | {"refused": "it is never called"}))
        with pytest.raises(
            AdapterError, match=rf"module {name}: no adapter may have token rows .*: it is never called"
        ):
            read_adapter(tmp_path, modules)


def test_rows_for_other_tokens_beside_an_alias(tmp_path: Path) -> None:
    config = {"trainable_token_indices": {"shared": IDS, "lm_head": [1]}, "target_modules": ["q"]}
    save(tiny.t5, tmp_path, **config)
    with pytest.raises(AdapterError, match=r"module shared: it is never called.*rows for other tokens"):
        read(tmp_path, tiny.t5)
