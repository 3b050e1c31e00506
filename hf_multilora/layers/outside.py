"""Whose tokens an expert gets, where it is outside Transformers' experts interface.

Another module knows, the teller (see patches/experts.py). It has no rank rows: while a site needs it, it has the class
of one of the mixins here, and what they need in `_told`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..patches.experts import GATHERING, PARAMETERS
from ..routing import Request, Routing, RoutingError
from .base import AdaptedLayer, mix
from .rows import SlotRows
from .slots import ModuleSlots

Call = Callable[..., Any]


def layer_kind(module: nn.Module, kind: str) -> str:
    """The kind of layer that adapts a module of this kind in the census."""
    held = PARAMETERS.get(type(module).__name__)
    return kind if held is None else held.multiplies


@dataclass(eq=False)
class Gathered(Request):
    """The slots of the tokens that one expert got. teller: path of the module that gathered them."""

    teller: str = ""


class GatheredSlots(ModuleSlots):
    """Rank rows of a linear inside an expert: in a mixed batch only its teller knows whose its rows are."""

    teller = ""

    def _mixed(self) -> int:
        if self.open_mix():
            raise untraceable(self.name)
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
        self.afresh = hidden.requires_grad and torch.is_grad_enabled() and self.routing.captured_at is None
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
                self._spare()
                if self.request in self.routing.stack:
                    self.routing.enter(len(self.request.slots))
                else:
                    self.routing.push(self.request)
        return func(*args, **(kwargs or {}))

    def close(self) -> None:
        """The rows around are in force again."""
        self._spare()
        if self.request in self.routing.stack:
            self.routing.pop(self.request)
        self._spare()
        if self.routing.open:
            self.routing.enter(*self.around)

    def _spare(self) -> None:
        """What was written so far is not written over where a gradient still needs it."""
        if self.afresh:
            self.routing.tables.clear()
            self.routing._written = None
            for layout in self.routing.layouts:
                layout.afresh()


class Sizes(list[int]):
    """How many tokens each expert gets; tokens int64 [n]: which, sorted by expert, of hidden [T, H]. Copies of it that
    accelerate makes of arguments have neither."""

    def __init__(self, sizes: Iterable[int], tokens: Tensor | None = None, hidden: Tensor | None = None) -> None:
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


def untraceable(name: str) -> RoutingError:
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
