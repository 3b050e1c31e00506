"""Adapters trained after the vocabulary was resized, read for the base as it was; the truth: PEFT on a resized base."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file

from hf_multilora.formats import AdapterError, ModuleShape, read_adapter
from tests.formats import tiny

NEW = (41, 46)  # ids that the base does not have
E, HEAD = "base_model.model.model.embed_tokens", "base_model.model.lm_head"


def tied() -> Any:
    return tiny.llama(tie_word_embeddings=True)


def wide(make: Callable[[], Any], folder: Path) -> Any:
    """The base with 47 token ids; PEFT looks for the old number in the folder it came from."""
    tiny.twin(make).save_pretrained(folder)
    model = type(tiny.twin(make)).from_pretrained(folder)
    torch.manual_seed(1)
    model.resize_token_embeddings(47, mean_resizing=False)
    return model


def touch_ends(model: Any) -> None:
    """Train, as it were, what PEFT saves of the embeddings."""
    tiny.touch_saved(model)
    for name, tensor in model.named_parameters():
        if tensor.shape[0] == 47 and "lora_" not in name and "modules_to_save" not in name:
            tensor.add_(torch.rand(tensor.shape) * 0.5 + 0.1)


BASES = {"tied": tied, "untied": tiny.llama}
# what PEFT was told -> the sites besides LoRA's
CASES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "plain": ({}, ["lm_head:saved", "model.embed_tokens:saved"]),
    "embedding": ({"modules_to_save": ["embed_tokens"]}, ["lm_head:saved", "model.embed_tokens:saved"]),
    "head": ({"modules_to_save": ["lm_head"]}, ["lm_head:saved", "model.embed_tokens:saved"]),
    "both": ({"modules_to_save": ["embed_tokens", "lm_head"]}, ["lm_head:saved", "model.embed_tokens:saved"]),
    "tying kept": (
        {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
        ["lm_head:saved", "model.embed_tokens:saved"],
    ),
    "token rows": ({"trainable_token_indices": [41, 2, 7]}, ["lm_head:saved", "model.embed_tokens:saved"]),
    "token rows by name": (
        {"trainable_token_indices": {"embed_tokens": [41, 2, 7]}},
        ["lm_head:saved", "model.embed_tokens:saved"],
    ),
}


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("case", CASES)
def test_as_peft_on_a_resized_base(case: str, base: str, tmp_path: Path) -> None:
    make, (config, sites) = BASES[base], CASES[case]
    tiny.save(wide(make, tmp_path / "base"), tmp_path / "adapter", touch=touch_ends, **config)
    adapter = tiny.read(tmp_path / "adapter", tiny.twin(make))
    assert sorted(site for site in adapter.factors if ":" in site) == sites
    assert {pair.r for site, pair in adapter.factors.items() if ":" in site} == {47}
    loaded = peft.PeftModel.from_pretrained(wide(make, tmp_path / "base"), tmp_path / "adapter").eval()
    tiny.assert_served(make, adapter, loaded, NEW)
    # the file was not merely served from a base that has these weights
    with pytest.raises(AssertionError):
        other = {site: pair for site, pair in adapter.factors.items() if site != "lm_head:saved"}
        tiny.assert_served(make, type(adapter)(**(vars(adapter) | {"factors": other})), loaded)


@pytest.mark.parametrize("config", [{}, {"trainable_token_indices": [41, 2]}], ids=["plain", "token rows"])
def test_encoder_decoders(config: dict[str, Any], tmp_path: Path) -> None:
    """`shared` is never called: what the file holds of it is for the modules that are tied to it."""
    tiny.save(wide(tiny.t5, tmp_path / "base"), tmp_path / "adapter", touch=touch_ends, target_modules=["q"], **config)
    adapter = tiny.read(tmp_path / "adapter", tiny.twin(tiny.t5), aliases=tiny.SHARED)
    assert sorted(site for site in adapter.factors if ":" in site) == [
        "decoder.embed_tokens:saved",
        "encoder.embed_tokens:saved",
        "lm_head:saved",
    ]
    loaded = peft.PeftModel.from_pretrained(wide(tiny.t5, tmp_path / "base"), tmp_path / "adapter").eval()
    tiny.assert_served(tiny.t5, adapter, loaded, NEW)


@pytest.mark.parametrize("base", BASES)
def test_copies_saved_on_request(base: str, tmp_path: Path) -> None:
    """save_embedding_layers=True of a base whose weights were trained on: they replace the base's, of its own size."""
    make = BASES[base]
    peft_model = tiny.wrap(tiny.twin(make))
    with torch.no_grad():
        peft_model.get_input_embeddings().weight.mul_(-1)
    peft_model.save_pretrained(tmp_path, save_embedding_layers=True)
    adapter = tiny.read(tmp_path, tiny.twin(make))
    ends = ["model.embed_tokens:saved"] if base == "untied" else ["lm_head:saved", "model.embed_tokens:saved"]
    assert sorted(site for site in adapter.factors if ":" in site) == ends
    tiny.assert_served(make, adapter, peft_model)


def _saved_both(tmp_path: Path, make: Callable[[], Any] = tiny.llama) -> Path:
    tiny.save(wide(make, tmp_path / "base"), tmp_path / "adapter", touch=touch_ends)
    return tmp_path / "adapter"


def test_one_end_alone(tmp_path: Path) -> None:
    folder = _saved_both(tmp_path)
    for absent, sizes in (
        (HEAD, "embed_tokens with 47 rows, but lm_head has 40"),
        (E, "lm_head with 47 rows, but model"),
    ):
        tensors = load_file(folder / tiny.WEIGHTS)
        tiny.edit_weights(folder, lambda t, absent=absent: {k: v for k, v in t.items() if not k.startswith(absent)})
        with pytest.raises(AdapterError, match=sizes):
            tiny.read(folder, tiny.twin(tiny.llama))
        tiny.edit_weights(folder, lambda _, tensors=tensors: tensors)
    assert len(tiny.read(folder, tiny.twin(tiny.llama)).factors) == 8
    # without a head there is nothing that the embedding must agree with
    inner = {name: shape for name, shape in tiny.shapes(tiny.twin(tiny.llama)).items() if name != "lm_head"}
    tiny.edit_weights(folder, lambda t: {k: v for k, v in t.items() if not k.startswith(HEAD)})
    assert len(read_adapter(folder, inner).factors) == 7


def test_one_end_alone_of_a_tied_base_without_tying(tmp_path: Path) -> None:
    """PEFT leaves the head on the base's rows; here the base has fewer of them."""
    config = {"modules_to_save": ["embed_tokens"], "touch": touch_ends}
    tiny.save(wide(tied, tmp_path / "base"), tmp_path / "adapter", **config)
    kept = "embed_tokens.modules_to_save"
    tiny.edit_weights(tmp_path / "adapter", lambda t: {k: v for k, v in t.items() if kept in k or "lora" in k})
    with pytest.raises(
        AdapterError, match=r"model\.embed_tokens with 47 rows, but lm_head has 40.*ensure_weight_tying"
    ):
        tiny.read(tmp_path / "adapter", tiny.twin(tied))


def test_two_weights_for_one_tied_parameter(tmp_path: Path) -> None:
    folder = _saved_both(tmp_path, tied)
    assert len(tiny.read(folder, tiny.twin(tied)).factors) == 8
    tiny.edit_weights(folder, tiny.changed(f"{HEAD}.weight", lambda weight: weight + 1))
    with pytest.raises(AdapterError, match=r"it is tied to (lm_head|model\.embed_tokens), but the file holds another"):
        tiny.read(folder, tiny.twin(tied))
    base = tiny.twin(tied).lm_head.weight.detach()
    tiny.edit_weights(folder, lambda t: t | {f"{HEAD}.weight": base, f"{E}.weight": base * 2})
    with pytest.raises(AdapterError, match=r"model\.embed_tokens: it is tied to lm_head, but the file holds another"):
        tiny.read(folder, tiny.twin(tied))


def test_a_replaced_weight_under_lora(tmp_path: Path) -> None:
    tiny.save(tiny.twin(tied), tmp_path, target_modules=["lm_head", "q_proj"])
    rows = torch.ones(40, 16)
    tiny.edit_weights(tmp_path, lambda t: {k: v for k, v in t.items() if "base_layer" not in k} | {f"{E}.weight": rows})
    with pytest.raises(AdapterError, match=r"module lm_head: .*with LoRA and saves it in full.*embed_tokens is tied"):
        tiny.read(tmp_path, tiny.twin(tied))
    assert (
        "model.embed_tokens:saved" in tiny.read(tmp_path, tiny.twin(tiny.llama)).factors
    )  # untied, so it is none of its


def test_other_parameters_are_not_replaced(tmp_path: Path) -> None:
    """PEFT would load any parameter of the base from the file; only embeddings are ever meant."""
    tiny.save(tiny.twin(tiny.llama), tmp_path)
    up = "model.layers.0.mlp.up_proj"
    tiny.edit_weights(tmp_path, lambda t: t | {f"base_model.model.{up}.weight": torch.ones(24, 16)})
    with pytest.raises(AdapterError, match=f"module {up}: .*differs from the base's"):
        tiny.read(tmp_path, tiny.twin(tiny.llama))
    norm = torch.ones(16)
    tiny.edit_weights(tmp_path, lambda t: {k: v for k, v in t.items() if up not in k} | {"model.norm.weight": norm})
    with pytest.raises(AdapterError, match=r"module model\.norm: .*cannot be told from this base"):
        tiny.read(tmp_path, tiny.twin(tiny.llama))


def test_a_tied_head_keeps_its_own_bias(tmp_path: Path) -> None:
    folder = _saved_both(tmp_path, tied)
    tiny.edit_weights(folder, lambda t: {k: v for k, v in t.items() if not k.startswith(HEAD)})
    modules = tiny.shapes(tiny.twin(tied))
    for rows, bias in ((40, torch.arange(40.0)), (47, torch.arange(47.0))):
        own = {"weight": torch.Size([40, 16]), "bias": torch.Size([40])}
        modules["lm_head"] = ModuleShape(**(vars(modules["lm_head"]) | {"bias": bias, "own": own}))
        if rows == 47:  # as if the base had that many
            assert torch.equal(read_adapter(folder, modules).factors["lm_head:saved"].b, bias[None])
            continue
        with pytest.raises(AdapterError, match=r"module lm_head: .*47 rows, and holds no bias for it"):
            read_adapter(folder, modules)


def test_a_base_without_values(tmp_path: Path) -> None:
    """A plan knows shapes only: what has the base's shape is a copy, and what has another is the adapter's own."""

    def read(folder: Path, **settings: Any) -> Any:
        return tiny.read(folder, tiny.llama().to("meta"), **settings)

    folder = _saved_both(tmp_path)
    assert len(read(folder, by_shape=True).factors) == 8
    tiny.save(tiny.twin(tiny.llama), tmp_path / "same", target_modules=["embed_tokens", "q_proj"])
    assert len(read(tmp_path / "same", by_shape=True).factors) == 4
    with pytest.raises(AdapterError, match="cannot be told from this base"):
        read(tmp_path / "same")
    tiny.save(tiny.twin(tiny.llama), tmp_path / "saved", modules_to_save=["lm_head"])
    assert "lm_head:saved" in read(tmp_path / "saved", by_shape=True).factors
