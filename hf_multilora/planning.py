"""What adapters will cost, before anything is loaded."""

from __future__ import annotations

import difflib
import os
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from .catalogue import Entry, check_name
from .config import MultiLoRAConfig
from .cuts import here
from .formats import A_ONE, B_ONE, LORA, Adapter, AdapterError, ModuleShape, is_lora, site_name, split_half, split_site
from .formats.keys import covers, listed
from .loading import name_adapters, progress, require_no_arguments, require_patchable
from .model import MultiLoRAModel
from .patches.facts import facts_of
from .plan import MemoryPlan, ModulePlan
from .reader import Reader
from .renames import checkpoint_renames
from .runtime import Runtime
from .sites import widths
from .skeleton import read_for_skeleton, skeleton


def plan(
    base: Any,
    adapters: Sequence[str] | Mapping[str, str],
    config: MultiLoRAConfig,
    auto_class: Any,
    budget: int | str | None,
    kwargs: dict[str, Any],
) -> MemoryPlan:
    """See MultiLoRAModel.plan; the arguments are those of `from_pretrained`.

    base: a folder or Hub id, of which only the config is read; a loaded PreTrainedModel, which is not changed; or a
        MultiLoRAModel, whose registered adapters count too (one given under the same name stands in for it). A
        MultiLoRAModel is planned for the settings given here, not for those it was loaded with.
    adapters: read and checked as `from_pretrained` does, so one that it would refuse is refused here. One check is left
        out where `base` is a folder or Hub id: that copies of the base's weights in an adapter file hold its values.
    max_lora_rank: without adapters, every module that target_modules allows (None: "all-linear") gets a pool of
        max_loras * max_lora_rank rank rows.

    Raises what `from_pretrained` raises for settings and adapters, and ValueError for a budget that is not positive,
    where there are neither adapters nor max_lora_rank, for target_modules without a module (if there are no adapters),
    and for a base whose parameters its config does not tell (quantized, sharded, without a dtype).
    """
    named = name_adapters(adapters)
    room = None if budget is None else budget_bytes(budget)
    model, read = _model_and_reader(base, named, auto_class, kwargs)
    if not named and config.max_lora_rank is not None and config.target_modules is None and not _own(model):
        config = replace(config, target_modules="all-linear")
    probe = Runtime(model, config, facts_of(model.config), checkpoint_renames(model))
    first, census = probe.paths(), probe.census()
    ranks: dict[str, Mapping[str, int]] = {}
    sizes: dict[str, int] = {}
    for entry in _own(model):
        if entry.name not in named:
            ranks[entry.name], sizes[entry.name] = entry.ranks, _registered_bytes(entry, model._multilora, probe)
    for name, path in progress(named):
        check_name(name)
        adapter = read(probe, path)
        sizes[name] = probe.pack(adapter).nbytes
        first_sites = probe.first_sites(adapter.factors)
        ranks[name] = {first_sites[site]: pair.r for site, pair in adapter.factors.items()}
    wanted = {module for each in ranks.values() for module in each}
    if not ranks:
        wanted = set(probe.first_sites(allowed_sites(probe, census)).values())
    order = {name: i for i, name in enumerate(first.values())}
    modules = sorted(wanted, key=lambda site: (order[split_site(site)[0]], site))  # in the model's order
    shapes = {site: census[split_site(site)[0]] for site in modules}

    def rows(name: str, slots: int) -> int:
        return probe.rows_for(name, (each.get(name, 0) for each in ranks.values()), slots)

    def cost(name: str, slots: int) -> int:
        return rows(name, slots) * probe.row_bytes(name, shapes[name])

    def total(slots: int) -> int:
        return sum(cost(name, slots) for name in modules)

    per_module = {
        name: ModulePlan(
            rows(name, config.max_loras), cost(name, config.max_loras), *widths(split_site(name)[1], shapes[name]),
            probe.dtype_of(name), experts_in(name, shapes[name]),
        )
        for name in modules
    }  # fmt: skip
    fits = None
    if room is not None:
        most = len(ranks) if config.max_lora_rank is None else room  # of a byte each at least
        fits = bisect_right(range(1, most + 1), room, key=total)
    base_bytes = sum(here(parameter).nbytes for parameter in model.parameters())
    return MemoryPlan(per_module, base_bytes, sizes, config.max_loras, room, fits)


def experts_in(site: str, shape: ModuleShape) -> int:
    """How many experts have rank rows of their own in a site."""
    shared = shape.experts is None or split_half(split_site(site)[1])[1] in (A_ONE, B_ONE)
    return 1 if shared else shape.experts.count  # type: ignore[union-attr]


def budget_bytes(budget: int | str) -> int:
    """Bytes of 1000, "2GB" or "1.5GiB". Raises TypeError and ValueError for what is not a positive size."""
    from accelerate.utils import convert_file_size_to_int

    if isinstance(budget, bool) or not isinstance(budget, (int, str)):
        raise TypeError(f"budget must be bytes or a size like '2GB', got {budget!r}")
    try:
        size = convert_file_size_to_int(budget)
    except ValueError:
        size = 0
    if size <= 0:
        raise ValueError(f"budget must be a positive number of bytes or a size like '2GB', got {budget!r}")
    return size


def allowed_sites(probe: Runtime, census: Mapping[str, ModuleShape]) -> list[str]:
    """The LoRA sites that target_modules allows. Raises ValueError where it names one that is not there."""
    if probe.config.max_lora_rank is None:
        raise ValueError("a plan needs adapters, or max_lora_rank to plan for any; got neither")
    given = probe.config.target_modules
    targets = probe.reading()["target_modules"]  # "all-linear" spelled out
    sites: list[tuple[str, str]] = []  # (as target_modules may name it, site)
    halves: dict[str, str] = {}  # site of gate or up -> that of both
    for name, shape in census.items():
        if given == "all-linear" and shape.kind in ("experts", "router"):
            continue  # these may be loaded then, and are planned for where they are named
        if shape.refused is None and shape.experts is not None:
            for projection, own in shape.experts.projections.items():
                site, whole = site_name(name, projection), site_name(name, own.parameter)
                if site != whole:
                    halves[site] = whole
                if not projection.endswith("_bias"):
                    sites.append((f"{name}.{projection}", site))
                    sites += [(name, site)] if site == whole else []
        elif shape.refused is None and shape.kind != "other":
            sites.append((name, name))
    try:
        found = [(name, site) for name, site in sites if covers(targets, name)]
    except re.error as error:
        raise ValueError(f"target_modules must be a regular expression, got {given!r}: {error}") from error
    wanted: Iterable[str] = [] if given is None or isinstance(given, str) else given
    absent = [target for target in wanted if not any(covers([target], name) for name, _ in found)]
    ends = dict.fromkeys(name.rpartition(".")[2] for name, _ in sites)
    close = [near for target in absent for near in difflib.get_close_matches(target.rpartition(".")[2], ends, n=2)]
    if absent or not found:
        raise ValueError(
            f"target_modules must name linears, embeddings, routers or experts' parameters of the base that adapters "
            f"may train, got {listed(absent) or repr(given)}; the base has e.g. "
            f"{listed(dict.fromkeys([*close, *ends]))}"
        )
    allowed = dict.fromkeys(site for _, site in found)
    return [site for site in allowed if halves.get(site) not in allowed]


def _allowed(targets: Sequence[str] | str, site: str, census: Mapping[str, ModuleShape]) -> bool:
    """Whether target_modules covers the module of a LoRA site, or its projection or parameter of experts."""
    path, role = split_site(site)
    names, shape = [path], census[path].experts
    if role != LORA and shape is not None:
        projection = split_half(role)[0]
        names += [f"{path}.{projection}", f"{path}.{shape.projections[projection].parameter}"]
    return any(covers(targets, name) for name in names)


# -- the base --------------------------------------------------------------------------------------------------
def _model_and_reader(
    base: Any, adapters: Mapping[str, str], auto_class: Any, kwargs: dict[str, Any]
) -> tuple[Any, Callable[[Runtime, str], Adapter]]:
    from transformers import PreTrainedModel

    if isinstance(base, (str, os.PathLike)):
        return skeleton(base, adapters, auto_class, kwargs), read_for_skeleton
    require_no_arguments(auto_class, kwargs)
    if not isinstance(base, PreTrainedModel):
        hint = "; take its adapters off first (unload()) and pass their folders" if hasattr(base, "unload") else ""
        raise TypeError(f"base must be a folder, a Hub id or a PreTrainedModel, got {type(base).__name__}{hint}")
    model: Any = base
    if not isinstance(model, MultiLoRAModel):
        require_patchable(model)
    return model, lambda probe, path: Reader(probe, path)()


def _own(model: Any) -> list[Entry]:
    """The entries of the adapters that are registered on a MultiLoRAModel."""
    runtime: Runtime | None = model.__dict__.get("_multilora")
    return [] if runtime is None else list(runtime.store.catalogue)


def _registered_bytes(entry: Entry, runtime: Runtime, probe: Runtime) -> int:
    """Host bytes of a registered adapter under the settings of the plan, which it must satisfy."""
    bound, targets = probe.config.max_lora_rank, probe.reading()["target_modules"]
    lora, census = [site for site in entry.ranks if is_lora(site)], probe.census()
    if bound is not None and entry.max_rank > bound:
        raise AdapterError(
            f"adapter {entry.name!r}: rank must be at most {bound} (max_lora_rank), got {entry.max_rank}; raise "
            f"max_lora_rank"
        )
    outside = [site for site in lora if targets is not None and not _allowed(targets, site, census)]
    if outside:
        raise AdapterError(
            f"adapter {entry.name!r} trained {listed(outside)}, but target_modules={targets!r} does not allow that "
            f"here; widen target_modules or plan without it"
        )
    if probe.config.dtype == runtime.config.dtype:
        return entry.nbytes
    if entry.reader is not None:
        return probe.pack(entry.reader()).nbytes
    assert entry.host is not None  # it came from memory and stays there
    return probe.pack(Adapter(entry.source, entry.digest, entry.base_model, entry.host.pairs())).nbytes
