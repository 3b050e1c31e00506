"""Entry points: where a call of the model, its encoder or its decoder says how many rows and tokens really arrive."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .routing import Routing, RoutingError

# What carries the rows of a call, most telling first: a decoder step has encoder outputs too, an image model no ids
ROWS = (
    "inputs", "input_ids", "inputs_embeds", "decoder_input_ids", "decoder_inputs_embeds", "input_features",
    "input_values", "pixel_values", "hidden_states", "encoder_outputs",
)  # fmt: skip
TOKENS = frozenset({"input_ids", "inputs_embeds", "decoder_input_ids", "decoder_inputs_embeds", "hidden_states"})


def parameter_names(forward: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(p for p in inspect.signature(forward).parameters if p != "self")


def bind(names: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The call's arguments by name, positional ones included."""
    return dict(zip(names, args, strict=False)) | dict(kwargs)


def rows_of(arguments: Mapping[str, Any], where: str) -> tuple[int, int | None]:
    """(rows, tokens per row or None) of a call. Raises RoutingError where no argument tells."""
    for name in (*ROWS, *arguments):
        value = arguments.get(name)
        if name == "encoder_outputs" and value is not None:
            value = value[0]
        if isinstance(value, Tensor) and value.dim():
            tokens = value.shape[1] if name in TOKENS and value.dim() > 1 else None
            return value.shape[0], tokens
    raise RoutingError(
        f"a call with adapters must have a tensor with its rows in front, {where} got {sorted(arguments)}"
    )


def prompts_of(arguments: Mapping[str, Any]) -> int:
    """How many prompts a `generate` has; one where it is given none, so that it starts from the BOS token."""
    named = {name: arguments[name] for name in ROWS if arguments.get(name) is not None}
    return rows_of(named, "generate")[0] if named else 1


def segments(arguments: Mapping[str, Any]) -> list[int] | None:
    """Token counts of the sequences packed into one row, from `cu_seq_lens_q` or restarting `position_ids`."""
    for name in ("cu_seq_lens_q", "cu_seqlens"):
        if isinstance(arguments.get(name), Tensor):
            return arguments[name].diff().tolist()
    positions = arguments.get("position_ids")
    if isinstance(positions, Tensor) and positions.dim() == 2 and positions.shape[0] == 1:
        starts = (positions[0] == 0).nonzero().flatten()
        if starts.numel() and starts[0] == 0:
            end = torch.tensor([positions.shape[1]], device=starts.device)
            return torch.cat([starts, end]).diff().tolist()
    return None


class EntryHook:
    """Forward-pre-hook of an encoder or decoder that `generate` calls by itself. Copies and pickles with the model."""

    def __init__(self, routing: Routing, name: str, module: nn.Module) -> None:
        self.routing = routing
        self.name = name
        self.parameters = parameter_names(module.forward)

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling() or not self.routing.open:
            return
        rows, tokens = rows_of(bind(self.parameters, args, kwargs), self.name)
        self.routing.enter(rows, tokens, where=self.name)


def remove_entry_hooks(module: nn.Module) -> None:
    """Take the EntryHooks off, in place, leaving other hooks and their order."""
    for key, hook in list(module._forward_pre_hooks.items()):
        if isinstance(hook, EntryHook):
            del module._forward_pre_hooks[key]
            module._forward_pre_hooks_with_kwargs.pop(key, None)
