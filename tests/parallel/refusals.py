"""What fails in one process fails in all, and what cannot be served is refused; the model then answers as before."""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers as tf
from torch import nn

from hf_multilora import MultiLoRAModel, agreement
from hf_multilora.filling import Filling
from hf_multilora.store import CapacityError

from .answers import compare, logits
from .bases import RECENT, load, make, make_saved

NAMES = ["a", None, "b", "a"]


def caught(run: Callable[[], Any]) -> str:
    try:
        run()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def in_one(rank: int, name: str, error: Exception, run: Callable[[], Any]) -> str:
    """`run` with a method of Filling that raises in process 1 alone."""
    real = getattr(Filling, name)

    def fails(self: Any, *args: Any) -> Any:
        if rank == 1:
            raise error
        return real(self, *args)

    setattr(Filling, name, fails)
    try:
        return caught(run)
    finally:
        setattr(Filling, name, real)


def run(folder: Path, rank: int) -> dict[str, Any]:
    if rank == 0:
        make("llama", folder)
        make("mixtral, whole experts", folder / "moe")
        make_saved(folder, "q_proj")
    dist.barrier()
    one = load("llama", folder, sharded=False, max_loras=2)
    model = load("llama", folder, adapters="ab", max_loras=2)
    truth, found, errors = logits(one, NAMES), {}, {}

    def note(what: str, said: str) -> None:
        found[what] = said
        errors[what] = compare(logits(model, NAMES), truth)

    def add(path: Path) -> Callable[[], Any]:
        return lambda: model.load_adapter(str(path), "new")

    note("missing in one", caught(add(folder / ("c" if rank == 0 else "nowhere"))))
    note("another in one", caught(add(folder / ("c" if rank == 0 else "b"))))
    note("no host memory in one", in_one(rank, "pack", MemoryError("none left"), add(folder / "c")))
    note("not adapted in one", in_one(rank, "adapt", OSError("an odd machine"), add(folder / "c")))
    found["registered"] = str([entry.name for entry in model._multilora.store.catalogue])
    model.load_adapter(str(folder / "c"), "c")
    full = CapacityError("out of memory, says this test")
    note("no device memory in one", in_one(rank, "fill", full, lambda: logits(model, ["c"] * 4)))
    other = load("llama", folder, adapters="ab", max_loras=1)
    note("out of step", caught(lambda: logits(other, ["ab"[rank]] * 4)))
    note("prefetch", caught(lambda: model.prefetch(["c"])))
    note("copied", caught(lambda: copy.deepcopy(model)))
    note("resized", caught(lambda: model.resize_token_embeddings(70)))
    note("verify", caught(lambda: model.verify("a")))
    x = torch.zeros(4, 6, 32)
    with model.adapters(NAMES):
        inner = caught(lambda: model.model.layers[0].self_attn.q_proj(x))
    note("with gradients", inner)
    found["grad"] = str(model(torch.zeros(1, 3, dtype=torch.long), adapter_names=["a"]).logits.requires_grad)
    note("saved whole", caught(add(folder / "saved-q_proj")))
    found["fully with whole experts"] = caught(
        lambda: load("mixtral, whole experts", folder / "moe", fully_sharded_loras=True)
    )
    if RECENT:
        found["exchange"] = caught(lambda: load_plan(folder / "moe", ep_size=2, ep_implementation="all_to_all"))
        plan = {"model.layers.*.mlp": "all_reduce"}
        found["style"] = caught(lambda: load_plan(folder, tp_plan=plan))
    found["no plan"] = caught(lambda: MultiLoRAModel.from_pretrained(by_hand(folder), {}))
    return {"found": found, "errors": errors}


def load_plan(folder: Path, **more: Any) -> Any:
    from transformers.distributed import DistributedConfig

    return MultiLoRAModel.from_pretrained(
        str(folder / "base"), {}, distributed_config=DistributedConfig(tp_size=2, **more)
    )


def by_hand(folder: Path) -> Any:
    """A base with a DTensor that no parallel forward knows of."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    base = tf.AutoModelForCausalLM.from_pretrained(folder / "base")
    layer: Any = base.model.layers[0].mlp.up_proj
    layer.weight = nn.Parameter(distribute_tensor(layer.weight.data, init_device_mesh("cpu", (2,)), [Shard(0)]))
    return base


# -- processes that do not come ------------------------------------------------------------------------------------
def alone(folder: Path, rank: int, other: Callable[[], None]) -> dict[str, Any]:
    """Process 0 loads an adapter, process 1 does something else; what process 0 says, and after how long."""
    agreement.TIMEOUT = timedelta(seconds=5)
    model = load("llama", folder, adapters="a", max_loras=2)
    if rank == 1:
        other()
    start = time.perf_counter()
    said = caught(lambda: model.load_adapter(str(folder / "b"), "b"))
    return {
        "said": said,
        "seconds": time.perf_counter() - start,
        "names": [e.name for e in model._multilora.store.catalogue],
    }


def ended(folder: Path, rank: int) -> dict[str, Any]:
    return alone(folder, rank, lambda: os._exit(3))


def late(folder: Path, rank: int) -> dict[str, Any]:
    return alone(folder, rank, lambda: time.sleep(40))
