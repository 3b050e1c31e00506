"""Small builders of the core's tests: random models, adapter files written key by key, and adapters merged by hand.

The truth is a copy of the bare model with `scale * B A` added to its weights, one row at a time: no PEFT, no batch.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers as tf
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from hf_multilora import MultiLoRAModel

VOCAB = 40
LINEARS = ("q_proj", "v_proj", "up_proj", "down_proj")
Names = Sequence[str | None]


def llama(**changes: Any) -> Any:
    settings = {"vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 2}
    settings |= {"num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": False}
    settings |= {"attention_bias": True, "initializer_range": 0.3, "pad_token_id": 0}
    return _random_biases(tf.LlamaForCausalLM(tf.LlamaConfig(**(settings | changes))))


def gpt2() -> Any:
    config = tf.GPT2Config(vocab_size=VOCAB, n_embd=16, n_layer=2, n_head=2, n_positions=64, initializer_range=0.3)
    return _random_biases(tf.GPT2LMHeadModel(config))


def bert(cls: type[Any] = tf.BertForSequenceClassification) -> Any:
    settings = {"vocab_size": VOCAB, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    settings |= {"intermediate_size": 20, "initializer_range": 0.3}
    return _random_biases(cls(tf.BertConfig(**settings, max_position_embeddings=32, num_labels=3)))


def t5() -> Any:
    settings = {"vocab_size": VOCAB, "d_model": 16, "d_kv": 8, "d_ff": 20, "num_layers": 1, "num_heads": 2}
    return tf.T5ForConditionalGeneration(tf.T5Config(**settings, decoder_start_token_id=0)).eval()


def _random_biases(model: Any) -> Any:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.1)
    return model.eval()


def save_adapter(
    base: nn.Module, folder: Path, *, r: int = 3, seed: int = 1, targets: Iterable[str] = LINEARS, **config: Any
) -> Path:
    """A PEFT checkpoint for every module of `base` whose last name is in `targets`; r may be {last name: r}."""
    made, targets, tensors = torch.Generator().manual_seed(seed), tuple(targets), {}
    for path, module in base.named_modules():
        last = path.rsplit(".", 1)[-1]
        if last not in targets:
            continue
        rank = r[last] if isinstance(r, Mapping) else r
        out, width = _sizes(module)
        a, b = (torch.randn(*size, generator=made) * 0.3 for size in ((rank, width), (out, rank)))
        if isinstance(module, nn.Embedding):
            keys = ("lora_embedding_A", "lora_embedding_B")
        else:
            keys = ("lora_A.weight", "lora_B.weight")
        tensors |= {f"base_model.model.{path}.{key}": value for key, value in zip(keys, (a, b), strict=True)}
    assert tensors, targets
    top = max(r.values()) if isinstance(r, Mapping) else r
    settings = {"peft_type": "LORA", "r": top, "lora_alpha": 2 * top, "target_modules": list(targets)}
    if isinstance(r, Mapping):
        settings |= {"rank_pattern": dict(r), "alpha_pattern": {name: 2 * rank for name, rank in r.items()}}
    settings |= {"task_type": "CAUSAL_LM", "base_model_name_or_path": None}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(settings | config))
    return folder


def _sizes(module: nn.Module) -> tuple[int, int]:
    """(out, in) as an adapter sees them."""
    if isinstance(module, nn.Embedding):
        return module.embedding_dim, module.num_embeddings
    weight: Any = module.weight
    return (weight.shape[1], weight.shape[0]) if isinstance(module, Conv1D) else tuple(weight.shape)


def merged(base: nn.Module, folder: Path) -> Any:
    """A copy of `base` with the adapter's `2 B A` added to its weights (save_adapter's alpha is 2 r)."""
    model: Any = copy.deepcopy(base)
    device = str(next(model.parameters()).device)
    tensors = load_file(folder / "adapter_model.safetensors", device=device)
    for key, a in tensors.items():
        if "_A" not in key:
            continue
        path = key.removeprefix("base_model.model.").rsplit(".lora_", 1)[0]
        module, delta = model.get_submodule(path), 2 * tensors[key.replace("_A", "_B")].double() @ a.double()
        if isinstance(module, (nn.Embedding, Conv1D)):
            delta = delta.T
        module.weight = nn.Parameter((module.weight.double() + delta).to(module.weight.dtype))  # unties on purpose
    return model


class Family:
    """A bare base and some adapters on it, with what each row must answer."""

    def __init__(self, base: Any, folder: Path, adapters: Mapping[str, Mapping[str, Any]]) -> None:
        self.base = base
        self.paths = {
            name: save_adapter(base, folder / name, **({"seed": i + 1} | dict(settings)))
            for i, (name, settings) in enumerate(adapters.items())
        }

    def model(self, *names: str, **settings: Any) -> Any:
        """A MultiLoRAModel on a copy of the base, with these adapters (none: all)."""
        chosen = {name: str(self.paths[name]) for name in names or self.paths}
        return MultiLoRAModel.from_pretrained(copy.deepcopy(self.base), chosen, **settings)

    @torch.no_grad()
    def truth(self, inputs: Tensor, names: Names, base: Any = None) -> Tensor:
        """Logits [R, ...], each row run alone through a merged copy of `base` (None: the family's own)."""
        bare = self.base if base is None else base
        models = {name: bare if name is None else merged(bare, self.paths[name]) for name in set(names)}
        return torch.cat([models[n](input_ids=row[None]).logits for n, row in zip(names, inputs, strict=True)])


@torch.no_grad()
def logits(model: Any, inputs: Tensor, names: Names) -> Tensor:
    return model(input_ids=inputs, adapter_names=list(names)).logits


def ids(rows: int, tokens: int = 5, seed: int = 0) -> Tensor:
    return torch.randint(0, VOCAB, (rows, tokens), generator=torch.Generator().manual_seed(seed))


def same_ids(rows: int, tokens: int = 5) -> Tensor:
    """The same tokens in every row: rows differ by their adapters only, so that swapped rows show."""
    return ids(1, tokens).repeat(rows, 1)


def error(got: Tensor, want: Tensor) -> float:
    """Largest difference, as a share of the largest value wanted."""
    return float((got.double() - want.double()).abs().max() / want.double().abs().max())


def assert_rows(got: Tensor, want: Tensor, tolerance: float = 1e-5) -> None:
    """`got` has the rows of `want`; and rows in another order would not pass, so that the check can fail."""
    assert got.shape == want.shape
    assert error(got, want) < tolerance
    assert error(got.roll(1, 0), want) > 20 * tolerance, "a permuted batch passes: the check says nothing"


def snapshot(model: Any) -> dict[str, Any]:
    """All that can be seen of every module, without the objects that are compared by value."""
    found: dict[str, Any] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        keys = {k: type(v) for k, v in vars(module).items()}
        hooks = {k: (list(v), list(map(id, v.values()))) for k, v in vars(module).items() if "hooks" in k and v}
        found[name] = (id(module), type(module), list(keys.items()), hooks)
    for name, tensor in [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]:
        layout = (tensor.dtype, tensor.shape, tensor.stride(), tensor.requires_grad, tensor.storage_offset())
        found[f"tensor {name}"] = (id(tensor), type(tensor), layout, tensor.untyped_storage().nbytes())
    return found


def beside(slots: Any) -> Tensor:
    """A laid module's A as the matmul with its weight, and those of its siblings, reads it."""
    merged = slots.merged
    rows: Tensor = merged.buffer[merged.n + (0 if merged.one_a else slots.index) :: merged.lanes]
    return rows[: len(slots.a)]


def cut_short(step: Callable[..., Any], done: bool) -> Callable[..., Any]:
    """`step`, the second call of which ends in KeyboardInterrupt: before it does anything, or `done` after it."""
    calls = [0]

    def interrupted(*args: Any) -> Any:
        calls[0] += 1
        result = step(*args) if done or calls[0] != 2 else None
        if calls[0] == 2:
            raise KeyboardInterrupt
        return result

    return interrupted
