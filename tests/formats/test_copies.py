"""Copies of the base that PEFT saves beside the factors: dropped where they are equal, an error where they are not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hf_multilora.formats import AdapterError, ModuleShape, read_adapter
from tests.formats import tiny

COPIED = {"embed_tokens": "model.embed_tokens", "lm_head": "lm_head"}


@pytest.mark.parametrize("target", COPIED)
@pytest.mark.parametrize("saved", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("loaded", [torch.float32, torch.bfloat16])
def test_copies_of_the_base(target: str, saved: torch.dtype, loaded: torch.dtype, tmp_path: Path) -> None:
    """PEFT's default save carries the embedding: dropped where it is the base's, in either's dtype; an error else."""
    tiny.save(tiny.same_llama(), tmp_path, target_modules=[target])
    copy = f"base_model.model.{COPIED[target]}.base_layer.weight"
    tiny.edit_weights(tmp_path, lambda tensors: {key: tensor.to(saved) for key, tensor in tensors.items()})
    assert list(tiny.read(tmp_path, tiny.same_llama().to(loaded)).factors) == [COPIED[target]]
    tiny.edit_weights(tmp_path, tiny.changed(copy, lambda weight: torch.cat([weight[:-1], weight[-1:] + 1])))
    with pytest.raises(AdapterError, match=f"module {COPIED[target]}: .*differs from the base's.*{copy}"):
        tiny.read(tmp_path, tiny.same_llama().to(loaded))
    tiny.edit_weights(tmp_path, tiny.changed(copy, lambda weight: torch.cat([weight, weight[:7]])))
    with pytest.raises(AdapterError, match=r"of shape \[47, 16\], the base's has shape \[40, 16\].*resized vocabulary"):
        tiny.read(tmp_path, tiny.same_llama().to(loaded))


def test_copies_that_cannot_be_compared(tmp_path: Path) -> None:
    tiny.save(tiny.same_llama(), tmp_path, target_modules=["embed_tokens"])
    modules = tiny.shapes(tiny.same_llama())
    modules["model.embed_tokens"] = ModuleShape("embedding", 40, 16)
    with pytest.raises(AdapterError, match=r"cannot be told from this base.*save_embedding_layers=False"):
        read_adapter(tmp_path, modules)


def test_copies_of_a_name_that_stands_for_several_modules(tmp_path: Path) -> None:
    def base() -> Any:
        torch.manual_seed(0)
        return tiny.t5()

    tiny.save(base(), tmp_path, target_modules=["shared"])
    tiny.edit_weights(tmp_path, lambda t: t | {"shared.base_layer.weight": base().shared.weight.detach()})
    assert len(tiny.read(tmp_path, base(), aliases=tiny.SHARED).factors) == 2
    tiny.edit_weights(tmp_path, tiny.changed("shared.base_layer.weight", lambda weight: weight + 1))
    with pytest.raises(AdapterError, match=r"module encoder\.embed_tokens: .*differs from the base's"):
        tiny.read(tmp_path, base(), aliases=tiny.SHARED)


def test_an_adapter_trained_with_more_tokens(tmp_path: Path) -> None:
    def wider() -> Any:
        model = tiny.same_llama()
        model.resize_token_embeddings(47, mean_resizing=False)
        return model

    for target, kind in (
        ("embed_tokens", r"lora_embedding_A must have shape \[r, 40\].*\[2, 47\]"),
        ("lm_head", "lora_B"),
    ):
        folder = tmp_path / target
        tiny.save(wider(), folder, target_modules=[target])
        with pytest.raises(AdapterError, match=r"\[47, 16\], the base's has shape \[40, 16\]"):
            tiny.read(folder, tiny.same_llama())
        tiny.edit_weights(folder, lambda tensors: {k: t for k, t in tensors.items() if "base_layer" not in k})
        with pytest.raises(AdapterError, match=f"{kind}.*vocabulary was resized"):
            tiny.read(folder, tiny.same_llama())


def test_an_untrained_head_is_only_a_copy(tmp_path: Path) -> None:
    def base() -> Any:
        torch.manual_seed(0)
        return tiny.bert()

    tiny.save(base(), tmp_path, target_modules=["query"], task_type="SEQ_CLS")
    assert len(tiny.read(tmp_path, base()).factors) == 2
    remedy = r"saves classifier in full.*no such module.*SEQ_CLS: auto_class='AutoModelForSequenceClassification'"
    with pytest.raises(AdapterError, match=remedy):
        tiny.read(tmp_path, tiny.bert().bert)  # the inner model has no such head
    tiny.edit_config(tmp_path, task_type=None)
    with pytest.raises(AdapterError, match=r"load the base that the adapter was trained on"):
        tiny.read(tmp_path, tiny.bert().bert)
