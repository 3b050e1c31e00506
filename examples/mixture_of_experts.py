"""Adapters of experts in one batch, whatever wrote their files, on a tiny mixture of experts with random weights.

    pip install -e '.[demo]'
    python examples/mixture_of_experts.py

Three adapters for one base: `fused` as PEFT writes it for the stacked experts of Transformers 5 (`target_parameters`),
`single` as adapters trained under Transformers 4 are (a pair of matrices for each expert, here only for two of them),
and `router`, which trains attention and the router. Each is checked against the adapter merged into the weights.
"""

import json
import tempfile
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from hf_multilora import MultiLoRAModel

HIDDEN, INNER, EXPERTS = 64, 32, 8


def make_base(folder: Path) -> str:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=256, hidden_size=HIDDEN, intermediate_size=96, moe_intermediate_size=INNER, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_experts=EXPERTS, num_experts_per_tok=2,
        max_position_embeddings=128, initializer_range=0.2,
    )  # fmt: skip
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    return str(folder)


def fused(base: str, folder: Path) -> str:
    """PEFT on the parameters that hold all experts."""
    model = Qwen3MoeForCausalLM.from_pretrained(base)
    config = LoraConfig(
        r=4, lora_alpha=8, target_modules=[], init_lora_weights=False,  # random, so that there is something to see
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    )  # fmt: skip
    get_peft_model(model, config).save_pretrained(str(folder))
    return str(folder)


def single(folder: Path) -> str:
    """The names of Transformers 4: expert 1 and 5 of each layer, gate and down, not up."""
    tensors = {}
    for layer in range(2):
        for expert in (1, 5):
            at = f"base_model.model.model.layers.{layer}.mlp.experts.{expert}"
            for name, inside, out in (("gate_proj", HIDDEN, INNER), ("down_proj", INNER, HIDDEN)):
                tensors[f"{at}.{name}.lora_A.weight"] = torch.randn(6, inside) * 0.3
                tensors[f"{at}.{name}.lora_B.weight"] = torch.randn(out, 6) * 0.3
    targets = r".*\.experts\.(1|5)\.(gate_proj|down_proj)"
    config = {"peft_type": "LORA", "r": 6, "lora_alpha": 6, "target_modules": targets, "task_type": "CAUSAL_LM"}
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return str(folder)


def router(base: str, folder: Path) -> str:
    model = Qwen3MoeForCausalLM.from_pretrained(base)
    config = LoraConfig(
        r=2, target_modules=["q_proj", "v_proj"], target_parameters=["mlp.gate.weight"], init_lora_weights=False
    )
    get_peft_model(model, config).save_pretrained(str(folder))
    return str(folder)


def main() -> None:
    console = Console()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        base = make_base(folder / "base")
        adapters = {
            "fused": fused(base, folder / "fused"),
            "single": single(folder / "single"),
            "router": router(base, folder / "router"),
        }
        model = MultiLoRAModel.from_pretrained(base, adapters)
        names = ["fused", None, "single", "router"]
        prompt = torch.randint(0, 256, (1, 8)).repeat(len(names), 1)  # the same in each row
        tokens = model.generate(input_ids=prompt, adapter_names=names, max_new_tokens=8, do_sample=False)
        table = Table("row's adapter", "rank", "bytes", "next tokens", "against merged weights")
        listed = {row["name"]: row for row in model.list_adapters()}
        for name, row in zip(names, tokens[:, prompt.shape[1] :], strict=True):
            report = model.verify(name) if name else None
            rank, size = (str(listed[name][key]) if name else "" for key in ("max_rank", "bytes"))
            table.add_row(name or "(base)", rank, size, str(row.tolist()), f"{report.difference:.0e}" if report else "")
        console.print(table)
        console.print(str(MultiLoRAModel.plan(model, max_loras=4)), highlight=False)


if __name__ == "__main__":
    main()
