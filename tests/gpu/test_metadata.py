"""Copies from host to device: a decode step makes none of ours; a change of the rows makes one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from hf_multilora.kernels import lora_expand, lora_shrink
from tests.tiny import Family, ids, llama, save_adapter


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Family:
    torch.manual_seed(0)
    return Family(llama().to("cuda"), tmp_path_factory.mktemp("adapters"), {"a": {"r": 2}, "b": {"r": 5}})


def uploads(run: Any) -> int:
    """Copies from host to device while `run` runs."""
    run()  # whatever is done once
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as seen:
        run()
        torch.cuda.synchronize()
    return sum("HtoD" in event.name for event in seen.events())


def test_unchanged_steps_upload_nothing(family: Family) -> None:
    model, inputs = family.model(), ids(3, 7).cuda()

    @torch.no_grad()
    def step(names: list[str | None]) -> None:
        model(inputs, adapter_names=names)

    bare = uploads(lambda: family.base(inputs))
    assert uploads(lambda: step(["a", None, "b"])) == bare
    first = ["a", None, "b"]

    def change() -> None:
        first.reverse()
        step(first)

    assert uploads(change) == bare + 1, "control: other rows are one copy"


def test_generate_uploads_the_rows_once(family: Family) -> None:
    model, inputs = family.model(), ids(3, 7).cuda()

    def run(target: Any, tokens: int, **names: Any) -> int:
        return uploads(lambda: target.generate(inputs, max_new_tokens=tokens, do_sample=False, **names))

    for tokens in (2, 12):
        extra = run(model, tokens, adapter_names=["a", None, "b"]) - run(family.base, tokens)
        assert extra == 0, f"{tokens} tokens with the rows of the call before"


@torch.no_grad()
def test_a_captured_graph_serves_adapters_that_were_loaded_after_it(tmp_path: Path) -> None:
    """Into the same slots, with other ranks: tables, buffers and pools are where they were."""
    adapters: dict[str, dict[str, Any]] = {name: {"r": r} for name, r in zip("abcd", (3, 5, 6, 2), strict=True)}
    own = Family(llama().to("cuda"), tmp_path, adapters)
    model, inputs = own.model(max_loras=2, max_lora_rank=8), ids(3, 7).cuda()
    with model.adapters(["a", None, "b"]):
        for _ in range(3):
            model(inputs, use_cache=False)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = model(inputs, use_cache=False).logits
    for names in (["b", "a", None], ["c", "d", None], ["d", "d", "c"], ["a", None, "d"], [None, None, None]):
        with model.adapters(names):
            graph.replay()
            got = out.clone()
        want = own.truth(inputs, names)
        assert float((got - want).abs().max() / want.abs().max()) < 1e-4, names
        moved = own.truth(inputs, names[1:] + names[:1])
        assert names == [None] * 3 or float((got - moved).abs().max() / want.abs().max()) > 2e-3, names


def compiled() -> int:
    """Triton kernels of ours that were compiled in this process."""
    kernels = (lora_expand.lora_expand_kernel, lora_shrink.lora_shrink_kernel)
    return sum(len(caches[0]) for kernel in kernels for caches in kernel.device_caches.values())


def test_nothing_is_compiled_after_a_warm_up(tmp_path: Path) -> None:
    from hf_multilora import MultiLoRAModel

    base = llama(hidden_size=64, intermediate_size=96).to("cuda", torch.bfloat16)
    folder = save_adapter(base.float(), tmp_path / "a", r=4)
    model = MultiLoRAModel.from_pretrained(base.bfloat16(), max_loras=3, max_lora_rank=8)
    model.warmup(rows=(1, 3), tokens=(1, 64))
    before = compiled()
    assert before, "control: the warm-up compiles"
    model.load_adapter(str(folder), "a")
    with torch.no_grad():
        model(ids(2, 33).cuda(), adapter_names=["a", None])
        model.generate(ids(3, 7).cuda(), adapter_names=["a", None, "a"], max_new_tokens=4, do_sample=False)
    assert compiled() == before
