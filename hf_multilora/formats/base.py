"""What every adapter file is read into: one pair of factors per module of the base."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch


class AdapterError(ValueError):
    """An adapter that cannot be served as it is: says what must hold, what it got, which key or module, what to do."""


@dataclass(frozen=True)
class ModuleShape:
    """One module of the base as an adapter sees it.

    `kind` is "linear" (also GPT-2's Conv1D), "embedding" or "other"; `refused` says why no adapter may target it.
    `mixable` is False where the rows of its input cannot be attributed to batch rows.
    """

    kind: str
    in_features: int = 0  # linear: K; embedding: rows of the table V
    out_features: int = 0  # linear: N; embedding: width H
    refused: str | None = None
    mixable: bool = True
    weight: torch.Tensor | None = None  # the base's own weight [out, in] or [V, H], to compare copies with
    bias: torch.Tensor | None = None  # the base's own bias [out], for the same purpose


@dataclass(frozen=True)
class LoraFactors:
    """delta = scaling * B (A x) of one module. Embedding: A is looked up, `a[:, ids]`."""

    a: torch.Tensor  # [r, in]
    b: torch.Tensor  # [out, r]
    scaling: float

    @property
    def r(self) -> int:
        return self.a.shape[0]

    def __post_init__(self) -> None:
        if self.a.dim() != 2 or self.b.dim() != 2 or self.a.shape[0] != self.b.shape[1]:
            raise AdapterError(f"A must be [r, in] and B [out, r], got {tuple(self.a.shape)} and {tuple(self.b.shape)}")
        if not math.isfinite(self.scaling):
            raise AdapterError(f"the scale must be finite, got {self.scaling}")


@dataclass(frozen=True)
class Adapter:
    """An adapter read from disk, on the host, in the dtype of its file."""

    source: str  # folder, or Hub id (with @revision)
    digest: str  # sha256 over config and weights: identity is name + digest
    base_model: str | None  # what its config says it was trained on
    factors: Mapping[str, LoraFactors]  # module path in the base -> factors
    config: Mapping[str, Any] = field(default_factory=dict)

    @property
    def max_rank(self) -> int:
        return max(f.r for f in self.factors.values())

    @property
    def nbytes(self) -> int:
        return sum(f.a.nbytes + f.b.nbytes for f in self.factors.values())
