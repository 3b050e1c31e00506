"""The augmented weight where weights are not plain: inference mode, autocast, offloading, other strides."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch

from hf_multilora import MultiLoRAModel, RoutingError
from tests.life import INPUTS, NAMES, check, laid, linear, live_on, make_family, make_model
from tests.tiny import Family, llama, logits, same_ids


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Family:
    return make_family(tmp_path_factory)


@pytest.fixture
def model(family: Family) -> Any:
    return make_model(family)


def test_a_model_made_in_inference_mode(family: Family) -> None:
    with torch.inference_mode():
        base = llama()
        own = Family(base, family.paths["a"].parent / "inference", {"a": {"r": 3}, "b": {"r": 5}})
        model = own.model()
        check(own, model, base)
    check(own, model, base)
    with torch.inference_mode():
        check(own, model, base)


def test_a_model_laid_in_inference_mode(family: Family) -> None:
    model = family.model("a", "b", max_loras=2)
    with torch.inference_mode():
        check(family, model, family.base)
    assert laid(model)
    live_on(family, model, copy.deepcopy(family.base))


@pytest.mark.parametrize("tokens", [5, 15])
def test_autocast(family: Family, tmp_path: Path, tokens: int) -> None:
    own = Family(family.base, tmp_path, {"a": {"targets": ["embed_tokens", "q_proj", "lm_head"]}, "b": {}})
    model, inputs = own.model(), same_ids(3, tokens)

    def gap(got: torch.Tensor, names: list[str | None]) -> float:
        """Norm of the error as a share: single values of bfloat16 differ too much to be compared."""
        exact = own.truth(inputs, names).double()
        return float((got.double() - exact).norm() / exact.norm())

    for names in (NAMES, ["a"] * 3):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            got, merged = logits(model, inputs, names), own.truth(inputs, names)
        assert got.dtype == torch.bfloat16
        bound = 2 * gap(merged, names)
        assert gap(got, names) <= bound, "no further off than twice merged weights under autocast"
        assert gap(got, [*NAMES[1:], NAMES[0]]) > bound, "other names pass: the check says nothing"


@pytest.mark.parametrize("when", ["before", "after"])
def test_offloaded_weights(family: Family, tmp_path: Path, when: str) -> None:
    base = copy.deepcopy(family.base)
    own = Family(base, tmp_path, {"a": {"targets": ["embed_tokens", "q_proj", "lm_head"]}, "b": {}})
    model = copy.deepcopy(base)
    paths = {name: str(path) for name, path in own.paths.items()}
    if when == "before":
        accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
        assert all(p.is_meta for p in model.parameters())
    model = MultiLoRAModel.from_pretrained(model, paths)
    if when == "after":
        logits(model, INPUTS, NAMES)
        accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    for _ in range(2):
        check(own, model, base)
    bare = model.unpatch()
    with torch.no_grad():
        assert torch.equal(bare(input_ids=INPUTS).logits, family.base(input_ids=INPUTS).logits)


def test_a_weight_of_other_strides_stays_as_it_is(family: Family, model: Any) -> None:
    module = linear(model)
    module.weight.data = module.weight.data.T.contiguous().T
    strides = module.weight.stride()
    check(family, model, family.base)
    assert len(laid(model)) == len(model._multilora.sites) - 1
    model.unpatch()
    assert module.weight.stride() == strides == (1, 16)


def test_gradient_checkpointing_needs_a_block_around_backward(tmp_path: Path) -> None:
    """Layers computed again after the call would find no rows: refused with the names in the call, right in a block."""
    torch.manual_seed(0)
    family = Family(llama(), tmp_path, {"a": {"targets": ["q_proj", "down_proj"]}})
    model, batch = family.model().train(), same_ids(2)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    with pytest.raises(RoutingError, match=r"checkpointing.*with model\.adapters"):
        model(batch, adapter_names=["a", None])

    def gradient(checkpointing: bool) -> torch.Tensor:
        model.gradient_checkpointing_disable()
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.zero_grad()
        with model.adapters(["a", None]):
            model(batch).logits.square().mean().backward()
        return model.model.layers[0].self_attn.q_proj.weight.grad.clone()

    plain = gradient(False)
    assert plain.abs().max() > 0
    torch.testing.assert_close(gradient(True), plain)
