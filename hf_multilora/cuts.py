"""Which part of a tensor a process holds, of a dimension that is split over several: what a DTensor says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Cut:
    """Which of `whole` numbers in a row a process holds: those of the ranges, in their order."""

    whole: int
    ranges: tuple[tuple[int, int], ...]

    @property
    def size(self) -> int:
        return sum(end - first for first, end in self.ranges)

    def of(self, tensor: Tensor, dim: int) -> Tensor:
        """The part of a tensor that has `whole` numbers along `dim`; a view where it is one range."""
        if tensor.shape[dim] != self.whole:
            raise ValueError(f"dimension {dim} must have {self.whole} numbers, got {tuple(tensor.shape)}")
        parts = [tensor.narrow(dim, first, end - first) for first, end in self.ranges]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim)

    def within(self, first: int, count: int) -> Cut:
        """Of the numbers first ... first + count alone."""
        ends = first + count
        both = [(max(low, first) - first, min(high, ends) - first) for low, high in self.ranges]
        found = tuple((low, high) for low, high in both if low < high)
        return Cut(count, found or ((0, 0),))

    def before(self, first: int) -> int:
        """How many that it holds come before number `first`."""
        return sum(max(0, min(high, first) - low) for low, high in self.ranges)


def even(whole: int, parts: int, index: int) -> Cut:
    """The part `index` of so many, as torch.chunk cuts: the last ones are shorter, or empty."""
    size = -(-whole // parts)
    return Cut(whole, ((min(whole, index * size), min(whole, (index + 1) * size)),))


def cuts_of(parameter: Tensor | None) -> dict[int, Cut]:
    """What this process holds of a DTensor, by sharded dimension; nothing of a plain tensor or a whole one.

    Raises NotImplementedError where it is distributed in a way that is not known here.
    """
    found: dict[int, Cut] = {}
    if parameter is None or not is_distributed(parameter):
        return found
    mesh: Any = parameter.device_mesh  # type: ignore[attr-defined]
    for mesh_dim, placement in enumerate(parameter.placements):  # type: ignore[attr-defined]
        if placement.is_replicate() or mesh.size(mesh_dim) == 1:
            continue
        dim = getattr(placement, "dim", None)
        if dim is None or dim % parameter.dim() in found:
            raise NotImplementedError(f"a parameter must be sharded once along a dimension, got {placement}")
        dim %= parameter.dim()
        pieces = getattr(placement, "split_factor", 1)  # of a packed weight: each is cut by itself
        size = parameter.shape[dim] // pieces
        parts, index = mesh.size(mesh_dim), mesh.get_local_rank(mesh_dim)
        ((low, high),) = even(size, parts, index).ranges
        found[dim] = Cut(parameter.shape[dim], tuple((low + i * size, high + i * size) for i in range(pieces)))
    local = parameter.to_local().shape  # type: ignore[attr-defined]
    for dim, cut in found.items():
        if local[dim] != cut.size:
            raise NotImplementedError(
                f"a parameter must be cut as torch.chunk does, {parameter.placements} of {tuple(parameter.shape)} "  # type: ignore[attr-defined]
                f"has {local[dim]} numbers here, not {cut.size}"
            )
    return found


def is_distributed(parameter: Tensor) -> bool:
    """Whether the parameter is a DTensor, without importing the distributed package."""
    return type(parameter).__name__ == "DTensor" or hasattr(parameter, "_local_tensor")


def both_here(tensor: Tensor, own: Tensor) -> tuple[Tensor, Tensor]:
    """A whole tensor and one of its shape that may be a DTensor, both as far as this process has the second."""
    if not is_distributed(own):
        return tensor, own
    for dim, cut in cuts_of(own).items():
        tensor = cut.of(tensor, dim)
    return tensor, own.to_local()  # type: ignore[attr-defined]


def here(parameter: Tensor) -> Tensor:
    """What this process holds of a parameter."""
    return parameter._local_tensor if is_distributed(parameter) else parameter  # type: ignore[attr-defined]
