"""Attempts to break experts' adapters that once did: each fault with the smallest case that shows it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import MethodType
from typing import Any
from unittest import mock

import pytest
import torch
from accelerate import cpu_offload

from hf_multilora import AdapterError, MultiLoRAModel, RoutingError
from hf_multilora.formats import Adapter, LoraFactors
from hf_multilora.kernels import ops_experts
from hf_multilora.layers.experts import NAME
from tests import experts_adapters
from tests.experts_adapters import EACH, PACKED, PEFT, describe, merge, write
from tests.experts_family import FAR, TOLERANCE, Family, error, errors, logits

pytest_plugins = ("tests.experts_fixtures",)
Mixtures = Callable[[str], Family]
Adapters = dict[str, experts_adapters.Adapter]
IMPLEMENTATIONS = ("eager", "batched_mm", "grouped_mm")


def all_shared(family: Family, r: int, seed: int) -> experts_adapters.Adapter:
    """A and B of every projection are one for all experts."""
    made = describe(family.mixture, family.base, PACKED, r=r, seed=seed, attention=False)
    return replace(made, parts=tuple(replace(part, a=part.a[:1], b=part.b[:1]) for part in made.parts))


def served(family: Family, folder: Path, adapters: Adapters, **settings: Any) -> Any:
    """A model of the family's base with these adapters."""
    paths = {name: str(write(adapter, family.base, folder / name)) for name, adapter in adapters.items()}
    return MultiLoRAModel.from_pretrained(copy.deepcopy(family.base), paths, **settings)


def checked(name: str) -> Any:
    """A patch of what layers call, with the checks of the operation, on which kernels rely."""
    run, check = getattr(ops_experts, name), getattr(ops_experts, f"check_{name}")

    def call(backend: Any, *args: Any) -> Any:
        check(*args)
        return run(backend, *args)

    return mock.patch.object(ops_experts, name, call)


@torch.no_grad()
def check_experts(model: Any, family: Family, adapters: Adapters, names: Sequence[str | None]) -> None:
    """The first layer's experts, one token a row, against those of each row's merged model."""
    path, made = family.mixture.paths(family.base, family.mixture.experts)[0], torch.Generator().manual_seed(5)
    bare, n = family.base.get_submodule(path), len(names)
    x, weights = torch.randn(n, 32, generator=made), torch.rand(n, 2, generator=made)
    index = torch.randint(0, bare.num_experts, (n, 2), generator=made)
    alone = {name: merge(family.base, adapter).get_submodule(path) for name, adapter in adapters.items()}
    others = [next(other for other in (*adapters, None) if other != name) for name in names]
    want, control = (
        [alone.get(name, bare)(x[i : i + 1], index[i : i + 1], weights[i : i + 1])[0] for i, name in enumerate(some)]
        for some in (names, others)
    )
    for experts in IMPLEMENTATIONS:
        model.set_experts_implementation(experts)
        with model.adapters(list(names)), checked("shrink"), checked("expand"):
            got = list(model.get_submodule(path)(x, index, weights))
        assert max(errors(got, want)) < TOLERANCE, experts
        assert min(errors(got, control)) > FAR


@pytest.mark.parametrize("name", ["qwen2_moe", "nemotron_h"])
def test_shared_b_beside_an_a_of_each_expert(mixtures: Mixtures, name: str, tmp_path: Path) -> None:
    """B of down is one for all experts in both adapters, A in one of them only, and that has the smaller rank."""
    family = mixtures(name)
    adapters = {
        "all": all_shared(family, 7, 1),
        "some": describe(family.mixture, family.base, PACKED, r=2, seed=2, attention=False, shared=True),
        "none": describe(family.mixture, family.base, PEFT, r=3, seed=3, attention=False),
    }
    model = served(family, tmp_path, adapters)
    for names in (["all", "some", None, "none"], ["some", "all"], ["all", "none", "some", "all", None]):
        check_experts(model, family, adapters, names)
    for names in (["all"] * 3, ["some"] * 3, ["none"]):  # one adapter in all rows
        check_experts(model, family, adapters, names)


@torch.no_grad()
def test_biases_of_which_nothing_is_shared(mixtures: Mixtures, tmp_path: Path) -> None:
    """Each expert's own B of a bias, with ranks that differ: PEFT shares B, other writers need not."""
    family = mixtures("gpt_oss")
    path, made = family.mixture.paths(family.base, family.mixture.experts)[0], torch.Generator().manual_seed(6)
    module = copy.deepcopy(family.base.get_submodule(path))
    parts, bias = (1, 0, 4, 2, 0, 3), module.down_proj_bias
    a, b = torch.randn(10, 1, generator=made), torch.randn(bias.shape[1], 10, generator=made)
    for expert, rows in enumerate(torch.arange(10).split(parts)):
        bias[expert] += 1.5 * (b[:, rows] @ a[rows])[:, 0]
    model = family.model("whole")
    own = Adapter("memory", "0", None, {f"{path}:down_proj_bias": LoraFactors(a, b, 1.5, parts)})
    model._multilora.register("own", own, None, replace=False)
    x, index, weights = torch.randn(8, 32, generator=made), torch.arange(6).repeat(3)[:16].view(8, 2), torch.rand(8, 2)
    for experts in IMPLEMENTATIONS:
        model.set_experts_implementation(experts)
        with model.adapters(["own", "own", None, "whole", "own", "own", None, "own"]):
            got = model.get_submodule(path)(x, index, weights)
        for i in (0, 1, 4, 5, 7):
            want = module(x[i : i + 1], index[i : i + 1], weights[i : i + 1])[0]
            assert error(got[i], want) < TOLERANCE
            assert (
                error(family.base.get_submodule(path)(x[i : i + 1], index[i : i + 1], weights[i : i + 1])[0], want)
                > FAR
            )
    assert model.verify("own")


def test_verify_does_not_take_offloaded_experts_for_wrong(mixtures: Mixtures, tmp_path: Path) -> None:
    family = mixtures("qwen2_moe")
    adapter = describe(family.mixture, family.base, PEFT, r=3, seed=4, attention=False)
    model = served(family, tmp_path, {"a": adapter})
    assert model.verify("a")
    cpu_offload(model, torch.device("cpu"))
    with pytest.raises(NotImplementedError, match=r"experts:gate_up_proj: its weights are offloaded"):
        model.verify("a")


def test_our_implementation_is_not_for_users(mixtures: Mixtures) -> None:
    """Transformers lists its name among those that may be chosen."""
    family = mixtures("qwen3_moe")
    bare = copy.deepcopy(family.base)
    bare.set_experts_implementation(NAME)
    for model, names in ((bare, None), (family.model("attention", experts=NAME), ["attention"])):
        with pytest.raises(NotImplementedError, match=r"must be one of .*grouped_mm.*it is 'hf_multilora'"):
            logits(model, family.inputs(1), names)


def test_a_plan_takes_the_names_that_loading_takes(mixtures: Mixtures) -> None:
    """target_modules may name the experts' module, or gate and up of it, of which pools are then planned."""
    family = mixtures("qwen3_moe")
    whole, halves = ["down_proj", "gate_up_proj"], ["down_proj", "gate_proj", "up_proj"]
    named: dict[Any, list[str]] = {
        ("experts",): whole, r".*\.experts": whole, r".*experts.*": whole, ("experts.down_proj",): ["down_proj"],
        ("gate_proj", "up_proj", "down_proj"): halves,
    }  # fmt: skip
    for targets, projections in named.items():
        given = targets if isinstance(targets, str) else list(targets)
        plan = MultiLoRAModel.plan(family.base, max_lora_rank=4, max_loras=2, target_modules=given)
        assert {site.partition(":")[2] for site in plan.per_module} == set(projections)
        sizes = {p: 16 + 32 for p in projections} | {"gate_up_proj": 32 + 32}  # in + out
        assert plan.device_bytes == sum(2 * 2 * 4 * 6 * sizes[p] * 4 for p in projections)
    with pytest.raises(ValueError, match="got w1"):
        MultiLoRAModel.plan(family.base, max_lora_rank=4, target_modules=["w1"])


def test_a_block_with_the_forward_of_a_kernel(mixtures: Mixtures) -> None:
    """A kernel's forward reads the weights of experts and router, and would never call what adapters are added to."""
    family = mixtures("gpt_oss")

    class MegaBlocks(torch.nn.Module):
        def forward(self, hidden_states: torch.Tensor) -> Any:
            return hidden_states @ self.experts.down_proj[0], self.router.weight  # type: ignore[operator, union-attr]

    for path in ("model.layers.1.mlp", "model.layers.1.mlp.experts"):
        base = copy.deepcopy(family.base)
        block = base.get_submodule(path)
        block.forward = MethodType(MegaBlocks.forward, block)
        with pytest.raises(
            AdapterError, match=r"layers\.1\.mlp\.\S*: no adapter may .* forward of a kernel .*MegaBlocks"
        ):
            MultiLoRAModel.from_pretrained(base, {"whole": family.path("whole")})
        block.forward = MethodType(type(block).forward, block)  # what it is set to where no kernel fits
        model = MultiLoRAModel.from_pretrained(base, {"whole": family.path("whole")})
        assert max(errors(logits(model, family.inputs(1), ["whole"]), family.truth(["whole"]))) < TOLERANCE
        block.forward = MethodType(MegaBlocks.forward, block)  # kernels that came later
        with pytest.raises(RuntimeError, match=r"must be called where adapters train it, but .* forward of a kernel"):
            logits(model, family.inputs(1), ["whole"])
        del block.forward
        assert max(errors(logits(model, family.inputs(1), ["whole"]), family.truth(["whole"]))) < TOLERANCE


def test_pools_of_a_layout_that_nobody_uses_any_more(mixtures: Mixtures, tmp_path: Path) -> None:
    """The same experts trained in other layouts are other sites: the pools of those before do not stay for ever."""
    family = mixtures("qwen3_moe")
    model = family.model("whole")
    kept = describe(family.mixture, family.base, PACKED, r=2, seed=8, attention=False, shared=True)
    model.load_adapter(str(write(kept, family.base, tmp_path / "kept")), "kept")
    check_experts(model, family, {"whole": family.adapters["whole"], "kept": kept}, ["whole", None, "kept"])
    before = model.memory_report().device_bytes
    assert before == MultiLoRAModel.plan(model).device_bytes
    model.delete_adapter("whole")
    other = describe(family.mixture, family.base, EACH, r=4, seed=9, attention=False, projections=("gate_proj",))
    model.load_adapter(str(write(other, family.base, tmp_path / "other")), "other")
    check_experts(model, family, {"other": other, "kept": kept}, ["other", None, "kept"])
    pools = model.memory_report().per_module
    planned = MultiLoRAModel.plan(model).per_module
    assert {site: size for site, size in pools.items() if size and ".experts:" in site} == {
        site: module.bytes for site, module in planned.items() if ".experts:" in site
    }
    assert sum(pools.values()) < before
    model.load_adapter(family.path("whole"), "whole")
    check_experts(model, family, {"whole": family.adapters["whole"], "other": other}, ["whole", "other", None])


@torch.no_grad()
def test_packed_sequences_of_a_model_that_hands_use_cache_on(mixtures: Mixtures) -> None:
    """With a cache Transformers lets packed sequences see each other."""
    family = mixtures("granitemoe")
    model, names = family.model(), ["whole", None, "other", "whole"]
    assert "use_cache" not in model._multilora.parameters
    lengths = [len(row) for row in family.rows]
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    out = model(input_ids=torch.cat(family.rows)[None], position_ids=positions, adapter_names=names).logits[0]
    assert max(errors(list(out.split(lengths)), family.truth(names))) < TOLERANCE


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("gpt_oss", r"mask without position_ids.*one row per sequence"),
        ("jamba", r"JambaMambaMixer carries a state along the row.*one row per sequence"),
    ],
)
def test_packed_sequences_that_the_base_does_not_tell_apart(mixtures: Mixtures, name: str, said: str) -> None:
    """GPT-OSS makes its masks without position_ids, and Jamba's Mamba layers go on from one sequence to the next: the
    bare models, too, let packed sequences see each other."""
    family, names = mixtures(name), ["whole", None, "other", "whole"]
    ids, lengths = torch.cat(family.rows)[None], [len(row) for row in family.rows]
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    bare = family.base(input_ids=ids, position_ids=positions, use_cache=False).logits[0].split(lengths)
    assert min(errors(bare[1:], family.truth([None] * 4)[1:])) > FAR  # once it is not so, it need not be refused
    model = family.model()
    with pytest.raises(RoutingError, match=said):
        model(input_ids=ids, position_ids=positions, adapter_names=names)
