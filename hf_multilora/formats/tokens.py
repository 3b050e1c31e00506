"""Trained rows of an embedding: PEFT's `trainable_token_indices`."""

from __future__ import annotations

from collections.abc import Collection, Mapping, MutableMapping, Sequence
from dataclasses import dataclass

import torch

from hf_multilora.formats.base import LoraFactors
from hf_multilora.formats.checks import Place, check_dense, check_finite, shape_of
from hf_multilora.formats.keys import ParsedKey, listed
from hf_multilora.formats.reading import Reading


@dataclass(frozen=True)
class Rows:
    """The trained rows of one name in the file: `ids[i]` gets row i of the key's tensor."""

    key: ParsedKey
    ids: tuple[int, ...]


def token_modules(
    reading: Reading,
    keys: Sequence[ParsedKey],
    full: Collection[str],
    overwritten: MutableMapping[str, LoraFactors],
    lora: Collection[str],
) -> dict[str, LoraFactors]:
    """The modules of the base with trained token rows.

    full, lora: modules that the adapter saves in full, or has a LoRA pair for. overwritten: modules whose weight the
    file replaces: there the rows go into that weight, and are no sites of their own.
    """
    sites: dict[str, LoraFactors] = {}
    for module, rows in _placed(reading, keys).items():
        place = reading.place(rows.key, module)
        if module in full or module in lora:
            other = "saves it in full" if module in full else "trains it with LoRA"
            raise place.error(
                f"the adapter has trained token rows (trainable_token_indices) for it and {other} as well, and only "
                f"one of both can be served; retrain with one of them"
            )
        _check(reading, place, module, rows, overwritten)
        ids = torch.tensor(rows.ids)
        order = ids.argsort()
        tensor = reading.tensors[rows.key.key].detach().to("cpu")
        if module in overwritten:
            old = overwritten[module]
            dtype = torch.promote_types(old.a.dtype, tensor.dtype)
            weight = old.a.to(dtype, copy=True)
            weight[ids] = tensor.to(dtype)
            overwritten[module] = LoraFactors(weight, old.b.to(dtype), 1.0)
        else:
            sites[module] = LoraFactors(tensor[order], ids[order][None], 1.0)
    return sites


def _placed(reading: Reading, keys: Sequence[ParsedKey]) -> dict[str, Rows]:
    """Module of the base -> its rows, as PEFT ties them."""
    settings, resolver = reading.settings, reading.resolver
    named: dict[str, ParsedKey] = {}
    for p in keys:
        if named.setdefault(p.module, p) is not p:
            raise reading.error(f"two keys land on {p.module}: {named[p.module].key!r} and {p.key!r}; keep one")
    absent = [name for name in named if not resolver.resolve(name)]
    if absent:
        raise reading.error(f"the adapter trained token rows of {listed(absent)}, which the base does not have")
    placed: dict[str, Rows] = {}
    for name, p in named.items():
        ids = settings.tokens_of((name, *resolver.resolve(name)))
        for module in resolver.resolve(name):
            if ids is not None:
                placed[module] = Rows(p, ids)
    for name, p in named.items():  # on a tied module, PEFT may write the same rows once more
        for module in resolver.resolve(name):
            if module in placed:
                continue
            twin = next((placed[m] for m in reading.modules[module].tied if m in placed), None)
            if twin is None or not torch.equal(reading.tensors[twin.key.key], reading.tensors[p.key]):
                raise reading.place(p, module).error(
                    "the file holds trained token rows for it, but trainable_token_indices does not say of which "
                    "tokens; use the adapter_config.json it was saved with"
                )
            placed[module] = twin
    for name in named:
        placed.update(_spread(reading, name, placed))
    for end in settings.token_indices:
        if not any(name.endswith(end) for name in (*named, *placed)):
            raise reading.error(
                f"trainable_token_indices names {end or 'tokens'}, but the file holds no rows for it; save the adapter "
                f"again"
            )
    return placed


def _spread(reading: Reading, name: str, placed: Mapping[str, Rows]) -> dict[str, Rows]:
    """The rows of the input embedding for the modules tied to it, unless one of them has rows for other tokens."""
    modules = reading.resolver.resolve(name)
    alias = reading.resolver.is_alias(name)
    shapes = [reading.modules[module] for module in modules]
    if shapes[0].kind != "embedding" or not (shapes[0].resizable or (alias and reading.resizable(modules[0]))):
        return {}
    tied = [m for shape in shapes for m in shape.tied if not reading.resolver.is_alias(m) and m not in modules]
    rows = placed[modules[0]]
    if any(placed[m].ids != rows.ids for m in tied if m in placed):
        if alias:
            raise reading.place(rows.key, name).error(
                "it is never called in this model, and a module tied to it has rows for other tokens, so PEFT computes "
                "without its rows; retrain with trainable_token_indices as a list"
            )
        return {}
    return {m: rows for m in tied if m not in placed}


def _check(reading: Reading, place: Place, module: str, rows: Rows, overwritten: Mapping[str, LoraFactors]) -> None:
    shape, tensor = reading.modules[module], reading.tensors[rows.key.key]
    if shape.kind not in ("linear", "embedding"):
        raise place.error("trained token rows must be for an embedding or the head tied to it, and this is neither")
    if shape.refused is not None:
        raise place.error(f"no adapter may have token rows of it here: {shape.refused}; retrain without it")
    if shape.kind == "linear" and (shape.bias is not None or "bias" in shape.own):
        raise place.error(
            "PEFT leaves out the bias of a head with trained token rows (trainable_token_indices), which is not "
            "supported; retrain without them"
        )
    width = shape.out_features if shape.kind == "embedding" else shape.in_features
    check_dense(place, "trainable_tokens_delta", f"[n, {width}]", tensor)
    if tuple(tensor.shape) != (len(rows.ids), width):
        raise place.error(
            f"trainable_tokens_delta must have shape {[len(rows.ids), width]} on this base (trainable_token_indices "
            f"names {len(rows.ids)} tokens), got shape {shape_of(tensor)}"
        )
    known = shape.in_features if shape.kind == "embedding" else shape.out_features
    if module in overwritten:
        known = overwritten[module].r
    if max(rows.ids) >= known:
        raise place.error(
            f"trainable_token_indices must be token ids below {known}, got {max(rows.ids)}: the adapter was trained "
            f"with a resized vocabulary; load a base of that size (resize_token_embeddings)"
        )
    check_finite(place, tensor)
