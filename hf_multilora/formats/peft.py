"""Reads PEFT LoRA checkpoints key by key: what the file holds decides, not the config's target_modules."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from hf_multilora.formats.base import SAVED, TOKENS, Adapter, AdapterError, LoraFactors, ModuleShape, site_name
from hf_multilora.formats.checks import Place, check_factor, check_finite, check_module, check_rank
from hf_multilora.formats.config import LoraSettings, parse_settings
from hf_multilora.formats.copies import check_vocabulary, overwritten_modules
from hf_multilora.formats.experts import Limits, read_experts
from hf_multilora.formats.experts_keys import locate_experts
from hf_multilora.formats.experts_refusals import refuse_saved_experts, weight_is_target
from hf_multilora.formats.files import file_digest, locate, memory_digest, open_tensors, parse_config, with_labels
from hf_multilora.formats.keys import NameResolver, ParsedKey, covers, listed, parse_key, shown
from hf_multilora.formats.labels import own_heads, parse_labels
from hf_multilora.formats.reading import Reading
from hf_multilora.formats.saved import saved_modules
from hf_multilora.formats.tokens import token_modules


def read_adapter(
    path: str | os.PathLike[str],
    modules: Mapping[str, ModuleShape],
    *,
    revision: str | None = None,
    subfolder: str = "",
    max_rank: int | None = None,
    target_modules: str | Sequence[str] | None = None,
    aliases: Mapping[str, Sequence[str]] | None = None,
    renames: Sequence[tuple[str, str]] = (),
    base_prefix: str = "",
    hub_kwargs: Mapping[str, Any] | None = None,
    by_shape: bool = False,
) -> Adapter:
    """Read the adapter in a local folder or Hub repository for a base that has `modules` (all of them, by path).

    `max_rank` bounds the rank of LoRA sites (of experts: that of one), and `target_modules` (suffixes, or a regex for
    the whole path) says which modules these may be for: neither holds for modules saved in full and for token rows.
    Experts it may call by their module, a parameter of it, a projection, or as the file does. `aliases` maps a name in
    the file to the modules that stand for it; `renames` are (regex, replacement) pairs for names that are not found;
    `base_prefix` is the model's `base_model_prefix`; `hub_kwargs` goes to `snapshot_download`; `by_shape`: the base has
    no values yet, so what is a copy of one of its parameters is told by the shape, and modules_to_save count as saved.

    The tensors of the sites (see formats/base.py) come back on the CPU in the file's dtype. FileNotFoundError for what
    is absent, AdapterError for everything that cannot be served exactly; in particular each tensor is used or the load
    fails.
    """
    files = locate(path, revision=revision, subfolder=subfolder, hub_kwargs=hub_kwargs)
    before = _stamp(files.weights)
    data = files.config.read_bytes()
    config = parse_config(files.source, data)
    settings = parse_settings(files.source, config)  # before the weights: what is refused by name is cheap to refuse
    digest = file_digest(data, files.weights)
    resolver = NameResolver(modules, aliases=aliases, renames=renames, base_prefix=base_prefix)
    with open_tensors(files.source, files.weights) as tensors:
        reader = _Reader(files.source, settings, tensors, modules, resolver, max_rank, target_modules, by_shape)
        factors = reader.read()
    labels = reader.labels(config.get("id2label"), "adapter_config.json", factors)
    if labels is None and files.labels is not None and reader.heads(factors):
        beside = parse_config(files.source, files.labels.read_bytes(), files.labels.name)
        labels = reader.labels(beside.get("id2label"), files.labels.name, factors)
        digest = with_labels(digest, labels)
    if _stamp(files.weights) != before:
        raise AdapterError(f"{files.source}: {files.weights.name} changed while it was being read; load it again")
    return Adapter(files.source, digest, settings.base_model, factors, config, labels)


def adapter_from_tensors(
    source: str,
    config: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
    modules: Mapping[str, ModuleShape],
    *,
    max_rank: int | None = None,
    target_modules: str | Sequence[str] | None = None,
    aliases: Mapping[str, Sequence[str]] | None = None,
    renames: Sequence[tuple[str, str]] = (),
    base_prefix: str = "",
) -> Adapter:
    """As `read_adapter`, for a config and a state dict in memory, which are copied."""
    settings = parse_settings(source, config)
    resolver = NameResolver(modules, aliases=aliases, renames=renames, base_prefix=base_prefix)
    reader = _Reader(source, settings, tensors, modules, resolver, max_rank, target_modules)
    factors = reader.read()
    labels = reader.labels(config.get("id2label"), "its config", factors)
    return Adapter(source, memory_digest(config, tensors), settings.base_model, factors, dict(config), labels)


def _stamp(path: os.PathLike[str]) -> tuple[int, int, int]:
    stat = os.stat(path)
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


class _Reader:
    """One reading of one adapter: sorts its keys, places them in the base, checks them, takes the factors."""

    def __init__(
        self,
        source: str,
        settings: LoraSettings,
        tensors: Mapping[str, torch.Tensor],
        modules: Mapping[str, ModuleShape],
        resolver: NameResolver,
        max_rank: int | None,
        target_modules: str | Sequence[str] | None,
        by_shape: bool = False,
    ) -> None:
        self._source, self._settings, self._tensors = source, settings, tensors
        self._modules, self._resolver, self._max_rank = modules, resolver, max_rank
        if isinstance(target_modules, str):
            try:
                re.compile(target_modules)
            except re.error as error:
                raise AdapterError(
                    f"target_modules must be a regular expression, got {target_modules!r}: {error}"
                ) from error
        self._target_modules = target_modules
        self._reading = Reading(source, settings, tensors, modules, resolver, by_shape)

    def read(self) -> dict[str, LoraFactors]:
        if not self._tensors:
            raise AdapterError(
                f"{self._source}: the weights file is empty: it has no lora_A / lora_B tensors (a ZeRO-3 or FSDP run "
                f"saved without gathering its shards?); save the adapter again"
            )
        parsed = [parse_key(key) for key in self._tensors]
        self._reading.refuse([p for p in parsed if p.role == "other"])
        self._require_one_adapter(parsed)
        halves = [p for p in parsed if p.role in ("a", "b")]
        spots = locate_experts(self._reading, halves)
        limits = Limits(self._max_rank, self._target_modules)
        experts = read_experts(self._reading, [p for p in halves if p.module in spots], spots, limits)
        others = [p for p in halves if p.module not in spots]
        self._require_known(dict.fromkeys(p.module for p in others))
        pairs = self._pairs(others)
        placed = self._place(pairs)
        factors = self._beside(parsed, {module for targets in placed.values() for module in targets}) | experts
        if not placed and not factors:
            raise AdapterError(
                f"{self._source}: the adapter touches no module: it has no lora_A / lora_B tensors, only copies of the "
                f"base's own: {listed(self._tensors)}"
            )
        for name, targets in placed.items():
            factors.update(self._factors(name, targets, *pairs[name]))
        return factors

    def _require_one_adapter(self, parsed: Sequence[ParsedKey]) -> None:
        factors = {p.adapter for p in parsed if p.role in ("a", "b")}
        trained = factors | {p.adapter for p in parsed if p.adapter is not None}
        if len(trained) > 1:
            raise AdapterError(
                f"{self._source}: the file must hold one adapter, but its keys name "
                f"{listed(sorted(map(str, trained)))}; save each adapter on its own"
            )

    def _beside(self, parsed: Sequence[ParsedKey], lora: set[str]) -> dict[str, LoraFactors]:
        """The sites other than those of LoRA; `lora`: the modules of these."""
        full: dict[str, dict[str, ParsedKey]] = {}
        copies: dict[str, dict[str, ParsedKey]] = {}
        marked = {p.module for p in parsed if p.role == SAVED}
        for p in parsed:
            if p.role not in (SAVED, "copy"):
                continue
            in_full = p.module in marked or self._settings.saves_in_full(p.module)
            in_full = in_full and not p.original
            first = (full if in_full else copies).setdefault(p.module, {}).setdefault(p.parameter, p)
            # PEFT may write one tensor under both of its names
            if first is not p and not torch.equal(self._tensors[first.key], self._tensors[p.key]):
                raise AdapterError(
                    f"{self._source}: two keys land on {p.parameter} of module {p.module}: {first.key!r} and "
                    f"{p.key!r}; keep one"
                )
        reading = self._reading
        refuse_saved_experts(reading, [next(iter(group.values())) for group in full.values()])
        found = saved_modules(reading, full, lora)
        saved = {module: factors for module, factors in found.items() if factors is not None}
        overwritten = overwritten_modules(reading, copies, found, lora)
        check_vocabulary(reading, saved | overwritten)
        rows = token_modules(reading, [p for p in parsed if p.role == TOKENS], saved, overwritten, lora)
        sites = {site_name(module, SAVED): factors for module, factors in (saved | overwritten).items()}
        return sites | {site_name(module, TOKENS): factors for module, factors in rows.items()}

    def heads(self, factors: Mapping[str, LoraFactors]) -> dict[str, int]:
        """The adapter's own heads and how many labels each tells apart."""
        return own_heads(self._reading, factors)

    def labels(self, given: Any, where: str, factors: Mapping[str, LoraFactors]) -> tuple[str, ...] | None:
        return parse_labels(self._source, where, given, self.heads(factors))

    def _pairs(self, keys: Sequence[ParsedKey]) -> dict[str, tuple[ParsedKey, ParsedKey]]:
        """The file's module name -> its A and B."""
        halves: dict[tuple[str, str], ParsedKey] = {}
        for p in keys:
            other = halves.setdefault((p.module, p.role), p)
            if other is not p:
                raise AdapterError(
                    f"{self._source}: two keys land on module {p.module}: {other.key!r} and {p.key!r}; keep one"
                )
        pairs = {}
        for (module, role), p in halves.items():
            partner = halves.get((module, "b" if role == "a" else "a"))
            if partner is None or partner.embedding != p.embedding:
                have, lack = ("lora_A", "lora_B") if role == "a" else ("lora_B", "lora_A")
                raise AdapterError(
                    f"{self._source}: module {module} must have lora_A and lora_B, but has {have} (key {p.key!r}) "
                    f"without {lack}; the file is incomplete: save the adapter again"
                )
            if role == "a":
                pairs[module] = (p, partner)
        return pairs

    def _require_known(self, names: Iterable[str]) -> None:
        unknown = [name for name in names if not self._resolver.resolve(name)]
        if unknown:
            targets = sorted({name.split(".")[-1] for name in unknown})
            close = self._resolver.close_matches(unknown)
            hint = f"the base has e.g. {listed(close)}" if close else "the base has nothing of a like name"
            raise AdapterError(
                f"{self._source}: target modules {listed(targets)} not found in the base: no module {listed(unknown)}; "
                f"{hint}; load the base that the adapter was trained on ({self._settings.base_model})"
            )

    def _place(self, pairs: Mapping[str, tuple[ParsedKey, ParsedKey]]) -> dict[str, tuple[str, ...]]:
        """The file's module name -> modules of the base."""
        placed = {name: self._resolver.resolve(name) for name in pairs}
        owner: dict[str, str] = {}
        for name, modules in placed.items():
            for module in modules:
                other = owner.setdefault(module, name)
                if other != name:
                    keys = f"{pairs[other][0].key!r} and {pairs[name][0].key!r}"
                    raise AdapterError(
                        f"{self._source}: two keys land on module {module} of the base: {keys}; keep one"
                    )
        return placed

    def _factors(self, name: str, targets: Sequence[str], key_a: ParsedKey, key_b: ParsedKey) -> dict[str, LoraFactors]:
        """The factors of one pair for each module it goes to."""
        a, b = self._tensors[key_a.key], self._tensors[key_b.key]
        names: tuple[str, ...] = (name, *targets)
        if any(weight_is_target(self._reading, key_a, names, module) for module in targets):
            if self._modules[targets[0]].transposed:  # PEFT takes the weight as it is, [in, out]
                key_a, key_b = replace(key_b, role="a"), replace(key_a, role="b")
                a, b = b.t(), a.t()
            names = tuple(f"{name}.weight" for name in names)
        for module in targets:
            for p, tensor in ((key_a, a), (key_b, b)):
                place = Place(self._source, p.key, module)
                check_module(place, p, self._modules[module], tensor)
                check_factor(place, p, self._modules[module], tensor)
            if self._target_modules is not None and not covers(self._target_modules, module):
                raise Place(self._source, key_a.key, module).error(
                    f"the adapter trained it, but target_modules={shown(self._target_modules)} does not allow it here; "
                    f"widen target_modules or leave this adapter out"
                )
        place = Place(self._source, key_a.key, targets[0])
        configured, alpha = self._settings.rank_and_alpha(names)
        r = check_rank(place, a, b, configured, self._max_rank)
        check_finite(place, a)
        check_finite(Place(self._source, key_b.key, targets[0]), b)
        pair = LoraFactors(_own(a), _own(b), self._settings.scaling(r, alpha))
        return dict.fromkeys(targets, pair)


def _own(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous copy on the CPU: the source may map a file or belong to a model that trains on."""
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
