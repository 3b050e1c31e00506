"""What of experts and routers cannot be served as it is: refused by name, with nothing dropped."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor

from hf_multilora.formats import AdapterError
from tests.experts import MIXTURES
from tests.experts_adapters import EACH, PACKED, PEFT, PEFT_18, describe, write
from tests.formats import tiny
from tests.formats import tiny_experts as moe

LAYER = "model.layers.0.mlp.experts"
KEY = f"base_model.model.{LAYER}"
Change = Callable[[tiny.Tensors], tiny.Tensors]


def made(folder: Path, layout: str, name: str = "olmoe", **config: Any) -> Any:
    """An adapter of rank 3 of the layout; its base."""
    model = MIXTURES[name].build(0)
    write(describe(MIXTURES[name], model, layout, r=3, seed=1, **({"attention": False} | config)), model, folder)
    return model


def without(*keys: str) -> Change:
    return lambda tensors: {k: t for k, t in tensors.items() if not any(part in k for part in keys)}


def renamed(old: str, new: str) -> Change:
    return lambda tensors: {k.replace(old, new): t for k, t in tensors.items()}


def added(**more: Tensor) -> Change:
    return lambda tensors: tensors | {f"{KEY}.{k}": t for k, t in more.items()}


def poisoned(tensor: Tensor) -> Tensor:
    tensor = tensor.clone()
    tensor[(-1,) * tensor.dim()] = float("nan")
    return tensor


NESTED_A, NESTED_B = f"{KEY}.lora_A.weight", f"{KEY}.lora_B.weight"  # of down_proj [20 -> 32]
FIRST_A, FIRST_B = f"{KEY}.0.gate_proj.lora_A.weight", f"{KEY}.0.gate_proj.lora_B.weight"
W2_A, W2_B = f"{KEY}.w2.lora_A.weight", f"{KEY}.w2.lora_B.weight"
# fault -> (layout, what is done to the file, what the error says)
FILES: dict[str, tuple[str, Change, str]] = {
    "nested, fewer experts": (
        PEFT,
        lambda t: {k: x[:12] if "lora_A" in k else x[:, :12] for k, x in t.items()},
        r"lora_A \[12, 32\] holds 4 experts of rank 3 \(r, rank_pattern\), but the base has 6 experts.*another base",
    ),
    "nested, another rank": (
        PEFT,
        lambda t: {k: x[:14] if "lora_A" in k else x[:, :14] for k, x in t.items()},
        r"the config resolves to rank 3",
    ),
    "nested, two ranks": (PEFT, tiny.changed(NESTED_A, lambda a: a[:12]), r"must have one rank|one layout|r\*E"),
    "nested, another width": (
        PEFT,
        tiny.changed(NESTED_A, lambda a: a[:, :8]),
        r"experts:down_proj: lora_A must have shape \[r\*E, 20\] on this base, got shape \[18, 8\]",
    ),
    "nested, without the outer": (
        PEFT,
        without(f"{LAYER}.lora_"),
        r"target_parameters names gate_up_proj, down_proj of it, so the file must hold 2 pairs .*base_layer",
    ),
    "nested, without the inner": (PEFT, without(f"{LAYER}.base_layer"), r"must hold 2 pairs .*but it holds"),
    "nested, without B": (
        PEFT,
        without(f"{LAYER}.lora_B"),
        rf"a parameter of module {LAYER} must have lora_A and lora_B, but has lora_A .* without lora_B",
    ),
    "nested, NaN": (PEFT, tiny.changed(NESTED_B, poisoned), rf"{LAYER}:down_proj: weights must be finite, got NaN"),
    "nested, empty": (PEFT, tiny.changed(NESTED_A, lambda a: a.new_empty(0)), r"lora_A .* empty shape \[0\].*ZeRO-3"),
    "nested, both ways": (
        PEFT,
        lambda t: t | {NESTED_A: t[NESTED_B].T.contiguous(), NESTED_B: t[NESTED_A].T.contiguous()},
        r"all factors of experts must be in one layout",
    ),
    "embedding": (
        PEFT,
        lambda t: {
            k.replace("lora_A.weight", "lora_embedding_A").replace("lora_B.weight", "lora_embedding_B"): x
            for k, x in t.items()
        },
        "experts take lora_A and lora_B, but the file holds lora_embedding",
    ),
    "too high an index": (
        EACH,
        renamed("experts.5.", "experts.7."),
        r"factors of expert 7, but the base has 6 experts \(0 to 5\): the adapter belongs to another base",
    ),
    "the first experts only": (
        EACH,
        without("experts.4.", "experts.5."),
        r"factors of 4 experts \(0 to 3\), but the base has 6, and target_modules of its config names",
    ),
    "single, without A": (
        EACH,
        without("experts.2.up_proj.lora_A"),
        rf"up_proj of expert 2 of module {LAYER} must have lora_A and lora_B, but has lora_B .* without lora_A",
    ),
    "single, NaN": (EACH, tiny.changed(FIRST_A, poisoned), rf"{LAYER}:gate_proj: weights must be finite.*{FIRST_A}"),
    "single, a width": (
        EACH,
        tiny.changed(FIRST_B, lambda b: b[:8]),
        r"lora_B must have shape \[20, r\] on this base, got shape \[8, 3\].*experts\.0\.gate_proj",
    ),
    "single, a rank": (
        EACH,
        lambda t: t | {FIRST_A: t[FIRST_A][:2], FIRST_B: t[FIRST_B][:, :2]},
        r"the config resolves to rank 3 .*tensors have rank 2",
    ),
    "single, empty": (EACH, tiny.changed(FIRST_A, lambda a: a.new_empty(0)), r"empty shape \[0\]"),
    "single, a stranger": (
        EACH,
        renamed("gate_proj", "side_proj"),
        r"holds factors of side_proj, but these experts have gate_up_proj, down_proj, gate_proj, up_proj",
    ),
    "two layouts": (
        EACH,
        added(**{"down_proj.lora_A.weight": torch.ones(6, 3, 20), "down_proj.lora_B.weight": torch.ones(6, 32, 3)}),
        rf"two keys land on down_proj of module {LAYER}: .*keep one",
    ),
    "a half and the whole": (
        EACH,
        added(
            **{"gate_up_proj.lora_A.weight": torch.ones(6, 3, 32), "gate_up_proj.lora_B.weight": torch.ones(6, 40, 3)}
        ),
        rf"two keys land on gate_up_proj of module {LAYER}",
    ),
    "two names": (
        EACH,
        added(**{"1.w2.lora_A.weight": torch.ones(3, 20), "1.w2.lora_B.weight": torch.ones(32, 3)}),
        rf"two keys land on down_proj of module {LAYER}",
    ),
    "packed, another count": (
        PACKED,
        lambda t: t | {W2_A: t[W2_A][:4], W2_B: t[W2_B][:4]},
        r"factors of 4 experts \(or 1 for all\), the base has 6: the adapter belongs to another base",
    ),
    "packed, empty": (PACKED, tiny.changed(W2_A, lambda a: a.new_empty(0)), r"empty shape \[0\]"),
    "packed, both empty": (
        PACKED,
        lambda t: t | {W2_A: torch.empty(0), W2_B: torch.empty(0)},
        r"lora_A must have shape .*empty shape \[0\]",
    ),
    "packed, inside a layer": (PACKED, renamed(".w2.lora", ".w2.base_layer.lora"), "base_layer stands behind"),
    "packed, integers": (PACKED, tiny.changed(W2_B, lambda b: b.to(torch.int8)), "must be float32.*int8"),
    "packed, NaN": (PACKED, tiny.changed(W2_B, poisoned), "must be finite, got NaN"),
    "dora": (PEFT, added(lora_magnitude_vector=torch.ones(3)), "DoRA"),
    "a whole expert": (
        EACH,
        added(**{"0.gate_proj.weight": torch.ones(20, 32)}),
        r"experts\.0\.gate_proj\.weight; weights of the experts themselves .*is not supported",
    ),
    "saved experts": (
        PEFT,
        added(gate_up_proj=torch.ones(6, 40, 32)),
        r"gate_up_proj of shape \[6, 40, 32\], and whether it was trained cannot be told",
    ),
}


@pytest.mark.parametrize("fault", FILES)
def test_refused_by_what_the_file_holds(fault: str, tmp_path: Path) -> None:
    layout, change, message = FILES[fault]
    model = made(tmp_path, layout)
    moe.read(tmp_path, model)  # without the fault it loads
    tiny.edit_weights(tmp_path, change)
    with pytest.raises(AdapterError, match=message):
        moe.read(tmp_path, model)


def test_experts_that_target_modules_leaves_out_may_lack(tmp_path: Path) -> None:
    model = made(tmp_path, EACH, experts=(0, 1, 2))
    with pytest.raises(AdapterError, match=r"factors of 3 experts \(0 to 2\), but the base has 6"):
        moe.read(tmp_path, model)
    for targets in (
        r".*experts\.[0-2]\..*_proj",
        [f"experts.{e}.{p}_proj" for e in range(3) for p in ("gate", "up", "down")],
    ):
        tiny.edit_config(tmp_path, target_modules=targets)
        assert moe.read(tmp_path, model).factors[f"{LAYER}:down_proj"].parts == (3, 3, 3, 0, 0, 0)
    tiny.edit_config(
        tmp_path, target_modules=["gate_proj", "up_proj", "down_proj"], exclude_modules=r".*experts\.[345]\..*"
    )
    moe.read(tmp_path, model)
    tiny.edit_config(tmp_path, target_modules="all-linear", exclude_modules=None)
    with pytest.raises(AdapterError, match=r"names .* of them all"):
        moe.read(tmp_path, model)


def test_square_factors_of_an_unknown_peft(tmp_path: Path) -> None:
    model = made(tmp_path, PEFT_18, "qwen3_moe", projections=("gate_proj",))
    moe.read(tmp_path, model)
    for unknown in (None, "0.19.1.dev0", "main"):
        tiny.edit_config(tmp_path, peft_version=unknown)
        with pytest.raises(AdapterError, match=r'since both sizes are equal.*add "peft_version" to it'):
            moe.read(tmp_path, model)


def test_limits_of_a_deployment(tmp_path: Path) -> None:
    model = made(tmp_path / "each", EACH)
    made(tmp_path / "peft", PEFT)
    for layout in ("each", "peft"):
        assert moe.read(tmp_path / layout, model, max_rank=3).max_rank == 3  # of one expert, not of all
        with pytest.raises(AdapterError, match=r"rank must be at most 2 \(max_lora_rank\), got 3"):
            moe.read(tmp_path / layout, model, max_rank=2)
        allowed: Any
        for allowed in (["experts"], [f"{e}_proj" for e in ("gate_up", "down")], r".*\.experts\..*"):
            moe.read(tmp_path / layout, model, target_modules=allowed)
        for allowed in (["down_proj"], ["q_proj"], r".*\.down_proj"):
            with pytest.raises(AdapterError, match=r"target_modules=.* does not allow it here"):
                moe.read(tmp_path / layout, model, target_modules=allowed)
    moe.read(tmp_path / "each", model, target_modules=["gate_proj", "up_proj", "down_proj"])  # the file's own names


def test_gate_and_up_as_one_have_the_rank_of_both(tmp_path: Path) -> None:
    model = made(tmp_path, PACKED, "gpt_oss", projections=("down_proj",))
    width = moe.census(model)[LAYER].experts.projections["down_proj"].in_features
    at = f"{KEY}.w"
    for name in ("1", "3"):
        pair = {f"{at}{name}.lora_A.weight": torch.ones(6, 3, 32), f"{at}{name}.lora_B.weight": torch.ones(6, width, 3)}
        tiny.edit_weights(tmp_path, lambda t, pair=pair: t | pair)
    assert moe.read(tmp_path, model, max_rank=6).max_rank == 6
    with pytest.raises(
        AdapterError, match=r"rank must be at most 5 \(max_lora_rank\), got 6 for gate and up, which are"
    ):
        moe.read(tmp_path, model, max_rank=5)
    tiny.edit_weights(tmp_path, lambda t: t | {f"{at}1.lora_B.weight": torch.ones(6, 9, 3)})
    with pytest.raises(AdapterError, match=rf"gate_proj: lora_B must have shape \[6 or 1, {width}, r\]"):
        moe.read(tmp_path, model)


def test_experts_that_nobody_can_follow(tmp_path: Path) -> None:
    settings = {"d_model": 32, "n_heads": 4, "n_layers": 1, "max_seq_len": 64, "vocab_size": 48}
    ffn = {"ffn_hidden_size": 20, "moe_num_experts": 6, "moe_top_k": 2}
    attention = {"kv_n_heads": 2, "rope_theta": 10000.0}
    model = tf.DbrxForCausalLM(tf.DbrxConfig(**settings, ffn_config=ffn, attn_config=attention))
    for layout in (PEFT, EACH, PACKED):
        made(tmp_path / layout, layout)
        tiny.rename_keys(
            tmp_path / layout,
            lambda key: key.replace("model.layers.0.mlp.experts", "transformer.blocks.0.ffn.experts.mlp"),
        )
        tiny.edit_weights(tmp_path / layout, lambda t: {k: x for k, x in t.items() if "layers.1" not in k})
        with pytest.raises(AdapterError, match=r"ffn\.experts\.mlp: no adapter may target these experts here: PEFT"):
            moe.read(tmp_path / layout, model)


def test_a_base_without_experts(tmp_path: Path) -> None:
    for layout in (PEFT, EACH, PACKED):
        made(tmp_path / layout, layout)
        with pytest.raises(AdapterError, match=r"not found in the base: no module model\.layers\.0\.mlp\.experts"):
            tiny.read(tmp_path / layout, tiny.llama())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("target", "kind"), [("mlp.experts", "experts"), ("mlp.gate", "router"), ("layers.0.mlp", "")])
def test_modules_saved_in_full(target: str, kind: str, tmp_path: Path) -> None:
    tiny.save(moe.base("olmoe"), tmp_path, touch=tiny.touch_saved, modules_to_save=[target], target_modules=["q_proj"])
    with pytest.raises(AdapterError, match=rf"{kind} cannot be saved in full here \(modules_to_save\)"):
        moe.read(tmp_path, moe.base("olmoe"))


@pytest.mark.parametrize("given", ["embed_tokens.weight", "lm_head.weight"])
def test_other_parameters(given: str, tmp_path: Path) -> None:
    moe.save(moe.base("olmoe"), tmp_path, target_parameters=[given])
    if given == "lm_head.weight":
        assert set(moe.read(tmp_path, moe.base("olmoe")).factors) == {"lm_head"}
        return
    with pytest.raises(AdapterError, match=r"target_parameters trains model\.embed_tokens\.weight, and only"):
        moe.read(tmp_path, moe.base("olmoe"))


def test_target_parameters_are_names(tmp_path: Path) -> None:
    model = made(tmp_path, PEFT)
    tiny.edit_config(tmp_path, target_parameters={"experts": 1})
    with pytest.raises(AdapterError, match="target_parameters must be a string or a list of names"):
        moe.read(tmp_path, model)
