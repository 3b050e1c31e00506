"""The adapted modules of a model."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import nn

from .census import take_census
from .config import MultiLoRAConfig
from .formats import ModuleShape
from .layers import ModuleSlots, require_free, unwrap, wrap
from .patches.facts import Facts
from .routing import Routing
from .store import AdapterStore


class Sites:
    """sites: path of an adapted module -> the module and its rank rows. parents: path -> its parent and its own name.

    store: which adapters are registered; set by whoever extends this.
    """

    store: AdapterStore

    def __init__(self, model: nn.Module, config: MultiLoRAConfig, facts: Facts) -> None:
        self.model = model
        self.config = config
        self.facts = facts
        self.routing = Routing(config.max_loras)
        self.sites: dict[str, tuple[nn.Module, ModuleSlots]] = {}
        self.parents: dict[str, tuple[nn.Module, str]] = {}

    def census(self) -> dict[str, ModuleShape]:
        return take_census(self.model, self.facts)

    def paths(self) -> dict[int, str]:
        """id(module) -> its first path: a module reached by two paths has one site."""
        return {id(module): name for name, module in self.model.named_modules()}

    def first_path(self, name: str) -> str:
        return self.paths()[id(self.model.get_submodule(name))]

    def adapt(self, names: Sequence[str]) -> None:
        """Give the modules rank rows (none yet); modules that have them are left alone."""
        census = self.census()
        users: dict[int, int] = {}
        for module in self.model.modules():
            weight = module._parameters.get("weight")
            users[id(weight)] = users.get(id(weight), 0) + 1
        for name in names:
            if name in self.sites:
                if self._in_place(name):
                    continue
                if any(name in entry.ranks for entry in self.store.catalogue):
                    raise self._replaced(name)
                self.release_site(name)
            module, shape = self.model.get_submodule(name), census[name]
            slots = ModuleSlots(
                name, shape.in_features, shape.out_features, self.routing,
                flat=self.facts.matches("flat", name), tied=users[id(module._parameters.get("weight"))] > 1,
                mixable=shape.mixable,
            )  # fmt: skip
            slots.fixed_dtype = self.config.dtype
            require_free(module, name)
            parent, _, own = name.rpartition(".")
            self.parents[name] = (self.model.get_submodule(parent), own)
            self.sites[name] = (module, slots)  # before it is wrapped: an interrupt must find what to undo
            wrap(module, shape.kind, slots)

    def release_site(self, name: str) -> None:
        module, slots = self.sites[name]
        if module.__dict__.get("_lora") is slots:
            unwrap(module)
        del self.sites[name]
        del self.parents[name]

    def require_in_place(self, names: Collection[str]) -> None:
        """Raises RuntimeError where one of these adapted modules was replaced."""
        for name in names:
            if not self._in_place(name):
                raise self._replaced(name)

    def _in_place(self, name: str) -> bool:
        parent, own = self.parents[name]
        module, slots = self.sites[name]
        return parent._modules.get(own) is module and module.__dict__.get("_lora") is slots

    def _replaced(self, name: str) -> RuntimeError:
        trained = [entry.name for entry in self.store.catalogue if name in entry.ranks]
        return RuntimeError(
            f"{name} must be the module that was adapted, it was replaced by another, and adapters {trained[:5]} train "
            f"it: their rows would lose it. Put it back, or delete them; or unpatch() and call from_pretrained again"
        )

    def dtype_of(self, module: nn.Module) -> torch.dtype:
        if self.config.dtype is not None:
            return self.config.dtype
        weight = module._parameters.get("weight")
        if weight is not None and weight.is_floating_point():
            return weight.dtype
        return getattr(self.model, "dtype", torch.float32)
