"""What happens around `forward` and `generate`: rows resolved, checked and routed, or split into passes."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.autograd import forward_ad
from transformers.utils import logging

from . import passes
from .entry import bind, parameter_names, prompts_of, rows_of, segments
from .heads import require_base_labels, require_widths
from .routing import RoutingError
from .runtime import Runtime
from .sources import source_of

logger = logging.get_logger(__name__)
# **kwargs of a forward would swallow these, and the rows get the base
TYPOS = {name: "adapter_names" for name in ("adapter_name", "adapter", "adapters")} | {"adapter_id": "adapter_ids"}


def forward(
    model: Any, run: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], names: Any, ids: Any
) -> Any:
    """One call of `run`, the base's own `__call__` or `forward` on `model`, its rows routed."""
    runtime: Runtime | None = model.__dict__.get("_multilora")
    if runtime is None:  # an instance forward that was made of ours and outlived unpatch
        if names is not None or ids is not None:
            raise RoutingError("the model must be patched to take adapters, unpatch() was called on it")
        return run(*args, **kwargs)
    if torch.compiler.is_compiling():  # routing is written outside traced code
        if names is not None or ids is not None:
            raise RoutingError(
                "inside torch.compile the rows must be routed outside the traced call: use "
                "`with model.adapters(names): compiled(...)`, or generate(..., adapter_names=names)"
            )
        runtime.routing.trace.enter()
        return run(*args, **kwargs)
    routed = names is not None or ids is not None or runtime.routing.active
    if runtime.sharded and routed and torch.is_grad_enabled():  # its parts are local tensors only without gradients
        with torch.no_grad():
            return forward(model, run, args, kwargs, names, ids)
    if getattr(model, "_is_replica", False):
        raise RoutingError("DataParallel shares one routing between threads; use one process per GPU, or one GPU")
    for typo, name in TYPOS.items():
        if typo in kwargs and typo not in runtime.parameters:
            raise TypeError(f"{typo!r} must be spelled {name!r}: a list with one entry per row")
    with runtime.lock:
        runtime.refresh()  # where an error came before its end as well
        if forward_ad._current_level >= 0 and (names is not None or ids is not None or runtime.routing.active):
            runtime.refuse_tangents()
        rows = runtime.resolve(names, ids)
        if rows is None and not runtime.routing.open:
            runtime.rest(seat=True)
            runtime.require_default_whole()
            require_base_labels(runtime, runtime.in_force(), bind(runtime.parameters, args, kwargs))
            return run(*args, **kwargs)
        if rows is not None and model.training and torch.is_grad_enabled():
            _refuse_checkpointing(model)
        arguments = bind(runtime.parameters, args, kwargs)
        n, tokens = rows_of(arguments, type(model).__name__)
        require_base_labels(runtime, runtime.in_force() if rows is None else rows, arguments)
        if rows is None:
            runtime.routing.require_own()
            runtime.routing.enter(n, tokens)
            return run(*args, **kwargs)
        if n == 1 and len(rows) > 1:
            rows = _per_token(rows, arguments, tokens)
            _require_apart(model, arguments)
            if _takes_use_cache(model):
                arguments["use_cache"] = False
            with runtime.request(rows, ragged=True):
                runtime.routing.enter(1, tokens)
                return run(**arguments)
        if n != len(rows):
            raise RoutingError(f"a forward must have one adapter per row, got {len(rows)} for {n} rows")
        limits = runtime.limits(rows)
        plan = passes.plan_passes(rows, limits)
        if len(plan) == 1:
            with runtime.request(rows):
                runtime.routing.enter(n, tokens)
                return run(*args, **kwargs)
        passes.check_forward(arguments, passes.why_split(rows, limits))
        if _takes_use_cache(model):
            arguments["use_cache"] = False  # as nobody asked for a cache, and those of the passes could not be merged
            if passes.caches(model.config):
                logger.warning_once(
                    f"a forward runs in passes, so it returns no cache: {passes.why_split(rows, limits)}"
                )
        cuts = [passes.cut(arguments, some, n) for some in plan]
        outputs = []
        for some, part in zip(plan, cuts, strict=True):
            with runtime.request([rows[i] for i in some]):
                runtime.routing.enter(len(some), tokens)
                outputs.append(run(**part))
        return passes.merge(outputs, plan)


def _takes_use_cache(model: Any) -> bool:
    """Whether forward takes use_cache, be it for a part that it hands its **kwargs to."""
    parameters = model._multilora.parameters
    return "use_cache" in parameters or ("kwargs" in parameters and passes.caches(model.config))


def _refuse_checkpointing(model: torch.nn.Module) -> None:
    """Raises RoutingError where the backward pass would compute layers again after the call's rows are gone."""
    if any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
        raise RoutingError(
            "with gradient checkpointing layers are computed again in the backward pass, after a call's rows are gone: "
            "run forward and backward inside `with model.adapters(names):`, or turn checkpointing off"
        )


def _require_apart(model: Any, arguments: Mapping[str, Any]) -> None:
    """Raises RoutingError where Transformers would let packed sequences, each with its adapter, attend to each other.

    It tells them apart by restarting positions, where it is given neither cache nor mask; flash attention also by
    `cu_seq_lens_q`. A mask [1, 1, T, T] is the caller's own.
    """
    mask = arguments.get("attention_mask")
    own = isinstance(mask, torch.Tensor) and mask.dim() == 4
    cached = [name for name in passes.CACHES if arguments.get(name) is not None]
    if arguments.get("use_cache"):
        cached.append("use_cache=True")
    flash = "flash" in (getattr(model.config, "_attn_implementation", None) or "")
    restarts = segments({"position_ids": arguments.get("position_ids")})
    classes: set[type] = {type(module) for module in model.modules()}
    carrying = sorted(cls.__name__ for cls in classes if _carries_state(cls))
    if carrying and arguments.get("seq_idx") is None:
        raise RoutingError(
            f"{', '.join(carrying)} carries a state along the row, from one sequence packed into it to the next: pass "
            f"one row per sequence (or seq_idx, where the base's kernels take it)"
        )
    if not (own or flash):
        told = {_positions_in_mask(cls) for cls in classes}
        if told >= {False} and True not in told:
            raise RoutingError(
                f"{type(model).__name__} makes its attention mask without position_ids, so sequences packed into one "
                f"row would see each other: pass one row per sequence, or a mask [1, 1, T, T] that keeps them apart"
            )
    wrong = cached
    if mask is not None and not own:
        wrong = [*cached, f"attention_mask {tuple(mask.shape)}"]
    elif not (own or flash) and restarts != segments(arguments):
        wrong = [*cached, f"position_ids with sequences of {restarts} tokens"]
    if wrong:
        raise RoutingError(
            f"sequences packed into one row must not see each other: pass position_ids that restart at 0, no "
            f"attention_mask (or one [1, 1, T, T]) and no cache, got {', '.join(wrong)}"
        )


# names of what such layers keep, or of the scans they run
CARRIES = r"conv_state|recurrent_state|ssm_state|selective_scan|delta_rule|attn_weights_inter|rwkv_linear_attention"


@functools.cache
def _carries_state(cls: type) -> bool:
    """Whether the class is a recurrent or convolutional layer over the tokens of a row, by its source."""
    return re.search(CARRIES, source_of(cls)) is not None


@functools.cache
def _positions_in_mask(cls: type) -> bool | None:
    """Whether the class gives position_ids to Transformers' masks, None where it makes no mask with them."""
    made = re.findall(r"(?:mask_kwargs = \{|create_\w*mask\()(?!\*\*)(.*?)\n\s*[})]", source_of(cls), re.DOTALL)
    return any("position_ids" in arguments for arguments in made) if made else None


def _per_token(rows: Sequence[int], arguments: Mapping[str, Any], tokens: int | None) -> list[int]:
    """Adapter ids of a packed row's tokens, from one per packed sequence."""
    lengths = segments(arguments)
    if lengths is None or len(lengths) != len(rows) or sum(lengths) != tokens:
        raise RoutingError(
            f"a forward must have one adapter per row, got {len(rows)} for 1 row of {tokens} tokens; for sequences "
            f"packed into one row pass cu_seq_lens_q, or position_ids that restart at 0, with {len(rows)} sequences, "
            f"got {lengths}"
        )
    return [i for i, length in zip(rows, lengths, strict=True) for _ in range(length)]


def generate(
    model: Any, base_generate: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], names: Any, ids: Any
) -> Any:
    """One `generate` on `model`, its prompts routed for the whole call."""
    runtime: Runtime = model._multilora
    if kwargs.get("cache_implementation") == "paged":  # Transformers then runs generate_batch
        require_one_adapter(model, names, ids)
        return base_generate(*args, **kwargs)
    with runtime.lock:
        rows = runtime.resolve(names, ids)
        arguments = bind(parameter_names(base_generate), args, kwargs)
        configs = [c for c in (arguments.get("generation_config"), model.generation_config) if c is not None]
        strictness = [passes.setting(name, arguments, configs) for name in ("guidance_scale", "num_beams")]
        if rows is None:
            if not runtime.routing.open:
                require_widths(runtime, runtime.in_force(), *strictness)
                return base_generate(*args, **kwargs)
            request = runtime.routing.stack[-1]
            _check_prompts(arguments, len(request.slots))
            base = [0] if any(slot < 0 for slot in request.slots) else []
            require_widths(runtime, [*runtime.in_force(), *base], *strictness)
            factors = set(request.factors)
            try:
                return base_generate(*args, **kwargs)
            finally:
                request.factors = factors
                runtime.routing.enter(len(request.slots))  # the block's own rows again, not those of beams
        _check_prompts(arguments, len(rows))
        require_widths(runtime, rows, *strictness)
        limits = runtime.limits(rows)
        plan = passes.plan_passes(rows, limits)
        if len(plan) == 1:
            with runtime.request(rows):
                return base_generate(*args, **kwargs)
        pad = passes.check_generate(arguments, configs, passes.why_split(rows, limits))
        cuts = [passes.cut(arguments, some, len(rows)) for some in plan]
        outputs = []
        for some, part in zip(plan, cuts, strict=True):
            with runtime.request([rows[i] for i in some]):
                outputs.append(base_generate(**part))
        return passes.merge_sequences(outputs, plan, pad)


def require_one_adapter(model: Any, names: Any, ids: Any) -> None:
    """Continuous batching calls the model from a thread of its own, which would wait for this thread's block."""
    runtime: Runtime = model._multilora
    with runtime.lock:
        routed = names is not None or ids is not None or runtime.routing.open
    if routed:
        raise NotImplementedError(
            "continuous batching (generate_batch, cache_implementation='paged') must run with one adapter for all "
            "requests, got adapters per row: call set_adapter(name) before it, or use generate with another cache"
        )


def _check_prompts(arguments: Mapping[str, Any], rows: int) -> None:
    """Before any work: with return sequences, one name per sequence would look like the right number of rows."""
    prompts = prompts_of(arguments)
    if prompts != rows:
        raise RoutingError(
            f"generate must have one adapter per prompt, got {rows} for {prompts} prompts; beams and return sequences "
            f"of a prompt use its adapter"
        )
