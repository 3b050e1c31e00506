"""For Transformers' Trainer: the loss of rows whose adapters have heads of different widths."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..pool import FILL

IGNORED = -100  # a label that is not counted


def row_loss(outputs: Any, labels: Tensor | None, num_items_in_batch: Tensor | int | None = None) -> Tensor:
    """`Trainer(..., compute_loss_func=row_loss)`: each row's loss over the labels of its own head.

    Transformers' own loss takes all rows to have the base's number of labels. Logits [rows, ..., width of the widest]
    end in FILL where a row is narrower, which cross-entropy does not count. As the model gets no labels, batches with
    more adapters than slots may run in passes.

    Args:
        outputs: of the model, with "logits".
        labels: int64 [rows, ...] (-100 is not counted), or floats [rows] for heads with one output (squared error).
        num_items_in_batch: what the sum is divided by; None: the labels that count.

    Raises ValueError for a label that a row's head does not have, and for floats where a row has several outputs.
    """
    logits = (outputs["logits"] if isinstance(outputs, Mapping) else outputs[0]).float()
    if labels is None or labels.shape != logits.shape[:-1]:
        got = None if labels is None else tuple(labels.shape)
        raise ValueError(f"labels must be {tuple(logits.shape[:-1])} for logits {tuple(logits.shape)}, got {got}")
    labels = labels.to(logits.device)
    if labels.is_floating_point():
        if (logits[..., 1:] != FILL).any():
            raise ValueError("floats must be labels of rows with one output each, some of this batch have several")
        losses, counted = (logits[..., 0] - labels).square(), torch.ones_like(labels, dtype=torch.bool)
    else:
        counted = labels != IGNORED
        wrong = counted & ((labels < 0) | (labels >= logits.shape[-1]))
        wrong |= logits.gather(-1, labels.where(counted & ~wrong, 0)[..., None])[..., 0] == FILL
        if wrong.any():
            row = int(wrong.nonzero()[0, 0])
            own = int((logits[row].reshape(-1, logits.shape[-1])[0] != FILL).sum())
            raise ValueError(
                f"labels must be those of their row's own head, row {row} has {own} of them and is labelled "
                f"{labels[row].tolist()}"
            )
        losses = torch.nn.functional.cross_entropy(
            logits.flatten(0, -2), labels.flatten(), ignore_index=IGNORED, reduction="none"
        )
    return losses.sum() / (counted.sum() if num_items_in_batch is None else num_items_in_batch)
