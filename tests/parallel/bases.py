"""Tiny bases that Transformers can shard over two processes, with adapters for all their linears and experts."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers as tf
from packaging.version import Version
from peft import LoraConfig, get_peft_model
from torch import nn

from hf_multilora import MultiLoRAModel

RECENT = Version(tf.__version__) >= Version("5.20")  # uneven heads, and ep_size
STD = 0.08  # of the factors: adapters move logits by about 1
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
VOCAB = 65 if RECENT else 64  # not the same in both processes
T5 = ("SelfAttention", "EncDecAttention")
T5_PLAN = {
    **{
        f"{s}.block.*.layer.*.{a}.{x}": "colwise_gather_output"
        for s in ("encoder", "decoder")
        for a in T5
        for x in "qkv"
    },
    **{f"{s}.block.*.layer.*.{a}.o": "rowwise_split_input" for s in ("encoder", "decoder") for a in T5},
    **{f"{s}.block.*.layer.*.DenseReluDense.wi": "colwise" for s in ("encoder", "decoder")},
    **{f"{s}.block.*.layer.*.DenseReluDense.wo": "rowwise" for s in ("encoder", "decoder")},
}
T5_PLAN = {key: style for key, style in T5_PLAN.items() if not (key.startswith("encoder") and "EncDec" in key)}


def experts() -> dict[str, Any]:
    return {"ep_size": 2} if RECENT else {"enable_expert_parallel": True}


@dataclass(frozen=True)
class Base:
    """more: for DistributedConfig. fully: whether adapters can be split further."""

    config: Callable[[], Any]
    auto: Any = tf.AutoModelForCausalLM
    more: Mapping[str, Any] = field(default_factory=dict)
    fully: bool = True


def mixtral() -> Any:
    return tf.MixtralConfig(vocab_size=64, intermediate_size=24, num_local_experts=4, **SMALL)


def gpt_oss() -> Any:
    return tf.GptOssConfig(vocab_size=64, intermediate_size=24, num_local_experts=4, head_dim=8, **SMALL)


BASES: dict[str, Base] = {
    "llama": Base(lambda: tf.LlamaConfig(vocab_size=VOCAB, intermediate_size=45 if RECENT else 44, **SMALL)),
    "qwen3": Base(
        lambda: tf.Qwen3Config(vocab_size=64, intermediate_size=44, head_dim=8, attention_bias=True, **SMALL)
    ),
    "phi3": Base(lambda: tf.Phi3Config(vocab_size=64, intermediate_size=44, pad_token_id=0, **SMALL)),
    "t5": Base(
        lambda: tf.T5Config(
            vocab_size=64, d_model=32, d_kv=8, d_ff=44, num_layers=2, num_heads=4, decoder_start_token_id=0
        ),
        tf.AutoModelForSeq2SeqLM,
        {"tp_plan": T5_PLAN},
    ),
    "mixtral": Base(mixtral),
    "mixtral, whole experts": Base(mixtral, more=experts(), fully=False),
    "qwen3_moe, whole experts": Base(
        lambda: tf.Qwen3MoeConfig(
            vocab_size=64,
            intermediate_size=44,
            moe_intermediate_size=24,
            num_experts=4,
            num_experts_per_tok=2,
            head_dim=8,
            initializer_range=0.2,
            **SMALL,
        ),
        more=experts(),
        fully=False,
    ),
    "gpt_oss": Base(gpt_oss),
    "gpt_oss, whole experts": Base(gpt_oss, more=experts(), fully=False),
}


def make(name: str, folder: Path) -> None:
    """The base in folder/base, adapters in folder/a, b and c; b trains the embedding as well."""
    torch.manual_seed(0)
    base, kind = BASES[name], BASES[name].auto
    model = kind.from_config(base.config())
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith("bias"):
                parameter.normal_(std=0.1)
    model.save_pretrained(folder / "base")
    linears = [key for key, module in model.named_modules() if type(module) is nn.Linear]
    stacked = [key for key, _ in model.named_parameters() if "experts" in key and not key.endswith("bias")]
    for i, adapter in enumerate("abc"):
        own = [*linears, "embed_tokens"] if adapter == "b" and kind is tf.AutoModelForCausalLM else linears
        config = LoraConfig(r=3 + i, lora_alpha=8, target_modules=own, target_parameters=stacked or None)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made = get_peft_model(kind.from_pretrained(folder / "base"), config)
            with torch.no_grad():
                for key, parameter in made.named_parameters():
                    if "lora" in key:
                        parameter.normal_(std=STD)
            made.save_pretrained(str(folder / adapter), save_embedding_layers=False)


def make_saved(folder: Path, module: str) -> Path:
    """An adapter for the base there that saves a module in full."""
    torch.manual_seed(4)
    base = tf.AutoModelForCausalLM.from_pretrained(folder / "base")
    made = get_peft_model(base, LoraConfig(r=3, target_modules=["v_proj"], modules_to_save=[module]))
    with torch.no_grad():
        for key, parameter in made.named_parameters():
            if "lora" in key or "modules_to_save" in key:
                parameter.normal_(std=STD)
    made.save_pretrained(str(folder / f"saved-{module}"))
    return folder / f"saved-{module}"


def load(name: str, folder: Path, sharded: bool = True, adapters: str = "abc", **settings: Any) -> Any:
    """The base of `make` with these adapters, over all processes or whole in this one."""
    from transformers.distributed import DistributedConfig

    more: dict[str, Any] = {"distributed_config": DistributedConfig(tp_size=2, **BASES[name].more)} if sharded else {}
    paths = {adapter: str(folder / adapter) for adapter in adapters}
    return MultiLoRAModel.from_pretrained(
        str(folder / "base"), paths, auto_class=BASES[name].auto, **settings, **more
    ).eval()
