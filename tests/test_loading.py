"""MultiLoRAModel.from_pretrained: from a folder, a loaded model, a PeftModel; and what the result is."""

from __future__ import annotations

import copy
import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from peft import LoraConfig, get_peft_model
from torch import Tensor

from hf_multilora import AdapterError, MultiLoRAModel, UnknownAdapterError
from tests.tiny import Family, assert_rows, bert, error, llama, logits, same_ids, save_adapter, snapshot

INPUTS = same_ids(3)
NAMES = ["a", None, "b"]


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Family:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("adapters")
    family = Family(llama(), folder, {"a": {"r": 3}, "b": {"r": 5}, "c": {"targets": ["o_proj"]}})
    family.base.save_pretrained(folder / "base")
    family.paths["base"] = folder / "base"
    return family


def check(family: Family, model: Any, names: Any = NAMES) -> None:
    assert_rows(logits(model, INPUTS, names), family.truth(INPUTS, names))


# -- from a folder ----------------------------------------------------------------------------------
def test_from_a_folder(family: Family) -> None:
    model = MultiLoRAModel.from_pretrained(family.paths["base"], [str(family.paths[n]) for n in "ab"], max_loras=2)
    assert isinstance(model, tf.LlamaForCausalLM) and [row["name"] for row in model.list_adapters()] == ["a", "b"]
    check(family, model)
    double = MultiLoRAModel.from_pretrained(str(family.paths["base"]), {"x": family.paths["a"]}, dtype=torch.float64)
    assert (
        double.dtype == torch.float64
        and error(logits(double, INPUTS, ["x"] * 3), family.truth(INPUTS, ["a"] * 3)) < 1e-5
    )


TASKS: list[tuple[list[str | None], Any, type[Any]]] = [
    ([], None, tf.BertForSequenceClassification),  # the config's architecture
    ([None], None, tf.BertForSequenceClassification),
    (["FEATURE_EXTRACTION"], None, tf.BertModel),
    (["TOKEN_CLS", "TOKEN_CLS"], None, tf.BertForTokenClassification),
    (["SEQ_CLS", None], None, tf.BertForSequenceClassification),
    (["QUESTION_ANS"], None, tf.BertForQuestionAnswering),
    (["SEQ_CLS", "TOKEN_CLS"], "AutoModelForMaskedLM", tf.BertForMaskedLM),
    (["SEQ_CLS"], tf.BertForTokenClassification, tf.BertForTokenClassification),
]


@pytest.mark.parametrize(("tasks", "auto_class", "kind"), TASKS)
def test_which_class_is_loaded(tasks: list[str | None], auto_class: Any, kind: type[Any], tmp_path: Path) -> None:
    base = bert()
    base.save_pretrained(tmp_path / "nested" / "base")
    adapters = {}
    for i, task in enumerate(tasks):
        prefix = "" if kind is tf.BertModel else "bert."
        folder = save_adapter(base.bert if not prefix else base, tmp_path / f"a{i}", targets=["query"], task_type=task)
        adapters[f"a{i}"] = str(folder)
    model = MultiLoRAModel.from_pretrained(
        tmp_path / "nested", adapters, auto_class=auto_class, subfolder="base", num_labels=3
    )
    assert type(model).__bases__[1] is kind and len(model.list_adapters()) == len(tasks)


def test_classes_that_cannot_be_told(family: Family, tmp_path: Path) -> None:
    one, two = (save_adapter(family.base, tmp_path / t, task_type=t) for t in ("CAUSAL_LM", "SEQ_CLS"))
    with pytest.raises(ValueError, match=r"must share one task_type, got \['CAUSAL_LM', 'SEQ_CLS'\]; pass auto_class"):
        MultiLoRAModel.from_pretrained(family.paths["base"], [str(one), str(two)])
    with pytest.raises(ValueError, match="auto_class must name a class of Transformers, got 'Auto'"):
        MultiLoRAModel.from_pretrained(family.paths["base"], auto_class="Auto")


# -- from a loaded model ----------------------------------------------------------------------------
def test_a_loaded_model_is_changed_in_place_and_stays_what_it_is(family: Family) -> None:
    base = copy.deepcopy(family.base)
    model = MultiLoRAModel.from_pretrained(base, {"a": str(family.paths["a"]), "b": str(family.paths["b"])})
    assert model is base and isinstance(model, MultiLoRAModel) and isinstance(model, tf.LlamaForCausalLM)
    assert isinstance(model, tf.PreTrainedModel) and isinstance(model, tf.GenerationMixin)
    kind = type(model)
    assert (kind.__name__, kind.__module__) == ("LlamaForCausalLM", tf.LlamaForCausalLM.__module__)
    assert kind.__qualname__ == "LlamaForCausalLM" and kind is type(family.model("c"))
    assert type(kind.from_pretrained(family.paths["base"])) is tf.LlamaForCausalLM
    check(family, model)


@pytest.mark.parametrize("bound", [False, True])
def test_the_signature_is_the_bases_and_the_adapters(family: Family, bound: bool) -> None:
    model = family.model("a")
    pair = (model, family.base) if bound else (type(model), type(family.base))
    own, base = ([*inspect.signature(each.forward).parameters.values()] for each in pair)
    extra = [p for p in own if p.name in ("adapter_names", "adapter_ids")]
    assert [p for p in own if p not in extra] == base
    assert [(p.name, p.kind, p.default) for p in extra] == [
        ("adapter_names", inspect.Parameter.KEYWORD_ONLY, None),
        ("adapter_ids", inspect.Parameter.KEYWORD_ONLY, None),
    ]


def test_bases_that_are_refused(family: Family) -> None:
    with pytest.raises(ValueError, match=r"MultiLoRAModel already; add adapters with load_adapter"):
        MultiLoRAModel.from_pretrained(family.model("a"))
    with pytest.raises(TypeError, match=r"base must be a folder, a Hub id, .* got Linear"):
        MultiLoRAModel.from_pretrained(torch.nn.Linear(2, 2))
    for settings in ({"dtype": torch.float16}, {"auto_class": "AutoModel"}):
        with pytest.raises(ValueError, match=f"must be left out, got \\['{next(iter(settings))}'\\]"):
            MultiLoRAModel.from_pretrained(copy.deepcopy(family.base), **settings)


def test_names(family: Family, tmp_path: Path) -> None:
    base = copy.deepcopy(family.base)
    save_adapter(base, tmp_path / "a")
    with pytest.raises(ValueError, match="are both called 'a'; pass a dict"):
        MultiLoRAModel.from_pretrained(base, [str(family.paths["a"]), str(tmp_path / "a")])
    with pytest.raises(TypeError, match="adapters must be a list of folders or Hub ids"):
        MultiLoRAModel.from_pretrained(base, str(family.paths["a"]))
    assert not isinstance(base, MultiLoRAModel)
    model = MultiLoRAModel.from_pretrained(base, [f"{family.paths['a']}/", family.paths["b"]])
    check(family, model)
    assert model.load_adapter(str(family.paths["c"])) == "c" and model.load_adapter(str(tmp_path / "a"), "d") == "d"


@pytest.mark.parametrize("when", ["in a list", "later"])
def test_a_failing_adapter_leaves_the_model_as_it_was(family: Family, tmp_path: Path, when: str) -> None:
    broken = save_adapter(family.base, tmp_path / "broken", targets=["k_proj", "up_proj"])
    config = json.loads((broken / "adapter_config.json").read_text())
    (broken / "adapter_config.json").write_text(json.dumps(config | {"use_dora": True}))
    if when == "in a list":
        base = copy.deepcopy(family.base)
        before = snapshot(base)
        with pytest.raises(AdapterError):
            MultiLoRAModel.from_pretrained(base, [str(family.paths["a"]), str(broken)])
        assert snapshot(base) == before
        return
    model = family.model("a", "b")
    check(family, model)
    before = snapshot(model)
    with pytest.raises(AdapterError):
        model.load_adapter(str(broken))
    with pytest.raises(FileNotFoundError):
        model.load_adapter(str(tmp_path / "nowhere"))
    assert snapshot(model) == before and len(model.list_adapters()) == 2
    check(family, model)


# -- from a PeftModel -------------------------------------------------------------------------------
def peft_model(family: Family, *settings: dict[str, Any]) -> Any:
    names = iter("xyz")
    model: Any = None
    for changes in settings:
        config = LoraConfig(**({"r": 3, "lora_alpha": 5, "target_modules": ["q_proj", "up_proj"]} | changes))
        if model is None:
            model = get_peft_model(copy.deepcopy(family.base), config, adapter_name=next(names))
        else:
            model.add_adapter(next(names), config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_" in name:
                weight.normal_(std=0.3)
    return model.eval()


def peft_rows(model: Any, names: Any) -> Tensor:
    rows = []
    for name in names:
        if name is None:
            with torch.no_grad(), model.disable_adapter():
                rows.append(model(input_ids=INPUTS[:1]).logits)
        else:
            model.set_adapter(name)
            with torch.no_grad():
                rows.append(model(input_ids=INPUTS[:1]).logits)
    return torch.cat(rows)


def test_a_peft_model_with_several_adapters(family: Family) -> None:
    source = peft_model(family, {}, {"r": 2, "use_rslora": True, "target_modules": ["v_proj", "lm_head"]})
    names = ["y", None, "x"]
    want = peft_rows(source, names)
    source.set_adapter("y")
    model = MultiLoRAModel.from_pretrained(source, {"a": str(family.paths["a"])})
    assert type(model).__bases__[1] is tf.LlamaForCausalLM
    assert_rows(logits(model, INPUTS, names), want)
    assert error(logits(model, INPUTS, ["a"] * 3), family.truth(INPUTS, ["a"] * 3)) < 1e-5
    assert model.active_adapters() == ["y"]
    with torch.no_grad():
        assert error(model(input_ids=INPUTS[:1]).logits, want[:1]) < 1e-5
    bare = model.unpatch()
    assert snapshot(bare).keys() == snapshot(family.base).keys()
    with torch.no_grad():
        assert torch.equal(bare(input_ids=INPUTS).logits, family.base(input_ids=INPUTS).logits)


@pytest.mark.parametrize(
    ("settings", "adapters", "kind"), [({"use_dora": True}, {}, AdapterError), ({}, {"x": "a"}, ValueError)]
)
def test_a_peft_model_that_cannot_be_taken_over_stays(family: Family, settings: Any, adapters: Any, kind: Any) -> None:
    source = peft_model(family, {}, settings)
    want = peft_rows(source, ["x", None, "y"])
    with pytest.raises(kind):
        MultiLoRAModel.from_pretrained(source, {name: str(family.paths[path]) for name, path in adapters.items()})
    assert torch.equal(peft_rows(source, ["x", None, "y"]), want)


def test_merged_adapters_of_a_peft_model_are_refused(family: Family) -> None:
    """Unloading would leave them in the weights, for all rows."""
    source = peft_model(family, {}, {})
    want = peft_rows(source, ["x", None, "y"])
    source.set_adapter("x")
    source.merge_adapter()
    with pytest.raises(ValueError, match=r"merged, \['x'\] are.*unmerge_adapter"):
        MultiLoRAModel.from_pretrained(source)
    source.unmerge_adapter()
    assert_rows(logits(MultiLoRAModel.from_pretrained(source), INPUTS, ["x", None, "y"]), want)


def test_disabled_adapters_of_a_peft_model_give_no_default(family: Family) -> None:
    source = peft_model(family, {})
    source.base_model.disable_adapter_layers()
    model = MultiLoRAModel.from_pretrained(source)
    assert model.active_adapters() == [] and [row["name"] for row in model.list_adapters()] == ["x"]


def test_a_base_with_adapters_of_peft_inside_is_refused(family: Family) -> None:
    base = copy.deepcopy(family.base)
    base.load_adapter(str(family.paths["a"]), "inside")
    with pytest.raises(ValueError, match=r"must hold no adapters of PEFT, model\.layers\.0\.self_attn\.q_proj does"):
        MultiLoRAModel.from_pretrained(base, {"b": str(family.paths["b"])})
    assert type(base) is tf.LlamaForCausalLM and not hasattr(base, "_multilora")


def test_a_shallow_copy_finds_no_adapters_after_unpatch(family: Family) -> None:
    """It shares modules and adapters with the model, so it would answer as the base."""
    model = family.model("a", "b")
    other = copy.copy(model)
    check(family, other)
    model.set_adapter("a")
    model.unpatch()
    with pytest.raises(UnknownAdapterError):
        logits(other, INPUTS, NAMES)
    with torch.no_grad():
        assert torch.equal(other(input_ids=INPUTS).logits, family.base(input_ids=INPUTS).logits)


# -- narrowing --------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("targets", "served"),
    [
        (["q_proj", "o_proj"], {"q": True, "head": False, "mlp": False}),
        (r".*layers\.\d+\.mlp\..*", {"q": False, "head": False, "mlp": True}),
        ("all-linear", {"q": True, "head": False, "mlp": True}),
        (None, {"q": True, "head": True, "mlp": True}),
    ],
)
def test_target_modules_narrow_what_is_served(tmp_path: Path, targets: Any, served: dict[str, bool]) -> None:
    """An adapter that trained more than the deployment allows is refused as a whole, never served in part."""
    torch.manual_seed(0)
    own = Family(llama(), tmp_path, {"q": {"targets": ["q_proj"]}, "head": {"targets": ["lm_head", "q_proj"]},
                                     "mlp": {"targets": ["up_proj"]}})  # fmt: skip
    model = MultiLoRAModel.from_pretrained(copy.deepcopy(own.base), target_modules=targets)
    for name, right in served.items():
        if right:
            model.load_adapter(str(own.paths[name]), name)
            assert_rows(logits(model, INPUTS, [name, None, name]), own.truth(INPUTS, [name, None, name]))
        else:
            with pytest.raises(AdapterError, match="target_modules"):
                model.load_adapter(str(own.paths[name]), name)
