"""Tiny random models for the sweep over architectures: sizes, inputs and what a row of the table says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import Tensor

VOCAB = 40
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
BLOCK = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
SIZES = {"vocab_size": VOCAB, "max_position_embeddings": 64, **BLOCK, **SPECIAL}
GROUPED = {**SIZES, "num_key_value_heads": 1}
HEADED = {**GROUPED, "head_dim": 8}
GPT = {"vocab_size": VOCAB, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_inner": 24, "n_positions": 64, **SPECIAL}
ENCODER_DECODER = {
    "vocab_size": VOCAB, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "max_position_embeddings": 64,
    "decoder_start_token_id": 2, **SPECIAL,
}  # fmt: skip
T5 = {
    "vocab_size": VOCAB, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2, "pad_token_id": 0,
    "eos_token_id": 2, "decoder_start_token_id": 0,
}  # fmt: skip
IMAGE = {**BLOCK, "image_size": 8, "patch_size": 4}
SPEECH = {
    **SIZES, "conv_dim": [8, 8], "conv_stride": [5, 5], "conv_kernel": [5, 5], "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2,
}  # fmt: skip
STATE = {"state_size": 4, "time_step_rank": 2}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}

Inputs = dict[str, Any]  # tensors with one entry or an equal number of entries per row, and settings


def ids(rows: int, tokens: int) -> Tensor:
    return torch.randint(3, VOCAB - 4, (rows, tokens))


def text(rows: int, tokens: int) -> Inputs:
    """Token ids; row 1 is shorter, padded on the left as `generate` wants it."""
    mask = torch.ones(rows, tokens, dtype=torch.long)
    mask[1, : tokens // 3] = 0
    return {"input_ids": ids(rows, tokens) * mask, "attention_mask": mask}


def right(rows: int, tokens: int) -> Inputs:
    """Token ids, row 1 padded on the right."""
    return {name: value.flip(1) for name, value in text(rows, tokens).items()}


def plain(rows: int, tokens: int) -> Inputs:
    return {"input_ids": ids(rows, tokens)}


def pair(rows: int, tokens: int) -> Inputs:
    """Encoder and decoder of different lengths."""
    return {**right(rows, tokens + 1), "decoder_input_ids": ids(rows, tokens)}


def image(rows: int, tokens: int) -> Inputs:
    return {"pixel_values": torch.randn(rows, 3, 8, 8)}


def large_image(rows: int, tokens: int) -> Inputs:
    return {"pixel_values": torch.randn(rows, 3, 32, 32)}


def captioned(rows: int, tokens: int) -> Inputs:
    return {**right(rows, tokens), **image(rows, tokens)}


def described(rows: int, tokens: int) -> Inputs:
    return {**image(rows, tokens), "decoder_input_ids": ids(rows, tokens)}


def audio(rows: int, tokens: int) -> Inputs:
    return {"input_values": torch.randn(rows, 400)}


def sound(rows: int, tokens: int) -> Inputs:
    """Features of as many frames as there are rows, at the second time: see TOKENS."""
    return {"input_features": torch.randn(rows, tokens, 8)}


def spoken(rows: int, tokens: int) -> Inputs:
    return {"input_features": torch.randn(rows, 8, 20), "decoder_input_ids": ids(rows, tokens)}


def with_image(rows: int, tokens: int, marks: int = 4, mark: int = VOCAB - 1) -> Inputs:
    """A prompt that holds `marks` image tokens, and one image per row."""
    some = text(rows, tokens)
    holder = torch.full((rows, marks), mark)
    return {
        "input_ids": torch.cat([some["input_ids"], holder, ids(rows, 2)], 1),
        "attention_mask": torch.cat([some["attention_mask"], torch.ones(rows, marks + 2, dtype=torch.long)], 1),
        **image(rows, tokens),
    }


def prefixed(rows: int, tokens: int) -> Inputs:
    """PaliGemma: without token types its mask, and so its answer, depends on whether another row is padded."""
    some = with_image(rows, tokens)
    return {**some, "token_type_ids": torch.zeros_like(some["input_ids"])}


def prefixed_large(rows: int, tokens: int) -> Inputs:
    """Gemma 3: pictures of 16 x 16, whose tokens see each other."""
    some = {**prefixed(rows, tokens), "pixel_values": torch.randn(rows, 3, 16, 16)}
    return {**some, "token_type_ids": (some["input_ids"] == VOCAB - 1).long()}


def with_pictures(rows: int, tokens: int) -> Inputs:
    """Idefics: [rows, pictures of the row, 3, height, width]."""
    return {**with_image(rows, tokens), "pixel_values": torch.randn(rows, 1, 3, 16, 16)}


def with_patches(rows: int, tokens: int) -> Inputs:
    """Qwen2-VL: patches of all images in one [patches, features], 16 a row, merged by 2 x 2 to 4 tokens."""
    some = with_image(rows, tokens)
    some["input_ids"][:, tokens - 1] = VOCAB - 3  # vision start
    some["pixel_values"] = torch.randn(rows * 16, 3 * 2 * 4 * 4)
    some["image_grid_thw"] = torch.tensor([[1, 4, 4]] * rows)
    some["mm_token_type_ids"] = (some["input_ids"] == VOCAB - 1).int()
    return some


def row_of(inputs: Mapping[str, Any], row: int, rows: int) -> Inputs:
    """Row `row` alone; what holds several entries per row is cut in equal parts."""
    return {
        name: value.unflatten(0, (rows, -1))[row] if isinstance(value, Tensor) else value
        for name, value in inputs.items()
    }


@dataclass(frozen=True)
class Architecture:
    """One row of the table: a config, a model class, how to make inputs, and what is known about it.

    silent: why it does not generate. whole: whether every adapter is refused. unused: regex of modules whose output the
    class does not use. splits: whether a batch can always be cut into passes: not where images have no fixed place.
    """

    config: str
    model: str
    settings: Mapping[str, Any]
    inputs: Callable[[int, int], Inputs]
    silent: str = ""
    whole: bool = False
    unused: str = ""
    splits: bool = True
    parts: Mapping[str, tuple[str, Mapping[str, Any]]] = field(default_factory=dict)  # sub-configs: class, settings

    @property
    def missing(self) -> list[str]:
        """Classes that the installed Transformers lacks."""
        classes = (self.config, self.model, *(cls for cls, _ in self.parts.values()))
        return [cls for cls in classes if not hasattr(transformers, cls)]

    def make_config(self) -> Any:
        parts = {name: getattr(transformers, cls)(**some).to_dict() for name, (cls, some) in self.parts.items()}
        return getattr(transformers, self.config)(**parts, **self.settings)

    def build(self) -> Any:
        """The model, with weights large enough that a module's delta shows in the output."""
        torch.manual_seed(0)
        model = getattr(transformers, self.model)(self.make_config()).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.dim() > 1 and "A_log" not in name:
                    parameter.normal_(std=parameter[0].numel() ** -0.5 if "embed" not in name else 0.5)
                elif name.endswith("bias"):
                    parameter.normal_(std=0.1)
        return model
