"""What every adapter file is read into: one pair of tensors per site of the base.

A site is a module in one of three roles, written `path`, `path:saved` or `path:tokens`:

role    what the adapter trained           a                        b
lora    delta = scaling * B (A x)          A [r, in]                B [out, r]
saved   the whole module                   its rows [r, width]      [out, r]
tokens  some rows of an embedding          the rows [n, width]      their token ids, int64 [1, n]

A saved linear has r = its outputs: a = weight [r, in], b = bias [1, r] (zeros without one). A saved embedding has
r = its vocabulary: a = weight [r, width], b = [0, r]. Any other module has r = 1: a = what `ModuleShape.own` names,
flattened one after another, [1, numel]; b = [0, 1]. Token ids ascend. The tensors of a saved site have one dtype.

A module that holds the weights of many experts has one LoRA site per projection (`ExpertsShape.projections`), whose
role is the projection's name: `layers.0.mlp.experts:down_proj`. Its rank rows lie expert after expert, `parts` of them
each: a = [sum of parts, in], b = [out, sum of parts], and expert e's delta is scaling * b_e (a_e x). Where all experts
share A or B, the halves are sites of their own, so that what is shared is there once (r rows, `parts` None):

role              a                     b
down_proj.a       A of each expert      [0, sum of parts]
down_proj.b       [sum of parts, 0]     B of each expert
down_proj.a1      the A of all [r, in]  [0, r]
down_proj.b1      [r, 0]                the B of all [out, r]

An adapter has for one projection the site without suffix, or one of `a`, `a1` with one of `b`, `b1`, not both per
expert; the scale stands with the half that has B.
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
A_EACH, B_EACH, A_ONE, B_ONE = ".a", ".b", ".a1", ".b1"  # suffixes of the roles of half a projection
HALVES = (A_EACH, B_EACH, A_ONE, B_ONE)


def site_name(path: str, role: str) -> str:
    """The site of a module in a role."""
    return path if role == LORA else f"{path}:{role}"


def split_site(site: str) -> tuple[str, str]:
    """(path of the module, role) of a site."""
    path, _, role = site.partition(":")
    return path, role or LORA


def is_lora(site: str) -> bool:
    """Whether the site holds low-rank factors, of a module or of a projection of experts."""
    return split_site(site)[1] not in (SAVED, TOKENS)


def split_half(role: str) -> tuple[str, str]:
    """(projection, suffix in HALVES or "" for both halves) of an expert site's role."""
    projection, dot, half = role.partition(".")
    return projection, dot + half


@dataclass(frozen=True)
class Projection:
    """What an adapter may train of experts: x [in_features] -> columns of what the parameter gives.

    parameter: its name in the module; first: the first of the columns. A bias has in_features 1: x = 1.
    """

    parameter: str
    in_features: int
    out_features: int
    first: int = 0


@dataclass(frozen=True)
class ExpertsShape:
    """The projections of a module that holds the weights of `count` experts.

    projections: gate_up_proj or up_proj, down_proj, biases, and the halves gate_proj and up_proj of a gate_up_proj that
    holds one after the other. parameters: all of the module's own, in the order in which it registers them.
    transposed: whether it keeps them as [experts, in, out]. told: whether its class says so to PEFT.
    """

    count: int
    projections: Mapping[str, Projection]
    parameters: tuple[str, ...]
    transposed: bool = False
    told: bool = True


@dataclass(frozen=True)
class ModuleShape:
    """One module of the base as an adapter sees it.

    kind      "linear" (also GPT-2's Conv1D), "embedding", "router" (its weight [out, in] gives the logits of experts
              inside its forward), "experts" or "other"
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
    experts: ExpertsShape | None = None  # of the kind "experts"


@dataclass(frozen=True)
class LoraFactors:
    """The tensors of one site; for LoRA delta = scaling * B (A x). Embedding: A is looked up, `a[:, ids]`.

    parts: rank rows of each expert, where they differ by expert; r is their sum.
    """

    a: torch.Tensor  # [r, in]
    b: torch.Tensor  # [out, r]
    scaling: float
    parts: tuple[int, ...] | None = None

    @property
    def r(self) -> int:
        return self.a.shape[0]

    @property
    def rank(self) -> int:
        """The largest rank that one product has: r, or that of an expert."""
        return self.r if self.parts is None else max(self.parts)

    def __post_init__(self) -> None:
        if self.a.dim() != 2 or self.b.dim() != 2 or self.a.shape[0] != self.b.shape[1]:
            raise AdapterError(f"A must be [r, in] and B [out, r], got {tuple(self.a.shape)} and {tuple(self.b.shape)}")
        if self.parts is not None and sum(self.parts) != self.r:
            raise AdapterError(f"the experts' parts must add up to the {self.r} rank rows, got {sum(self.parts)}")
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
        return max((f.rank for site, f in self.factors.items() if is_lora(site)), default=0)

    @property
    def nbytes(self) -> int:
        return sum(f.a.nbytes + f.b.nbytes for f in self.factors.values())
