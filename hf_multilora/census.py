"""What of a model an adapter may target: one entry per module, with the reason where it may not."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import MethodType
from typing import Any

from torch import Tensor, nn

from .formats import ModuleShape
from .moe import experts_of, router_of
from .patches.experts import GATHERING, PARTIAL
from .patches.facts import Facts, configs_in
from .sources import source_of

LINEAR_NAMES = ("Conv1D",)  # transformers.pytorch_utils.Conv1D: weight [in, out]
OWN_WEIGHT_USE = ("NonDynamicallyQuantizableLinear",)  # nn.MultiheadAttention reads its weight and never calls it
SCALED = re.compile(r"ScaledWordEmbedding$")
# classes whose head has num_labels outputs
CLASSIFIER = re.compile(r"For(Sequence|Token|Image|Audio|Video)Classification$")
HEAD = re.compile(r"(^|\.)(score|classifier|classification_head|head|heads)(\.|$)")
PLACEHOLDER = re.compile(r"^(image|video|audio|speech)_token_(id|index)$")


def take_census(model: nn.Module, facts: Facts) -> dict[str, ModuleShape]:
    """Every module path of `model`, also second paths to one module, with what an adapter finds there.

    What PEFT has wrapped is read as the base's own module, under the name it has without PEFT.
    """
    census: dict[str, ModuleShape] = {}
    ties, resizable = _ties(model), _resizable(model)
    outside = _outside_language(model)
    gathering: tuple[str, ...] = ()  # experts whose linears can be followed
    partial: tuple[str, ...] = ()  # modules that get some of the tokens only
    for name, module, around in _modules(model):
        if type(module).__name__ in GATHERING:
            gathering += (f"{name}.",)
        if type(module).__name__ in PARTIAL:
            partial += (f"{name}.",)
        shape = _shape(module)
        own = name.rpartition(".")[2]
        reason = shape.refused or facts.refusal(name)
        followed = shape.kind == "linear" and name.startswith(gathering)
        if reason is None and not followed and _inside_experts(name, shape.kind):
            holder = module if shape.kind == "other" else around
            reason = f"{type(holder).__name__} is outside Transformers' experts interface"
        if reason is None and shape.kind in ("router", "experts"):
            reason = kernelized(module, around)
        parent: type = type(around)
        by_name = reason is None and shape.kind not in ("router", "experts")
        if by_name and _reads_weight(parent, own, even_if_called=shape.kind == "other"):
            never = "" if shape.kind == "other" else "it is never called: "
            reason = f"{never}{parent.__name__} uses its weight directly"
        mixable = not facts.matches("unmixable", name) and not outside(name) and not name.startswith(partial)
        shapes = {key: tensor.shape for key, tensor in _own(module)}
        leaf = not any(True for child in module.children() for part in child.modules() for _ in _own(part))
        tied = tuple(other for other in ties.get(id(module._parameters.get("weight")), ()) if other != name)
        census[name] = replace(
            shape, refused=reason, mixable=mixable, own=shapes, leaf=leaf, resizable=resizable(name, module), tied=tied
        )
    return census


def output_heads(model: nn.Module) -> dict[str, int]:
    """The linears that give a model's logits, by path -> how many logits."""
    resizable = _resizable(model)
    linears = ((name, m) for name, m, _ in _modules(model) if isinstance(m, nn.Linear))
    return {name: module.out_features for name, module in linears if resizable(name, module)}


def _own(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Floating point parameters and persistent buffers of the module itself, in the order of its state dict."""
    buffers = ((k, v) for k, v in module._buffers.items() if k not in module._non_persistent_buffers_set)
    for name, tensor in (*module._parameters.items(), *buffers):
        if tensor is not None and tensor.is_floating_point():
            yield name, tensor


def _ties(model: nn.Module) -> dict[int, list[str]]:
    """id of a parameter -> the modules that have it as their `weight`, where these are several."""
    users: dict[int, list[str]] = {}
    seen: set[int] = set()
    for name, module, _ in _modules(model):
        weight = module._parameters.get("weight")
        if weight is not None and id(module) not in seen:
            users.setdefault(id(weight), []).append(name)
        seen.add(id(module))
    return {key: names for key, names in users.items() if len(names) > 1}


def _resizable(model: Any) -> Callable[[str, nn.Module], bool]:
    """Which modules an adapter may save with another number of rows: the embedding of token ids, the head that gives
    their logits, and linears with one output per label of a classifier."""
    if not hasattr(model, "get_output_embeddings"):  # a plain module
        return lambda name, module: False
    try:
        both = (model.get_input_embeddings(), model.get_output_embeddings())
        ends = {id(without_peft(module)) for module in both if module is not None}
    except NotImplementedError:  # it takes no token ids
        ends = set()
    classifier = CLASSIFIER.search(type(model).__name__) is not None
    labels = getattr(getattr(model, "config", None), "num_labels", None)

    def resizable(name: str, module: nn.Module) -> bool:
        if id(module) in ends:
            return True
        return classifier and getattr(module, "out_features", None) == labels and HEAD.search(name) is not None

    return resizable


def _outside_language(model: nn.Module) -> Callable[[str], bool]:
    """Which modules lie outside the language model, where another one's features replace placeholder tokens.

    How many images or frames each row has is not known there: with two for row 0 and none for row 1 the count is right
    and the rows are not.
    """
    config = getattr(model, "config", None)
    settings = {key for part in configs_in(config) for key, value in vars(part).items() if value is not None}
    if not any(PLACEHOLDER.match(key) for key in settings):
        return lambda name: False
    paths = {id(module): name for name, module in model.named_modules()}
    language = paths.get(id(model.get_decoder()), "")  # type: ignore[operator]
    head = paths.get(id(model.get_output_embeddings()))  # type: ignore[operator]
    if not language:
        return lambda name: False
    return lambda name: name != head and not name.startswith(f"{language}.")


def _reads_weight(parent: type, child: str, even_if_called: bool) -> bool:
    """Whether the class reads `self.child.weight` for its values, by its source, and never calls `self.child(...)`.

    even_if_called: whether it reads it at all, as a convolution's in a step with a cache.
    """
    source, path = source_of(parent), rf"self\.{re.escape(child)}"
    harmless = r"\.(dtype|device|shape|data|requires_grad|size|ndim)\b|\s*=[^=]"
    if re.search(rf"(?<!Parameters\(){path}\.weight\b(?!{harmless})", source) is None:
        return False
    return even_if_called or re.search(rf"{path}\(", source) is None


def _modules(parent: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module, nn.Module]]:
    """(path, module, its parent) of every module below `parent`, by all its paths, as it is without PEFT."""
    for own, child in parent._modules.items():
        if child is not None:
            module, path = without_peft(child), f"{prefix}{own}"
            yield path, module, parent
            yield from _modules(module, f"{path}.")


def without_peft(module: Any) -> Any:
    """The base's own module inside what PEFT has put around it, if it has."""
    while True:
        if is_tuner(module):
            module = module.get_base_layer()
        elif is_trained_copy(module):
            module = module.original_module
        else:
            return module


def is_tuner(module: Any) -> bool:
    """Whether the module is a layer that PEFT has wrapped around one of the base's."""
    return hasattr(module, "get_base_layer") and hasattr(module, "base_layer")


def is_trained_copy(module: Any) -> bool:
    """Whether PEFT keeps copies of a base module, or of rows of it, for its adapters here (modules_to_save, tokens)."""
    return hasattr(module, "original_module") and (
        hasattr(module, "modules_to_save") or hasattr(module, "token_adapter")
    )


def kernelized(*modules: nn.Module) -> str | None:
    """Why experts or a router cannot be followed inside these modules: one got the forward of another class, as kernels
    of the Hub do (use_kernels), and such a forward reads the weights itself."""
    for module in modules:
        own = module.__dict__.get("forward")
        if isinstance(own, MethodType) and own.__func__ is not type(module).forward:
            return f"{type(module).__name__} has the forward of a kernel ({own.__qualname__}); load it without kernels"
    return None


def _inside_experts(name: str, kind: str) -> bool:
    """Whether the module belongs to single experts, or holds several experts' own tensors."""
    single = re.search(r"(^|\.)experts\.(.*\.)?(expert_)?\d+\.", name) is not None
    return single or (kind == "other" and re.search(r"(^|\.)experts(\.|$)", name) is not None)


def _shape(module: nn.Module) -> ModuleShape:
    special = experts_of(module) or router_of(module)
    if special is not None:
        return special
    kind = type(module).__name__
    weight = module._parameters.get("weight")
    plain = weight if isinstance(weight, Tensor) and weight.is_floating_point() and not weight.is_meta else None
    bias = getattr(module, "bias", None)
    if isinstance(module, nn.Linear):
        refused = None
        if kind in OWN_WEIGHT_USE:
            refused = "it is never called: nn.MultiheadAttention uses its weight directly"
        return ModuleShape("linear", module.in_features, module.out_features, refused, weight=plain, bias=bias)
    if kind in LINEAR_NAMES and isinstance(weight, Tensor) and weight.dim() == 2:
        return ModuleShape("linear", weight.shape[0], weight.shape[1], bias=bias, transposed=True)
    if isinstance(module, nn.Embedding):
        own = next(c for c in type(module).__mro__ if "forward" in c.__dict__)
        refused = None
        if own is not nn.Embedding and not SCALED.search(own.__name__):
            refused = f"the forward of {own.__name__} does not take token ids, so its look-up cannot be adapted"
        return ModuleShape("embedding", module.num_embeddings, module.embedding_dim, refused, weight=plain)
    return ModuleShape("other")
