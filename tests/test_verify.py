"""`verify` proves parity, and notices when there is none."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from hf_multilora import MultiLoRAModel
from hf_multilora.verify import verify


def tiny() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.2,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@pytest.fixture
def model(tmp_path):
    for seed, name in enumerate(("a", "b")):
        torch.manual_seed(seed)
        targets = ["q_proj", "down_proj", "embed_tokens"] if name == "a" else ["v_proj"]
        peft = get_peft_model(tiny(), LoraConfig(r=4, lora_alpha=8, target_modules=targets, init_lora_weights=False))
        peft.save_pretrained(tmp_path / name)
    return MultiLoRAModel.from_pretrained(tiny(), adapters=[str(tmp_path / "a"), str(tmp_path / "b")])


def test_right_adapters_verify(model):
    for name in ("a", "b"):
        report = model.verify(name)
        assert report and report.where is None and report.effect > 0.01, report
        assert name in str(report) and "equals" in str(report)


def test_the_weights_are_as_before(model):
    before = {k: v.clone() for k, v in model.state_dict().items()}
    storage = {k: v.data_ptr() for k, v in model.named_parameters() if "embed" in k}
    model.verify("a")
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert all(model.get_parameter(k).data_ptr() == p for k, p in storage.items())


def test_the_weights_take_no_tenants_rows_along(model):
    with torch.no_grad():
        model(torch.arange(6)[None].repeat(2, 1), adapter_names=["a", "b"])
    laid = {k for k, v in model.named_parameters() if v.untyped_storage().nbytes() > v.nbytes}
    assert laid, "no weight lies with rank rows: the check says nothing"
    model.verify("a")
    assert all(v.untyped_storage().nbytes() == v.nbytes for v in model.state_dict().values())
    bare = model.unpatch()
    assert all(p.untyped_storage().nbytes() == p.nbytes for p in bare.parameters())


def test_a_base_in_float64(tmp_path, model):
    """More tokens than the one matmul over all slots takes, and a scale that is no power of two."""
    torch.manual_seed(2)
    config = LoraConfig(r=3, lora_alpha=7, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    get_peft_model(tiny(), config).save_pretrained(tmp_path / "c")
    wide = MultiLoRAModel.from_pretrained(tiny().double(), adapters=[str(tmp_path / "c")])
    report = wide.verify("c")
    assert report and report.tolerance < 1e-8 < report.effect, report


def test_a_corrupt_slot_is_found_and_named(model):
    model.verify("a")
    _, slots = model._multilora.sites["model.layers.1.mlp.down_proj"]
    with torch.no_grad():
        slots.b[:4] += 0.5
    report = model.verify("a")
    assert not report and report.where == "model.layers.1.mlp" and "DIFFERS" in str(report)
    assert model.verify("b"), "the other adapter's rows are whole"


def test_inputs_without_rows(model):
    with pytest.raises(ValueError, match=r"tensors with rows in front.*got \['x'\]"):
        model.verify("a", {"x": 1})


def test_half_precision_of_a_right_adapter(model):
    """Rounding stays within the tolerance of the dtype, and the effect of the adapter is far outside it."""
    for dtype in (torch.bfloat16, torch.float16):
        report = model.to(dtype).verify("b")
        assert report and 1e-4 < report.difference < report.tolerance < report.effect / 2, report


def test_inputs_of_the_user(model):
    ids = torch.arange(18).reshape(3, 6)
    assert verify(model, "b", {"input_ids": ids})
    with pytest.raises(KeyError, match="no adapter is named 'c'"):
        model.verify("c")
