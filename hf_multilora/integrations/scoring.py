"""What rerankers share: which adapter each row gets, logits of different widths made scores, documents in order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..routing import RoutingError

Activation = Callable[[Tensor], Tensor]
# **kwargs of a call would swallow these, and the rows get the base
TYPOS = ("adapter", "adapters", "adapter_id", "adapter_ids")


def adapters_of(
    model: Any, rows: int, adapter_names: Any, adapter_name: str | None, caller: str, unit: str
) -> list[str | None] | None:
    """One adapter per row, None where the call names none, all checked before any work.

    Raises UnknownAdapterError, TypeError for names that are no list, ValueError for both arguments at once,
    RoutingError for another number of names than rows, for rows without a head, and inside an `adapters()` block.
    """
    if adapter_names is not None and adapter_name is not None:
        raise ValueError(
            f"{caller} must name its adapters once: adapter_names (one per {unit}) or adapter_name (for all), not both"
        )
    names = adapter_names
    if adapter_name is not None:
        if not isinstance(adapter_name, str):
            raise TypeError(
                f"adapter_name must be one name for all {unit}s, got {adapter_name!r}; a list with one per {unit} is "
                f"adapter_names"
            )
        names = [adapter_name]
    runtime = model._multilora
    with runtime.lock:
        if runtime.routing.open:
            raise RoutingError(
                f"{caller} sorts and batches its {unit}s, so it must not run inside an adapters() block, whose rows "
                f"are those of one call of the model: pass adapter_names to {caller}"
            )
        runtime.require_heads(runtime.resolve([runtime.default] if names is None else names, None))
    if names is None:
        return None
    if adapter_name is not None:
        return [adapter_name] * rows
    if len(names) != rows:
        raise RoutingError(f"{caller} must have one adapter per {unit}, got {len(names)} for {rows} {unit}s")
    return list(names)


def refuse_typos(kwargs: Mapping[str, Any], caller: str, unit: str) -> None:
    for typo in TYPOS:
        if typo in kwargs:
            raise TypeError(f"{caller} must be told adapter_names (one per {unit}) or adapter_name, got {typo!r}")


def widths_of(model: Any, names: Sequence[str | None]) -> list[int]:
    """How many labels each row has: those of its adapter's own head, or of the base's."""
    widths = {name: len(model.id2label(name)) for name in set(names)}
    return [widths[name] for name in names]


def finish(rows: Sequence[Tensor], activation: Callable[[int], Activation], softmax: bool) -> list[Tensor]:
    """Scores of each row from its logits [own width]: activated and softmaxed among rows of one width; one label
    becomes a number. Logits below 32 bits are cast up first, so that ties break.
    """
    scores = list(rows)
    for width in dict.fromkeys(row.shape[-1] for row in rows):
        at = [i for i, row in enumerate(rows) if row.shape[-1] == width]
        logits = torch.stack([rows[i] for i in at])
        if torch.finfo(logits.dtype).bits < 32:
            logits = logits.float()
        done = activation(width)(logits)
        if width == 1 and done.ndim > 1:
            done = done.squeeze(-1)
        if softmax and done.ndim > 1:
            done = torch.nn.functional.softmax(done, dim=1)
        for i, score in zip(at, done, strict=True):
            scores[i] = score
    return scores


def convert(scores: Sequence[Tensor], to_numpy: bool, to_tensor: bool, device: Any) -> Any:
    """As CrossEncoder.predict returns them; rows of different widths as a list, to_tensor or not."""
    if len({tuple(score.shape) for score in scores}) > 1:
        return [score.float().cpu().numpy() for score in scores] if to_numpy and not to_tensor else list(scores)
    if to_tensor:
        return torch.stack(list(scores)) if scores else torch.tensor([], device=device)
    if to_numpy:
        return torch.stack(list(scores)).float().cpu().numpy() if scores else np.array([])
    return list(scores)


def plain_activation(width: int) -> Activation:
    """What sentence-transformers applies by default: Sigmoid to one label, else nothing."""
    return nn.Sigmoid() if width == 1 else nn.Identity()


def ranked(
    scores: Sequence[float], documents: Sequence[Any], top_k: int | None, return_documents: bool
) -> list[dict[str, Any]]:
    """Rows of CrossEncoder.rank: corpus_id, score and, if asked, text, best first."""
    rows = [
        {"corpus_id": i, "score": score} | ({"text": documents[i]} if return_documents else {})
        for i, score in enumerate(scores)
    ]
    return sorted(rows, key=lambda row: row["score"], reverse=True)[:top_k]


def require_one_score(adapter_name: str | None, width: int) -> None:
    """Raises ValueError where a row has more labels than one to rank by."""
    if width != 1:
        whose = "the base" if adapter_name is None else f"adapter {adapter_name!r}"
        raise ValueError(f"rank must have one score per document, {whose} has {width} labels; use predict with pairs")
