"""What a MultiLoRAModel carries: settings, routing, store and adapted modules, and the requests opened on them."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .catalogue import HostAdapter, check_name
from .config import MultiLoRAConfig
from .entry import parameter_names
from .formats import Adapter, ModuleShape, read_adapter
from .layers import ModuleSlots, take_census, unwrap, wrap
from .layers.augmented import settle
from .layers.slots import home_of
from .patches.facts import Facts
from .pool import BASE, Layout
from .routing import Request, Routing
from .store import AdapterInUseError, AdapterStore

HOST_SHARE = 0.25  # of the memory that is free at the start, for host copies of adapters


@dataclass(frozen=True)
class Reader:
    """Reads an adapter (again) from where it was first read."""

    runtime: Runtime
    path: str
    revision: str | None = None
    subfolder: str = ""

    def __call__(self) -> Adapter:
        runtime = self.runtime
        return read_adapter(
            self.path, runtime.census(), revision=self.revision, subfolder=self.subfolder, **runtime.reading()
        )


class Runtime:
    """The state behind a MultiLoRAModel; also the store's `Device`: it fills and empties slots of all modules."""

    def __init__(
        self, model: nn.Module, config: MultiLoRAConfig, facts: Facts, renames: Sequence[tuple[str, str]]
    ) -> None:
        self.model = model
        self.config = config
        self.facts = facts
        self.renames = tuple(renames)
        self.routing = Routing(config.max_loras)
        self.store = AdapterStore(self, config.max_loras, config.max_cpu_loras, host_budget())
        self.sites: dict[str, tuple[nn.Module, ModuleSlots]] = {}
        self.unmixable: set[str] = set()
        self.default: str | None = None
        self.parameters = parameter_names(model.forward)
        self._layouts: dict[Any, Layout] = {}
        self._stale = False
        self.lock = threading.RLock()

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k not in ("lock", "_layouts")} | {"_stale": True}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, lock=threading.RLock(), _layouts={})
        if self.default is not None:  # the copy holds its default's slot itself
            self.store.catalogue.entry(self.default).in_flight += 1

    def reading(self) -> dict[str, Any]:
        """What the reader of adapters must know of this base and its settings."""
        return {
            "max_rank": self.config.max_lora_rank,
            "target_modules": self.config.target_modules,
            "aliases": self.facts.aliases_in(name for name, _ in self.model.named_modules()),
            "renames": self.renames,
            "base_prefix": getattr(self.model, "base_model_prefix", ""),
        }

    # -- modules --------------------------------------------------------------------------------------------------------
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
                continue
            module, shape = self.model.get_submodule(name), census[name]
            slots = ModuleSlots(
                name, shape.in_features, shape.out_features, self.routing,
                flat=self.facts.matches("flat", name), tied=users[id(module._parameters.get("weight"))] > 1,
            )  # fmt: skip
            slots.fixed_dtype = self.config.dtype
            wrap(module, shape.kind, slots)
            if not shape.mixable:
                self.unmixable.add(name)
            self.sites[name] = (module, slots)

    def release_site(self, name: str) -> None:
        module, _ = self.sites.pop(name)
        unwrap(module)

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

    # -- the store's device -----------------------------------------------------------------------------------------------
    def pack(self, adapter: Adapter) -> HostAdapter:
        """Factors as slots hold them: B transposed, with the scale folded in; raises AdapterError where the pool's
        dtype cannot hold a value."""
        first, factors = self.paths(), {}
        for name, pair in adapter.factors.items():
            module = self.model.get_submodule(name)
            name = first[id(module)]
            dtype = self.dtype_of(module)
            a = pair.a.to(dtype).contiguous()
            b = (pair.b.float() * pair.scaling).t().to(dtype).contiguous()
            if not (bool(torch.isfinite(a).all()) and bool(torch.isfinite(b).all())):
                raise OverflowError(
                    f"{name}: the factors of {adapter.source} must be finite in {dtype}, some become Inf; "
                    f"pass lora_dtype='float32' or bfloat16"
                )
            factors[name] = (a, b)
        return HostAdapter(factors)

    @torch.inference_mode(False)
    @torch.no_grad()
    def fill(self, slot: int, host: HostAdapter) -> None:
        """Copy an adapter into a slot: one pass of bookkeeping, one scatter."""
        self._stale = True
        targets, sources = [], []
        for name, (a, b) in host.factors.items():
            module, slots = self.sites[name]
            need = max(self.capacity(name), slots.rows.used + a.shape[0])
            slots.reserve(need, home_of(module, module._parameters.get("weight")), self.dtype_of(module))
            targets += slots.place(slot, a.shape[0])
            sources += (a, b)
        torch._foreach_copy_(targets, sources)

    def empty(self, slot: int) -> None:
        self._stale = True
        for _, slots in self.sites.values():
            slots.clear(slot)

    def refresh(self) -> None:
        """After slots changed: give every module the layout it shares with the modules whose pools look the same."""
        if not self._stale:
            return
        table: dict[Any, Layout] = {}
        with torch.inference_mode(False):
            for _, slots in self.sites.values():
                key = slots.layout_key()
                if key is not None and key not in table:
                    table[key] = self._layouts.get(key) or Layout(key[0], key[1], self.config.max_loras, key[2])
                slots.settle(None if key is None else table[key])
        self._layouts = table
        self.routing.relayout(list(table.values()))
        self._stale = False

    def moved(self) -> None:
        """The model went to another device or dtype."""
        self._stale = True
        self.refresh()

    # -- adapters -------------------------------------------------------------------------------------------------------
    def register(self, name: str, adapter: Adapter, reader: Reader | None, *, replace: bool) -> None:
        """Adapt the modules that the adapter trains and put it in the store; on an error nothing is changed."""
        check_name(name)
        before = set(self.sites)
        first = self.paths()
        self.adapt([first[id(self.model.get_submodule(n))] for n in adapter.factors])
        try:
            if replace:
                self.store.replace(name, adapter, reader)
            else:
                self.store.register(name, adapter, reader)
        except BaseException:
            for new in set(self.sites) - before:
                self.release_site(new)
            raise

    def set_default(self, name: str | None) -> None:
        """What rows get when a call names none; the adapter stays in its slot while it is the default."""
        with self.lock:
            entry = None if name is None else self.store.catalogue.entry(name)
            slots = self.store.acquire([] if entry is None else [entry.id])
            self.refresh()
            self.routing.stand(BASE if entry is None else slots[entry.id])
            if self.default is not None:
                self.store.release([self.store.catalogue.entry(self.default).id])
            self.default = name

    def require_not_default(self, name: str, verb: str) -> None:
        if name is not None and name == self.default:
            raise AdapterInUseError(f"adapter {name!r} must not be {verb} while it is the default; set_adapter(None) first")

    def give_up_embeddings(self, verb: str) -> None:
        """Before the embedding or the head is replaced: refuse where an adapter trains it, forget its empty site else."""
        get = (self.model.get_input_embeddings, self.model.get_output_embeddings)  # type: ignore[operator]
        first = self.paths()
        for name in {first[id(module)] for module in (f() for f in get) if module is not None} & set(self.sites):
            users = [e.name for e in self.store.catalogue if name in e.ranks]
            if users:
                raise ValueError(
                    f"{verb} must not replace {name}, which adapters {users[:5]} train: their rows would lose it. Delete "
                    f"them first, or resize the base before MultiLoRAModel.from_pretrained"
                )
            self.release_site(name)

    # -- requests -------------------------------------------------------------------------------------------------------
    def resolve(self, names: Any, ids: Any) -> list[int] | None:
        """Adapter ids of a call's rows, None where it names none. Raises for both at once, unknown names and ids."""
        if names is not None and ids is not None:
            raise ValueError("a call must name its adapters once: pass adapter_names or adapter_ids, not both")
        if names is not None:
            if isinstance(names, str) or not isinstance(names, Sequence):
                raise TypeError(
                    f"adapter_names must be a list with one name (or None for the base) per row, got {names!r}"
                )
            odd = [n for n in names if n is not None and not isinstance(n, str)]
            if odd:
                raise TypeError(f"adapter_names must hold names or None, got {odd[0]!r}")
            return self.store.catalogue.ids_of(names)
        if ids is None:
            return None
        if isinstance(ids, torch.Tensor):
            if ids.dim() != 1 or ids.is_floating_point() or ids.dtype == torch.bool:
                raise TypeError(f"adapter_ids must be integers [rows], got {ids.dtype} {tuple(ids.shape)}")
            ids = ids.tolist()
        if any(not isinstance(i, int) or isinstance(i, bool) for i in ids):
            raise TypeError(f"adapter_ids must be integers [rows], got {ids!r}")
        for i in set(ids) - {0}:
            self.store.catalogue.by_id(i)
        return list(ids)

    def limits(self, ids: Sequence[int]) -> tuple[int, bool]:
        """How many distinct adapters fit in one pass of a call with these ids, and whether its rows can mix at all."""
        wanted = set(ids) - {0}
        trained = {name for i in wanted for name in self.store.catalogue.by_id(i).ranks}
        return self.store.room(wanted), not (trained & self.unmixable)

    @contextmanager
    def request(self, ids: Sequence[int], *, ragged: bool = False) -> Iterator[None]:
        """Route `ids` (one per row; ragged: one per token) while the block runs; nothing is left behind."""
        with self.lock:
            slots = self.store.acquire(ids)
            try:
                self.refresh()
                for module, site in self.sites.values():
                    settle(module, site)
                self.routing.push(Request(tuple(slots.get(i, BASE) for i in ids), ragged=ragged))
                try:
                    yield
                finally:
                    self.routing.pop()
            finally:
                self.store.release(slots)


def host_budget() -> int:
    """Bytes of host memory for adapters: HOST_SHARE of what is free now."""
    try:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):  # not a POSIX system
        return 4 << 30
    return math.floor(free * HOST_SHARE)
