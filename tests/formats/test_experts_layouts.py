"""Experts in layouts other than PEFT's own of today: the sites read add what each layout means."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers.conversion_mapping import _build_checkpoint_conversion_mapping
from transformers.core_model_loading import WeightConverter

from hf_multilora.formats import Adapter, split_site
from hf_multilora.formats.experts_keys import PROJECTIONS
from tests.formats import tiny
from tests.formats import tiny_experts as moe

LAYER = "model.layers.0.mlp.experts"
H, INNER, E, R = 32, 20, 6, 3
SIZES = {"gate_proj": (H, INNER), "up_proj": (H, INNER), "down_proj": (INNER, H), "gate_up_proj": (H, 2 * INNER)}
Factors = dict[str, tuple[Tensor, Tensor]]  # projection -> A [E, r, in], B [E, out, r]


def factors(*projections: str, r: int = R, seed: int = 0) -> Factors:
    made = torch.Generator().manual_seed(seed)
    return {
        name: (
            torch.randn(E, r, SIZES[name][0], generator=made).double(),
            torch.randn(E, SIZES[name][1], r, generator=made).double(),
        )
        for name in projections
    }


def put(folder: Path, tensors: Mapping[str, Tensor], **config: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    settings = {"peft_type": "LORA", "r": R, "lora_alpha": 6, "target_modules": "all-linear"} | config
    (folder / tiny.CONFIG).write_text(json.dumps(settings))
    save_file({f"base_model.model.{k}": t.contiguous() for k, t in tensors.items()}, folder / tiny.WEIGHTS)
    return folder


def old_keys(made: Factors, names: Sequence[str] = (), experts: Sequence[int] = range(E), at: str = LAYER) -> Any:
    """Transformers 4's: one module per expert and projection."""
    found = {}
    for (a, b), name in zip(made.values(), names or made, strict=True):
        for e in experts:
            found[f"{at}.{e}.{name}.lora_A.weight"], found[f"{at}.{e}.{name}.lora_B.weight"] = a[e], b[e]
    return found


def expected(made: Factors, scaling: float = 2.0, scales: Mapping[int, float] | None = None) -> Tensor:
    """What gate and up, or down, get: [E, out, in]."""
    deltas = {name: scaling * (b @ a) for name, (a, b) in made.items()}
    for e, scale in (scales or {}).items():
        for delta in deltas.values():
            delta[e] *= scale / scaling
    if "down_proj" in deltas or "gate_up_proj" in deltas:
        (delta,) = deltas.values()
        return delta
    zero = torch.zeros(E, INNER, H, dtype=torch.float64)
    return torch.cat([deltas.get("gate_proj", zero), deltas.get("up_proj", zero)], 1)


def read(folder: Path, model: str = "qwen3_moe", **settings: Any) -> tuple[Adapter, moe.Deltas]:
    base = moe.base(model, **({"moe_intermediate_size": INNER} if model == "qwen3_moe" else {}))
    adapter = moe.read(folder, base, **settings)
    return adapter, moe.deltas(adapter, moe.census(base))


def roles(adapter: Adapter) -> set[str]:
    return {split_site(site)[1] for site in adapter.factors}


# -- Transformers 4 -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("rslora", [False, True])
def test_one_module_per_expert(rslora: bool, tmp_path: Path) -> None:
    halves, down = factors("gate_proj", "up_proj"), factors("down_proj", seed=1)
    adapter, got = read(put(tmp_path, old_keys(halves) | old_keys(down), use_rslora=rslora))
    scaling = 6 / 3**0.5 if rslora else 2.0
    want = {f"{LAYER}.gate_up_proj": expected(halves, scaling), f"{LAYER}.down_proj": expected(down, scaling)}
    moe.assert_same(got, want)
    assert roles(adapter) == {"gate_proj", "up_proj", "down_proj"}
    assert {pair.parts for pair in adapter.factors.values()} == {(R,) * E}  # no rank doubled
    with pytest.raises(AssertionError, match="gate_up_proj differs"):  # gate and up in each other's place
        moe.assert_same(got, want | {f"{LAYER}.gate_up_proj": expected(halves, scaling).roll(INNER, 1)})


def test_mixtrals_old_names(tmp_path: Path) -> None:
    made, router = factors("gate_proj", "up_proj"), {"lora_A": torch.ones(R, H), "lora_B": torch.ones(E, R)}
    at = "model.layers.0.block_sparse_moe"
    keys = old_keys(made, ("w1", "w3"), at=f"{at}.experts")
    keys |= {f"{at}.gate.{half}.weight": tensor.double() for half, tensor in router.items()}
    _, got = read(put(tmp_path, keys), "mixtral")
    want = {f"{LAYER}.gate_up_proj": expected(made), "model.layers.0.mlp.gate.weight": torch.full((E, H), 2.0 * R)}
    moe.assert_same(got, want)


def test_ungated_experts(tmp_path: Path) -> None:
    made = factors("up_proj")
    at = "backbone.layers.1.mixer.experts"
    adapter, got = read(put(tmp_path, old_keys(made, at=at)), "nemotron_h")
    delta = 2.0 * (made["up_proj"][1] @ made["up_proj"][0])
    moe.assert_same(got, {"model.layers.1.mixer.experts.up_proj": delta})
    assert roles(adapter) == {"up_proj"}


def test_dense_layers_and_shared_experts_beside(tmp_path: Path) -> None:
    made = factors("down_proj")
    keys = old_keys(made, at="model.layers.1.mlp.experts")
    plain = {"model.layers.0.mlp.down_proj": (40, H), "model.layers.1.mlp.shared_experts.gate_proj": (H, INNER)}
    for module, (width, out) in plain.items():
        keys |= {f"{module}.lora_A.weight": torch.ones(R, width), f"{module}.lora_B.weight": torch.ones(out, R)}
    adapter, got = read(put(tmp_path, keys), "deepseek_v3")
    assert set(adapter.factors) == {*plain, "model.layers.1.mlp.experts:down_proj"}
    want = {f"{module}.weight": torch.full((out, width), 2.0 * R) for module, (width, out) in plain.items()}
    moe.assert_same(got, want | {"model.layers.1.mlp.experts.down_proj": expected(made)})


def test_a_half_alone_costs_its_own_bytes(tmp_path: Path) -> None:
    made = factors("up_proj")
    adapter, got = read(put(tmp_path, old_keys(made, ("w3",)), r=R))
    moe.assert_same(got, {f"{LAYER}.gate_up_proj": expected(made)})
    assert adapter.nbytes == sum(a.nbytes + b.nbytes for a, b in made.values())


def test_some_experts_of_several_ranks_and_scales(tmp_path: Path) -> None:
    one, two = factors("down_proj"), factors("down_proj", r=5, seed=1)
    keys = old_keys(one, experts=(0, 4)) | old_keys(two, experts=(2,))
    patterns = {
        "rank_pattern": {"experts.2.down_proj": 5},
        "alpha_pattern": {r"experts\.2\.down_proj": 15, "4.down_proj": 9},
    }
    adapter, got = read(put(tmp_path, keys, target_modules=[f"experts.{e}.down_proj" for e in (0, 2, 4)], **patterns))
    pair = adapter.factors[f"{LAYER}:down_proj"]
    assert pair.parts == (3, 0, 5, 0, 3, 0) and pair.r == 11 and adapter.max_rank == 5
    assert pair.scaling == 3.0  # that of two of the three; the other's is in its B
    want = torch.zeros(E, H, INNER, dtype=torch.float64)
    for e, made, scale in ((0, one, 2.0), (2, two, 3.0), (4, one, 3.0)):
        a, b = made["down_proj"]
        want[e] = scale * (b[e] @ a[e])
    moe.assert_same(got, {f"{LAYER}.down_proj": want})


def test_a_scale_is_folded_into_b_in_float32_at_least(tmp_path: Path) -> None:
    keys = {k: t.to(torch.bfloat16) for k, t in old_keys(factors("down_proj")).items()}
    adapter, _ = read(put(tmp_path, keys))
    assert adapter.factors[f"{LAYER}:down_proj"].b.dtype == torch.bfloat16
    adapter, _ = read(put(tmp_path, keys, alpha_pattern={"experts.1.down_proj": 7}))
    pair = adapter.factors[f"{LAYER}:down_proj"]
    assert pair.b.dtype == torch.float32 and pair.a.dtype == torch.bfloat16


# -- packed ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("names", [("gate_proj", "up_proj"), ("w1", "w3")])
def test_packed_tensors(names: tuple[str, str], tmp_path: Path) -> None:
    halves, down = factors("gate_proj", "up_proj"), factors("down_proj", seed=1)
    keys = {}
    for (a, b), name in zip([*halves.values(), *down.values()], (*names, "w2"), strict=True):
        keys |= {f"{LAYER}.{name}.lora_A.weight": a, f"{LAYER}.{name}.lora_B.weight": b}
    adapter, got = read(put(tmp_path, keys))
    moe.assert_same(got, {f"{LAYER}.gate_up_proj": expected(halves), f"{LAYER}.down_proj": expected(down)})
    assert roles(adapter) == {"gate_proj", "up_proj", "down_proj"}


def test_packed_gate_up(tmp_path: Path) -> None:
    made = factors("gate_up_proj")
    a, b = made["gate_up_proj"]
    _, got = read(put(tmp_path, {f"{LAYER}.gate_up_proj.lora_A.weight": a, f"{LAYER}.gate_up_proj.lora_B.weight": b}))
    moe.assert_same(got, {f"{LAYER}.gate_up_proj": expected(made)})


@pytest.mark.parametrize("layout", ["packed", "shared", "single", "up only"])
def test_gate_and_up_of_columns_that_alternate(layout: str, tmp_path: Path) -> None:
    made = factors("gate_proj", "up_proj")
    if layout == "up only":
        del made["gate_proj"]
    if layout == "shared":
        made = {name: (a[:1].expand(E, -1, -1), b) for name, (a, b) in made.items()}
    names = ["w1", "w3"][-len(made) :]
    keys = old_keys(made, names)
    if layout != "single":
        keys = {}
        for (a, b), name in zip(made.values(), names, strict=True):
            once = a[:1] if layout == "shared" else a
            keys |= {f"{LAYER}.{name}.lora_A.weight": once, f"{LAYER}.{name}.lora_B.weight": b}
    base = moe.base("gpt_oss", intermediate_size=INNER)
    adapter = moe.read(put(tmp_path, keys), base)
    want = torch.zeros(E, H, 2 * INNER, dtype=torch.float64)
    for (a, b), first in zip(made.values(), (0, 1)[-len(made) :], strict=True):
        want[:, :, first::2] = 2.0 * (b @ a).transpose(1, 2)
    moe.assert_same(moe.deltas(adapter, moe.census(base)), {f"{LAYER}.gate_up_proj": want})
    ends = (".a1", ".b") if layout == "shared" else ("",)
    assert roles(adapter) == {f"gate_up_proj{end}" for end in ends}
    assert adapter.max_rank == R * len(made)


def test_empty_placeholders_of_ungated_experts(tmp_path: Path) -> None:
    made = factors("up_proj")
    a, b = made["up_proj"]
    at = "model.layers.1.mixer.experts"
    keys = {f"{at}.w1.lora_A.weight": a, f"{at}.w1.lora_B.weight": b}
    keys |= {f"{at}.w3.lora_{half}.weight": torch.empty(0) for half in "AB"}
    _, got = read(put(tmp_path, keys), "nemotron_h")
    moe.assert_same(got, {f"{at}.up_proj": 2.0 * (b @ a)})


# -- shared by all experts ------------------------------------------------------------------------------------
@pytest.mark.parametrize("layout", ["packed", "packed, repeated", "single", "nested"])
@pytest.mark.parametrize("half", ["A", "B", "AB"])
def test_what_all_experts_share_is_there_once(layout: str, half: str, tmp_path: Path) -> None:
    (a, b) = factors("down_proj")["down_proj"]
    a = a[:1].expand(E, -1, -1).contiguous() if "A" in half else a
    b = b[:1].expand(E, -1, -1).contiguous() if "B" in half else b
    if layout == "single":
        keys = old_keys({"down_proj": (a, b)})
    elif layout == "nested":
        keys = {f"{LAYER}.lora_A.weight": a.flatten(0, 1), f"{LAYER}.lora_B.weight": b.permute(1, 2, 0).flatten(1)}
    else:
        once = layout == "packed"
        keys = {f"{LAYER}.w2.lora_A.weight": a[:1] if once and "A" in half else a}
        keys |= {f"{LAYER}.w2.lora_B.weight": b[:1] if once and "B" in half else b}
    adapter, got = read(put(tmp_path, keys))
    moe.assert_same(got, {f"{LAYER}.down_proj": expected({"down_proj": (a, b)})})
    ends = {".a1" if "A" in half else ".a", ".b1" if "B" in half else ".b"}
    assert roles(adapter) == {f"down_proj{end}" for end in ends}
    own = (a.nbytes // E if "A" in half else a.nbytes) + (b.nbytes // E if "B" in half else b.nbytes)
    assert adapter.nbytes == own


# -- PEFT up to 0.18 ------------------------------------------------------------------------------------------
def swapped(made: Factors) -> dict[str, Tensor]:
    """A [(E, r), out], B [in, (r, E)]."""
    keys = {}
    for depth, (a, b) in enumerate(reversed(made.values())):
        name = LAYER + ".base_layer" * depth
        keys[f"{name}.lora_A.weight"] = b.transpose(1, 2).flatten(0, 1)
        keys[f"{name}.lora_B.weight"] = a.permute(2, 1, 0).flatten(1)
    return keys


@pytest.mark.parametrize("version", ["0.17.1", None, "0.21.0"])
def test_roles_swapped_told_by_shape(version: str | None, tmp_path: Path) -> None:
    made = factors("gate_up_proj") | factors("down_proj", seed=1)
    _, got = read(put(tmp_path, swapped(made), peft_version=version))
    want = {f"{LAYER}.{name}": expected({name: pair}) for name, pair in made.items()}
    moe.assert_same(got, want)


@pytest.mark.parametrize(("version", "old"), [("0.18.2", True), ("0.19.0", True), ("0.19.1", False), ("0.21.3", False)])
def test_square_factors_told_by_version(version: str, old: bool, tmp_path: Path) -> None:
    made = torch.Generator().manual_seed(0)
    a = torch.randn(E, R, H, generator=made).double()
    b = torch.randn(E, H, R, generator=made).double()  # gate_up of 2 * 16 columns
    plain = {f"{LAYER}.lora_A.weight": a.flatten(0, 1), f"{LAYER}.lora_B.weight": b.permute(1, 2, 0).flatten(1)}
    keys = swapped({"gate_up_proj": (a, b)}) if old else plain
    put(tmp_path, keys, peft_version=version, target_parameters=["experts.gate_up_proj"])
    base = moe.base("qwen3_moe", moe_intermediate_size=H // 2)
    got = moe.deltas(moe.read(tmp_path, base), moe.census(base))
    moe.assert_same(got, {f"{LAYER}.gate_up_proj": 2.0 * (b @ a)})
    other = "0.19.1" if old else "0.18.0"  # with the other version it is another adapter
    tiny.edit_config(tmp_path, peft_version=other)
    assert not torch.allclose(
        moe.deltas(moe.read(tmp_path, base), moe.census(base))[f"{LAYER}.gate_up_proj"], 2.0 * (b @ a)
    )


# what each PEFT wrote was checked with that PEFT
@pytest.mark.parametrize(
    ("name", "version", "old"),
    [
        ("gpt_oss", "0.18.1", False),
        ("gpt_oss", "0.19.0", True),
        ("gpt_oss", "0.19.1", False),
        ("gpt_oss", None, False),
        ("llama4", "0.18.1", False),
        ("llama4", "0.19.0", False),
        ("llama4", "0.19.1", True),
    ],
)
def test_square_factors_of_weights_that_are_in_out(name: str, version: str | None, old: bool, tmp_path: Path) -> None:
    base = moe.base(name, intermediate_size=H)
    at = LAYER if name == "gpt_oss" else "model.layers.0.feed_forward.experts"
    made = torch.Generator().manual_seed(0)
    a, b = torch.randn(E, R, H, generator=made).double(), torch.randn(E, H, R, generator=made).double()
    keys = {f"{at}.lora_A.weight": a.flatten(0, 1), f"{at}.lora_B.weight": b.permute(1, 2, 0).flatten(1)}
    if old:
        keys = {key.replace(LAYER, at): tensor for key, tensor in swapped({"down_proj": (a, b)}).items()}
    put(tmp_path, keys, peft_version=version, target_parameters=["experts.down_proj"])
    want = {f"{at}.down_proj": 2.0 * (b @ a).transpose(1, 2)}
    moe.assert_same(moe.deltas(moe.read(tmp_path, base), moe.census(base)), want)


def test_granites_old_names(tmp_path: Path) -> None:
    """Its experts were parameters of their own modules, its router a linear."""
    made = torch.Generator().manual_seed(0)
    a, b = torch.randn(5, R, H, generator=made).double(), torch.randn(5, 2 * INNER, R, generator=made).double()
    at = "model.layers.1.block_sparse_moe"
    keys = {f"{at}.input_linear.lora_A.weight": b.transpose(1, 2).flatten(0, 1)}
    keys |= {f"{at}.input_linear.lora_B.weight": a.permute(2, 1, 0).flatten(1)}
    keys |= {f"{at}.router.layer.lora_A.weight": torch.ones(R, H), f"{at}.router.layer.lora_B.weight": torch.ones(5, R)}
    patterns = {"rank_pattern": {"input_linear.weight": R, "input_linear": 9}, "alpha_pattern": {"layer": 9}}
    _, got = read(put(tmp_path, keys, target_parameters=["input_linear.weight"], **patterns), "granitemoe")
    want = {f"{at}.experts.gate_up_proj": 2.0 * (b @ a), f"{at}.router.weight": torch.full((5, H), 3.0 * R)}
    moe.assert_same(got, want)


def test_one_site_that_is_not_square_decides_for_all(tmp_path: Path) -> None:
    made = torch.Generator().manual_seed(0)
    pairs = {
        "gate_up_proj": (torch.randn(E, R, H, generator=made).double(), torch.randn(E, H, R, generator=made).double()),
        "down_proj": (torch.randn(E, R, 16, generator=made).double(), torch.randn(E, H, R, generator=made).double()),
    }
    base = moe.base("qwen3_moe", moe_intermediate_size=H // 2)
    got = moe.deltas(moe.read(put(tmp_path, swapped(pairs)), base), moe.census(base))
    moe.assert_same(got, {f"{LAYER}.{name}": 2.0 * (b @ a) for name, (a, b) in pairs.items()})


# -- names ----------------------------------------------------------------------------------------------------
def test_names_are_those_of_transformers_own_conversion() -> None:
    """Every name of a single expert's linear that a checkpoint of some model has is in the table, with its meaning."""
    seen = {}
    for transforms in _build_checkpoint_conversion_mapping().values():
        for transform in transforms:
            sources = [s for s in transform._original_source_patterns if s.endswith(".weight") and "experts.*." in s]
            target = transform._original_target_patterns[0].rpartition(".")[2]
            if isinstance(transform, WeightConverter) and sources:
                for i, source in enumerate(sources):
                    name = source.removesuffix(".weight").rpartition(".")[2]
                    half = ("gate_proj", "up_proj")[i] if len(sources) == 2 else target
                    seen.setdefault(name, set()).add(half)
    assert len(seen) >= 6
    for name, meanings in seen.items():
        assert meanings <= set(PROJECTIONS[name]), (name, meanings)
