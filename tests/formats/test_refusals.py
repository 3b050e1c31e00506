"""What plain LoRA on an unchanged base cannot serve is refused by name, at load, and nothing is dropped."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch

from hf_multilora.formats import AdapterError, ModuleShape, read_adapter
from tests.formats import tiny

Q0 = "model.layers.0.self_attn.q_proj"


def _shift_biases(model: Any) -> None:
    for name, weight in model.named_parameters():
        if name.endswith("bias"):
            weight.add_(1.0)


class Convolution(torch.nn.Module):
    """A model of one 2-D convolution."""

    base_model_prefix = ""

    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 4, 2)


def _biased() -> Any:
    return tiny.llama(attention_bias=True)


# name -> (base, how PEFT made the adapter, what the error says); each file is saved by PEFT itself
SAVED: dict[str, tuple[Callable[[], Any], dict[str, Any], str]] = {
    "ia3": (
        tiny.llama,
        {"cls": peft.IA3Config, "target_modules": ["k_proj"], "feedforward_modules": []},
        "peft_type must be LORA, got 'IA3'",
    ),
    "loha": (tiny.llama, {"cls": peft.LoHaConfig, "target_modules": ["q_proj"]}, "peft_type must be LORA, got 'LOHA'"),
    "dora": (tiny.llama, {"use_dora": True}, "DoRA is not supported"),
    "lora_bias": (tiny.llama, {"lora_bias": True}, "lora_bias is not supported"),
    "bias all": (_biased, {"bias": "all", "touch": _shift_biases}, r"bias is not supported \(bias='all'\)"),
    "bias lora_only": (_biased, {"bias": "lora_only", "touch": _shift_biases}, r"\(bias='lora_only'\)"),
    "alora": (tiny.llama, {"alora_invocation_tokens": [3, 4], "task_type": "CAUSAL_LM"}, "aLoRA"),
    "bdlora": (
        tiny.llama,
        {"use_bdlora": peft.tuners.lora.config.BdLoraConfig(target_modules_bd_a=["q_proj", "v_proj"], nblocks=2)},
        "BD-LoRA",
    ),
    "kasa": (tiny.llama, {"kasa_config": peft.tuners.lora.config.KasaConfig()}, "KaSA"),
    "velora": (tiny.llama, {"velora_config": peft.tuners.lora.config.VeloraConfig()}, "VeLoRA .*is not supported"),
    "monteclora": (
        tiny.llama,
        {"monteclora_config": peft.tuners.lora.config.MontecloraConfig()},
        "MonteCLoRA .*is not supported",
    ),
    "layer_replication": (tiny.llama, {"layer_replication": [[0, 2], [1, 3]]}, "layer_replication is not supported"),
    "pissa": (tiny.llama, {"init_lora_weights": "pissa"}, "init_lora_weights='pissa' changes the base"),
    "pissa_niter_4": (tiny.llama, {"init_lora_weights": "pissa_niter_4"}, "init_lora_weights='pissa_niter_4' changes"),
    "olora": (tiny.llama, {"init_lora_weights": "olora"}, "init_lora_weights='olora' changes"),
}


@pytest.mark.parametrize("kind", SAVED)
def test_refused_as_peft_saves_it(kind: str, tmp_path: Path) -> None:
    make, config, message = SAVED[kind]
    tiny.save(make(), tmp_path, **config)
    torch.manual_seed(0)
    with pytest.raises(AdapterError, match=message):
        tiny.read(tmp_path, make())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"init_lora_weights": "corda"}, "'corda' changes the base"),
        ({"init_lora_weights": "loftq"}, "'loftq' changes the base"),
        ({"init_lora_weights": "lora_ga"}, "'lora_ga' changes the base"),
        ({"init_lora_weights": "brand_new"}, "must be true, false or one of gaussian.*got 'brand_new'"),
        ({"use_qalora": True}, "QALoRA"),
        ({"arrow_config": {"top_k": 2}}, "Arrow"),
        ({"enable_lora": [True, False, True]}, "enable_lora"),
        ({"peft_type": None}, "peft_type must be LORA, got None"),
        ({"r": 0}, "r must be a whole number of at least 1, got 0"),
        ({"r": True}, "r must be a whole number"),
        ({"r": "8"}, "r must be a whole number"),
        ({"lora_alpha": None}, "lora_alpha must be a finite number, got None"),
        ({"lora_alpha": float("inf")}, "lora_alpha must be a finite number"),
        ({"rank_pattern": {"q_proj": 0}}, r"rank_pattern\['q_proj'\] must be a whole number"),
        ({"alpha_pattern": {"q_proj": float("nan")}}, r"alpha_pattern\['q_proj'\] must be a finite number"),
        ({"alpha_pattern": {"(": 1}}, r"alpha_pattern must hold regular expressions, got '\('"),
        ({"alpha_pattern": ["q_proj"]}, "alpha_pattern must be a mapping"),
        ({"r": 8}, r"module model\.layers\.0\.self_attn\.q_proj: the config resolves to rank 8.*tensors have rank 2"),
        ({"rank_pattern": {"q_proj": 4}}, "the config resolves to rank 4"),
    ],
)
def test_refused_by_config(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    tiny.save(tiny.llama(), tmp_path)
    tiny.read(tmp_path, tiny.llama())  # without the change it loads
    tiny.edit_config(tmp_path, **change)
    with pytest.raises(AdapterError, match=message):
        tiny.read(tmp_path, tiny.llama())


def test_convolutions(tmp_path: Path) -> None:
    tiny.save(Convolution(), tmp_path, target_modules=["conv"])
    with pytest.raises(AdapterError, match=r"module conv: Conv LoRA is not supported \(a 4-D factor"):
        tiny.read(tmp_path, Convolution())
    with pytest.raises(AdapterError, match="Conv LoRA is not supported"):  # by name, whatever the model says of it
        read_adapter(tmp_path, {"conv": ModuleShape("other", refused="it is neither a linear nor an embedding")})


def test_another_base(tmp_path: Path) -> None:
    tiny.save(tiny.gpt2(), tmp_path, target_modules=["c_attn"])
    with pytest.raises(AdapterError, match="c_attn not found in the base"):
        tiny.read(tmp_path, tiny.llama())


def test_routers_that_cannot_be_followed(tmp_path: Path) -> None:
    tiny.save(tiny.llama(), tmp_path)
    tiny.rename_keys(tmp_path, lambda key: key.replace("self_attn.q_proj", "mlp.gate"))
    modules = tiny.shapes(tiny.llama()) | {f"model.layers.{n}.mlp.gate": ModuleShape("other") for n in range(3)}
    with pytest.raises(AdapterError, match=r"module model\.layers\.0\.mlp\.gate: LoRA must target"):
        read_adapter(tmp_path, modules)


def test_modules_that_the_model_refuses(tmp_path: Path) -> None:
    tiny.save(tiny.llama(), tmp_path)
    modules = tiny.shapes(tiny.llama())
    modules[Q0] = ModuleShape("linear", 16, 16, refused="it is never called")
    with pytest.raises(AdapterError, match=f"module {Q0}: no adapter may target it here: it is never called"):
        read_adapter(tmp_path, modules)


def test_every_module_that_an_alias_stands_for_is_checked(tmp_path: Path) -> None:
    tiny.save(tiny.t5(), tmp_path, target_modules=["shared"])
    modules = tiny.shapes(tiny.t5())
    modules["decoder.embed_tokens"] = ModuleShape("embedding", 40, 24)
    with pytest.raises(AdapterError, match=r"module decoder\.embed_tokens: lora_embedding_B must have shape \[24, r\]"):
        read_adapter(tmp_path, modules, aliases=tiny.SHARED)


def test_rank_above_the_maximum(tmp_path: Path) -> None:
    tiny.save(tiny.llama(), tmp_path, rank_pattern={"v_proj": 5})
    with pytest.raises(AdapterError, match=r"v_proj: rank must be at most 4 \(max_lora_rank\), got 5"):
        tiny.read(tmp_path, tiny.llama(), max_rank=4)
    assert tiny.read(tmp_path, tiny.llama(), max_rank=5).max_rank == 5


def test_narrowing_at_deployment_drops_nothing(tmp_path: Path) -> None:
    tiny.save(tiny.llama(), tmp_path)
    for allowed in (["q_proj", "v_proj"], r".*\.self_attn\..*"):
        assert len(tiny.read(tmp_path, tiny.llama(), target_modules=allowed).factors) == 6
    for allowed in (["q_proj"], r".*q_proj", [], ["proj"]):
        with pytest.raises(AdapterError, match=r"target_modules=.* does not allow it here"):
            tiny.read(tmp_path, tiny.llama(), target_modules=allowed)
    with pytest.raises(AdapterError, match="target_modules must be a regular expression"):
        tiny.read(tmp_path, tiny.llama(), target_modules="(")
