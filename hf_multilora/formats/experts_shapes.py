"""Shapes of experts' factors on disk: how PEFT's two-dimensional ones are to be read.

PEFT writes A [r*E, in], whose rows are (expert, rank), and B [out, r*E], whose columns are (rank, expert). Before 0.19
it took in for out where the experts keep their weights as [E, out, in]: A [r*E, out] and B [in, r*E], and later
versions do so where they miss that the weights are [E, in, out].
"""

from __future__ import annotations

import torch

from hf_multilora.formats.base import ExpertsShape

PLAIN, SWAPPED = "plain", "swapped"


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


def is_bias(projection: str) -> bool:
    """A bias [E, out] is trained as one matrix: A [r, out], B [E, r]."""
    return projection.endswith("_bias")
