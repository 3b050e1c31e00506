"""Tiny random models, what an adapter sees of them, and adapters that PEFT itself makes and saves."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers as tf
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from peft.utils.other import ModulesToSaveWrapper
from safetensors.torch import load_file, save_file
from transformers.pytorch_utils import Conv1D

from hf_multilora.formats import Adapter, ModuleShape, read_adapter
from hf_multilora.moe import experts_of, router_of

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


def bert(cls: type[Any] = tf.BertForSequenceClassification, num_labels: int = 3) -> Any:
    settings = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    return cls(tf.BertConfig(**settings, intermediate_size=24, max_position_embeddings=32, num_labels=num_labels))


def roberta() -> tf.RobertaForSequenceClassification:
    settings = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = tf.RobertaConfig(**settings, intermediate_size=24, max_position_embeddings=34, num_labels=3)
    return tf.RobertaForSequenceClassification(config)


def scorer(num_labels: int = 3) -> tf.LlamaForSequenceClassification:
    settings = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    settings |= {"num_attention_heads": 2, "num_key_value_heads": 1, "pad_token_id": 0}
    return tf.LlamaForSequenceClassification(tf.LlamaConfig(**settings, num_labels=num_labels))


def mixtral() -> tf.MixtralForCausalLM:
    settings = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    settings |= {"num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 2}
    return tf.MixtralForCausalLM(tf.MixtralConfig(**settings))


def shapes(model: torch.nn.Module) -> dict[str, ModuleShape]:
    """Every module of `model` as an adapter sees it."""
    seen = {}
    users: dict[int, list[str]] = {}  # of a weight
    for name, module in model.named_modules():
        users.setdefault(id(module._parameters.get("weight")), []).append(name)
    for name, module in model.named_modules():
        if not name:
            continue
        weight = module._parameters.get("weight")
        own = {key: t.shape for key, t in _own(module)}
        leaf = not any(list(_own(part)) for child in module.children() for part in child.modules())
        tied = tuple(n for n in users[id(weight)] if n != name) if weight is not None else ()
        more: dict[str, Any] = {"own": own, "leaf": leaf, "tied": tied, "resizable": _resizable(model, module)}
        special = experts_of(module) or router_of(module)
        if special is not None:
            seen[name] = replace(special, **more)
        elif isinstance(module, torch.nn.Linear):
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
    buffers = ((k, t) for k, t in module._buffers.items() if k not in module._non_persistent_buffers_set)
    return [(k, t) for k, t in (*module._parameters.items(), *buffers) if t is not None and t.is_floating_point()]


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


def twin(make: Callable[[], Any]) -> Any:
    """The same weights at every call."""
    torch.manual_seed(0)
    return make().eval()


def saved_modules(peft_model: PeftModel, adapter: str = "default") -> dict[str, torch.nn.Module]:
    """The copies that PEFT trains in full, by module of the base; of a container, the modules inside it."""
    found = {}
    for name, module in peft_model.base_model.model.named_modules():
        if isinstance(module, ModulesToSaveWrapper) and adapter in module.modules_to_save:
            for inner, part in module.modules_to_save[adapter].named_modules():
                if _own(part):
                    found[f"{name}.{inner}" if inner else name] = part
    return found


def as_saved(module: torch.nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    """What a saved site of the module must hold."""
    weight = module.state_dict().get("weight")
    if isinstance(module, torch.nn.Embedding):
        return weight, torch.zeros(0, weight.shape[0])
    if isinstance(module, (torch.nn.Linear, Conv1D)):
        rows = weight.T if isinstance(module, Conv1D) else weight
        return rows, torch.zeros(1, rows.shape[0]) if module.bias is None else module.bias.detach()[None]
    return torch.cat([tensor.reshape(-1) for _, tensor in _own(module)])[None], torch.zeros(0, 1)


def touch_saved(model: Any) -> None:
    """Train, as it were, all of modules_to_save, statistics included."""
    for name, tensor in model.state_dict().items():
        if ".modules_to_save." in name and tensor.is_floating_point():
            tensor.add_(torch.rand(tensor.shape) * 0.5 + 0.1)


@torch.no_grad()
def served(model: Any, adapter: Adapter) -> Any:
    """`model` with the adapter's sites put into its parameters, each module on its own (none is tied afterwards)."""
    named = dict(model.named_modules(remove_duplicate=False))
    for module in {name.partition(":")[0] for name in adapter.factors}:
        part = named[module]
        saved, rows, pair = (adapter.factors.get(module + role) for role in (":saved", ":tokens", ""))
        if not isinstance(part, (torch.nn.Linear, torch.nn.Embedding, Conv1D)):
            values = iter(saved.a[0].split([tensor.numel() for _, tensor in _own(part)]))
            for _, tensor in _own(part):
                tensor.copy_(next(values).view(tensor.shape))
            continue
        flip = isinstance(part, Conv1D)
        weight = saved.a if saved else (part.weight.T if flip else part.weight)
        weight = weight.to(torch.float32, copy=True)
        if rows is not None:
            weight[rows.b[0]] = rows.a.to(torch.float32)
        if pair is not None:
            delta = pair.scaling * (pair.b @ pair.a)
            weight += delta.T if isinstance(part, torch.nn.Embedding) else delta
        part.weight = torch.nn.Parameter((weight.T if flip else weight).contiguous())
        if saved is not None and not isinstance(part, torch.nn.Embedding):
            part.bias = torch.nn.Parameter(saved.b[0].to(torch.float32))
    return model


@torch.no_grad()
def outputs(model: Any, more_ids: Sequence[int] = ()) -> torch.Tensor:
    """The logits of a fixed batch, `more_ids` at the end of each row."""
    ids = torch.tensor([[5, 9, 1, 20, 6, 30, *more_ids], [7, 2, 3, 39, 8, 4, *more_ids]])
    more = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
    out = model.eval()(input_ids=ids, attention_mask=torch.ones_like(ids), **more)
    return out.logits if "logits" in out else out.start_logits


def assert_served(make: Callable[[], Any], adapter: Adapter, peft_model: Any, more_ids: Sequence[int] = ()) -> None:
    """The base with the adapter's sites gives PEFT's logits, and without them others."""
    expected = outputs(peft_model, more_ids)
    torch.testing.assert_close(outputs(served(twin(make), adapter), more_ids), expected, rtol=1e-5, atol=1e-5)
    expected = outputs(peft_model)
    bare = outputs(twin(make))
    assert bare.shape != expected.shape or not torch.allclose(bare, expected, rtol=1e-3, atol=1e-3)


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
