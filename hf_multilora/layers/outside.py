"""Experts outside Transformers' experts interface: the class's own forward runs, deltas are added where it multiplies.

Which tokens an expert gets is known to another module, the teller (see patches/experts.py). It has no rank rows: while
a site needs it, it has the class of one of the mixins here, and what they need in `_told`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..patches.experts import GATHERING, PARAMETERS
from ..routing import Request, Routing, RoutingError
from .base import AdaptedLayer, mix
from .expert_slots import ExpertSlots
from .experts import Pairs, add_deltas, expand, row_table, slots_in
from .rows import BASE_ONLY, MIXED, SlotRows
from .slots import ModuleSlots

Call = Callable[..., Any]


def layer_kind(module: nn.Module, kind: str) -> str:
    """The kind of layer that adapts a module of this kind in the census."""
    return PARAMETERS.get(type(module).__name__, kind)


# -- experts that hold all weights ---------------------------------------------------------------------------------
class LoraStacked(AdaptedLayer, role="experts", kind="stacked"):
    """Adds `B (A x)` of each pair to what `torch.bmm` with the module's parameters gives: hidden_states [E * T, H]."""

    _experts: tuple[ExpertSlots, ...]  # of all its projections

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        if _idle(self):
            return super().__call__(hidden_states, *args, **kwargs)
        adds = AddToProducts(self, hidden_states)
        with adds:
            output = super().__call__(hidden_states, *args, **kwargs)
        if sorted(adds.met) != sorted(adds.names.values()):
            raise RoutingError(
                f"{self._experts[0].name}: its forward must multiply once with each of {sorted(adds.names.values())}, "
                f"it did with {sorted(adds.met)}, so adapters' parts cannot be added; leave the experts out of the "
                f"adapter"
            )
        return output


class AddToProducts(TorchFunctionMode):
    """While it is on, products of all experts with a parameter [E, in, out] get the pairs' deltas; `met`: which."""

    def __init__(self, module: Any, hidden: Tensor) -> None:
        super().__init__()
        self.module, self.met = module, list[str]()
        self.names = {tuple(p.shape): name for name, p in module._parameters.items()}
        count = next(iter(self.names))[0]
        slots = _slots_of_tokens(module, hidden.reshape(count, -1, hidden.shape[-1])[0])
        experts = torch.arange(count, device=hidden.device).repeat_interleave(slots.shape[0])
        self.pairs = _pairs(module, experts, slots.repeat(count))

    def __torch_function__(self, func: Call, types: Sequence[type], args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        name = self.names.get(tuple(args[1].shape)) if func is torch.bmm else None
        if name is None:
            return output
        self.met.append(name)
        x = args[0].reshape(-1, args[0].shape[-1])
        return _added(self.module, name, output.view(-1, output.shape[-1]), x, self.pairs).view(output.shape)


class LoraSorted(AdaptedLayer, role="experts", kind="sorted"):
    """Adds `B (A x)` of each pair: inputs [n, in], sorted by expert, and how many of them each expert gets."""

    _experts: tuple[ExpertSlots, ...]

    def __call__(self, inputs: Tensor, expert_size: Any, *args: Any, **kwargs: Any) -> Any:
        output = super().__call__(inputs, expert_size, *args, **kwargs)
        if _idle(self):
            return output
        first = self._experts[0]
        if first.open_mix():
            raise _untraceable(first.name)
        experts = torch.arange(len(expert_size)).repeat_interleave(torch.tensor(expert_size)).to(inputs.device)
        if any(slots.path() == MIXED for slots in self._experts):
            if not isinstance(expert_size, Sizes):
                raise RoutingError(
                    f"{first.name}: its expert_size must be what the router beside it returned, which says whose the "
                    f"inputs are, got a plain {type(expert_size).__name__}; run one adapter per call"
                )
            slots = _slots_of_tokens(self, expert_size.hidden)[expert_size.tokens]
        else:
            slots = torch.full_like(experts, first.routing.uniform)  # type: ignore[arg-type]
        (name,) = self._parameters  # type: ignore[attr-defined]
        return _added(self, name, output, inputs, _pairs(self, experts, slots))


def _idle(module: Any) -> bool:
    return all(slots.path() == BASE_ONLY for slots in module._experts)


def _pairs(module: Any, experts: Tensor, slots: Tensor) -> Pairs:
    """Pairs of these experts and slots, int64 [n]; deltas are not shared by the pairs of a token."""
    width, at = module._experts[0].routing.slots + 1, torch.arange(slots.shape[0], device=slots.device)
    keys = (experts * width + slots).to(torch.int32)
    return Pairs(keys, at, at[:, None], slots, width, module._experts[0].count or 0)


def _slots_of_tokens(module: Any, hidden: Tensor) -> Tensor:
    """int32 [T]: slot of each token of hidden [T, H], the last for the base's."""
    return slots_in(row_table(module, hidden), hidden.shape[0], module._experts[0].routing.slots)


def _added(module: Any, name: str, y: Tensor, x: Tensor, pairs: Pairs) -> Tensor:
    """y [n, out], which the parameter gave for x [n, in], with the deltas: y itself, but where a gradient is wanted."""
    y, late = add_deltas(module, name, y, x, None, pairs)
    for slots, h in late:
        y = expand(slots, y, h, pairs.slots, None)
    return y


# -- experts that are modules of linears ----------------------------------------------------------------------------
@dataclass(eq=False)
class Gathered(Request):
    """The slots of the tokens that one expert got. teller: path of the module that gathered them."""

    teller: str = ""


class GatheredSlots(ModuleSlots):
    """Rank rows of a linear inside an expert: in a mixed batch only its teller knows whose its rows are."""

    teller = ""

    def _mixed(self) -> int:
        if self.open_mix():
            raise _untraceable(self.name)
        request = self.routing.stack[-1]
        if not isinstance(request, Gathered) or request.teller != self.teller:
            raise RoutingError(
                f"{self.name}: in a mixed batch it must be called by {self.teller}, which knows whose tokens it gets; "
                f"run one adapter per call"
            )
        return super()._mixed()


class GathersTokens(AdaptedLayer):
    """States, before each expert, the slots of the tokens that it gets: hidden_states [T, H]."""

    _told: Told

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        routing = self._told.routing
        if not routing.open or not routing.active or routing.uniform is not None:
            return super().__call__(hidden_states, *args, **kwargs)
        states = StateSlots(self._told, hidden_states)
        try:
            try:
                with states:
                    return super().__call__(hidden_states, *args, **kwargs)
            finally:
                states.close()
        finally:  # once more, as an interrupt of the first would leave the rows of an expert to all that comes after
            states.close()


class StateSlots(TorchFunctionMode):
    """While it is on, tokens gathered from `hidden` [T, H] by one index are the rows of the calls that follow."""

    def __init__(self, told: Told, hidden: Tensor) -> None:
        super().__init__()
        self.routing, self.shape = told.routing, hidden.shape
        self.request = Gathered((), ragged=True, teller=told.name)
        self.around = self.routing.rows, self.routing.tokens
        rows = self.routing.align(hidden, self.routing.rows, told.name, flat=True)
        self.slots = [slot for slot in self.routing.row_slots for _ in range(rows.shape[1])]  # of each token

    def __torch_function__(self, func: Call, types: Sequence[type], args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__getitem__ and args[0].shape == self.shape:
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            tokens = [part for part in index if isinstance(part, Tensor)]
            if len(tokens) == 1 and tokens[0].dim() == 1 and tokens[0].dtype == torch.int64:
                self.request.slots = tuple(self.slots[token] for token in tokens[0].tolist())
                if self.request in self.routing.stack:
                    self.routing.enter(len(self.request.slots))
                else:
                    self.routing.push(self.request)
        return func(*args, **(kwargs or {}))

    def close(self) -> None:
        """The rows around are in force again."""
        if self.request in self.routing.stack:
            self.routing.pop(self.request)
        if self.routing.open:
            self.routing.enter(*self.around)


class Sizes(list[int]):
    """How many tokens each expert gets; tokens int64 [n]: which, sorted by expert, of hidden [T, H]."""

    def __init__(self, sizes: Sequence[int], tokens: Tensor, hidden: Tensor) -> None:
        super().__init__(sizes)
        self.tokens, self.hidden = tokens, hidden


class SortsTokens(AdaptedLayer):
    """Returns (order, tokens, weights, sizes, logits) with sizes that say whose tokens are counted."""

    _told: Told

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        output = super().__call__(hidden_states, *args, **kwargs)
        if not self._told.routing.active or torch.compiler.is_compiling():
            return output
        order, tokens, weights, sizes, *rest = output
        return order, tokens, weights, Sizes(sizes, tokens, hidden_states), *rest


def _untraceable(name: str) -> RoutingError:
    return RoutingError(
        f"{name}: which tokens an expert gets must be known while the call runs, so a call whose rows mix adapters can "
        f"be neither compiled in one graph nor captured; run the model without torch.compile and CUDA graphs"
    )


# -- tellers --------------------------------------------------------------------------------------------------------
@dataclass(eq=False)
class Told:
    """What a teller needs: its path, the routing, and the sites that it is needed for."""

    name: str
    routing: Routing
    sites: set[str] = field(default_factory=set)


def require_free_teller(name: str, module: nn.Module, routing: Routing) -> None:
    """Raises ValueError where another model follows the teller."""
    told = module.__dict__.get("_told")
    if told is not None and told.routing is not routing:
        raise ValueError(
            f"{name}: no other MultiLoRAModel may have adapted experts in it, one that shares it has (as {told.name}); "
            f"unpatch() that one, or give each a copy of the module (copy.deepcopy)"
        )


def follow(name: str, module: nn.Module, slots: SlotRows, site: str) -> None:
    """Have the teller say for `site`, which has these rank rows, whose tokens it gets."""
    told = module.__dict__.setdefault("_told", Told(name, slots.routing))
    told.sites.add(site)
    if isinstance(slots, GatheredSlots):
        slots.teller = told.name
    if not isinstance(module, (GathersTokens, SortsTokens)):
        own: Any = type(module)
        module.__class__ = mix((GathersTokens if own.__name__ in GATHERING else SortsTokens,), own)


def unfollow(module: nn.Module, site: str) -> None:
    """Undo `follow`: the teller is as it was once no site needs it."""
    told = module.__dict__.get("_told")
    if told is None:
        return
    told.sites.discard(site)
    if not told.sites:
        if "_mixed" in type(module).__dict__:
            module.__class__ = type(module).__bases__[-1]
        del module.__dict__["_told"]
