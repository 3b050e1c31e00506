"""Names in adapter files are renamed as Transformers renames those of checkpoints."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as tf
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming

from hf_multilora.formats.keys import NameResolver
from hf_multilora.renames import checkpoint_renames
from tests.formats import tiny
from tests.formats import tiny_experts as moe

SMALL = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}


def llava() -> Any:
    vision = tf.CLIPVisionConfig(**SMALL, image_size=8, patch_size=4)
    text = tf.LlamaConfig(**SMALL, vocab_size=40)
    return tf.LlavaForConditionalGeneration(tf.LlavaConfig(vision_config=vision, text_config=text))


def dual() -> Any:
    """One of its parts has renamings of its own, under its path."""
    vision = tf.ViTConfig(**SMALL, image_size=8, patch_size=4)
    config = tf.VisionTextDualEncoderConfig.from_vision_text_configs(vision, tf.BertConfig(**SMALL, vocab_size=40))
    return tf.VisionTextDualEncoderModel(config)


MODELS: dict[str, tuple[Callable[[], Any], int]] = {  # and how many of its names were others, at least
    "mixtral": (lambda: moe.base("mixtral"), 6),
    "nemotron_h": (lambda: moe.base("nemotron_h"), 14),
    "llava": (llava, 30),
    "dual": (dual, 12),
    "llama": (tiny.llama, 0),
}


@pytest.mark.parametrize("name", MODELS)
def test_as_transformers(name: str) -> None:
    make, changed = MODELS[name]
    with torch.device("meta"):
        model = make()
    transforms = [t for t in get_model_conversion_mapping(model) if type(t) is WeightRenaming]
    own = list(model.state_dict())
    old = {key: key for key in own}
    for transform in reversed(transforms):
        back = transform.reverse_transform()
        old = {key: back.rename_source_key(was)[0] for key, was in old.items()}
    assert sum(key != was for key, was in old.items()) >= changed
    renames = [(re.compile(pattern), target) for pattern, target in checkpoint_renames(model)]
    for key in {*own, *old.values()}:
        want = got = key
        for transform in transforms:
            want = transform.rename_source_key(want)[0]
        for pattern, target in renames:
            got = pattern.sub(target, got, count=1)
        assert got == want


def test_an_old_name_finds_its_module() -> None:
    with torch.device("meta"):
        model = llava()
    resolver = NameResolver(
        dict.fromkeys(name for name, _ in model.named_modules()), renames=checkpoint_renames(model), base_prefix="model"
    )
    assert resolver.resolve("multi_modal_projector.linear_1") == ("model.multi_modal_projector.linear_1",)
    assert resolver.resolve("language_model.model.layers.0.mlp.up_proj") == (
        "model.language_model.layers.0.mlp.up_proj",
    )
    assert resolver.resolve("language_model.lm_head") == ("lm_head",)
    assert resolver.resolve("vision_tower.layers.0.mlp.fc9") == ()
