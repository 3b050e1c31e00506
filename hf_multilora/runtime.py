"""What a MultiLoRAModel carries: settings, routing, store and adapted modules, and the requests opened on them."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from .agreement import number_of
from .catalogue import Limits, check_name
from .config import MultiLoRAConfig
from .entry import parameter_names
from .formats import SAVED, Adapter, AdapterError, site_name, split_site
from .patches.facts import Facts
from .pool import BASE
from .reader import Reader
from .residency import Residency
from .routing import Request, RoutingError
from .store import AdapterInUseError


class Runtime(Residency):
    """The state behind a MultiLoRAModel: what is resident, the default adapter, and the requests opened on it."""

    def __init__(
        self, model: nn.Module, config: MultiLoRAConfig, facts: Facts, renames: Sequence[tuple[str, str]]
    ) -> None:
        super().__init__(model, config, facts)
        self.renames = tuple(renames)
        self.default: str | None = None
        self.fresh: frozenset[str] = frozenset()  # modules that the base's checkpoint lacks: they hold random values
        self._unequipped = False  # modules of the default may have the backend of before a move
        self.parameters = parameter_names(model.forward)
        self.lock = threading.RLock()

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in super().__getstate__().items() if k != "lock"} | {"_unequipped": True}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, lock=threading.RLock())
        if self.default is not None:  # the copy holds its default's slot itself
            self.store.catalogue.entry(self.default).in_flight += 1

    def reading(self) -> dict[str, Any]:
        """What the reader of adapters must know of this base and its settings."""
        return {
            "max_rank": self.config.max_lora_rank,
            "target_modules": self._targets(),
            "aliases": self.facts.aliases_in(name for name, _ in self.model.named_modules()),
            "renames": self.renames,
            "base_prefix": getattr(self.model, "base_model_prefix", ""),
        }

    def _targets(self) -> Sequence[str] | str | None:
        """The setting, with PEFT's "all-linear" as the linears of this base except its output head, and experts and
        routers, which were linears for Transformers 4 and which PEFT still takes for such in some models."""
        if self.config.target_modules != "all-linear":
            return self.config.target_modules
        model: Any = self.model
        head = model.get_output_embeddings()
        kinds = ("linear", "experts", "router")
        linears = [name for name, shape in self.census().items() if shape.kind in kinds]
        return [name for name in linears if head is None or model.get_submodule(name) is not head]

    # -- adapters --------------------------------------------------------------------------------------------
    def register(self, name: str, adapter: Adapter, reader: Reader | None, *, replace: bool) -> None:
        """Adapt the modules that the adapter trains and put it in the store; on an error nothing is changed."""
        check_name(name)
        self._refuse_capped(adapter)
        with self.store.lock:
            before = set(self.sites)
            try:
                sites = list(self.first_sites(adapter.factors).values())
                self.agree(f"adapter {name!r}", lambda: self.adapt(sites), lambda _: number_of(name))
                if replace:
                    self.store.replace(name, adapter, reader)
                else:
                    self.store.register(name, adapter, reader)
            except BaseException:
                trained = {name for entry in self.store.catalogue for name in entry.ranks}  # an interrupt may come late
                for new in set(self.sites) - before - trained:
                    self.release_site(new)
                raise

    def _refuse_capped(self, adapter: Adapter) -> None:
        """Raises AdapterError where logits of another number are capped by the model: the fill behind a row's own would
        become a number."""
        config: Any = getattr(self.model, "config", None)
        if config is None or not getattr(config.get_text_config(), "final_logit_softcapping", None):
            return
        for site, pair in adapter.factors.items():
            module = self.module_of(site)
            if split_site(site)[1] == SAVED and isinstance(module, nn.Linear) and pair.r != module.out_features:
                raise AdapterError(
                    f"{adapter.source}: {split_site(site)[0]} must have {module.out_features} rows as the base's, got "
                    f"{pair.r}: this model caps its logits (final_logit_softcapping), so that rows of other adapters "
                    f"could not end in -inf; resize the base (resize_token_embeddings) before from_pretrained"
                )

    def set_default(self, name: str | None) -> None:
        """What rows get when a call names none; the adapter stays in its slot while it is the default."""
        if name is not None and not isinstance(name, str):
            raise TypeError(f"set_adapter takes one name, or None for the base, got {name!r}")
        with self.lock:
            self.rest(seat=False)
            entry = None if name is None else self.store.catalogue.entry(name)
            slots = self.seat([] if entry is None else [entry.id])
            try:
                self.equip(slots.values())
            except BaseException:
                self.store.release(slots)
                raise
            old, self.default = self.default, name
            self.routing.stand(BASE if entry is None else slots[entry.id])
            if not self.routing.open:
                self.store.hold_only([] if entry is None else [entry.id])
            elif old is not None:
                self.store.release([self.store.catalogue.entry(old).id])

    def rest(self, *, seat: bool) -> None:
        """Between calls only the default is held, and stands: after an interrupt more may be, or something else.

        seat: a call that names none follows, so a default that lost its slot, as its copy was outdated, gets one, and
        its modules their backend; else the base may stand for it.
        """
        if self.routing.open:
            return
        ids = [] if self.default is None else [self.store.catalogue.entry(self.default).id]
        self._unequipped |= self._stale
        if ids and ids[0] not in self.store.slots:
            self.store.hold_only([])
            self.routing.stand(BASE)
            self._unequipped = True
            if seat:
                self.seat(ids, before_pins=True)
            else:
                ids = []
        self.store.hold_only(ids)
        slots = [self.store.slots[i] for i in ids]
        with self.store.lock:
            self.refresh()
            if seat and self._unequipped:
                self.equip(slots)
                self._unequipped = False
        self.routing.stand(slots[0] if slots else BASE)

    def moved(self) -> None:
        """See Residency.moved; a default whose copy was outdated is read again. Raises AdapterError where the new dtype
        cannot hold it: calls that name no adapter then raise, until set_adapter names another."""
        super().moved()
        with self.lock:
            if self.default is not None:
                self.rest(seat=True)

    def require_default_whole(self) -> None:
        """Raises RuntimeError where a module that the default adapter trains was replaced, RoutingError where what
        rows get by default has no head."""
        self.require_heads([0 if self.default is None else self.store.catalogue.entry(self.default).id])
        if self.default is not None:
            self.require_in_place(self.store.catalogue.entry(self.default).ranks)

    def require_heads(self, ids: Iterable[int]) -> None:
        """Raises RoutingError where a row would get random values: of modules that the base's checkpoint lacks, as it
        has no head, and that the row's adapter does not bring."""
        if not self.fresh or not self.store.catalogue.entries:
            return
        for i in dict.fromkeys(ids):
            ranks: Mapping[str, int] = self.store.catalogue.by_id(i).ranks if i else {}
            lacking = sorted(path for path in self.fresh if site_name(path, SAVED) not in ranks)
            if lacking:
                who = f"adapter {self.store.catalogue.by_id(i).name!r}" if i else "the base"
                raise RoutingError(
                    f"every row must have its {lacking[0]} from its adapter, since the base's checkpoint has none, and "
                    f"rows of {who} have not; name an adapter with modules_to_save={lacking!r}, or load a base that "
                    f"has this head"
                )

    def in_force(self) -> list[int]:
        """Adapters that rows of a call that names none may get: those of the open request, else the default."""
        if self.routing.open:
            slots = self.routing.stack[-1].slots
            return [i for i, slot in self.store.slots.items() if slot in slots]
        return [] if self.default is None else [self.store.catalogue.entry(self.default).id]

    def require_not_default(self, name: str, verb: str) -> None:
        if name is not None and name == self.default:
            raise AdapterInUseError(
                f"adapter {name!r} must not be {verb} while it is the default; set_adapter(None) first"
            )

    def give_up_embeddings(self, verb: str) -> None:
        """Before embedding or head are replaced: refuse where an adapter trains them, else forget their empty sites."""
        model: Any = self.model
        found = [m for m in (model.get_input_embeddings(), model.get_output_embeddings()) if m is not None]
        held = {name: self.outers.get(name, module) for name, (module, _) in self.sites.items()}
        for name in [name for name, module in held.items() if any(module is m for m in found)]:
            users = [e.name for e in self.store.catalogue if name in e.ranks]
            if users:
                raise ValueError(
                    f"{verb} must not replace {split_site(name)[0]}, which adapters {users[:5]} train: their rows "
                    f"would lose it. Delete them first, or resize the base before MultiLoRAModel.from_pretrained"
                )
            self.release_site(name)

    # -- requests --------------------------------------------------------------------------------------------
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
        if not isinstance(ids, Sequence) or any(not isinstance(i, int) or isinstance(i, bool) for i in ids):
            raise TypeError(f"adapter_ids must be integers [rows], got {ids!r}")
        for i in set(ids) - {0}:
            self.store.catalogue.by_id(i)
        return list(ids)

    def limits(self, ids: Sequence[int]) -> Limits:
        """How many distinct adapters fit in one pass of a call with these ids, and whether its rows can mix at all."""
        wanted = set(ids) - {0}
        trained = {name for i in wanted for name in self.store.catalogue.by_id(i).ranks}
        mixable = all(self.sites[name][1].mixable for name in trained)
        return Limits(*self.store.room(wanted), mixable, self.store.max_loras)

    def seat(self, ids: Sequence[int], *, before_pins: bool = False) -> dict[int, int]:
        """`store.acquire`, then new layouts, also after an error: adapters in force may have been moved before it."""
        with self.store.lock:  # a load in another thread adds sites
            try:
                slots = self.store.acquire(ids, before_pins=before_pins)
            except BaseException:
                self.refresh()
                raise
            try:
                self.refresh()
            except BaseException:
                self.store.release(slots)
                raise
            return slots

    @contextmanager
    def request(self, ids: Sequence[int], *, ragged: bool = False) -> Iterator[None]:
        """Route `ids` (one per row; ragged: one per token) while the block runs; nothing is left behind."""
        with self.lock:
            self.routing.require_no_transform()
            self.require_heads(ids)
            self.rest(seat=False)
            slots = self.seat(ids)
            try:
                with self.store.lock:
                    self.settle(slots.values())
                request = Request(tuple(slots.get(i, BASE) for i in ids), ragged=ragged)
                try:
                    self.routing.push(request)
                    yield
                finally:
                    try:
                        if request in self.routing.stack:
                            self.routing.pop(request)
                    except KeyboardInterrupt:  # left open, its rows would be those of the next call
                        if request in self.routing.stack:
                            self.routing.pop(request)
                        raise
            finally:
                self.store.release(slots)
