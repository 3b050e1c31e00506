"""SentenceTransformers with adapters: each text's embedding is that of a plain one on its adapter's merged copy."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf
from sentence_transformers import CrossEncoder, SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling, StaticEmbedding
from torch import Tensor

from hf_multilora import MultiLoRAModel, RoutingError, UnknownAdapterError
from hf_multilora.integrations.sentence_transformers import MultiLoRACrossEncoder, MultiLoRASentenceTransformer
from tests.integrations.texts import NAMES, TEXTS, Bed, Kind, bert, qwen3, roberta
from tests.tiny import error

OTHERS = ["b", "a", None, "c", "a"]
KINDS = {
    "bert": Kind(functools.partial(bert, tf.BertModel), ("query", "value", "dense"), None),
    "roberta": Kind(functools.partial(roberta, tf.RobertaModel), ("query", "dense"), None, "[UNK]"),
    "qwen3": Kind(functools.partial(qwen3, tf.Qwen3Model), ("q_proj", "v_proj", "down_proj"), None),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Bed:
    return Bed(tmp_path_factory.mktemp("embedder"), KINDS["bert"])


@pytest.fixture(scope="module")
def model(made: Bed) -> MultiLoRASentenceTransformer:
    return made.wrapped(MultiLoRASentenceTransformer, prompts={"query": "w20 w21 ", "document": "w22 "})


@pytest.fixture(autouse=True)
def _the_base_is_default(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "model" in request.fixturenames:
        request.getfixturevalue("model").set_adapter(None)


def truth(made: Bed, names: Any, texts: Any = TEXTS, **options: Any) -> list[Any]:
    """Each text alone."""
    plain = [made.plain(SentenceTransformer, name) for name in names]
    return [one.encode([text], **options)[0] for one, text in zip(plain, texts, strict=True)]


def near(got: Any, want: Any) -> float:
    return error(torch.as_tensor(np.asarray(got)), torch.as_tensor(np.asarray(want)))


@pytest.mark.parametrize("kind", KINDS)
def test_each_text_gets_its_adapter(tmp_path: Path, kind: str) -> None:
    made = Bed(tmp_path, KINDS[kind])
    model = made.wrapped(MultiLoRASentenceTransformer)
    assert isinstance(model, SentenceTransformer) and isinstance(model.transformers_model, MultiLoRAModel)
    want = np.stack(truth(made, NAMES))
    for size in (2, 5):
        got = model.encode(TEXTS, adapter_names=NAMES, batch_size=size)
        assert got.shape == want.shape == (5, 16) and near(got, want) < 1e-5
    assert near(model.encode(TEXTS, adapter_names=OTHERS, batch_size=2), want) > 1e-3, "adapters do not matter"


def test_last_token_pooling_of_a_decoder(tmp_path: Path) -> None:
    made = Bed(tmp_path, KINDS["qwen3"])
    model = made.wrapped(MultiLoRASentenceTransformer)
    model[1] = Pooling(16, "lasttoken")
    want = []
    for name, text in zip(NAMES, TEXTS, strict=True):
        plain = made.plain(SentenceTransformer, name)
        plain[1] = Pooling(16, "lasttoken")
        want.append(plain.encode([text])[0])
    assert near(model.encode(TEXTS, adapter_names=NAMES, batch_size=3), np.stack(want)) < 1e-5
    assert near(model.encode(TEXTS, adapter_names=OTHERS, batch_size=3), np.stack(want)) > 1e-3


OPTIONS: dict[str, dict[str, Any]] = {
    "one batch": {"batch_size": 64},
    "tensor": {"convert_to_tensor": True},
    "list": {"convert_to_numpy": False},
    "normalized": {"normalize_embeddings": True},
    "truncated": {"truncate_dim": 5, "normalize_embeddings": True},
    "binary": {"precision": "ubinary"},
    "binary tensor": {"precision": "binary", "convert_to_tensor": True},
    "prompt": {"prompt": "w20 w21 "},
    "progress": {"show_progress_bar": True},
    "tokens": {"output_value": "token_embeddings", "batch_size": 2},
    "device": {"device": "cpu"},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_options_behave_as_in_sentence_transformers(
    made: Bed, model: MultiLoRASentenceTransformer, options: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    got = model.encode(TEXTS, adapter_names=NAMES, **options)
    assert ("Batches" in capsys.readouterr().err) == ("show_progress_bar" in options)
    form = made.plain(SentenceTransformer, None).encode(TEXTS, **options)
    assert type(got) is type(form) and len(got) == len(form)
    differ = False
    for a, b, c in zip(got, truth(made, NAMES, **options), form, strict=True):
        assert type(a) is type(c) and a.dtype == c.dtype and a.shape == b.shape == c.shape
        a, b, c = (torch.as_tensor(x).double() for x in (a, b, c))
        assert (a - b).abs().max() < 1e-5
        differ = differ or (a - c).abs().max() > 1e-3
    assert differ, "the base's embeddings would pass"


def test_everything_of_a_row(made: Bed, model: MultiLoRASentenceTransformer) -> None:
    rows = model.encode(TEXTS, adapter_names=NAMES, output_value=None, batch_size=2)
    plain = made.plain(SentenceTransformer, None).encode(TEXTS, output_value=None, batch_size=2)
    assert [set(row) for row in rows] == [set(row) for row in plain]
    assert near(torch.stack([row["sentence_embedding"] for row in rows]), np.stack(truth(made, NAMES))) < 1e-5


def test_forms_of_input(made: Bed, model: MultiLoRASentenceTransformer) -> None:
    want = np.stack(truth(made, NAMES))
    for form in (TEXTS, tuple(TEXTS), np.array(TEXTS), np.array(TEXTS, dtype=object)):
        assert near(model.encode(form, adapter_names=NAMES), want) < 1e-5
    assert near(model.encode(sentences=TEXTS, adapter_names=NAMES), want) < 1e-5
    single = model.encode(TEXTS[2], adapter_names=["b"])
    assert single.shape == (16,) and near(single, want[2]) < 1e-5
    tensor = model.encode(TEXTS[2], adapter_name="b", convert_to_tensor=True)
    assert isinstance(tensor, Tensor) and near(tensor, want[2]) < 1e-5
    assert len(model.encode([], adapter_names=[])) == 0


def test_queries_and_documents(made: Bed, model: MultiLoRASentenceTransformer) -> None:
    for encode, prompt in ((model.encode_query, "w20 w21 "), (model.encode_document, "w22 ")):
        want = np.stack(truth(made, NAMES, prompt=prompt))
        assert near(encode(TEXTS, adapter_names=NAMES, batch_size=2), want) < 1e-5
        assert near(encode(TEXTS, adapter_name="a", batch_size=2)[[0, 3]], want[[0, 3]]) < 1e-5
        assert near(want, np.stack(truth(made, NAMES))) > 1e-3, "the prompt does not matter"


def test_one_adapter_for_all_the_default_and_the_base(made: Bed, model: MultiLoRASentenceTransformer) -> None:
    want = {name: np.stack(truth(made, [name] * 5)) for name in ("a", "b", None)}
    assert near(want["a"], want["b"]) > 1e-3 and near(want["a"], want[None]) > 1e-3
    assert near(model.encode(TEXTS), want[None]) < 1e-5
    assert near(model.encode(TEXTS, adapter_name="a"), want["a"]) < 1e-5
    model.set_adapter("b")
    assert near(model.encode(TEXTS), want["b"]) < 1e-5
    assert near(model.encode(TEXTS, adapter_name="__base__"), want[None]) < 1e-5


def test_more_adapters_in_a_batch_than_slots(made: Bed) -> None:
    model = made.wrapped(MultiLoRASentenceTransformer, max_loras=1)
    assert near(model.encode(TEXTS, adapter_names=NAMES), np.stack(truth(made, NAMES))) < 1e-5


def test_compiled(tmp_path: Path) -> None:
    made = Bed(tmp_path, KINDS["bert"], num_hidden_layers=1)
    model = made.wrapped(MultiLoRASentenceTransformer)
    model.compile(backend="eager", dynamic=True)
    for names in (NAMES, OTHERS):
        assert near(model.encode(TEXTS, adapter_names=names), np.stack(truth(made, names))) < 1e-5


CALLS: dict[str, tuple[type[Exception], str, dict[str, Any]]] = {
    "too few": (RoutingError, "one adapter per input, got 2 for 5", {"adapter_names": ["a", None]}),
    "unknown": (UnknownAdapterError, "'law'", {"adapter_name": "law"}),
    "a name as list": (TypeError, "must be a list", {"adapter_names": "a"}),
    "both": (ValueError, "once", {"adapter_names": NAMES, "adapter_name": "a"}),
    "misspelled": (ValueError, "adapter", {"adapter": "a"}),
    "devices": (NotImplementedError, "one device", {"adapter_names": NAMES, "device": ["cpu", "cpu"]}),
    "pool": (NotImplementedError, "one device", {"pool": {"processes": []}}),
}


@pytest.mark.parametrize(("kind", "message", "call"), CALLS.values(), ids=CALLS)
def test_errors_before_any_work(
    model: MultiLoRASentenceTransformer, monkeypatch: pytest.MonkeyPatch, kind: Any, message: str, call: dict[str, Any]
) -> None:
    monkeypatch.setattr(model[0], "preprocess", lambda *args, **kwargs: pytest.fail("work was done"))
    with pytest.raises(kind, match=message):
        model.encode(TEXTS, **call)


def test_not_inside_a_block_whose_rows_would_be_sorted(model: MultiLoRASentenceTransformer) -> None:
    with model.transformers_model.adapters(NAMES), pytest.raises(RoutingError, match="inside an adapters"):
        model.encode(TEXTS)


def test_in_place_and_back(made: Bed) -> None:
    plain = SentenceTransformer(made.save(made.base, "loaded"), device="cpu")
    before, params = plain.encode(TEXTS), copy.copy(plain[0].model_forward_params)
    model = MultiLoRASentenceTransformer.from_pretrained(plain, {"a": made.paths["a"]})
    assert model is plain
    assert near(model.encode(TEXTS, adapter_name="a"), np.stack(truth(made, ["a"] * 5))) < 1e-5
    assert model.unpatch() is plain and type(plain) is SentenceTransformer
    assert plain[0].model_forward_params == params and np.array_equal(plain.encode(TEXTS), before)
    with pytest.raises(TypeError, match="must be a folder, a Hub id or a CrossEncoder"):
        MultiLoRACrossEncoder.from_pretrained(plain)
    with pytest.raises(TypeError, match="must be a folder, a Hub id or a SentenceTransformer"):
        MultiLoRASentenceTransformer.from_pretrained(CrossEncoder(made.save(made.base, "loaded"), device="cpu"))


def test_what_has_not_one_transformer_in_front_is_refused(made: Bed) -> None:
    static = SentenceTransformer(modules=[StaticEmbedding(made.tokenizer, embedding_dim=4)], device="cpu")
    with pytest.raises(NotImplementedError, match="StaticEmbedding"):
        MultiLoRASentenceTransformer.from_pretrained(static, [made.paths["a"]])
    two = SentenceTransformer(made.save(made.base, "loaded"), device="cpu")
    two.append(copy.deepcopy(two[0]))
    with pytest.raises(NotImplementedError, match=r"\['2'\]"):
        MultiLoRASentenceTransformer.from_pretrained(two, [made.paths["a"]])
    other = SentenceTransformer(made.save(made.base, "loaded"), device="cpu")
    other[0].modality_config["image"] = {"method": "get_image_features", "method_output_name": None}
    with pytest.raises(NotImplementedError, match="get_image_features"):
        MultiLoRASentenceTransformer.from_pretrained(other, [made.paths["a"]])
    assert type(other) is SentenceTransformer and not isinstance(other.transformers_model, MultiLoRAModel)
