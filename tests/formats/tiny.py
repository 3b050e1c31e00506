"""Tiny random models, what an adapter sees of them, and adapters that PEFT itself makes and saves."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers as tf
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file, save_file
from transformers.pytorch_utils import Conv1D

from hf_multilora.formats import Adapter, ModuleShape, read_adapter

Tensors = dict[str, torch.Tensor]
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
SHARED = {"shared": ("encoder.embed_tokens", "decoder.embed_tokens")}


def llama(**changes: Any) -> tf.LlamaForCausalLM:
    settings = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3}
    settings |= {"num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": False}
    return tf.LlamaForCausalLM(tf.LlamaConfig(**(settings | changes)))


def same_llama(**changes: Any) -> tf.LlamaForCausalLM:
    """The same weights at every call."""
    torch.manual_seed(0)
    return llama(**changes)


def gpt2() -> tf.GPT2LMHeadModel:
    return tf.GPT2LMHeadModel(tf.GPT2Config(vocab_size=40, n_embd=16, n_layer=2, n_head=2, n_positions=32))


def t5() -> tf.T5ForConditionalGeneration:
    settings = {"vocab_size": 40, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}
    return tf.T5ForConditionalGeneration(tf.T5Config(**settings))


def bert(cls: type[Any] = tf.BertForSequenceClassification) -> Any:
    settings = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    return cls(tf.BertConfig(**settings, intermediate_size=24, max_position_embeddings=32, num_labels=3))


def mixtral() -> tf.MixtralForCausalLM:
    settings = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    settings |= {"num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 2}
    return tf.MixtralForCausalLM(tf.MixtralConfig(**settings))


def shapes(model: torch.nn.Module) -> dict[str, ModuleShape]:
    """Every module of `model` as an adapter sees it."""
    seen = {}
    for name, module in model.named_modules():
        if not name:
            continue
        own = {key: t.shape for key, t in _own(module)}
        leaf = not any(list(_own(part)) for child in module.children() for part in child.modules())
        tied = tuple(n for n, m in model.named_modules() if n != name and _same_weight(m, module))
        more: dict[str, Any] = {"own": own, "leaf": leaf, "tied": tied, "resizable": _resizable(model, module)}
        if isinstance(module, torch.nn.Linear):
            sizes = (module.in_features, module.out_features)
            seen[name] = ModuleShape("linear", *sizes, weight=module.weight, bias=module.bias, **more)
        elif isinstance(module, Conv1D):
            seen[name] = ModuleShape("linear", module.nx, module.nf, bias=module.bias, transposed=True, **more)
        elif isinstance(module, torch.nn.Embedding):
            sizes = (module.num_embeddings, module.embedding_dim)
            seen[name] = ModuleShape("embedding", *sizes, weight=module.weight, **more)
        else:
            seen[name] = ModuleShape("other", **more)
    return seen


def _own(module: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Floating point parameters and persistent buffers that are not those of a child."""
    mine = {key for key in module.state_dict() if "." not in key}
    return [(key, t) for key, t in module.state_dict(keep_vars=True).items() if key in mine and t.is_floating_point()]


def _same_weight(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    weight = one._parameters.get("weight")
    return weight is not None and weight is other._parameters.get("weight")


def _resizable(model: Any, module: torch.nn.Module) -> bool:
    if not hasattr(model, "get_output_embeddings"):
        return False
    heads = [getattr(model, name, None) for name in ("score", "classifier")]
    heads += [getattr(heads[1], "out_proj", None)] if heads[1] is not None else []
    return module in [model.get_input_embeddings(), model.get_output_embeddings(), *heads]


def wrap(
    model: Any, touch: Callable[[Any], None] | None = None, cls: type[Any] = LoraConfig, **config: Any
) -> PeftModel:
    """`model` with a PEFT adapter of random weights, r 2 and alpha 6 unless told otherwise."""
    settings = {"r": 2, "lora_alpha": 6, "target_modules": ["q_proj", "v_proj"]} if cls is LoraConfig else {}
    peft_model = get_peft_model(model, cls(**(settings | config)))
    with torch.no_grad():
        for name, weight in peft_model.named_parameters():
            if "lora_" in name or "trainable_tokens_delta" in name:
                weight.copy_(torch.randn(weight.shape) * 0.3)
        if touch is not None:
            touch(peft_model)
    return peft_model


def save(model: Any, folder: Path, touch: Callable[[Any], None] | None = None, **config: Any) -> PeftModel:
    """`wrap`, saved by PEFT into `folder`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peft_model = wrap(model, touch, **config)
        peft_model.save_pretrained(folder)
    return peft_model


def deltas(peft_model: PeftModel, adapter: str = "default") -> dict[str, torch.Tensor]:
    """What PEFT adds, by module: [out, in] of a linear, [H, V] of an embedding."""
    found = {}
    for name, module in peft_model.base_model.model.named_modules():
        if isinstance(module, LoraLayer):
            delta = module.get_delta_weight(adapter).detach()
            # PEFT's layout is that of the layer's own weight: Conv1D [in, out], an embedding [V, H]
            transposed = isinstance(module.get_base_layer(), (Conv1D, torch.nn.Embedding))
            found[name] = delta.T if transposed else delta
    return found


def ours(adapter: Adapter) -> dict[str, torch.Tensor]:
    """scaling * B A, by module."""
    return {name: pair.scaling * (pair.b @ pair.a) for name, pair in adapter.factors.items()}


def assert_same(adapter: Adapter, expected: Mapping[str, torch.Tensor]) -> None:
    """The adapter has exactly the modules and (fp32, 1e-6) the deltas of `expected`."""
    got = ours(adapter)
    assert sorted(got) == sorted(expected)
    for name, delta in expected.items():
        torch.testing.assert_close(
            got[name], delta, rtol=1e-6, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
        )


def edit_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(config | changes))


def edit_weights(folder: Path, change: Callable[[Tensors], Tensors]) -> None:
    tensors = change(load_file(folder / WEIGHTS))
    save_file(
        {key: tensor.clone().contiguous() for key, tensor in tensors.items()},
        folder / WEIGHTS,
        metadata={"format": "pt"},
    )


def changed(key: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], Tensors]:
    return lambda tensors: tensors | {key: change(tensors[key])}


def rename_keys(folder: Path, rename: Callable[[str], str]) -> None:
    edit_weights(folder, lambda tensors: {rename(key): tensor for key, tensor in tensors.items()})


def read(folder: Path | str, model: Any, **settings: Any) -> Adapter:
    return read_adapter(folder, shapes(model), base_prefix=model.base_model_prefix, **settings)


def to_pickle(folder: Path, name: str) -> None:
    """Turn the adapter's safetensors file into a pickle of that name."""
    torch.save(load_file(folder / WEIGHTS), folder / name)
    (folder / WEIGHTS).unlink()
