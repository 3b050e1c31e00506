"""Shapes of experts' factors on disk: how PEFT's two-dimensional ones are to be read.

PEFT writes A [r*E, in], whose rows are (expert, rank), and B [out, r*E], whose columns are (rank, expert). Where it
takes in for out, it writes A [r*E, out] and B [in, r*E]: before 0.19 for weights [E, out, in], as it took all for
[E, in, out]; since then for weights [E, in, out] whose class does not tell it so (Llama 4).
"""

from __future__ import annotations

import torch

from hf_multilora.formats.base import ExpertsShape

PLAIN, SWAPPED = "plain", "swapped"
SINCE = (0, 19)  # the PEFT that asks the class


def fits(shape: ExpertsShape, projection: str, a: torch.Tensor, b: torch.Tensor) -> set[str]:
    """The ways in which a nested pair can be read for the projection, by its shapes alone."""
    if a.dim() != 2 or b.dim() != 2 or a.shape[0] != b.shape[1]:
        return set()
    own = shape.projections[projection]
    if is_bias(projection):
        return {PLAIN} if (a.shape[1], b.shape[0]) == (own.out_features, shape.count) else set()
    sizes = (own.in_features, own.out_features)
    ways = {PLAIN: (a.shape[1], b.shape[0]), SWAPPED: (b.shape[0], a.shape[1])}
    return {way for way, given in ways.items() if given == sizes}


def written_by(shape: ExpertsShape, version: tuple[int, int] | None) -> str | None:
    """How this PEFT writes factors of such experts, None where it must be known and is not."""
    if shape.transposed and shape.told:
        return PLAIN
    if version is None:
        return None
    return SWAPPED if shape.transposed == (version >= SINCE) else PLAIN


def is_bias(projection: str) -> bool:
    """A bias [E, out] is trained as one matrix: A [r, out], B [E, r]."""
    return projection.endswith("_bias")
