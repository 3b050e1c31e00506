"""Adapters of mixture-of-experts models from one description: written in every layout on disk, and merged by hand.

A description is a list of parts, dense random factors of one parameter each. The truth of a row is the model whose own
parameters got `scaling * B A`, computed here in float64: nothing of hf_multilora takes part.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.experts import PROJ, Mixture

STD = 0.25  # of the factors: deltas as large as the weights
PEFT, PEFT_18, EACH, PACKED = "PEFT", "PEFT 0.18", "each expert", "packed"  # layouts
VERSIONS = {PEFT: "0.19.1", PEFT_18: "0.18.0", EACH: "0.15.2", PACKED: None}
FIRST, SECOND = 0, 1


@dataclass(frozen=True)
class Part:
    """Factors of one parameter: a [r, in] and b [out, r]; of experts a [E or 1, r, in] and b [E or 1, out, r].

    half: which half of the columns (FIRST gate, SECOND up), None: all. experts: whose the entries are, None: all.
    """

    path: str
    parameter: str
    a: Tensor
    b: Tensor
    half: int | None = None
    experts: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Adapter:
    """What an adapter adds to which parameters, and how its files say so."""

    mixture: Mixture
    layout: str
    r: int
    alpha: float
    parts: tuple[Part, ...]
    rslora: bool = False
    config: Mapping[str, Any] = field(default_factory=dict)

    @property
    def scaling(self) -> float:
        return self.alpha / (math.sqrt(self.r) if self.rslora else self.r)

    @property
    def nbytes(self) -> int:
        """Bytes of all factors."""
        return sum(part.a.nbytes + part.b.nbytes for part in self.parts)


@torch.no_grad()
def merge(base: Any, adapter: Adapter) -> Any:
    """A copy of the model with the adapter in its weights."""
    model = copy.deepcopy(base)
    for part in adapter.parts:
        module = model.get_submodule(part.path)
        weight = getattr(module, part.parameter)
        whole = weight.double()
        a, b = (factor.to(weight.device).double() for factor in (part.a, part.b))
        delta = adapter.scaling * (b @ a)  # [out, in], of experts [E, out, in]
        if weight.dim() == 3:
            columns = whole.transpose(1, 2) if module.is_transposed else whole  # [E, out, in], the same storage
            if part.half is not None:  # one half after the other, or by turns
                columns = columns.chunk(2, dim=1)[part.half] if module.is_concatenated else columns[:, part.half :: 2]
            chosen = range(len(columns)) if part.experts is None else part.experts
            for i, expert in enumerate(chosen):
                columns[expert] += delta[i if len(delta) > 1 else 0]
        else:
            whole += delta
        weight.copy_(whole)
    return model


def factors(made: torch.Generator, r: int, sizes: tuple[int, int], a: int = 0, b: int = 0) -> tuple[Tensor, Tensor]:
    """A [r, in] and B [out, r] for sizes (out, in), or with `a` and `b` entries in front."""
    first = torch.randn(*([a] if a else []), r, sizes[1], generator=made)
    second = torch.randn(*([b] if b else []), sizes[0], r, generator=made)
    return first * STD, second * STD


def describe(
    mixture: Mixture,
    model: Any,
    layout: str,
    *,
    r: int,
    seed: int,
    projections: Iterable[str] = PROJ,
    experts: tuple[int, ...] | None = None,
    biases: bool = False,
    attention: bool = True,
    router: bool = False,
    others: bool = False,
    shared: bool = False,
    rslora: bool = False,
    **config: Any,
) -> Adapter:
    """An adapter with random factors.

    projections: of the experts; where a layout has gate and up in one, either stands for both. experts: only these.
    biases, attention, router, others (beside the experts): whether it has those too. shared: A of gate and up and B of
    down are one for all experts.
    """
    made, parts = torch.Generator().manual_seed(seed), []
    projections = tuple(projections)
    for path in mixture.paths(model, mixture.experts) if projections else ():
        module, count = model.get_submodule(path), model.get_submodule(path).num_experts
        n = count if experts is None else len(experts)
        for parameter, half in _targets(module, layout, projections):
            one, two = getattr(module, parameter).shape[1:]
            out, width = (two, one) if module.is_transposed else (one, two)
            sizes = (out if half is None else out // 2, width)
            down = parameter == "down_proj"
            entries = (1 if shared and not down else n, 1 if shared and down else n)
            parts.append(Part(path, parameter, *factors(made, r, sizes, *entries), half, experts))
            if biases:
                bias = f"{parameter}_bias"
                parts.append(Part(path, bias, *factors(made, r, tuple(getattr(module, bias).shape))))
    inside = (mixture.attention if attention else ()) + ((mixture.router,) if router else ())
    for path in mixture.paths(model, *inside, *(mixture.others if others else ())):
        parts.append(Part(path, "weight", *factors(made, r, tuple(model.get_submodule(path).weight.shape))))
    return Adapter(mixture, layout, r, r + 2.0, tuple(parts), rslora, config)


def _targets(module: Any, layout: str, projections: tuple[str, ...]) -> Iterator[tuple[str, int | None]]:
    """(parameter, half) of the experts' projections as the layout knows them."""
    gated = hasattr(module, "gate_up_proj")
    if gated and layout in (EACH, PACKED):
        yield from (("gate_up_proj", half) for half, name in enumerate(PROJ[:2]) if name in projections)
    elif gated and {"gate_proj", "up_proj"} & set(projections):
        yield "gate_up_proj", None
    elif not gated and "up_proj" in projections:
        yield "up_proj", None
    if "down_proj" in projections:
        yield "down_proj", None


def write(adapter: Adapter, model: Any, folder: Path) -> Path:
    """The adapter's files."""
    tensors: dict[str, Tensor] = {}
    modules: set[str] = set()
    parameters: set[str] = set()
    kept = {f"{part.path}.{part.parameter}": part for part in adapter.parts}
    for part in adapter.parts:
        module = model.get_submodule(part.path)
        pairs: Iterable[tuple[str, Tensor, Tensor]]
        if part.parameter != "weight":
            pairs = _LAYOUTS[adapter.layout](adapter, part, module, kept)
        else:
            pairs = [(part.path, part.a, part.b)]
        if adapter.layout in (PEFT, PEFT_18) and not isinstance(module, torch.nn.Linear):
            parameters.add(f"{part.path.split('.', adapter.mixture.stem.count('.') + 2)[-1]}.{part.parameter}")
        else:
            modules |= {name.rpartition(".")[2] for name, _, _ in pairs}
        for name, a, b in pairs:
            old = adapter.mixture.old_path(name) if adapter.layout == EACH else name
            key = f"base_model.model.{old}"
            tensors |= {f"{key}.lora_A.weight": a.contiguous(), f"{key}.lora_B.weight": b.contiguous()}
    task = "CAUSAL_LM" if adapter.mixture.generates else None
    settings = {
        "peft_type": "LORA", "task_type": task, "base_model_name_or_path": None, "r": adapter.r,
        "lora_alpha": adapter.alpha, "use_rslora": adapter.rslora, "target_modules": sorted(modules),
        "target_parameters": sorted(parameters) or None, "peft_version": VERSIONS[adapter.layout],
    }  # fmt: skip
    settings = {k: v for k, v in (settings | dict(adapter.config)).items() if k != "peft_version" or v is not None}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


Pairs = list[tuple[str, Tensor, Tensor]]  # (module as the file calls it, A, B)


def _nested(adapter: Adapter, part: Part, module: Any, kept: Mapping[str, Part]) -> tuple[str, bool]:
    """(what PEFT calls the layer of a parameter, whether it is 3-D): the first registered parameter lies innermost."""
    order = [name for name, _ in module.named_parameters(recurse=False) if f"{part.path}.{name}" in kept]
    inner = len(order) - 1 - order.index(part.parameter)
    return ".".join([part.path, *["base_layer"] * inner]), part.a.dim() == 3


def _peft(adapter: Adapter, part: Part, module: Any, kept: Mapping[str, Part]) -> Pairs:
    """A [(E, r), in] and B [out, (r, E)]; of a bias [E, out] A [r, out] and B [E, r]."""
    name, stacked = _nested(adapter, part, module, kept)
    if not stacked:
        return [(name, part.a, part.b)]
    return [(name, part.a.flatten(0, 1), part.b.permute(1, 2, 0).flatten(1))]


def _peft_18(adapter: Adapter, part: Part, module: Any, kept: Mapping[str, Part]) -> Pairs:
    """A [(E, r), out] and B [in, (r, E)]: the two in each other's place, unless the weights are [in, out]."""
    name, stacked = _nested(adapter, part, module, kept)
    if not stacked or module.is_transposed:
        return _peft(adapter, part, module, kept)
    return [(name, part.b.transpose(1, 2).flatten(0, 1), part.a.permute(2, 1, 0).flatten(1))]


def _each(adapter: Adapter, part: Part, module: Any, kept: Mapping[str, Part]) -> Pairs:
    """A linear per expert and projection, as in Transformers 4."""
    name = adapter.mixture.old[2 if part.parameter == "down_proj" else 0 if part.half == FIRST else 1]
    chosen = range(module.num_experts) if part.experts is None else part.experts
    return [(f"{part.path}.{e}.{name}", part.a[i], part.b[i]) for i, e in enumerate(chosen)]


def _packed(adapter: Adapter, part: Part, module: Any, kept: Mapping[str, Part]) -> Pairs:
    """A [E or 1, r, in] and B [E or 1, out, r] of w1 (gate), w3 (up) and w2 (down)."""
    name = "w2" if part.parameter == "down_proj" else "w3" if part.half == SECOND else "w1"
    return [(f"{part.path}.{name}", part.a, part.b)]


_LAYOUTS = {PEFT: _peft, PEFT_18: _peft_18, EACH: _each, PACKED: _packed}
