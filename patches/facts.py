"""Facts about architectures whose modules are not called the regular way: one row per model type, names as regexes.

A regular model has no row. Found by running the models: tests/test_architectures.py is the sweep.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields


@dataclass(frozen=True)
class Facts:
    """flat: modules that get their tokens flattened, row after row, [R * T, K].
    unmixable: modules whose input rows are not batch rows, so that a call must hold one adapter.
    refused: regex -> reason: modules that are never called, or whose calls cannot be served.
    aliases: a module that is never called -> the modules beside it that do its work.
    """

    flat: tuple[str, ...] = ()
    unmixable: tuple[str, ...] = ()
    refused: Mapping[str, str] = field(default_factory=dict)
    aliases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def __or__(self, other: Facts) -> Facts:
        def both(a: object, b: object) -> object:
            return (*a, *b) if isinstance(a, tuple) and isinstance(b, tuple) else {**a, **b}  # type: ignore[dict-item]

        return Facts(**{f.name: both(getattr(self, f.name), getattr(other, f.name)) for f in fields(self)})  # type: ignore[arg-type]

    def matches(self, column: str, name: str) -> bool:
        """Whether a regex of the column matches the end of the module path, at a dot."""
        return any(re.search(rf"(^|\.)(?:{pattern})$", name) for pattern in getattr(self, column))

    def refusal(self, name: str) -> str | None:
        return next((why for pattern, why in self.refused.items() if re.search(rf"(^|\.)(?:{pattern})$", name)), None)

    def aliases_in(self, modules: Iterable[str]) -> dict[str, tuple[str, ...]]:
        """The aliases of a model with these modules, by full path; targets it lacks are left out."""
        found, present = {}, set(modules)
        for alias, targets in self.aliases.items():
            for name in present:
                if name == alias or name.endswith(f".{alias}"):
                    outer = name.removesuffix(alias)
                    there = tuple(outer + target for target in targets if outer + target in present)
                    if there:
                        found[name] = there
        return found


TIME_FIRST = "this model puts time before rows, so its rows cannot be told from its tokens"
UNUSED = "its weight is used without calling the module"
RESCALED = "the model rescales its weight in evaluation, which a delta would not follow"
PEFT_REFUSES = "PEFT trains no such adapter, since the fused kernel of this model reads the weight by itself"

SHARED = {"shared": ("encoder.embed_tokens", "decoder.embed_tokens")}

# Names that mean the same wherever they occur
COMMON = Facts(
    flat=(r"shared_(expert|experts|mlp)\..*", "shared_expert_gate"),
    unmixable=("relative_attention_bias",),  # called with relative positions [T, T]
    aliases=SHARED,
)
MAMBA = Facts(refused={r"mixer\.out_proj": PEFT_REFUSES, "dt_proj": UNUSED})

FACTS: dict[str, Facts] = {
    "afmoe": Facts(flat=(r"router\.gate",)),
    "dbrx": Facts(flat=(r"router\.layer",)),
    "deberta": Facts(unmixable=("pos_proj", "pos_q_proj")),  # called with the relative positions' table [1, 2k, H]
    # the norm, too, is called with the relative positions' table [2k, H]
    "deberta-v2": Facts(unmixable=("pos_(query|key)_proj", r"encoder\.LayerNorm")),
    "falcon_h1": Facts(refused={r"mamba\.out_proj": PEFT_REFUSES}),
    "falcon_mamba": MAMBA,
    "fsmt": Facts(refused={".*": TIME_FIRST}),
    "gemma4_text": Facts(flat=(r"router\.proj",)),
    "hunyuan_v1_moe": Facts(flat=(r"gate\.wg",)),
    "jamba": Facts(flat=(r"feed_forward\.router",), refused={"dt_proj": UNUSED}),
    "jetmoe": Facts(flat=(r"router\.layer",)),
    "longformer": Facts(unmixable=(r"self\.(query|key|value)(_global)?",)),  # [T, R, H]
    "led": Facts(unmixable=(r"longformer_self_attn\.(query|key|value)(_global)?",)),
    "mamba": MAMBA,
    "mamba2": MAMBA,
    "muse_spark_text": Facts(flat=("(pre|post)_expert_proj",)),
    "nemotron_h": Facts(refused={r"mixer\.out_proj": PEFT_REFUSES}),
    "nllb-moe": Facts(flat=(r"router\.classifier",)),
    "opt": Facts(flat=("fc1", "fc2", r"layers\.\d+\.final_layer_norm")),
    "prophetnet": Facts(aliases={"word_embeddings": ("encoder.word_embeddings", "decoder.word_embeddings")}),
    "rwkv": Facts(refused={r"attention\.output|feed_forward\.value": RESCALED}),
    "sew-d": Facts(unmixable=("pos_(query|key)_proj", r"encoder\.LayerNorm")),
    "swin": Facts(unmixable=(r"blocks\.\d+\.attention\.[qkvo]_proj",)),  # windows of images [R * windows, tokens, H]
    "swinv2": Facts(unmixable=(r"blocks\.\d+\.attention\.(self|output)\..*",)),
    "switch_transformers": Facts(flat=(r"router\.classifier",)),
    "wav2vec2-bert": Facts(unmixable=("distance_embedding",)),  # called with relative positions [T, T]
    "wav2vec2-conformer": Facts(unmixable=("linear_pos",)),  # called with the relative positions' table [1, 2T - 1, H]
    "wavlm": Facts(unmixable=("rel_attn_embed",)),  # called with relative positions [T, T]
    "whisper": Facts(refused={r"encoder\.embed_positions": "it is called with positions [T] that all rows share"}),
    "xlnet": Facts(refused={".*": TIME_FIRST}),
}

# (model type, setting): facts that hold only where the setting is on
WHEN: dict[tuple[str, str], Facts] = {
    ("bloom", "slow_but_exact"): Facts(refused={"dense|dense_4h_to_h": UNUSED}),
    # called a second time, with the relative positions' table [1, 2k, H]
    ("deberta-v2", "share_att_key"): Facts(unmixable=("(query|key)_proj",)),
    ("sew-d", "share_att_key"): Facts(unmixable=("(query|key)_proj",)),
}


def facts_of(config: object) -> Facts:
    """What holds for a Transformers config: by its model type and by those of the configs inside it."""
    facts = COMMON
    for part in configs_in(config):
        kind = getattr(part, "model_type", "")
        facts |= FACTS.get(kind, Facts())
        for (model_type, setting), more in WHEN.items():
            if model_type == kind and getattr(part, setting, None):
                facts |= more
    return facts


def configs_in(config: object) -> Iterator[object]:
    """The config, if there is one, and the configs inside it (text_config, encoder, ...)."""
    if config is None:
        return
    yield config
    for value in vars(config).values():
        if getattr(value, "model_type", None) is not None:
            yield from configs_in(value)
