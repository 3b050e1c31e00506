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


class Part(nn.Module):
    """Holds linears under their names."""

    def __init__(self, **sizes: tuple[int, int]) -> None:
        super().__init__()
        for name, (inside, out) in sizes.items():
            setattr(self, name, nn.Linear(inside, out, bias=False))


class Linears(PreTrainedModel):
    """The linears of a Llama's layers. Every layer gets the same input [R, T, H]."""

    config_class = LlamaConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        hidden, inner = config.hidden_size, config.intermediate_size
        kv = config.num_key_value_heads * hidden // config.num_attention_heads
        self.layers = nn.ModuleList()
        for _ in range(config.num_hidden_layers):
            layer = nn.Module()
            layer.self_attn = Part(
                q_proj=(hidden, hidden), k_proj=(hidden, kv), v_proj=(hidden, kv), o_proj=(hidden, hidden)
            )
            layer.mlp = Part(gate_proj=(hidden, inner), up_proj=(hidden, inner), down_proj=(inner, hidden))
            self.layers.append(layer)
        self.post_init()

    def forward(self, inputs_embeds: Tensor) -> list[Tensor]:
        """k, v, up and down of each layer; the others are inside them."""
        found = []
        for layer in self.layers:
            attention, mlp = layer.self_attn, layer.mlp
            q, k, v = attention.q_proj(inputs_embeds), attention.k_proj(inputs_embeds), attention.v_proj(inputs_embeds)
            o = attention.o_proj(q)
            gate_, up = mlp.gate_proj(o), mlp.up_proj(o)
            found += [k, v, up, mlp.down_proj(gate_)]
        return found


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
    layers = stage.settings.layers or (None if stage.small else LAYERS)
    shape, shop = stage.settings.shape, stage.shop
    shop.adopt(("linears", shape, layers), lambda: make(shape, layers, shop.dtype, stage.device))
    stage.record |= {"shape": shape, "layers": layers}
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


def block(stage: Stage, subject: Subject, rows: Sequence[str | None], step: Any) -> Any:
    def run() -> list[float]:
        with subject.route(list(rows)):
            for _ in range(WARM):
                step()
            return timing.intervals(step, stage.settings.replays, stage.device)

    return run
