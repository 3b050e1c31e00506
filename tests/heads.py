"""Tiny bases with heads of every kind, adapters that PEFT makes on them, and what PEFT answers with one alone."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers as tf
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from hf_multilora import MultiLoRAModel

VOCAB, PAD = 40, 0
SIZES = {"vocab_size": VOCAB, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
SIZES |= {"intermediate_size": 20, "initializer_range": 0.3, "pad_token_id": PAD}
TARGETS = ["q_proj", "v_proj", "query", "value", "c_attn", "pwconv1"]
Prepare = Callable[[Any], None]  # changes a copy of the base before the adapter is trained on it


def llama(cls: Any = tf.LlamaForSequenceClassification, **more: Any) -> Any:
    return cls(tf.LlamaConfig(**(SIZES | {"tie_word_embeddings": False} | more)))


def bert(cls: Any = tf.BertForSequenceClassification, **more: Any) -> Any:
    return cls(tf.BertConfig(**SIZES, max_position_embeddings=32, **more))


def roberta(**more: Any) -> Any:
    return tf.RobertaForSequenceClassification(tf.RobertaConfig(**SIZES, max_position_embeddings=32, **more))


def gemma(**more: Any) -> Any:
    return tf.Gemma2ForCausalLM(tf.Gemma2Config(**SIZES, head_dim=8, num_key_value_heads=1, **more))


def gpt2() -> Any:
    config = tf.GPT2Config(vocab_size=VOCAB, n_embd=16, n_layer=2, n_head=2, n_positions=32, initializer_range=0.3)
    config.pad_token_id = PAD
    return tf.GPT2ForSequenceClassification(config)


def convnext() -> Any:
    settings = {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2, "initializer_range": 0.3}
    model = tf.ConvNextForImageClassification(tf.ConvNextConfig(**settings, num_labels=3))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "layer_scale" in name:  # 1e-6 at first: what follows would not be seen
                parameter.fill_(1.0)
    return model


def labels(head: str, n: int) -> Prepare:
    """Another number of labels: the linear called `head` made anew."""

    def prepare(base: Any) -> None:
        parent, _, name = head.rpartition(".")
        old = base.get_submodule(head)
        setattr(
            base.get_submodule(parent), name, nn.Linear(old.in_features, n, bias=old.bias is not None).to(old.weight)
        )
        base.config.num_labels = n
        base.num_labels = n

    return prepare


def vocabulary(n: int) -> Prepare:
    return lambda base: base.resize_token_embeddings(n, mean_resizing=False)


@dataclass(frozen=True)
class Made:
    """How an adapter is made: on the base after `prepare`, by this PEFT config."""

    config: Mapping[str, Any]
    prepare: Prepare | None = None


class Heads:
    """A bare base and PEFT adapters on copies of it."""

    def __init__(self, base: Any, folder: Path, adapters: Mapping[str, Made]) -> None:
        self.base, self.folder = base.eval(), folder
        self.alone: dict[str | None, Any] = {None: copy.deepcopy(self.base)}
        for i, (name, made) in enumerate(adapters.items()):
            torch.manual_seed(i + 1)
            self.alone[name] = self._train(name, made)

    def _train(self, name: str, made: Made) -> Any:
        base = copy.deepcopy(self.base)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if made.prepare is not None:
                made.prepare(base)
            settings = {"r": 2, "lora_alpha": 4, "target_modules": TARGETS}
            settings = {k: v for k, v in (settings | dict(made.config)).items() if v is not None}
            model = get_peft_model(base, LoraConfig(**settings))
            with torch.no_grad():
                for key, parameter in model.named_parameters():
                    if "lora_" in key or "modules_to_save" in key or "trainable_tokens_delta" in key:
                        parameter.add_(torch.randn_like(parameter) * 0.3)
                for key, buffer in model.named_buffers():
                    if "modules_to_save" in key and "running" in key:  # others are not saved
                        buffer.add_(torch.rand_like(buffer) * 0.3)
            model.save_pretrained(self.folder / name)
        return model.eval()

    def model(self, *names: str, **settings: Any) -> Any:
        """A MultiLoRAModel on a copy of the base, with these adapters (none: all) in this order."""
        chosen = {name: str(self.folder / name) for name in names or [n for n in self.alone if n is not None]}
        return MultiLoRAModel.from_pretrained(copy.deepcopy(self.base), chosen, **settings)

    @torch.no_grad()
    def truth(self, rows: Sequence[Mapping[str, Tensor]], names: Sequence[str | None], key: str) -> list[Tensor]:
        """What each row gives alone, without padding: rows of inputs [1, ...]."""
        return [self.alone[name](**row)[key][0] for row, name in zip(rows, names, strict=True)]


def inputs_of(base: Any, rows: int, **settings: Any) -> dict[str, Tensor]:
    """Rows of the base's main input."""
    if base.main_input_name == "pixel_values":
        made = torch.Generator().manual_seed(settings.get("seed", 0))
        return {"pixel_values": torch.randn(rows, 3, 32, 32, generator=made)}
    return {"input_ids": ids(rows, **settings)}


def ids(rows: int, tokens: int = 5, seed: int = 0, low: int = 3) -> Tensor:
    return torch.randint(low, VOCAB, (rows, tokens), generator=torch.Generator().manual_seed(seed))
