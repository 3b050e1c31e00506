"""The adapted modules of a model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch
from torch import nn

from .agreement import Agreement, T
from .census import take_census
from .config import MultiLoRAConfig
from .formats import (
    A_EACH,
    A_ONE,
    B_EACH,
    B_ONE,
    LORA,
    SAVED,
    TOKENS,
    ModuleShape,
    is_lora,
    site_name,
    split_half,
    split_site,
)
from .gates import gate_of
from .layers import (
    ExpertSlots,
    ModuleSlots,
    SavedSlots,
    SlotRows,
    TokenSlots,
    gated,
    local,
    outside,
    require_free,
    unwrap,
    wrap,
)
from .layers.rows import own_tensor
from .parallel import ALL, Shard, ranks_of, shard_of, sharded_modules
from .patches.experts import teller_of
from .patches.facts import Facts
from .routing import Routing
from .siblings import code_of, siblings_of
from .store import AdapterStore


class Sites:
    """sites: adapted module in a role (see formats/base.py) -> the module and its rank rows. parents: the same -> its
    parent and its own name there.

    store: which adapters are registered; set by whoever extends this.
    """

    store: AdapterStore

    def __init__(self, model: nn.Module, config: MultiLoRAConfig, facts: Facts) -> None:
        self.model = model
        self.config = config
        self.facts = facts
        self.routing = Routing(config.max_loras)
        self.sites: dict[str, tuple[nn.Module, SlotRows]] = {}
        self.parents: dict[str, tuple[nn.Module, str]] = {}
        self._families: list[list[tuple[nn.Module, ModuleSlots]]] | None = None
        self.tellers: dict[str, nn.Module] = {}  # site inside experts -> the module that knows whose tokens it gets
        self.shards: dict[str, Shard] = {}  # adapted sites of which this process has a part
        self.outers: dict[str, nn.Module] = {}  # site -> the sharded linear whose part is adapted
        self.sharded = any(True for _ in sharded_modules(model))
        if config.fully_sharded_loras and not self.sharded:
            raise ValueError(
                "fully_sharded_loras=True needs a base that is sharded over several processes, this one is not: load "
                "it with distributed_config=DistributedConfig(tp_size=...) under torchrun, or leave it out"
            )
        self.agreement = Agreement(ranks_of(model)) if self.sharded else None

    def agree(self, what: str, run: Callable[[], T], key: Callable[[T], int] = lambda result: 0) -> T:
        """The result of `run`; of a sharded base, if all processes have one, see Agreement.reach."""
        return run() if self.agreement is None else self.agreement.reach(what, run, key)

    def census(self) -> dict[str, ModuleShape]:
        return take_census(self.model, self.facts)

    def paths(self) -> dict[int, str]:
        """id(module) -> its first path: a module reached by two paths has one site per role."""
        return {id(module): name for name, module in self.model.named_modules()}

    def module_of(self, site: str) -> nn.Module:
        return self.model.get_submodule(split_site(site)[0])

    def first_sites(self, given: Collection[str]) -> dict[str, str]:
        """Sites as an adapter calls them -> the same by the first paths of their modules."""
        first = self.paths()
        return {site: site_name(first[id(self.module_of(site))], split_site(site)[1]) for site in given}

    def adapt(self, names: Sequence[str]) -> None:
        """Give the modules rank rows (none yet); sites that have them are left alone."""
        if all(name in self.sites and self._in_place(name) for name in names):
            return  # most loads: a census takes tens of ms
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
            path, role = split_site(name)
            module, shape = self.model.get_submodule(path), census[path]
            shard, flat = self.shard(name, module, shape), self.facts.matches("flat", path)
            sizes = shard.widths(*widths(role, shape))
            teller = teller_of(self.model, path)
            slots: SlotRows
            if role == LORA:
                tied = users[id(module._parameters.get("weight"))] > 1
                made = ModuleSlots if teller is None else outside.GatheredSlots
                slots = made(path, *sizes, self.routing, flat=flat, tied=tied, mixable=shape.mixable)
            elif is_lora(name):
                assert shape.experts is not None
                projection = shape.experts.projections[split_half(role)[0]]
                slots = ExpertSlots(
                    path, *sizes, self.routing, role=role, parameter=projection.parameter,
                    count=shape.experts.count if shard.experts is None else shard.experts.size,
                    first=projection.first if shard.first is None else shard.first, mixable=shape.mixable,
                )  # fmt: skip
                slots.config = module.__dict__.get("config")
            else:
                kind = SavedSlots if role == SAVED else TokenSlots
                slots = kind(path, *sizes, self.routing, flat=flat, mixable=shape.mixable and teller is None)
            if isinstance(slots, (ModuleSlots, ExpertSlots)):
                slots.fixed_dtype, slots.shard = self.config.dtype, shard
            require_free(module, slots)
            if shard.inner and role == LORA:
                local.require_unshared(module, name)
            if teller is not None:
                outside.require_free_teller(*teller, self.routing)
            parent, _, own = path.rpartition(".")
            self.parents[name], self._families = (self.model.get_submodule(parent), own), None
            self.sites[name] = (module, slots)  # before it is wrapped: an interrupt must find what to undo
            if teller is not None and is_lora(name):
                self.tellers[name] = teller[1]
                outside.follow(*teller, slots, name)
            if shard is not ALL:
                self.shards[name] = shard
            layer = outside.layer_kind(module, shape.kind)
            if role == LORA and (shard.inner or shard.group is not None):
                self._wrap_part(name, module, layer, slots)
            else:
                wrap(module, layer, slots)

    def _wrap_part(self, name: str, module: nn.Module, layer: str, slots: SlotRows) -> None:
        """Adapt what this process has of a sharded module: a linear of its own where it can be one."""
        shard = self.shards[name]
        part = local.local_of(module) if shard.inner and shard.group is None else None
        if part is not None:
            self.outers[name] = module
            self.sites[name] = (part, slots)
            wrap(part, layer, slots)
        else:
            wrap(module, f"sharded {layer}", slots)
        if shard.inner:
            local.enclose(module, part)

    def release_site(self, name: str) -> None:
        module, slots = self.sites[name]
        self._families = None
        outer = self.outers.pop(name, None)
        if self.shards.get(name, ALL).inner and split_site(name)[1] == LORA:
            local.disclose(outer or module)
        if module.__dict__.get(slots.attribute) is slots:
            unwrap(module, slots)
        if outer is not None:
            local.lead(outer, module)
        gated.unfollow(self.parents[name][0])
        if name in self.tellers:
            outside.unfollow(self.tellers.pop(name), name)
        del self.sites[name]
        del self.parents[name]
        self.shards.pop(name, None)

    def families(self) -> list[list[tuple[nn.Module, ModuleSlots]]]:
        """Adapted linears, those together that get one input from their parent, in the order of its calls."""
        if self._families is None:
            found: dict[tuple[int, int], list[tuple[int, nn.Module, ModuleSlots]]] = {}
            groups: dict[int, dict[str, tuple[int, int]]] = {}  # of a parent: its child -> numbers of group and call
            for name, (module, slots) in self.sites.items():
                if not isinstance(slots, ModuleSlots) or slots.kind != "linear":
                    continue
                parent, own = self.parents[name]
                if id(parent) not in groups:
                    groups[id(parent)] = {
                        child: (i, j) for i, group in enumerate(siblings_of(parent)) for j, child in enumerate(group)
                    }
                number, call = groups[id(parent)].get(own, (None, 0)) if slots.mixable else (None, 0)
                slots.fed_by = None if number is None else code_of(type(parent))
                key = (id(slots), 0) if number is None else (id(parent), number)
                found.setdefault(key, []).append((call, module, slots))
            self._families = [
                [(module, slots) for _, module, slots in sorted(family, key=lambda member: member[0])]
                for family in found.values()
            ]
            self._follow_gates()
        return self._families

    def _follow_gates(self) -> None:
        """Gated MLPs whose gate and up get LoRA, and what lies in one buffer, are computed as one."""
        lora: dict[int, set[str]] = {}
        parents = {id(parent): parent for parent, _ in self.parents.values()}
        for name, (_, slots) in self.sites.items():
            parent, own = self.parents[name]
            if type(slots) is ModuleSlots and slots.kind == "linear":
                lora.setdefault(id(parent), set()).add(own)
        for key, parent in parents.items():
            gated.unfollow(parent)
            gate = gate_of(parent) if key in lora else None
            if gate is not None and {gate.gate, gate.up} <= lora[key]:
                gated.follow(parent, gate, self.routing)

    def require_in_place(self, names: Collection[str]) -> None:
        """Raises RuntimeError where one of these adapted modules was replaced."""
        for name in names:
            if not self._in_place(name):
                raise self._replaced(name)

    def _in_place(self, name: str) -> bool:
        parent, own = self.parents[name]
        module, slots = self.sites[name]
        held = parent._modules.get(own)
        return held is self.outers.get(name, module) and module.__dict__.get(slots.attribute) is slots

    def _replaced(self, name: str) -> RuntimeError:
        trained = [entry.name for entry in self.store.catalogue if name in entry.ranks]
        return RuntimeError(
            f"{split_site(name)[0]} must be the module that was adapted, it was replaced by another, and adapters "
            f"{trained[:5]} train it: their rows would lose it. Put it back, or delete them; or unpatch() and call "
            f"from_pretrained again"
        )

    def dtype_of(self, site: str) -> torch.dtype:
        """The dtype that the tensors of a site are held in."""
        return self.dtype_in(site, self.module_of(site))

    def dtype_in(self, site: str, module: nn.Module) -> torch.dtype:
        """The same where its module is known: finding hundreds by their paths takes longer than a load."""
        if self.config.dtype is not None and is_lora(site):
            return self.config.dtype
        tensor = own_tensor(module)
        if tensor is not None and tensor.is_floating_point():
            return tensor.dtype
        return getattr(self.model, "dtype", torch.float32)

    def shard(self, site: str, module: nn.Module, shape: ModuleShape) -> Shard:
        """What this process holds of a site. Raises NotImplementedError where an adapter cannot have it."""
        try:
            return shard_of(module, shape, split_site(site)[1], self.config.fully_sharded_loras)
        except NotImplementedError as error:
            raise NotImplementedError(f"{split_site(site)[0]}: {error}") from error

    def row_bytes(self, site: str, shape: ModuleShape) -> int:
        """Bytes of one rank row of a site, on this process's device."""
        role, dtype = split_site(site)[1], self.dtype_of(site)
        a, b = self.shard(site, self.module_of(site), shape).widths(*widths(role, shape))
        return a * dtype.itemsize + b * (torch.int64 if role == TOKENS else dtype).itemsize


def widths(role: str, shape: ModuleShape) -> tuple[int, int]:
    """(width of a, width of b) of a site: see formats/base.py."""
    inner = shape.in_features if shape.kind == "linear" else shape.out_features
    if role == LORA:
        return shape.in_features, shape.out_features
    if shape.experts is not None and role not in (SAVED, TOKENS):
        name, half = split_half(role)
        projection = shape.experts.projections[name]
        inside, out = projection.in_features, projection.out_features
        return 0 if half in (B_EACH, B_ONE) else inside, 0 if half in (A_EACH, A_ONE) else out
    if role == SAVED and shape.kind == "embedding":
        return inner, 0
    if role == SAVED and shape.kind != "linear":
        return sum(size.numel() for size in shape.own.values()), 0
    return inner, 1
