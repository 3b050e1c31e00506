"""The weights of a sharded base change under adapted parts: in place, by another state dict, by another dtype."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers as tf

from .answers import NAMES, compare, logits
from .bases import load, make


@torch.no_grad()
def run(folder: Path, rank: int) -> dict[str, Any]:
    if rank == 0:
        make("llama", folder)
    dist.barrier()
    one, model = (load("llama", folder, sharded=sharded, max_loras=3) for sharded in (False, True))
    errors, before = {}, logits(one, NAMES)

    def check(what: str) -> None:
        errors[what] = compare(logits(model, NAMES), logits(one, NAMES))

    check("as loaded")
    for each in (model, one):
        each.model.layers[0].self_attn.q_proj.weight.mul_(1.5)
        each.model.layers[0].mlp.down_proj.weight.mul_(0.5)
    check("in place")
    state = {key: value.clone() for key, value in model.state_dict().items()}
    for factor, assign in ((0.9, False), (1.2, True)):
        for tensor in (*state.values(), *one.parameters()):
            tensor.mul_(factor)
        model.load_state_dict(state, assign=assign)
        errors[f"the base, assign={assign}"] = compare(logits(model, None), logits(one, None))  # before any request
        check(f"another state dict, assign={assign}")
    for each in (model, one):
        each.double()
    check("in float64")
    for each in (model, one):
        each.float()
    check("back")
    model.save_pretrained(folder / "saved")
    dist.barrier()
    again = tf.AutoModelForCausalLM.from_pretrained(folder / "saved").state_dict()
    own = one.unpatch().state_dict()
    saved = set(again) == set(own) and all(torch.equal(again[key], own[key]) for key in own)
    return {"errors": errors, "saved": saved, "moved": compare(logits(one, None), before)}
