"""What an adapter's own head tells apart: how many logits its rows have, and their names."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from .census import output_heads
from .formats import SAVED, site_name
from .routing import RoutingError
from .runtime import Runtime


def id2label(runtime: Runtime, name: str | None) -> dict[int, str]:
    """See MultiLoRAModel.id2label."""
    config: Any = runtime.model.config
    own: dict[int, str] = {int(i): label for i, label in (getattr(config, "id2label", None) or {}).items()}
    (adapter_id,) = runtime.store.catalogue.ids_of([name])
    if not adapter_id:
        return own
    entry = runtime.store.catalogue.by_id(adapter_id)
    if entry.labels is not None:
        return dict(enumerate(entry.labels))
    heads = output_heads(runtime.model)
    brought = any(site_name(path, SAVED) in entry.ranks for path in heads)
    width = _width(runtime, adapter_id, heads) if brought else None
    return own if width is None or width == len(own) else {i: f"LABEL_{i}" for i in range(width)}


def _width(runtime: Runtime, adapter_id: int, base: Mapping[str, int]) -> int | None:
    """How many logits the rows of an adapter (0: the base) have; None where the model has no head."""
    ranks = runtime.store.catalogue.by_id(adapter_id).ranks if adapter_id else {}
    widths = [ranks.get(site_name(path, SAVED), n) for path, n in base.items()]
    return widths[-1] if widths else None


def split_logits(runtime: Runtime, logits: Tensor, names: Sequence[str | None]) -> list[Tensor]:
    """See MultiLoRAModel.split_logits."""
    ids = runtime.resolve(names, None)
    if ids is None or len(ids) != logits.shape[0]:
        raise RoutingError(f"logits must have one row per adapter name, got {tuple(logits.shape)} for {names!r}")
    base = output_heads(runtime.model)
    widths = {i: _width(runtime, i, base) for i in set(ids)}
    return [row[..., : widths[i]] for row, i in zip(logits, ids, strict=True)]


def require_base_labels(runtime: Runtime, ids: Iterable[int], arguments: Mapping[str, Any]) -> None:
    """Raises ValueError where a call wants a loss and a row's head has another number of outputs than the base's:
    Transformers would compare labels with logits of another width."""
    if not any("label" in name and value is not None for name, value in arguments.items()):
        return
    base = output_heads(runtime.model)
    for i in set(ids) - {0}:
        entry = runtime.store.catalogue.by_id(i)
        for path, width in base.items():
            own = entry.ranks.get(site_name(path, SAVED), width)
            if own != width:
                raise ValueError(
                    f"a call with labels must have heads as wide as the base's, {width}, got {own} for adapter "
                    f"{entry.name!r}; leave the labels out and compute the loss with "
                    f"hf_multilora.integrations.trainers.row_loss"
                )


def require_widths(runtime: Runtime, ids: Iterable[int], guidance: float | None, beams: int | None) -> None:
    """Raises ValueError where `generate` cannot have rows with vocabularies of these sizes.

    guidance_scale subtracts logits, and of the fill behind the shorter ones that is NaN, which would be the next token.
    Beam search of older Transformers takes the config's vocabulary for the logits' width.
    """
    model: Any = runtime.model
    kind: type = type(model)
    guided, searched = guidance not in (None, 1), (beams or 1) > 1 and _counts_by_config(kind)
    if not (guided or searched):
        return
    base = output_heads(runtime.model)
    widths = sorted({width for width in (_width(runtime, i, base) for i in set(ids)) if width is not None})
    if guided and len(widths) > 1:
        raise ValueError(
            f"a generate with guidance_scale must have vocabularies of one size for all its rows, got {widths}; call "
            f"it once for each size"
        )
    if searched and widths and widths[-1] != model.config.get_text_config().vocab_size:
        raise ValueError(
            f"beam search of this version of Transformers must have logits as wide as the base's vocabulary, "
            f"{model.config.get_text_config().vocab_size}, got {widths}; leave out num_beams, or update transformers"
        )


@functools.cache
def _counts_by_config(cls: type) -> bool:
    """Whether beam search takes the number of logits from the config, by its source."""
    return "get_text_config().vocab_size" in inspect.getsource(cls._beam_search)  # type: ignore[attr-defined]
