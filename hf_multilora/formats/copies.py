"""Parameters of the base that a file holds beside what was trained.

PEFT writes the embeddings of an adapter that was trained after the vocabulary was resized, and on loading overwrites
the base's, tied modules included: here they are saved sites of that adapter alone. Any other copy must hold what the
base holds, and is left out.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch

from hf_multilora.cuts import is_distributed
from hf_multilora.formats.base import LoraFactors
from hf_multilora.formats.checks import check_copy, own_value, same_values, saved_shape
from hf_multilora.formats.keys import ParsedKey
from hf_multilora.formats.reading import Reading
from hf_multilora.formats.saved import TWO_ROLES, Group, has_bias, pack, saved_module


def overwritten_modules(
    reading: Reading, groups: Mapping[str, Group], full: Collection[str], lora: Collection[str]
) -> dict[str, LoraFactors]:
    """The modules of the base whose parameters the file replaces by its own.

    groups: name in the file -> its parameters. full: modules of the base that the adapter saves in full. lora: those
    with a LoRA pair.
    """
    reading.refuse([p for name, group in groups.items() if not reading.resolver.resolve(name) for p in group.values()])
    found: dict[str, LoraFactors] = {}
    places: dict[str, ParsedKey] = {}  # module -> a key that is for it
    for name, group in groups.items():
        for module in reading.resolver.resolve(name):
            factors = _overwritten(reading, module, group, full, lora)
            places[module] = next(iter(group.values()))
            if factors is not None:
                found[module] = factors
    for module, factors in list(found.items()):
        for other in reading.modules[module].tied:
            if other in full or reading.resolver.is_alias(other):
                continue
            place = reading.place(places[module], module)
            if other in places and (other not in found or not torch.equal(found[other].a, factors.a)):
                raise place.error(
                    f"it is tied to {other}, but the file holds another weight for that (key {places[other].key!r}), "
                    f"so which one counts is unknown; keep one of them"
                )
            if other not in found:
                if other in lora:
                    raise reading.place(places[module], other).error(f"{TWO_ROLES}: {module} is tied to it")
                found[other] = _tied(reading, places[module], other, factors)
    return {module: factors for module, factors in found.items() if module not in full}


def _overwritten(
    reading: Reading, module: str, group: Group, full: Collection[str], lora: Collection[str]
) -> LoraFactors | None:
    """What the file has in place of the base's own parameters, None where it has the same."""
    changed = [p for p in group.values() if _differs(reading, p, module)]
    if not changed:
        return None
    known = all(name == "weight" or (name == "bias" and has_bias(reading.modules[module])) for name in group)
    if known and reading.resizable(module) and module not in lora:
        return saved_module(reading, module, group)
    if module in full and all(p.original for p in changed):
        return None  # what the base held under a module that this adapter replaces: without influence on it
    for p in changed:
        check_copy(reading.place(p, module), p, reading.modules[module], reading.tensors[p.key])
    return None


def _differs(reading: Reading, p: ParsedKey, module: str) -> bool:
    shape, tensor = reading.modules[module], reading.tensors[p.key]
    if reading.by_shape and shape.kind != "other" and (p.parameter == "weight" or shape.bias is not None):
        return saved_shape(shape, p.parameter) != tuple(tensor.shape)
    own = own_value(shape, p.parameter)
    return own is None or own.shape != tensor.shape or not same_values(tensor, own)


def _tied(reading: Reading, p: ParsedKey, module: str, factors: LoraFactors) -> LoraFactors:
    """The same weight for a module that is tied to the one the file names, with its own bias."""
    shape, held = reading.modules[module], {"weight": factors.a}
    if shape.refused is not None:
        raise reading.place(p, module).error(
            f"the file replaces the weight that it shares, and no adapter may save it here: {shape.refused}; retrain "
            f"without it"
        )
    if has_bias(shape):
        bias = own_value(shape, "bias")
        if bias is None or is_distributed(bias) or bias.shape[0] != factors.r:
            raise reading.place(p, module).error(
                f"the file replaces the weight that it shares by one of {factors.r} rows, and holds no bias for it; "
                f"name it in modules_to_save and save the adapter again"
            )
        held["bias"] = bias
    return pack(shape, held)


def check_vocabulary(reading: Reading, saved: Mapping[str, LoraFactors]) -> None:
    """Token ids that can be read must be those that can be written."""
    tables, heads = reading.vocabulary()
    base = {m: reading.modules[m].in_features for m in tables} | {m: reading.modules[m].out_features for m in heads}
    sizes = {m: saved[m].r if m in saved else rows for m, rows in base.items()}
    if sizes == base or len(set(sizes.values())) == 1:
        return
    changed = next(m for m in sizes if sizes[m] != base[m])
    other = next(m for m in sizes if sizes[m] != sizes[changed])
    raise reading.error(
        f"the adapter saves {changed} with {sizes[changed]} rows, but {other} has {sizes[other]}: token ids of one "
        f"would be unknown to the other; save both (modules_to_save, or ensure_weight_tying=True where they are tied), "
        f"or load a base of that size (resize_token_embeddings)"
    )
