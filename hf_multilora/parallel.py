"""Which part of the adapters' factors a process holds, where Transformers has sharded the base over several.

A sharded linear runs inside a forward of its instance, which hands it this process's part of the input, and makes the
output whole: by nothing, a gather or a sum. The rows' deltas are added in between, so a call communicates no more than
the base does. `STYLES` says what each style of a plan does. Parts follow from the DTensors themselves: W's rows here
are B's, W's columns are A's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .formats import A_ONE, B_ONE, LORA, SAVED, TOKENS, LoraFactors, ModuleShape, split_half

WHOLE, PART = "whole", "part"


class Boundary(NamedTuple):
    """What callers of a module hand over and get: the same in every process, or its part. inner: what is sharded is
    multiplied in between."""

    x: str
    y: str
    inner: bool = True


# Styles of Transformers' plans; the second name of a line is that of older versions
STYLES: Mapping[str, Boundary] = {
    "colwise": Boundary(WHOLE, PART),
    **dict.fromkeys(("colwise_gather_output", "colwise_rep"), Boundary(WHOLE, WHOLE)),
    "packed_colwise": Boundary(WHOLE, PART),
    "rowwise": Boundary(PART, WHOLE),
    **dict.fromkeys(("rowwise_split_input", "rowwise_rep"), Boundary(WHOLE, WHOLE)),
    **dict.fromkeys(("embedding_rowwise", "embedding_colwise"), Boundary(WHOLE, WHOLE, inner=False)),
    "mla_kv_a_proj": Boundary(WHOLE, WHOLE, inner=False),
    "replicate": Boundary(WHOLE, WHOLE, inner=False),
    "replicated_with_grad_allreduce": Boundary(WHOLE, WHOLE, inner=False),
    "local_params": Boundary(WHOLE, WHOLE, inner=False),
    "moe_tp_experts": Boundary(WHOLE, WHOLE),
    "ep_dispatch_experts": Boundary(WHOLE, WHOLE),
}
EXPERTS = ("moe_tp_experts", "ep_dispatch_experts")


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


class Installed(NamedTuple):
    """The parallel forward of an instance: its style, and the processes that share the module."""

    name: str
    style: Any
    mesh: Any

    @property
    def boundary(self) -> Boundary:
        return STYLES[self.name]


def installed(module: nn.Module) -> Installed | None:
    """The style under which Transformers installed the forward of this instance, if it did."""
    own = module.__dict__.get("forward")
    code = getattr(own, "__code__", None)
    if code is None or code.co_name not in ("tp_forward", "ep_forward"):
        return None
    cells: Any = own.__closure__ or ()
    held = dict(zip(code.co_freevars, (cell.cell_contents for cell in cells), strict=True))
    style, mesh = held.get("self"), held.get("mesh", held.get("ep_mesh"))
    if style is None or mesh is None or held.get("module") is not module:
        return None
    return Installed(_name_of(style), style, mesh)


def _name_of(style: Any) -> str:
    from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES

    names = [name for name in ALL_PARALLEL_STYLES if ALL_PARALLEL_STYLES[name] is style]
    return next((name for name in names if name in STYLES), names[0] if names else type(style).__name__)


def sharded_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module, Installed | None]]:
    """Modules with a parallel forward, or with a DTensor of their own."""
    for name, module in model.named_modules():
        own = installed(module)
        if own is not None or any(p is not None and is_distributed(p) for p in module._parameters.values()):
            yield name, module, own


def require_known(model: nn.Module) -> None:
    """Raises NotImplementedError where a module is sharded in a way that `STYLES` does not have."""
    for name, module, own in sharded_modules(model):
        if own is None and not isinstance(module, nn.Linear) and not _holds_whole(module):
            raise NotImplementedError(
                f"{name}: a sharded module must run in a forward of Transformers' tensor or expert parallelism, it "
                f"has none (FSDP and other DTensors are not supported); load it with "
                f"distributed_config=DistributedConfig(tp_size=...)"
            )
        if own is not None and own.name not in STYLES:
            raise NotImplementedError(
                f"{name}: the style of its plan must be one of {sorted(STYLES)}, it is {own.name!r}; leave the module "
                f"out of tp_plan, or give it one of these"
            )


@dataclass(frozen=True)
class Shard:
    """What a process holds of a site's factors. None: all.

    a: columns of A. b: rows of B. experts: whose rank rows. first: the first of the projection's columns in what its
    parameter gives here. inner: the deltas are added inside the parallel forward.
    """

    a: Cut | None = None
    b: Cut | None = None
    experts: Cut | None = None
    first: int | None = None
    inner: bool = False

    def widths(self, a: int, b: int) -> tuple[int, int]:
        """Widths of a rank row here, from those of the whole one: a half that is not there has none."""
        return (
            self.a.size if self.a is not None and a else a,
            self.b.size if self.b is not None and b else b,
        )

    def of(self, pair: LoraFactors) -> LoraFactors:
        a, b, parts = pair.a, pair.b, pair.parts
        if self.experts is not None and parts is not None:
            edges = [0]
            for own in parts:
                edges.append(edges[-1] + own)
            rows = Cut(edges[-1], tuple((edges[low], edges[high]) for low, high in self.experts.ranges))
            a, b = rows.of(a, 0), rows.of(b, 1)
            parts = tuple(own for low, high in self.experts.ranges for own in parts[low:high])
        if self.a is not None and a.shape[1]:
            a = self.a.of(a, 1)
        if self.b is not None and b.shape[0]:
            b = self.b.of(b, 0)
        return LoraFactors(a, b, pair.scaling, parts)


ALL = Shard()


def shard_of(module: nn.Module, shape: ModuleShape, role: str) -> Shard:
    """What this process holds of the factors that an adapter has for a module in a role.

    Raises NotImplementedError where the role cannot be served on this sharded module.
    """
    own = installed(module)
    if own is None or not own.boundary.inner:
        return ALL
    if role in (SAVED, TOKENS):
        if (own.boundary.x, own.boundary.y) != (WHOLE, WHOLE) or own.name in EXPERTS:
            raise NotImplementedError(
                f"an adapter may save a module in full, or rows of it, only where every process gets its whole input "
                f"and output, this one is sharded as {own.name!r}; leave it out of tp_plan"
            )
        return ALL
    if role == LORA:
        cuts = cuts_of(module._parameters.get("weight"))
        return Shard(cuts.get(1), cuts.get(0), inner=True)
    assert shape.experts is not None
    name, half = split_half(role)
    projection = shape.experts.projections[name]
    parameter = module._parameters[projection.parameter]
    assert parameter is not None
    cuts, out = cuts_of(parameter), parameter.dim() - (1 if shape.experts.transposed or parameter.dim() == 2 else 2)
    inside = None if parameter.dim() == 2 else cuts.get(2 if out == 1 else 1)
    outer = cuts.get(out)
    return Shard(
        inside,
        None if outer is None else outer.within(projection.first, projection.out_features),
        None if half in (A_ONE, B_ONE) else cuts.get(0),
        None if outer is None else outer.before(projection.first),
    )
