"""The launches of experts' LoRA on their own: data of one layer, a check of each answer, clocks, a sweep of tiles."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
from torch import Tensor

from hf_multilora.kernels import torch_experts, triton_experts
from hf_multilora.kernels.backends import KernelError
from hf_multilora.kernels.triton_experts import COMBINE, EXPAND, FEW, MANY, SHRINK, Tile
from tests.kernels.suite import within

from . import gpu_timing as timing

COPIES = 4  # of all data, in turns: more than the L2 cache holds
LAUNCHES = ("shrink up", "expand up", "shrink down", "expand down", "combine")
OPERATION = dict(zip(LAUNCHES, (SHRINK, EXPAND, SHRINK, EXPAND, COMBINE), strict=True))


@dataclass(frozen=True)
class Shape:
    experts: int
    choices: int
    hidden: int
    inner: int
    rank: int
    slots: int


class GateError(RuntimeError):
    """A launch whose answers are wrong: it is not timed."""


@dataclass(frozen=True)
class Layer:
    """What the launches of one layer read and write, for T tokens, n = T * choices pairs sorted by key. Slot 0 ...
    slots - 1 have an adapter on every expert, and take turns."""

    shape: Shape
    factors: dict[str, Tensor]  # a or b of up and down [slots * experts * rank, width]
    data: dict[str, Tensor]  # tokens [T, hidden], inner [n, inner], h [n, rank], up [n, 2 * inner], down [n, hidden]
    begins: Tensor
    ranks: Tensor
    keys: Tensor
    tokens: Tensor  # int64 [n], of each pair
    places: Tensor
    weights: Tensor

    @classmethod
    def random(cls, shape: Shape, tokens: int, dtype: torch.dtype, device: str, seed: int) -> Layer:
        s, random = shape, torch.Generator(device).manual_seed(seed)
        width, n = s.slots + 1, tokens * s.choices

        def normal(*size: int) -> Tensor:
            return torch.randn(size, generator=random, device=device, dtype=torch.float32).to(dtype)

        chosen = torch.rand(tokens, s.experts, generator=random, device=device).topk(s.choices).indices
        slots = torch.arange(tokens, device=device) % s.slots
        keys, order = torch.sort((chosen * width + slots[:, None]).flatten().to(torch.int32))
        places = torch.empty_like(order)
        places[order] = torch.arange(n, device=device)
        slot, expert = (torch.arange(size, device=device) for size in (width, s.experts))
        begins = (slot.clamp(max=s.slots - 1) * s.experts * s.rank + expert[:, None] * s.rank).flatten()
        ranks = torch.where(slot < s.slots, s.rank, 0).expand(s.experts, width).flatten()
        rows = s.slots * s.experts * s.rank
        widths = {"a up": s.hidden, "b up": 2 * s.inner, "a down": s.inner, "b down": s.hidden}
        factors = {name: normal(rows, size) / 16 for name, size in widths.items()}
        sizes = {"tokens": (tokens, s.hidden), "inner": (n, s.inner), "up": (n, 2 * s.inner), "down": (n, s.hidden)}
        data = {name: normal(*size) for name, size in sizes.items()}
        data["h"] = normal(n, s.rank).float()
        weights = torch.softmax(normal(tokens, s.choices).float(), 1).to(dtype)
        tables = (begins.to(torch.int32), ranks.to(torch.int32).contiguous(), keys)
        return cls(shape, factors, data, *tables, order // s.choices, places.view(tokens, s.choices), weights)

    def call(self, launch: str, module: Any, wide: bool = False, **how: Any) -> Tensor:
        """The answer of a launch by the functions of triton_experts or torch_experts; the expands write into their y.
        wide: in float64, on copies."""
        op, _, where = launch.partition(" ")

        def of(tensor: Tensor) -> Tensor:
            return tensor.double() if wide else tensor

        tables = (self.begins, self.ranks, self.keys)
        if op == SHRINK:
            x, source = (self.data["tokens"], self.tokens) if where == "up" else (self.data["inner"], None)
            return module.shrink(of(x), of(self.factors[f"a {where}"]), *tables, source, self.shape.rank, **how)
        if op == EXPAND:
            y, b = of(self.data[where]), of(self.factors[f"b {where}"])
            return module.expand(y, of(self.data["h"]), b, *tables, None, 0, **how)
        y, weights = of(self.data["down"]), of(self.weights)
        return module.combine(y, self.places, weights, y.dtype, **how)

    def least_bytes(self, launch: str) -> int:
        """Bytes that the launch must read and write once each."""
        op, _, where = launch.partition(" ")
        size, n = self.data["down"].itemsize, self.keys.shape[0]
        used = torch.unique(self.keys)
        rank_rows = int(self.ranks[used.long()].sum())
        if op == SHRINK:
            x = self.data["tokens" if where == "up" else "inner"]
            return rank_rows * x.shape[1] * size + x.nbytes + self.data["h"].nbytes
        if op == EXPAND:
            y = self.data[where]
            return rank_rows * y.shape[1] * size + 2 * y.nbytes + self.data["h"].nbytes
        return n * self.shape.hidden * size + self.places.shape[0] * self.shape.hidden * size


class Gate:
    """What a launch must answer: as the tests do, against float64. Made once for all tiles."""

    def __init__(self, layer: Layer, launch: str) -> None:
        self.layer, self.launch = self.fresh(layer), launch
        self.truth, self.plain = self.answers(self.layer)
        turned = replace(self.layer, keys=(layer.keys + layer.shape.slots + 1) % len(layer.ranks))
        self.wrong = None if launch == COMBINE else self.answers(turned)

    def fresh(self, layer: Layer) -> Layer:
        """With outputs of the base that no launch has written to yet."""
        random = torch.Generator(layer.keys.device).manual_seed(99)
        written = {
            name: torch.empty_like(layer.data[name], dtype=torch.float32).normal_(generator=random).to(old.dtype)
            for name, old in layer.data.items()
            if name in ("up", "down")
        }
        return replace(layer, data=layer.data | written)

    def answers(self, layer: Layer) -> tuple[Tensor, Tensor]:
        """In float64, and with the error of the plain formula in the dtype of the data."""
        truth, dtype = layer.call(self.launch, torch_experts, wide=True), layer.weights.dtype
        if dtype == torch.float32:
            return truth, self.fresh(layer).call(self.launch, torch_experts)
        return truth, truth.to(dtype)

    def check(self, tile: Tile | None) -> None:
        """Raises GateError where the answer is wrong, or right for the keys of other experts."""
        got = self.fresh(self.layer).call(self.launch, triton_experts, tile=tile)
        if not within(got, self.truth, self.plain):
            off = float((got.double() - self.truth).abs().max())
            raise GateError(f"{self.launch} with {tile} must be right, it is off by {off:.2e}")
        if self.wrong is not None and within(got, *self.wrong):
            raise GateError(f"{self.launch} with {tile} must not fit the keys of other experts")


def clock(layers: list[Layer], launch: str, tile: Tile | None, device: str, replays: int = 20) -> float:
    """us of the launch: median over replays of a graph that takes each copy of the data in turn."""

    def step() -> Tensor:
        for layer in layers:
            out = layer.call(launch, triton_experts, tile=tile)
        return out

    replay: Callable[[], Any] = step
    if timing.why_no_graph(device) is None:
        graph, _ = timing.capture(step)
        replay = graph.replay
    for _ in range(timing.WARM_UP):
        replay()
    return 1e3 * median(timing.intervals(replay, replays, device)) / len(layers)


def tiles(launch: str, amount: str) -> Iterator[Tile]:
    """What a sweep tries."""
    op = OPERATION[launch]
    if op == COMBINE:
        for block, warps in itertools.product((256, 512, 1024, 2048), (1, 2, 4, 8)):
            if 4 <= block // warps // 32 <= 32:
                yield Tile(1, 1, block, warps)
    elif (op, amount) == (SHRINK, FEW):
        for block_r, block, warps in itertools.product((2, 4, 8, 16), (256, 512, 1024, 2048), (1, 2, 4, 8)):
            if 32 <= block_r * block // warps // 32 <= 128:
                yield Tile(1, block_r, block, warps)
    elif (op, amount) == (EXPAND, FEW):
        for block, warps in itertools.product((128, 256, 512, 1024, 2048), (1, 2, 4, 8)):
            if 2 <= block // warps // 32 <= 16:
                yield Tile(1, 16, block, warps)
    elif op == SHRINK:
        for m, block, warps, stages in itertools.product((16, 32, 64), (64, 128, 256), (1, 2, 4, 8), (2, 3, 4)):
            if 32 <= m * block // warps // 32 <= 128:
                yield Tile(m, 64, block, warps, stages)
    else:
        for m, block, warps, stages in itertools.product((16, 32, 64), (64, 128, 256), (1, 2, 4, 8), (1, 2, 3)):
            if 8 <= m * block // warps // 32 <= 64:
                yield Tile(m, 64, block, warps, stages)


def sweep(layers: list[Layer], gate: Gate, amount: str, device: str) -> list[tuple[float, Tile]]:
    """(us, tile) of each that compiles, the best first."""
    found = []
    for tile in tiles(gate.launch, amount):
        try:
            gate.check(tile)
            found.append((clock(layers, gate.launch, tile, device, 10), tile))
        except KernelError as error:
            print(f"  {gate.launch}, {tile}: {str(error)[:160]}", flush=True)
    return sorted(found, key=lambda pair: pair[0])


def default(launch: str, amount: str) -> Tile:
    return triton_experts.TILES[OPERATION[launch], amount]


AMOUNTS = (FEW, MANY)
