"""A base without its weights: what its config tells of it, and adapters read for it."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from .formats import Adapter, read_adapter
from .loading import WHERE, base_class, labels_for
from .runtime import Runtime

# Transformers' arguments that say how weights are read, placed or computed with: no shape or dtype depends on them
NO_MATTER = (
    "adapter_kwargs allow_all_kernels attn_implementation device_map disable_mmap experts_implementation "
    "generation_config ignore_mismatched_sizes key_mapping low_cpu_mem_usage max_memory offload_buffers offload_folder "
    "offload_state_dict proxies tqdm_class use_kernels use_safetensors variant weights_only"
).split()
# ... and those that change modules while weights are read
CHANGING = (
    "quantization_config gguf_file distributed_config device_mesh tp_plan tp_size fusion_config kernel_config "
    "state_dict"
).split()


def skeleton(
    base: str | os.PathLike[str], adapters: Mapping[str, str], auto_class: Any, kwargs: Mapping[str, Any]
) -> Any:
    """The model that `from_pretrained` would load, on the meta device: its class, shapes and dtypes, no weights."""
    from transformers import AutoConfig, PreTrainedModel
    from transformers.initialization import meta_device_safe_creation_ops

    kind = base_class(base, adapters, auto_class, kwargs)
    concrete = isinstance(kind, type) and issubclass(kind, PreTrainedModel)
    where = {key: kwargs[key] for key in WHERE if key in kwargs}
    given = {**kwargs, **labels_for(kind, base, adapters, kwargs)}
    settings = {key: value for key, value in given.items() if key not in (*WHERE, *NO_MATTER)}
    dtype, old_spelling = settings.pop("dtype", None), settings.pop("torch_dtype", None)
    dtype = old_spelling if dtype is None else dtype
    trust = {"trust_remote_code": where.pop("trust_remote_code")} if "trust_remote_code" in where else {}
    if concrete:
        trust = {}
    config = copy.deepcopy(settings.pop("config", None))
    changing = sorted(key for key in CHANGING if settings.pop(key, None) is not None)
    if config is None:
        source = kind.config_class if concrete else AutoConfig
        config, settings = source.from_pretrained(base, return_unused_kwargs=True, **where, **trust, **settings)
    if getattr(config, "quantization_config", None) is not None:
        changing.append("quantization_config of its config")
    if changing:
        raise ValueError(
            f"{base}: a plan must know the base's parameters from its config alone, but {changing} changes them; load "
            f"the base and pass it instead"
        )
    if dtype not in (None, "auto"):
        settings["dtype"] = dtype
    make = kind._from_config if concrete else partial(kind.from_config, **trust)
    with torch.device("meta"), meta_device_safe_creation_ops():
        model = make(config, **settings)
    dtype = model.config.dtype
    if dtype is None:
        raise ValueError(
            f"{base}: a plan must know the dtype of the weights, but the base's config names none, so it depends on "
            f"the weights file; pass dtype="
        )
    for pattern, kept in model._get_dtype_plan(dtype).items():  # what stays in float32 whatever the dtype
        for name, parameter in model.named_parameters():
            if re.search(pattern.replace("*", ".*"), name):
                parameter.data = parameter.data.to(kept)
    return model


def read_for_skeleton(probe: Runtime, path: str) -> Adapter:
    """As a load reads it, but copies of base weights are told by their shape, and modules_to_save count as saved."""
    return read_adapter(path, probe.census(), by_shape=True, **probe.reading())
