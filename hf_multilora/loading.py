"""From a base and adapters to a MultiLoRAModel, and back."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

from .census import CLASSIFIER, is_trained_copy, is_tuner, without_peft
from .config import MultiLoRAConfig
from .entry import EntryHook, remove_entry_hooks
from .formats import AUTO_CLASSES, adapter_from_tensors
from .formats.files import locate, open_tensors, parse_config
from .layers.base import AdaptedLayer, require_unwrappable
from .model import MultiLoRAModel, mix_model
from .parallel import require_known, sharded_modules
from .patches.facts import facts_of
from .renames import checkpoint_renames
from .runtime import Runtime

FEW = 8  # adapters that are loaded without a progress bar

# Arguments that say which files are read: the base's config is read from the same place as its weights
WHERE = ("cache_dir", "force_download", "local_files_only", "revision", "subfolder", "token", "trust_remote_code")


def load(
    base: Any,
    adapters: Sequence[str] | Mapping[str, str],
    config: MultiLoRAConfig,
    auto_class: Any,
    kwargs: dict[str, Any],
) -> Any:
    """See MultiLoRAModel.from_pretrained."""
    from transformers import PreTrainedModel

    named = name_adapters(adapters)
    if isinstance(base, (str, os.PathLike)):
        model, fresh = load_base(base, named, auto_class, kwargs)
        return build(model, named, config, fresh)
    require_no_arguments(auto_class, kwargs)
    if isinstance(base, MultiLoRAModel):
        raise ValueError("base is a MultiLoRAModel already; add adapters with load_adapter(path, name)")
    if isinstance(base, PreTrainedModel):
        return build(base, named, config)
    if hasattr(base, "peft_config") and hasattr(base, "unload"):
        return take_over(base, named, config)
    raise TypeError(f"base must be a folder, a Hub id, a PreTrainedModel or a PeftModel, got {type(base).__name__}")


def require_no_arguments(auto_class: Any, kwargs: Mapping[str, Any]) -> None:
    """Raises ValueError where a loaded model comes with arguments for loading one."""
    if auto_class is not None or kwargs:
        raise ValueError(
            f"base is a loaded model, so auto_class and Transformers' arguments must be left out, got "
            f"{sorted([*kwargs, *(['auto_class'] if auto_class is not None else [])])}"
        )


def name_adapters(adapters: Sequence[str] | Mapping[str, str]) -> dict[str, str]:
    """{name: path} of either form; raises ValueError where two paths would get one name."""
    if isinstance(adapters, Mapping):
        return {name: str(path) for name, path in adapters.items()}
    if isinstance(adapters, (str, os.PathLike)):
        raise TypeError(f"adapters must be a list of folders or Hub ids, or a dict of names, got {adapters!r}")
    named: dict[str, str] = {}
    for path in adapters:
        name = last_part(path)
        if name in named:
            raise ValueError(
                f"adapters must have different names, {named[name]} and {path} are both called {name!r}; "
                f"pass a dict {{name: path}}"
            )
        named[name] = str(path)
    return named


def last_part(path: str | os.PathLike[str]) -> str:
    return os.fspath(path).rstrip("/").rsplit("/", 1)[-1]


def load_base(
    base: str | os.PathLike[str], adapters: Mapping[str, str], auto_class: Any, kwargs: dict[str, Any]
) -> tuple[Any, frozenset[str]]:
    """The base, and the modules that the checkpoint of a classifier lacks, as it is an encoder's: random values."""
    kind = base_class(base, adapters, auto_class, kwargs)
    kwargs = kwargs | labels_for(kind, base, adapters, kwargs)
    model, info = kind.from_pretrained(base, output_loading_info=True, **kwargs)
    missing = info["missing_keys"] if CLASSIFIER.search(type(model).__name__) else ()
    return model, frozenset(key.rpartition(".")[0] for key in missing)


def labels_for(
    kind: Any, base: str | os.PathLike[str], adapters: Mapping[str, str], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Arguments that give a base whose checkpoint has no classifier the labels of the first adapter that has one."""
    import transformers

    if {"config", "num_labels", "id2label"} & kwargs.keys() or not CLASSIFIER.search(kind.__name__):
        return {}
    where = {key: kwargs[key] for key in WHERE if key in kwargs}
    config = transformers.AutoConfig.from_pretrained(base, **where)
    if any(CLASSIFIER.search(name) for name in config.architectures or ()):
        return {}
    return next(filter(None, map(own_labels, adapters.values())), {})


def own_labels(path: str) -> dict[str, Any]:
    """num_labels or id2label of the head that an adapter saved in full; empty without one."""
    files = locate(path)
    config = parse_config(files.source, files.config.read_bytes())
    names = config.get("modules_to_save") or ()
    with open_tensors(files.source, files.weights) as tensors:
        inside = [key for key in tensors if any(f".{name}." in key for name in names) and key.endswith(".weight")]
        count = min((tensors[key].shape[0] for key in inside if tensors[key].dim() == 2), default=None)
    if count is None:
        return {}
    named = config.get("id2label") or {}
    if len(named) != count:
        return {"num_labels": count}
    id2label = {int(i): label for i, label in named.items()}
    return {"id2label": id2label, "label2id": {label: i for i, label in id2label.items()}}


def base_class(
    base: str | os.PathLike[str], adapters: Mapping[str, str], auto_class: Any, kwargs: Mapping[str, Any]
) -> Any:
    """The class of Transformers, or its Auto class, that loads the base."""
    import transformers

    if auto_class is None:
        tasks = {task for task in map(task_type, adapters.values()) if task is not None}
        if len(tasks) > 1:
            raise ValueError(f"the adapters must share one task_type, got {sorted(tasks)}; pass auto_class")
        auto_class = AUTO_CLASSES.get(tasks.pop()) if tasks else None
    if auto_class is None:
        config = kwargs.get("config")
        if config is None:
            where = {key: kwargs[key] for key in WHERE if key in kwargs}
            config = transformers.AutoConfig.from_pretrained(base, **where)
        auto_class = (config.architectures or ["AutoModel"])[0]
    if isinstance(auto_class, str):
        name, auto_class = auto_class, getattr(transformers, auto_class, None)
        if auto_class is None:
            raise ValueError(f"auto_class must name a class of Transformers, got {name!r}")
    return auto_class


def task_type(path: str) -> str | None:
    files = locate(path)
    return parse_config(files.source, files.config.read_bytes()).get("task_type")


def build(model: Any, adapters: Mapping[str, str], config: MultiLoRAConfig, fresh: frozenset[str] = frozenset()) -> Any:
    """Patch a loaded model in place and register adapters; undone where one fails."""
    patch(model, config)
    model._multilora.fresh = fresh
    try:
        for name, path in progress(adapters):
            model.load_adapter(path, name)
    except BaseException:
        unpatch(model)
        raise
    return model


def progress(adapters: Mapping[str, str]) -> Any:
    """The items, of long lists under a progress bar of Transformers: a widget in notebooks, none where Transformers was
    told to be quiet (`disable_progress_bar`, `set_verbosity_error`)."""
    from transformers.utils import logging

    quiet = len(adapters) <= FEW or logging.get_verbosity() >= logging.ERROR
    return logging.tqdm(adapters.items(), desc="Loading adapters", disable=quiet)


def require_patchable(model: Any) -> None:
    """Raises for a model that is sharded, holds adapters of PEFT or shares a module with a MultiLoRAModel."""
    require_known(model)
    tuned = next((n for n, module in model.named_modules() if is_tuner(module) or is_trained_copy(module)), None)
    if tuned is not None:
        raise ValueError(
            f"the base must hold no adapters of PEFT, {tuned} does: they would go on for all rows. Pass the PeftModel, "
            f"or take them off first (delete_adapter of the model that load_adapter or add_adapter was called on)"
        )
    shared = next((name for name, module in model.named_modules() if isinstance(module, AdaptedLayer)), None)
    if shared is not None:
        raise ValueError(
            f"the base must share no module with another MultiLoRAModel, {shared} is adapted by one; unpatch() it "
            f"first, or copy.deepcopy the module"
        )


def patch(model: Any, config: MultiLoRAConfig) -> None:
    require_patchable(model)
    facts = facts_of(model.config)
    runtime = Runtime(model, config, facts, checkpoint_renames(model))
    for name, module in entry_points(model).items():
        module.register_forward_pre_hook(EntryHook(runtime.routing, name, module), with_kwargs=True)
    model.__dict__["_multilora"] = runtime
    own: Any = type(model)
    model.__class__ = mix_model(own)


def entry_points(model: Any) -> dict[str, Any]:
    """Parts that `generate` calls by themselves: the encoder and the decoder of an encoder-decoder."""
    if not getattr(model.config, "is_encoder_decoder", False):
        return {}
    found = {"the encoder": model.get_encoder(), "the decoder": model.get_decoder()}
    return {name: module for name, module in found.items() if module is not None and module is not model}


def unpatch(model: Any) -> Any:
    """Give the model its class, hooks and weights' storage back."""
    runtime: Runtime = model._multilora
    with runtime.lock:
        if runtime.routing.open:
            raise RuntimeError("unpatch must not run inside a call or an adapters() block")
        for module, slots in runtime.sites.values():
            if module.__dict__.get(slots.attribute) is slots:  # not so after an interrupt
                require_unwrappable(module)
        runtime.set_default(None)
        runtime.store.delete(*runtime.store.catalogue.entries)  # who still holds the runtime must find no adapters
        for name in list(runtime.sites):
            runtime.release_site(name)
        for module in entry_points(model).values():
            remove_entry_hooks(module)
        model.__class__ = type(model).__bases__[1]
        del model.__dict__["_multilora"]
    return model


def take_over(peft_model: Any, adapters: Mapping[str, str], config: MultiLoRAConfig) -> Any:
    """A PeftModel's adapters, read in memory and checked before it is unloaded."""
    import peft
    from peft import get_peft_model_state_dict

    if any(True for _ in sharded_modules(peft_model)):
        raise NotImplementedError(
            "a PeftModel whose base is sharded over several processes cannot be taken over: its adapters' tensors are "
            "in parts; pass the base's path and the adapters' folders"
        )
    layers = [module for module in peft_model.modules() if is_tuner(module)]
    merged = sorted({name for layer in layers for name in getattr(layer, "merged_adapters", ())})
    if merged:
        raise ValueError(
            f"no adapter of the PeftModel may be merged, {merged} are, so the weights are not the base's; call "
            f"unmerge_adapter() first"
        )
    base = peft_model.get_base_model()
    facts = facts_of(base.config)
    probe = Runtime(base, config, facts, checkpoint_renames(base))
    own = {}
    for name, settings in peft_model.peft_config.items():
        if name in adapters:
            raise ValueError(f"{name!r} is an adapter of the PeftModel and among adapters; choose another name")
        plain = json.loads(json.dumps(settings.to_dict(), default=_plain))
        plain["peft_version"] = peft.__version__  # whose layout is in memory, whatever its file said
        tensors = {k: v.detach().cpu() for k, v in get_peft_model_state_dict(peft_model, adapter_name=name).items()}
        own[name] = adapter_from_tensors(f"PeftModel:{name}", plain, tensors, probe.census(), **probe.reading())
    active = [] if any(getattr(layer, "disable_adapters", False) for layer in layers) else peft_model.active_adapters
    kept = {name: without_peft(module) for name, module in base.named_modules() if is_trained_copy(module)}
    base = peft_model.unload()
    for path, module in kept.items():  # `unload` leaves the active adapter's copy there
        parent, _, name = path.rpartition(".")
        setattr(base.get_submodule(parent), name, module)
    patch(base, config)
    try:
        for name, adapter in own.items():
            base._multilora.register(name, adapter, None, replace=False)
        for name, path in progress(adapters):
            base.load_adapter(path, name)
        if len(active) == 1 and active[0] in own:
            base.set_adapter(active[0])
    except BaseException:
        unpatch(base)
        raise
    return base


def _plain(value: Any) -> Any:
    """Sets and enums of a PeftConfig as JSON holds them."""
    return sorted(value) if isinstance(value, (set, frozenset)) else getattr(value, "value", str(value))
