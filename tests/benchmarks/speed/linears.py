"""Stages linears and popularity: the seven linears of decoder layers alone, one token per row.

The model is those linears and nothing else, q, k, v -> o -> gate, up -> down, in as many layers as make the weights
larger than the L2 cache.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedModel

from .. import gpu_gate as gate
from .. import gpu_timing as timing
from ..gpu_contenders import Rows, Subject
from ..material import Pairs, shape_config
from ..registry import Work, adapter_name
from . import clock
from .sides import WARM
from .stage import Stage

LAYERS = 4
RANKS = (8, 16, 64, 128)
MIXED = "mixed"
SKEW = 1.5  # as in Punica: requests of the i-th most popular adapter are 1.5 times those of the next


class Attention(nn.Module):
    """Its linears only, called as a Llama's attention calls them."""

    def __init__(self, hidden: int, kv: int) -> None:
        super().__init__()
        self.q_proj = nn.Linear(hidden, hidden, bias=False)
        self.k_proj = nn.Linear(hidden, kv, bias=False)
        self.v_proj = nn.Linear(hidden, kv, bias=False)
        self.o_proj = nn.Linear(hidden, hidden, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q = self.q_proj(x)
        k = self.k_proj(x)
        v = self.v_proj(x)
        return self.o_proj(q), k, v


class Mlp(nn.Module):
    """Its linears only."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        gate_ = self.gate_proj(x)
        up = self.up_proj(x)
        return self.down_proj(gate_), up


class Layer(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.self_attn = Attention(hidden, config.num_key_value_heads * hidden // config.num_attention_heads)
        self.mlp = Mlp(hidden, config.intermediate_size)

    def forward(self, x: Tensor) -> list[Tensor]:
        """k, v, up and down; the others are inside them."""
        o, k, v = self.self_attn(x)
        down, up = self.mlp(o)
        return [k, v, up, down]


class Linears(PreTrainedModel):
    """The linears of a Llama's layers. Every layer gets the same input [R, T, H]."""

    config_class = LlamaConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.post_init()

    def forward(self, inputs_embeds: Tensor) -> list[Tensor]:
        return [out for layer in self.layers for out in layer(inputs_embeds)]


def make(shape: str, layers: int | None, dtype: torch.dtype, device: str) -> Any:
    torch.manual_seed(0)
    with torch.device(device):
        model = Linears(shape_config(shape, layers))
    return model.to(dtype).requires_grad_(False).eval()


def read(model: Any, x: Tensor) -> Tensor:
    """[rows, all outputs] of x [R, 1, H]: what is compared."""
    x = x.to(next(model.parameters()).dtype)
    return torch.cat([out.flatten(1) for out in model(inputs_embeds=x)], -1)


# -- what the rows get ---------------------------------------------------------------------------------------------
def shares(mix: str, rows: int) -> Rows:
    """Punica's mixes: the adapter of each row."""
    if mix == "identical":
        return [adapter_name(0)] * rows
    if mix == "distinct":
        return [adapter_name(i) for i in range(rows)]
    if mix == "uniform":
        return [adapter_name(i % max(1, round(rows**0.5))) for i in range(rows)]
    weights = [SKEW**-i for i in range(rows)]
    ends = [sum(weights[: i + 1]) / sum(weights) * rows for i in range(rows)]
    return [adapter_name(next(i for i, end in enumerate(ends) if row < end - 1e-6)) for row in range(rows)]


MIXES = ("identical", "uniform", "skewed", "distinct")


def linears_cells(settings: argparse.Namespace) -> dict[str, Work]:
    cells = ((4, 2), (4, 4)) if settings.small else ((256, 32), (256, 256))
    return {f"{rows},{distinct}": Work("prefill", rows, 1, distinct, distinct) for rows, distinct in cells}


def popularity_cells(settings: argparse.Namespace) -> dict[str, Work]:
    rows, ranks = (4, (2, 5, MIXED)) if settings.small else (64, (*RANKS, MIXED))
    names = [(rank, mix, tuple(shares(mix, rows))) for rank in ranks for mix in MIXES]
    return {f"r {rank}, {mix}": Work("prefill", rows, 1, len({*own}), rows, own) for rank, mix, own in names}


def adapters_of(stage: Stage, count: int, rank: str) -> dict[str, Pairs]:
    """rank: a number, or MIXED for those of RANKS in turns."""
    ranks = [2, 5] if stage.small else list(RANKS)
    turn = [int(rank)] if rank != MIXED else ranks
    return {adapter_name(i): stage.shop.make(i, turn[i % len(turn)]) for i in range(count)}


# -- the stages ----------------------------------------------------------------------------------------------------
def linears(stage: Stage) -> None:
    works = {
        name: work for name, work in linears_cells(stage.settings).items() if name in prepare(stage, linears_cells)
    }
    for name, work in works.items():
        if stage.in_time(name):
            adapters = adapters_of(stage, work.slots, str(stage.settings.rank))
            group(stage, {name: work}, adapters, stage.settings.rank)


def popularity(stage: Stage) -> None:
    wanted = prepare(stage, popularity_cells)
    works = {name: work for name, work in popularity_cells(stage.settings).items() if name in wanted}
    for rank in dict.fromkeys(name.split()[1].rstrip(",") for name in works):
        some = {name: work for name, work in works.items() if name.startswith(f"r {rank},") and stage.in_time(name)}
        if some:
            slots = next(iter(some.values())).slots
            adapters = adapters_of(stage, slots, rank)
            highest = max(a.shape[0] for pairs in adapters.values() for a, _ in pairs.values())
            group(stage, some, adapters, highest)


def prepare(stage: Stage, cells: Any) -> list[str]:
    """The stage's base, and the names of the cells to run."""
    shape, layers, shop = stage.record["shape"], stage.record["layers"], stage.shop
    shop.adopt(("linears", shape, layers), lambda: make(shape, layers, shop.dtype, stage.device))
    return stage.wanted(list(cells(stage.settings)))


def group(stage: Stage, works: Mapping[str, Work], adapters: Mapping[str, Pairs], rank: int) -> None:
    """Cells that share adapters."""
    shop = stage.shop
    exact = gate.truths(shop.bare, adapters, shop.scaling, list(works.values()), stage_input(stage), answer=read)
    shop.empty_cache()
    slots = max(work.slots for work in works.values())
    with shop.ours(slots, adapters, rank=rank) as ours:
        for name, work in works.items():
            with stage.cell(name) as found:
                x = stage_input(stage)(work)
                found["errors"] = gate.check(ours, work, x, exact[work], all_checks=True, read=read)
                time_cell(stage, ours, work, x, found)
                if not stage.cuda or "value" in found:
                    used = [adapters[key] for key in {*work.mix()} if key is not None]
                    nbytes = sum(a.nbytes + b.nbytes for pairs in used for a, b in pairs.values())
                    found["floor"] = shop.floor(nbytes, found["bare"]["ms"])
                    found["distinct"] = len(used)
                found["us_per_layer"] = 1e3 * (found["ours"]["ms"] - found["bare"]["ms"]) / len(shop.bare.layers)
                found["note"] = f"{found['us_per_layer']:.1f} us a layer"


def stage_input(stage: Stage) -> Any:
    """Function of a cell -> its input [R, 1, H]."""

    def x(work: Work) -> Tensor:
        generator = torch.Generator(stage.device).manual_seed(7)
        size = work.rows, work.tokens, stage.shop.bare.config.hidden_size
        return torch.randn(size, generator=generator, device=stage.device).to(stage.shop.dtype)

    return x


def time_cell(stage: Stage, ours: Subject, work: Work, x: Tensor, found: dict[str, Any]) -> None:
    """ABBA of one pass over the layers, under a CUDA graph where there is one; a replay is checked first."""
    jobs, graphs = {}, timing.why_no_graph(stage.device) is None
    for side, subject, rows in (
        (clock.BARE, stage.shop.plain(), [None] * work.rows), (clock.OURS, ours, work.mix())
    ):  # fmt: skip
        step: Any = lambda model=subject.model: model(inputs_embeds=x)  # noqa: E731
        if graphs:
            with subject.route(rows):
                eager = read(subject.model, x)
                graph, out = timing.capture(step)
                graph.replay()
                replayed = torch.cat([part.flatten(1) for part in out], -1)
                bound = found["errors"]["bound"]
                error = gate.check_replay(subject, work, "its own mix", replayed, eager, bound)["error"]
                found.setdefault("replays", {})[side] = error
            step = graph.replay
        jobs[side] = block(stage, subject, rows, step)
    timed = clock.palindrome(jobs, stage.settings.rounds)
    found |= timed | {"kind": "graph" if graphs else "eager", "value": clock.ratio(timed)}
    stage.profile(found, jobs)


def block(stage: Stage, subject: Subject, rows: Sequence[str | None], step: Any) -> Any:
    def run(count: int = stage.settings.replays, measure: Any = timing.intervals) -> Any:
        with subject.route(list(rows)):
            for _ in range(WARM):
                step()
            return measure(step, count, stage.device)

    return run
