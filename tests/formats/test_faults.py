"""Files that are broken, or hold what their config does not say: one clear error, and nothing is dropped."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from hf_multilora.formats import AdapterError
from tests.formats import tiny

Q0 = "model.layers.0.self_attn.q_proj"
KEY_A = f"base_model.model.{Q0}.lora_A.weight"
KEY_B = f"base_model.model.{Q0}.lora_B.weight"


def _with(**extra: torch.Tensor) -> Callable[[tiny.Tensors], tiny.Tensors]:
    return lambda tensors: tensors | {f"base_model.model.{key}": tensor for key, tensor in extra.items()}


def _poisoned(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.clone()
        tensor[-1, -1] = value
        return tensor

    return change


# the config says nothing of what these files hold
FILES: dict[str, tuple[Callable[[tiny.Tensors], tiny.Tensors], str]] = {
    "empty": (lambda tensors: {}, "the weights file is empty"),
    "dora": (_with(**{f"{Q0}.lora_magnitude_vector": torch.ones(16)}), r"DoRA.*is not supported"),
    "bias of B": (_with(**{f"{Q0}.lora_B.bias": torch.ones(16)}), rf"{Q0}\.lora_B\.bias; lora_bias"),
    "kasa": (_with(**{f"{Q0}.lora_diag": torch.ones(2)}), "KaSA"),
    "token rows": (_with(**{"model.embed_tokens.token_adapter.trainable_tokens_delta": torch.ones(2, 16)}), "token"),
    "bias of the base": (_with(**{f"{Q0}.base_layer.bias": torch.ones(16)}), f"module {Q0}: .*full bias"),
    "a head of its own": (_with(**{"score.weight": torch.ones(3, 16)}), r"score\.weight; .*no tensors of a LoRA"),
    "a saved module": (_with(**{"x.modules_to_save.weight": torch.ones(3)}), "modules_to_save"),
    "anything else": (_with(surprise=torch.ones(1)), "1 tensors cannot be used: base_model.model.surprise"),
    "many others": (_with(**{f"s{n}": torch.ones(1) for n in range(9)}), "9 tensors cannot be used: .*s4 and 4 more"),
    "old expert keys": (
        _with(
            **{
                "model.layers.0.block_sparse_moe.experts.0.w1.lora_A.weight": torch.ones(2, 16),
                "model.layers.0.block_sparse_moe.experts.0.w1.lora_B.weight": torch.ones(24, 2),
            }
        ),
        r"target modules w1 not found in the base: no module model\.layers\.0\.block_sparse_moe\.experts\.0\.w1",
    ),
    "A without B": (
        lambda tensors: {k: t for k, t in tensors.items() if k != KEY_B},
        f"{Q0} must have .* without lora_B",
    ),
    "B without A": (
        lambda tensors: {k: t for k, t in tensors.items() if k != KEY_A},
        f"{Q0} must have .* without lora_A",
    ),
    "A of another width": (
        tiny.changed(KEY_A, lambda a: a[:, :8]),
        rf"{Q0}: lora_A must have shape \[r, 16\] on this base, got shape \[2, 8\].*{KEY_A}",
    ),
    "B of another width": (tiny.changed(KEY_B, lambda b: b[:8]), rf"{Q0}: lora_B must have shape \[16, r\].*\[8, 2\]"),
    "A transposed": (tiny.changed(KEY_A, lambda a: a.T), rf"{Q0}: lora_A must have shape \[r, 16\].*\[16, 2\]"),
    "two ranks": (tiny.changed(KEY_B, lambda b: b[:, :1]), r"one rank, got shapes \[2, 16\] and \[16, 1\]"),
    "zero size": (tiny.changed(KEY_A, lambda a: a.new_empty(0)), rf"{Q0}: lora_A .*empty shape \[0\].*ZeRO-3"),
    "one dimension": (tiny.changed(KEY_A, lambda a: a[0]), r"lora_A must have shape \[r, 16\].*\[16\]"),
    "NaN": (tiny.changed(KEY_A, _poisoned(float("nan"))), rf"got NaN.*{KEY_A}"),
    "Inf": (tiny.changed(KEY_B, _poisoned(float("-inf"))), rf"got Inf.*{KEY_B}"),
    "integers": (tiny.changed(KEY_A, lambda a: a.to(torch.int8)), r"must be float32.*got torch\.int8"),
    "fp8": (tiny.changed(KEY_A, lambda a: a.to(torch.float8_e4m3fn)), r"must be float32.*got torch\.float8"),
    "two names": (
        lambda tensors: {k.replace("q_proj.lora_A.w", "q_proj.lora_A.x.w"): t for k, t in tensors.items()},
        "must hold one adapter, but its keys name",
    ),
    "two keys, one name": (
        lambda tensors: tensors | {KEY_A.removeprefix("base_model.model."): tensors[KEY_A]},
        f"two keys land on module {Q0}",
    ),
    "two names, one module": (
        lambda tensors: tensors | {k.replace("model.model.", "model."): t for k, t in tensors.items()},
        f"two keys land on module {Q0} of the base",
    ),
    "absent modules": (
        lambda tensors: {k.replace("q_proj", "c_attn"): t for k, t in tensors.items()},
        r"target modules c_attn not found in the base: no module model\.layers\.0\.self_attn\.c_attn",
    ),
    "a misspelt module": (
        lambda tensors: {k.replace("q_proj", "q_porj"): t for k, t in tensors.items()},
        rf"target modules q_porj not found .* the base has e\.g\. .*{Q0}",
    ),
    "one layer too many": (
        lambda tensors: {k.replace("layers.0", "layers.7"): t for k, t in tensors.items()},
        r"no module model\.layers\.7\.self_attn",
    ),
    "a norm": (
        lambda tensors: {k.replace("self_attn.q_proj", "input_layernorm"): t for k, t in tensors.items()},
        r"module model\.layers\.0\.input_layernorm: LoRA must target a linear",
    ),
    "linear keys for an embedding": (
        _with(**{f"model.embed_tokens.lora_{f}.weight": torch.ones(*s) for f, s in (("A", (2, 40)), ("B", (16, 2)))}),
        r"module model\.embed_tokens: the base has a embedding there, but the file holds lora_A/B",
    ),
    "only copies": (
        lambda tensors: {"model.embed_tokens.weight": tiny.same_llama().model.embed_tokens.weight.detach()},
        "touches no module",
    ),
}


@pytest.mark.parametrize("fault", FILES)
def test_refused_by_what_the_file_holds(fault: str, tmp_path: Path) -> None:
    change, message = FILES[fault]
    tiny.save(tiny.same_llama(), tmp_path)
    tiny.read(tmp_path, tiny.same_llama())  # without the fault it loads
    tiny.edit_weights(tmp_path, change)
    with pytest.raises(AdapterError, match=message):
        tiny.read(tmp_path, tiny.same_llama())
