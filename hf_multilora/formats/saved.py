"""Modules that an adapter holds in full: PEFT's modules_to_save, and embeddings saved with their own vocabulary."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch

from hf_multilora.formats.base import SAVED, LoraFactors, ModuleShape, site_name
from hf_multilora.formats.checks import check_copy, check_finite, check_saved, own_value, same_values, saved_shape
from hf_multilora.formats.config import load_for_task
from hf_multilora.formats.keys import ParsedKey, listed
from hf_multilora.formats.reading import Reading

Group = Mapping[str, ParsedKey]  # parameter of one module -> its key


def saved_sites(reading: Reading, keys: Sequence[ParsedKey], lora: Collection[str]) -> dict[str, LoraFactors]:
    """The `:saved` sites among the parameters in a file.

    keys: those of the roles "saved" and "copy". lora: the modules of the base that the file has a LoRA pair for.
    Untrained copies of the base's own parameters are left out. AdapterError for what cannot be served.
    """
    full: dict[str, dict[str, ParsedKey]] = {}
    copies: dict[str, dict[str, ParsedKey]] = {}
    for p in keys:
        group = (full if _in_full(reading, p) else copies).setdefault(p.module, {})
        if group.setdefault(p.parameter, p) is not p:
            raise reading.error(
                f"two keys land on {p.module}.{p.parameter}: {group[p.parameter].key!r} and {p.key!r}; keep one"
            )
    _require_in_base(reading, full)
    reading.refuse([p for name, group in copies.items() if not reading.resolver.resolve(name) for p in group.values()])
    sites: dict[str, LoraFactors] = {}
    owner: dict[str, str] = {}
    for name, group in full.items():
        for module in reading.resolver.resolve(name):
            if owner.setdefault(module, name) != name:
                raise reading.error(f"{owner[module]} and {name} both land on module {module} of the base; keep one")
            factors = saved_module(reading, module, group)
            if factors is not None and module in lora:
                raise reading.place(next(iter(group.values())), module).error(
                    "the adapter trains it with LoRA and saves it in full (modules_to_save) as well, and only one of "
                    "both can be served; retrain with one of them"
                )
            if factors is not None:
                sites[module] = factors
    for name, group in copies.items():
        for p in group.values():
            for module in reading.resolver.resolve(name):
                shape, tensor = reading.modules[module], reading.tensors[p.key]
                if reading.by_shape and saved_shape(shape, p.parameter) == tuple(tensor.shape):
                    continue
                check_copy(reading.place(p, module), p, shape, tensor)
    return {site_name(module, SAVED): factors for module, factors in sites.items()}


def _in_full(reading: Reading, p: ParsedKey) -> bool:
    return p.role == SAVED or (not p.original and reading.settings.saves_in_full(p.module))


def _require_in_base(reading: Reading, full: Mapping[str, Group]) -> None:
    absent = [name for name in full if not reading.resolver.resolve(name)]
    if absent:
        close = reading.resolver.close_matches(absent)
        hint = f" (it has e.g. {listed(close)})" if close else ""
        raise reading.error(
            f"the adapter saves {listed(absent)} in full (modules_to_save), but the base has no such module{hint}; "
            f"{load_for_task(reading.settings)}"
        )


def saved_module(reading: Reading, module: str, group: Group) -> LoraFactors | None:
    """The tensors of one module, None where they are what the base holds."""
    shape = reading.modules[module]
    held: dict[str, torch.Tensor] = {}
    for name, p in group.items():
        tensor = reading.tensors[p.key]
        if not tensor.is_floating_point() and name not in wanted(shape):
            continue  # num_batches_tracked and the like: never trained, without influence in evaluation
        check_saved(reading.place(p, module), shape, name, tensor, is_resizable(reading, module))
        held[name] = tensor
    place = reading.place(next(iter(group.values())), module)
    missing = [name for name in wanted(shape) if name not in held]
    if missing:
        raise place.error(
            f"the file holds {sorted(group)} of it, but must hold {missing} too, which the base has; save the adapter "
            f"again"
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
    for name, tensor in held.items():
        check_finite(reading.place(group[name], module), tensor)
    return pack(shape, held)


def wanted(shape: ModuleShape) -> tuple[str, ...]:
    """The tensors that a saved module must come with."""
    if shape.kind == "other":
        return tuple(shape.own)
    return ("weight", "bias") if has_bias(shape) else ("weight",)


def is_resizable(reading: Reading, module: str) -> bool:
    """Whether the module, or one that is tied to it, may be saved with another number of rows."""
    shape = reading.modules[module]
    return shape.resizable or any(reading.modules[other].resizable for other in shape.tied)


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
