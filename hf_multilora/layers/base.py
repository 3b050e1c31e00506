"""The mixin of adapted modules, and the registry of its kinds.

A module is adapted by giving it a class that mixes a `LoraLayer` into its own class: the object, its parameters, hooks,
names and isinstance checks stay. `wrap` and `unwrap` do it and undo it.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from . import augmented
from .slots import ModuleSlots

MIXINS: dict[str, type[LoraLayer]] = {}  # kind of module -> mixin; filled by the files of this folder


class LoraLayer:
    """Mixed in front of a module's class; its rank rows are `self._lora`.

    The delta is added in `__call__`, around whatever the class, an instance `forward` (accelerate, tensor parallelism)
    or hooks do: hooks of users see the base output.
    """

    _lora: ModuleSlots

    if TYPE_CHECKING:  # the class it is mixed into is a module

        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

    def __init_subclass__(cls, kind: str | None = None, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if kind is not None:
            MIXINS[kind] = cls

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        super()._apply(fn, recurse)  # type: ignore[misc]
        self._lora.apply(fn)
        augmented.settle(self, self._lora)  # type: ignore[arg-type]
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)  # type: ignore[misc]
        if keep_vars or self._lora.buffer is None:
            return
        for name in ("weight", "bias"):  # the storage behind them holds tenants' rows, which no base file may carry
            tensor: Tensor | None = destination.get(prefix + name)
            if tensor is not None:
                destination[prefix + name] = tensor.clone()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A pickled weight brings the whole buffer it lay in; give it storage of its own."""
        super().__setstate__(state)  # type: ignore[misc]
        if state["_lora"].tied:  # never laid
            return
        for parameter in self._parameters.values():  # type: ignore[attr-defined]
            if type(parameter) is nn.Parameter and parameter.untyped_storage().nbytes() > parameter.nbytes:
                parameter.data = parameter.data.clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle and deepcopy through (base class, mixin): the mixed class has no import path of its own."""
        return _rebuild, (type(self).__bases__[1], type(self).__bases__[0]), state_of(self)


def state_of(module: Any) -> dict[str, Any]:
    """What the module's class puts into a pickle."""
    own = getattr(type(module), "__getstate__", None)  # object has one from Python 3.11 on
    if own is None or own is getattr(object, "__getstate__", None):
        return dict(module.__dict__)
    return dict(module.__getstate__())


def _rebuild(cls: type, mixin: type) -> Any:
    mixed: Any = mix(mixin, cls)
    return mixed.__new__(mixed)


@functools.cache
def mix(mixin: Any, cls: Any) -> type:
    """The class `mixin + cls`, under the name and module of `cls` (Transformers reads the source of that module)."""
    return type(cls.__name__, (mixin, cls), {"__module__": cls.__module__, "__qualname__": cls.__qualname__})


def require_free(module: nn.Module, name: str) -> None:
    """Raises ValueError where another model has adapted the module: it can follow one routing."""
    if isinstance(module, LoraLayer):
        raise ValueError(
            f"{name}: no other MultiLoRAModel may have adapted it, one that shares it has (as {module._lora.name}); "
            f"unpatch() that one, or give each a copy of the module (copy.deepcopy)"
        )


def wrap(module: nn.Module, kind: str, slots: ModuleSlots) -> None:
    """Adapt `module` in place. Raises ValueError where another model has adapted it."""
    require_free(module, slots.name)
    module.__dict__["_lora"] = slots
    own: Any = type(module)
    mixin: Any = MIXINS[kind]
    module.__class__ = mix(mixin, own)


def require_unwrappable(module: nn.Module) -> None:
    """Raises RuntimeError where someone else changed the module's class after it was adapted."""
    if LoraLayer not in type(module).__bases__[0].__bases__:
        raise RuntimeError(
            f"{module._lora.name}: its class must be the one it was adapted with, it became "  # type: ignore[union-attr]
            f"{type(module).__name__}; undo that first (torch.nn.utils.parametrize.remove_parametrizations)"
        )


def unwrap(module: nn.Module) -> None:
    """Give `module` back exactly as it was: class, storage of its own, no attribute left."""
    wrapped = isinstance(module, LoraLayer)  # not so where `wrap` was interrupted
    if wrapped:
        require_unwrappable(module)
    augmented.unlay(module, module.__dict__["_lora"])
    if wrapped:
        module.__class__ = type(module).__bases__[1]
    del module.__dict__["_lora"]
