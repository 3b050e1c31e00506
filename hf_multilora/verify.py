"""Parity of an adapter on this base: its rows in a mixed batch against the adapter merged into the weights."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .formats import LoraFactors
from .layers import AdaptedLayer, ModuleSlots
from .layers.augmented import unlay
from .layers.base import slots_of
from .layers.rows import home_of
from .merging import merged_tensors, whole_pairs
from .runtime import Runtime

# Difference of outputs that rounding explains: a merged weight is rounded once more than a separate delta
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 4e-2, torch.bfloat16: 8e-2}


@dataclass(frozen=True)
class VerifyReport:
    """ok: both differences are within `tolerance`. Differences are norms, as a share of the norm compared with.

    difference: the adapter's rows against the merged model. base_difference: base rows of the same batch against the
    bare model. effect: the merged model against the bare one. where: the first module whose output differs, if any.
    routed: the model chooses experts by scores in half precision, where rounding may choose others.
    """

    adapter: str
    ok: bool
    difference: float
    base_difference: float
    effect: float
    tolerance: float
    where: str | None
    routed: bool = False

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        first = "" if self.where is None else f" (first in {self.where})"
        verdict = "equals" if self.ok else f"DIFFERS{first} from"
        unsure = "; rounding may have chosen other experts for some tokens: load the base in float32 to know"
        return (
            f"adapter {self.adapter!r} {verdict} the merged model: difference {self.difference:.1e}, base rows "
            f"{self.base_difference:.1e}, tolerance {self.tolerance:.0e}, effect {self.effect:.1e}"
            + (" (within the tolerance, so this dtype cannot tell)" if self.effect <= self.tolerance else "")
            + (unsure if self.routed and not self.ok else "")
        )


@torch.no_grad()
def verify(model: Any, name: str, inputs: Mapping[str, Any] | None) -> VerifyReport:
    """Run inputs [rows, ...] twice in one batch, with the adapter and without, and compare both halves.

    inputs: arguments of `forward`, tensors with rows in front; None: random token ids. Raises ValueError where the
    model takes no token ids and no inputs are given, NotImplementedError for a weight that is not a plain tensor.
    """
    runtime: Runtime = model._multilora
    if runtime.sharded:
        raise NotImplementedError(
            "verify merges the adapter into the base's weights, which needs a base in one process, this one is "
            "sharded; verify it there"
        )
    entry = runtime.store.catalogue.entry(name)
    inputs = random_ids(model) if inputs is None else dict(inputs)
    rows = next((v.shape[0] for v in inputs.values() if isinstance(v, Tensor) and v.dim()), 0)
    if not rows:
        raise ValueError(f"inputs must hold tensors with rows in front (input_ids, ...), got {sorted(inputs)}")
    twice = {k: torch.cat([v, v]) if isinstance(v, Tensor) and v.dim() else v for k, v in inputs.items()}
    if entry.reader is not None:
        read = entry.read().factors
        factors = {site: read[given] for given, site in runtime.first_sites(read).items()}
    else:
        assert entry.host is not None  # it came from memory and stays there
        factors = entry.host.pairs()
    bare = [None] * rows
    with runtime.lock, _random_heads(runtime):
        with _watch(model) as mixed:
            both = _main(model(**twice, adapter_names=[name] * rows + bare))
        with _merged(runtime, factors), _watch(model) as alone:
            merged = _main(model(**inputs, adapter_names=bare))
        base = _main(model(**inputs, adapter_names=bare))
    tolerance = TOLERANCE.get(merged.dtype, TOLERANCE[torch.bfloat16])
    # a row's own logits are the first of the batch's widest
    difference = _gap(both[:rows, ..., : merged.shape[-1]], merged)
    base_difference = _gap(both[rows:, ..., : base.shape[-1]], base)
    # but for modules without rows in front, as of relative positions
    halves = {m: y for m, y in alone.items() if m in mixed and mixed[m].shape[0] == 2 * y.shape[0]}
    gaps = ((m, _gap(mixed[m][: y.shape[0], ..., : y.shape[-1]], y)) for m, y in halves.items())
    where = next((m for m, gap in gaps if not gap <= tolerance), None)
    ok = difference <= tolerance and base_difference <= tolerance
    effect = _gap(merged, base) if merged.shape == base.shape else math.inf
    chooses = any(shape.kind in ("experts", "router") for shape in runtime.census().values())
    routed = chooses and merged.dtype in (torch.float16, torch.bfloat16)
    return VerifyReport(name, ok, difference, base_difference, effect, tolerance, None if ok else where, routed)


@contextmanager
def _random_heads(runtime: Runtime) -> Iterator[None]:
    """Base rows may run through a head that the base's checkpoint lacks: its values are compared, not used."""
    fresh, runtime.fresh = runtime.fresh, frozenset()
    try:
        yield
    finally:
        runtime.fresh = fresh


def random_ids(model: Any, rows: int = 2, tokens: int = 12) -> dict[str, Tensor]:
    """Inputs of a model that takes token ids [rows, tokens]. Raises ValueError where it takes none."""
    if "input_ids" not in model._multilora.parameters:
        raise ValueError(f"{type(model).__name__} takes no input_ids; pass inputs=dict of its forward's arguments")
    embedding = model.get_input_embeddings()
    ids = torch.randint(0, embedding.num_embeddings, (rows, tokens), generator=torch.Generator().manual_seed(0))
    ids = ids.to(home_of(embedding))
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
        if name and not isinstance(module, AdaptedLayer):

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
    """The adapter's weights in the modules while the block runs. Each gets tensors of its own, so ties stay out."""
    originals: list[tuple[dict[str, Any], str, Any]] = []
    try:
        try:
            for site, pair in whole_pairs(factors).items():
                module = runtime.module_of(site)
                for slots in slots_of(module):  # of other adapters' LoRA too
                    if isinstance(slots, ModuleSlots):
                        unlay(module, slots)
                for name, tensor in merged_tensors(site, module, pair).items():
                    home: dict[str, Any] = module._parameters if name in module._parameters else module._buffers
                    originals.append((home, name, home[name]))
                    parameter = home is module._parameters
                    home[name] = nn.Parameter(tensor, requires_grad=False) if parameter else tensor
            yield
        finally:
            _put_back(originals)
    finally:  # once more, as an interrupt of the first would leave merged weights in the base
        _put_back(originals)


def _put_back(originals: list[tuple[dict[str, Any], str, Any]]) -> None:
    for home, name, tensor in reversed(originals):
        home[name] = tensor
