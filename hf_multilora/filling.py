"""Adapters into the slots of the adapted modules, and out of them: what the store's `Device` does."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .config import MultiLoRAConfig
from .formats import A_ONE, B_ONE, LORA, Adapter, is_lora, split_half, split_site
from .host import HostAdapter, Place, out_of_memory, pack
from .kernels.backends import TORCH, has_triton
from .layers import ExpertSlots, SlotRows
from .layers.one_a import apart
from .layers.rows import Pool, home_of, own_tensor
from .moe import experts_of
from .parallel import ALL
from .patches.facts import Facts
from .pool import pool_rows
from .sites import Sites
from .staging import Staging, remote, span_of
from .store import CapacityError


def at_home(module: nn.Module, slots: SlotRows) -> bool:
    """Whether the rank rows are where the module computes, in its dtype."""
    tensor = own_tensor(module)
    return (
        tensor is not None
        and tensor.device == slots.a.device
        and slots.a.dtype is (slots.fixed_dtype or tensor.dtype)
        and "_hf_hook" not in module.__dict__
    )


class Seat(NamedTuple):
    """A slot and its last tenant: while nothing of this changed, an adapter of that shape finds its rows there.

    place, families: of the routing and Sites: others' rows may come and go, these stay where they are while no memory
    moves and no gap between rows is closed. places, parts: of the tenant. modules: its own, with the device and dtype
    of their tensors. homes: device of rank rows -> names of modules.
    """

    place: tuple[int, int]
    families: object
    places: Mapping[str, tuple[Place, Place]]
    parts: Mapping[str, tuple[int, ...]]
    modules: list[tuple[nn.Module, torch.device, torch.dtype]]
    homes: dict[torch.device, list[str]]

    def suits(self, host: HostAdapter) -> bool:
        """Whether the adapter is of that shape, and its modules compute where they did, in the same dtype."""
        for module, device, dtype in self.modules:
            weight = module._parameters.get("weight")
            tensor = own_tensor(module) if weight is None else weight
            if tensor is None or tensor.dtype is not dtype or tensor.device != device or "_hf_hook" in module.__dict__:
                return False
        return host.places == self.places and host.parts == self.parts


class Filling(Sites):
    """Fills and empties slots. _stale: rows came or went, so modules need new layouts (see Residency.refresh).

    seats: by slot. changes: how often rows came or went.
    """

    def __init__(self, model: nn.Module, config: MultiLoRAConfig, facts: Facts) -> None:
        super().__init__(model, config, facts)
        self.staging: dict[torch.device, Staging] = {}  # kept, as large as the largest adapter
        self.seats: dict[int, Seat] = {}
        self.changes = 0
        self._stale = False

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_families": None, "staging": {}, "seats": {}, "_stale": True}

    def _outdate(self) -> None:
        """Before rows come or go."""
        self._stale = True
        self.changes += 1

    def mark(self) -> tuple[int, int]:
        """Another one whenever rows came or went, or memory moved."""
        return self.changes, self.routing.moves

    def capacities(self) -> dict[str, int]:
        """Rank rows that the pools of all modules should have: one pass over the adapters."""
        ranks: dict[str, list[int]] = {name: [] for name in self.sites}
        for entry in self.store.catalogue:
            for name, r in entry.ranks.items():
                ranks[name].append(r)
        return {name: self.rows_for(name, found, self.config.max_loras) for name, found in ranks.items()}

    def rows_for(self, site: str, ranks: Iterable[int], slots: int) -> int:
        """Rank rows that the pool of a site should have, from the ranks of the adapters there."""
        role, most = split_site(site)[1], self.config.max_lora_rank
        if role == LORA:
            return pool_rows(ranks, slots, most)
        if not is_lora(site) or most is None:
            return pool_rows(ranks, slots, None, SlotRows.unit)
        shape = experts_of(self.module_of(site))
        assert shape is not None and shape.experts is not None
        return slots * most * (1 if split_half(role)[1] in (A_ONE, B_ONE) else shape.experts.count)

    # -- the store's device ----------------------------------------------------------------------------------
    def pack(self, adapter: Adapter) -> HostAdapter:
        """The adapter in host memory, page-locked where it goes to a CUDA device. Raises as `host.pack` does."""
        names = self.first_sites(adapter.factors)
        if self.shards:
            factors = {given: self.shards.get(names[given], ALL).of(pair) for given, pair in adapter.factors.items()}
            adapter = replace(adapter, factors=factors)
        host = pack(adapter, names, {name: self.dtype_of(name) for name in names.values()})
        if any(home_of(self.module_of(name)).type == "cuda" for name in names.values()):
            host.pin()
        return host

    def fill(self, slot: int, host: HostAdapter) -> None:
        """Replace what is in a slot by an adapter: per device one copy, unless it was brought ahead, and one scatter.
        They are under way on return: what comes later on the current stream comes after them (see Staging).

        Rows of the same rank stay where they are. After an error pools are what they were, and the caller empties the
        slot. Raises CapacityError where the memory of a device runs out, also without what was brought ahead for
        others.
        """
        self.routing.require_no_transform()
        self.routing.shared = None  # computed with what was in the slot
        try:
            self._fill(slot, host)
        except CapacityError:
            if not any([staging.ahead.keep(()) for staging in self.staging.values()]):
                raise
            self.empty(slot)
            self._fill(slot, host)

    @torch.inference_mode(False)
    @torch.no_grad()
    def _fill(self, slot: int, host: HostAdapter) -> None:
        grown: list[tuple[SlotRows, Pool]] = []
        try:
            for staging in self.staging.values():
                staging.begin(host, whole=len(self.staging) == 1)  # runs beside all that follows
            seat = self.seats.get(slot)
            same = seat is not None and seat.place == self.routing.place and seat.families is self.families()
            if seat is not None and same and seat.suits(host):
                for device, names in seat.homes.items():
                    self._move(host, device, names, slot, again=True)
                return
            self._leave(slot)
            ranks = {name: a.shape[0] for name, (a, _) in host.places.items()}
            kept = {name for name, r in ranks.items() if self._stays(name, slot, r, host.parts.get(name))}
            self._wipe(slot, kept)
            alone = apart(self.sites, {name: a.offset for name, (a, _) in host.places.items()})
            if len(kept) < len(ranks) or alone:
                self._outdate()
                self._make_room({name: r for name, r in ranks.items() if name not in kept}, alone, grown)
            homes: dict[torch.device, list[str]] = {}
            for name in ranks:
                homes.setdefault(self.sites[name][1].a.device, []).append(name)
            for device, names in homes.items():
                self._move(host, device, names, slot)
            self._remember(slot, host, homes)
        except BaseException:
            for slots, pool in grown:
                slots.restore(pool)
            raise
        finally:
            for staging in self.staging.values():
                staging.finish(host)

    def _move(self, host: HostAdapter, device: torch.device, names: list[str], slot: int, again: bool = False) -> None:
        """The factors of these modules to the slot's rows. again: the rows are where they were at the last load."""
        staging = self.staging_at(device)
        try:
            if device.type == "cuda":
                host.pin()
            if not again or not staging.again(host, names, slot):
                targets = list[Tensor]()
                for name in names:
                    site, r = self.sites[name][1], host.places[name][0].shape[0]
                    placed, site.sources[slot] = slot in site.rows.spans, host.places[name][0].offset
                    targets += site.tenant(slot) if placed else site.place(slot, r, host.parts.get(name))
                staging.move(host, names, targets, slot)
        except RuntimeError as error:
            self._require_room("the copy of its factors", host.nbytes, device, error)
            raise

    def _remember(self, slot: int, host: HostAdapter, homes: dict[torch.device, list[str]]) -> None:
        found = [(module, own_tensor(module)) for module, _ in map(self.sites.__getitem__, host.places)]
        modules = [(module, tensor.device, tensor.dtype) for module, tensor in found if tensor is not None]
        if len(modules) == len(found):
            self.seats[slot] = Seat(self.routing.place, self.families(), host.places, host.parts, modules, homes)

    def _leave(self, slot: int) -> None:
        """Forget where the slot's tenant has its rows."""
        self.seats.pop(slot, None)
        for staging in self.staging.values():
            staging.ways.pop(slot, None)

    def staging_at(self, device: torch.device) -> Staging:
        if device not in self.staging:
            kernel = remote(device) and self.config.backend != TORCH and has_triton()
            self.staging[device] = Staging(device, kernel)
        return self.staging[device]

    def bring(self, host: HostAdapter) -> None:
        """Start to bring an adapter's bytes to the CUDA devices of its modules, ahead of its use. Raises
        torch.OutOfMemoryError."""
        if len(self.staging) == 1:  # as far as is known, all modules are on that device
            (staging,) = self.staging.values()
            if remote(staging.device):
                staging.ahead.bring(host, 0, host.nbytes)
            return
        homes: dict[torch.device, list[Place]] = {}
        for name, pair in host.places.items():
            homes.setdefault(home_of(self.sites[name][0]), []).extend(pair)
        for device, places in homes.items():
            if remote(device):
                self.staging_at(device).ahead.bring(host, *span_of(places))

    def _stays(self, name: str, slot: int, r: int, parts: tuple[int, ...] | None) -> bool:
        """Whether the slot has r rank rows in this module already, and each expert its part of them, where the module
        computes and in its dtype."""
        module, slots = self.sites[name]
        span = slots.rows.spans.get(slot)
        return span is not None and span[1] == r and slots.parts.get(slot) == parts and at_home(module, slots)

    def _make_room(self, ranks: Mapping[str, int], alone: Collection[str], grown: list[tuple[SlotRows, Pool]]) -> None:
        """Let pools grow until these modules have so many more rank rows, and give those `alone` memory of their own;
        what they were goes to `grown`."""
        needs = {name: self.sites[name][1].rows.used + ranks.get(name, 0) for name in {**ranks, **dict.fromkeys(alone)}}
        small = {name for name, need in needs.items() if need > self.sites[name][1].rows.capacity}
        planned = self.capacities() if small else {}
        if small and self.routing.captured_at is None:
            self._free_experts()
        for name, need in needs.items():
            module, slots = self.sites[name]
            if name not in small and name not in alone and at_home(module, slots):
                continue
            device, dtype = home_of(module), self.dtype_in(name, module)
            rows = max(need, planned[name] if name in small else slots.rows.capacity)
            try:
                pool = slots.reserve(rows, device, dtype, name in alone)
            except RuntimeError as error:
                size = rows * slots.row_bytes(dtype)
                self._require_room(f"{name}'s pool of {rows} rank rows", size, device, error)
                raise
            if pool is not None:
                grown.append((slots, pool))

    def _free_experts(self) -> None:
        """Free the pools of experts that no registered adapter trains any more: adapters of another layout have sites
        of their own, and these pools are the largest."""
        trained = {name for entry in self.store.catalogue for name in entry.ranks}
        for name, (_, slots) in self.sites.items():
            if isinstance(slots, ExpertSlots) and name not in trained and not slots.rows.spans:
                slots.free()

    def _require_room(self, what: str, size: int, device: torch.device, error: RuntimeError) -> None:
        """Raises CapacityError where memory ran out."""
        if not out_of_memory(error):
            return
        rows, total = self.capacities(), 0
        for name, (_, slots) in self.sites.items():
            total += rows[name] * slots.row_bytes(self.dtype_of(name))
        free = f", which has {torch.cuda.mem_get_info(device)[0]} free" if device.type == "cuda" else ""
        raise CapacityError(
            f"{what} needs {size} bytes on {device}{free}; the pools of all {len(rows)} modules need {total} bytes as "
            f"planned ({sum(rows.values())} rank rows, max_loras={self.config.max_loras}, "
            f"max_lora_rank={self.config.max_lora_rank}); lower max_loras or max_lora_rank, or free memory there"
        ) from error

    @torch.inference_mode(False)
    @torch.no_grad()
    def empty(self, slot: int) -> None:
        """Give up the rows of a slot; nothing of the tenant stays behind."""
        self.routing.shared = None
        self._wipe(slot, (), plain=True)

    def _wipe(self, slot: int, kept: Collection[str], plain: bool = False) -> None:
        """Give up the slot's rows, all wiped at once, but for those of the `kept` modules. plain: by what cannot fail,
        as it is done after errors."""
        for staging in self.staging.values():
            staging.join()
        held = [slots for name, (_, slots) in self.sites.items() if slot in slots.rows.spans and name not in kept]
        if held:
            self._leave(slot)
            self._outdate()
            by_device: dict[torch.device, list[Tensor]] = {}
            for slots in held:
                by_device.setdefault(slots.a.device, []).extend(slots.tenant(slot))
            for device, rows in by_device.items():
                if plain or device not in self.staging:
                    torch._foreach_zero_(rows)
                else:
                    self.staging[device].wipe(rows)
        for slots in held:
            slots.clear(slot)
