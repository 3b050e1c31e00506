"""The mixins of adapted modules, and the registry of their kinds.

A module is adapted by giving it a class that mixes one layer per role into its own class: the object, its parameters,
hooks, names and isinstance checks stay. `wrap` and `unwrap` do it and undo it.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..routing import Routing
from . import augmented
from .rows import SlotRows
from .slots import ModuleSlots
from .traced import ATTRIBUTE, tell

# Outermost first: what a row's adapter saved in full stands for the base's output and its deltas
ROLES = ("saved", "tokens", "lora", "experts")
MIXINS: dict[tuple[str, str], type[AdaptedLayer]] = {}  # (role, kind of module) -> mixin; filled by this folder's files


class AdaptedLayer:
    """Mixed in front of a module's class; its rank rows are `self._lora`, `self._saved`, `self._tokens`, ...

    The rows' own part is added in `__call__`, around whatever the class, an instance `forward` (accelerate, tensor
    parallelism) or hooks do: hooks of users see the base output (of a sharded linear, with the rows' part).
    """

    _lora: ModuleSlots

    if TYPE_CHECKING:  # the class it is mixed into is a module

        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

    def __init_subclass__(cls, role: str = "lora", kind: str | None = None, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if kind is not None:
            MIXINS[role, kind] = cls

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        super()._apply(fn, recurse)  # type: ignore[misc]
        for slots in slots_of(self):  # type: ignore[arg-type]
            slots.apply(fn)
        if "_lora" in self.__dict__:
            augmented.settle(self, self._lora)  # type: ignore[arg-type]
        return self

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Also what an assignment to `weight` or `bias` calls: traced code cannot see that it left the buffer."""
        super().register_parameter(name, param)  # type: ignore[misc]
        slots = self.__dict__.get("_lora")
        if isinstance(slots, ModuleSlots) and slots.merged is not None:
            tell(slots.merged)

    @torch.compiler.assume_constant_result
    def _multilora_routing(self) -> weakref.ref[Routing] | None:
        """While a trace runs that began at an entry point of the model, its routing. Dynamo calls this once."""
        routing = self._lora.routing
        return weakref.ref(routing) if routing.trace.inside() else None

    @torch.compiler.assume_constant_result
    def _multilora_buffer(self) -> str:
        """One for all linears of a buffer, another for each buffer. A trace may take it as a constant: that linears of
        one parent share one is in what it checks of them, see traced.py."""
        merged = self._lora.merged
        return "" if merged is None else merged.members[0][1].name

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)  # type: ignore[misc]
        if keep_vars or "_lora" not in self.__dict__ or self._lora.merged is None:
            return
        for name in ("weight", "bias"):  # the storage behind them holds tenants' rows, which no base file may carry
            tensor: Tensor | None = destination.get(prefix + name)
            if tensor is not None:
                destination[prefix + name] = tensor.clone()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A pickled weight brings the whole buffer it lay in; give it storage of its own."""
        super().__setstate__(state)  # type: ignore[misc]
        if "_lora" not in state or state["_lora"].tied:  # never laid
            return
        for parameter in self._parameters.values():  # type: ignore[attr-defined]
            if type(parameter) is nn.Parameter and parameter.untyped_storage().nbytes() > parameter.nbytes:
                parameter.data = parameter.data.clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle and deepcopy through (base class, mixins): the mixed class has no import path of its own."""
        *mixins, own = type(self).__bases__
        return _rebuild, (own, tuple(mixins)), state_of(self)


def slots_of(module: nn.Module) -> Iterator[SlotRows]:
    """The rank rows that the module has, by role."""
    found = [value for value in module.__dict__.values() if isinstance(value, SlotRows)]
    yield from sorted(found, key=lambda slots: ROLES.index(slots.role))


def state_of(module: Any) -> dict[str, Any]:
    """What the module's class puts into a pickle."""
    own = getattr(type(module), "__getstate__", None)  # object has one from Python 3.11 on
    plain = own is None or own is getattr(object, "__getstate__", None)
    state = dict(module.__dict__ if plain else module.__getstate__())
    state.pop(ATTRIBUTE, None)  # of a buffer that a copy does not lie in
    return state


def _rebuild(cls: type, mixins: tuple[type, ...]) -> Any:
    mixed: Any = mix(mixins, cls)
    return mixed.__new__(mixed)


@functools.cache
def mix(mixins: tuple[Any, ...], cls: Any) -> type:
    """The class of the mixins and `cls`, under the name and module of `cls` (Transformers reads the source of that
    module)."""
    body = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "_mixed": True}
    return type(cls.__name__, (*mixins, cls), body)


def _remix(module: nn.Module, without: SlotRows | None = None) -> None:
    """Give the module the class for the rank rows that it has, but for those that it is about to lose."""
    cls: Any = type(module)
    own = cls.__bases__[-1] if "_mixed" in cls.__dict__ else cls
    held = [slots for slots in slots_of(module) if slots is not without]
    module.__dict__["_experts"] = tuple(slots for slots in held if slots.role == "experts")
    if not module.__dict__["_experts"]:
        del module.__dict__["_experts"]
    mixins = dict.fromkeys(MIXINS[slots.role, slots.kind] for slots in held)
    module.__class__ = mix(tuple(mixins), own) if mixins else own


def require_free(module: nn.Module, slots: SlotRows) -> None:
    """Raises ValueError where another model has adapted the module: it can follow one routing."""
    for other in slots_of(module):
        if other.routing is not slots.routing or other.attribute == slots.attribute:
            raise ValueError(
                f"{slots.name}: no other MultiLoRAModel may have adapted it, one that shares it has (as {other.name}); "
                f"unpatch() that one, or give each a copy of the module (copy.deepcopy)"
            )


def wrap(module: nn.Module, kind: str, slots: SlotRows) -> None:
    """Adapt `module` in place, in the role of `slots`. Raises ValueError where another model has adapted it."""
    require_free(module, slots)
    slots.kind = kind
    module.__dict__[slots.attribute] = slots
    _remix(module)


def require_unwrappable(module: nn.Module) -> None:
    """Raises RuntimeError where someone else changed the module's class after it was adapted."""
    if isinstance(module, AdaptedLayer) and "_mixed" not in type(module).__dict__:
        name = next(slots.name for slots in slots_of(module))
        raise RuntimeError(
            f"{name}: its class must be the one it was adapted with, it became {type(module).__name__}; undo that "
            f"first (torch.nn.utils.parametrize.remove_parametrizations)"
        )


def unwrap(module: nn.Module, slots: SlotRows) -> None:
    """Give `module` back as it was before it had these rank rows: class, storage of its own, no attribute left."""
    require_unwrappable(module)
    if slots.role == "lora":
        augmented.unlay(module, module.__dict__["_lora"])
    _remix(module, without=slots)
    del module.__dict__[slots.attribute]
