"""Reranker on plain Transformers: each pair's score is that of its adapter's merged copy, for classifiers and for
language models that answer yes or no.
"""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf
from sentence_transformers import CrossEncoder
from torch import Tensor, nn

from hf_multilora import MultiLoRAModel, RoutingError, UnknownAdapterError
from hf_multilora.integrations import yes_no
from hf_multilora.integrations.reranker import Reranker
from hf_multilora.integrations.yes_no import TEMPLATE, Prompts, answer_logits, padded
from tests.integrations.texts import DECODER, KINDS, NAMES, PAIRS, Bed, Kind, add_head, bert, qwen3, tokenizer
from tests.tiny import error, save_adapter

OTHERS = ["b", "a", None, "c", "a"]
PROMPT = {"template": "w30 {instruction} w31 {query} w32 {document} w33", "instruction": "w29"}
NO, YES = 5, 4


def near(got: Any, want: Any) -> float:
    return error(torch.as_tensor(np.asarray(got)), torch.as_tensor(np.asarray(want)))


def reranker(made: Bed, *names: str, settings: dict[str, Any] | None = None, **how: Any) -> Reranker:
    chosen = {name: made.paths[name] for name in names or made.paths}
    model = MultiLoRAModel.from_pretrained(copy.deepcopy(made.base), chosen, **(settings or {}))
    return Reranker(model, made.tokenizer, **how)


# --- classifiers: as CrossEncoder


def truth(made: Bed, names: Any, **options: Any) -> list[Any]:
    """Each pair alone, by sentence-transformers."""
    plain = [made.plain(CrossEncoder, name) for name in names]
    return [one.predict([pair], **options)[0] for one, pair in zip(plain, PAIRS, strict=True)]


@pytest.mark.parametrize(("kind", "labels"), [("bert", 1), ("bert", 3), ("roberta", 1), ("qwen3", 1), ("qwen3", 3)])
@pytest.mark.parametrize("side", ["left", "right"])
def test_each_pair_gets_its_adapter(tmp_path: Path, kind: str, labels: int, side: str) -> None:
    made = Bed(tmp_path, KINDS[kind], num_labels=labels)
    made.tokenizer.padding_side = side
    ranker, want = reranker(made), np.stack(truth(made, NAMES))
    for size in (2, 5):
        got = ranker.predict(PAIRS, NAMES, batch_size=size)
        assert got.shape == want.shape == ((5,) if labels == 1 else (5, labels)) and got.dtype == np.float32
        assert near(got, want) < 1e-5
    assert near(ranker.predict(PAIRS, OTHERS, batch_size=2), want) > 1e-3, "adapters do not matter"


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Bed:
    return Bed(tmp_path_factory.mktemp("one"), KINDS["bert"], num_labels=1)


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> Bed:
    return Bed(tmp_path_factory.mktemp("heads"), KINDS["bert"], num_labels=2, heads={"a": 3, "b": 1})


@pytest.fixture(scope="module")
def ranker(one: Bed) -> Reranker:
    return reranker(one)


@pytest.fixture(autouse=True)
def _the_base_is_default(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "ranker" in request.fixturenames:
        request.getfixturevalue("ranker").model.set_adapter(None)


OPTIONS: dict[str, dict[str, Any]] = {
    "tensor": {"convert_to_tensor": True},
    "list": {"convert_to_numpy": False},
    "activation": {"activation_fn": nn.Tanh()},
    "softmax": {"apply_softmax": True},
    "progress": {"show_progress_bar": True, "batch_size": 2},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_options(one: Bed, ranker: Reranker, options: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    got = ranker.predict(PAIRS, NAMES, **options)
    assert ("Batches" in capsys.readouterr().err) == ("show_progress_bar" in options)
    form = one.plain(CrossEncoder, None).predict(PAIRS, **options)
    assert type(got) is type(form) and {(g.dtype, g.shape) for g in got} == {(f.dtype, f.shape) for f in form}
    assert near(got, np.stack(truth(one, NAMES, **options))) < 1e-5 < near(got, form)


def test_single_pairs_the_default_and_the_base(one: Bed, ranker: Reranker) -> None:
    want = {name: np.stack(truth(one, [name] * 5)) for name in ("a", "b", None)}
    assert near(ranker.predict(PAIRS[2], adapter_name="a"), want["a"][2]) < 1e-5
    assert near(ranker.predict(list(PAIRS[2]), ["a"]), want["a"][2]) < 1e-5
    assert ranker.predict([], []).shape == ranker.predict([], convert_to_tensor=True).shape == (0,)
    assert near(ranker.predict(PAIRS), want[None]) < 1e-5
    ranker.model.set_adapter("b")
    assert near(ranker.predict(PAIRS), want["b"]) < 1e-5 < near(want["a"], want["b"])
    assert near(ranker.predict(PAIRS, adapter_name="__base__"), want[None]) < 1e-5


def test_rank(one: Bed, ranker: Reranker) -> None:
    query, documents = "w1", [document for _, document in PAIRS]
    for name in ("a", "b", None):
        got = ranker.rank(query, documents, "__base__" if name is None else name, batch_size=2)
        want = one.plain(CrossEncoder, name).rank(query, documents)
        assert [row["corpus_id"] for row in got] == [row["corpus_id"] for row in want]
        assert [row["score"] for row in got] == pytest.approx([row["score"] for row in want], rel=1e-4)
    ranker.model.set_adapter("a")
    want = one.plain(CrossEncoder, "a").rank(query, documents, top_k=2, return_documents=True)
    got = ranker.rank(query, documents, top_k=2, return_documents=True)
    assert [(row["corpus_id"], row["text"]) for row in got] == [(row["corpus_id"], row["text"]) for row in want]


@pytest.mark.parametrize("kind", ["bert", "roberta", "qwen3"])
def test_rows_of_different_heads_have_their_own_widths(tmp_path: Path, kind: str) -> None:
    made = Bed(tmp_path, KINDS[kind], num_labels=2, heads={"a": 3, "b": 1})
    ranker = reranker(made)
    for options in ({}, {"apply_softmax": True}, {"activation_fn": nn.Tanh()}):
        want = truth(made, NAMES, **options)
        assert [w.shape for w in want] == [(3,), (2,), (), (3,), (2,)]
        for size in (2, 5):
            got = ranker.predict(PAIRS, NAMES, batch_size=size, **options)
            assert type(got) is list and {type(g) for g in got} == {np.ndarray}
            for g, w in zip(got, want, strict=True):
                assert g.shape == w.shape and abs(g - w).max() < 1e-5
    assert {type(row) for row in ranker.predict(PAIRS, NAMES, convert_to_tensor=True)} == {Tensor}
    assert near(ranker.predict(PAIRS, adapter_name="a"), np.stack(truth(made, ["a"] * 5))) < 1e-5
    for name, labels in (("a", 3), ("c", 2), (None, 2)):
        with pytest.raises(ValueError, match=f"has {labels} labels"):
            ranker.rank("w1", ["w2"], name)
    assert len(ranker.rank("w1", ["w2"], "b")) == 1


def test_more_adapters_in_a_batch_than_slots(one: Bed) -> None:
    ranker = reranker(one, settings={"max_loras": 1})
    assert near(ranker.predict(PAIRS, NAMES), np.stack(truth(one, NAMES))) < 1e-5


def test_the_activation_that_a_config_names(one: Bed) -> None:
    want = np.stack(truth(one, NAMES, activation_fn=nn.Identity()))
    for settings in (
        {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}},
        {"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"},
    ):
        ranker = reranker(one)
        ranker.model.config.update(settings)
        assert near(ranker.predict(PAIRS, NAMES), want) < 1e-5
    ranker.model.config.update({"sbert_ce_default_activation_function": "their.code.Score"})
    with pytest.raises(ValueError, match=r"their\.code\.Score"):
        ranker.predict(PAIRS, NAMES)
    ranker.activation_fn = nn.Identity()
    assert near(ranker.predict(PAIRS, NAMES), want) < 1e-5


def test_a_template_for_a_classifier(tmp_path: Path) -> None:
    """Converted Qwen3-Rerankers are classifiers with the prompt."""
    made = Bed(tmp_path, KINDS["qwen3"], num_labels=1)
    ranker = reranker(made, **PROMPT)
    want = []
    for name, (query, document) in zip(NAMES, PAIRS, strict=True):
        ids = made.tokenizer(f"w30 w29 w31 {query} w32 {document} w33", add_special_tokens=False, return_tensors="pt")
        want.append(made.merged(name)(input_ids=ids["input_ids"]).logits.sigmoid().item())
    assert near(ranker.predict(PAIRS, NAMES, batch_size=3), np.array(want)) < 1e-5
    assert near(ranker.predict(PAIRS, OTHERS, batch_size=3), np.array(want)) > 1e-3


# --- language models that answer yes or no


@torch.no_grad()
def answers(model: Any, words: Any, query: str, document: str) -> Tensor:
    """Logits of no and yes after one prompt, without padding."""
    ids = words(f"w30 w29 w31 {query} w32 {document} w33", add_special_tokens=False, return_tensors="pt")["input_ids"]
    return model(input_ids=ids).logits[0, -1, [NO, YES]]


def asked(made: Bed, names: Any) -> Tensor:
    models = {name: made.merged(name) for name in set(names)}
    return torch.stack([answers(models[n], made.tokenizer, *pair) for n, pair in zip(names, PAIRS, strict=True)])


SMALL = {"vocab_size": 40, "num_hidden_layers": 2, "initializer_range": 0.3, "pad_token_id": 0}
GPT = SMALL | {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 30}
LLMS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "tied": (lambda: qwen3(tf.Qwen3ForCausalLM, tie_word_embeddings=True), ("q_proj", "down_proj")),
    "untied": (lambda: qwen3(tf.Qwen3ForCausalLM, tie_word_embeddings=False), ("q_proj", "down_proj")),
    "soft caps": (
        lambda: tf.Gemma2ForCausalLM(tf.Gemma2Config(**(DECODER | {"final_logit_softcapping": 0.5}))),
        ("q_proj", "v_proj"),
    ),
    "scaled": (lambda: tf.CohereForCausalLM(tf.CohereConfig(**DECODER, logit_scale=0.3)), ("q_proj", "v_proj")),
    "divided": (lambda: tf.GraniteForCausalLM(tf.GraniteConfig(**DECODER, logits_scaling=3.0)), ("q_proj", "v_proj")),
    "a head with bias": (lambda: tf.PhiForCausalLM(tf.PhiConfig(**DECODER)), ("q_proj", "dense")),
    "learned positions": (lambda: tf.GPT2LMHeadModel(tf.GPT2Config(**GPT)), ("c_attn", "c_fc")),
}


def llm_bed(folder: Path, name: str) -> Bed:
    build, targets = LLMS[name]
    made = Bed(folder, Kind(build, targets, None))
    for key, parameter in made.base.named_parameters():
        if key.endswith("lm_head.bias"):
            torch.nn.init.normal_(parameter)
    made.base.eval()
    return made


@pytest.mark.parametrize("name", LLMS)
def test_yes_and_no_of_a_mixed_batch(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = llm_bed(tmp_path, name)
    ranker, want = reranker(made, **PROMPT), asked(made, NAMES)
    cut = spy(monkeypatch)
    for size in (2, 5):
        got = ranker.predict(PAIRS, NAMES, batch_size=size)
        assert got.shape == (5,) and near(got, want.softmax(-1)[:, 1]) < 1e-5
    assert len(cut) == 4, "the head is not cut to two rows"
    assert near(ranker.predict(PAIRS, OTHERS, batch_size=2), want.softmax(-1)[:, 1]) > 1e-3
    odds = ranker.predict(PAIRS, NAMES, activation_fn=nn.Identity(), convert_to_tensor=True)
    assert near(odds, want[:, 1] - want[:, 0]) < 1e-4
    prompts = [ranker.prompts.ids(*pair) for pair in PAIRS]  # type: ignore[union-attr]
    batch = padded(prompts, 0, "left")
    mask = batch["attention_mask"]
    positions = {"position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}
    with torch.no_grad():
        two = answer_logits(ranker.model, batch, [NO, YES], NAMES)
        full = ranker.model(**batch, **positions, adapter_names=NAMES).logits[:, -1]
    assert full.shape[1] == made.base.config.vocab_size and near(two, full[:, [NO, YES]]) < 1e-6


def spy(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry per pass through a head that is cut."""
    calls, real = [], yes_no._some_rows
    monkeypatch.setattr(yes_no, "_some_rows", lambda *args: calls.append(1) or real(*args))
    return calls


def test_the_built_case_of_a_yes_no_reranker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Rows without tokenizer, as ids: long and short, left padded, base rows among them, passes of two adapters."""
    made = llm_bed(tmp_path, "tied")
    model = reranker(made, **PROMPT, settings={"max_loras": 2}).model
    doc = [16, 4, 22, 38, 39, 28, 12, 11, 35, 32, 25, 35]
    rows = [(doc, "a"), (doc, "b"), (doc, "c"), (doc, None), (doc[:5], "b"), (doc[:3], "a"), (doc[:8], None)]
    names = [name for _, name in rows]
    with torch.no_grad():
        got = answer_logits(model, padded([ids for ids, _ in rows], 0, "left"), [NO, YES], names)
        want = [made.merged(name)(input_ids=torch.tensor([ids])).logits[0, -1, [NO, YES]] for ids, name in rows]
    assert near(got, torch.stack(want)) < 1e-5
    assert near(got[:4], got[:4].roll(1, 0)) > 1e-3


@pytest.mark.parametrize("how", ["lora", "saved", "embedding"])
def test_a_head_that_an_adapter_trains_is_left_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    made = llm_bed(tmp_path, "untied" if how == "saved" else "tied")
    targets = {"lora": ("q_proj", "lm_head"), "saved": ("q_proj",), "embedding": ("q_proj", "embed_tokens")}[how]
    path = save_adapter(made.base, tmp_path / "d", seed=9, targets=targets)
    if how == "saved":
        add_head(made.base, path, "lm_head", made.base.config.vocab_size, seed=9)
    made.paths["d"] = str(path)
    made.heads |= {"d": 40} if how == "saved" else {}
    made = copy.copy(made)
    made.kind = Kind(made.kind.build, made.kind.targets, "lm_head")
    cut = spy(monkeypatch)
    names = ["d", "a", None, "d", "b"]
    got = reranker(made, **PROMPT).predict(PAIRS, names, batch_size=2)
    assert near(got, asked(made, names).softmax(-1)[:, 1]) < 1e-5
    assert bool(cut) == (how == "embedding")
    assert near(got, asked(made, ["a", "a", None, "a", "b"]).softmax(-1)[:, 1]) > 1e-3


def test_other_heads_are_left_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = llm_bed(tmp_path, "tied")
    ranker, want = reranker(made, **PROMPT), asked(made, NAMES).softmax(-1)[:, 1]
    cut = spy(monkeypatch)
    seen: list[int] = []
    hook = ranker.model.lm_head.register_forward_hook(lambda module, args, output: seen.append(output.shape[-1]))
    assert near(ranker.predict(PAIRS, NAMES), want) < 1e-5 and not cut and seen == [made.base.config.vocab_size]
    hook.remove()
    own = ranker.model.lm_head.forward
    ranker.model.lm_head.forward = lambda x: own(x)
    assert near(ranker.predict(PAIRS, NAMES), want) < 1e-5 and not cut and "forward" in vars(ranker.model.lm_head)


def test_the_head_is_whole_again_after_an_error_and_for_other_threads(tmp_path: Path) -> None:
    made = llm_bed(tmp_path, "tied")
    ranker = reranker(made, **PROMPT)
    inputs = {"input_ids": torch.tensor([[7, 8, 9]])}
    with torch.no_grad():
        want = ranker.model(**inputs, adapter_names=["a"]).logits
    layer = ranker.model.model.layers[1]
    hook = layer.register_forward_pre_hook(lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        ranker.predict(PAIRS, NAMES)
    hook.remove()
    assert "forward" not in vars(ranker.model.lm_head)
    entered, logits = threading.Event(), list[Tensor]()

    def call() -> None:
        entered.wait(10)
        with torch.no_grad():
            logits.append(ranker.model(**inputs, adapter_names=["a"]).logits)

    def slow(*args: Any) -> None:
        entered.set()
        if threading.current_thread() is not other:
            other.join(0.2)  # it must wait for the whole batch

    other = threading.Thread(target=call)
    hook = layer.register_forward_pre_hook(slow)
    other.start()
    ranker.predict(PAIRS, NAMES)
    other.join(10)
    hook.remove()
    assert len(logits) == 1 and near(logits[0], want) < 1e-6


def test_prompts() -> None:
    words = tokenizer()
    prompts = Prompts(words, "w1 {query} w2 {document} w3 {query}", "w9", max_length=8)
    assert words.convert_ids_to_tokens(prompts.ids("w4", "w5")) == ["w1", "w4", "w2", "w5", "w3", "w4"]
    long = prompts.ids("w4", "w5 w6 w7 w8 w10 w11")
    assert words.convert_ids_to_tokens(long) == ["w1", "w4", "w2", "w5", "w6", "w7", "w3", "w4"], "documents are cut"
    with pytest.raises(ValueError, match=r"leave room for its document in max_length=8 tokens, .* have 11"):
        prompts.ids("w4 w5 w6 w7", "w5")
    literal = Prompts(words, "{query} {document}", "", 9).ids("{document} w4", "{query} w5")
    assert words.convert_ids_to_tokens(literal) == ["[UNK]", "w4", "[UNK]", "w5"], "texts are no templates"
    for wrong in ("{query}", "{document}", "{query} {document} {document}"):
        with pytest.raises(ValueError, match=r"must hold \{document\} once, and \{query\}"):
            Prompts(words, wrong, "", 9)
    before, after = TEMPLATE.split("<Document>: {document}")
    assert before.endswith("<|im_start|>user\n<Instruct>: {instruction}\n<Query>: {query}\n")
    assert after == "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


REFUSED: dict[str, tuple[Any, dict[str, Any], type[Exception], str]] = {
    "yes for a classifier": (bert, {"yes": "w1"}, ValueError, "is a classifier"),
    "instruction alone": (bert, {"instruction": "w1"}, ValueError, "template"),
    "no head": (functools.partial(bert, tf.BertModel), {}, TypeError, "got BertModel"),
    "other padding": (functools.partial(bert, pad_token_id=2), {}, ValueError, "ids 0 and 2"),
    "unknown answer": (functools.partial(qwen3, tf.Qwen3ForCausalLM), {"yes": "true"}, ValueError, "'true' is"),
    "two tokens": (functools.partial(qwen3, tf.Qwen3ForCausalLM), {"no": "w1 w2"}, ValueError, "'w1 w2' is"),
}


@pytest.mark.parametrize(("build", "how", "kind", "message"), REFUSED.values(), ids=REFUSED)
def test_what_is_refused(build: Any, how: dict[str, Any], kind: Any, message: str) -> None:
    model = MultiLoRAModel.from_pretrained(build(), [])
    with pytest.raises(kind, match=message):
        Reranker(model, tokenizer(), **how)


def test_other_models_are_refused() -> None:
    with pytest.raises(TypeError, match=r"MultiLoRAModel\.from_pretrained"):
        Reranker(bert(), tokenizer())
    t5 = tf.T5ForConditionalGeneration(tf.T5Config(d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2))
    with pytest.raises(TypeError, match="T5ForConditionalGeneration"):
        Reranker(MultiLoRAModel.from_pretrained(t5, []), tokenizer())


CALLS: dict[str, tuple[type[Exception], str, dict[str, Any]]] = {
    "too few": (RoutingError, "one adapter per pair, got 2 for 5", {"adapter_names": ["a", None]}),
    "unknown": (UnknownAdapterError, "'law'", {"adapter_name": "law"}),
    "a name as list": (TypeError, "must be a list", {"adapter_names": "a"}),
    "both": (ValueError, "once", {"adapter_names": NAMES, "adapter_name": "a"}),
    "no pairs": (TypeError, "two texts", {"pairs": [("w1", "w2", "w3")] * 5}),
    "batch size": (ValueError, "batch_size", {"batch_size": 0}),
}


@pytest.mark.parametrize(("kind", "message", "call"), CALLS.values(), ids=CALLS)
def test_errors_before_any_work(
    ranker: Reranker, monkeypatch: pytest.MonkeyPatch, kind: Any, message: str, call: dict[str, Any]
) -> None:
    monkeypatch.setattr(ranker, "_logits", lambda *args: pytest.fail("work was done"))
    with pytest.raises(kind, match=message):
        ranker.predict(**({"pairs": PAIRS} | call))
    with ranker.model.adapters(NAMES), pytest.raises(RoutingError, match="inside an adapters"):
        ranker.predict(PAIRS)
