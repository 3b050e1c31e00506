"""Mixed batches on a CUDA device: each row against PEFT alone; eager, with a compiled static cache, in a graph."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from hf_multilora import MultiLoRAModel

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
MIXES = [["a", None, "b"], ["b", "b", None], [None, None, None], ["c", "a", "b"], ["a", "a", "a"]]
TARGETS = {"a": ["q_proj", "v_proj", "down_proj"], "b": "all-linear", "c": ["embed_tokens", "lm_head", "o_proj"]}


def base(dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.15, pad_token_id=0, eos_token_id=1, tie_word_embeddings=False,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval().to("cuda", dtype)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("adapters")
    for seed, (name, targets) in enumerate(TARGETS.items()):
        torch.manual_seed(seed + 1)
        config = LoraConfig(r=3 + 5 * seed, lora_alpha=8, target_modules=targets, init_lora_weights=False)
        peft = get_peft_model(base().cpu(), config)
        with torch.no_grad():
            for key, weight in peft.named_parameters():
                if "lora_" in key:
                    weight.copy_(torch.randn(weight.shape) * 0.15)
        peft.save_pretrained(path / name)
    return path


def ours(folder, dtype: torch.dtype = torch.float32, **kwargs):
    return MultiLoRAModel.from_pretrained(base(dtype), {name: str(folder / name) for name in TARGETS}, **kwargs)


def alone(folder, name, dtype: torch.dtype = torch.float32):
    return base(dtype) if name is None else PeftModel.from_pretrained(base(dtype), folder / name).eval()


@pytest.fixture(scope="module")
def ids():
    return torch.randint(2, 128, (3, 9), generator=torch.Generator().manual_seed(3)).cuda()


@torch.no_grad()
def test_forward_equals_each_adapter_alone(folder, ids):
    model = ours(folder)
    rows = {name: alone(folder, name)(ids).logits for name in (None, *TARGETS)}
    for mix in MIXES:
        logits = model(ids, adapter_names=mix).logits
        for row, name in enumerate(mix):
            torch.testing.assert_close(logits[row], rows[name][row], atol=2e-4, rtol=2e-4)
    wrong = model(ids, adapter_names=["b", "a", None]).logits[0]
    assert (wrong - rows["a"][0]).abs().max() > 0.1, "the comparison must notice another adapter"


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_errs_no_more_than_peft(folder, ids, dtype):
    truth = {name: alone(folder, name)(ids).logits for name in (None, *TARGETS)}
    peft = {name: alone(folder, name, dtype)(ids).logits.float() for name in (None, *TARGETS)}
    model = ours(folder, dtype)
    for mix in MIXES:
        logits = model(ids, adapter_names=mix).logits.float()
        for row, name in enumerate(mix):
            own = (logits[row] - truth[name][row]).norm()
            theirs = (peft[name][row] - truth[name][row]).norm()
            assert own <= 2 * theirs + 1e-3 * truth[name][row].norm(), (mix, row, own, theirs)
    swapped = model(ids, adapter_names=["b", "a", None]).logits[0].float()
    assert (swapped - truth["a"][0]).norm() > 10 * (peft["a"][0] - truth["a"][0]).norm()


@torch.no_grad()
@pytest.mark.parametrize("how", [{}, {"cache_implementation": "static"}], ids=["dynamic", "static"])
def test_generate_with_mixes_that_change(folder, ids, how):
    model = ours(folder)
    settings = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    rows = {name: alone(folder, name).generate(input_ids=ids, **settings) for name in (None, *TARGETS)}
    assert not torch.equal(rows["a"][0], rows["b"][0])
    for mix in MIXES:
        out = model.generate(input_ids=ids, adapter_names=mix, **settings, **how)
        for row, name in enumerate(mix):
            assert torch.equal(out[row], rows[name][row]), (how, mix, row)


@torch.no_grad()
def test_one_captured_graph_serves_every_mix_of_resident_adapters(folder, ids):
    model = ours(folder)
    compiled = torch.compile(model, backend="eager", fullgraph=True)  # traced, the mix is data
    with model.adapters(["a", "b", "c"]):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                compiled(ids, use_cache=False)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = compiled(ids, use_cache=False).logits
    seen = []
    for mix in MIXES:
        with model.adapters(mix):
            graph.replay()
            seen.append(captured.clone())
        torch.testing.assert_close(seen[-1], model(ids, adapter_names=mix).logits, atol=2e-4, rtol=2e-4)
    assert (seen[0] - seen[1]).abs().max() > 0.1


def test_moving_between_devices(folder, ids):
    model = ours(folder)
    with torch.no_grad():
        before = model(ids, adapter_names=MIXES[0]).logits
        model.cpu()
        on_cpu = model(ids.cpu(), adapter_names=MIXES[0]).logits
        model.cuda()
        after = model(ids, adapter_names=MIXES[0]).logits
    torch.testing.assert_close(on_cpu, before.cpu(), atol=2e-4, rtol=2e-4)
    torch.testing.assert_close(after, before)


@torch.no_grad()
def test_the_weight_keeps_its_memory(folder, ids):
    model = ours(folder)
    model(ids, adapter_names=["b"] * 3)
    torch.cuda.synchronize()
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage() for p in model.parameters()}
    held = sum(storage.nbytes() for storage in storages.values())
    weights = sum(p.nbytes for p in set(model.parameters()))
    assert held - weights <= model.memory_report().device_bytes, "a second copy of the base must not be held"
