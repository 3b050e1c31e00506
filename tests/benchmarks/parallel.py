"""Mixed batches on a base in several processes, as ratios to the bare base in as many: a GPU each.

torchrun --standalone --nproc-per-node 2 -m tests.benchmarks.parallel       # --help; --shape tiny --device cpu: a test

With one process the base is whole, so the runs with 1 and 2 say what the parts cost. Shapes with experts are in parts
by expert. Nothing is timed before rows of a mixed batch answer as they do alone; contenders take turns.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

from hf_multilora import MultiLoRAModel

from . import gpu_gate as gate
from . import gpu_timing as timing
from .gate import GateError
from .gpu_contenders import Subject, bare, routed
from .material import SHAPES, prompts, random_adapter, save_adapter, shape_config
from .moe_material import random_factors, save_factors
from .registry import LINEARS, Work, adapter_name
from .run import ROOT, environment
from .speed import clock
from .speed.sides import Side

EXPERTS: dict[str, dict[str, Any]] = {  # tests/benchmarks/gpu_moe.py has the first one's figures in one process
    "qwen3-30b-a3b": {
        "hidden_size": 2048, "moe_intermediate_size": 768, "intermediate_size": 6144, "num_hidden_layers": 48,
        "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128,
        "num_experts_per_tok": 8, "vocab_size": 151936, "norm_topk_prob": True,
    },
    "tiny-experts": {
        "hidden_size": 32, "moe_intermediate_size": 24, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2,
        "vocab_size": 64,
    },
}  # fmt: skip


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--shape", choices=[*SHAPES, *EXPERTS], default="llama-3-8b", help="of the base; random weights")
    add("--layers", type=int, default=8, help="of the base, as it is written to disk first")
    add("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    add("--device", default="cuda")
    add("--backend", default="auto")
    add("--rows", type=int, default=32)
    add("--tokens", type=int, default=128, help="of a prompt")
    add("--distinct", type=int, nargs="+", default=[8, 32], help="adapters in the batch")
    add("--ranks", type=int, nargs="+", default=[16, 64])
    add("--modes", nargs="+", choices=("parts", "fully"), default=["parts", "fully"], help="fully: fully_sharded_loras")
    add("--steps", type=int, default=20, help="of a block")
    add("--scratch", type=Path, help="folder that all processes see, for the base and the adapters")
    add("--out", type=Path, default=ROOT / "bench-results" / "parallel.json")
    return parser.parse_args(argv)


def config_of(settings: argparse.Namespace) -> Any:
    if settings.shape in EXPERTS:
        own = EXPERTS[settings.shape] | {"num_hidden_layers": settings.layers}
        return AutoConfig.for_model("qwen3_moe", **own)
    return shape_config(settings.shape, settings.layers)


def write(settings: argparse.Namespace, folder: Path) -> None:
    """The base, and as many adapters of each rank as a batch needs."""
    torch.manual_seed(0)
    with torch.device(settings.device):
        model = AutoModelForCausalLM.from_config(config_of(settings), dtype=getattr(torch, settings.dtype))
    model.save_pretrained(folder / "base")
    for rank in settings.ranks:
        for i in range(max(settings.distinct)):
            where, seed = folder / f"{rank}" / adapter_name(i), 1000 * rank + i
            if settings.shape in EXPERTS:
                save_factors(where, random_factors(model, rank, seed), rank)
            else:
                pairs = random_adapter(model, rank, LINEARS, seed, model.dtype, settings.device)
                save_adapter(where, pairs, rank, LINEARS)


def load(settings: argparse.Namespace, folder: Path, size: int) -> Any:
    """The base, in parts where there are several processes."""
    more: dict[str, Any] = {"device_map": settings.device} if settings.device != "cpu" else {}
    if size > 1:
        from transformers.distributed import DistributedConfig

        experts = {"ep_size": size} if settings.shape in EXPERTS else {}
        more = {"distributed_config": DistributedConfig(tp_size=size, **experts)}
    dtype = getattr(torch, settings.dtype)
    return AutoModelForCausalLM.from_pretrained(folder / "base", dtype=dtype, **more).requires_grad_(False).eval()


def check(ours: Subject, work: Work, ids: torch.Tensor) -> dict[str, float]:
    """A row of the mixed batch answers as in a batch of its adapter alone, and not as with another one."""
    dtype = next(ours.model.parameters()).dtype
    bound, found = 8 * gate.FLOOR[dtype], {"bound": 8 * gate.FLOOR[dtype], "error": 0.0}

    def answer(rows: list[str | None]) -> torch.Tensor:
        with ours.route(rows) as call:
            return ours.model(input_ids=ids, logits_to_keep=1, **call).logits[:, -1].double()

    mixed = answer(work.mix())
    for name in [None, *dict.fromkeys(work.mix()[:2])]:
        alone = answer([name] * work.rows)
        own = torch.tensor([i for i, other in enumerate(work.mix()) if other == name], device=mixed.device)
        if len(own):
            found["error"] = max(found["error"], gate.errors(mixed[own], alone[own]).max().item())
        rest = torch.tensor([i for i, other in enumerate(work.mix()) if other != name], device=mixed.device)
        if len(rest) and gate.errors(mixed[rest], alone[rest]).min().item() <= bound:
            raise GateError(f"{work.name}: rows of other adapters answer as those of {name!r}: the check says nothing")
    if not found["error"] <= bound:
        raise GateError(
            f"{work.name}: rows must answer as alone within {bound:.3g}, they differ by {found['error']:.3g}"
        )
    return found


def timed(settings: argparse.Namespace, plain: Subject, ours: Subject, work: Work) -> dict[str, Any]:
    """ms of a step of each, and their ratio; of decode as replays of a CUDA graph where there can be one."""
    vocabulary = plain.model.config.vocab_size
    ids = prompts(work.rows, work.tokens + (work.phase == "decode"), vocabulary, settings.device)["input_ids"]
    found: dict[str, Any] = {"checks": check(ours, work, ids[:, : work.tokens])}
    sides = {clock.BARE: (plain, [None] * work.rows), clock.OURS: (ours, work.mix())}
    jobs = {}
    for name, (subject, rows) in sides.items():
        own = Work(work.phase, work.rows, work.tokens, 0, work.slots, tuple(rows))
        side = Side(subject, own, ids, settings.steps + 8, settings.device)
        if work.phase == "decode" and timing.why_no_graph(settings.device) is None:
            side.capture()
        jobs[name] = lambda side=side: side.block(settings.steps)
    found |= clock.palindrome(jobs)
    return found | {"value": clock.ratio(found), "graph": timing.why_no_graph(settings.device) is None}


def measure(settings: argparse.Namespace, folder: Path) -> dict[str, Any]:
    size, cells = dist.get_world_size(), dict[str, Any]()
    plain, twin = bare(load(settings, folder, size)), load(settings, folder, size)
    modes = [mode for mode in settings.modes if mode == "parts" or (size > 1 and settings.shape not in EXPERTS)]
    for rank in settings.ranks:
        for mode in modes:
            paths = {adapter_name(i): str(folder / f"{rank}" / adapter_name(i)) for i in range(max(settings.distinct))}
            model = MultiLoRAModel.from_pretrained(
                twin, paths, max_loras=len(paths), max_lora_rank=rank, backend=settings.backend,
                fully_sharded_loras=mode == "fully",
            )  # fmt: skip
            for distinct in settings.distinct:
                for phase in ("decode", "prefill"):
                    work = Work(phase, settings.rows, settings.tokens, distinct, len(paths))
                    name = f"rank {rank}, {distinct} adapters, {mode}, {phase}"
                    cells[name] = timed(settings, plain, routed(model, "hf_multilora"), work)
                    cells[name]["bytes"] = sum(model.memory_report().per_module.values())
            twin = model.unpatch()
    return cells


def show(cells: dict[str, Any], title: str) -> None:
    print(f"{title}\n{'':40} bare ms  ours ms    ratio  adapters' MB in this process")
    for name, found in cells.items():
        numbers = found["bare"]["ms"], found["ours"]["ms"], found["value"], found["bytes"] / 1e6
        print(f"{name:40}" + "".join(f"{number:9.3f}" for number in numbers))


def main(argv: Sequence[str] | None = None) -> None:
    settings = arguments(argv)
    logging.disable_progress_bar()
    if settings.device == "cuda":
        torch.cuda.set_device(dist.get_node_local_rank(0))
    dist.init_process_group("nccl" if settings.device == "cuda" else "gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    own = nullcontext(settings.scratch) if settings.scratch else tempfile.TemporaryDirectory()
    with own as scratch, torch.no_grad():
        folders: list[Any] = [str(scratch)]
        dist.broadcast_object_list(folders)
        folder = Path(folders[0])
        if rank == 0:
            write(settings, folder)
        dist.barrier()
        cells = measure(settings, folder)
        dist.barrier()
    if rank == 0:
        title = f"{settings.shape}, {settings.layers} layers, {size} processes"
        show(cells, title)
        before = json.loads(settings.out.read_text()) if settings.out.exists() else {}
        facts = {key: value for key, value in vars(settings).items() if key not in ("out", "scratch")}
        settings.out.parent.mkdir(parents=True, exist_ok=True)
        settings.out.write_text(json.dumps(before | {title: environment() | facts | {"cells": cells}}, indent=1) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
