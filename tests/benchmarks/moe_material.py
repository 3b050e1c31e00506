"""Random adapters of experts for the benchmarks: drawn, written in PEFT's format, and merged by hand."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

# path of a parameter -> A [E, r, in] and B [E, out, r]; of a linear: A [r, in] and B [out, r]
Factors = dict[str, tuple[Tensor, Tensor]]
EXPERTS, LINEARS = ("gate_up_proj", "down_proj"), ("q_proj", "v_proj")


def scaling(rank: int) -> float:
    return (2 * rank + 1) / rank


def random_factors(model: nn.Module, rank: int, seed: int) -> Factors:
    """For all experts and the queries and values of a model."""
    first = next(model.parameters())
    generator = torch.Generator(first.device).manual_seed(seed)

    def normal(deviation: float, *size: int) -> Tensor:
        drawn = torch.randn(size, generator=generator, device=first.device) * deviation
        return drawn.to(first.dtype)

    found: Factors = {}
    for name, parameter in model.named_parameters():
        owner, _, own = name.rpartition(".")
        if own in EXPERTS:
            count, out, inner = parameter.shape
            found[name] = normal(inner**-0.5, count, rank, inner), normal(0.05, count, out, rank)
        elif own == "weight" and owner.rpartition(".")[2] in LINEARS:
            out, inner = parameter.shape
            found[name] = normal(inner**-0.5, rank, inner), normal(0.05, out, rank)
    return found


def save_factors(folder: Path, factors: Factors, rank: int) -> Path:
    """A checkpoint as PEFT writes it from 0.19 on, in a new folder."""
    tensors: dict[str, Tensor] = {}
    for name, (a, b) in factors.items():
        owner, _, own = name.rpartition(".")
        if own in EXPERTS:
            inside = ".base_layer" if own == "gate_up_proj" else ""
            a, b = a.flatten(0, 1), b.permute(1, 2, 0).flatten(1)  # rows (expert, rank), columns (rank, expert)
        else:
            inside = ""
        key = f"base_model.model.{owner}{inside}"
        tensors |= {f"{key}.lora_A.weight": a.contiguous(), f"{key}.lora_B.weight": b.contiguous()}
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config: dict[str, Any] = {
        "peft_type": "LORA", "peft_version": "0.21.0", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": 2 * rank + 1,
        "target_modules": list(LINEARS), "target_parameters": [f"mlp.experts.{name}" for name in EXPERTS],
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


@contextmanager
def merge(model: nn.Module, factors: Factors) -> Iterator[None]:
    """The adapter in the weights while the block runs: W + scaling * B A, computed in float32 or wider."""
    before: list[tuple[Tensor, Tensor]] = []
    try:
        for name, (a, b) in factors.items():
            weight = model.get_parameter(name)
            before.append((weight, weight.detach().clone()))
            wide = torch.promote_types(weight.dtype, torch.float32)
            delta = scaling(a.shape[-2]) * (b.to(wide) @ a.to(wide))
            weight.data.copy_(weight.to(wide) + delta)
        yield
    finally:
        for weight, own in before:
            weight.data.copy_(own)
