"""Parity of an adapter on this base: its rows in a mixed batch against the adapter merged into the weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .formats import LoraFactors
from .layers import LoraLayer
from .layers.augmented import unlay
from .runtime import Runtime

# Difference of outputs that rounding explains: a merged weight is rounded once more than a separate delta
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 4e-2, torch.bfloat16: 8e-2}


@dataclass(frozen=True)
class VerifyReport:
    """ok: both differences are within `tolerance`. Differences are norms, as a share of the norm compared with.

    difference: the adapter's rows against the merged model. base_difference: base rows of the same batch against the
    bare model. effect: the merged model against the bare one. where: the first module whose output differs, if any.
    """

    adapter: str
    ok: bool
    difference: float
    base_difference: float
    effect: float
    tolerance: float
    where: str | None

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        verdict = "equals" if self.ok else f"DIFFERS (first in {self.where}) from"
        return (
            f"adapter {self.adapter!r} {verdict} the merged model: difference {self.difference:.1e}, base rows "
            f"{self.base_difference:.1e}, tolerance {self.tolerance:.0e}, effect {self.effect:.1e}"
            + (" (within the tolerance, so this dtype cannot tell)" if self.effect <= self.tolerance else "")
        )


@torch.no_grad()
def verify(model: Any, name: str, inputs: Mapping[str, Any] | None) -> VerifyReport:
    """Run inputs [rows, ...] twice in one batch, with the adapter and without, and compare both halves.

    inputs: arguments of `forward`, tensors with rows in front; None: random token ids. Raises ValueError where the
    model takes no token ids and no inputs are given, NotImplementedError for a weight that is not a plain tensor.
    """
    runtime: Runtime = model._multilora
    entry = runtime.store.catalogue.entry(name)
    inputs = random_ids(model) if inputs is None else dict(inputs)
    rows = next((v.shape[0] for v in inputs.values() if isinstance(v, Tensor) and v.dim()), 0)
    if not rows:
        raise ValueError(f"inputs must hold tensors with rows in front (input_ids, ...), got {sorted(inputs)}")
    twice = {k: torch.cat([v, v]) if isinstance(v, Tensor) and v.dim() else v for k, v in inputs.items()}
    if entry.reader is not None:
        factors = {runtime.first_path(k): v for k, v in entry.read().factors.items()}
    else:
        assert entry.host is not None  # it came from memory and stays there
        factors = {k: LoraFactors(a, b.t(), 1.0) for k, (a, b) in entry.host.factors.items()}
    bare = [None] * rows
    with runtime.lock:
        with _watch(model) as mixed:
            both = _main(model(**twice, adapter_names=[name] * rows + bare))
        with _merged(runtime, factors), _watch(model) as alone:
            merged = _main(model(**inputs, adapter_names=bare))
        base = _main(model(**inputs, adapter_names=bare))
    tolerance = TOLERANCE.get(merged.dtype, TOLERANCE[torch.bfloat16])
    difference, base_difference = _gap(both[:rows], merged), _gap(both[rows:], base)
    where = next((m for m, y in alone.items() if m in mixed and not _gap(mixed[m][:rows], y) <= tolerance), None)
    ok = difference <= tolerance and base_difference <= tolerance
    return VerifyReport(name, ok, difference, base_difference, _gap(merged, base), tolerance, None if ok else where)


def random_ids(model: Any, rows: int = 2, tokens: int = 12) -> dict[str, Tensor]:
    """Inputs of a model that takes token ids [rows, tokens]. Raises ValueError where it takes none."""
    if "input_ids" not in model._multilora.parameters:
        raise ValueError(f"{type(model).__name__} takes no input_ids; pass inputs=dict of its forward's arguments")
    vocabulary = model.get_input_embeddings().num_embeddings
    ids = torch.randint(0, vocabulary, (rows, tokens), generator=torch.Generator().manual_seed(0)).to(model.device)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = ids.flip(1)
    return inputs


def _main(output: Any) -> Tensor:
    """The first floating point tensor of an output: logits, or the last hidden state."""
    values = output.values() if isinstance(output, Mapping) else output
    return next(v for v in values if isinstance(v, Tensor) and v.is_floating_point() and v.dim() > 1)


def _gap(a: Tensor, b: Tensor) -> float:
    """Norm of the difference as a share of b's norm: single values of half precision can be far off by rounding."""
    return float((a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-12))


@contextmanager
def _watch(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Collect what modules that are not adapted return (hooks of adapted ones see the base output)."""
    seen: dict[str, Tensor] = {}
    handles = []
    for name, module in model.named_modules():
        if name and not isinstance(module, LoraLayer):

            def keep(_m: Any, _i: Any, output: Any, name: str = name) -> None:
                first = output[0] if isinstance(output, tuple) and output else output
                if isinstance(first, Tensor) and first.is_floating_point() and first.dim() > 1:
                    seen.setdefault(name, first)

            handles.append(module.register_forward_hook(keep))
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _merged(runtime: Runtime, factors: Mapping[str, LoraFactors]) -> Iterator[None]:
    """The adapter added to the weights while the block runs. Each module gets a weight of its own, so ties stay out."""
    originals: list[tuple[nn.Module, nn.Parameter | None]] = []
    try:
        for name, pair in factors.items():
            module = runtime.sites[name][0]
            weight = module._parameters.get("weight")
            delta = pair.scaling * (pair.b.double() @ pair.a.double())  # [out, in], embedding: [H, V]
            if weight is None or not weight.is_floating_point() or weight.numel() != delta.numel():
                raise NotImplementedError(f"{name}: only a plain weight can be merged, it is {type(weight).__name__}")
            delta = delta if isinstance(module, nn.Linear) else delta.t()  # Conv1D [in, out], embedding [V, H]
            unlay(module, runtime.sites[name][1])
            merged = (weight.double() + delta.to(weight.device)).to(weight.dtype)
            originals.append((module, weight))
            module._parameters["weight"] = nn.Parameter(merged, requires_grad=False)
        yield
    finally:
        for module, weight in originals:
            module._parameters["weight"] = weight
