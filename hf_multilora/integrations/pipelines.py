"""Transformers' pipelines with one adapter per input: `pipeline(...)`, then `pipe(inputs, adapter_names=[...])`."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pkgutil import resolve_name
from typing import Any

import transformers
from transformers import AutoConfig
from transformers.pipelines import check_task, get_task

from ..config import MultiLoRAConfig
from ..model import MultiLoRAModel
from .pipeline_mixin import rebuild_pipeline, refuse_names

SETTINGS = frozenset(f.name for f in fields(MultiLoRAConfig))
# Arguments of transformers.pipeline that say how a base is loaded, beside model_kwargs
WHERE = ("revision", "token", "trust_remote_code", "local_files_only")
HOW = ("config", "dtype", "torch_dtype", "device_map")
PARTS = ("tokenizer", "feature_extractor", "image_processor", "video_processor", "processor")


def pipeline(
    task: str | None = None,
    model: Any = None,
    *args: Any,
    adapters: Sequence[str] | Mapping[str, str] = (),
    **kwargs: Any,
) -> Any:
    """`transformers.pipeline`, whose result also takes `adapter_names` per call.

    Args:
        task, model, args, kwargs: as for `transformers.pipeline`. `model` may be a MultiLoRAModel; another loaded model
            is changed in place, as by `MultiLoRAModel.from_pretrained`.
        adapters: folders or Hub ids, or {name: folder or Hub id}; later ones through `pipe.model.load_adapter`.
        kwargs: those that are settings of `MultiLoRAConfig` (max_loras, ...) go to the model, the others to
            `transformers.pipeline`.

    Returns the task's own pipeline, an instance of its class. Its calls take `adapter_names`: a list with one name (or
    None for the base) per input, or one string for all. Or the inputs are dicts that hold "adapter" beside the
    pipeline's own keys, also from datasets and generators: {"text": ..., "text_pair": ..., "adapter": "law"}; what is
    beside it under one key only is the input itself. A call that names none gets the default adapter. A classifier
    gives every row the labels of its adapter.

    Calls raise RoutingError for too few or too many names, UnknownAdapterError, and ValueError for adapters named in
    both ways or by some inputs only: before any work, or in a generator where it shows.
    """
    settings = {name: kwargs.pop(name) for name in SETTINGS & kwargs.keys()}
    refuse_names(kwargs, "name adapters in the calls of the pipeline, or with model.set_adapter")
    make: Any = transformers.pipeline
    bound = inspect.signature(make).bind(task, model, *args, **kwargs).arguments
    given: dict[str, Any] = {**bound, **bound.pop("kwargs", {})}
    if model is None:
        raise ValueError("pipeline must be given a model: a folder, a Hub id or a loaded model, got None")
    if isinstance(model, MultiLoRAModel):
        if adapters or settings:
            raise ValueError(
                f"pipeline must get adapters and settings with a model that has none yet, got a MultiLoRAModel and "
                f"{sorted([*settings, *(['adapters'] if adapters else [])])}; use model.load_adapter"
            )
        pipe = make(**given)
    elif isinstance(model, (str, os.PathLike)):
        loaded = _load(given, adapters, settings)
        pipe = make(**{**given, **loaded})
    else:
        pipe = make(**given)
        pipe.model = MultiLoRAModel.from_pretrained(pipe.model, adapters, **settings)
    mixed = rebuild_pipeline(pipe.__class__)  # its class cannot be assigned: the layouts differ
    mixed.__dict__.update(pipe.__dict__)
    return mixed


def _load(given: dict[str, Any], adapters: Any, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Takes what loads a base out of the arguments of `transformers.pipeline`, and returns what stands for it.

    MultiLoRAModel.from_pretrained loads the base, since it knows whether the checkpoint has the task's head.
    """
    base = os.fspath(given.pop("model"))
    given["task"] = task = given.get("task") or get_task(base, given.get("token"))
    _, found, _ = check_task(task)
    kind = given.get("pipeline_class") or found["impl"]
    kind = resolve_name(kind) if isinstance(kind, str) else kind
    where = {name: given[name] for name in WHERE if given.get(name) is not None}
    how = {name: given.pop(name) for name in HOW if name in given}
    loading = {**where, **how, **(given.get("model_kwargs") or {})}
    if isinstance(loading.get("config"), str):
        loading["config"] = AutoConfig.from_pretrained(loading["config"], **where)
    config = loading.get("config") or AutoConfig.from_pretrained(base, **where)
    auto_class = next((c for c in found["pt"] if type(config) in c._model_mapping), None)
    model = MultiLoRAModel.from_pretrained(base, adapters, auto_class=auto_class, **settings, **loading)
    parts = [part for part in PARTS if given.get(part) is None and getattr(kind, f"_load_{part}") is not False]
    return {"model": model, **dict.fromkeys(parts, base)}
