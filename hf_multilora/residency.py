"""The adapted modules of a model and what is in their slots: the store's `Device`."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers.utils import logging

from .agreement import number_of
from .census import kernelized
from .config import MultiLoRAConfig
from .filling import Filling
from .formats import Adapter, split_site
from .host import HostAdapter, host_budget
from .kernels.backends import TORCH, Backend, choose, why_not_triton
from .layers import ModuleSlots, SlotRows
from .layers.augmented import prepare
from .layers.joint import Joint
from .layers.local import follow, lead
from .layers.merged import Merged
from .patches.facts import Facts
from .pool import Layout, bucket
from .routing import RoutingError
from .store import AdapterStore

logger = logging.get_logger(__name__)


class Watched(NamedTuple):
    """All sites, flat: what is looked at before every request. rest: names of those at which more is.

    families: of Sites, another object whenever modules were adapted.
    """

    families: object
    each: list[tuple[nn.Module, str, nn.Module, nn.Module, str, SlotRows]]  # see `_watch`
    rest: list[str]

    def rests(self) -> bool:
        """Whether all modules are where they were adapted, and their views whole."""
        for parent, own, held, module, attribute, site in self.each:
            if parent._modules.get(own) is not held or module.__dict__.get(attribute) is not site or not site.looked:
                return False
        return True


def grouped(sites: Iterable[SlotRows]) -> tuple[dict[Any, list[SlotRows]], list[SlotRows]]:
    """(those whose pools look the same, by SlotRows.layout_key, those without adapters)."""
    groups: dict[Any, list[SlotRows]] = {}
    idle: list[SlotRows] = []
    last: SlotRows | None = None  # most look like the one before, which is seen in a tenth of the time of a key
    members: list[SlotRows] = []
    for site in sites:
        rows = site.rows
        if not rows.spans:
            idle.append(site)
            continue
        if (
            last is None
            or rows.spans != last.rows.spans
            or rows.capacity != last.rows.capacity
            or site.gated != last.gated
            or site.count is not None
            or last.count is not None
            or site.a.device != last.a.device
        ):
            members, last = groups.setdefault(site.layout_key(), []), site
        members.append(site)
    return groups, idle


class Residency(Filling):
    """What is in the slots of the adapted modules, and the store that decides it."""

    def __init__(self, model: nn.Module, config: MultiLoRAConfig, facts: Facts) -> None:
        super().__init__(model, config, facts)
        self.store = AdapterStore(self, config.max_loras, config.max_cpu_loras, self._host_budget())
        self._equipped: tuple[tuple[int, int] | None, set[int]] = (None, set())  # mark -> slots
        self._watched: Watched | None = None

    def pack(self, adapter: Adapter) -> HostAdapter:
        """See Filling.pack; in all processes or in none, and of one size for the limit of host memory."""
        pack = super().pack
        host = self.agree(f"the host copy of {adapter.source}", lambda: pack(adapter))
        if self.agreement is not None:
            host.agreed = self.agreement.most(host.nbytes), number_of(adapter.digest)
        return host

    def fill(self, slot: int, host: HostAdapter) -> None:
        """See Filling.fill; in all processes or in none."""
        fill = super().fill
        self.agree(f"the load to slot {slot}", lambda: fill(slot, host), lambda _: host.agreed[1])

    def _host_budget(self) -> int:
        """That of the process with the least: all must drop the same host copies."""
        return host_budget() if self.agreement is None else self.agreement.least(host_budget())

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_equipped": (None, set()), "_watched": None}

    def equip(self, slots: Collection[int]) -> None:
        """Modules where one of these slots has rows get their backend. Raises KernelError where it cannot be had."""
        if self._equipped[0] != self.mark():
            self._equipped = self.mark(), set()
        equipped = self._equipped[1]
        if equipped.issuperset(slots):
            return
        backends: dict[tuple[torch.device, torch.dtype], Backend] = {}
        for _, site in self.sites.values():
            if site.rows.spans.keys().isdisjoint(slots):
                continue
            where = site.a.device, site.a.dtype
            if where not in backends:
                backends[where] = choose(self.config.backend, self.config.deterministic, *where)
                self._say_if_slow(backends[where], *where)
            site.use(backends[where])
        equipped.update(slots)

    def _say_if_slow(self, backend: Backend, device: torch.device, dtype: torch.dtype) -> None:
        if device.type == "cuda" and backend.name == TORCH and self.config.backend == "auto":
            why = why_not_triton(device, dtype) or "the package triton is not installed"
            logger.warning_once(
                f"adapters on {device} are computed by plain torch operations, several times slower than by Triton "
                f"kernels: {why}; backend='torch' asks for that without this warning"
            )

    def settle(self, slots: Collection[int]) -> None:
        """Before a request with these slots. Raises RuntimeError where its rows would lose a module that was replaced,
        or is no longer called."""
        self.equip(slots)
        for name, outer in self.outers.items():
            follow(outer, self.sites[name][0])
        if any([prepare(members) for members in self.families()]):
            self._join()
            for name, outer in self.outers.items():
                lead(outer, self.sites[name][0])
        watched = self._watch()
        for name in watched.rest if watched.rests() else self.sites:
            module, site = self.sites[name]
            if not site.looked:
                site.look()
            if site.rows.spans.keys().isdisjoint(slots):
                continue
            if not self._in_place(name):
                raise self._replaced(name)
            why = kernelized(module, self.parents[name][0]) if site.kind == "router" or site.role == "experts" else None
            if why is not None:
                raise RuntimeError(f"{split_site(name)[0]} must be called where adapters train it, but {why}")
        if self.routing.captured_at not in (None, self.routing.moves):
            self.routing.captured_at = None
            logger.warning(
                "adapters were moved in memory or pools grew since a CUDA graph was captured on this model: capture it "
                "again. With max_lora_rank given, pools have their full size from the start"
            )

    def _watch(self) -> Watched:
        families = self.families()
        if self._watched is None or self._watched.families is not families:
            sites = self.sites.items()
            each = [  # parent, own name there, what must be there, what is adapted of it, attribute, its rows
                (*self.parents[name], self.outers.get(name, module), module, site.attribute, site)
                for name, (module, site) in sites
            ]
            rest = [name for name, (_, site) in sites if site.kind == "router" or site.role == "experts"]
            self._watched = Watched(families, each, rest)
        return self._watched

    def follow_loads(self) -> None:
        """What comes on the current stream comes after the loads and tables so far, which nobody waited for."""
        for staging in self.staging.values():
            staging.join()
        self.routing.follow()

    def refuse_tangents(self) -> None:
        """Raises RoutingError where Triton's kernels compute adapters: they would lose tangents without a word."""
        for name, (_, site) in self.sites.items():
            if site.layout is not None and site.backend.name != TORCH:
                raise RoutingError(
                    f"forward-mode derivatives need backend='torch', {name} is computed by Triton's kernels, which "
                    f"have none: load the model with from_pretrained(..., backend='torch'), or use backward()"
                )

    def refresh(self) -> None:
        """After slots changed: give every module the layout it shares with the modules whose pools look the same. A
        layout stays with its modules, so that captured graphs find it; where there are any, also without adapters."""
        self.follow_loads()
        if not self._stale:
            return
        layouts: list[Layout] = []
        captured = self.routing.captured_at == self.routing.moves
        with torch.inference_mode(False):
            groups, idle = grouped([slots for _, slots in self.sites.values()])
            for (items, parts, capacity, device, gated, experts), members in groups.items():
                spans, each, layout = dict(items), dict(parts), members[0].layout
                width = bucket(max(start + r for start, r in spans.values()), capacity) if gated else 0
                bound = max(max(each[slot]) if each else r for slot, (_, r) in spans.items())
                bound = bucket(bound) if gated else bound  # of saved heads: what traced calls pad logits to
                rows = capacity if gated else 0
                fits = layout is not None and (layout.capacity, layout.device) == (rows, device)
                if layout is None or not fits or any(layout is other for other in layouts):
                    most = self.config.max_lora_rank if gated or experts is not None else None  # heads have other ranks
                    most = None if most is None else bucket(most)
                    layout = Layout(rows, bound, self.config.max_loras, device, gated, experts, most)
                if (layout.width, layout.bound) != (width, max(bound, layout.bound)):
                    layout.reach(width, max(bound, layout.bound))
                layout.take(spans, each)
                layouts.append(layout)
                for slots in members:
                    slots.settle(layout)
            taken = {id(layout) for layout in layouts}
            for slots in idle:
                layout = slots.layout if captured else None
                if layout is not None and id(layout) not in taken:
                    layout.take({})
                    layouts += [] if any(layout is other for other in layouts) else [layout]
                    slots.settle(layout)
                else:
                    slots.settle(None)
        self._join()
        self.routing.relayout(layouts)
        self._stale = False

    def _join(self) -> None:
        """Give linears that are computed together tables of all their rank rows; those with the same layouts share
        them. Tables of layouts that stay keep their addresses, as captured graphs read them."""
        joints: dict[tuple[int, ...], Joint] = {}
        seats: list[tuple[Merged, Joint]] = []
        merged = {id(site.merged): site.merged for _, site in self.sites.values() if isinstance(site, ModuleSlots)}
        for one in merged.values():
            layouts = [] if one is None else [site.layout for _, site in one.members]
            if one is None or not any(layouts):
                continue
            key, kept = tuple(map(id, layouts)), one.joint
            if key not in joints:
                if kept is not None and kept.layouts == tuple(layouts):
                    kept.take()
                else:
                    kept = Joint(layouts)
                joints[key] = kept
            seats.append((one, joints[key]))
        named = {f"joint_{i}": joint for i, joint in enumerate(joints.values())}
        known = vars(self.routing.joints)
        if any(known.get(name, joint) is not joint for name, joint in named.items()):
            for one, _ in seats:  # an interrupt may come before all know the new names
                one.untell()
        for name, joint in named.items():
            joint.name = name
        self.routing.joints = SimpleNamespace(**named)
        for one, joint in seats:
            one.joint = joint

    def apply_to_parts(self, fn: Any) -> None:
        """What `nn.Module._apply` did to the model is done to the parts of its sharded linears."""
        for name, outer in self.outers.items():
            part = self.sites[name][0]
            part._apply(fn)
            follow(outer, part)

    def moved(self) -> None:
        """The model went to another device or dtype. Host copies that are coarser than it, or out of its range, go, and
        with another dtype all slots do: their rows were rounded on the way."""
        self._outdate()
        self.staging, self.seats = {}, {}
        dtypes = {name: self.dtype_of(name) for name in self.sites}
        converted, busy = [slots for _, slots in self.sites.values() if slots.converted], self.routing.open
        self.store.forget(lambda host: host.outdated(dtypes), slots=bool(converted), idle=not busy)
        for slots in converted:
            slots.converted = busy
        if busy:
            self.refresh()
            self.equip(range(self.config.max_loras))
