"""Modules that an adapter holds in full: PEFT's `modules_to_save`."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch

from hf_multilora.formats.base import LoraFactors, ModuleShape
from hf_multilora.formats.checks import check_finite, check_saved, own_value, same_values, saved_shape, shape_of
from hf_multilora.formats.config import load_for_task
from hf_multilora.formats.keys import ParsedKey, listed
from hf_multilora.formats.reading import Reading

Group = Mapping[str, ParsedKey]  # parameter of one module -> its key
TWO_ROLES = "the adapter trains it with LoRA and saves it in full as well, and only one of both can be served here"


def saved_modules(
    reading: Reading, groups: Mapping[str, Group], lora: Collection[str]
) -> dict[str, LoraFactors | None]:
    """The modules of the base that `modules_to_save` gives an adapter, None for those that are copies of the base's.

    groups: name in the file -> its tensors. lora: the modules of the base that the file has a LoRA pair for.
    """
    _require_in_base(reading, groups)
    found: dict[str, LoraFactors | None] = {}
    for name, group in groups.items():
        for module in reading.resolver.resolve(name):
            place = reading.place(next(iter(group.values())), module)
            if module in found:
                raise place.error(f"{name} and another name in the file both land on it; keep one")
            factors = found[module] = saved_module(reading, module, group)
            if factors is not None and reading.resolver.is_alias(name):
                if reading.by_shape and all(_has_own_shape(reading, p, module) for p in group.values()):
                    found[module] = None
                    continue
                raise place.error(
                    f"{name} is never called in this model, so PEFT computes without what the adapter saved of it; "
                    f"retrain with modules_to_save naming the module that is called"
                )
            if factors is not None and module in lora:
                raise place.error(f"{TWO_ROLES}; retrain with one of them")
    _require_whole(reading, groups, found)
    return found


def _has_own_shape(reading: Reading, p: ParsedKey, module: str) -> bool:
    return saved_shape(reading.modules[module], p.parameter) == tuple(reading.tensors[p.key].shape)


def _require_in_base(reading: Reading, groups: Mapping[str, Group]) -> None:
    absent = [name for name in groups if not reading.resolver.resolve(name)]
    if absent:
        close = reading.resolver.close_matches(absent)
        hint = f" (it has e.g. {listed(close)})" if close else ""
        raise reading.error(
            f"the adapter saves {listed(absent)} in full (modules_to_save), but the base has no such module{hint}; "
            f"{load_for_task(reading.settings)}"
        )


def _require_whole(reading: Reading, groups: Mapping[str, Group], found: Collection[str]) -> None:
    """All modules inside a saved one must be in the file, and so must each name of `modules_to_save` that fits."""
    remedy = "the rest would stay the base's: save the adapter again"
    for name, group in groups.items():
        root = next(iter(group.values())).root or reading.settings.saved_root(name) or name
        inner = name[len(root) :]
        for module in reading.resolver.resolve(name):
            outer = module.removesuffix(inner) if module.endswith(inner) else module
            lacking = [m for m in reading.modules if f"{m}.".startswith(f"{outer}.") and m not in found]
            lacking = [m for m in lacking if wanted(reading.modules[m])]
            if lacking:
                raise reading.error(
                    f"the adapter saves {outer} in full (modules_to_save), but the file holds nothing of "
                    f"{listed(lacking)} inside it; {remedy}"
                )
    parts = [m.split(".") for m, shape in reading.modules.items() if wanted(shape)]
    holders = dict.fromkeys(".".join(part[:n]) for part in parts for n in range(1, len(part) + 1))
    for end in reading.settings.modules_to_save:
        there = [m for m in holders if m.endswith(end) and not reading.resolver.is_alias(m)]
        if there and not any(_outer_ends_with(name, end) for name in groups):
            raise reading.error(
                f"modules_to_save names {end}, which the base has ({listed(there)}), but the file holds nothing of it; "
                f"{remedy}"
            )


def _outer_ends_with(name: str, end: str) -> bool:
    parts = name.split(".")
    return any(".".join(parts[:n]).endswith(end) for n in range(1, len(parts) + 1))


def saved_module(reading: Reading, module: str, group: Group) -> LoraFactors | None:
    """The tensors of one module, None where they are what the base holds."""
    shape = reading.modules[module]
    held: dict[str, torch.Tensor] = {}
    for name, p in group.items():
        tensor = reading.tensors[p.key]
        whole = not (tensor.is_floating_point() or tensor.is_complex())
        if whole and saved_shape(shape, name) is None:
            continue  # num_batches_tracked and the like: never trained, without influence in evaluation
        check_saved(reading.place(p, module), shape, name, tensor, reading.resizable(module))
        held[name] = tensor
    place = reading.place(next(iter(group.values())), module)
    missing = [name for name in wanted(shape) if name not in held]
    if missing:
        raise place.error(
            f"the file holds {', '.join(group)} of it, but must hold {', '.join(missing)} too, which the base has; "
            f"save the adapter again"
        )
    if all(_is_own(shape, name, tensor) for name, tensor in held.items()):
        return None
    if shape.refused is not None:
        raise place.error(f"no adapter may save it here: {shape.refused}; retrain without it")
    if not shape.leaf:
        raise place.error(
            f"it has tensors of its own ({', '.join(shape.own)}) beside those of the modules inside it, which cannot "
            f"be served together; retrain with modules_to_save naming the modules inside it"
        )
    odd = [name for name in shape.own if shape.kind != "other" and name not in ("weight", "bias")]
    if odd:
        raise place.error(f"a {shape.kind} with {', '.join(odd)} cannot be saved in full here; retrain without it")
    if shape.kind == "linear" and "bias" in held:
        outputs = held["weight"].shape[1 if shape.transposed else 0]
        if held["bias"].shape[0] != outputs:
            raise reading.place(group["bias"], module).error(
                f"bias must have shape [{outputs}] as its weight has {outputs} outputs, got {shape_of(held['bias'])}"
            )
    for name, tensor in held.items():
        check_finite(reading.place(group[name], module), tensor)
    return pack(shape, held)


def wanted(shape: ModuleShape) -> tuple[str, ...]:
    """The tensors that a saved module must come with."""
    if shape.kind == "other":
        return tuple(shape.own)
    return ("weight", "bias") if has_bias(shape) else ("weight",)


def has_bias(shape: ModuleShape) -> bool:
    return shape.kind == "linear" and ("bias" in shape.own or shape.bias is not None)


def _is_own(shape: ModuleShape, name: str, tensor: torch.Tensor) -> bool:
    """Whether the base is known to hold the same."""
    own = own_value(shape, name)
    return own is not None and own.shape == tensor.shape and same_values(tensor, own)


def pack(shape: ModuleShape, held: Mapping[str, torch.Tensor]) -> LoraFactors:
    """Copies of the tensors of a module, in the layout of a saved site."""
    dtype = next(iter(held.values())).dtype
    for tensor in held.values():
        dtype = torch.promote_types(dtype, tensor.dtype)
    cast = {name: tensor.detach().to("cpu", dtype) for name, tensor in held.items()}
    if shape.kind == "other":
        flat = torch.cat([cast[name].reshape(-1) for name in shape.own])[None]
        return LoraFactors(flat, flat.new_zeros(0, 1), 1.0)
    weight = cast["weight"].t() if shape.transposed else cast["weight"]
    weight = weight.clone(memory_format=torch.contiguous_format)
    if shape.kind == "embedding":
        return LoraFactors(weight, weight.new_zeros(0, weight.shape[0]), 1.0)
    bias = cast["bias"].clone() if "bias" in cast else weight.new_zeros(weight.shape[0])
    return LoraFactors(weight, bias[None].contiguous(), 1.0)
