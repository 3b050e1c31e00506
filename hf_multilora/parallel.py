"""Which part of the adapters' factors a process holds, where Transformers has sharded the base over several.

A sharded linear runs inside a forward of its instance, which hands it this process's part of the input, and makes the
output whole: by nothing, a gather or a sum. The rows' deltas are added in between, so a call communicates no more than
the base does. `STYLES` says what each style of a plan does. Parts follow from the DTensors themselves: W's rows here
are B's, W's columns are A's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .cuts import Cut, cuts_of, even, is_distributed
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
    "ep_router": Boundary(WHOLE, WHOLE, inner=False),  # up to Transformers 5.20
    "ep_dispatch_experts": Boundary(WHOLE, WHOLE),
}
OUTER = "_multilora_outer"  # attribute of a module whose part is adapted: the forward that it had
EXPERTS = ("moe_tp_experts", "ep_dispatch_experts")


class Installed(NamedTuple):
    """The parallel forward of an instance: its style, and the processes that share the module."""

    name: str
    style: Any
    mesh: Any
    dispatch: Any = None  # how experts of several processes get their tokens

    @property
    def boundary(self) -> Boundary:
        return STYLES[self.name]

    @property
    def place(self) -> tuple[int, int]:
        """How many processes there are, and the number of this one."""
        return self.mesh.size(), self.mesh.get_local_rank()

    @property
    def group(self) -> Any:
        return self.mesh.get_group()

    @property
    def exchanges(self) -> bool:
        """Whether experts get tokens from other processes: the default does not where all have the same batch."""
        kind = type(self.dispatch).__name__
        auto = kind == "AutoEP" and self.dispatch.all_reduce is not None and self.dispatch.megamoe is None
        return self.dispatch is not None and kind != "AllReduceEP" and not auto


def installed(module: nn.Module) -> Installed | None:
    """The style under which Transformers installed the forward of this instance, if it did."""
    own: Any = module.__dict__.get(OUTER, module.__dict__.get("forward"))
    code = getattr(own, "__code__", None)
    if code is None or code.co_name not in ("tp_forward", "ep_forward"):
        return None
    cells = own.__closure__ or ()
    held = dict(zip(code.co_freevars, (cell.cell_contents for cell in cells), strict=True))
    style, mesh = held.get("self"), held.get("mesh", held.get("ep_mesh"))
    if style is None or mesh is None or held.get("module") is not module:
        return None
    return Installed(_name_of(style), style, mesh, held.get("implementation"))


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


def ranks_of(model: nn.Module) -> set[int]:
    """The global numbers of the processes that share the model's modules."""
    return {
        rank for _, _, own in sharded_modules(model) if own is not None for rank in own.mesh.mesh.flatten().tolist()
    }


def require_known(model: nn.Module) -> None:
    """Raises NotImplementedError where a module is sharded in a way that is not served."""
    for name, module, own in sharded_modules(model):
        if own is None and any(cuts_of(parameter) for parameter in module._parameters.values()):
            raise NotImplementedError(
                f"{name}: a sharded module must run in a forward of Transformers' tensor or expert parallelism, it "
                f"has none (FSDP and other DTensors are not served); load the base with "
                f"distributed_config=DistributedConfig(tp_size=...)"
            )
        if own is not None and own.name not in STYLES:
            raise NotImplementedError(
                f"{name}: the style of its plan must be one of {sorted(STYLES)}, it is {own.name!r}; leave the module "
                f"out of tp_plan, or give it one of these"
            )
        if own is not None and own.exchanges:
            raise NotImplementedError(
                f"{name}: experts must get the whole batch in every process, here their tokens travel between "
                f"processes without their rows' adapters; load the base with DistributedConfig(tp_size=n, ep_size=n, "
                f"ep_implementation='all_reduce')"
            )


@dataclass(frozen=True)
class Shard:
    """What a process holds of a site's factors. None: all.

    a: columns of A. b: rows of B. experts: whose rank rows. first: where B's columns begin in what the module gives
    here. inner: the deltas are added inside the parallel forward.
    x: the part of the input here that A's columns belong to. group: the processes over which h = A x must be summed, as
    A's columns are split where the input is not.
    """

    a: Cut | None = None
    b: Cut | None = None
    experts: Cut | None = None
    first: int | None = None
    inner: bool = False
    x: Cut | None = None
    group: Any = None

    def widths(self, a: int, b: int) -> tuple[int, int]:
        """Widths of a rank row here, from those of the whole one: a half that is not there has none."""
        return (
            self.a.size if self.a is not None and a else a,
            self.b.size if self.b is not None and b else b,
        )

    def input(self, x: Tensor) -> Tensor:
        """The part of x [..., n] that A's columns here belong to."""
        return x if self.x is None else self.x.of(x, x.dim() - 1)

    def sum(self, h: Tensor) -> Tensor:
        """h over all processes, in place where each has a summand."""
        if self.group is not None:
            torch.distributed.all_reduce(h, group=self.group)
        return h

    def split(self, own: Installed, a: int, b: int) -> Shard:
        """The same with A and B, of these widths, split where they are whole. Each process multiplies its columns of A,
        the sum over all is h, and adds what its columns of B give where the base's own sum or gather takes it."""
        if a == 1:  # of a bias, whose input is 1
            part, x = None, None
        else:
            part, x = (self.a, None) if self.a is not None else (even(a, *own.place),) * 2
        columns, first = self.b, self.first
        if columns is None:
            columns = even(b, *own.place)
            first = (first or 0) + columns.ranges[0][0]
        return replace(self, a=part, b=columns, first=first, x=x, group=None if part is None else own.group)

    def of(self, pair: LoraFactors) -> LoraFactors:
        a, b, parts = pair.a, pair.b, pair.parts
        if self.experts is not None and parts is not None:
            edges = [0]
            for own in parts:
                edges.append(edges[-1] + own)
            rows = Cut(edges[-1], tuple((edges[low], edges[high]) for low, high in self.experts.ranges))
            a, b = rows.of(a, 0), rows.of(b, 1)
            parts = tuple(own for low, high in self.experts.ranges for own in parts[low:high])
            if not sum(parts):  # only experts of other processes are trained: a row of zeros stands for none
                a, b, parts = a.new_zeros(1, a.shape[1]), b.new_zeros(b.shape[0], 1), (1, *parts[1:])
        if self.a is not None and a.shape[1]:
            a = self.a.of(a, 1)
        if self.b is not None and b.shape[0]:
            b = self.b.of(b, 0)
        return LoraFactors(a, b, pair.scaling, parts)


ALL = Shard()


def shard_of(module: nn.Module, shape: ModuleShape, role: str, fully: bool = False) -> Shard:
    """What this process holds of the factors that an adapter has for a module in a role. fully: split A and B where
    the base's own split leaves them whole.

    Raises NotImplementedError where the role cannot be served on this sharded module.
    """
    own = installed(module)
    if own is None:
        return ALL
    if fully and role == LORA and shape.kind == "embedding":
        part = even(shape.in_features, *own.place)
        return Shard(part, x=part, group=own.group)
    if own.name == "ep_router":
        raise NotImplementedError(
            "under expert parallelism a router gives the experts of one process, so no adapter "
            "may train it; upgrade Transformers, or leave out enable_expert_parallel"
        )
    if not own.boundary.inner:
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
        shard = Shard(cuts.get(1), cuts.get(0), inner=True)
        return shard if not fully else shard.split(own, shape.in_features, shape.out_features)
    assert shape.experts is not None
    name, half = split_half(role)
    projection = shape.experts.projections[name]
    parameter = module._parameters[projection.parameter]
    assert parameter is not None
    cuts, out = cuts_of(parameter), parameter.dim() - (1 if shape.experts.transposed or parameter.dim() == 2 else 2)
    if fully and 0 in cuts:
        raise NotImplementedError(
            "fully_sharded_loras=True splits what the base's plan leaves whole, and under expert parallelism each "
            "process has whole experts: leave fully_sharded_loras out, A and B of an expert are on one device already"
        )
    inside = None if parameter.dim() == 2 else cuts.get(2 if out == 1 else 1)
    outer = cuts.get(out)
    if own.name == "moe_tp_experts" and not cuts:
        raise NotImplementedError(f"{projection.parameter} must be sharded where the outputs of experts are summed")
    shard = Shard(
        inside,
        None if outer is None else outer.within(projection.first, projection.out_features),
        None if half in (A_ONE, B_ONE) else cuts.get(0),
        projection.first if outer is None else outer.before(projection.first),
    )
    return shard if not fully else shard.split(own, projection.in_features, projection.out_features)
