"""What the parts of one reading share: the file's tensors, its settings, and the base they are for."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from hf_multilora.formats.base import AdapterError, ModuleShape
from hf_multilora.formats.checks import Place
from hf_multilora.formats.config import LoraSettings
from hf_multilora.formats.keys import NameResolver, ParsedKey, listed

# What a key belongs to that is not read: (pattern, the feature's name)
EXTRAS = (
    (r"lora_magnitude_vector", "DoRA (lora_magnitude_vector)"),
    (r"lora_(embedding_)?[AB](\..*)?\.bias$", "lora_bias (a trained bias on a LoRA factor)"),
    (r"lora_diag", "KaSA (lora_diag)"),
    (r"lora_velora", "VeLoRA (lora_velora_embed)"),
    (r"lora_monteclora", "MonteCLoRA (lora_monteclora_sampler)"),
    (r"token_adapter|trainable_tokens", "trainable_token_indices (trained token rows)"),
    (r"lora_(E|ranknum)\b", "AdaLoRA"),
    (r"modules_to_save|original_module", "modules_to_save (fully trained modules)"),
    (r"(^|\.)experts\.", "weights of the experts themselves (trained in full)"),
    (r"\.bias$", "trained biases of the base"),
)
REMEDY = "nothing of an adapter is dropped: retrain without it, or merge the adapter into its own copy of the base"


@dataclass(frozen=True)
class Reading:
    """One adapter file being read for one base."""

    source: str
    settings: LoraSettings
    tensors: Mapping[str, torch.Tensor]
    modules: Mapping[str, ModuleShape]
    resolver: NameResolver
    by_shape: bool = False  # the base has no values: what has the shape of one of its own parameters is a copy of it

    def place(self, key: ParsedKey, module: str) -> Place:
        return Place(self.source, key.key, module)

    def error(self, problem: str) -> AdapterError:
        return AdapterError(f"{self.source}: {problem}")

    def resizable(self, module: str) -> bool:
        """Whether the module, or one that is tied to it, may be saved with another number of rows."""
        shape = self.modules[module]
        return shape.resizable or any(self.modules[other].resizable for other in shape.tied)

    def vocabulary(self) -> tuple[list[str], list[str]]:
        """(embeddings of token ids, linears that give their logits) of the base."""
        named = {m: shape for m, shape in self.modules.items() if self.resizable(m) and not self.resolver.is_alias(m)}
        tables = [m for m, shape in named.items() if shape.kind == "embedding"]
        sizes = {self.modules[m].in_features for m in tables}
        return tables, [m for m, shape in named.items() if shape.kind == "linear" and shape.out_features in sizes]

    def refuse(self, extras: Sequence[ParsedKey]) -> None:
        """Raises AdapterError where there are keys that nothing here reads."""
        if not extras:
            return
        first = extras[0].key
        feature = next((name for pattern, name in EXTRAS if re.search(pattern, first)), None)
        what = f"{feature} is not supported" if feature else "these are no tensors of a LoRA adapter"
        raise self.error(f"{len(extras)} tensors cannot be used: {listed(p.key for p in extras)}; {what}; {REMEDY}")
