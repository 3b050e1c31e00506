"""Sites of experts and routers as PEFT 0.19.1 and later hold them: parameters that `target_parameters` names."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from hf_multilora.formats.base import (
    A_EACH,
    A_ONE,
    B_EACH,
    B_ONE,
    AdapterError,
    ExpertsShape,
    LoraFactors,
    ModuleShape,
    split_half,
)
from hf_multilora.formats.experts_shapes import SINCE, SWAPPED, is_bias, written_by
from hf_multilora.formats.experts_stack import common_scale, joined, scaled

# PEFT takes these names in target_modules for those of Transformers 4's experts and routers, wherever they stand
OLD_NAMES = frozenset({"gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"})
VERSION = "0.19.1"  # of PEFT, the first that reads what is written here


@dataclass(frozen=True)
class Target:
    """One parameter that an adapter trains: A and B as PEFT keeps them, under a module's name in its files."""

    parameter: str  # full path
    name: str  # X or X.base_layer...
    a: torch.Tensor
    b: torch.Tensor
    r: int
    scaling: float


@dataclass(frozen=True)
class _Factors:
    """A [r_e, in] and B [out, r_e] of each expert, and whether B is one for all."""

    a: tuple[torch.Tensor, ...]
    b: tuple[torch.Tensor, ...]
    scaling: float
    one_b: bool


def weights_as_parameters(lora: Collection[str], modules: Mapping[str, ModuleShape]) -> list[str]:
    """The modules in `lora` whose weight must be targeted as a parameter: PEFT finds a router only so, and of a model
    with experts takes some names of linears for old names of experts."""
    moe = any(shape.kind == "experts" for shape in modules.values())
    return [
        module
        for module in lora
        if modules[module].kind == "router"
        or (moe and modules[module].kind == "linear" and module.split(".")[-1] in OLD_NAMES)
    ]


def expert_targets(source: str, module: str, shape: ModuleShape, sites: Mapping[str, LoraFactors]) -> list[Target]:
    """What the sites (by role) of one module of experts train, innermost first."""
    experts = shape.experts
    if experts is None:
        raise AdapterError(f"{source}: module {module} holds no experts that can be written, which the adapter trains")
    by_projection: dict[str, dict[str, LoraFactors]] = {}
    for role, factors in sites.items():
        projection, half = split_half(role)
        if projection not in experts.projections:
            raise AdapterError(f"{source}: module {module} has no {projection}, which the adapter trains")
        by_projection.setdefault(projection, {})[half] = factors
    found = {
        projection: _factors(f"{source}: site {module}:{projection}", halves, experts.count)
        for projection, halves in by_projection.items()
    }
    made = []
    for parameter in experts.parameters:
        parts = {n: part for n, part in found.items() if experts.projections[n].parameter == parameter}
        if parts:
            scaling = common_scale(part.scaling for part in parts.values())
            pack = _bias if is_bias(parameter) else _weight
            made.append((parameter, *pack(experts, parameter, parts, scaling), scaling))
    return [
        Target(f"{module}.{parameter}", module + ".base_layer" * (len(made) - 1 - i), a, b, r, scaling)
        for i, (parameter, a, b, r, scaling) in enumerate(made)
    ]


def _factors(where: str, halves: Mapping[str, LoraFactors], count: int) -> _Factors:
    """Each expert's own, of a site or its halves."""
    whole = halves.get("")
    first = whole or halves.get(A_EACH) or halves.get(A_ONE)
    second = whole or halves.get(B_EACH) or halves.get(B_ONE)
    if first is None or second is None or len(halves) != (1 if whole else 2):
        raise AdapterError(f"{where} must have A and B, each once for all experts or for each, got {sorted(halves)}")
    parts = first.parts or second.parts or (first.r,) * count
    one_a, one_b = A_ONE in halves, B_ONE in halves
    one = first.r if one_a else second.r if one_b else None
    sums = {half.r for half, shared in ((first, one_a), (second, one_b)) if not shared}
    if len(parts) != count or sums - {sum(parts)} or (one is not None and set(parts) != {one}):
        raise AdapterError(f"{where} must have rank rows for each of {count} experts, got {parts}")
    a = [first.a] * count if one_a else first.a.split(list(parts), 0)
    b = [second.b] * count if one_b else second.b.split(list(parts), 1)
    return _Factors(tuple(a), tuple(b), second.scaling, one_b)


def _weight(
    shape: ExpertsShape, parameter: str, parts: Mapping[str, _Factors], scaling: float
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """A [(expert, rank), in], B [out, (rank, expert)], as PEFT takes in and out, and the rank: projections are blocks,
    filled up with zeros."""
    ranks = [sum(part.a[e].shape[0] for part in parts.values()) for e in range(shape.count)]
    r = max(ranks)
    width = next(iter(parts.values())).a[0].shape[1]
    out = max(p.first + p.out_features for p in shape.projections.values() if p.parameter == parameter)
    blocks = {n: [scaled(b, part.scaling, scaling) for b in part.b] for n, part in parts.items()}
    a = joined([part.a[0][:0] for part in parts.values()], 0).new_zeros(shape.count, r, width)
    b = joined([block[0].reshape(-1) for block in blocks.values()], 0).new_zeros(shape.count, out, r)
    for e in range(shape.count):
        at = 0
        for n, part in parts.items():
            rank, own = part.a[e].shape[0], shape.projections[n]
            a[e, at : at + rank] = part.a[e]
            b[e, own.first : own.first + own.out_features, at : at + rank] = blocks[n][e]
            at += rank
    if written_by(shape, SINCE) == SWAPPED:
        a, b = b.transpose(1, 2), a.transpose(1, 2)
    return a.flatten(0, 1), b.permute(1, 2, 0).flatten(1), r


def _bias(
    shape: ExpertsShape, parameter: str, parts: Mapping[str, _Factors], scaling: float
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """A [r, out] and B [E, r] of a bias [E, out]; factors of single experts become blocks of it."""
    (part,) = parts.values()
    if part.one_b:
        return part.b[0].t(), torch.stack([a[:, 0] for a in part.a]), part.b[0].shape[1]
    a = torch.cat([b.t() for b in part.b])
    return a, torch.block_diag(*[a.t() for a in part.a]), a.shape[0]


def require_own_parameters(source: str, parameters: Sequence[str], modules: Mapping[str, ModuleShape]) -> None:
    """PEFT finds parameters by the ends of names: these must be ends of no others."""
    names = {f"{module}.{own}" for module, shape in modules.items() for own in shape.own}
    names |= {
        f"{module}.{own}" for module, shape in modules.items() if shape.experts for own in shape.experts.parameters
    }
    ends = {name[n + 1 :]: name for name in names for n, c in enumerate(name) if c == "."}
    for parameter in parameters:
        if ends.get(parameter, parameter) != parameter:
            raise AdapterError(
                f"{source}: parameter {parameter} cannot be written for PEFT, which would take {ends[parameter]} for "
                f"it, too, as it looks for the ends of names; write it for a base that holds this one under another "
                f"name"
            )
