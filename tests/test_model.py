"""The verbs of a MultiLoRAModel, and other people's code that calls it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as tf
from accelerate.hooks import ModelHook, add_hook_to_module
from peft import LoraConfig
from torch import Tensor

from hf_multilora import AdapterInUseError, CapacityError, MultiLoRAModel, UnknownAdapterError
from tests.tiny import Family, assert_rows, error, ids, llama, logits, same_ids

INPUTS = same_ids(3)
NAMES = ["a", None, "b"]


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Family:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("adapters")
    family = Family(llama(), folder, {"a": {"r": 3}, "b": {"r": 5}, "c": {"targets": ["o_proj"]}})
    return family


def check(family: Family, model: Any, names: Any = NAMES) -> None:
    assert_rows(logits(model, INPUTS, names), family.truth(INPUTS, names))


# -- verbs ------------------------------------------------------------------------------------------
def test_the_default_adapter(family: Family) -> None:
    model = family.model("a", "b", "c", max_loras=2)
    plain: Callable[[], Tensor] = lambda: model(input_ids=INPUTS).logits.detach()  # noqa: E731
    truth = {name: family.truth(INPUTS, [name] * 3) for name in (None, "a", "b")}
    assert error(plain(), truth[None]) == 0 and model.active_adapters() == []
    model.set_adapter("a")
    assert error(plain(), truth["a"]) < 1e-5 and model.active_adapters() == model.active_adapter == ["a"]
    check(family, model, ["b", None, "a"])
    assert error(plain(), truth["a"]) < 1e-5
    assert error(logits(model, INPUTS, [None] * 3), truth[None]) < 1e-6
    for verb in (lambda: model.delete_adapter("a"), lambda: model.delete_adapter(["b", "a"])):
        with pytest.raises(AdapterInUseError, match="'a' must not be deleted while it is the default"):
            verb()
    with pytest.raises(CapacityError):
        model.generate(INPUTS, adapter_names=["b", "c", None], max_new_tokens=2, do_sample=True)
    with pytest.raises(UnknownAdapterError, match="no adapter is named 'aa'; did you mean"):
        model.set_adapter("aa")
    model.set_adapter("b")
    assert error(plain(), truth["b"]) < 1e-5
    model.disable_adapters()
    assert error(plain(), truth[None]) == 0
    model.delete_adapter(["a", "b"])
    assert [row["name"] for row in model.list_adapters()] == ["c"]


def test_a_list_with_an_unknown_name_deletes_nothing(family: Family) -> None:
    model = family.model("a", "b")
    with pytest.raises(UnknownAdapterError, match="zz"):
        model.delete_adapter(["a", "zz"])
    check(family, model)


def test_transformers_own_verbs_name_ours(family: Family) -> None:
    model = family.model("a", "b")
    with pytest.raises(NotImplementedError, match="load_adapter"):
        model.add_adapter(LoraConfig(), adapter_name="x")
    with pytest.raises(NotImplementedError, match="set_adapter"):
        model.enable_adapters()
    check(family, model)


def test_a_pin_too_many_at_load_registers_nothing(family: Family) -> None:
    model = family.model("a", "b", max_loras=1)
    model.pin_adapter("a")
    with pytest.raises(CapacityError, match="max_loras=1"):
        model.load_adapter(str(family.paths["c"]), pinned=True)
    assert [row["name"] for row in model.list_adapters()] == ["a", "b"]
    model.load_adapter(str(family.paths["a"]), "a", load_inplace=True, pinned=True)
    assert [row["pinned"] for row in model.list_adapters()] == [True, False]


# -- other people's code ----------------------------------------------------------------------------
class Seen(ModelHook):
    """A hook of accelerate's that changes nothing."""


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_instance_forward_of_the_model_does_not_swallow_the_names(family: Family, when: str) -> None:
    base = copy.deepcopy(family.base)
    if when == "before":
        add_hook_to_module(base, Seen())
    model = MultiLoRAModel.from_pretrained(base, {n: str(family.paths[n]) for n in "ab"})
    if when == "after":
        add_hook_to_module(model, Seen())
    check(family, model)
    mixed = model.generate(INPUTS, adapter_names=NAMES, num_beams=2, max_new_tokens=4, do_sample=False)
    for i, name in enumerate(NAMES):
        alone = model.generate(INPUTS[:1], adapter_names=[name], num_beams=2, max_new_tokens=4, do_sample=False)
        assert torch.equal(mixed[i], alone[0])
    assert len({tuple(row.tolist()) for row in mixed}) == 3


def test_a_pipeline_inside_a_block(family: Family) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {f"w{i}": i for i in range(40)}
    core = Tokenizer(models.WordLevel(words, unk_token="w1"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = tf.PreTrainedTokenizerFast(tokenizer_object=core, pad_token="w0", padding_side="left")
    model = family.model("a", "b")
    logits(model, INPUTS, NAMES)
    pipe = tf.pipeline("text-generation", model=model, tokenizer=tokenizer, device="cpu")
    options = {"max_new_tokens": 5, "do_sample": False, "return_full_text": False}
    texts = ["w5 w6 w7"] * 3
    with model.adapters(NAMES):
        mixed = [answer[0]["generated_text"] for answer in pipe(texts, batch_size=3, **options)]
    alone = []
    for text, name in zip(texts, NAMES, strict=True):
        with model.adapters([name]):
            alone.append(pipe(text, **options)[0]["generated_text"])
    assert mixed == alone and len(set(mixed)) == 3


def test_every_pair_of_names_and_ids_is_checked_before_any_work(family: Family) -> None:
    model = family.model("a", "b")
    calls: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"adapter_names": ["a"]}, RuntimeError, "one adapter per (row|prompt), got 1 for 3"),
        ({"adapter_names": ["a", None, "bb"]}, KeyError, "no adapter is named 'bb'; did you mean"),
        ({"adapter_names": "a"}, TypeError, "must be a list"),
        ({"adapter_names": [1, 2, 0]}, TypeError, "names or None, got 1"),
        ({"adapter_ids": [1, 9, 0]}, KeyError, "no adapter has id 9"),
        ({"adapter_ids": torch.ones(3)}, TypeError, "must be integers"),
        ({"adapter_names": NAMES, "adapter_ids": [1, 0, 2]}, ValueError, "not both"),
    ]
    for arguments, kind, message in calls:
        for call in (model, lambda **k: model.generate(max_new_tokens=2, **k)):
            with pytest.raises(kind, match=message):
                call(input_ids=INPUTS, **arguments)
            assert not model._multilora.routing.open
    check(family, model)
    with torch.no_grad():
        by_id = model(input_ids=INPUTS, adapter_ids=torch.tensor([1, 0, 2])).logits
    assert_rows(by_id, family.truth(INPUTS, NAMES))
    assert_rows(logits(model, ids(3), ["__base__", "a", "b"]), family.truth(ids(3), [None, "a", "b"]))


def test_a_replaced_module_is_not_lost_in_silence(family: Family) -> None:
    model = family.model("a", "b", "c")
    check(family, model)
    layer, old = model.model.layers[0].self_attn, model.model.layers[0].self_attn.q_proj
    layer.q_proj = torch.nn.Linear(16, 16)
    with pytest.raises(RuntimeError, match=r"layers.0.self_attn.q_proj must be the module .* adapters \['a', 'b'\]"):
        logits(model, INPUTS, NAMES)
    assert not model._multilora.routing.open
    logits(model, INPUTS, ["c", None, "c"])
    with pytest.raises(RuntimeError, match="it was replaced by another"):
        model.load_adapter(str(family.paths["a"]), "again")
    model.delete_adapter(["a", "b"])
    model.load_adapter(str(family.paths["a"]), "a")
    base = copy.deepcopy(family.base)
    base.model.layers[0].self_attn.q_proj.load_state_dict(layer.q_proj.state_dict())
    assert_rows(logits(model, INPUTS, ["a", None, "c"]), family.truth(INPUTS, ["a", None, "c"], base))
    assert type(old) is torch.nn.Linear, "the old one was let go"
