"""Tiny mixture-of-experts models whose routing is far from ties: the material of the tests of experts.

A row of MIXTURES says how to build one architecture and what its parts are called, here and in Transformers 4.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.overrides import TorchFunctionMode

VOCAB, PAD = 48, 0
MARGIN = 1e-3  # of the k-th router score over the next one, for every token of the tests' rows
BLOCK = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": PAD, "bos_token_id": 1,
    "eos_token_id": None, "tie_word_embeddings": False,
}  # fmt: skip
HEADED = {**BLOCK, "head_dim": 8}
MOE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
LATENT = {
    "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8,
    "num_key_value_heads": 4,
}  # fmt: skip
SIGMOID = {
    "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "n_group": 2, "topk_group": 1,
    "n_shared_experts": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 1.5,
}  # fmt: skip
PROJ = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Mixture:
    """One architecture.

    stem: path of the layers; experts, router, attention, others: paths inside a layer, of the experts, of what scores
    them, and of linears beside them. old: what Transformers 4 called the experts, and their linears: gate, up, down
    (none: it held 3-D tensors already); renames: other parts of paths that it called otherwise, here -> there.
    """

    model: str
    settings: Mapping[str, Any]
    stem: str = "model.layers"
    experts: str = "mlp.experts"
    router: str = "mlp.gate"
    attention: tuple[str, ...] = ("self_attn.q_proj", "self_attn.o_proj")
    others: tuple[str, ...] = ()
    old: tuple[str, ...] = ()
    renames: Mapping[str, str] = field(default_factory=dict)
    sharp: float = 0.2  # std of the router's weights
    generates: bool = True

    @property
    def missing(self) -> bool:
        """Whether the installed Transformers has no such model."""
        return not hasattr(transformers, self.model)

    def build(self, seed: int) -> Any:
        """The model in fp32, with weights so large that what each expert does shows in the logits."""
        torch.manual_seed(seed)
        model_class = getattr(transformers, self.model)
        model = model_class(model_class.config_class(**self.settings)).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                made = torch.Generator().manual_seed(zlib.crc32(name.encode()) + seed)
                if parameter.dim() > 1 and "A_log" not in name:
                    std = self.sharp if self.router in name else 0.5 if "embed" in name else 0.2
                    parameter.normal_(std=std, generator=made)
                elif name.endswith(("bias", "sinks")) and "dt" not in name:
                    parameter.normal_(std=0.1, generator=made)
        model.set_experts_implementation("eager")
        return model

    def paths(self, model: Any, *inside: str) -> list[str]:
        """The modules of these paths inside a layer, in every layer that has them."""
        known = {name for name, _ in model.named_modules()}
        layers = len(model.get_submodule(self.stem))
        found = [f"{self.stem}.{i}.{path}" for i in range(layers) for path in inside]
        return [path for path in found if path in known]

    def old_path(self, path: str) -> str:
        """What Transformers 4 called a module."""
        for here, there in self.renames.items():
            path = path.replace(here, there)
        return path


def causal(stem: str, settings: Mapping[str, Any], **more: Any) -> Mixture:
    return Mixture(f"{stem}ForCausalLM", settings, **more)


SHARED = tuple(f"mlp.shared_experts.{name}" for name in PROJ)
OLD: Mapping[str, Any] = {"old": PROJ}
# fmt: off
MIXTURES: Mapping[str, Mixture] = {
    "mixtral": causal("Mixtral", {**BLOCK, "num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 20},
        old=("w1", "w3", "w2"), renames={".mlp.": ".block_sparse_moe."}),
    # gate_up_proj has as many columns as rows: shapes alone do not tell how its factors lie
    "qwen3_moe": causal("Qwen3Moe", {**HEADED, **MOE, "moe_intermediate_size": 16}, **OLD),
    "qwen2_moe": causal("Qwen2Moe", {**BLOCK, **MOE, "shared_expert_intermediate_size": 24}, **OLD,
        others=(*(f"mlp.shared_expert.{name}" for name in PROJ), "mlp.shared_expert_gate")),
    "olmoe": causal("Olmoe", {**BLOCK, **MOE, "intermediate_size": 20}, **OLD),
    # the first layer is dense
    "deepseek_v3": causal("DeepseekV3", {**BLOCK, **SIGMOID, **LATENT}, **OLD, others=(*SHARED, "mlp.down_proj"),
        attention=("self_attn.q_a_proj", "self_attn.o_proj")),
    "glm4_moe": causal("Glm4Moe", {**HEADED, **SIGMOID}, **OLD, others=(*SHARED, "mlp.gate_proj")),
    "granitemoe": causal("GraniteMoe", {**BLOCK, "num_local_experts": 5, "num_experts_per_tok": 2,
        "intermediate_size": 20}, experts="block_sparse_moe.experts", router="block_sparse_moe.router"),
    # [in, out], gate and up by turns, biases
    "gpt_oss": causal("GptOss", {**HEADED, "num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 24},
        router="mlp.router"),
    "jamba": causal("Jamba", {**BLOCK, "num_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 20,
        "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1,
        "mamba_d_state": 4, "mamba_dt_rank": 2}, **OLD,
        experts="feed_forward.experts", router="feed_forward.router", others=("feed_forward.up_proj",)),
    "gemma4": Mixture("Gemma4ForCausalLM", {**HEADED, "enable_moe_block": True, "num_experts": 6,
        "top_k_experts": 2, "moe_intermediate_size": 20, "hidden_size_per_layer_input": 0, "global_head_dim": 8,
        "layer_types": ["sliding_attention", "full_attention"]},
        experts="experts", router="router.proj", sharp=1.5, others=tuple(f"mlp.{name}" for name in PROJ)),
    # up and down only: nothing is gated
    "nemotron_h": causal("NemotronH", {**HEADED, "layers_block_type": ["attention", "moe"], "n_routed_experts": 6,
        "num_experts_per_tok": 2, "moe_intermediate_size": 20, "moe_shared_expert_intermediate_size": 24,
        "n_group": 2, "topk_group": 1, "mamba_num_heads": 4, "mamba_head_dim": 8, "ssm_state_size": 4, "n_groups": 1,
        "chunk_size": 4}, experts="mixer.experts", router="mixer.gate", old=("", "up_proj", "down_proj"),
        renames={"model.": "backbone."}, attention=("mixer.q_proj", "mixer.o_proj"),
        others=("mixer.shared_experts.up_proj", "mixer.shared_experts.down_proj")),
    # a norm after each expert
    "muse_spark": Mixture("MuseSparkForConditionalGeneration", {
        "text_config": {**HEADED, "num_local_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20,
            "moe_hidden_size": 24, "mlp_layer_types": ["dense", "sparse"], "sliding_window": 16},
        "vision_config": {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
            "num_attention_heads": 2, "patch_size": 4},
        "audio_config": {"patch_sizes": [2, 2], "hidden_sizes": [8, 8], "depths": [1, 1], "num_hidden_layers": 2,
            "conv_kernel_size": 3, "out_hidden_size": 32},
        "out_hidden_size": 16, "projector_hidden_size": 16, "image_token_id": VOCAB - 1, "video_token_id": VOCAB - 2,
        "audio_token_id": VOCAB - 3, "tie_word_embeddings": False},
        stem="model.language_model.layers", sharp=0.8, others=("mlp.pre_expert_proj", "mlp.up_proj")),
    # [in, out], the halves one after the other
    "aria": Mixture("AriaTextForCausalLM", {**BLOCK, "moe_num_experts": 6, "moe_topk": 2,
        "moe_num_shared_experts": 1, "intermediate_size": 20}, router="mlp.router", others=SHARED),
    "privacy_filter": Mixture("OpenAIPrivacyFilterForTokenClassification", {**HEADED,
        "num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 20, "num_labels": 9,
        "sliding_window": 16, "max_position_embeddings": 131072}, router="mlp.router", generates=False),
}
# fmt: on


class Margins(TorchFunctionMode):
    """Inside the block, the smallest distance of a k-th score from the next one, over all calls of topk."""

    def __init__(self) -> None:
        super().__init__()
        self.smallest = math.inf

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.topk, Tensor.topk):
            scores, k = args[0], kwargs["k"] if "k" in kwargs else args[1]
            if k < scores.shape[-1]:
                top = scores.detach().float().topk(k + 1).values
                self.smallest = min(self.smallest, float((top[..., k - 1] - top[..., k]).min()))
        return func(*args, **kwargs)


def undecided(name: str) -> Mixture:
    """The architecture with every token at all of 4 experts: nothing that rounding could decide otherwise."""
    count = next(key for key in ("num_experts", "num_local_experts") if key in MIXTURES[name].settings)
    settings = {**MIXTURES[name].settings, count: 4, "num_experts_per_tok": 4}
    return replace(MIXTURES[name], settings=settings)


def single(name: str) -> Mixture:
    """The architecture with one layer, for what takes its time."""
    return replace(MIXTURES[name], settings={**MIXTURES[name].settings, "num_hidden_layers": 1})
