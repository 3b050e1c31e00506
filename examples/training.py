"""What the training scripts share: batches in a fixed random order, the loop, and how an adapter is written."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch
from peft import PeftModel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

HERE = Path(__file__).parent
SEED, LEARNING_RATE = 0, 2e-3
Row = TypeVar("Row")


def read_rows(name: str) -> list[dict[str, str]]:
    """The rows of examples/data/NAME.jsonl."""
    return [json.loads(line) for line in (HERE / "data" / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]


def batches(rows: list[Row], size: int) -> Iterator[list[Row]]:
    """Rows in random order, `size` at a time, without end; each row comes once before any comes again."""
    order, queue = random.Random(SEED), []
    while True:
        if len(queue) < size:
            queue += order.sample(rows, len(rows))
        batch, queue = queue[:size], queue[size:]
        yield batch


def bars() -> Progress:
    """A bar per adapter, with its loss."""
    columns = (TextColumn("{task.description:8}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, TextColumn("loss {task.fields[loss]:.3f}"))


def fit(name: str, model: PeftModel, losses: Iterator[torch.Tensor], steps: int, progress: Progress) -> None:
    """Train what requires gradients for `steps` losses, each computed when it is asked for."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, weight_decay=0.0)
    warmup = max(0.1, 2 / steps)  # OneCycleLR divides by zero where the warm-up is a single step
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=steps, pct_start=warmup)
    bar = progress.add_task(name, total=steps, loss=float("nan"))
    for _ in range(steps):
        loss = next(losses)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        progress.update(bar, advance=1, loss=loss.item())


def save(model: PeftModel, base_name: str, folder: Path, **more: Any) -> None:
    """Writes the weights in float16, which halves the files at no visible loss, and adapter_config.json with `more`."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.half()
    model.peft_config["default"].base_model_name_or_path = base_name
    model.save_pretrained(folder, save_embedding_layers=False)  # "auto" would ask the Hub about the base's vocabulary
    (folder / "README.md").unlink(missing_ok=True)  # PEFT's template of a model card, all blanks
    if more:
        file = folder / "adapter_config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **more}, indent=2, sort_keys=True))
