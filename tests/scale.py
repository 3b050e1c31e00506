"""A thousand adapters over few slots: a life of batches, pins, reloads and deletions, and the truth row by row."""

from __future__ import annotations

import copy
import gc
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.func import functional_call

from hf_multilora import MultiLoRAModel
from hf_multilora.host import HostAdapter
from hf_multilora.layers import ModuleSlots
from hf_multilora.layers.rows import VIEWS
from hf_multilora.pool import Layout, RowTables
from hf_multilora.staging import Staging
from tests.test_residency import assert_clean, sites
from tests.tiny import LINEARS, VOCAB, Names, error, llama, save_adapter, snapshot

TARGETS = (*LINEARS, "embed_tokens", "lm_head")
COUNT, BATCHES = 1000, 300
MIB = 2**20
NEW = 4  # tokens to generate
TENSORS = {Layout: 6, RowTables: 4}  # that each of these holds


class Fleet:
    """A bare base, files of many adapters of random targets and ranks, and what a row must answer."""

    def __init__(self, folder: Path, count: int, device: str = "cpu", seed: int = 0) -> None:
        self.rng, self.folder, self.device = random.Random(seed), folder, torch.device(device)
        torch.manual_seed(seed)
        self.base: Any = llama(num_hidden_layers=1).to(device)
        self.base.generation_config.eos_token_id = None
        self.paths: dict[str, Path] = {}
        self.written = 0
        for _ in range(count):
            self.write()

    def write(self, name: str | None = None) -> str:
        """Files of a new adapter, or new files under an old name."""
        self.written += 1
        name = f"t{self.written}" if name is None else name
        targets = self.rng.sample(TARGETS, self.rng.randint(1, 4))
        ranks = {target: self.rng.randint(1, 8) for target in targets}
        self.paths[name] = save_adapter(self.base, self.folder / name, r=ranks, seed=self.written, targets=targets)
        return name

    def model(self, base: Any = None, **settings: Any) -> Any:
        """All adapters on `base` (None: a copy of the fleet's own)."""
        paths = {name: str(path) for name, path in self.paths.items()}
        return MultiLoRAModel.from_pretrained(copy.deepcopy(self.base) if base is None else base, paths, **settings)

    @torch.no_grad()
    def row(self, name: str | None, tokens: Tensor) -> Tensor:
        """Logits [T, V] of the bare base on this one row, with `2 B A` of the adapter's files added to its weights."""
        weights: dict[str, Tensor] = {}
        tensors = {} if name is None else load_file(self.paths[name] / "adapter_model.safetensors")
        for key, a in tensors.items():
            if "_A" not in key:
                continue
            path = key.removeprefix("base_model.model.").rsplit(".lora_", 1)[0]
            module: Any = self.base.get_submodule(path)
            delta = 2 * tensors[key.replace("_A", "_B")].double() @ a.double()
            delta = (delta.T if isinstance(module, nn.Embedding) else delta).to(self.device)
            weights[f"{path}.weight"] = (module.weight.double() + delta).to(module.weight.dtype)
        return functional_call(self.base, weights, kwargs={"input_ids": tokens[None]}).logits[0]

    def rows(self, names: Names, inputs: Tensor) -> Tensor:
        """Logits [R, T, V]."""
        return torch.stack([self.row(name, tokens) for name, tokens in zip(names, inputs, strict=True)])

    def inputs(self, rows: int, tokens: int = 5) -> Tensor:
        made = torch.Generator().manual_seed(self.rng.randrange(1 << 30))
        return torch.randint(0, VOCAB, (rows, tokens), generator=made).to(self.device)


def short(want: Tensor, sequences: Tensor) -> float:
    """How far, at most, the logits [R, T, V] of the last NEW tokens are below the best ones; a share of the largest."""
    at = want[:, -NEW - 1 : -1]
    chosen = at.gather(2, sequences[:, -NEW:, None])[..., 0]
    return float((at.amax(2) - chosen).max() / want.abs().max())


class Life:
    """Random batches on a model of a fleet, with the catalogue in change between them."""

    def __init__(self, fleet: Fleet, model: Any, *, most: int = 12, tolerance: float = 1e-5) -> None:
        self.fleet, self.model, self.rng = fleet, model, fleet.rng
        self.most, self.tolerance = most, tolerance
        self.default: str | None = None
        self.pinned: list[str] = []
        self.seen = dict.fromkeys(("rows", "passes", "controls", "generated", "reloads", "deletes", "pins"), 0)

    def change(self) -> None:
        """Perhaps a reload, a deletion and a new adapter, a pin or its end, another default."""
        fleet, model, rng, slots = self.fleet, self.model, self.rng, self.model._multilora.store.max_loras
        name = rng.choice([n for n in fleet.paths if n != self.default])
        what = rng.random()
        if what < 0.2:
            fleet.write(name)
            model.load_adapter(str(fleet.paths[name]), name, load_inplace=True)
            self.seen["reloads"] += 1
        elif what < 0.4:
            model.delete_adapter(name)
            del fleet.paths[name]
            self.pinned = [n for n in self.pinned if n != name]
            new = fleet.write()
            model.load_adapter(str(fleet.paths[new]), new)
            self.seen["deletes"] += 1
        elif what < 0.6 and len(self.pinned) < min(3, slots - 2):
            model.pin_adapter(name)
            self.pinned = list(dict.fromkeys([*self.pinned, name]))
            self.seen["pins"] += 1
        elif what < 0.8 and self.pinned:
            model.unpin_adapter(self.pinned.pop(0))
        elif what > 0.9 and slots > 4:  # what is held leaves a slot to the others
            self.default = rng.choice([None, name])
            model.set_adapter(self.default)

    def names(self) -> list[str | None]:
        """Up to `most` distinct adapters, half of them of those used often; base rows and a second row among them."""
        rng, known = self.rng, list(self.fleet.paths)
        often = [*known[:40], *self.pinned]
        some = [rng.choice(often if rng.random() < 0.5 else known) for _ in range(rng.randint(1, self.most))]
        names: list[str | None] = [*some, *[None] * rng.randint(1, 2), rng.choice(some)]
        rng.shuffle(names)
        return names

    def batch(self, generate: bool = False) -> None:
        """One call, each of its rows against the truth; and against the truth of permuted names, which must differ."""
        names = self.names()
        inputs = self.fleet.inputs(len(names))
        wanted = {n for n in names if n is not None}
        held = {*self.pinned, self.default} - {None} - wanted
        self.seen["rows"] += len(names)
        self.seen["passes"] += len(wanted) > self.model._multilora.store.max_loras - len(held)
        others = [*names[1:], names[0]]
        if generate:
            settings: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False}
            ids = self.model.generate(inputs, attention_mask=torch.ones_like(inputs), adapter_names=names, **settings)
            assert ids.shape == (len(names), inputs.shape[1] + NEW) and torch.equal(ids[:, :-NEW], inputs)
            assert short(self.fleet.rows(names, ids), ids) < self.tolerance, names
            assert short(self.fleet.rows(others, ids), ids) > 20 * self.tolerance, "the check says nothing"
            self.seen["generated"] += 1
            return
        with torch.no_grad():
            got = self.model(input_ids=inputs, adapter_names=names).logits
        assert error(got, self.fleet.rows(names, inputs)) < self.tolerance, names
        if self.rng.random() < 0.3:
            assert error(got, self.fleet.rows(others, inputs)) > 20 * self.tolerance, "the check says nothing"
            self.seen["controls"] += 1

    def without_names(self) -> None:
        """A call that names none: the default for all rows."""
        inputs = self.fleet.inputs(2)
        with torch.no_grad():
            got = self.model(input_ids=inputs).logits
        assert error(got, self.fleet.rows([self.default] * 2, inputs)) < self.tolerance, self.default

    def check(self, whole: bool = False) -> None:
        """What must hold between calls. whole: also that rank rows that nobody owns are zero."""
        runtime = self.model._multilora
        store, entries = runtime.store, list(runtime.store.catalogue)
        assert {e.name for e in entries} == set(self.fleet.paths)
        assert len(store.slots) <= store.max_loras and len(store.hosted) <= (store.max_cpu_loras or len(entries))
        assert set(store.slots) <= set(store.hosted), "a slot outlived its host copy"
        assert len(set(store.slots.values())) == len(store.slots)
        assert {e.id for e in entries if e.host is not None} == set(store.hosted)
        assert store.hosted_bytes == sum(e.host.nbytes for e in entries if e.host is not None)
        assert {e.name: e.in_flight for e in entries if e.in_flight} == ({self.default: 1} if self.default else {})
        assert {e.name for e in entries if e.id in store.pins} == set(self.pinned) and not runtime.routing.open
        tenants = {slot: store.catalogue.by_id(i).ranks for i, slot in store.slots.items()}
        for name, (_, site) in runtime.sites.items():
            ranks = {slot: ranks[name] for slot, ranks in tenants.items() if name in ranks}
            assert {slot: r for slot, (_, r) in site.rows.spans.items()} == ranks, name
            ends = [0, *(end for start, r in sorted(site.rows.spans.values()) for end in (start, start + r))]
            assert ends == sorted(ends) and ends[-1] <= site.rows.capacity == len(site.a) == len(site.b), name
            assert len(site.views) <= VIEWS
        if whole:
            assert_clean(self.model)


@dataclass(frozen=True)
class Marks:
    """What a process holds. tensors: live ones, but for those of host copies, layouts (some for each number of rows),
    tables of rows, and the views that modules keep of their spans and staging of its buffer."""

    rss: int
    tensors: int
    objects: dict[str, int]
    device: int
    files: int | None
    mapped: int | None

    @classmethod
    def take(cls) -> Marks:
        gc.collect()
        kinds: dict[type, list[Any]] = {Layout: [], RowTables: [], HostAdapter: [], ModuleSlots: [], Staging: []}
        tensors = 0
        for found in gc.get_objects():
            if type(found) in kinds:
                kinds[type(found)].append(found)
            tensors += issubclass(type(found), Tensor)
        tensors -= sum(1 + 2 * len(host.places) for host in kinds[HostAdapter])
        tensors -= sum(2 * len(site.views) for site in kinds[ModuleSlots])
        tensors -= sum(1 + len(staging.views) + len(staging.ways) for staging in kinds[Staging])
        tensors -= sum(sum(t is not None for t in layout._chunks or ()) for layout in kinds[Layout])
        tensors -= sum(len({id(t) for t in (x.shut, x.own, *x.kept.values())}) for x in kinds[Layout])
        tensors -= sum(held * len(kinds[kind]) for kind, held in TENSORS.items())
        counts = {kind.__name__: len(found) for kind, found in kinds.items()}
        proc, files, mapped = Path("/proc/self"), None, None
        if proc.exists():
            files = len(list((proc / "fd").iterdir()))
            mapped = (proc / "maps").read_text().count("adapter_model.safetensors")
        device = torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
        return cls(psutil.Process().memory_info().rss, tensors, counts, device, files, mapped)


def long_life(folder: Path, device: str, tolerance: float) -> dict[int, Marks]:
    """BATCHES batches over COUNT adapters, 64 in host memory, 8 in slots; what the process holds at some of them."""
    start = Marks.take()
    fleet = Fleet(folder, COUNT, device)
    base = copy.deepcopy(fleet.base)
    before = snapshot(base)
    model = fleet.model(base, max_loras=8, max_cpu_loras=64)
    life = Life(fleet, model, tolerance=tolerance)
    marks, pools = {0: start}, {}
    for i in range(1, BATCHES + 1):
        life.change()
        life.batch(generate=i % 15 == 0)
        if i % 10 == 0:
            life.without_names()
        life.check(whole=i % 25 == 0)
        if i in (100, BATCHES):
            assert len(model._multilora.store.hosted) == 64, "control: host memory was full"
            marks[i] = Marks.take()
        pools = model.memory_report().per_module if i <= 100 else pools
        assert model.memory_report().per_module == pools
    assert all(site.rows.capacity == 8 * 8 for site in sites(model).values()), "control: the pools were full"
    assert min(life.seen.values()) >= 20 and life.seen["rows"] > 2000, life.seen
    assert model.unpatch() is base and snapshot(base) == before
    for (name, got), want in zip(base.state_dict().items(), fleet.base.state_dict().values(), strict=True):
        assert torch.equal(got, want), name
    return marks


def assert_flat(marks: dict[int, Marks], rss: int = 4 * MIB) -> None:
    """Nothing piles up between batch 100 and the last, nor on the disk's side."""
    early, late = marks[100], marks[BATCHES]
    assert late.tensors <= early.tensors, (early, late)
    own = {kind: late.objects[kind] - marks[0].objects[kind] for kind in late.objects}  # other tests may leave some
    assert late.objects["HostAdapter"] <= early.objects["HostAdapter"] and own["HostAdapter"] <= 64, own
    assert own["Layout"] < 20 and own["RowTables"] < 100, own
    assert late.files == early.files and late.mapped in (0, None), "a file was left open"
    # safetensors itself loses 64 bytes per tensor that it reads from a mapped file: 1 MiB here, which all host copies
    # that were let go, were they kept, would be six times over
    assert late.rss - early.rss < rss, (early, late)
    assert late.device - early.device < MIB, (early, late)
