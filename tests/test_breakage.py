"""Cases that once gave a wrong answer or an obscure error; each as small as it gets."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from hf_multilora import CapacityError, KernelError, MultiLoRAModel
from hf_multilora.kernels.backends import TRITON_FIXED, has_triton, interpreted
from hf_multilora.routing import RoutingError
from tests.tiny import Family, assert_rows, error, gpt2, ids, llama, logits, same_ids

TRITON_HERE = pytest.mark.skipif(
    not (has_triton() and interpreted()), reason="Triton on the CPU needs TRITON_INTERPRET=1 before its import"
)


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Family:
    torch.manual_seed(0)
    adapters: dict[str, dict[str, Any]] = {"a": {"r": 2}, "b": {"r": 3}, "c": {"r": 1}}
    return Family(llama(num_hidden_layers=1), tmp_path_factory.mktemp("adapters"), adapters)


def backends(model: Any) -> set[str]:
    return {slots.backend.name for _, slots in model._multilora.sites.values()}


# -- backends ---------------------------------------------------------------------------------------
@TRITON_HERE
def test_a_default_that_moves_out_of_triton_s_dtypes_is_told(family: Family) -> None:
    model = family.model(deterministic=True)
    model.set_adapter("a")
    with pytest.raises(KernelError, match=r"deterministic=True needs the Triton kernels.*torch\.float64"):
        model.double()
    for _ in range(2):
        with pytest.raises(KernelError), torch.no_grad():
            model(input_ids=ids(1))
        assert logits(model, ids(2), [None, None]).dtype == torch.float64, "the base goes on"
    model.float()
    assert error(logits(model, same_ids(2), ["a", None]), family.truth(same_ids(2), ["a", None])) < 1e-5


@TRITON_HERE
def test_a_copy_stays_deterministic(family: Family) -> None:
    model = family.model(deterministic=True)
    model.set_adapter("a")
    copied = copy.deepcopy(model)
    assert backends(copied) == {TRITON_FIXED}, "also for direct calls of its modules"
    copied.half()
    with torch.no_grad():
        copied(input_ids=ids(1))
    assert backends(copied) == {TRITON_FIXED}


@TRITON_HERE
def test_a_move_inside_a_block_is_told(family: Family) -> None:
    model = family.model(backend="triton")
    with model.adapters(["a", None]), pytest.raises(KernelError, match=r"torch\.float64"):
        model.double()
    model.float()
    assert_rows(logits(model, same_ids(3), ["a", None, "b"]), family.truth(same_ids(3), ["a", None, "b"]))


# -- numbers ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("names", [["big", "big"], ["big", None]])
def test_wider_factors_are_not_rounded_on_the_way(family: Family, tmp_path: Path, names: list[str | None]) -> None:
    """A x beyond float16's range, B small: finite, alone as in a batch."""
    own = Family(family.base, tmp_path, {"big": {"targets": ["q_proj"]}})
    file = own.paths["big"] / "adapter_model.safetensors"
    save_file({k: v * (1e7 if "_A" in k else 1e-7) for k, v in load_file(file).items()}, file)
    model = MultiLoRAModel.from_pretrained(
        copy.deepcopy(family.base).half(), {"big": str(own.paths["big"])}, lora_dtype="float32"
    )
    inputs = same_ids(2)
    got, want = logits(model, inputs, names).float(), own.truth(inputs, names)
    assert got.isfinite().all() and error(got, want) < 2e-2
    assert error(family.base(inputs).logits, own.truth(inputs, ["big", "big"])) > 4e-2, "control: the adapter shows"


@pytest.mark.parametrize("tokens", [5, 40])
def test_autocast_of_rows_apart(family: Family, tokens: int) -> None:
    model, names, inputs = family.model(), ["a", None, "b", "c", "a"], same_ids(5, tokens)
    with torch.autocast("cpu", torch.bfloat16):
        got = logits(model, inputs, names)
    want = family.truth(inputs, names)
    assert float((got - want).norm() / want.norm()) < 3e-2 < float((got.roll(1, 0) - want).norm() / want.norm())


@pytest.mark.parametrize("kind", ["q_proj", "embed_tokens"])
def test_no_tokens(family: Family, tmp_path: Path, kind: str) -> None:
    own = Family(family.base, tmp_path, {"a": {"targets": [kind]}})
    model = own.model()
    module = next(m for name, m in model.named_modules() if name.endswith(kind))
    x = torch.zeros(3, 0, dtype=torch.long) if kind == "embed_tokens" else torch.zeros(3, 0, 16)
    with torch.no_grad(), model.adapters(["a", None, "a"]):
        assert module(x).shape == (3, 0, 16)


# -- passes, gradients, arguments --------------------------------------------------------------------
def test_gradients_in_passes_are_refused(family: Family) -> None:
    model = family.model(max_loras=2)
    embedded = torch.randn(3, 4, 16, requires_grad=True)
    with pytest.raises(CapacityError, match="inputs_embeds requires gradients"):
        model(inputs_embeds=embedded, adapter_names=["a", "b", "c"])
    model(inputs_embeds=embedded, adapter_names=["a", "b", None]).logits.sum().backward()
    assert embedded.grad is not None and embedded.grad.any()


@pytest.mark.parametrize("typo", ["adapters", "adapter", "adapter_name"])
def test_misspelled_names_are_not_the_base(family: Family, typo: str) -> None:
    with pytest.raises(TypeError, match=f"'{typo}' must be spelled 'adapter_names'"):
        family.model()(input_ids=ids(1), **{typo: ["a"]})


# -- warm-up ----------------------------------------------------------------------------------------
def test_warm_up_after_a_move(family: Family) -> None:
    model = MultiLoRAModel.from_pretrained(
        copy.deepcopy(family.base).half(), {name: str(path) for name, path in family.paths.items()}, max_loras=2
    )
    model.float()
    assert len(model.warmup(tokens=(1,)).adapters) == 2


def test_warm_up_with_pins_keeps_to_the_slots_there_are(family: Family) -> None:
    model = family.model(max_loras=2)
    model.pin_adapter("a")
    assert model.warmup(tokens=(2,), max_new_tokens=2, do_sample=True).adapters[0] == "a"
    model.pin_adapter("b")
    assert model.warmup(tokens=(2,)).adapters == ["a", "b"]


def test_warm_up_leaves_out_what_is_longer_than_the_model_takes() -> None:
    report = MultiLoRAModel.from_pretrained(gpt2(), max_loras=1, max_lora_rank=1).warmup()
    assert set(report.shapes) == {(1, 1), (1, 64)} and report.skipped == [(1, 512)]


# -- copies and slots --------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "way", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["copy", "pickle"]
)
def test_slots_of_a_copy_change_hands(family: Family, way: Any) -> None:
    """Pickle does not keep that tensors are views of one buffer: the tables of a layout are."""
    model = family.model(max_loras=2, max_lora_rank=8)
    logits(model, ids(2), ["a", "b"])
    copied = way(model)
    for names in (["a", "b"], ["b", "c"], ["a", "c", None]):
        inputs = same_ids(len(names), 40)
        assert_rows(logits(copied, inputs, names), family.truth(inputs, names))


def test_pins_that_wait_beside_a_default(family: Family) -> None:
    """Every slot is promised: what has none is refused before any work, and the default keeps its own at a move."""
    model = family.model(max_loras=2)
    model.set_adapter("c")
    model.pin_adapter("a"), model.pin_adapter("b")
    with pytest.raises(CapacityError, match="distinct adapters must fit"):
        logits(model, ids(2), ["a", "b"])
    model.double()
    with torch.no_grad():
        got = model(input_ids=same_ids(1)).logits
    assert error(got, family.truth(same_ids(1), ["c"])) < 1e-5 < error(got, family.truth(same_ids(1), [None]))


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.vmap])
def test_adapters_are_not_named_inside_a_torch_func_transform(family: Family, transform: Any) -> None:
    """What was made there would end with it; the model stays usable, and a block around the transform serves it."""
    model, names, inputs = family.model(), ["a", None], same_ids(2)
    model.requires_grad_(False)
    x = model.get_input_embeddings()(inputs).detach()

    def loss(z: Any) -> Any:
        return model(inputs_embeds=z, adapter_names=names).logits.square().sum()

    for _ in range(2):  # the adapter is not in a slot, then it is
        with pytest.raises(RoutingError, match="around the transform"):
            transform(loss)(x if transform is torch.func.grad else x[None])
        assert_rows(logits(model, inputs, names), family.truth(inputs, names))
    with model.adapters(names):
        got = torch.func.grad(lambda z: model(inputs_embeds=z).logits.square().sum())(x)
    leaf = x.clone().requires_grad_()
    loss(leaf).backward()
    assert error(got, leaf.grad) < 1e-5 < 1e-3 < error(got.roll(1, 0), leaf.grad)


@TRITON_HERE
def test_forward_mode_derivatives_through_kernels_are_refused(family: Family) -> None:
    model, inputs = family.model(backend="triton"), same_ids(2)
    before = logits(model, inputs, ["a", None])
    with torch.autograd.forward_ad.dual_level(), pytest.raises(RoutingError, match="backend='torch'"):
        logits(model, inputs, ["a", None])
    assert torch.equal(logits(model, inputs, ["a", None]), before)


@torch.no_grad()
def test_a_linear_with_a_call_of_its_own_keeps_it(family: Family) -> None:
    class Doubled(nn.Linear):
        def __call__(self, x: Any) -> Any:
            return super().__call__(x) * 2

    base, inputs, names = copy.deepcopy(family.base), same_ids(3), ["a", None, "b"]
    base.model.layers[0].self_attn.q_proj.__class__ = Doubled
    want = copy.deepcopy(base)(input_ids=inputs[1:2]).logits
    model = MultiLoRAModel.from_pretrained(base, {name: str(path) for name, path in family.paths.items()})
    torch.testing.assert_close(logits(model, inputs, names)[1:2], want)
    assert error(family.base(input_ids=inputs[1:2]).logits, want) > 1e-3


@TRITON_HERE
def test_one_adapter_for_all_rows_in_traced_and_inference_mode(family: Family) -> None:
    """deterministic=True has tables for it: made before a trace asks for them, and fit for gradients."""
    model, inputs = family.model("a", backend="triton", deterministic=True), same_ids(2)
    with torch.inference_mode():
        model(input_ids=inputs, adapter_names=["a", "a"])
    model(input_ids=inputs, adapter_names=["a", "a"]).logits.sum().backward()
    model = family.model("a", backend="triton", deterministic=True)
    model.set_adapter("a")
    torch._dynamo.reset()
    with torch.no_grad():
        got = torch.compile(model, fullgraph=True, backend="eager")(input_ids=inputs).logits
    torch._dynamo.reset()
    assert error(got, family.truth(inputs, ["a", "a"])) < 1e-5 < error(got, family.truth(inputs, [None, None]))
