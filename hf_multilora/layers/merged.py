"""Linears that one input feeds, computed by one matmul and one expand.

Where a linear's weight can be laid in a buffer (see augmented.py), those of its siblings lie in the same one: q, k and
v, or gate and up. Whichever of them is called first computes all; the others find their output in `routing.shared`, if
they are called with the same tensor, unchanged since. A guess of siblings that is wrong costs time, never correctness.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from ..pool import fixed
from .joint import Joint
from .plain import plain_call
from .rows import BASE_ONLY
from .slots import ModuleSlots
from .together import Product, Step, run
from .traced import modes, tell, untell


class Merged:
    """L linears in one buffer [W_1; ...; W_L; A], rank row p of the i-th at row p * L + i of A, and in one flat b.

    members: the linears and their rank rows, which are views of `buffer` and `b` while they are `laid`.
    one_a: they have one A (see one_a.py), so rank row p of all of them is row p of A, and `lanes` is 1, else L.
    whole: all are. sizes: their output features. width: rank rows of each
    in the occupied prefix. used: views of that, and not numbers, since a traced graph takes tensors as inputs and would
    be traced anew for a number. wasted: runs whose outputs the other members did not take.
    """

    def __init__(
        self, members: Sequence[tuple[nn.Module, ModuleSlots]], buffer: Tensor, bias: Tensor | None, b: Tensor,
        one_a: bool,
    ) -> None:  # fmt: skip
        self.members, self.one_a = tuple(members), one_a
        self.buffer, self.bias_buffer, self.b = buffer, bias, b
        self.sizes = [slots.out_features for _, slots in members]
        self.edges = [0, *accumulate(self.sizes)]
        self.n = self.edges[-1]
        self.places = [0, *accumulate(slots.rows.capacity * slots.out_features for _, slots in members)]  # in b
        table = list(zip(self.edges[:-1], self.sizes, self.places[:-1], strict=True))
        self.slices = torch.tensor(table, dtype=torch.int64).to(buffer.device) if len(table) > 1 else None
        self.weights = buffer[: self.n], None if bias is None else bias[: self.n]
        self.addresses = [  # module, where its weight and bias were laid
            (module, buffer[low].data_ptr(), None if bias is None or module.bias is None else bias[low].data_ptr())
            for low, (module, _) in zip(self.edges, self.members, strict=False)
        ]
        self.before: list[tuple[Merged, int] | None] = [None] * len(table)  # while members move here
        self.even = not any(number % 16 for row in table for number in row)
        self.step: Step | None = None  # the last one
        self._joint: Joint | None = None
        self.joint_name = ""  # under which traced code finds it; none: it is not told
        self.leads: list[ModuleSlots] = []
        self.wasted = 0
        self.look()

    def look(self) -> None:
        """Set what follows from the members' rank rows and layouts."""
        untell(self)  # an interrupt half way must not leave what was
        all_slots = [slots for _, slots in self.members]
        self.whole = all(slots.laid and slots.merged is self for slots in all_slots)
        self.width = max((slots.layout.width for slots in all_slots if slots.layout is not None), default=0)
        end = self.n + self.width * self.lanes
        self.used = self.buffer[:end], None if self.bias_buffer is None else self.bias_buffer[:end]
        fixed(*(tensor for tensor in (*self.used, self.slices, self.b) if tensor is not None))
        self.step = None
        layouts = {id(slots.layout): slots for slots in reversed(all_slots) if slots.layout is not None}
        self.leads = list(layouts.values())[::-1]  # one for each layout
        tell(self)

    @property
    def lanes(self) -> int:
        """Rank rows of the buffer for each that a member has."""
        return 1 if self.one_a else len(self.members)

    def of_one_a(self) -> list[ModuleSlots]:
        """The members whose A is the one of the buffer; none where each has its own. By address, as an interrupt may
        have left one half way here."""
        at = self.buffer[self.n :].data_ptr()
        return [slots for _, slots in self.members if self.one_a and slots.a.data_ptr() == at]

    @property
    def joint(self) -> Joint | None:
        """The tables of all members' rank rows."""
        return self._joint

    @joint.setter
    def joint(self, joint: Joint) -> None:
        self.step = None
        if joint is not self._joint or joint.name != self.joint_name:
            self.untell()
            self._joint, self.joint_name = joint, joint.name
            tell(self)

    def untell(self) -> None:
        """Traced code computes each linear alone until the joint is set again."""
        untell(self)
        self.joint_name = ""

    @torch.inference_mode(False)
    @torch.no_grad()
    def leave(self, index: int) -> None:
        """A member has moved elsewhere. A weight that somebody took out of its module takes no tenant's rows along."""
        if self.one_a:
            if all(slots is self.members[index][1] for slots in self.of_one_a()):
                self.buffer[self.n :].zero_()
        else:
            self.buffer[self.n + index :: self.lanes].zero_()
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
        module, at, bias_at = self.addresses[index]
        parameters = module._parameters
        weight, bias = parameters.get("weight"), parameters.get("bias")
        if weight is None or weight.data_ptr() != at:
            return False
        return bias is None if bias_at is None else bias is not None and bias.data_ptr() == bias_at

    def ready(self) -> list[tuple[int, int]] | None:
        """Versions of the weights and biases, which count changes in place, if a call may use the buffer as
        `augmented.prepare` laid it; a weight that left it is laid at the next request. While gradients of a weight or
        bias are wanted the buffer, which is no Parameter, is not used."""
        if not self.whole or self._joint is None:
            return None
        versions, gradients = [], torch.is_grad_enabled()
        for module, at, bias_at in self.addresses:
            if not plain_call(module):
                return None
            parameters = module.__dict__["_parameters"]
            weight, bias = parameters.get("weight"), parameters.get("bias")
            if weight is None or (bias is None) != (bias_at is None):
                return None
            if gradients and (weight.requires_grad or (bias is not None and bias.requires_grad)):
                return None
            if weight.data_ptr() != at or (bias is not None and bias.data_ptr() != bias_at):
                return None
            versions.append((weight._version, 0 if bias is None else bias._version))
        return versions

    def compute(self, slots: ModuleSlots, x: Tensor) -> Tensor | None:
        """The output of one member, and with it those of the others; None where it must be computed alone."""
        routing = slots.routing
        shared = routing.shared
        if shared is not None and shared[0] is self:
            own = self.taken(shared, slots, x)
            if own is not None:
                return own
        found, step = None, None
        if not (x.requires_grad and torch.is_grad_enabled()):
            step = self.step
        same = step is not None and step.call == (routing.stamp, x.shape, x.dtype, None)
        if not same and self.lead()[1] == BASE_ONLY:
            return None
        versions = self.ready()
        if versions is None:
            return None
        if same:
            found = step.again(x)  # type: ignore[union-attr]
        if found is None:
            found = run(self, x)
            if found is None:
                return None
        own = found[slots.index]
        if len(found) > 1:
            if shared is not None and shared[4]:  # traced code's count for nothing
                shared[0].wasted += 1
            version: int | None = None  # of x: none in inference mode
            if not x.is_inference():
                version = x._version
            elif sys._getframe(2).f_code is not slots.fed_by:  # of the module's __call__
                self.wasted += 1
                return own
            found[slots.index] = None
            if version is None:  # what its code calls before it may come after a change
                found[: slots.index] = [None] * slots.index
            routing.shared = self, x, modes(x), version, versions, found
        return own

    def product(self, x: Tensor, product: Product) -> Tensor | None:
        """act(gate) * up of these two members' outputs; None where they must be called for it."""
        if x.requires_grad and torch.is_grad_enabled():
            return None
        stamp, step = self.members[0][1].routing.stamp, self.step
        same = step is not None and step.call == (stamp, x.shape, x.dtype, product)
        if not same and self.lead()[1] == BASE_ONLY:
            return None
        if self.ready() is None:
            return None
        found = step.again(x) if same else None  # type: ignore[union-attr]
        if found is None:
            found = run(self, x, product)
        return None if found is None else found[0]

    def taken(self, shared: tuple[Any, ...], slots: ModuleSlots, x: Tensor) -> Tensor | None:
        """What another member computed for this one, if all is as it was; each is given once. shared: as the caller
        found it, since a load in another thread may take it away.

        In inference mode, where tensors have no versions, the tensor's identity must do for the code that `siblings_of`
        has read: nothing visible changes x between a call and later ones.
        """
        _, same, then, version, versions, outs = shared
        index = slots.index
        own: Tensor | None = outs[index]
        if same is not x or own is None or then != modes(x) or not versions:  # traced code has none
            return None
        if version is None:
            if sys._getframe(3).f_code is not slots.fed_by:  # of the module's __call__, which called `compute`
                return None
        elif version != x._version:
            return None
        module = self.members[index][0]
        if not plain_call(module) or not self.lies(index):
            return None
        weight, bias = module._parameters["weight"], module._parameters.get("bias")
        if versions[index] != (weight._version, 0 if bias is None else bias._version):  # type: ignore[union-attr]
            return None
        outs[index] = None
        if all(other is None for other in outs):
            slots.routing.shared = None
            if self.wasted:
                self.wasted = 0
        return own
