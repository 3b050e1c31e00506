"""A layer's experts with mixed adapters against the same experts bare, in turns; checked against merged weights."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from . import gpu_contenders as contenders
from . import gpu_gate as gate
from . import gpu_timing as timing
from .gate import GateError
from .gpu_experts_launches import Shape
from .material import _ready
from .moe_material import Factors, merge, random_factors, save_factors

VOCABULARY, MOST_ROWS = 64, 64
ORDER = ("bare", "ours", "ours", "bare")


class LayerBench:
    """A model of one layer whose experts have the shape; adapters of all its experts, one for each row in turn."""

    def __init__(self, shape: Shape, dtype: torch.dtype, device: str) -> None:
        self.shape, self.dtype, self.device = shape, dtype, device
        torch.manual_seed(0)
        config = Qwen3MoeConfig(
            hidden_size=shape.hidden, moe_intermediate_size=shape.inner, intermediate_size=shape.inner,
            num_experts=shape.experts, num_experts_per_tok=shape.choices, num_attention_heads=4, head_dim=16,
            num_key_value_heads=2, vocab_size=VOCABULARY, num_hidden_layers=1, max_position_embeddings=4096,
        )  # fmt: skip
        with torch.device(device):
            self.base: Any = _ready(Qwen3MoeForCausalLM._from_config(config, dtype=dtype), device)
        self.base.set_experts_implementation("grouped_mm")
        self.bare = copy.deepcopy(self.experts(self.base))
        self.adapters: dict[str, Factors] = {
            f"adapter-{i}": random_factors(self.base, shape.rank, i) for i in range(shape.slots)
        }

    def experts(self, model: Any) -> Any:
        return model.model.layers[0].mlp.experts

    def rows(self, tokens: int) -> list[str | None]:
        """The adapter of each row, each in as many as the others."""
        return [f"adapter-{i % self.shape.slots}" for i in range(min(tokens, MOST_ROWS))]

    def data(self, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        """hidden_states [T, H], top_k_index and top_k_weights [T, choices] as Transformers' router gives them."""
        random = torch.Generator(self.device).manual_seed(1)
        hidden = torch.randn(tokens, self.shape.hidden, generator=random, device=self.device)
        logits = torch.randn(tokens, self.shape.experts, generator=random, device=self.device)
        weights, index = logits.softmax(-1).topk(self.shape.choices)
        return hidden.to(self.dtype), index, (weights / weights.sum(-1, keepdim=True)).to(self.dtype)

    def merged(self, model: Any, tokens: int, dtype: torch.dtype) -> Tensor:
        """[T, H]: each token by the model with its row's adapter merged into the weights."""
        rows, (hidden, index, weights) = self.rows(tokens), self.data(tokens)
        per_row, out = tokens // len(rows), torch.empty(tokens, self.shape.hidden, dtype=dtype, device=self.device)
        for name, factors in self.adapters.items():
            own = torch.tensor([row == name for row in rows], device=self.device).repeat_interleave(per_row)
            with merge(model, factors):
                out[own] = self.experts(model)(hidden[own].to(dtype), index[own], weights[own].to(dtype))
        return out

    def truths(self, tokens: int) -> tuple[Tensor, float]:
        """(what must come out, in a wider dtype; what the bare experts in their own dtype are off by)."""
        torch.set_float32_matmul_precision("highest")  # no TF32
        wide: Any = copy.deepcopy(self.base).to(gate.WIDER[self.dtype])
        wide.set_experts_implementation("eager")
        truth = self.merged(wide, tokens, gate.WIDER[self.dtype])
        plain = self.merged(self.base, tokens, self.dtype)
        return truth, gate.errors(plain, truth).max().item()

    @contextmanager
    def ours(self, backend: str, scratch: Path) -> Iterator[contenders.Subject]:
        folders = {name: save_factors(scratch / name, own, self.shape.rank) for name, own in self.adapters.items()}
        slots, note = self.shape.slots, dict[str, Any]()
        with contenders.ours(self.base, backend, slots, self.shape.rank, folders, note) as subject:
            yield subject

    def measure(
        self, subject: contenders.Subject, tokens: int, truth: Tensor, plain: float, rounds: int, replays: int
    ) -> dict[str, Any]:
        """Errors, then ms of the bare experts and of ours, eager and under a CUDA graph. Raises GateError."""
        data, rows = self.data(tokens), self.rows(tokens)
        ids = torch.zeros(len(rows), tokens // len(rows), dtype=torch.int64, device=self.device)
        ours, found = self.experts(self.base), dict[str, Any](rows=len(rows))
        for kind, own in (("error", rows), ("control", [*rows[1:], rows[0]])):
            with subject.route(own):
                subject.model(input_ids=ids, use_cache=False)  # which tells how many tokens a row has
                found[kind] = gate.errors(ours(*data), truth).max().item()
        found["bound"] = 2 * plain + gate.FLOOR[self.dtype]
        if not found["error"] <= found["bound"] < found["control"]:  # NaN too
            raise GateError(f"{subject.name}, {tokens} tokens: the experts must agree with merged ones, got {found}")
        with subject.route(rows):
            subject.model(input_ids=ids, use_cache=False)
            jobs: dict[str, Callable[[], Any]] = {"bare": lambda: self.bare(*data), "ours": lambda: ours(*data)}
            found["eager"] = in_turns(jobs, rounds, replays, self.device)
            if timing.why_no_graph(self.device) is None:
                graphs = {name: timing.capture(job)[0] for name, job in jobs.items()}
                found["graph"] = in_turns({n: g.replay for n, g in graphs.items()}, rounds, replays, self.device)
        return found


def in_turns(jobs: Mapping[str, Callable[[], Any]], rounds: int, replays: int, device: str) -> dict[str, float]:
    """Median us of each, and the median over the rounds of ours to bare. A round takes them bare, ours, ours, bare."""
    for job in jobs.values():
        timing.intervals(job, timing.WARM_UP, device)
    samples: dict[str, list[float]] = {name: [] for name in jobs}
    ratios = []
    for _ in range(rounds):
        turn: dict[str, float] = dict.fromkeys(jobs, 0.0)
        for name in ORDER:
            us = 1e3 * median(timing.intervals(jobs[name], replays, device))
            samples[name].append(us)
            turn[name] += us
        ratios.append(turn["ours"] / turn["bare"])
    return {name: median(of) for name, of in samples.items()} | {"ratio": median(ratios)}
