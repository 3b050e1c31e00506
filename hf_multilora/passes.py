"""A batch that needs more adapters than can be on the device at once, or modules that cannot mix: run in passes.

Rows are grouped so that each pass fits, their arguments sliced, the outputs put back in the batch's order. Only where a
split cannot change the answer: cache-free `forward` and deterministic decoding. Everything else raises before any work.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .catalogue import Limits
from .pool import FILL
from .store import CapacityError

# Arguments with one entry per row. Any other tensor with more than one row must be known before it is cut.
PER_ROW = frozenset({
    "input_ids", "inputs", "inputs_embeds", "attention_mask", "position_ids", "token_type_ids", "decoder_input_ids",
    "decoder_attention_mask", "decoder_inputs_embeds", "decoder_position_ids", "input_features", "input_values",
    "pixel_values", "bbox", "langs", "encoder_hidden_states", "encoder_attention_mask", "negative_prompt_ids",
    "negative_prompt_attention_mask", "mm_token_type_ids", "moe_mm_token_type_ids",
})  # fmt: skip
CACHES = ("past_key_values", "cache", "cache_params", "past_buckets_states", "mems")
# generate settings whose result depends on which rows run together, or that hand out rows while they run
SPLIT_CHANGES = ("streamer", "logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn", "assistant_model",
                 "custom_generate", "encoder_outputs", "max_time")  # fmt: skip


def plan_passes(ids: Sequence[int], limits: Limits) -> list[list[int]]:
    """Rows of each pass: at most `room` distinct adapters beside those that hold a slot anyway, which are in the first;
    or one adapter (base rows apart) where the modules cannot mix. One pass where there is room for none: it raises.
    """
    distinct = list(dict.fromkeys(ids)) if not limits.mixable else list(dict.fromkeys(i for i in ids if i))
    others = [i for i in distinct if i and i not in limits.held]
    fits = not others if limits.room < 1 else len(others) <= limits.room
    if len(distinct) <= 1 or (others and limits.room < 1) or (limits.mixable and fits):
        return [list(range(len(ids)))]
    if limits.mixable:
        groups = [set(others[k : k + limits.room]) for k in range(0, len(others), limits.room)]
        groups[0] |= limits.held | {0}
    else:
        groups = [{i} for i in distinct]
    return [[row for row, i in enumerate(ids) if i in group] for group in groups]


def why_split(ids: Sequence[int], limits: Limits) -> str:
    if not limits.mixable:
        return (
            "the adapters of this batch train modules whose rows cannot be attributed to batch rows, so each adapter "
            "would need a pass of its own"
        )
    distinct = set(ids) - {0}
    fit = limits.room + len(limits.held & distinct)
    needed = limits.max_loras + len(distinct) - fit
    beside = f", and others are pinned, in use or the default (max_loras={limits.max_loras})"
    return (
        f"this batch has {len(distinct)} distinct adapters, {fit} fit at once"
        f"{beside if fit < limits.max_loras else ''}: it needs max_loras={needed}"
    )


def refuse(what: str, reason: str) -> CapacityError:
    return CapacityError(
        f"{reason}; a split into passes would change the answer with {what}. Leave it out or split the batch"
    )


def check_forward(arguments: Mapping[str, Any], reason: str) -> None:
    for name in CACHES:
        if arguments.get(name) is not None:
            raise refuse(name, reason)
    if arguments.get("use_cache"):
        raise refuse("use_cache=True", reason)
    for name, value in arguments.items():
        if "labels" in name and value is not None:
            raise refuse(name, reason)
        if isinstance(value, Tensor) and value.requires_grad and torch.is_grad_enabled():
            raise CapacityError(
                f"{reason}; in passes slots change before the backward pass, and {name} requires gradients. Split the "
                f"batch"
            )


def check_generate(arguments: Mapping[str, Any], configs: Sequence[Any], reason: str) -> int:
    """Refuse what a split would change; returns the id that shorter sequences are padded with.

    configs: generation configs, the one passed to the call before the model's own, which fills in its None values.
    """
    for name in (*SPLIT_CHANGES, *CACHES):
        if arguments.get(name) not in (None, []):
            raise refuse(name, reason)
    for name in ("do_sample", "return_dict_in_generate", "max_time"):
        value = setting(name, arguments, configs)
        if value:
            raise refuse(f"{name}={value}", reason)
    pad = setting("pad_token_id", arguments, configs)
    eos = setting("eos_token_id", arguments, configs)
    beams = (setting("num_beams", arguments, configs) or 1) > 1
    missing = pad is None or (beams and not pad)  # beam search takes pad 0 for none, as Transformers does
    if eos is not None and missing:
        pad = torch.as_tensor(eos).flatten()[0]
    return 0 if pad is None else int(pad)  # without either, all rows end together


def setting(name: str, arguments: Mapping[str, Any], configs: Sequence[Any]) -> Any:
    """What `generate` will use: its own argument (None, too), else the first config that sets it."""
    if name in arguments:
        return arguments[name]
    return next((v for v in (getattr(config, name, None) for config in configs) if v is not None), None)


def caches(config: Any) -> bool:
    """Whether a model of this Transformers config returns a cache unless told not to."""
    return bool(getattr(config.get_text_config(), "use_cache", False))


def cut(arguments: Mapping[str, Any], rows: Sequence[int], batch: int) -> dict[str, Any]:
    """The arguments of a pass. Raises CapacityError for a tensor that has rows but is not known to be one per row."""
    some: dict[str, Any] = {}
    for name, value in arguments.items():
        if isinstance(value, Tensor) and value.dim() and value.shape[0] > 1:
            planes = name == "position_ids" and value.dim() > 2  # [3, rows, tokens] of models with images
            if name not in PER_ROW or value.shape[0] != batch or planes:
                raise _uncut(name, tuple(value.shape), batch)
            value = value[torch.as_tensor(rows, device=value.device)]
        elif isinstance(value, (list, tuple, Mapping)) and _holds_tensor(value):
            raise _uncut(name, type(value).__name__, batch)
        some[name] = value
    return some


def _uncut(name: str, what: object, batch: int) -> CapacityError:
    return CapacityError(
        f"this batch must run in passes, and {name} {what} is not known to hold one entry for each of its {batch} "
        f"rows; split the batch, or raise max_loras"
    )


def _holds_tensor(value: Any) -> bool:
    if isinstance(value, Mapping):
        value = list(value.values())
    return isinstance(value, Tensor) or (isinstance(value, (list, tuple)) and any(_holds_tensor(v) for v in value))


def merge(outputs: Sequence[Any], passes: Sequence[Sequence[int]]) -> Any:
    """Outputs of the passes as one, rows in the batch's order: tensors, tuples, lists and ModelOutputs of them.

    Where a tensor is wider in one pass than in another, as adapters brought heads with different labels, the others
    end in FILL.
    """
    first = outputs[0]
    if first is None:
        return None
    if isinstance(first, Tensor):
        for output, rows in zip(outputs, passes, strict=True):
            if output.dim() == 0 or output.shape[0] != len(rows):
                raise CapacityError(
                    f"this batch must run in passes, whose outputs must have one entry per row, got "
                    f"{tuple(output.shape)} for {len(rows)} rows; split the batch, or raise max_loras"
                )
        width = max(output.shape[-1] for output in outputs)
        if first.dim() > 1 and first.is_floating_point():
            outputs = [torch.nn.functional.pad(o, (0, width - o.shape[-1]), value=FILL) for o in outputs]
        order = torch.as_tensor([row for rows in passes for row in rows], device=first.device)
        return torch.cat(list(outputs))[order.argsort()]
    if isinstance(first, Mapping):  # a ModelOutput is one
        return type(first)(**{k: merge([output[k] for output in outputs], passes) for k in first})
    if isinstance(first, (tuple, list)):
        return type(first)(merge(list(some), passes) for some in zip(*outputs, strict=True))
    raise CapacityError(f"this batch must run in passes, whose outputs cannot be merged: {type(first).__name__}")


def merge_sequences(outputs: Sequence[Tensor], passes: Sequence[Sequence[int]], pad: int) -> Tensor:
    """Generated ids [rows * n, length of each pass] as one tensor, short ones padded on the right."""
    length = max(o.shape[1] for o in outputs)
    padded = [torch.nn.functional.pad(o, (0, length - o.shape[1]), value=pad) for o in outputs]
    per_row = [o.unflatten(0, (len(rows), -1)) for o, rows in zip(padded, passes, strict=True)]
    return merge(per_row, passes).flatten(0, 1)
