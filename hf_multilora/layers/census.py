"""What of a model an adapter may target: one entry per module, with the reason where it may not."""

from __future__ import annotations

import re
from collections.abc import Iterator

from torch import Tensor, nn

from ..formats import ModuleShape
from ..patches.facts import Facts

LINEAR_NAMES = ("Conv1D",)  # transformers.pytorch_utils.Conv1D: weight [in, out]
OWN_WEIGHT_USE = ("NonDynamicallyQuantizableLinear",)  # nn.MultiheadAttention reads its weight and never calls it
ROUTER = re.compile(r"Router|TopK")
SCALED = re.compile(r"ScaledWordEmbedding$")


def take_census(model: nn.Module, facts: Facts) -> dict[str, ModuleShape]:
    """Every module path of `model`, also second paths to one module, with what an adapter finds there.

    A tuner layer of a PEFT model is read as its base layer, under the name it has without PEFT.
    """
    census: dict[str, ModuleShape] = {}
    for name, module in _modules(model):
        shape = _shape(module)
        reason = shape.refused or facts.refusal(name)
        if reason is None and _inside_experts(name):
            reason = "modules of single experts are not supported yet"
        mixable = not facts.matches("unmixable", name)
        census[name] = ModuleShape(shape.kind, shape.in_features, shape.out_features, reason, mixable, shape.weight)
    return census


def _modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    wrapped: list[str] = []
    for name, module in model.named_modules(remove_duplicate=False):
        if any(name.startswith(prefix) for prefix in wrapped):
            continue
        if hasattr(module, "get_base_layer") and hasattr(module, "base_layer"):
            wrapped.append(name + ".")
            module = module.get_base_layer()
        if name:
            yield name, module


def _inside_experts(name: str) -> bool:
    return re.search(r"(^|\.)experts\.(.*\.)?(expert_)?\d+\.", name) is not None


def _shape(module: nn.Module) -> ModuleShape:
    kind = type(module).__name__
    weight = module._parameters.get("weight")
    plain = weight if isinstance(weight, Tensor) and weight.is_floating_point() and not weight.is_meta else None
    if isinstance(module, nn.Linear):
        refused = None
        if kind in OWN_WEIGHT_USE:
            refused = "it is never called: nn.MultiheadAttention uses its weight directly"
        elif ROUTER.search(kind):
            refused = "router gates are not supported yet"
        return ModuleShape("linear", module.in_features, module.out_features, refused, weight=plain)
    if kind in LINEAR_NAMES and isinstance(weight, Tensor) and weight.dim() == 2:
        return ModuleShape("linear", weight.shape[0], weight.shape[1])
    if isinstance(module, nn.Embedding):
        own = next(c for c in type(module).__mro__ if "forward" in c.__dict__)
        refused = None
        if own is not nn.Embedding and not SCALED.search(own.__name__):
            refused = f"the forward of {own.__name__} does not take token ids, so its look-up cannot be adapted"
        return ModuleShape("embedding", module.num_embeddings, module.embedding_dim, refused, weight=plain)
    return ModuleShape("other", refused=f"{kind} is neither a linear nor an embedding")
