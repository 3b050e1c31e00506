"""Linears that one input feeds, computed by one matmul and one expand.

Where a linear's weight can be laid in a buffer (see augmented.py), those of its siblings lie in the same one: q, k and
v, or gate and up. Whichever of them is called first computes all; the others find their output in `routing.shared`, if
they are called with the same tensor, unchanged since. A guess of siblings that is wrong costs time, never correctness.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..kernels import ops  # noqa: F401 (registers the operations)
from ..kernels.backends import Backend
from ..kernels.torch_backend import expand_gated
from ..pool import Layout, RowTables
from .plain import plain_call
from .rows import BASE_ONLY, ONE
from .slots import ModuleSlots, dense_tokens

MOST = 4  # linears that one launch serves
LAUNCHES = 16  # that are kept


class Joint:
    """starts and ranks of L linears that may have different rank rows: int32 [L, slots] each, at fixed addresses."""

    @torch.inference_mode(False)  # else the tables could never be written again
    def __init__(self, layouts: Sequence[Layout | None]) -> None:
        first = next(layout for layout in layouts if layout is not None)
        self.layouts = tuple(layouts)
        self.tables = torch.zeros(2, len(layouts), first.starts.shape[1], dtype=torch.int32, device=first.device)
        self.starts, self.ranks = self.tables.unbind()
        self.take()

    @torch.inference_mode(False)
    def take(self) -> None:
        """The spans as they now are, by one copy."""
        self.bound = max(layout.no_rows.shape[1] for layout in self.layouts if layout is not None)
        host = torch.zeros(self.tables.shape, dtype=torch.int32)
        for i, layout in enumerate(self.layouts):
            for slot, (start, r) in {} if layout is None else layout.spans.items():
                host[0, i, slot], host[1, i, slot] = start, r
        self.tables.copy_(host)


class Merged:
    """L linears in one buffer [W_1; ...; W_L; A], rank row p of the i-th at row p * L + i of A, and in one flat b.

    members: the linears and their rank rows, which are views of `buffer` and `b` while they are `laid`.
    whole: all are. sizes: their output features. width: rank rows of each in the occupied prefix. used: views of that,
    and not numbers, since a traced graph takes tensors as inputs and would be traced anew for a number. wasted: runs
    whose outputs the other members did not take.
    """

    def __init__(
        self, members: Sequence[tuple[nn.Module, ModuleSlots]], buffer: Tensor, bias: Tensor | None, b: Tensor
    ) -> None:
        self.members = tuple(members)
        self.buffer, self.bias_buffer, self.b = buffer, bias, b
        self.sizes = [slots.out_features for _, slots in members]
        self.edges = [0, *accumulate(self.sizes)]
        self.n = self.edges[-1]
        self.places = [0, *accumulate(slots.rows.capacity * slots.out_features for _, slots in members)]  # in b
        table = list(zip(self.edges[:-1], self.sizes, self.places[:-1], strict=True))
        self.slices = torch.tensor(table, dtype=torch.int64).to(buffer.device) if len(table) > 1 else None
        self.weights = buffer[: self.n], None if bias is None else bias[: self.n]
        self.addresses = [
            (buffer[low].data_ptr(), None if bias is None or module.bias is None else bias[low].data_ptr())
            for low, (module, _) in zip(self.edges, self.members, strict=False)
        ]
        self.before: list[tuple[Merged, int] | None] = [None] * len(table)  # while members move here
        self.even = not any(number % 16 for row in table for number in row)
        self.launches: dict[tuple[RowTables, int], tuple[torch.dtype, Callable[..., None]]] = {}
        self._joint: Joint | None = None
        self.leads: list[ModuleSlots] = []
        self.wasted = 0
        self.look()

    def look(self) -> None:
        """Set what follows from the members' rank rows and layouts."""
        all_slots = [slots for _, slots in self.members]
        self.whole = all(slots.laid and slots.merged is self for slots in all_slots)
        self.width = max((slots.layout.width for slots in all_slots if slots.layout is not None), default=0)
        end = self.n + self.width * len(all_slots)
        self.used = self.buffer[:end], None if self.bias_buffer is None else self.bias_buffer[:end]
        self.turned = self.used[0].t()
        self.launches = {}
        layouts = {id(slots.layout): slots for slots in reversed(all_slots) if slots.layout is not None}
        self.leads = list(layouts.values())[::-1]  # one for each layout

    @property
    def joint(self) -> Joint | None:
        """The tables of all members' rank rows."""
        return self._joint

    @joint.setter
    def joint(self, joint: Joint) -> None:
        self._joint, self.launches = joint, {}

    @torch.inference_mode(False)
    @torch.no_grad()
    def leave(self, index: int) -> None:
        """A member has moved elsewhere. A weight that somebody took out of its module takes no tenant's rows along."""
        self.buffer[self.n + index :: len(self.members)].zero_()
        self.forget(index)
        self.look()

    def forget(self, index: int) -> None:
        """Leave where a member was before as well: nothing of it is there any more."""
        before = self.before[index]
        if before is not None:
            before[0].leave(before[1])
            self.before[index] = None

    def lead(self) -> tuple[ModuleSlots, int]:
        """A member in which rows of the call have an adapter, if there is one, and what is to do there."""
        for slots in self.leads:
            path = slots.path()
            if path != BASE_ONLY:
                return slots, path
        return self.members[0][1], BASE_ONLY

    def lies(self, index: int) -> bool:
        """Whether weight and bias of a member are where they were laid."""
        parameters, (at, bias_at) = self.members[index][0]._parameters, self.addresses[index]
        weight, bias = parameters.get("weight"), parameters.get("bias")
        if weight is None or weight.data_ptr() != at:
            return False
        return bias is None if bias_at is None else bias is not None and bias.data_ptr() == bias_at

    def ready(self) -> bool:
        """Whether a call may use the buffer, as `augmented.prepare` laid it. A weight that left it is laid at the next
        request. While gradients of a weight or bias are wanted the buffer, which is no Parameter, is not used."""
        if not self.whole or self.joint is None:
            return False
        gradients, tracing = torch.is_grad_enabled(), torch.compiler.is_compiling()
        for index, (module, _) in enumerate(self.members):
            if not plain_call(module):
                return False
            weight, bias = module._parameters.get("weight"), module._parameters.get("bias")
            if weight is None:
                return False
            if gradients and (weight.requires_grad or (bias is not None and bias.requires_grad)):
                return False
            if not tracing and not self.lies(index):  # addresses cannot be read while tracing
                return False
        return True

    def compute(self, slots: ModuleSlots, x: Tensor) -> Tensor | None:
        """The output of one member, and with it those of the others; None where it must be computed alone."""
        shared, state = slots.routing.shared, None
        if len(self.members) > 1:
            state = self.state(slots, x)
            if shared is not None and shared[0] is self:
                own = self.taken(shared, slots, x, state)
                if own is not None:
                    return own
        lead, path = self.lead()
        if path == BASE_ONLY or not self.ready():
            return None
        found = self.run(lead, path, x)
        if found is None:
            return None
        own = found[slots.index]
        if state is not None:
            if shared is not None and not torch.compiler.is_compiling():
                shared[0].wasted += 1
            found[slots.index] = None
            slots.routing.shared = self, x, state, found
        return own

    def state(self, slots: ModuleSlots, x: Tensor) -> tuple[Any, ...] | None:
        """What must not have changed when another member takes what one computed; None where that cannot be told.

        In traced code the tensor's identity must do: `siblings_of` has seen to it that nothing visible changes x
        between the calls. So it must in inference mode, where tensors have no versions, for the code that it read.
        """
        kind = x.device.type
        modes = torch.is_grad_enabled(), torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind)
        if torch.compiler.is_compiling():
            return modes
        if not x.is_inference():
            return *modes, x._version, self.versions()
        caller = sys._getframe(3).f_code  # of the module's __call__, which called `compute`
        return (*modes, self.versions()) if caller is slots.fed_by else None

    def versions(self) -> list[int]:
        """Of the weights and biases: they count changes in place."""
        names = ("weight",) if self.bias_buffer is None else ("weight", "bias")
        found = [module._parameters.get(name) for module, _ in self.members for name in names]
        return [-1 if parameter is None else parameter._version for parameter in found]

    def taken(
        self, shared: tuple[Any, ...], slots: ModuleSlots, x: Tensor, state: tuple[Any, ...] | None
    ) -> Tensor | None:
        """What another member computed for this one, if all is as it was; each is given once. shared: as the caller
        found it, since a load in another thread may take it away."""
        _, same, then, outs = shared
        own: Tensor | None = outs[slots.index]
        if same is not x or own is None or state is None or state != then:
            return None
        if not torch.compiler.is_compiling():
            if not (plain_call(self.members[slots.index][0]) and self.lies(slots.index)):
                return None
        outs[slots.index] = None
        if all(other is None for other in outs):
            slots.routing.shared = None  # else a traced graph would keep the outputs
            if self.wasted:
                self.wasted = 0
        return own

    def run(self, lead: ModuleSlots, path: int, x: Tensor) -> list[Tensor | None] | None:
        """The members' outputs for x; None where each is computed better alone."""
        backend, layout, routing, joint = lead.backend, lead.layout, lead.routing, self.joint
        assert layout is not None and joint is not None
        tracing, kernels = torch.compiler.is_compiling(), backend.expand_laid is not None
        if path == ONE:
            if tracing or not kernels:
                return None
            assert routing.uniform is not None
            rows, table = x.reshape(1, -1, x.shape[-1]), layout.alone(routing.uniform)
        else:
            assert layout.table is not None
            rows, table = routing.align(x, layout.closed.shape[0], lead.name, flat=lead.flat), layout.table
        many = rows.shape[0] * rows.shape[1] > dense_tokens(backend, self.width, self.buffer.is_cuda)
        if tracing or not kernels or (torch.is_grad_enabled() and rows.requires_grad):
            return None if many or path == ONE else self._gated(F.linear(rows, *self.used), x)
        lead_shape = x.shape[:-1]
        if many:
            y = F.linear(rows, *self.weights)
            outs = [y.new_empty((*lead_shape, size)) for size in self.sizes]
            tables = table.order, table.offsets, joint.starts, joint.ranks
            a = self.buffer[self.n :]
            h = backend.shrink(rows.to(a.dtype), a, *tables, joint.bound, early=True)
            if y.numel():
                four = [*outs, *outs[:1] * (MOST - len(outs))]
                backend.expand_parts(y, h, four, self.b, *tables, self.slices, self.even)  # type: ignore[misc]
            return outs  # type: ignore[return-value]
        flat = rows.reshape(-1, rows.shape[-1])
        bias = self.used[1]
        both = torch.mm(flat, self.turned) if bias is None else torch.addmm(bias, flat, self.turned)
        outs = [both.new_empty((*lead_shape, size)) for size in self.sizes]
        if both.numel():
            launch = self.launches.get((table, both.shape[0]))
            if launch is None or launch[0] != both.dtype:
                launch = both.dtype, self._prepared(both, table, joint, backend)
                self.launches[table, both.shape[0]] = launch
            launch[1](both, both, *outs, *outs[:1] * (MOST - len(outs)))
        return outs  # type: ignore[return-value]

    def _prepared(self, both: Tensor, table: RowTables, joint: Joint, backend: Backend) -> Callable[..., None]:
        """The launch of the expand for such calls; kept, since a step has hundreds."""
        if len(self.launches) >= LAUNCHES:
            self.launches.clear()
        tables = table.row_slots, table.order, table.offsets, joint.starts, joint.ranks, self.slices
        assert backend.expand_laid is not None
        return backend.expand_laid(both, table.row_slots.shape[0], self.b, *tables, self.n, joint.bound, self.even)

    def _gated(self, both: Tensor, x: Tensor) -> list[Tensor | None]:
        """From both = [y | h], [R, T, N + w * L], in plain torch: with gradients, or left to the compiler."""
        outs: list[Tensor | None] = []
        count = len(self.members)
        for i, (_, slots) in enumerate(self.members):
            y = both[..., self.edges[i] : self.edges[i + 1]]
            if slots.layout is None:
                out = y.contiguous()
            else:
                h = both[..., self.n + i :: count][..., : slots.b_used.shape[0]]
                out = expand_gated(y, h, slots.b_used, slots.layout.closed)
            outs.append(out.view(*x.shape[:-1], self.sizes[i]))
        return outs
