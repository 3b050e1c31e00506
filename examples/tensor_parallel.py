"""Mixed rows on a base that is sharded over several processes, a GPU each or on CPUs.

    pip install -e '.[demo]'
    torchrun --standalone --nproc-per-node 2 examples/tensor_parallel.py
    accelerate launch --multi_gpu --num_processes 2 --num_machines 1 --mixed_precision no --dynamo_backend no \\
        examples/tensor_parallel.py
    torchrun --standalone --nproc-per-node 2 examples/tensor_parallel.py --model ORG/MODEL --adapters a=FOLDER b=FOLDER

accelerate starts several processes with --multi_gpu alone, also where there is no GPU (with --cpu it starts one), and
needs no config file then. Without --model this makes a tiny Llama with random weights and three adapters, and compares
with the same model in one process. Transformers shards the base and puts each part on the GPU numbered LOCAL_RANK. All
processes make the same calls and get the same answers; the first prints.
"""

import argparse
import os
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import ParallelismConfig
from peft import LoraConfig, get_peft_model
from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.distributed import DistributedConfig
from transformers.utils import logging

from hf_multilora import MultiLoRAModel

ATTENTION, MLP = ["q_proj", "k_proj", "v_proj", "o_proj"], ["gate_proj", "up_proj", "down_proj"]
TINY = {"attention": ATTENTION, "mlp": MLP, "all": [*ATTENTION, *MLP, "embed_tokens", "lm_head"]}
PROMPT = "The three most useful things to know about the sea are"


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Several LoRA adapters in one batch, on a base in several processes")
    parser.add_argument("--model", help="folder or Hub id of the base; default: a tiny one with random weights")
    parser.add_argument("--adapters", nargs="+", default=[], metavar="NAME=PATH", help="of the base that --model names")
    parser.add_argument("--max-new-tokens", type=int, default=12, help="length of an answer (default: %(default)s)")
    args = parser.parse_args()
    pairs = [text.partition("=") for text in args.adapters]
    args.adapters, args.tiny = {name: path for name, _, path in pairs}, args.model is None
    if args.tiny == bool(pairs) or not all(name and path for name, _, path in pairs):
        parser.error("--model and --adapters NAME=PATH [NAME=PATH ...] go together")
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        parser.error("start it in two processes: torchrun --standalone --nproc-per-node 2 examples/tensor_parallel.py")
    return args


def make_tiny(folder: Path) -> None:
    """folder/base, and folder/NAME of each adapter. Its 4 heads allow 2 or 4 processes."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, initializer_range=0.2, bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder / "base")
    for name, targets in TINY.items():
        lora = LoraConfig(r=8, lora_alpha=8, target_modules=targets, init_lora_weights=False)  # random, B too
        model = get_peft_model(LlamaForCausalLM.from_pretrained(folder / "base"), lora)
        model.save_pretrained(str(folder / name), save_embedding_layers=False)


def answer(model: Any, tokenizer: Any, names: list[str | None], count: int) -> list[list[int]]:
    """New tokens of one prompt, a row for each adapter; of the tiny model, without a tokenizer, it is of numbers."""
    prompt = tokenizer(PROMPT)["input_ids"] if tokenizer is not None else [*range(8)]
    ids = torch.tensor([prompt] * len(names), device=model.device)
    mask = torch.ones_like(ids)  # nothing is padding, whatever the ids say
    tokens = model.generate(ids, attention_mask=mask, adapter_names=names, max_new_tokens=count, do_sample=False)
    return tokens[:, ids.shape[1] :].tolist()


def by_kind(per_module: dict[str, int]) -> Counter[str]:
    """Bytes by the last part of the modules' paths."""
    return sum((Counter({path.rpartition(".")[2]: size}) for path, size in per_module.items()), Counter())


def everywhere(own: Any) -> list[Any]:
    """What each process has."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, own)
    return found


def ask_accelerate(model: Any, size: int) -> str:
    """accelerate shards nothing itself: with ParallelismConfig it checks that a model is sharded over so many."""
    if not torch.cuda.is_available():
        return "not asked, it refuses a ParallelismConfig on CPUs"
    Accelerator(parallelism_config=ParallelismConfig(tp_size=size)).prepare_model(model)  # raises otherwise
    return f"the model is sharded over {size}"


def serve(args: argparse.Namespace, console: Console) -> None:
    size, base, adapters, names = dist.get_world_size(), args.model, args.adapters, [None, *args.adapters]
    options, want = {"max_loras": len(adapters)}, None
    plan = MultiLoRAModel.plan(base, adapters, **options)
    columns = {"one process": by_kind({path: own.bytes for path, own in plan.per_module.items()})}
    tokenizer = None if args.tiny else AutoTokenizer.from_pretrained(base)
    if args.tiny:
        want = answer(MultiLoRAModel.from_pretrained(base, adapters, **options), None, names, args.max_new_tokens)
    sharded = {"distributed_config": DistributedConfig(tp_size=size)}
    model = MultiLoRAModel.from_pretrained(base, adapters, **options, **sharded)
    for mode in ("sharded", "fully_sharded_loras"):
        if mode == "fully_sharded_loras":  # on the same base
            model = MultiLoRAModel.from_pretrained(model.unpatch(), adapters, **options, fully_sharded_loras=True)
        answers = everywhere(answer(model, tokenizer, names, args.max_new_tokens))
        equal = all(each == (want or answers[0]) for each in answers)
        verdict = f"{'EQUAL' if equal else 'DIFFER FROM'} those of {'one process' if args.tiny else 'the first'}"
        console.print(f"{mode}: answers of {size} processes {verdict}")
        used = everywhere(by_kind(model.memory_report().per_module))
        columns[mode] = Counter({kind: max(own[kind] for own in used) for kind in used[0]})
    table = Table("row's adapter", "answer")
    for name, row in zip(names, answers[0], strict=True):
        table.add_row(name or "(base)", str(row) if tokenizer is None else repr(tokenizer.decode(row)))
    console.print(table)
    table = Table("adapters of", *columns, title=f"bytes per process, of {size} (the most in any)")
    for kind in columns["one process"]:
        table.add_row(kind, *(f"{column[kind]:,}" for column in columns.values()))
    table.add_row("all", *(f"{sum(column.values()):,}" for column in columns.values()))
    console.print(table)
    console.print("accelerate:", ask_accelerate(model, size))


def main() -> None:
    args = parse_args()
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()  # else Transformers does, too late for the folder
    logging.disable_progress_bar()
    console = Console(quiet=dist.get_rank() != 0, width=100, highlight=False)
    with tempfile.TemporaryDirectory() as scratch:
        if args.tiny:
            folders = everywhere(scratch)  # all processes must read the same files
            args.model, args.adapters = f"{folders[0]}/base", {name: f"{folders[0]}/{name}" for name in TINY}
            if scratch == folders[0]:
                make_tiny(Path(scratch))
            dist.barrier()
        serve(args, console)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
