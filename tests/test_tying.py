"""Tied and resized embeddings, and `unpatch`: the bare model is back, exactly."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from torch import nn
from transformers import LlamaForSequenceClassification

from hf_multilora import MultiLoRAModel
from hf_multilora.layers import AdaptedLayer
from tests.tiny import (
    LINEARS,
    Family,
    assert_rows,
    bert,
    gpt2,
    ids,
    llama,
    logits,
    same_ids,
    save_adapter,
    snapshot,
    t5,
)

INPUTS = same_ids(4)
NAMES = ["head", None, "table", "both"]
ADAPTERS = {
    "head": {"targets": ["lm_head", "q_proj"]},
    "table": {"targets": ["embed_tokens"]},
    "both": {"targets": ["lm_head", "embed_tokens", "v_proj"]},
    "layers": {"targets": LINEARS},
}


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    torch.manual_seed(0)
    return Family(llama(tie_word_embeddings=request.param), tmp_path_factory.mktemp("adapters"), ADAPTERS)


def check(family: Family, model: Any, base: Any, names: Any = NAMES) -> None:
    assert_rows(logits(model, INPUTS, names), family.truth(INPUTS, names, base))


def test_embedding_and_head(family: Family) -> None:
    """An adapter of one of two tied modules leaves the other alone, as in PEFT without merging."""
    model = family.model()
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    assert isinstance(table, nn.Embedding) and table is model.model.embed_tokens
    assert (head.weight is table.weight) == family.base.config.tie_word_embeddings
    check(family, model, family.base)
    assert (head.weight is table.weight) == family.base.config.tie_word_embeddings


def test_a_change_of_the_shared_weight_is_seen_in_both(family: Family) -> None:
    model, base = family.model(), copy.deepcopy(family.base)
    check(family, model, base)
    for each in (model, base):
        with torch.no_grad():
            each.get_input_embeddings().weight.mul_(-2)
            each.tie_weights()
    check(family, model, base)
    for each in (model, base):
        each.get_input_embeddings().weight = nn.Parameter(torch.ones(40, 16).cumsum(0).sin())
        each.tie_weights()
    check(family, model, base)
    exported = model.state_dict()
    assert all(t.untyped_storage().nbytes() == t.nbytes for t in exported.values())


def test_copies_stay_tied(family: Family) -> None:
    model = family.model()
    want = logits(model, INPUTS, NAMES)
    other = copy.deepcopy(model)
    tied = other.get_input_embeddings().weight is other.get_output_embeddings().weight
    assert tied == family.base.config.tie_word_embeddings
    with torch.no_grad():
        model.get_input_embeddings().weight.zero_()
    assert torch.equal(logits(other, INPUTS, NAMES), want)


# -- resizing ---------------------------------------------------------------------------------------
def test_resizing_what_an_adapter_trains_is_refused(family: Family) -> None:
    model = family.model()
    want = logits(model, INPUTS, NAMES)
    verbs = [
        lambda: model.resize_token_embeddings(44),
        lambda: model.set_input_embeddings(nn.Embedding(40, 16)),
        lambda: model.set_output_embeddings(nn.Linear(16, 40)),
    ]
    for verb in verbs:
        with pytest.raises(ValueError, match=r"must not replace .*(embed_tokens|lm_head), which adapters \['"):
            verb()
    assert torch.equal(logits(model, INPUTS, NAMES), want)


@pytest.mark.parametrize("mode", ["never trained", "no longer trained"])
def test_resizing_elsewhere_is_right(family: Family, mode: str) -> None:
    model = family.model("layers") if mode == "never trained" else family.model("layers", "both", "table")
    names = ["layers", None, "layers", None]
    if mode == "no longer trained":
        logits(model, INPUTS, ["both", "table", "layers", None])
        model.delete_adapter(["both", "table"])
    logits(model, INPUTS, names)
    model.resize_token_embeddings(44, mean_resizing=False)
    base = copy.deepcopy(family.base)
    base.resize_token_embeddings(44, mean_resizing=False)
    base.load_state_dict(model.state_dict())
    got = logits(model, INPUTS, names)
    assert got.shape[-1] == 44
    assert_rows(got, family.truth(INPUTS, names, base))
    tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert tied == base.config.tie_word_embeddings


def test_adapters_of_the_resized_modules_can_come_later(family: Family, tmp_path: Path) -> None:
    model, base = family.model("layers"), copy.deepcopy(family.base)
    model.resize_token_embeddings(44, mean_resizing=False)
    base.resize_token_embeddings(44, mean_resizing=False)
    base.load_state_dict(model.state_dict())
    wide = Family(base, tmp_path, {"wide": {"targets": ["lm_head", "embed_tokens"]}})
    model.load_adapter(str(wide.paths["wide"]), "wide")
    names = ["wide", None, "wide", "wide"]
    inputs = ids(4)
    inputs[0, 1] = 43
    assert_rows(logits(model, inputs, names), wide.truth(inputs, names))


# -- unpatch ----------------------------------------------------------------------------------------
class Seen(ModelHook):
    """A hook of accelerate's that changes nothing."""


def hooked(model: Any) -> Any:
    first, second = [m for m in model.modules() if isinstance(m, nn.Linear)][:2]
    first.register_forward_hook(lambda *_: None)
    first.register_forward_pre_hook(lambda *_: None)
    second.register_full_backward_hook(lambda *_: None)
    add_hook_to_module(second, Seen())
    return model


def t5_with_hooks() -> Any:
    model = t5()
    model.encoder.register_forward_pre_hook(lambda *_: None)
    model.decoder.register_forward_pre_hook(lambda *_: None, with_kwargs=True)
    return model


BASES: dict[str, tuple[Any, list[str]]] = {
    "llama": (llama, [*LINEARS, "lm_head", "embed_tokens"]),
    "tied": (lambda: llama(tie_word_embeddings=True), [*LINEARS, "lm_head", "embed_tokens"]),
    "hooked": (lambda: hooked(llama()), [*LINEARS]),
    "gpt2": (gpt2, ["c_attn", "c_fc", "wte"]),
    "bert": (bert, ["query", "dense"]),
    "t5": (t5_with_hooks, ["q", "wo"]),
    "accelerate on the model": (lambda: add_hook_to_module(llama(), Seen()), [*LINEARS]),
}


def answer(model: Any) -> torch.Tensor:
    inputs = {"input_ids": INPUTS}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = INPUTS
    with torch.no_grad():
        return model(**inputs).logits


@pytest.mark.parametrize("name", BASES)
def test_unpatch_gives_back_exactly_what_was_there(name: str, tmp_path: Path) -> None:
    make, targets = BASES[name]
    base = make()
    save_adapter(base, tmp_path / "a", targets=targets)
    before, want, weights = snapshot(base), answer(base), {k: v.clone() for k, v in base.state_dict().items()}
    model = MultiLoRAModel.from_pretrained(base, {"a": str(tmp_path / "a")})
    with model.adapters(["a", None, "a", None]):
        adapted = answer(model)
    model.set_adapter("a")
    assert not torch.allclose(adapted, want, rtol=1e-2, atol=1e-2) and snapshot(model) != before
    assert model.unpatch() is base
    after = snapshot(base)
    for key, value in before.items():
        assert after[key] == value, key
    assert after.keys() == before.keys()
    assert torch.equal(answer(base), want)
    assert all(torch.equal(base.state_dict()[k], v) for k, v in weights.items())
    assert not isinstance(base, MultiLoRAModel) and not any(isinstance(m, AdaptedLayer) for m in base.modules())
    again = MultiLoRAModel.from_pretrained(base, {"a": str(tmp_path / "a")})
    with again.adapters(["a", None, "a", None]):
        assert torch.equal(answer(again), adapted)


@torch.no_grad()
def test_a_module_follows_one_model_only(tmp_path: Path) -> None:
    """Two models that share their layers: the second is refused, the first goes on."""
    own = Family(llama(), tmp_path, ADAPTERS)
    model = own.model()
    other = LlamaForSequenceClassification(model.config)
    other.model = model.model
    with pytest.raises(ValueError, match="must share no module with another MultiLoRAModel"):
        MultiLoRAModel.from_pretrained(other)
    assert_rows(logits(model, INPUTS, NAMES), own.truth(INPUTS, NAMES))
    assert type(other) is LlamaForSequenceClassification
    first, second = MultiLoRAModel.from_pretrained(llama()), LlamaForSequenceClassification(model.config)
    second.model = first.model
    second = MultiLoRAModel.from_pretrained(second)  # nothing is adapted yet
    first.load_adapter(str(own.paths["layers"]), "layers")
    with pytest.raises(ValueError, match="no other MultiLoRAModel may have adapted it"):
        second.load_adapter(str(own.paths["layers"]), "layers")
    assert first.verify("layers") and not second._multilora.sites


@torch.no_grad()
def test_a_weight_taken_out_of_its_module_takes_no_tenants_rows_along(tmp_path: Path) -> None:
    model = Family(llama(), tmp_path, {"a": {}, "b": {}}).model()
    logits(model, INPUTS, ["a", None, "b", None])
    module = model.model.layers[0].mlp.up_proj
    taken = module.weight
    assert taken.untyped_storage().nbytes() > taken.nbytes
    behind = torch.empty(0).set_(taken.untyped_storage())[taken.numel() :]
    assert behind.any()
    module.weight = nn.Parameter(taken.clone(), requires_grad=False)
    logits(model, INPUTS, ["a", None, "b", None])
    assert not behind.any()


@torch.no_grad()
def test_the_default_is_not_served_without_a_module_it_trains(tmp_path: Path) -> None:
    model = Family(llama(), tmp_path, ADAPTERS).model()
    model.set_adapter("head")
    own, model.lm_head = model.lm_head, nn.Linear(16, 40)
    for call in (model, model.generate):
        with pytest.raises(RuntimeError, match="lm_head must be the module that was adapted"):
            call(input_ids=INPUTS)
    model.set_adapter("layers")
    model(input_ids=INPUTS)
    model.lm_head = own
    model.set_adapter("head")
    model(input_ids=INPUTS)


def test_unpatch_inside_a_call_is_refused(tmp_path: Path) -> None:
    base = llama()
    model = MultiLoRAModel.from_pretrained(base, {"a": str(save_adapter(base, tmp_path / "a"))})
    with model.adapters(["a"]), pytest.raises(RuntimeError, match="must not run inside a call"):
        model.unpatch()
    assert model.unpatch() is base


def test_an_instance_forward_made_while_patched_outlives_unpatch(tmp_path: Path) -> None:
    from hf_multilora import RoutingError

    base = llama()
    want = answer(base)
    model = MultiLoRAModel.from_pretrained(base, {"a": str(save_adapter(base, tmp_path / "a"))})
    add_hook_to_module(model, Seen())
    model.unpatch()
    assert torch.equal(answer(base), want)
    with pytest.raises(RoutingError, match="unpatch"):
        base(input_ids=INPUTS, adapter_names=["a"] * 4)


def test_tied_by_hand_after_laying(tmp_path: Path) -> None:
    """Whoever shares a laid weight exports it without the adapters' rows that lie behind it."""
    torch.manual_seed(0)
    family = Family(llama(tie_word_embeddings=False), tmp_path, ADAPTERS)
    model = family.model()
    logits(model, INPUTS, NAMES)
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    assert head.weight.untyped_storage().nbytes() > head.weight.nbytes, "the head must be laid with A's rows"
    table.weight = head.weight
    for name, tensor in model.state_dict().items():
        assert tensor.untyped_storage().nbytes() == tensor.nbytes, name
