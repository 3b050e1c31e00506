"""The names of what an adapter's own head tells apart: `id2label`, in its config or in a config.json beside it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hf_multilora.formats.base import LORA, SAVED, AdapterError, LoraFactors, split_site
from hf_multilora.formats.reading import Reading


def own_heads(reading: Reading, factors: Mapping[str, LoraFactors]) -> dict[str, int]:
    """The heads with one output per label that the adapter trains, and their outputs."""
    vocabulary = reading.vocabulary()[1]
    heads = {}
    for site, pair in factors.items():
        module, role = split_site(site)
        shape = reading.modules[module]
        if shape.kind == "linear" and shape.resizable and module not in vocabulary and role in (SAVED, LORA):
            heads[module] = pair.r if role == SAVED else shape.out_features
    return heads


def parse_labels(source: str, where: str, given: Any, heads: Mapping[str, int]) -> tuple[str, ...] | None:
    """The labels in an `id2label`, in the order of their ids, for `heads` (module -> outputs).

    None without one, and where the names are only Transformers' LABEL_0, LABEL_1, ... AdapterError where they are not
    one name for each output.
    """
    if given is None or not heads:
        return None
    if not isinstance(given, Mapping):
        raise AdapterError(f"{source}: id2label in {where} must map ids to names, got {given!r}")
    named = {str(key): str(name) for key, name in given.items()}
    if all(name == f"LABEL_{key}" for key, name in named.items()):
        return None
    ids = [str(n) for n in range(len(named))]
    if set(named) != set(ids):
        raise AdapterError(f"{source}: id2label in {where} must have the ids 0 to {len(ids) - 1}, got {sorted(named)}")
    labels = tuple(named[n] for n in ids)
    twice = sorted({name for name in labels if labels.count(name) > 1})
    if twice:
        raise AdapterError(f"{source}: id2label in {where} must name each label once, got {twice} more than once")
    for module, outputs in heads.items():
        if outputs != len(labels):
            raise AdapterError(
                f"{source}: labels clash: id2label in {where} names {len(labels)}, but module {module} of the adapter "
                f"has {outputs} outputs; put the labels it was trained with into id2label of its adapter_config.json"
            )
    return labels
