"""Heads of adapters beside everything a model goes through: generation, defaults, copies, moves, traces, planning."""

from __future__ import annotations

import copy
import os
import pickle
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from peft import PeftModel
from torch._dynamo.testing import CompileCounter

from hf_multilora import AdapterError, MultiLoRAModel, RoutingError
from hf_multilora.heads import _counts_by_config
from hf_multilora.layers import saved
from tests.heads import VOCAB, Heads, Made, bert, gemma, ids, labels, llama, roberta, vocabulary
from tests.test_heads import assert_rows

SEQ = {"task_type": "SEQ_CLS"}
NAMES = ["a", None, "wide", "plain"]


@pytest.fixture(scope="module")
def scores(tmp_path_factory: pytest.TempPathFactory) -> Heads:
    torch.manual_seed(0)
    adapters = {"a": Made(SEQ), "b": Made(SEQ), "wide": Made(SEQ, labels("score", 5)), "plain": Made({})}
    return Heads(llama(), tmp_path_factory.mktemp("scores"), adapters)


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Heads:
    """Adapters that save embedding and head, one with a larger vocabulary."""
    torch.manual_seed(0)
    full = {"modules_to_save": ["embed_tokens", "lm_head"]}
    adapters = {"a": Made(full), "wide": Made(full, vocabulary(47)), "plain": Made({})}
    return Heads(llama(tf.LlamaForCausalLM), tmp_path_factory.mktemp("words"), adapters)


def rows_of(inputs: torch.Tensor) -> list[dict[str, torch.Tensor]]:
    return [{"input_ids": row[None]} for row in inputs]


@torch.no_grad()
def check(heads: Heads, model: Any, names: Any = NAMES) -> None:
    inputs = ids(1).repeat(len(names), 1)
    want = heads.truth(rows_of(inputs), names, "logits")
    got = model(input_ids=inputs, adapter_names=names).logits
    assert_rows(got, want)
    with pytest.raises(AssertionError):
        assert_rows(list(got.roll(1, 0)), want)


@pytest.mark.parametrize("beams", [1, 3])
def test_generate_with_vocabularies_of_different_sizes(words: Heads, beams: int) -> None:
    model, inputs = words.model(), ids(4)
    inputs[2, -1] = VOCAB + 3  # the larger vocabulary's own
    settings = {"max_new_tokens": 8, "do_sample": False, "num_beams": beams, "eos_token_id": None}
    run = partial(model.generate, inputs, attention_mask=torch.ones_like(inputs), adapter_names=NAMES, **settings)
    if beams > 1 and _counts_by_config(type(model)):
        with pytest.raises(ValueError, match=r"as wide as the base's vocabulary, 40, got \[40, 47\]"):
            run()
        return
    got = run()
    for row, name, prompt in zip(got, NAMES, inputs, strict=True):
        alone = words.alone[name].generate(
            input_ids=prompt[None], attention_mask=torch.ones_like(prompt[None]), **settings
        )
        assert row.tolist() == alone[0].tolist(), name
    assert len({tuple(row.tolist()[5:]) for row in got}) > 1


def test_an_id_that_only_another_row_has_is_an_error(words: Heads) -> None:
    model, inputs = words.model(), torch.tensor([[3, VOCAB + 2]] * 2)
    with torch.no_grad():
        assert model(input_ids=inputs, adapter_names=["wide", "wide"]).logits.shape[-1] == 47
        for names in (["wide", "a"], ["wide", None], ["a", "a"], [None, None], ["wide", "plain"]):
            with pytest.raises(IndexError):
                model(input_ids=inputs, adapter_names=names)
    check(words, model)


def test_labels_and_widths(scores: Heads) -> None:
    model, inputs = scores.model(), ids(4)
    logits = model(input_ids=inputs, adapter_names=NAMES).logits
    assert logits.shape == (4, 5)
    split = model.split_logits(logits, NAMES)
    assert [row.shape[0] for row in split] == [2, 2, 5, 2]
    assert all(bool(row.isfinite().all()) for row in split)
    assert list(model.id2label("wide")) == list(range(5)) and model.id2label("wide")[4] == "LABEL_4"
    assert model.id2label("plain") == model.id2label(None) == model.config.id2label
    assert model.split_logits(model(input_ids=inputs[:1], adapter_names=["a"]).logits, ["a"])[0].shape == (2,)
    with pytest.raises(RoutingError, match="one row per adapter name"):
        model.split_logits(logits, ["a"])


def test_a_loss_needs_heads_as_wide_as_the_bases(scores: Heads) -> None:
    model, inputs = scores.model(), ids(5)
    for width, names in ((1, ["wide"]), (5, ["a", "wide", None, "plain", "wide"])):
        with pytest.raises(ValueError, match=r"5 for adapter 'wide'.*row_loss"):
            model(input_ids=inputs[:width], labels=torch.zeros(width, dtype=torch.int64), adapter_names=names)
    model.set_adapter("wide")
    with pytest.raises(ValueError, match="row_loss"):
        model(input_ids=inputs, labels=torch.zeros(5, dtype=torch.int64))
    with model.adapters(["a", None, "a", "plain", None]):
        assert model(input_ids=inputs, labels=torch.zeros(5, dtype=torch.int64)).loss.isfinite()
    with pytest.raises(ValueError, match="row_loss"), model.adapters(["wide"] * 5):
        model(input_ids=inputs, labels=torch.zeros(5, dtype=torch.int64))


def test_the_default_has_its_head(scores: Heads) -> None:
    model, inputs = scores.model(), ids(2)
    for name in ("wide", "a", None):
        model.set_adapter(name)
        with torch.no_grad():
            assert_rows(model(input_ids=inputs).logits, scores.truth(rows_of(inputs), [name] * 2, "logits"))


@pytest.mark.parametrize("family", ["scores", "words"])
def test_copies_and_moves(family: str, request: pytest.FixtureRequest) -> None:
    heads = request.getfixturevalue(family)
    model = heads.model()
    check(heads, model)
    other = copy.deepcopy(model)
    model.delete_adapter("a")
    check(heads, other)
    check(heads, pickle.loads(pickle.dumps(other)))
    assert other.state_dict().keys() == heads.base.state_dict().keys()
    assert all(torch.equal(v, heads.base.state_dict()[k]) for k, v in other.state_dict().items())
    check(heads, other.double().float())


def test_what_is_saved_in_full_keeps_the_dtype_of_the_base(scores: Heads) -> None:
    model = scores.model(lora_dtype="float64")
    check(scores, model)
    assert model.score._saved.a.dtype == torch.float32 and model.model.layers[0].self_attn.q_proj._lora.a.dtype == (
        torch.float64
    )


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("family", ["scores", "words"])
def test_one_product_per_adapter(
    family: str, backend: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where one with the rows of all slots would be too large, as with vocabularies."""
    monkeypatch.setattr(saved, "DENSE_WORK", 0)
    heads = request.getfixturevalue(family)
    if backend == "triton" and "TRITON_INTERPRET" not in os.environ:
        pytest.skip("Triton runs on CPU tensors in its interpreter only; tests/gpu runs this on a device")
    model = heads.model(backend=backend)
    check(heads, model)
    check(heads, model, ["wide", "a", "a", "wide"])


def test_a_failed_load_leaves_no_site(scores: Heads, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    model = scores.model("plain")
    folder = tmp_path / "bad"
    folder.mkdir()
    tensors = load_file(scores.folder / "wide" / "adapter_model.safetensors")
    key = next(key for key in tensors if "score" in key)
    save_file(tensors | {key: tensors[key].fill_(torch.nan)}, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text((scores.folder / "wide" / "adapter_config.json").read_text())
    sites = set(model._multilora.sites)
    with pytest.raises(ValueError, match="NaN"):
        model.load_adapter(str(folder), "bad")
    assert set(model._multilora.sites) == sites and not hasattr(model.score, "_saved")
    model.load_adapter(str(scores.folder / "wide"), "wide")
    check(scores, model, ["wide", None, "plain"])


@pytest.mark.parametrize("family", ["scores", "words"])
def test_one_trace_serves_every_mix(family: str, request: pytest.FixtureRequest) -> None:
    heads = request.getfixturevalue(family)
    model, inputs = heads.model(), ids(1).repeat(4, 1)
    traces = CompileCounter()
    run = torch.compile(lambda x: model(input_ids=x, use_cache=False).logits, backend=traces, fullgraph=True)
    with torch.no_grad():
        for names in (NAMES, NAMES[::-1], ["a"] * 4, [None] * 4, ["wide", "wide", None, "a"]):
            with model.adapters(names):
                got = run(inputs)
            assert_rows(got, heads.truth(rows_of(inputs), names, "logits"))
            assert got.shape[-1] == (5 if family == "scores" else 47), "as wide as the widest slot"
    assert traces.frame_count == 1


def test_a_traced_norm(tmp_path: Path) -> None:
    torch.manual_seed(0)
    heads = Heads(bert(), tmp_path, {"a": Made({"modules_to_save": ["LayerNorm"]} | SEQ), "plain": Made({})})
    model, inputs = heads.model(), ids(1).repeat(3, 1)
    run = torch.compile(lambda x: model(input_ids=x).logits, backend="eager", fullgraph=True)
    with torch.no_grad():
        for names in (["a", None, "plain"], [None, "a", "a"]):
            with model.adapters(names):
                assert_rows(run(inputs), heads.truth(rows_of(inputs), names, "logits"))
        assert_rows(model(input_ids=inputs).logits, heads.truth(rows_of(inputs), [None] * 3, "logits"))


def test_a_peft_model_is_taken_over_with_its_heads(scores: Heads) -> None:
    base = copy.deepcopy(scores.base)
    peft_model = PeftModel.from_pretrained(base, str(scores.folder / "a"), adapter_name="a")
    peft_model.load_adapter(str(scores.folder / "b"), "b")  # PEFT takes no adapter without a head beside it
    peft_model.set_adapter("b")
    model = MultiLoRAModel.from_pretrained(peft_model, {n: str(scores.folder / n) for n in ("wide", "plain")})
    assert torch.equal(model.score.weight, scores.base.score.weight), "the base's own head, not the active copy"
    assert model.active_adapters() == ["b"]
    model.set_adapter(None)
    check(scores, model)
    check(scores, model, ["b", "a", None])


def test_a_composite_head_of_a_peft_model(tmp_path: Path) -> None:
    torch.manual_seed(0)
    heads = Heads(roberta(), tmp_path, {"a": Made(SEQ), "plain": Made({})})
    peft_model = PeftModel.from_pretrained(copy.deepcopy(heads.base), str(heads.folder / "a"), adapter_name="a")
    model = MultiLoRAModel.from_pretrained(peft_model, {"plain": str(heads.folder / "plain")})
    model.set_adapter(None)
    check(heads, model, ["a", None, "plain"])


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Heads, str]:
    """A checkpoint without a head, and adapters of which two bring one."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("encoder")
    bert(tf.BertModel).save_pretrained(folder / "base")
    base = tf.BertForSequenceClassification.from_pretrained(folder / "base", num_labels=8)
    adapters = {"eight": Made(SEQ), "three": Made(SEQ, labels("classifier", 3)), "plain": Made({})}
    return Heads(base, folder, adapters), str(folder / "base")


def test_a_base_without_a_head(encoder: tuple[Heads, str]) -> None:
    heads, base = encoder
    paths = {name: str(heads.folder / name) for name in ("eight", "three", "plain")}
    model, inputs = MultiLoRAModel.from_pretrained(base, paths, auto_class="AutoModelForSequenceClassification"), ids(3)
    assert model.config.num_labels == 8, "as many as the first adapter's"
    plan = MultiLoRAModel.plan(base, paths, auto_class="AutoModelForSequenceClassification")
    assert plan.per_module["classifier:saved"].rank_rows == 11
    assert plan.base_bytes == sum(parameter.nbytes for parameter in model.parameters())
    names = ["three", "eight", "eight"]
    with torch.no_grad():
        assert_rows(model(input_ids=inputs, adapter_names=names).logits, heads.truth(rows_of(inputs), names, "logits"))
        for wrong, who in ((["eight", None], "the base"), (["plain", "eight"], "adapter 'plain'")):
            with pytest.raises(RoutingError, match=f"checkpoint has none, and rows of {who}"):
                model(input_ids=inputs[:2], adapter_names=wrong)
        with pytest.raises(RoutingError, match="the base"):
            model(input_ids=inputs)
        with pytest.raises(RoutingError, match="the base"), model.adapters([None]):
            pass
        model.set_adapter("three")
        assert_rows(model(input_ids=inputs).logits, heads.truth(rows_of(inputs), ["three"] * 3, "logits"))
    assert model.verify("three") and model.verify("eight")
    with pytest.raises(RoutingError, match="the base"):
        model.set_adapter(None)
        model(input_ids=inputs)


def test_what_an_adapter_does_not_bring_of_a_fresh_head_is_an_error(tmp_path: Path) -> None:
    """PEFT saves `classifier` unless told more, and leaves a pooler that the checkpoint lacks to chance."""
    torch.manual_seed(0)
    tf.BertModel(bert().config, add_pooling_layer=False).save_pretrained(tmp_path / "base")
    base = tf.BertForSequenceClassification.from_pretrained(tmp_path / "base")
    whole = {"modules_to_save": ["pooler", "classifier"]}
    heads = Heads(base, tmp_path, {"half": Made(SEQ), "whole": Made(SEQ | whole)})
    paths = {name: str(tmp_path / name) for name in ("half", "whole")}
    model, inputs = MultiLoRAModel.from_pretrained(str(tmp_path / "base"), paths), ids(2)
    with torch.no_grad():
        got = model(input_ids=inputs, adapter_names=["whole"] * 2).logits
        assert_rows(got, heads.truth(rows_of(inputs), ["whole"] * 2, "logits"))
        with pytest.raises(RoutingError, match=r"its bert.pooler.dense from its adapter.*rows of adapter 'half'"):
            model(input_ids=inputs, adapter_names=["whole", "half"])


def test_a_capped_head_keeps_its_vocabulary(tmp_path: Path) -> None:
    """The cap would make numbers of the fill."""
    torch.manual_seed(0)
    full = {"modules_to_save": ["embed_tokens", "lm_head"]}
    heads = Heads(gemma(), tmp_path, {"wide": Made(full, vocabulary(47))})
    with pytest.raises(AdapterError, match="must have 40 rows as the base's, got 47"):
        heads.model()


def test_a_plan_counts_heads(scores: Heads) -> None:
    model = scores.model(max_loras=2)
    check(scores, model, ["a", "wide", None])
    check(scores, model, ["wide", "plain", None])
    paths = {name: str(scores.folder / name) for name in ("a", "wide", "plain")}
    plan = MultiLoRAModel.plan(copy.deepcopy(scores.base), paths, max_loras=2)
    assert plan.per_module["score:saved"].rank_rows == 7
    assert plan.device_bytes == model.memory_report().device_bytes
