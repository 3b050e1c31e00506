"""Answers of sharded bases beside those of one process, in either mode."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from .bases import BASES, load, make

NAMES, WRONG = ["a", None, "c", "b"], ["b", "a", None, "c"]


def inputs(model: Any) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(5)
    ids, more = torch.randint(3, 60, (4, 6), generator=generator), {}
    mask = torch.ones_like(ids)
    mask[1, :2] = 0
    if model.config.is_encoder_decoder:
        more["decoder_input_ids"] = torch.randint(3, 60, (4, 3), generator=generator)
    return {"input_ids": ids, "attention_mask": mask, **more}


def logits(model: Any, names: list[str | None] | None) -> torch.Tensor:
    return model(**inputs(model), **({} if names is None else {"adapter_names": names})).logits.detach()


def tokens(model: Any, names: list[str | None]) -> list[list[int]]:
    given = {key: value for key, value in inputs(model).items() if not key.startswith("decoder")}
    out = model.generate(**given, adapter_names=names, max_new_tokens=5, do_sample=False, pad_token_id=0)
    return out.tolist()  # type: ignore[no-any-return]


def compare(got: torch.Tensor, want: torch.Tensor) -> float:
    """The largest difference, as a share of the largest number."""
    return float((got - want).abs().max() / want.abs().max())


def bytes_of(model: Any) -> int:
    return sum(slots.nbytes for _, slots in model._multilora.sites.values())


def of_base(name: str, folder: Path, rank: int) -> dict[str, Any]:
    if rank == 0:
        make(name, folder)
    dist.barrier()
    one, found = load(name, folder, sharded=False, max_loras=3), {}
    wanted, written = {str(names): logits(one, names) for names in (NAMES, WRONG, ["b"] * 4, None)}, tokens(one, NAMES)
    for mode in ("parts", "fully")[: 1 + BASES[name].fully]:
        model = load(name, folder, max_loras=3, fully_sharded_loras=mode == "fully")
        got = {key: logits(model, None if key == "None" else eval(key)) for key in wanted}
        found[mode] = {
            "errors": {key: compare(got[key], wanted[key]) for key in wanted},
            "wrong": compare(got[str(NAMES)], wanted[str(WRONG)]),
            "tokens": tokens(model, NAMES) == written,
            "bytes": bytes_of(model),
            "sharded": sorted({str(slots.kind) for _, slots in model._multilora.sites.values()}),
        }
    return {"bytes": bytes_of(one), **found}


def dense(folder: Path, rank: int) -> dict[str, Any]:
    return {name: of_base(name, folder / name, rank) for name in BASES if not _mixture(name)}


def mixtures(folder: Path, rank: int) -> dict[str, Any]:
    return {name: of_base(name, folder / name, rank) for name in BASES if _mixture(name) and "qwen" not in name}


def one_expert(folder: Path, rank: int) -> dict[str, Any]:
    """An adapter as Transformers 4 names it, of expert 3 of 4 alone."""
    name = "qwen3_moe, whole experts"
    if rank == 0:
        make(name, folder)
        torch.manual_seed(1)
        at = "base_model.model.model.layers.0.mlp.experts.3.down_proj"
        tensors = {f"{at}.lora_A.weight": torch.randn(4, 24), f"{at}.lora_B.weight": torch.randn(32, 4)}
        config = {"peft_type": "LORA", "r": 4, "lora_alpha": 4, "target_modules": r".*experts\.3\.down_proj"}
        (folder / "d").mkdir()
        save_file(tensors, folder / "d" / "adapter_model.safetensors")
        (folder / "d" / "adapter_config.json").write_text(json.dumps(config | {"task_type": "CAUSAL_LM"}))
    dist.barrier()
    one, model = (load(name, folder, sharded=sharded, adapters="ad", max_loras=2) for sharded in (False, True))
    mixes = (["d", None, "a", "d"], ["d"] * 4)
    errors = {str(names): compare(logits(model, names), logits(one, names)) for names in mixes}
    slots = [slots for site, (_, slots) in model._multilora.sites.items() if "experts" in site]
    return {
        "errors": errors, "moved": compare(logits(one, ["d"] * 4), logits(one, None)),
        "sharded": all(own.count == 2 for own in slots),
    }  # fmt: skip


def _mixture(name: str) -> bool:
    return name.startswith(("mixtral", "gpt_oss", "qwen3_moe"))
