"""Factors of experts, of whatever layout their file has, as sites of the base (see formats/base.py)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from hf_multilora.formats.base import ExpertsShape, LoraFactors
from hf_multilora.formats.checks import check_dense, check_finite, check_rank, is_finite, shape_of
from hf_multilora.formats.experts_keys import HALVES, Pair, Spot, experts_of, pair_up
from hf_multilora.formats.experts_shapes import PLAIN, SWAPPED, alternates, fits, is_bias, projection_of, written_by
from hf_multilora.formats.experts_stack import (
    Stack,
    alternating,
    common_scale,
    joined,
    own_copy,
    scaled,
    shared,
    sites_of,
)
from hf_multilora.formats.keys import ParsedKey, covers, shown
from hf_multilora.formats.reading import Reading


@dataclass(frozen=True)
class Limits:
    """What a deployment allows."""

    max_rank: int | None = None
    target_modules: str | Sequence[str] | None = None


def read_experts(
    reading: Reading, keys: Sequence[ParsedKey], spots: Mapping[str, Spot], limits: Limits
) -> dict[str, LoraFactors]:
    """The sites of the experts that `keys` (A and B) are for; spots: what their modules' names mean."""
    pairs = pair_up(reading, keys, spots)
    grouped: dict[str, list[Pair]] = {}
    for pair in pairs:
        grouped.setdefault(pair.site, []).append(pair)
        _require_allowed(reading, pair, limits)
    _require_all_experts(reading, pairs)
    way = _way(reading, [pair for pair in pairs if pair.nested])
    stacks: dict[str, dict[str, Stack]] = {}
    for site, group in grouped.items():
        first = group[0]
        shape = _experts(reading, first)
        if first.expert is not None:
            stack = _single(reading, shape, group, limits)
        elif first.nested:
            stack = _nested(reading, shape, first, way, limits)
        else:
            stack = _packed(reading, shape, first, limits)
        for key in (first.a, first.b) if first.expert is None else ():
            check_finite(reading.place(key, site), reading.tensors[key.key])
        stacks.setdefault(first.module, {})[first.projection] = stack
    sites: dict[str, LoraFactors] = {}
    for module, by_projection in stacks.items():
        shape = experts_of(reading, module)
        if alternates(shape) and any(half in by_projection for half in HALVES):
            halves = [by_projection.pop(half, None) for half in HALVES]
            both = by_projection["gate_up_proj"] = alternating(halves, shape.count)
            if limits.max_rank is not None and max(both.parts) > limits.max_rank:
                raise reading.error(
                    f"module {module}: rank must be at most {limits.max_rank} (max_lora_rank), got {max(both.parts)} "
                    f"for gate and up, which are one projection as their columns alternate; raise max_lora_rank"
                )
        for projection, stack in by_projection.items():
            sites |= sites_of(f"{module}:{projection}", shared(stack, shape.count))
    return sites


def _experts(reading: Reading, pair: Pair) -> ExpertsShape:
    return experts_of(reading, pair.module)


# -- one layout each ------------------------------------------------------------------------------------------
def _single(reading: Reading, shape: ExpertsShape, group: Sequence[Pair], limits: Limits) -> Stack:
    """One pair per expert, of some experts or all: A [r, in], B [out, r]."""
    own = projection_of(shape, group[0].projection)
    by_expert = {pair.expert: pair for pair in group}
    chosen = [(e, by_expert[e]) for e in range(shape.count) if e in by_expert]
    factors, scales, ranks = [], [], [0] * shape.count
    for e, pair in chosen:
        a, b = reading.tensors[pair.a.key], reading.tensors[pair.b.key]
        _check(reading, pair, a, b, ["r", own.in_features], [own.out_features, "r"])
        ranks[e], scale = _rank(reading, pair, a, b, limits)
        factors.append((a, b))
        scales.append(scale)
    scaling = common_scale(scales)
    a = joined([a for a, _ in factors], 0)
    b = joined([scaled(b, scale, scaling) for (_, b), scale in zip(factors, scales, strict=True)], 1)
    if not (is_finite(a) and is_finite(b)):
        for (_, pair), own_factors in zip(chosen, factors, strict=True):
            for key, tensor in zip((pair.a, pair.b), own_factors, strict=True):
                check_finite(reading.place(key, pair.site), tensor)
        raise reading.error(f"{group[0].site}: lora_B times the quotient of two scales must be finite in {b.dtype}")
    return Stack(a, b, tuple(ranks), scaling)


def _packed(reading: Reading, shape: ExpertsShape, pair: Pair, limits: Limits) -> Stack:
    """All experts in one tensor, or one for all: A [E or 1, r, in], B [E or 1, out, r]."""
    own = projection_of(shape, pair.projection)
    a, b = reading.tensors[pair.a.key], reading.tensors[pair.b.key]
    count = shape.count
    _check(reading, pair, a, b, [f"{count} or 1", "r", own.in_features], [f"{count} or 1", own.out_features, "r"])
    for key, tensor in ((pair.a, a), (pair.b, b)):
        if tensor.shape[0] not in (1, count):
            raise reading.place(key, pair.site).error(
                f"the file holds factors of {tensor.shape[0]} experts (or 1 for all), the base has {count}: the "
                f"adapter belongs to another base"
            )
    r, scaling = _rank(reading, pair, a[0], b[0], limits)
    flat_a = own_copy(a.reshape(-1, own.in_features))
    flat_b = own_copy(b.permute(1, 0, 2).reshape(own.out_features, -1))
    return Stack(flat_a, flat_b, (r,) * count, scaling, a.shape[0] < count, b.shape[0] < count)


def _nested(reading: Reading, shape: ExpertsShape, pair: Pair, way: str, limits: Limits) -> Stack:
    """PEFT's matrices over all experts."""
    own, count = projection_of(shape, pair.projection), shape.count
    a, b = reading.tensors[pair.a.key], reading.tensors[pair.b.key]
    if is_bias(pair.projection):
        _check(reading, pair, a, b, ["r", own.out_features], [count, "r"])
        r, scaling = _rank(reading, pair, a, b, limits)
        return Stack(own_copy(b.reshape(-1, 1)), own_copy(a.t()), (r,) * count, scaling, one_b=True)
    if way not in fits(shape, pair.projection, a, b):
        _check(reading, pair, a, b, ["r*E", own.in_features], [own.out_features, "r*E"])
    _check(reading, pair, a, b, ["r*E", a.shape[-1]], [b.shape[0], "r*E"])
    r, scaling = _rank(reading, pair, a, b, limits, count)
    if way == SWAPPED:  # A [E, r, out], B [in, r, E]
        new_a = b.reshape(own.in_features, r, count).permute(2, 1, 0).reshape(-1, own.in_features)
        new_b = a.t()
    else:  # A [E, r, in], B [out, r, E]
        new_a = a
        new_b = b.reshape(own.out_features, r, count).permute(0, 2, 1).reshape(own.out_features, -1)
    return Stack(own_copy(new_a), own_copy(new_b), (r,) * count, scaling)


def _way(reading: Reading, pairs: Sequence[Pair]) -> str:
    """How the file's nested pairs are to be read, as one of them says whose two sizes differ."""
    decided: dict[str, Pair] = {}
    square: list[Pair] = []
    for pair in pairs:
        shape = _experts(reading, pair)
        if is_bias(pair.projection):
            continue
        ways = fits(shape, pair.projection, reading.tensors[pair.a.key], reading.tensors[pair.b.key])
        if len(ways) == 1:
            decided.setdefault(ways.pop(), pair)
        elif len(ways) == 2:
            square.append(pair)
    if len(decided) == 2:
        raise reading.error(
            f"all factors of experts must be in one layout, but {decided[PLAIN].a.key!r} is [r*E, in] and "
            f"{decided[SWAPPED].a.key!r} is [r*E, out]; save the adapter again"
        )
    if decided or not square:
        return next(iter(decided), PLAIN)
    pair = square[0]
    shape, version = _experts(reading, pair), reading.settings.peft_version
    if version is None and shape.transposed and shape.told:
        return PLAIN  # only 0.19.0 wrote the other, and its name beside it
    if version is None:
        raise reading.place(pair.a, pair.site).error(
            f"lora_A {shape_of(reading.tensors[pair.a.key])} can be [r*E, in] or [r*E, out], since both sizes "
            f"are equal and PEFT before 0.19.1 took one for the other, and adapter_config.json does not say which "
            f'released PEFT saved it; add "peft_version" to it, such as "0.18.0" or "0.19.1"'
        )
    return written_by(shape, version)


# -- checks ---------------------------------------------------------------------------------------------------
def _check(
    reading: Reading,
    pair: Pair,
    a: torch.Tensor,
    b: torch.Tensor,
    wanted_a: Sequence[int | str],
    wanted_b: Sequence[int | str],
) -> None:
    """Numbers in `wanted` must be met."""
    for key, tensor, wanted in ((pair.a, a, wanted_a), (pair.b, b, wanted_b)):
        name, shown = f"lora_{key.role.upper()}", f"[{', '.join(map(str, wanted))}]"
        place = reading.place(key, pair.site)
        check_dense(place, name, shown, tensor)
        if tensor.dim() != len(wanted) or any(
            w != size for w, size in zip(wanted, tensor.shape, strict=True) if isinstance(w, int)
        ):
            raise place.error(
                f"{name} must have shape {shown} on this base, got shape {shape_of(tensor)}: the adapter belongs to "
                f"another base"
            )


def _rank(
    reading: Reading, pair: Pair, a: torch.Tensor, b: torch.Tensor, limits: Limits, count: int = 1
) -> tuple[int, float]:
    """(rank of one expert, scale); count: experts whose rows lie in one matrix."""
    place = reading.place(pair.a, pair.site)
    r, alpha = reading.settings.rank_and_alpha(pair.names)
    rows = a.shape[0]
    if count > 1 and rows == b.shape[1] and rows % r == 0 and rows != r * count:
        raise place.error(
            f"lora_A {shape_of(a)} holds {rows // r} experts of rank {r} (r, rank_pattern), but the base has {count} "
            f"experts: the adapter belongs to another base, or r is not what it was trained with"
        )
    if count > 1 and rows == b.shape[1] and rows == r * count:
        rows = r
        a, b = a[:r], b[:, :r]
    check_rank(place, a, b, r, limits.max_rank)
    return r, reading.settings.scaling(r, alpha)


def _require_allowed(reading: Reading, pair: Pair, limits: Limits) -> None:
    """`target_modules` of the deployment may name the module, a parameter, a projection, or what the file calls it."""
    if limits.target_modules is None:
        return
    shape = _experts(reading, pair)
    parameter = projection_of(shape, pair.projection).parameter
    names = (pair.module, f"{pair.module}.{parameter}", f"{pair.module}.{pair.projection}", *pair.names)
    if not any(covers(limits.target_modules, name) for name in names):
        raise reading.place(pair.a, pair.site).error(
            f"the adapter trained it, but target_modules={shown(limits.target_modules)} does not allow it here; widen "
            f"target_modules (by {pair.module}.{parameter} or its end) or leave this adapter out"
        )


def _require_all_experts(reading: Reading, pairs: Sequence[Pair]) -> None:
    """Raises where the file has the first n experts of everything though its config names the others as well: it was
    trained on a base with n experts."""
    held: dict[tuple[str, str], list[Pair]] = {}
    for pair in pairs:
        if pair.expert is not None:
            held.setdefault((pair.module, pair.projection), []).append(pair)
    counts = set()
    for group in held.values():
        experts = sorted(pair.expert for pair in group if pair.expert is not None)
        shape = _experts(reading, group[0])
        if experts != list(range(len(experts))) or len(experts) == shape.count:
            return
        counts.add((len(experts), shape.count))
    if len(counts) != 1:
        return
    n, count = counts.pop()
    first = next(pair for pair in pairs if pair.expert is not None)
    start, _, end = first.a.module.rpartition(f".{first.expert}.")
    if reading.settings.targets_module(f"{start}.{n}.{end}"):
        raise reading.place(first.a, first.site).error(
            f"the file holds factors of {n} experts (0 to {n - 1}), but the base has {count}, and target_modules of "
            f"its config names {end} of them all: the adapter belongs to another base; if it was trained on these "
            f"experts only, name them in target_modules of adapter_config.json"
        )
