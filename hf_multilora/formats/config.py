"""The `adapter_config.json` of a PEFT LoRA adapter: what is served, what is refused, and how scales are resolved."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hf_multilora.formats.base import AdapterError

logger = logging.getLogger(__name__)

DEFAULTS = {"r": 8, "lora_alpha": 8}  # of PEFT 0.21, for configs that lack them

# PEFT's task_type -> the Auto class of Transformers that loads the base for it
AUTO_CLASSES = {
    "CAUSAL_LM": "AutoModelForCausalLM",
    "SEQ_2_SEQ_LM": "AutoModelForSeq2SeqLM",
    "SEQ_CLS": "AutoModelForSequenceClassification",
    "TOKEN_CLS": "AutoModelForTokenClassification",
    "QUESTION_ANS": "AutoModelForQuestionAnswering",
    "FEATURE_EXTRACTION": "AutoModel",
}

RETRAIN = "retrain without it, or merge the adapter into its own copy of the base"
CONVERT = (
    "save it again with PEFT's save_pretrained(..., path_initial_model_for_weight_conversion=...), which turns it into "
    "a plain LoRA of the unchanged base"
)


@dataclass(frozen=True)
class Refusal:
    """One setting of a config that plain LoRA cannot serve."""

    field: str
    name: str  # what users call it
    why: str
    remedy: str = RETRAIN
    applies: Callable[[Any], bool] = bool


REFUSALS = (
    Refusal("use_dora", "DoRA", "it rescales the base weight by a trained magnitude"),
    Refusal("lora_bias", "lora_bias", "lora_B has a trained bias"),
    Refusal("bias", "bias", "it trains biases of the base itself", applies=lambda v: v not in (None, "none")),
    Refusal("alora_invocation_tokens", "aLoRA (alora_invocation_tokens)", "it is active only after certain tokens"),
    Refusal("use_qalora", "QALoRA (use_qalora)", "it pools the input of lora_A"),
    Refusal("use_bdlora", "BD-LoRA (use_bdlora)", "its factors are block-diagonal"),
    Refusal("arrow_config", "Arrow (arrow_config)", "it routes every token over several adapters"),
    Refusal("kasa_config", "KaSA (kasa_config)", "it truncates the base weight and adds a diagonal factor"),
    Refusal("layer_replication", "layer_replication", "it repeats layers of the base"),
    Refusal("enable_lora", "enable_lora", "an early PEFT's merged projections are not read"),
)
# Initialisations that subtract from, quantize or replace the base's own weight when training starts.
CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
KEEPS_BASE = ("gaussian", "eva", "orthogonal", "mica")
# Known to PEFT (any version) or to the reader, and without influence on what the tensors of a file mean here.
HARMLESS = frozenset(
    "auto_mapping base_model_name_or_path corda_config ensure_weight_tying eva_config exclude_modules fan_in_fan_out "
    "id2label inference_mode init_lora_weights layers_pattern layers_to_transform loftq_config lora_alpha lora_dropout "
    "lora_ga_config megatron_config megatron_core merge_weights modules_to_save monteclora_config peft_type "
    "peft_version qalora_group_size r rank_pattern alpha_pattern revision runtime_config target_modules "
    "target_parameters task_type trainable_token_indices use_rslora velora_config".split()
)


@dataclass(frozen=True)
class LoraSettings:
    """The part of a config that decides what the tensors mean."""

    r: int
    alpha: float
    rslora: bool
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    modules_to_save: tuple[str, ...]
    base_model: str | None
    task_type: str | None = None
    token_indices: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # end of a module's name -> its tokens
    target_parameters: tuple[str, ...] = ()  # names of parameters, or ends of them
    target_modules: str | tuple[str, ...] | None = None
    exclude_modules: str | tuple[str, ...] | None = None
    peft_version: tuple[int, int, int] | None = None  # a released one

    def rank_and_alpha(self, names: Sequence[str]) -> tuple[int, float]:
        """(rank, alpha) of the module called `names`, the file's own name first; PEFT: the first pattern that fits."""
        return _first(self.rank_pattern, names, self.r), _first(self.alpha_pattern, names, self.alpha)

    def targets_parameter(self, name: str) -> bool:
        """Whether `target_parameters` names it, as PEFT compares them."""
        return any(name == target or name.endswith(f".{target}") for target in self.target_parameters)

    def targets_module(self, name: str) -> bool:
        """Whether the config lets PEFT train a linear of this name; without target_modules it may."""
        if self.exclude_modules is not None and _names(self.exclude_modules, name):
            return False
        return self.target_modules in (None, "all-linear") or _names(self.target_modules or (), name)

    def saves_in_full(self, module: str) -> bool:
        """Whether the file's `module` is (part of) one of `modules_to_save`, which PEFT takes for ends of names."""
        return self.saved_root(module) is not None

    def saved_root(self, module: str) -> str | None:
        """The outermost module around the file's `module` (or itself) that `modules_to_save` names."""
        parts = module.split(".")
        for n in range(1, len(parts) + 1):
            outer = ".".join(parts[:n])
            if any(outer.endswith(name) for name in self.modules_to_save):
                return outer
        return None

    def tokens_of(self, names: Sequence[str]) -> tuple[int, ...] | None:
        """The tokens whose rows the module called `names` has in the file; PEFT: the first end of a name that fits."""
        return next((ids for end, ids in self.token_indices.items() if any(n.endswith(end) for n in names)), None)

    def scaling(self, r: int, alpha: float) -> float:
        return alpha / math.sqrt(r) if self.rslora else alpha / r


def load_for_task(settings: LoraSettings) -> str:
    """What to do where the base has another head than the adapter was trained with."""
    auto_class = AUTO_CLASSES.get(settings.task_type or "")
    if auto_class is None:
        return f"load the base that the adapter was trained on ({settings.base_model}), with auto_class of its task"
    return f"load the base for the adapter's task (task_type {settings.task_type}: auto_class={auto_class!r})"


def _names(given: str | Sequence[str], name: str) -> bool:
    """Whether a regex for the whole of names, or a list of ends of them, fits `name`."""
    if isinstance(given, str):
        return re.fullmatch(given, name) is not None
    return any(name == end or name.endswith(f".{end}") for end in given)


def _first(patterns: Mapping[str, Any], names: Sequence[str], default: Any) -> Any:
    for name in names:
        for pattern, value in patterns.items():
            if re.match(rf"(.*\.)?({pattern})$", name):
                return value
        if name in patterns:  # a name that is no match of itself as a regex
            return patterns[name]
    return default


def _number(source: str, key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or abs(value) > 1e30 or value != value:
        raise AdapterError(f"{source}: {key} must be a finite number, got {value!r}")
    return float(value)


def _rank(source: str, key: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise AdapterError(f"{source}: {key} must be a whole number of at least 1, got {value!r}")
    return value


def _patterns(
    source: str, config: Mapping[str, Any], key: str, check: Callable[[str, str, Any], Any]
) -> dict[str, Any]:
    patterns = config.get(key) or {}
    if not isinstance(patterns, Mapping):
        raise AdapterError(f"{source}: {key} must be a mapping of module patterns, got {type(patterns).__name__}")
    for pattern in patterns:
        try:
            re.compile(f"({pattern})$")
        except re.error as error:
            raise AdapterError(f"{source}: {key} must hold regular expressions, got {pattern!r} ({error})") from error
    return {str(pattern): check(source, f"{key}[{pattern!r}]", value) for pattern, value in patterns.items()}


def _targets(source: str, config: Mapping[str, Any], key: str) -> str | tuple[str, ...] | None:
    """A regex, or names; a setting that PEFT would not take is as good as none."""
    given = config.get(key)
    if given is None or given == [] or given == "":
        return None
    if isinstance(given, str):
        try:
            re.compile(given)
        except re.error:
            return None
        return given
    if not isinstance(given, (list, tuple, set)) or not all(isinstance(name, str) for name in given):
        raise AdapterError(f"{source}: {key} must be a string or a list of names, got {given!r}")
    return tuple(given)


def _version(given: Any) -> tuple[int, int, int] | None:
    """(0, 19, 1) of "0.19.1"; None where it says nothing, as one in development: of before a change or after it."""
    found = re.match(r"(\d+)\.(\d+)\.(\d+)", given) if isinstance(given, str) and "dev" not in given else None
    return (int(found[1]), int(found[2]), int(found[3])) if found else None


def _token_indices(source: str, given: Any) -> dict[str, tuple[int, ...]]:
    """`trainable_token_indices` by end of a module's name; a list is for the one module that has rows in the file."""
    if given is None:
        return {}
    by_name = given if isinstance(given, Mapping) else {"": given}
    for name, ids in by_name.items():
        where = f"trainable_token_indices{f'[{name!r}]' if name else ''}"
        if not isinstance(ids, (list, tuple)) or any(isinstance(i, bool) or not isinstance(i, int) for i in ids):
            raise AdapterError(f"{source}: {where} must be a list of token ids, got {ids!r}")
        if len(set(ids)) != len(ids) or any(i < 0 for i in ids):
            raise AdapterError(f"{source}: {where} must hold different token ids of at least 0, got {list(ids)}")
    return {str(name): tuple(ids) for name, ids in by_name.items() if ids}


def _refuse(source: str, config: Mapping[str, Any]) -> None:
    """Raise for everything the config says that plain LoRA on an unchanged base does not do."""
    kind = config.get("peft_type")
    if kind != "LORA":
        raise AdapterError(f"{source}: peft_type must be LORA, got {kind!r}; only LoRA adapters can be served")
    for refusal in REFUSALS:
        value = config.get(refusal.field)
        if refusal.applies(value):
            raise AdapterError(
                f"{source}: {refusal.name} is not supported ({refusal.field}={value!r}): {refusal.why}; "
                f"{refusal.remedy}"
            )
    init = config.get("init_lora_weights", True)
    if init is None or isinstance(init, bool):
        return
    name = str(init).lower()
    if name.startswith(CHANGES_BASE):
        raise AdapterError(
            f"{source}: init_lora_weights={init!r} changes the base's own weights, so the adapter is wrong on the "
            f"unchanged base; {CONVERT}"
        )
    if name not in KEEPS_BASE:
        raise AdapterError(
            f"{source}: init_lora_weights must be true, false or one of {', '.join(KEEPS_BASE)}, got {init!r}: whether "
            f"it changes the base is unknown; if it does not, set it to true in adapter_config.json"
        )


def parse_settings(source: str, config: Mapping[str, Any]) -> LoraSettings:
    """The settings in `config`; AdapterError for what cannot be served, a warning for unknown keys that are set."""
    _refuse(source, config)
    known = HARMLESS | {refusal.field for refusal in REFUSALS}
    for key, value in config.items():
        if key not in known and value:
            logger.warning("%s: unknown setting %s=%r in the adapter's config is ignored", source, key, value)
    for key, value in DEFAULTS.items():
        if key not in config:
            logger.warning("%s: the adapter's config has no %s; PEFT's default %s is used", source, key, value)
    to_save = config.get("modules_to_save") or ()
    base = config.get("base_model_name_or_path")
    parameters = _targets(source, config, "target_parameters")
    return LoraSettings(
        r=_rank(source, "r", config.get("r", DEFAULTS["r"])),
        alpha=_number(source, "lora_alpha", config.get("lora_alpha", DEFAULTS["lora_alpha"])),
        rslora=bool(config.get("use_rslora", False)),
        rank_pattern=_patterns(source, config, "rank_pattern", _rank),
        alpha_pattern=_patterns(source, config, "alpha_pattern", _number),
        modules_to_save=(to_save,) if isinstance(to_save, str) else tuple(dict.fromkeys(map(str, to_save))),
        base_model=str(base) if base else None,
        task_type=str(config["task_type"]) if config.get("task_type") else None,
        token_indices=_token_indices(source, config.get("trainable_token_indices")),
        target_parameters=(parameters,) if isinstance(parameters, str) else parameters or (),
        target_modules=_targets(source, config, "target_modules"),
        exclude_modules=_targets(source, config, "exclude_modules"),
        peft_version=_version(config.get("peft_version")),
    )
