"""What the stages work with: a bare base, its twin that is adapted, and adapters that never touch a disk."""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from hf_multilora import MultiLoRAModel
from hf_multilora.formats import Adapter, LoraFactors

from .. import gpu_contenders as contenders
from .. import gpu_timing as timing
from ..gpu_contenders import Subject
from ..material import Pairs, random_adapter, random_base
from ..registry import LINEARS, adapter_name
from ..timing import now


def scaling_of(rank: int) -> float:
    """As in material.lora_config."""
    return (2 * rank + 1) / rank


def register(model: Any, name: str, pairs: Pairs, scaling: float) -> None:
    """An adapter from memory, without a file: it stays in host memory."""
    factors = {path: LoraFactors(a.cpu(), b.cpu(), scaling) for path, (a, b) in pairs.items()}
    model._multilora.register(name, Adapter(name, name, None, factors), None, replace=False)


class Workshop:
    """Bases by (shape, layers), one at a time, and the adapters made for it."""

    def __init__(self, settings: argparse.Namespace, say: Callable[[str], None]) -> None:
        self.settings, self.say, self.device = settings, say, settings.device
        self.dtype: torch.dtype = getattr(torch, settings.dtype)
        self.scaling = scaling_of(settings.rank)
        self.key: Any = None
        self.bare: Any = None
        self.twin: Any = None
        self.known: dict[tuple[int, int], Pairs] = {}
        self._speed: float | None = None

    @property
    def copy_speed(self) -> float:
        """Bytes that a copy within the device reads and writes in a ms."""
        if self._speed is None:
            self._speed = timing.bytes_per_ms(self.device)
        return self._speed

    def use(self, shape: str, layers: int | None) -> None:
        """The base and its twin of that shape, those of before if they are."""
        self.adopt((shape, layers), lambda: random_base(shape, layers, self.dtype, self.device))

    def adopt(self, key: Any, make: Callable[[], Any]) -> None:
        if self.key == key:
            return
        self.clear()
        start = now(self.device)
        self.bare = make()
        self.twin = copy.deepcopy(self.bare)
        self.key = key
        size = sum(p.numel() for p in self.bare.parameters()) / 1e6
        self.say(f"base {key}: {size:.0f} M random weights, twice, in {now(self.device) - start:.1f} s")

    def clear(self) -> None:
        self.key = self.bare = self.twin = None
        self.known = {}
        self.empty_cache()

    def empty_cache(self) -> None:
        if self.device.startswith("cuda"):
            torch.cuda.empty_cache()

    # -- adapters ------------------------------------------------------------------------------------------------
    def make(self, index: int, rank: int | None = None) -> Pairs:
        """Adapter number `index` for all linears of the base's layers, drawn on the device."""
        rank = rank or self.settings.rank
        return random_adapter(self.bare, rank, LINEARS, 1000 * rank + index, self.dtype, self.device)

    def pairs(self, count: int, rank: int | None = None) -> dict[str, Pairs]:
        """The first `count` adapters, kept."""
        rank = rank or self.settings.rank
        for i in range(count):
            if (rank, i) not in self.known:
                self.known[rank, i] = self.make(i, rank)
        return {adapter_name(i): self.known[rank, i] for i in range(count)}

    def adapter_bytes(self, rank: int | None = None) -> int:
        (pairs,) = self.pairs(1, rank).values()
        return sum(a.nbytes + b.nbytes for a, b in pairs.values())

    def floor(self, nbytes: int, bare_ms: float) -> float:
        """1 + the time in which the device reads so many bytes, over the bare model's."""
        return 1 + nbytes / self.copy_speed / bare_ms

    # -- contenders ----------------------------------------------------------------------------------------------
    def plain(self) -> Subject:
        return contenders.bare(self.bare)

    @contextmanager
    def ours(
        self, slots: int, adapters: Mapping[str, Pairs] | Iterable[tuple[str, Pairs]], *, rank: int | None = None,
        hosted: int | None = None, scaling: float | None = None,
    ) -> Iterator[Subject]:  # fmt: skip
        """The twin with these adapters registered, given back at the end. rank: max_lora_rank."""
        each = adapters.items() if isinstance(adapters, Mapping) else adapters
        model = MultiLoRAModel.from_pretrained(
            self.twin, max_loras=slots, max_cpu_loras=hosted, max_lora_rank=rank or self.settings.rank,
            backend=self.settings.backend,
        )  # fmt: skip
        start, count = now(self.device), 0
        try:
            for name, pairs in each:
                register(model, name, pairs, scaling or self.scaling)
                count += 1
            took = now(self.device) - start
            self.say(f"{count} adapters registered from memory in {took:.1f} s, {slots} slots")
            yield contenders.routed(model, "ours")
        finally:
            restore(model)
            self.empty_cache()


def restore(model: Any) -> nn.Module:
    """The bare model again, without what `generate` compiled for the adapted one."""
    for name in ("_compiled_call", "_last_compile_config"):
        model.__dict__.pop(name, None)
    bare: nn.Module = model.unpatch()
    return bare
