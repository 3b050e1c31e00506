"""Tiny models, adapters and tokenizers for pipelines, and what a pipeline on a merged copy answers to one input."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import transformers as tf
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers import models as token_models

from tests import tiny

TEMPLATE = "{% for m in messages %}{{ m['content'] }} {% endfor %}{% if add_generation_prompt %}w9{% endif %}"
SPECIAL = {"<pad>": 0, "<unk>": 1, "<s>": 2, "</s>": 3, "<mask>": 4}
NAMES = ["a", None, "b", "c", "b"]
TEXTS = ["w5 w6 w7", "w8", "w9 w10 w11 w12 w13", "w14 w15", "w16 w17 w18"]
PAIRS = [{"text": text, "text_pair": pair} for text, pair in zip(TEXTS, TEXTS[::-1], strict=True)]
CHATS = [[{"role": "user", "content": text}] for text in TEXTS]
BERT, LLAMA = ("query", "value", "dense"), ("q_proj", "v_proj", "down_proj")
GREEDY = {"do_sample": False, "max_new_tokens": 5, "skip_special_tokens": False}
ZERO_SHOT = {"candidate_labels": ["w20", "w21 w22", "w23"], "hypothesis_template": "w24 {}"}


def tokenizer(**settings: Any) -> Any:
    """Words "w5" ... "w39" -> their numbers."""
    words = Tokenizer(token_models.WordLevel(SPECIAL | {f"w{i}": i for i in range(5, tiny.VOCAB)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = {"unk_token": "<unk>", "bos_token": "<s>", "pad_token": "<pad>", "mask_token": "<mask>"}
    return tf.PreTrainedTokenizerFast(
        tokenizer_object=words, chat_template=TEMPLATE, **({"model_max_length": 24} | names | settings)
    )


def nli() -> Any:
    model = tiny.bert()
    model.config.id2label = {0: "contradiction", 1: "neutral", 2: "entailment"}
    model.config.label2id = {label: i for i, label in model.config.id2label.items()}
    return model


def tagger() -> Any:
    return tiny.bert(tf.BertForTokenClassification)


def llama() -> Any:
    return tiny.llama(eos_token_id=None)  # all rows of a batch end together


@dataclass(frozen=True)
class Case:
    """One task: its model, what its adapters train, inputs, and parameters of its calls."""

    task: str
    build: Any
    targets: Sequence[str]
    inputs: Sequence[Any] = tuple(TEXTS)
    params: Mapping[str, Any] = field(default_factory=dict)
    tokens: Mapping[str, Any] = field(default_factory=dict)


CASES = {
    "text": Case("text-classification", tiny.bert, BERT),
    "text, all scores": Case("text-classification", tiny.bert, BERT, params={"top_k": None}),
    "pairs": Case("text-classification", tiny.bert, BERT, PAIRS),
    "tokens": Case("token-classification", tagger, BERT, params={"ignore_labels": []}),
    "entities in chunks": Case(
        "ner", tagger, BERT,
        params={"ignore_labels": [], "aggregation_strategy": "simple", "stride": 1}, tokens={"model_max_length": 3},
    ),
    "features": Case("feature-extraction", lambda: tiny.bert(tf.BertModel), BERT),
    "masks": Case("fill-mask", lambda: tiny.bert(tf.BertForMaskedLM), BERT, [f"{t} <mask>" for t in TEXTS]),
    "zero-shot": Case("zero-shot-classification", nli, BERT, params=ZERO_SHOT),
    "generation": Case("text-generation", llama, LLAMA, params=GREEDY),
    "beams": Case("text-generation", llama, LLAMA, params={**GREEDY, "num_beams": 3, "num_return_sequences": 2}),
    "chats": Case("text-generation", llama, LLAMA, CHATS, params=GREEDY),
}  # fmt: skip


class Served:
    """A case's adapters a, b and c, and what each input gets from a merged copy alone."""

    def __init__(self, case: Case, folder: Path) -> None:
        self.case, self.folder = case, folder
        self.family = tiny.Family(case.build(), folder, {name: {"targets": case.targets} for name in "abc"})
        self._alone: dict[str | None, Any] = {}

    def tokenizer(self) -> Any:
        return tokenizer(**self.case.tokens)

    def plain(self, name: str | None) -> Any:
        """Transformers' own pipeline on the base, or on a copy with the adapter merged."""
        if name not in self._alone:
            model = self.family.base if name is None else tiny.merged(self.family.base, self.family.paths[name])
            self._alone[name] = tf.pipeline(self.case.task, model=model, tokenizer=self.tokenizer(), device="cpu")
        return self._alone[name]

    def alone(self, name: str | None, item: Any, **params: Any) -> Any:
        """What that pipeline answers to one input among others."""
        return next(iter(self.plain(name)((x for x in [item]), **({**self.case.params} | params))))

    def check(
        self, got: Sequence[Any], names: Sequence[str | None] = NAMES, tolerance: float = 1e-4, **params: Any
    ) -> None:
        """Row i is the answer of adapter i alone, and not that of the next row's."""
        inputs = self.case.inputs[: len(names)]
        assert len(got) == len(names)
        for answer, item, name, other in zip(got, inputs, names, [*names[1:], names[0]], strict=True):
            wanted = self.alone(name, item, **params)
            if self.case.task == "feature-extraction":  # [1, tokens, width], padded in a batch
                answer = [answer[0][: len(wanted[0])]]
            assert close(answer, wanted, tolerance), f"{name} must answer {wanted} to {item}, got {answer}"
            control = self.alone(other, item, **params)
            assert name == other or not close(answer, control, tolerance), "the control passes"


def close(got: Any, want: Any, tolerance: float = 1e-4) -> bool:
    """Equal, but for numbers within a tolerance."""
    if isinstance(want, Mapping):
        return got.keys() == want.keys() and all(close(got[k], want[k], tolerance) for k in want)
    if isinstance(want, (list, tuple)):
        return len(got) == len(want) and all(close(g, w, tolerance) for g, w in zip(got, want, strict=True))
    return got == want if isinstance(want, (str, int)) or want is None else abs(float(got) - float(want)) < tolerance
