"""Contenders that take turns on one base: each patches it in place and gives it back."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from transformers import LlamaForCausalLM, StaticCache

from hf_multilora import MultiLoRAModel

from .material import Pairs
from .registry import Work
from .timing import now

# Transformers renamed the argument that carries the cache
CACHE = "cache" if "cache" in inspect.signature(LlamaForCausalLM.forward).parameters else "past_key_values"
Rows = list[str | None]


@dataclass
class Subject:
    """A model that can be called with an adapter per row.

    route: rows -> a context that holds while they are in force, and gives the arguments that say so to `forward`.
    prepare: called with the number of distinct adapters before a cell that needs them.
    """

    name: str
    model: Any
    route: Callable[[Rows], AbstractContextManager[dict[str, Any]]]
    prepare: Callable[[int], None] = lambda distinct: None
    resident: Callable[[], int | None] = lambda: None


class Batch:
    """The prompts of one cell, and for decode a static cache that holds them and `steps` more tokens.

    ids [rows, tokens], for decode one more: the token of every step.
    """

    def __init__(self, subject: Subject, work: Work, ids: Tensor, steps: int) -> None:
        self.model = subject.model
        self.decode = work.phase == "decode"
        self.ids = ids
        if self.decode:
            self.ids, self.token = ids[:, : work.tokens], ids[:, work.tokens :].contiguous()
            self.length = -(-(work.tokens + steps) // 64) * 64
            self.cache = StaticCache(config=self.model.config, max_cache_len=self.length)

    def give(self, ids: Tensor) -> None:
        """Other prompts of the same shape, at the same place."""
        self.ids.copy_(ids[:, : self.ids.shape[1]])
        if self.decode:
            self.token.copy_(ids[:, self.ids.shape[1] :])

    def prompt(self, call: Mapping[str, Any]) -> Tensor:
        """Run the prompts (decode: into the emptied cache); logits of the last token [rows, V]."""
        more = {}
        if self.decode:
            self.cache.reset()
            more = {CACHE: self.cache}
        return self.model(input_ids=self.ids, logits_to_keep=1, **more, **call).logits[:, -1]

    def step(self, call: Mapping[str, Any]) -> Tensor:
        """One token for every row; logits [rows, V]."""
        return self.model(input_ids=self.token, **{CACHE: self.cache}, **call).logits[:, -1]

    def answer(self, call: Mapping[str, Any]) -> Tensor:
        """What is compared: the logits after the prompt, for decode after one step more."""
        logits = self.prompt(call)
        return self.step(call) if self.decode else logits


@contextmanager
def no_adapters(rows: Rows) -> Iterator[dict[str, Any]]:
    yield {}


def bare(base: nn.Module) -> Subject:
    return Subject("bare", base, no_adapters)


@contextmanager
def ours(
    base: nn.Module, backend: str, slots: int, rank: int, folders: Mapping[str, Path], note: dict[str, Any]
) -> Iterator[Subject]:
    """All `folders` registered, in host memory; note: seconds that took."""
    start = now(str(next(base.parameters()).device))
    paths = {name: str(folder) for name, folder in folders.items()}
    model = MultiLoRAModel.from_pretrained(
        base, paths, max_loras=slots, max_cpu_loras=max(slots, len(paths)), max_lora_rank=rank, backend=backend
    )
    try:
        note.update(registered=len(paths), registering_s=now("") - start)
        yield routed(model, f"hf_multilora, {backend}")
    finally:
        model.unpatch()


def routed(model: Any, name: str) -> Subject:
    """A MultiLoRAModel."""

    @contextmanager
    def route(rows: Rows) -> Iterator[dict[str, Any]]:
        with model.adapters(rows):
            yield {}

    def resident() -> int:
        return sum(row["on_device"] for row in model.list_adapters())

    return Subject(name, model, route, resident=resident)


@contextmanager
def peft(
    base: nn.Module, adapters: Mapping[str, Pairs], folders: Mapping[str, Path], note: dict[str, Any]
) -> Iterator[Subject]:
    """The first adapters are loaded from their folders, one of them timed; the others are set in place when needed.

    PEFT gets A and B in the base's dtype: it would compute them in float32 by default, more slowly.
    """
    device = str(next(base.parameters()).device)
    first, second, *_ = adapters
    model = PeftModel.from_pretrained(base, folders[first], adapter_name=first, autocast_adapter_dtype=False).eval()  # type: ignore[arg-type]
    try:
        start = now(device)
        model.load_adapter(str(folders[second]), adapter_name=second, autocast_adapter_dtype=False)
        note["load_adapter_ms"] = 1e3 * (now(device) - start)
        layers = {
            name.removeprefix("base_model.model."): module
            for name, module in model.named_modules()
            if isinstance(module, LoraLayer)
        }

        def prepare(distinct: int) -> None:
            for name in list(adapters)[:distinct]:
                for path, (a, b) in adapters[name].items():
                    if name not in layers[path].lora_A:
                        _set(layers[path], name, first, a, b)

        @contextmanager
        def route(rows: Rows) -> Iterator[dict[str, Any]]:
            yield {"adapter_names": [name or "__base__" for name in rows]}

        yield Subject("peft", model, route, prepare)
    finally:
        model.unload()


def _set(layer: Any, name: str, like: str, a: Tensor, b: Tensor) -> None:
    """Give a LoRA layer of PEFT one more adapter, with the settings of `like`: `load_adapter` takes seconds."""
    for linears, weight in ((layer.lora_A, a), (layer.lora_B, b)):
        linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
        linear.weight = nn.Parameter(weight, requires_grad=False)
        linears[name] = linear.eval()
    layer.lora_dropout[name] = nn.Identity()
    for table in (layer.scaling, layer.r, layer.lora_alpha, layer.use_dora):
        table[name] = table[like]


def peft_capture(device: str) -> str:
    """Whether a mixed batch of PEFT can be captured; on a tiny model, and last: a failure may end the context."""
    from peft import get_peft_model

    from .material import lora_config, random_base

    config = lora_config(4, ["q_proj", "down_proj"])
    model = get_peft_model(random_base("tiny", None, torch.bfloat16, device), config, adapter_name="p").eval()  # type: ignore[arg-type]
    model.add_adapter("q", config)
    ids = torch.ones(2, 3, dtype=torch.long, device=device)
    call = {"input_ids": ids, "use_cache": False, "adapter_names": ["p", "q"]}
    model(**call)
    torch.cuda.synchronize()
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            model(**call)
    except RuntimeError as error:
        return f"not possible: {str(error).strip().splitlines()[0]}"
    return "possible on a tiny model, for the mix that was captured; not timed"
