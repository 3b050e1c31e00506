"""The augmented weight through whatever is done to a model: do it, change W, change an adapter, compare each time."""

from __future__ import annotations

import copy
import io
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from hf_multilora import AdapterError, MultiLoRAModel
from tests.life import ADAPTERS, INPUTS, NAMES, check, hidden_bytes, laid, linear, live_on, make_family, make_model
from tests.tiny import Family, assert_rows, ids, llama, logits

# -- moves ------------------------------------------------------------------------------------------
MOVES: dict[str, tuple[Callable[[Any], Any], float]] = {
    "nothing": (lambda m: m, 1e-5),
    "to the same dtype": (lambda m: m.to(torch.float32), 1e-5),
    "to the same device": (lambda m: m.to("cpu"), 1e-5),
    "float": (lambda m: m.float(), 1e-5),
    "double": (lambda m: m.double(), 1e-7),  # the delta of a pool that was float32
    "bfloat16": (lambda m: m.bfloat16(), 4e-2),
    "half": (lambda m: m.half(), 1e-2),
    "half and back": (lambda m: m.half().float(), 2e-3),
    "frozen": (lambda m: m.requires_grad_(False), 1e-5),
    "one layer": (lambda m: (m.model.layers[0].to(torch.float32), m)[1], 1e-5),
    "shared": (lambda m: m.share_memory(), 1e-5),
}


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Family:
    return make_family(tmp_path_factory)


@pytest.fixture
def model(family: Family) -> Any:
    return make_model(family)


@pytest.mark.parametrize("name", MOVES)
def test_moves(family: Family, model: Any, name: str) -> None:
    move, tolerance = MOVES[name]
    base = copy.deepcopy(family.base)
    moved, base = move(model), move(base)
    assert moved is model and model.dtype == base.dtype
    live_on(family, model, base, tolerance)


# -- other weights ----------------------------------------------------------------------------------
def copied(model: Any, state: dict[str, Tensor]) -> None:
    for name, parameter in model.named_parameters():
        parameter.data.copy_(state[name])


def pointed(model: Any, state: dict[str, Tensor]) -> None:
    for name, parameter in model.named_parameters():
        parameter.data = state[name].clone()


def replaced(model: Any, state: dict[str, Tensor]) -> None:
    for name, _ in list(model.named_parameters()):
        owner, _, own = name.rpartition(".")
        setattr(model.get_submodule(owner), own, nn.Parameter(state[name].clone()))


def weight_only(model: Any, state: dict[str, Tensor]) -> None:
    copied(model, state)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(state[f"{name}.weight"].clone())


def loaded(model: Any, state: dict[str, Tensor]) -> None:
    assert str(model.load_state_dict(state)) == "<All keys matched successfully>"


def assigned(model: Any, state: dict[str, Tensor]) -> None:
    model.load_state_dict({name: value.clone() for name, value in state.items()}, assign=True)


@pytest.mark.parametrize("way", [copied, pointed, replaced, weight_only, loaded, assigned])
def test_other_weights_are_seen(family: Family, model: Any, way: Callable[[Any, dict[str, Tensor]], None]) -> None:
    torch.manual_seed(1)
    base = llama()
    old = logits(model, INPUTS, NAMES)
    way(model, base.state_dict())
    assert (logits(model, INPUTS, NAMES) - old).abs().max() > 0.1
    live_on(family, model, base)
    assert hidden_bytes(model.state_dict()) == 0


def test_a_bias_taken_away_or_put_back_is_seen(family: Family, model: Any) -> None:
    base = copy.deepcopy(family.base)
    for bias in (None, nn.Parameter(torch.ones(16)), nn.Parameter(torch.zeros(16))):
        for each in (model, base):
            linear(each).bias = copy.deepcopy(bias)
        check(family, model, base)
        assert hidden_bytes(model.state_dict()) == 0


# -- copies -----------------------------------------------------------------------------------------
def saved_whole(model: Any) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), saved_whole]


@pytest.mark.parametrize("way", COPIES, ids=["deepcopy", "pickle", "torch.save"])
def test_copies_answer_and_are_independent(family: Family, model: Any, way: Callable[[Any], Any]) -> None:
    other, want = way(model), logits(model, INPUTS, NAMES)
    assert type(other) is type(model) and other._multilora is not model._multilora
    assert hidden_bytes(other.state_dict()) == 0, "before its first call"
    assert torch.equal(logits(other, INPUTS, NAMES), want)
    live_on(family, other, copy.deepcopy(family.base))
    assert torch.equal(logits(model, INPUTS, NAMES), want)
    live_on(family, model, copy.deepcopy(family.base))


@pytest.mark.parametrize("way", COPIES, ids=["deepcopy", "pickle", "torch.save"])
def test_copies_keep_the_default_and_hold_it(family: Family, model: Any, way: Callable[[Any], Any]) -> None:
    from hf_multilora import AdapterInUseError

    model.set_adapter("b")
    other = way(model)
    model.set_adapter(None)
    with torch.no_grad():
        assert_rows(other(input_ids=ids(3)).logits, family.truth(ids(3), ["b"] * 3))
    with pytest.raises(AdapterInUseError, match="default"):
        other.delete_adapter("b")
    check(family, other, family.base)
    other.set_adapter(None)
    other.delete_adapter("b")


@pytest.mark.parametrize("way", COPIES, ids=["deepcopy", "pickle", "torch.save"])
def test_a_copy_made_inside_a_request_is_at_rest(family: Family, model: Any, way: Callable[[Any], Any]) -> None:
    with model.adapters(NAMES):
        other = way(model)
    assert not other._multilora.routing.open
    live_on(family, other, copy.deepcopy(family.base))


# -- files ------------------------------------------------------------------------------------------
def grow(family: Family, model: Any) -> None:
    """The pool outgrows the buffers, and no request follows that would lay the weights anew."""
    model.load_adapter(str(family.paths["big"]), "big")
    model.set_adapter("big")
    model.set_adapter(None)
    assert not laid(model)


STATES: dict[str, Callable[[Family, Any], Any]] = {
    "laid": lambda family, model: None,
    "grown": grow,
    "bias replaced": lambda family, model: setattr(linear(model), "bias", nn.Parameter(torch.zeros(16))),
    "weight replaced": lambda family, model: setattr(linear(model), "weight", nn.Parameter(torch.zeros(16, 16))),
    "no-op move": lambda family, model: model.float(),
}


@pytest.mark.parametrize("state", STATES)
def test_exported_weights_hold_no_tenants_rows(family: Family, model: Any, state: str) -> None:
    STATES[state](family, model)
    exported = model.state_dict()
    assert sorted(exported) == sorted(family.base.state_dict())
    assert hidden_bytes(exported) == 0
    assert hidden_bytes(dict(model.named_parameters())) > 0, "the weights themselves do lie in buffers"
    sizes = []
    for each in (model, family.base):
        file = io.BytesIO()
        torch.save(each.state_dict(), file)
        sizes.append(len(file.getvalue()))
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("tied", [False, True])
def test_saved_files_are_the_bases(family: Family, tmp_path: Path, state: str, tied: bool) -> None:
    base = llama(tie_word_embeddings=tied)
    own = Family(base, tmp_path / "own", ADAPTERS)
    model = own.model("a", "b", max_loras=2)
    logits(model, INPUTS, NAMES)
    STATES[state](own, model)
    want = {k: v.clone() for k, v in model.state_dict().items()}
    model.save_pretrained(tmp_path / "saved")
    again = type(base).from_pretrained(tmp_path / "saved")
    assert type(again) is type(base) and type(model).from_pretrained(tmp_path / "saved").__class__ is type(base)
    safetensors.torch.save_model(model, str(tmp_path / "model.safetensors"))
    bare = copy.deepcopy(base)
    safetensors.torch.load_model(bare, str(tmp_path / "model.safetensors"))
    for each in (again.eval(), bare):
        assert all(torch.equal(each.state_dict()[k], v) for k, v in want.items())
        assert torch.equal(each(input_ids=INPUTS).logits, logits(model, INPUTS, [None] * 3))
    assert not (tmp_path / "saved" / "adapter_config.json").exists()


# -- unpatch ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("state", STATES)
def test_unpatch_frees_the_weights_from_the_buffers(family: Family, model: Any, state: str) -> None:
    STATES[state](family, model)
    want = logits(model, INPUTS, [None] * 3)
    assert model.unpatch() is model and type(model) is type(family.base)
    assert hidden_bytes(dict(model.named_parameters())) == 0
    with torch.no_grad():
        assert torch.equal(model(input_ids=INPUTS).logits, want)


# -- finer dtypes -----------------------------------------------------------------------------------
def test_a_finer_dtype_reads_the_adapters_again(family: Family) -> None:
    """Factors that were rounded to the base's bfloat16 are not what the adapter holds once the base is float32."""
    base = copy.deepcopy(family.base).bfloat16()
    model = MultiLoRAModel.from_pretrained(copy.deepcopy(base), {n: str(family.paths[n]) for n in ("a", "b")})
    logits(model, INPUTS, NAMES)
    slots = model._multilora.sites["model.layers.0.self_attn.q_proj"][1]
    rounded = slots.a.clone()
    check(family, model.float(), base.float())
    assert (slots.a - rounded.float()).abs().max() > 1e-4, "rounded factors must differ from those on disk"
    store = model._multilora.store
    assert store.hosted_bytes == sum(entry.host.nbytes for entry in store.catalogue) == model.memory_report().host_bytes


def test_a_dtype_that_cannot_hold_an_adapter_is_an_error(family: Family, tmp_path: Path) -> None:
    """float16 would turn factors into Inf: an error that names the module at the next call, and the base goes on."""
    shutil.copytree(family.paths["a"], tmp_path / "huge")
    file = tmp_path / "huge" / "adapter_model.safetensors"
    save_file({k: v * 1e6 for k, v in load_file(file).items()}, file)
    model = MultiLoRAModel.from_pretrained(copy.deepcopy(family.base), {"huge": str(tmp_path / "huge")})
    assert logits(model, INPUTS, ["huge"] * 3).isfinite().all()
    model.half()
    with pytest.raises(AdapterError, match=r"_proj.*finite in torch\.float16"):
        logits(model, INPUTS, ["huge", None, None])
    assert logits(model, INPUTS, [None] * 3).isfinite().all()
