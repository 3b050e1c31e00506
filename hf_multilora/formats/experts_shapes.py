"""Shapes of experts' factors on disk: how PEFT's two-dimensional ones are to be read.

PEFT writes A [r*E, in], whose rows are (expert, rank), and B [out, r*E], whose columns are (rank, expert); or, where it
takes in for out, A [r*E, out] and B [in, r*E].
"""

from __future__ import annotations

from dataclasses import replace

import torch

from hf_multilora.formats.base import ExpertsShape, Projection

PLAIN, SWAPPED = "plain", "swapped"
# (weights are [E, in, out], their class tells PEFT so) -> how PEFT before 0.19, 0.19.0 and PEFT since 0.19.1 write
WAYS = {
    (False, True): (SWAPPED, SWAPPED, PLAIN),
    (False, False): (SWAPPED, SWAPPED, PLAIN),
    (True, True): (PLAIN, SWAPPED, PLAIN),
    (True, False): (PLAIN, PLAIN, SWAPPED),
}
SINCE = (0, 19, 1)


def alternates(shape: ExpertsShape) -> bool:
    """Whether the columns of gate and up take turns, so that neither is a projection of its own."""
    return "gate_up_proj" in shape.projections and "gate_proj" not in shape.projections


def projection_of(shape: ExpertsShape, name: str) -> Projection:
    """A projection that files know; of gate or up alone where their columns take turns: every other column."""
    if name in shape.projections or not alternates(shape):
        return shape.projections[name]
    both = shape.projections["gate_up_proj"]
    return replace(both, out_features=both.out_features // 2)


def fits(shape: ExpertsShape, projection: str, a: torch.Tensor, b: torch.Tensor) -> set[str]:
    """The ways in which a nested pair can be read for the projection, by its shapes alone."""
    if a.dim() != 2 or b.dim() != 2 or a.shape[0] != b.shape[1]:
        return set()
    own = projection_of(shape, projection)
    if is_bias(projection):
        return {PLAIN} if (a.shape[1], b.shape[0]) == (own.out_features, shape.count) else set()
    sizes = (own.in_features, own.out_features)
    ways = {PLAIN: (a.shape[1], b.shape[0]), SWAPPED: (b.shape[0], a.shape[1])}
    return {way for way, given in ways.items() if given == sizes}


def written_by(shape: ExpertsShape, version: tuple[int, int, int]) -> str:
    """How this PEFT writes factors of such experts."""
    before, once, since = WAYS[shape.transposed, shape.told]
    return since if version >= SINCE else once if version >= (0, 19, 0) else before


def is_bias(projection: str) -> bool:
    """A bias [E, out] is trained as one matrix: A [r, out], B [E, r]."""
    return projection.endswith("_bias")
