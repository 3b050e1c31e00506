"""Experts with weights of their own outside Transformers' interface: deltas are added where their forward multiplies.

The class's own forward runs, whatever wraps it (hooks, offloading); patches/experts.py says how each class multiplies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from ..routing import RoutingError
from .base import AdaptedLayer
from .expert_slots import ExpertSlots
from .experts import add_deltas, expand
from .outside import Sizes, untraceable
from .pairs import Pairs, row_table, slots_in
from .rows import BASE_ONLY, MIXED

Call = Callable[..., Any]


class LoraStacked(AdaptedLayer, role="experts", kind="stacked"):
    """Adds `B (A x)` of each pair to what `torch.bmm` with the module's parameters gives: hidden_states [E * T, H]."""

    _experts: tuple[ExpertSlots, ...]  # of all its projections

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        if _idle(self):
            return super().__call__(hidden_states, *args, **kwargs)
        parameters: dict[str, Tensor] = self._parameters  # type: ignore[attr-defined]
        count = next(iter(parameters.values())).shape[0]
        slots = _slots_of_tokens(self, hidden_states.reshape(count, -1, hidden_states.shape[-1])[0])
        experts = torch.arange(count, device=hidden_states.device).repeat_interleave(slots.shape[0])
        met: list[str] = []
        with AddToProducts(self, _pairs(self, experts, slots.repeat(count)), met):
            output = super().__call__(hidden_states, *args, **kwargs)
        if sorted(met) != sorted(parameters):
            raise _unfollowed(self._experts[0].name, f"once with each of {sorted(parameters)}", str(sorted(met)))
        return output


class AddToProducts(TorchFunctionMode):
    """While it is on, products of all experts with a parameter [E, in, out] get the pairs' deltas; `met`: which."""

    def __init__(self, module: Any, pairs: Pairs, met: list[str]) -> None:
        super().__init__()
        self.module, self.pairs, self.met = module, pairs, met

    def __torch_function__(self, func: Call, types: Sequence[type], args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if func is not torch.bmm:
            return output
        for name, parameter in self.module._parameters.items():
            if parameter.shape == args[1].shape:
                self.met.append(name)
                x, y = args[0].reshape(-1, args[0].shape[-1]), output.view(-1, output.shape[-1])
                return _added(self.module, name, y, x, self.pairs).view(output.shape)
        return output


class LoraSorted(AdaptedLayer, role="experts", kind="sorted"):
    """Adds `B (A x)` of each pair: inputs [n, in], sorted by expert, and how many of them each expert gets."""

    _experts: tuple[ExpertSlots, ...]

    def __call__(self, inputs: Tensor, expert_size: Any, *args: Any, **kwargs: Any) -> Any:
        output = super().__call__(inputs, expert_size, *args, **kwargs)
        if _idle(self):
            return output
        first = self._experts[0]
        if first.open_mix():
            raise untraceable(first.name)
        experts = torch.arange(len(expert_size)).repeat_interleave(torch.tensor(expert_size)).to(inputs.device)
        if any(slots.path() == MIXED for slots in self._experts):
            if not isinstance(expert_size, Sizes) or expert_size.tokens is None or expert_size.hidden is None:
                raise RoutingError(
                    f"{first.name}: its expert_size must be what the router beside it returned, which says whose the "
                    f"inputs are, got a plain {type(expert_size).__name__}; run one adapter per call"
                )
            slots = _slots_of_tokens(self, expert_size.hidden)[expert_size.tokens]
        else:
            slots = torch.full_like(experts, first.routing.uniform)  # type: ignore[arg-type]
        (name,) = self._parameters  # type: ignore[attr-defined]
        return _added(self, name, output, inputs, _pairs(self, experts, slots))


class LoraLooped(AdaptedLayer, role="experts", kind="looped"):
    """Adds `B (A x)` of each pair where the forward multiplies the tokens of one expert after another: hidden_states
    [T, H], top_k_index and top_k_weights [T, K]."""

    _experts: tuple[ExpertSlots, ...]

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        if _idle(self):
            return super().__call__(hidden_states, *args, **kwargs)
        first = self._experts[0]
        if first.open_mix():
            raise untraceable(first.name)
        adds = AddInLoop(self, hidden_states)
        with adds:
            output = super().__call__(hidden_states, *args, **kwargs)
        if set(adds.met.values()) != {adds.gathered} or not adds.gathered:
            raise _unfollowed(first.name, f"each expert's tokens with each of {sorted(adds.met)}", str(adds.met))
        return output


class AddInLoop(TorchFunctionMode):
    """While it is on, products of gathered tokens with one expert's entry of a parameter [E, out, in] get the deltas.

    gathered: how often tokens were; met: parameter -> its products.
    """

    def __init__(self, module: Any, hidden: Tensor) -> None:
        super().__init__()
        self.module, self.shape, self.gathered = module, hidden.shape, 0
        self.slots = _slots_of_tokens(module, hidden)
        self.met = dict.fromkeys(module._parameters, 0)
        self.taken: tuple[Tensor, str, int] | None = None  # an expert's entry, of which parameter, which expert

    def __torch_function__(self, func: Call, types: Sequence[type], args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if func is Tensor.__getitem__ and args[0].shape == self.shape:
            self.tokens, self.gathered = args[1], self.gathered + 1
        elif func is Tensor.__getitem__:
            names = [name for name in self.met if args[0] is self.module._parameters[name]]
            self.taken = (output, names[0], int(args[1])) if names else self.taken
        elif func is F.linear and self.taken is not None and args[1] is self.taken[0]:
            _, name, expert = self.taken
            self.met[name] += 1
            slots = self.slots[self.tokens]
            experts = torch.full_like(slots, expert)
            return _added(self.module, name, output, args[0], _pairs(self.module, experts, slots))
        return output


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


def _unfollowed(name: str, wanted: str, got: str) -> RoutingError:
    return RoutingError(
        f"{name}: its forward must multiply {wanted}, it did with {got}, so adapters' parts cannot be added; leave the "
        f"experts out of the adapter"
    )
