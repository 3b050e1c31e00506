"""Facts about architectures whose modules are not called the regular way: one row per model type, names as regexes.

A regular model has no row. Found by running the models (tests/test_architectures.py is the sweep).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class Facts:
    """flat: modules that get their tokens flattened, row after row, [R * T, K].
    unmixable: modules whose input rows are not batch rows, so that a call must hold one adapter.
    refused: regex -> reason: modules that are never called, or whose calls cannot be served.
    aliases: a module that is never called -> the modules that do its work.
    """

    flat: tuple[str, ...] = ()
    unmixable: tuple[str, ...] = ()
    refused: Mapping[str, str] = field(default_factory=dict)
    aliases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def matches(self, column: str, name: str) -> bool:
        """Whether a regex of the column matches the end of the module path, at a dot."""
        return any(re.search(rf"(^|\.)(?:{pattern})$", name) for pattern in getattr(self, column))

    def refusal(self, name: str) -> str | None:
        return next((why for pattern, why in self.refused.items() if re.search(rf"(^|\.)(?:{pattern})$", name)), None)


UNUSED_WEIGHT = "its weight is used without calling the module"
SHARED = {"shared": ("encoder.embed_tokens", "decoder.embed_tokens")}

FACTS: dict[str, Facts] = {
    "opt": Facts(flat=("fc1", "fc2")),
    "t5": Facts(unmixable=("relative_attention_bias",), aliases=SHARED),
    "bart": Facts(aliases=SHARED),
    "qwen2_moe": Facts(flat=(r"shared_expert\..*", "shared_expert_gate")),
    "mamba": Facts(refused={"conv1d": UNUSED_WEIGHT, "dt_proj": UNUSED_WEIGHT}),
}


def facts_of(config: object) -> Facts:
    """The row of a Transformers config, by its model type."""
    return FACTS.get(getattr(config, "model_type", ""), Facts())


def is_distributed(parameter: torch.Tensor) -> bool:
    """Whether the parameter is a DTensor, without importing the distributed package."""
    return type(parameter).__name__ == "DTensor" or hasattr(parameter, "_local_tensor")
