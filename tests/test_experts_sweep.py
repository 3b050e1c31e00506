"""A sweep over the experts of Transformers' interface: experts, routers and the linears beside them, by merged weights.

One generous set of sizes builds them all; a class that the installed Transformers lacks skips its row.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from hf_multilora import MultiLoRAModel
from tests.experts import HEADED, MOE, PAD, SIGMOID, VOCAB, Margins, Mixture
from tests.experts_adapters import PEFT, Adapter, Part, factors, merge, write
from tests.experts_family import FAR, TOLERANCE, error

NAMES = ["all", None, "experts", "all"]
MLA = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
SIZES = {
    **HEADED, **SIGMOID, **MOE, "num_local_experts": 6, "moe_num_experts": 6, "moe_topk": 2, "moe_k": 2, "top_k": 2,
    "num_shared_experts": 1, "shared_expert_intermediate_size": 24, "sliding_window": 16,
}  # fmt: skip
LATENT = {**MLA, "num_key_value_heads": 4, "head_dim": 4}
# what the name of the model begins with -> sizes of its own
CLASSES: Mapping[str, Mapping[str, Any]] = {
    "Afmoe": {}, "Cohere2Moe": {}, "DeepseekV2": LATENT, "DeepseekV4": MLA, "Dots1": {}, "Dots3Note": LATENT,
    "Ernie4_5_Moe": {}, "ExaoneMoe": {}, "FlexOlmo": {}, "Glm4MoeLite": LATENT, "GraniteMoeSWA": {},
    "GraniteMoeShared": {}, "HunYuanMoEV1": {}, "HYV3": {}, "HYV4": {}, "Inkling": {}, "Inkling2": {},
    "Inkling2Loop": {}, "Kolibri1": {}, "Laguna": {}, "LaraMini": {}, "Mellum": {}, "MiMoV2Flash": {}, "MiniMax": {},
    "MiniMaxM2": {}, "MiniMaxM3VL": {}, "Mistral4": LATENT, "Phimoe": {}, "SolarOpen": {},
}  # fmt: skip


def beside(base: nn.Module, experts: str) -> Iterator[str]:
    """Linears and routers in the module that holds the experts, not further down than its own layer."""
    outer = experts.rpartition(".")[0]
    for name, module in base.get_submodule(outer).named_modules():
        weight = module._parameters.get("weight")
        if name and not list(module.children()) and isinstance(weight, Tensor) and weight.dim() == 2:
            yield f"{outer}.{name}"


def parts_of(base: Any, r: int, seed: int, more: bool) -> Iterator[Part]:
    made = torch.Generator().manual_seed(seed)
    for path in [name for name, module in base.named_modules() if hasattr(module, "is_transposed")]:
        module = base.get_submodule(path)
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.dim() == 3:
                out, width = parameter.shape[1:] if not module.is_transposed else parameter.shape[:0:-1]
                yield Part(path, name, *factors(made, r, (out, width), module.num_experts, module.num_experts))
        for other in beside(base, path) if more else ():
            yield Part(other, "weight", *factors(made, r, tuple(base.get_submodule(other).weight.shape)))


@pytest.mark.parametrize("name", CLASSES)
@torch.no_grad()
def test_mixed_rows(name: str, tmp_path: Path) -> None:
    mixture = Mixture(f"{name}ForCausalLM", {**SIZES, **CLASSES[name]})
    if mixture.missing:
        pytest.skip(f"Transformers {transformers.__version__} has no {mixture.model}")
    made = torch.Generator().manual_seed(3)
    mask = torch.ones(4, 6, dtype=torch.int64)
    mask[1, :2] = 0
    ids = torch.randint(3, VOCAB - 3, (4, 6), generator=made) * mask + PAD * (1 - mask)

    def logits(of: Any, rows: slice, **named: Any) -> list[Tensor]:
        out = of(input_ids=ids[rows], attention_mask=mask[rows], **named).logits
        return [row[own.bool()] for row, own in zip(out, mask[rows], strict=True)]

    for seed in range(50):
        base = mixture.build(seed)
        adapters = {
            "all": Adapter(mixture, PEFT, 3, 5.0, tuple(parts_of(base, 3, 1, True))),
            "experts": Adapter(mixture, PEFT, 4, 6.0, tuple(parts_of(base, 4, 2, False))),
        }
        assert adapters["experts"].parts, "it has no experts of the interface"
        alone = {None: base, **{key: merge(base, adapter) for key, adapter in adapters.items()}}
        with Margins() as margins:
            want = [logits(alone[key], slice(i, i + 1))[0] for i, key in enumerate(NAMES)]
        if margins.smallest > 1e-4:
            break
    else:
        raise AssertionError("routing near a tie with each seed")
    paths = {key: str(write(adapter, base, tmp_path / key)) for key, adapter in adapters.items()}
    base.set_experts_implementation("grouped_mm")
    model = MultiLoRAModel.from_pretrained(copy.deepcopy(base), paths)
    got = logits(model, slice(0, 4), adapter_names=NAMES)
    assert max(error(one, own) for one, own in zip(got, want, strict=True)) < TOLERANCE
    assert min(error(logits(base, slice(i, i + 1))[0], want[i]) for i in (0, 2, 3)) > FAR
