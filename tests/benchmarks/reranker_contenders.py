"""What scores the pairs: the bare cross-encoder, this package with mixed rows, PEFT with one adapter at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from sentence_transformers import CrossEncoder
from torch import Tensor, nn

from hf_multilora.integrations.sentence_transformers import MultiLoRACrossEncoder

Rows = Sequence[str | None]
BARE, OURS, PEFT = "bare", "hf_multilora", "peft, grouped"


@dataclass(frozen=True)
class Work:
    """Pairs of texts and the same as the model's inputs, [rows, tokens] each."""

    pairs: list[tuple[str, str]]
    inputs: dict[str, Tensor]


@dataclass(frozen=True)
class Contender:
    """Logits float32 [rows] for an adapter per row.

    predict: from texts, through sentence-transformers. forward: from token ids, the model alone.
    """

    predict: Callable[[Work, Rows], Tensor]
    forward: Callable[[Work, Rows], Tensor]


def encoder(folder: str, length: int) -> CrossEncoder:
    return CrossEncoder(folder, device="cpu", max_length=length, model_kwargs={"dtype": torch.float32}).eval()


def work(encoder: Any, pairs: list[tuple[str, str]]) -> Work:
    queries, documents = [q for q, _ in pairs], [d for _, d in pairs]
    return Work(pairs, dict(encoder.tokenizer(queries, documents, return_tensors="pt", padding=True)))


def _predict(encoder: Any, pairs: Sequence[tuple[str, str]], **adapters: Any) -> Tensor:
    """One batch, logits instead of probabilities."""
    scores: Tensor = encoder.predict(
        pairs, batch_size=len(pairs), activation_fn=nn.Identity(), convert_to_tensor=True, show_progress_bar=False,
        **adapters,
    )  # fmt: skip
    return scores


def bare(folder: str, length: int) -> Contender:
    made = encoder(folder, length)
    model: Any = made.model
    return Contender(
        lambda work, rows: _predict(made, work.pairs), lambda work, rows: model(**work.inputs).logits[:, 0]
    )


def ours(folder: str, length: int, adapters: Mapping[str, Path]) -> Contender:
    """All adapters in slots, one call for all rows."""
    paths = {name: str(path) for name, path in adapters.items()}
    made = MultiLoRACrossEncoder.from_pretrained(encoder(folder, length), paths, max_loras=len(paths))
    return Contender(
        lambda work, rows: _predict(made, work.pairs, adapter_names=list(rows)),
        lambda work, rows: made.model(**work.inputs, adapter_names=list(rows)).logits[:, 0],
    )


def peft(folder: str, length: int, adapters: Mapping[str, Path]) -> Contender:
    """All adapters loaded, one call for the rows of each: grouping, switching and putting back in order are timed.

    PEFT changes the cross-encoder's model in place, so its rows need no PeftModel around each call.
    """
    made = encoder(folder, length)
    model: Any = made.model
    (first, path), *others = adapters.items()
    switch = PeftModel.from_pretrained(model, str(path), adapter_name=first)
    for name, path in others:
        switch.load_adapter(str(path), adapter_name=name)
    switch.eval()

    def grouped(rows: Rows, score: Callable[[list[int]], Tensor]) -> Tensor:
        groups: dict[str | None, list[int]] = {}
        for i, name in enumerate(rows):
            groups.setdefault(name, []).append(i)
        out = torch.empty(len(rows))
        for name, at in groups.items():
            if name is None:
                raise ValueError("PEFT is asked for adapters only, got a row of the base")
            switch.set_adapter(name, inference_mode=True)
            out[at] = score(at)
        return out

    def predict(work: Work, rows: Rows) -> Tensor:
        return grouped(rows, lambda at: _predict(made, [work.pairs[i] for i in at]))

    def forward(work: Work, rows: Rows) -> Tensor:
        return grouped(rows, lambda at: model(**{k: v[at] for k, v in work.inputs.items()}).logits[:, 0])

    return Contender(predict, forward)
