"""Every way to generate: a mixed batch equals each row run alone by PEFT, and the rows of other names are different."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as tf

from tests.models import (
    BOS,
    NEW,
    PAD,
    VOCAB,
    Family,
    check_generate,
    check_rows,
    generated,
    prompts,
    right_rows,
    row_of,
)

pytest_plugins = ("tests.fixtures",)

Served = Callable[[str], tuple[Family, Any]]
NAMES = ["a", None, "b", "c"]
LENGTHS = [3, 7, 5, 4]
DECODERS = ["llama", "gpt2", "opt"]
ENCODER_DECODERS = ["t5", "bart"]
ALL = [*DECODERS, *ENCODER_DECODERS]

# a way to generate that does not depend on which rows run together -> arguments of generate
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 3},
    "beams in the config": {"generation_config": {"num_beams": 3}},
    "beams and return sequences": {"num_beams": 4, "num_return_sequences": 2},
    "beams and return sequences in the config": {"generation_config": {"num_beams": 4, "num_return_sequences": 2}},
    "beams with a length penalty": {"num_beams": 2, "length_penalty": 2.0, "early_stopping": True},
    "sampling of one": {"do_sample": True, "top_k": 1, "num_return_sequences": 3},
    "sampling of one in the config": {
        "generation_config": {"do_sample": True, "top_k": 1, "num_return_sequences": 3}
    },
    "repetition penalty": {"repetition_penalty": 1.7, "no_repeat_ngram_size": 2},
    "no cache": {"use_cache": False},
    "scores": {"return_dict_in_generate": True, "output_scores": True, "output_logits": True},
}  # fmt: skip
# the same for decoders only
DECODER_WAYS: dict[str, dict[str, Any]] = {
    "guidance": {"guidance_scale": 1.6},
    "guidance with beams": {"guidance_scale": 1.6, "num_beams": 2},
    "chunked prefill": {"prefill_chunk_size": 2},
    "static cache": {"cache_implementation": "static"},
    "static cache with beams": {"cache_implementation": "static", "num_beams": 2},
    "offloaded-free dynamic cache": {"cache_implementation": "dynamic"},
}


def settings_of(way: dict[str, Any]) -> dict[str, Any]:
    """The arguments with their config as an object, which is then the only place that says how to decode."""
    if "generation_config" not in way:
        return way
    return {"generation_config": tf.GenerationConfig(**way["generation_config"])}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ALL)
def test_a_mixed_batch_is_each_row_alone(served: Served, name: str, way: str) -> None:
    check_generate(*served(name), NAMES, prompts(LENGTHS), **settings_of(WAYS[way]))


@pytest.mark.parametrize("way", DECODER_WAYS)
@pytest.mark.parametrize("name", DECODERS)
def test_decoders(served: Served, name: str, way: str) -> None:
    check_generate(*served(name), NAMES, prompts(LENGTHS), **DECODER_WAYS[way])
