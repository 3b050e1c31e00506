"""The adapted modules of a model and what is in their slots: the store's `Device`."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import logging

from .catalogue import HostAdapter
from .census import take_census
from .config import MultiLoRAConfig
from .formats import Adapter, AdapterError, ModuleShape
from .kernels.backends import choose
from .layers import ModuleSlots, unwrap, wrap
from .layers.augmented import prepare
from .layers.slots import home_of
from .patches.facts import Facts
from .pool import Layout
from .routing import Routing
from .store import AdapterStore

logger = logging.get_logger(__name__)
HOST_SHARE = 0.25  # of the memory that is free at the start, for host copies of adapters


class Residency:
    """sites: path of an adapted module -> the module and its rank rows."""

    def __init__(self, model: nn.Module, config: MultiLoRAConfig, facts: Facts) -> None:
        self.model = model
        self.config = config
        self.facts = facts
        self.routing = Routing(config.max_loras)
        self.store = AdapterStore(self, config.max_loras, config.max_cpu_loras, host_budget())
        self.sites: dict[str, tuple[nn.Module, ModuleSlots]] = {}
        self.parents: dict[str, tuple[nn.Module, str]] = {}  # of the adapted modules: parent, own name
        self._stale = False

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_stale": True}

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
            wrap(module, shape.kind, slots)
            self.sites[name] = (module, slots)
            parent, _, own = name.rpartition(".")
            self.parents[name] = (self.model.get_submodule(parent), own)

    def release_site(self, name: str) -> None:
        module, _ = self.sites.pop(name)
        del self.parents[name]
        unwrap(module)

    def settle(self, slots: Collection[int]) -> None:
        """Before a request with these slots. Raises RuntimeError where its rows would lose a replaced module."""
        for name, (module, site) in self.sites.items():
            prepare(module, site)
            if not self._in_place(name) and not site.rows.spans.keys().isdisjoint(slots):
                raise self._replaced(name)
        if self.routing.captured_at not in (None, self.routing.moves):
            self.routing.captured_at = None
            logger.warning(
                "adapters were moved in memory or pools grew since a CUDA graph was captured on this model: capture it "
                "again. With max_lora_rank given, pools have their full size from the start"
            )

    def require_in_place(self, names: Collection[str]) -> None:
        """Raises RuntimeError where one of these adapted modules was replaced."""
        for name in names:
            if not self._in_place(name):
                raise self._replaced(name)

    def _in_place(self, name: str) -> bool:
        parent, own = self.parents[name]
        return parent._modules.get(own) is self.sites[name][0]

    def _replaced(self, name: str) -> RuntimeError:
        trained = [entry.name for entry in self.store.catalogue if name in entry.ranks]
        return RuntimeError(
            f"{name} must be the module that was adapted, it was replaced by another, and adapters {trained[:5]} train "
            f"it: their rows would lose it. Put it back, or delete them; or unpatch() and call from_pretrained again"
        )

    def capacity(self, name: str) -> int:
        """Rank rows the pool of a module should have: see MultiLoRAConfig.max_lora_rank."""
        if self.config.max_lora_rank is not None:
            return self.config.max_loras * self.config.max_lora_rank
        ranks = sorted((e.ranks.get(name, 0) for e in self.store.catalogue), reverse=True)
        return sum(ranks[: self.config.max_loras])

    def dtype_of(self, module: nn.Module) -> torch.dtype:
        if self.config.dtype is not None:
            return self.config.dtype
        weight = module._parameters.get("weight")
        if weight is not None and weight.is_floating_point():
            return weight.dtype
        return getattr(self.model, "dtype", torch.float32)

    def without_buffers(self, state: Any) -> Any:
        """Replace tensors of a state dict that lie in a buffer with A by copies."""
        laid = {s.buffer.untyped_storage().data_ptr() for _, s in self.sites.values() if s.buffer is not None}
        for key, value in state.items():
            if isinstance(value, Tensor) and not value.is_meta and value.untyped_storage().data_ptr() in laid:
                state[key] = value.clone()
        return state

    # -- the store's device ----------------------------------------------------------------------------------
    def pack(self, adapter: Adapter) -> HostAdapter:
        """Factors as slots hold them: B transposed, with the scale folded in.

        Raises AdapterError where the pool's dtype cannot hold a value.
        """
        first = self.paths()
        factors: dict[str, tuple[Tensor, Tensor]] = {}
        for given, pair in adapter.factors.items():
            module = self.model.get_submodule(given)
            name = first[id(module)]
            dtype = self.dtype_of(module)
            a = pair.a.to(dtype).contiguous()
            b = (pair.b.to(torch.promote_types(dtype, torch.float32)) * pair.scaling).t().to(dtype).contiguous()
            if not (bool(torch.isfinite(a).all()) and bool(torch.isfinite(b).all())):
                raise AdapterError(
                    f"{name}: the factors of {adapter.source} must be finite in {dtype}, some become Inf; pass "
                    f"lora_dtype='float32' or 'bfloat16'"
                )
            if name in factors and not all(map(torch.equal, factors[name], (a, b))):
                raise AdapterError(
                    f"{given} and {name} are one module of this base, so {adapter.source} must hold the same factors "
                    f"for both, they differ; load the base it was trained on"
                )
            factors[name] = (a, b)
        return HostAdapter(factors)

    @torch.inference_mode(False)
    @torch.no_grad()
    def fill(self, slot: int, host: HostAdapter) -> None:
        """Copy an adapter into a slot: one pass of bookkeeping, one scatter."""
        self.empty(slot)  # an interrupt may have left rows there
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        for name, (a, b) in host.factors.items():
            module, slots = self.sites[name]
            need = slots.rows.used + a.shape[0]
            if need > slots.rows.capacity:
                need = max(need, self.capacity(name))
            slots.reserve(need, home_of(module, module._parameters.get("weight")), self.dtype_of(module))
            targets += slots.place(slot, a.shape[0])
            sources += (a, b)
        torch._foreach_copy_(targets, sources)

    def empty(self, slot: int) -> None:
        self._stale = True
        for _, slots in self.sites.values():
            slots.clear(slot)

    def refresh(self) -> None:
        """After slots changed: give every module the layout it shares with the modules whose pools look the same, and
        its backend. A layout stays with its modules, so that captured graphs find it."""
        if not self._stale:
            return
        groups: dict[Any, list[ModuleSlots]] = {}
        layouts: list[Layout] = []
        with torch.inference_mode(False):
            for _, slots in self.sites.values():
                key = slots.layout_key()
                if key is None:
                    slots.settle(None)
                    continue
                slots.backend = choose(self.config.backend, self.config.deterministic, slots.a.device, slots.a.dtype)
                groups.setdefault(key, []).append(slots)
            for (spans, width, bound, device), members in groups.items():
                layout = members[0].layout
                fits = layout is not None and (layout.width, layout.device) == (width, device) and layout.bound >= bound
                if layout is None or not fits or any(layout is other for other in layouts):
                    layout = Layout(width, bound, self.config.max_loras, device)
                layout.take(dict(spans))
                layouts.append(layout)
                for slots in members:
                    slots.settle(layout)
        self.routing.relayout(layouts)
        self._stale = False

    def moved(self) -> None:
        """The model went to another device or dtype. Host copies that are coarser than it, or out of its range, go."""
        self._stale = True
        self.store.forget(self._outdated)
        self.refresh()

    def _outdated(self, host: HostAdapter) -> bool:
        for name, (a, _) in host.factors.items():
            dtype = self.dtype_of(self.sites[name][0])
            if dtype != a.dtype and (torch.promote_types(dtype, a.dtype) != a.dtype or dtype == torch.float16):
                return True
        return False


def host_budget() -> int:
    """Bytes of host memory for adapters: HOST_SHARE of what is free now."""
    try:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):  # not a POSIX system
        return 4 << 30
    return math.floor(free * HOST_SHARE)
