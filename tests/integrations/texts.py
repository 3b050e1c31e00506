"""Tiny models with tokenizers, as folders and as sentence-transformers loads them; the truth is a merged copy, one text
at a time.
"""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers as tf
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import nn

from tests.tiny import merged, save_adapter

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "yes", "no", *(f"w{i}" for i in range(34))]
# longer texts come late, so that sorting by length changes the order
PAIRS = [("w1", "w2"), ("w3 w4", "w5 w6 w7"), ("w8", "w9 w10 w11 w12 w13 w14"), ("w15 w16", "w17"), ("w1 w2", "w3 w9")]
TEXTS = ["w1", "w3 w4 w5", "w8 w9 w10 w11 w12 w13", "w15 w16", "w1 w2 w3 w9"]
NAMES = ["a", None, "b", "a", "c"]


def tokenizer(pad: str = "[PAD]", **settings: Any) -> Any:
    """One token per word; pairs as [CLS] a [SEP] b [SEP]. pad: the word whose id pads."""
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = [("[CLS]", 2), ("[SEP]", 3)]
    made.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1", special)
    names = {"pad_token": pad, "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    return tf.PreTrainedTokenizerFast(tokenizer_object=made, model_max_length=24, **(names | settings))


ENCODER = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 20}
ENCODER |= {"vocab_size": len(WORDS), "initializer_range": 0.3, "max_position_embeddings": 30, "pad_token_id": 0}
DECODER = ENCODER | {"num_key_value_heads": 1, "head_dim": 8, "use_cache": False}


def bert(kind: Any = tf.BertForSequenceClassification, **settings: Any) -> Any:
    return _filled(kind(tf.BertConfig(**(ENCODER | settings))))


def roberta(kind: Any = tf.RobertaForSequenceClassification, **settings: Any) -> Any:
    return _filled(kind(tf.RobertaConfig(**(ENCODER | {"pad_token_id": 1} | settings))))


def qwen3(kind: Any = tf.Qwen3ForSequenceClassification, **settings: Any) -> Any:
    return _filled(kind(tf.Qwen3Config(**(DECODER | settings))))


def _filled(model: Any) -> Any:
    """Biases of other values than zero: rows would not tell whose they got."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.3)
    return model.eval()


@dataclass(frozen=True)
class Kind:
    """A model, what its adapters train, the name of its head, the word that pads."""

    build: Callable[..., Any]
    targets: Sequence[str]
    head: str | None
    pad: str = "[PAD]"


KINDS = {
    "bert": Kind(bert, ("query", "value", "dense"), "classifier"),
    "roberta": Kind(roberta, ("query", "value"), "classifier", "[UNK]"),
    "qwen3": Kind(qwen3, ("q_proj", "v_proj", "down_proj"), "score"),
    "yes-no": Kind(functools.partial(qwen3, tf.Qwen3ForCausalLM), ("q_proj", "o_proj", "up_proj"), None),
}


class Bed:
    """A base's folder, adapters for it, and plain copies with one adapter merged."""

    def __init__(self, folder: Path, kind: Kind, heads: Mapping[str, int] | None = None, **settings: Any) -> None:
        """heads: labels of the own heads of some adapters."""
        self.folder, self.kind = folder, kind
        self.base = kind.build(**settings)
        self.tokenizer = tokenizer(kind.pad)
        self.paths, self.heads = {}, dict(heads or {})
        for i, name in enumerate("abc"):
            path = save_adapter(self.base, folder / name, r=2 + i, seed=i, targets=kind.targets)
            if name in self.heads:
                add_head(self.base, path, kind.head or "", self.heads[name], seed=i)
            self.paths[name] = str(path)
        self.models: dict[str | None, Any] = {}

    def save(self, model: Any, name: str) -> str:
        model.save_pretrained(self.folder / name)
        self.tokenizer.save_pretrained(self.folder / name)
        return str(self.folder / name)

    def merged(self, name: str | None) -> Any:
        """A bare copy of the base with an adapter merged into it, with its own head."""
        if name is None:
            return copy.deepcopy(self.base)
        model = merged(self.base, Path(self.paths[name]))
        if name in self.heads:
            put_head(model, Path(self.paths[name]), self.kind.head or "")
        return model

    def plain(self, cls: type, name: str | None) -> Any:
        """`cls` of sentence-transformers on the merged copy."""
        if name not in self.models:
            self.models[name] = cls(self.save(self.merged(name), f"plain-{name}"), device="cpu")
        return self.models[name]

    def wrapped(self, cls: type, *names: str, **settings: Any) -> Any:
        """`cls` of this package on the base, with these adapters (none: all)."""
        chosen = {name: self.paths[name] for name in names or self.paths}
        return cls(self.save(self.base, "base"), adapters=chosen, device="cpu", **settings)


def add_head(base: Any, folder: Path, head: str, labels: int, seed: int) -> None:
    """The adapter in `folder` gets a head of its own: the base's, its last linear with so many outputs, all random."""
    made = torch.Generator().manual_seed(100 + seed)
    tensors = load_file(folder / "adapter_model.safetensors")
    for name, value in base.get_submodule(head).state_dict().items():
        last = value.shape[0] == base.config.num_labels
        shape = (labels, *value.shape[1:]) if last else value.shape
        tensors[f"base_model.model.{head}.{name}"] = torch.randn(*shape, generator=made)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = json.loads((folder / "adapter_config.json").read_text())
    config |= {"modules_to_save": [head], "task_type": "SEQ_CLS"}
    (folder / "adapter_config.json").write_text(json.dumps(config))


def put_head(model: Any, folder: Path, head: str) -> None:
    """The saved head of an adapter in place of the model's."""
    prefix = f"base_model.model.{head}."
    tensors = load_file(folder / "adapter_model.safetensors")
    saved = {key.removeprefix(prefix): v for key, v in tensors.items() if key.startswith(prefix) and "lora_" not in key}
    module = model.get_submodule(head)
    for name, value in saved.items():
        owner, _, own = name.rpartition(".")
        setattr(module.get_submodule(owner), own, nn.Parameter(value))
    labels = next(v.shape[0] for name, v in reversed(saved.items()) if name.endswith("weight"))
    model.config.num_labels = labels
    if hasattr(model, "num_labels"):
        model.num_labels = labels
