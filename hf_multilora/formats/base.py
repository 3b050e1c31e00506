"""What every adapter file is read into: one pair of tensors per site of the base.

A site is a module in one of three roles, written `path`, `path:saved` or `path:tokens`:

role    what the adapter trained           a                        b
lora    delta = scaling * B (A x)          A [r, in]                B [out, r]
saved   the whole module                   its rows [r, width]      [out, r]
tokens  some rows of an embedding          the rows [n, width]      their token ids, int64 [1, n]

A saved linear has r = its outputs: a = weight [r, in], b = bias [1, r] (zeros without one). A saved embedding has
r = its vocabulary: a = weight [r, width], b = [0, r]. Any other module has r = 1: a = what `ModuleShape.own` names,
flattened one after another, [1, numel]; b = [0, 1]. Token ids ascend. The tensors of a saved site have one dtype.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch


class AdapterError(ValueError):
    """An adapter that cannot be served as it is: says what must hold, what it got, which key or module, what to do."""


LORA, SAVED, TOKENS = "lora", "saved", "tokens"


def site_name(path: str, role: str) -> str:
    """The site of a module in a role."""
    return path if role == LORA else f"{path}:{role}"


def split_site(site: str) -> tuple[str, str]:
    """(path of the module, role) of a site."""
    path, _, role = site.partition(":")
    return path, role or LORA


@dataclass(frozen=True)
class ModuleShape:
    """One module of the base as an adapter sees it.

    kind      "linear" (also GPT-2's Conv1D), "embedding" or "other"
    refused   why no adapter may target it, in any role
    mixable   False where the rows of its input cannot be attributed to batch rows
    own       shapes of the floating point parameters and persistent buffers that are its own, not its children's
    leaf      whether it has no children with such tensors
    resizable whether an adapter may save it with another number of rows: logits of a head, a vocabulary
    tied      other modules whose `weight` is the same parameter
    transposed whether a linear keeps its weight as [in, out] (GPT-2's Conv1D), in its files too
    """

    kind: str
    in_features: int = 0  # linear: K; embedding: rows of the table V
    out_features: int = 0  # linear: N; embedding: width H
    refused: str | None = None
    mixable: bool = True
    weight: torch.Tensor | None = None  # the base's own weight [out, in] or [V, H], to compare copies with
    bias: torch.Tensor | None = None  # the base's own bias [out], for the same purpose
    own: Mapping[str, torch.Size] = field(default_factory=dict)
    leaf: bool = True
    resizable: bool = False
    tied: tuple[str, ...] = ()
    transposed: bool = False


@dataclass(frozen=True)
class LoraFactors:
    """The tensors of one site; for LoRA delta = scaling * B (A x). Embedding: A is looked up, `a[:, ids]`."""

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
    factors: Mapping[str, LoraFactors]  # site of the base -> its tensors
    config: Mapping[str, Any] = field(default_factory=dict)
    labels: tuple[str, ...] | None = None  # names of what its own head tells apart, where its files say them

    @property
    def max_rank(self) -> int:
        """The largest rank of its LoRA sites, 0 without one."""
        return max((f.r for site, f in self.factors.items() if split_site(site)[1] == LORA), default=0)

    @property
    def nbytes(self) -> int:
        return sum(f.a.nbytes + f.b.nbytes for f in self.factors.values())
