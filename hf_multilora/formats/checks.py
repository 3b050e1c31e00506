"""Checks of single tensors of an adapter file against the module of the base they are for."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from hf_multilora.cuts import both_here
from hf_multilora.formats.base import AdapterError, ModuleShape
from hf_multilora.formats.keys import ParsedKey

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
ROWS = 1 << 14  # rows compared at a time, so that a cast copy of a whole embedding is never made


@dataclass(frozen=True)
class Place:
    """Where a check is: what its errors name."""

    source: str
    key: str
    module: str  # path in the base

    def error(self, problem: str) -> AdapterError:
        return AdapterError(f"{self.source}: module {self.module}: {problem} (key {self.key!r})")


def shape_of(tensor: torch.Tensor) -> str:
    return str(list(tensor.shape))


def check_module(place: Place, parsed: ParsedKey, module: ModuleShape, tensor: torch.Tensor) -> None:
    """The module must be one that takes factors of the kind in the file."""
    if tensor.dim() > 2:
        raise place.error(
            f"Conv LoRA is not supported (a {tensor.dim()}-D factor {shape_of(tensor)}); retrain without it"
        )
    if module.refused is not None:
        raise place.error(f"no adapter may target it here: {module.refused}; retrain without it")
    if module.kind not in ("linear", "embedding", "router"):
        raise place.error(
            "LoRA must target a linear, Conv1D (GPT-2), embedding or router module, and this is none; retrain without "
            "it"
        )
    if parsed.embedding != (module.kind == "embedding"):
        held = "lora_embedding_A/B" if parsed.embedding else "lora_A/B"
        raise place.error(
            f"the base has a {module.kind} there, but the file holds {held}: it was trained on another base"
        )


def check_factor(place: Place, parsed: ParsedKey, module: ModuleShape, tensor: torch.Tensor) -> None:
    """One factor on its own: A [r, in] or B [out, r], in a float dtype."""
    name = f"lora_{'embedding_' if parsed.embedding else ''}{parsed.role.upper()}"
    wanted = f"[r, {module.in_features}]" if parsed.role == "a" else f"[{module.out_features}, r]"
    check_dense(place, name, wanted, tensor)
    axis, size = (1, module.in_features) if parsed.role == "a" else (0, module.out_features)
    if tensor.dim() != 2 or tensor.shape[axis] != size:
        vocabulary = (
            "; if it was trained after the vocabulary was resized, resize the base (resize_token_embeddings) first"
            if parsed.embedding or place.module.split(".")[-1] == "lm_head"
            else ""
        )
        raise place.error(
            f"{name} must have shape {wanted} on this base, got shape {shape_of(tensor)}: the adapter belongs to "
            f"another base{vocabulary}"
        )


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether no value is NaN or Inf. Told by the extremes, which are NaN where one value is: on a CPU one pass, where
    `torch.isfinite` takes several and over ten times as long."""
    if tensor.numel() == 0 or not tensor.is_floating_point():
        return True
    low, high = torch.aminmax(tensor.detach())
    return low.item() > -math.inf and high.item() < math.inf


def check_finite(place: Place, tensor: torch.Tensor) -> None:
    if not is_finite(tensor):
        kind = "NaN" if torch.isnan(tensor).any() else "Inf"
        raise place.error(
            f"weights must be finite, got {kind} in {shape_of(tensor)}; its training diverged: use an earlier save"
        )


def check_rank(place: Place, a: torch.Tensor, b: torch.Tensor, configured: int, max_rank: int | None) -> int:
    """The rank of a pair, which must be what the config says and at most `max_rank`."""
    r = a.shape[0]
    if b.shape[1] != r:
        raise place.error(f"lora_A and lora_B must have one rank, got shapes {shape_of(a)} and {shape_of(b)}")
    if r != configured:
        raise place.error(
            f"the config resolves to rank {configured} (r, rank_pattern), but the tensors have rank {r} (shapes "
            f"{shape_of(a)} "
            f"and {shape_of(b)}), so the scale is unknown; use the adapter_config.json it was saved with"
        )
    if max_rank is not None and r > max_rank:
        raise place.error(f"rank must be at most {max_rank} (max_lora_rank), got {r}; raise max_lora_rank")
    return r


def check_dense(place: Place, name: str, wanted: str, tensor: torch.Tensor) -> None:
    """Any tensor that is used: it must hold numbers."""
    if tensor.numel() == 0:
        raise place.error(
            f"{name} must have shape {wanted}, got the empty shape {shape_of(tensor)}: sharded weights (ZeRO-3, FSDP) "
            f"were saved without gathering them; save the adapter again"
        )
    if tensor.layout != torch.strided or tensor.device.type == "meta":
        raise place.error(f"{name} must be a dense tensor with data, got {tensor.layout} on {tensor.device}")
    if tensor.dtype not in DTYPES:
        raise place.error(f"{name} must be float32, float16, bfloat16 or float64, got {tensor.dtype}")


def check_saved(place: Place, module: ModuleShape, name: str, tensor: torch.Tensor, resizable: bool = False) -> None:
    """One parameter of a module that is saved in full; `resizable`: the number of its rows is its own."""
    own = saved_shape(module, name)
    if own is None:
        raise place.error(
            f"the adapter saves its {name} {shape_of(tensor)}, but the base has no such tensor there (it has "
            f"{', '.join(module.own) or 'none'}): the adapter belongs to another base"
        )
    check_dense(place, name, str(list(own)), tensor)
    got, rows = list(tensor.shape), 1 if module.transposed and name == "weight" else 0
    if got == list(own):
        return
    other = f"{name} must have shape {list(own)} on this base, got shape {got}"
    if len(got) != len(own) or any(a != b for axis, (a, b) in enumerate(zip(got, own, strict=True)) if axis != rows):
        raise place.error(f"{other}: the adapter belongs to another base")
    if not resizable:
        raise place.error(
            f"{other}: only the labels of a head and the vocabulary may be others than the base's; load a base of that "
            f"size"
        )


def saved_shape(module: ModuleShape, name: str) -> tuple[int, ...] | None:
    """The shape of a parameter in the base and in files, None where a module of this kind has none of that name."""
    if module.kind == "other" or name not in ("weight", "bias"):
        return tuple(module.own[name]) if name in module.own else None
    if name == "bias":
        return (module.out_features,) if module.kind == "linear" else None
    sizes = (module.in_features, module.out_features)
    return sizes if module.kind == "embedding" or module.transposed else sizes[::-1]


def check_copy(place: Place, parsed: ParsedKey, module: ModuleShape, tensor: torch.Tensor) -> None:
    """A copy of the base's own parameter is dropped by the caller, so it must hold what the base holds."""
    own, wanted = own_value(module, parsed.parameter), saved_shape(module, parsed.parameter)
    if wanted is not None and tuple(tensor.shape) != wanted:
        raise place.error(
            f"the file holds a {parsed.parameter} of shape {shape_of(tensor)}, the base's has shape {list(wanted)}: it "
            f"was trained with a resized vocabulary or another head; load a base of that size (resize_token_embeddings)"
        )
    if own is None:
        raise place.error(
            f"the file holds a full {parsed.parameter} of shape {shape_of(tensor)}, and whether it was trained cannot "
            f"be told from this base; name it in modules_to_save if it was, or save with save_embedding_layers=False "
            f"if it is an untrained copy"
        )
    if not same_values(tensor, own):
        raise place.error(
            f"the file holds a {parsed.parameter} {shape_of(tensor)} that differs from the base's; it was trained in "
            f"full, or the base is another one: load the base it was trained on"
        )


def own_value(module: ModuleShape, name: str) -> torch.Tensor | None:
    """The base's own parameter, in the layout of files; None where it is not known."""
    own = module.weight if name == "weight" else module.bias if name == "bias" else None
    if own is None or own.device.type == "meta" or module.kind == "other":
        return None
    return own.t() if module.transposed and name == "weight" else own


def same_values(copy: torch.Tensor, own: torch.Tensor) -> bool:
    """Whether two tensors of one shape are equal in the dtype of either (saving or loading may have rounded one). Of a
    sharded one this process's part is compared."""
    copy, own = both_here(copy, own)
    if copy.dtype not in DTYPES or own.dtype not in DTYPES:
        return False
    copy, own = copy.detach(), own.detach()
    if copy.dim() == 0:
        copy, own = copy[None], own[None]
    return all(
        torch.equal(part.to(ours.dtype), ours) or torch.equal(part, ours.to(part.dtype))
        for part, ours in (
            (copy[at : at + ROWS].cpu(), own[at : at + ROWS].cpu()) for at in range(0, copy.shape[0], ROWS)
        )
    )
