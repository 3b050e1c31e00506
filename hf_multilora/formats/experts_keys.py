"""Keys of an adapter file that belong to experts: which module of the base, which of its projections, which expert.

`X` names the module that holds the experts:

layout   keys                                                  A                       B
nested   X.lora_A, X.base_layer.lora_A, ... one per parameter  [r*E, in]               [out, r*E]
single   X.{expert}.{projection}.lora_A                        [r, in]                 [out, r]
packed   X.{projection}.lora_A                                 [E or 1, r, in]         [E or 1, out, r]

Nested is PEFT's `target_parameters`: the first of the targeted parameters, as the module registers them, lies
innermost. Single is what Transformers 4 had, with one module per expert.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hf_multilora.formats.base import ExpertsShape, ModuleShape
from hf_multilora.formats.checks import shape_of
from hf_multilora.formats.experts_shapes import alternates, fits
from hf_multilora.formats.keys import ParsedKey
from hf_multilora.formats.reading import Reading

# Name of a projection in files -> (the projection of gated experts, of ungated ones). A test compares it with what
# Transformers' own conversion of checkpoints says of every model.
PROJECTIONS: Mapping[str, tuple[str, str | None]] = {
    "gate_up_proj": ("gate_up_proj", None),
    "gate_proj": ("gate_proj", None),
    "up_proj": ("up_proj", "up_proj"),
    "down_proj": ("down_proj", "down_proj"),
    "w1": ("gate_proj", "up_proj"),
    "w3": ("up_proj", None),
    "w2": ("down_proj", "down_proj"),
    "fc1": ("gate_proj", "up_proj"),
    "fc3": ("up_proj", None),
    "fc2": ("down_proj", "down_proj"),
}
HALVES = ("gate_proj", "up_proj")
OVERLAPS = {"gate_up_proj": HALVES, "gate_proj": ("gate_up_proj",), "up_proj": ("gate_up_proj",)}
OF_EXPERTS = re.compile(r"(.+?)(?:\.(0|[1-9][0-9]{0,8}))?\.([^.]+)")  # module, expert, projection


@dataclass(frozen=True)
class Spot:
    """What a module's name in a file means: the experts' module of the base, and what of it."""

    module: str
    projection: str | None  # its name in the file, None where PEFT's nesting says which it is
    expert: int | None


@dataclass(frozen=True)
class Pair:
    """A and B of one projection, of one expert or of all."""

    module: str
    projection: str  # of ExpertsShape.projections, or one of HALVES
    expert: int | None
    nested: bool
    a: ParsedKey
    b: ParsedKey
    names: tuple[str, ...]  # what rank_pattern, alpha_pattern and target_modules may call it

    @property
    def site(self) -> str:
        return f"{self.module}:{self.projection}"


def locate_experts(reading: Reading, keys: Sequence[ParsedKey]) -> dict[str, Spot]:
    """Names of modules in the file -> experts of the base, for those that mean some."""
    if not any(_are_experts(module, shape) for module, shape in reading.modules.items()):
        return {}
    holders: dict[str, str | None] = {}  # name -> the module of experts that it means
    spots: dict[str, Spot] = {}
    for p in keys:
        if p.module in spots:
            continue
        whole = _holder(reading, p.module, holders)
        if whole is not None:
            spots[p.module] = Spot(whole, None, None)
            continue
        if reading.resolver.resolve(p.module):
            continue
        for name in dict.fromkeys((p.module, reading.resolver.renamed(p.module))):
            found = OF_EXPERTS.fullmatch(name)
            module = _holder(reading, found[1], holders) if found else None
            if found and module is not None:
                spots[p.module] = Spot(module, found[3], int(found[2]) if found[2] else None)
                break
    return spots


def _holder(reading: Reading, name: str, known: dict[str, str | None]) -> str | None:
    if name not in known:
        modules = reading.resolver.resolve(name)
        known[name] = modules[0] if modules and _are_experts(modules[0], reading.modules[modules[0]]) else None
    return known[name]


def _are_experts(module: str, shape: ModuleShape) -> bool:
    """Those outside Transformers' interface, too: they are refused by name."""
    outside = shape.kind == "other" and shape.refused is not None and module.split(".")[-1] == "experts"
    return shape.kind == "experts" or outside


def pair_up(reading: Reading, keys: Sequence[ParsedKey], spots: Mapping[str, Spot]) -> list[Pair]:
    """A with its B, and the projection they are for."""
    halves: dict[tuple[Spot, int, str], ParsedKey] = {}
    for p in keys:
        spot = spots[p.module]
        shape = reading.modules[spot.module]
        if shape.refused is not None:
            raise reading.place(p, spot.module).error(
                f"no adapter may target these experts here: {shape.refused}; retrain without them"
            )
        if p.embedding:
            raise reading.place(p, spot.module).error(
                "experts take lora_A and lora_B, but the file holds lora_embedding_A/B: it was trained on another base"
            )
        other = halves.setdefault((spot, p.depth, p.role), p)
        if other is not p:
            raise reading.error(f"two keys land on {_called(spot)}: {other.key!r} and {p.key!r}; keep one")
    pairs: list[Pair] = []
    nested: dict[str, dict[int, tuple[ParsedKey, ParsedKey]]] = {}
    for (spot, depth, role), p in halves.items():
        partner = halves.get((spot, depth, "b" if role == "a" else "a"))
        if partner is None:
            have, lack = ("lora_A", "lora_B") if role == "a" else ("lora_B", "lora_A")
            raise reading.error(
                f"{_called(spot)} must have lora_A and lora_B, but has {have} (key {p.key!r}) without {lack}; the file "
                f"is incomplete: save the adapter again"
            )
        if role != "a":
            continue
        if spot.projection is None:
            nested.setdefault(spot.module, {})[depth] = (p, partner)
        elif depth:
            raise reading.place(p, spot.module).error(
                "base_layer stands behind a projection's name, so which parameter it means is unknown; save it again"
            )
        else:
            pairs += _named(reading, spot, p, partner)
    for module, by_depth in nested.items():
        pairs += _nested(reading, module, by_depth)
    _require_apart(reading, pairs)
    return pairs


def _called(spot: Spot) -> str:
    expert = "" if spot.expert is None else f" of expert {spot.expert}"
    return f"{spot.projection or 'a parameter'}{expert} of module {spot.module}"


def experts_of(reading: Reading, module: str) -> ExpertsShape:
    """The shape of a module that is known to hold experts that may be adapted."""
    shape = reading.modules[module].experts
    assert shape is not None  # a module of experts without shape is refused
    return shape


def _named(reading: Reading, spot: Spot, a: ParsedKey, b: ParsedKey) -> list[Pair]:
    """A pair whose key names its projection; none where it is an empty placeholder for one that the base lacks."""
    shape, name = experts_of(reading, spot.module), str(spot.projection)
    place = reading.place(a, spot.module)
    gated = "gate_up_proj" in shape.projections
    projection = PROJECTIONS[name][0 if gated else 1] if name in PROJECTIONS else name
    if projection is None and spot.expert is None and not any(reading.tensors[p.key].numel() for p in (a, b)):
        return []
    known = {*shape.projections, *(HALVES if alternates(shape) else ())}
    if projection is None or projection not in known:
        raise place.error(
            f"the file holds factors of {name}, but these experts have {', '.join(shape.projections)}; load the "
            f"base that the adapter was trained on"
        )
    if spot.expert is not None and spot.expert >= shape.count:
        raise place.error(
            f"the file holds factors of expert {spot.expert}, but the base has {shape.count} experts (0 to "
            f"{shape.count - 1}): the adapter belongs to another base"
        )
    index = "" if spot.expert is None else f".{spot.expert}"
    flat = spot.expert is None and reading.tensors[a.key].dim() == 2  # was the weight of a module of its own
    names = (f"{a.module}.weight" if flat else a.module, f"{spot.module}{index}.{name}")
    return [Pair(spot.module, projection, spot.expert, flat, a, b, names)]


def _nested(reading: Reading, module: str, by_depth: Mapping[int, tuple[ParsedKey, ParsedKey]]) -> list[Pair]:
    shape, settings = experts_of(reading, module), reading.settings
    outer = next(iter(by_depth.values()))[0]
    depths = sorted(by_depth, reverse=True)  # innermost first
    names = dict.fromkeys((outer.module, module))
    chosen = [n for n in shape.parameters if any(settings.targets_parameter(f"{name}.{n}") for name in names)]
    if chosen and depths != list(reversed(range(len(chosen)))):
        raise reading.place(outer, module).error(
            f"target_parameters names {', '.join(chosen)} of it{_absent(reading)}, so the file must hold {len(chosen)} "
            f"pairs of lora_A and lora_B one inside another (base_layer), but it holds {_shown(reading, by_depth)}; "
            f"use the adapter_config.json it was saved with"
        )
    if not chosen:
        chosen = _by_shape(reading, module, by_depth)
    odd = next((n for n in chosen if n not in shape.projections), None)
    if odd is not None:
        raise reading.place(outer, module).error(
            f"target_parameters names {odd}, which is not served here (these experts have "
            f"{', '.join(shape.projections)}); retrain without it"
        )
    return [
        Pair(module, n, None, True, *by_depth[depth], tuple(f"{name}.{n}" for name in names))
        for depth, n in zip(depths, chosen, strict=True)
    ]


def _absent(reading: Reading) -> str:
    """What `target_parameters` names beside, and no module of the base has."""
    known = [f"{module}.{own}" for module, shape in reading.modules.items() for own in shape.own]
    ends = reading.settings.target_parameters
    absent = [t for t in ends if not any(name == t or name.endswith(f".{t}") for name in known)]
    return f" (and {', '.join(absent)}, which the base lacks)" if absent else ""


def _by_shape(reading: Reading, module: str, by_depth: Mapping[int, tuple[ParsedKey, ParsedKey]]) -> list[str]:
    """The parameters that the pairs fit, innermost first, where they are the only ones."""
    shape = experts_of(reading, module)
    tensors = [[reading.tensors[p.key] for p in by_depth[depth]] for depth in sorted(by_depth, reverse=True)]
    known = [n for n in shape.parameters if n in shape.projections]
    found = [
        names
        for names in itertools.combinations(known, len(tensors))
        if all(fits(shape, n, a, b) for n, (a, b) in zip(names, tensors, strict=True))
    ]
    if len(found) == 1:
        return list(found[0])
    outer = next(iter(by_depth.values()))[0]
    could = (
        f"could be those of {' or '.join('+'.join(names) for names in found)}" if found else "fit no parameter of it"
    )
    raise reading.place(outer, module).error(
        f"the file's factors {_shown(reading, by_depth)} {could} ({shape.count} experts: {_sizes(shape)}), and "
        f"adapter_config.json has no target_parameters that name them; use the one it was saved with, or name the "
        f"parameters there (full names, as {module}.{known[0]})"
    )


def _sizes(shape: ExpertsShape) -> str:
    return ", ".join(f"{n} {p.in_features} -> {p.out_features}" for n, p in shape.projections.items())


def _shown(reading: Reading, by_depth: Mapping[int, tuple[ParsedKey, ParsedKey]]) -> str:
    return "; ".join(
        f"{a.key} {shape_of(reading.tensors[a.key])} and lora_B {shape_of(reading.tensors[b.key])}"
        for a, b in by_depth.values()
    )


def _require_apart(reading: Reading, pairs: Sequence[Pair]) -> None:
    """One layout per projection, and no projection beside a half of it."""
    held: dict[tuple[str, str], dict[int | None, Pair]] = {}
    for pair in pairs:
        same = held.setdefault((pair.module, pair.projection), {})
        clashing = [*same.values()] if pair.expert is None else [same[e] for e in (None, pair.expert) if e in same]
        for name in OVERLAPS.get(pair.projection, ()):
            clashing += held.get((pair.module, name), {}).values()
        if clashing:
            raise reading.error(
                f"two keys land on {pair.projection} of module {pair.module}: {clashing[0].a.key!r} and "
                f"{pair.a.key!r}; keep one"
            )
        same[pair.expert] = pair
