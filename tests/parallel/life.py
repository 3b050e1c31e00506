"""Adapters come and go on a sharded base, in all processes alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._dynamo.utils import counters

from hf_multilora import MultiLoRAModel

from .answers import NAMES, compare, inputs, logits, tokens
from .bases import load, make, make_saved


def run(folder: Path, rank: int) -> dict[str, Any]:
    if rank == 0:
        make("llama", folder)
        make_saved(folder, "lm_head")
    dist.barrier()
    return {mode: of_mode(folder, mode == "fully") for mode in ("parts", "fully")}


def of_mode(folder: Path, fully: bool) -> dict[str, Any]:
    one = load("llama", folder, sharded=False, max_loras=4)
    model = load("llama", folder, adapters="ab", max_loras=2, fully_sharded_loras=fully)
    errors: dict[str, float] = {}

    def check(what: str, names: list[str | None]) -> None:
        errors[what] = compare(logits(model, names), logits(one, names))

    check("two", ["a", "b", None, "a"])
    model.load_adapter(str(folder / "c"), "c")
    check("evicting one", ["c", None, "c", "c"])
    check("the other comes back", ["b", "b", "a", None])
    check("in passes", NAMES)
    with model.adapters(["a", "c", None, "c"]), torch.no_grad():
        block = model(**{"input_ids": torch.arange(24).view(4, 6)}).logits
    with one.adapters(["a", "c", None, "c"]), torch.no_grad():
        errors["a block"] = compare(block, one(**{"input_ids": torch.arange(24).view(4, 6)}).logits)
    for each in (model, one):
        each.load_adapter(str(folder / "b"), "a", load_inplace=True)
    check("replaced", ["a", "b", "a", None])
    for each in (model, one):
        each.set_adapter("c")
    errors["default"] = compare(logits(model, None), logits(one, None))
    for each in (model, one):
        each.set_adapter(None)
        each.delete_adapter("b")
    check("one deleted", ["a", "c", None, "c"])
    saved = folder / f"saved-{fully}"
    model.save_adapter("c", str(saved))
    model.load_adapter(str(saved), "d")
    errors["saved and read"] = compare(logits(model, ["d"] * 4), logits(one, ["c"] * 4))
    for each in (model, one):
        each.load_adapter(str(folder / "saved-lm_head"), "h")
    check("a head saved in full", ["h", "c", None, "h"])
    laid, buffers = laid_together(model), buffers_of(model)
    errors["state dict"] = float(any(storage(value) in buffers for value in model.state_dict().values()))
    compiled, graphs = torch.compile(model, backend="eager", fullgraph=True), counters["stats"]["unique_graphs"]
    for names in (["a", "c", None, "c"], [None, "a", "c", "a"], [None] * 4):
        with model.adapters(names), torch.no_grad():
            errors[f"compiled {names}"] = compare(compiled(**inputs(model)).logits, logits(one, names))
    graphs = counters["stats"]["unique_graphs"] - graphs
    same = tokens(model, ["a", "c", None, "c"]) == tokens(one, ["a", "c", None, "c"])
    report, plan = model.memory_report(), MultiLoRAModel.plan(model, {"a": str(folder / "a")}, max_loras=1)
    own = sum(getattr(parameter, "_local_tensor", parameter).nbytes for parameter in model.parameters())
    errors["plan"] = float(plan.base_bytes != own)
    model_entries = list(model._multilora.store.catalogue)
    bare = model.unpatch()
    with torch.no_grad():
        errors["unpatched"] = compare(logits(bare, None), logits(one, None))
    errors["memory"] = float(any(storage(value) in buffers for value in bare.state_dict().values()))
    left = [name for name, module in bare.named_modules() if any("multilora" in key for key in module.__dict__)]
    return {
        "errors": errors,
        "tokens": same,
        "left": left,
        "class": type(bare).__name__,
        "report": str(report),
        "laid": laid,
        "sizes": [entry.nbytes for entry in model_entries],
        "graphs": graphs,
    }


def buffers_of(model: Any) -> dict[int, torch.Tensor]:
    """By address; kept, so that nothing else gets it."""
    held = [slots.buffer for _, slots in model._multilora.sites.values()]
    return {storage(buffer): buffer for buffer in held if buffer is not None}


def storage(value: torch.Tensor) -> int:
    """Address of the memory that a parameter, or this process's part of it, lies in."""
    return getattr(value, "_local_tensor", value).untyped_storage().data_ptr()


def laid_together(model: Any) -> int:
    """Buffers in which the parts of several linears lie, their DTensors with them."""
    found = set()
    for name, outer in model._multilora.outers.items():
        part, slots = model._multilora.sites[name]
        if slots.merged is not None and len(slots.merged.members) > 1:
            assert outer.weight._local_tensor.data_ptr() == part.weight.data_ptr()
            found.add(id(slots.merged))
    return len(found)
