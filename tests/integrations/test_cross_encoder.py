"""CrossEncoders with adapters: each pair's scores are those of a plain CrossEncoder on its adapter's merged copy."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers import CrossEncoder
from torch import Tensor, nn

from hf_multilora import CapacityError, MultiLoRAModel, RoutingError, UnknownAdapterError
from hf_multilora.integrations.sentence_transformers import MultiLoRACrossEncoder
from tests.integrations.texts import KINDS, NAMES, PAIRS, Bed
from tests.tiny import error

OTHERS = ["b", "a", None, "c", "a"]  # no pair has its adapter of NAMES


def bed(folder: Path, kind: str = "bert", **settings: Any) -> Bed:
    return Bed(folder, KINDS[kind], **settings)


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Bed:
    """A BERT with one label."""
    return bed(tmp_path_factory.mktemp("one"), num_labels=1)


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Bed:
    return bed(tmp_path_factory.mktemp("three"), num_labels=3)


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> Bed:
    """A base with one label, a's head has three, b's one, c has none of its own."""
    return bed(tmp_path_factory.mktemp("heads"), num_labels=1, heads={"a": 3, "b": 1})


@pytest.fixture(scope="module")
def ranker(one: Bed) -> MultiLoRACrossEncoder:
    return one.wrapped(MultiLoRACrossEncoder)


@pytest.fixture(scope="module")
def headed(heads: Bed) -> MultiLoRACrossEncoder:
    return heads.wrapped(MultiLoRACrossEncoder)


@pytest.fixture(autouse=True)
def _the_base_is_default(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    for name in {"ranker", "headed"} & set(request.fixturenames):
        request.getfixturevalue(name).set_adapter(None)


def truth(bed: Bed, names: Any, pairs: Any = PAIRS, **options: Any) -> list[Any]:
    """Each pair alone."""
    return [
        bed.plain(CrossEncoder, name).predict([pair], **options)[0] for name, pair in zip(names, pairs, strict=True)
    ]


def near(got: Any, want: Any) -> float:
    return error(torch.as_tensor(got), torch.as_tensor(want))


@pytest.mark.parametrize(
    ("kind", "labels"), [("bert", 1), ("bert", 3), ("roberta", 1), ("roberta", 2), ("qwen3", 1), ("qwen3", 3)]
)
def test_each_pair_gets_its_adapter(tmp_path: Path, kind: str, labels: int) -> None:
    made = bed(tmp_path, kind, num_labels=labels)
    model = made.wrapped(MultiLoRACrossEncoder)
    want = np.stack(truth(made, NAMES))
    for size in (2, 5):
        got = model.predict(PAIRS, adapter_names=NAMES, batch_size=size)
        assert got.shape == want.shape == ((5,) if labels == 1 else (5, labels)) and got.dtype == np.float32
        assert near(got, want) < 1e-5
    assert near(model.predict(PAIRS, adapter_names=OTHERS, batch_size=2), want) > 1e-3, "adapters do not matter"


def test_a_language_model_with_a_score_of_yes_and_no(tmp_path: Path) -> None:
    made = bed(tmp_path, "yes-no")
    model = made.wrapped(MultiLoRACrossEncoder, processor_kwargs={"padding_side": "left"})
    want = np.stack(truth(made, NAMES))
    got = model.predict(PAIRS, adapter_names=NAMES, batch_size=2)
    assert got.shape == (5,) and near(got, want) < 1e-5
    assert near(model.predict(PAIRS, adapter_names=OTHERS, batch_size=2), want) > 1e-3


OPTIONS: dict[str, dict[str, Any]] = {
    "one pair per batch": {"batch_size": 1},
    "one batch": {"batch_size": 64},
    "tensor": {"convert_to_tensor": True},
    "list": {"convert_to_numpy": False},
    "activation": {"activation_fn": nn.Tanh()},
    "softmax": {"apply_softmax": True},
    "softmax after an activation": {"apply_softmax": True, "activation_fn": nn.ReLU(), "convert_to_tensor": True},
    "progress": {"show_progress_bar": True},
    "device": {"device": "cpu"},
    "prompt": {"prompt": "w20 w21 "},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("labels", ["one", "three"])
def test_options_behave_as_in_sentence_transformers(
    request: pytest.FixtureRequest, labels: str, options: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    made = request.getfixturevalue(labels)
    model = made.wrapped(MultiLoRACrossEncoder, "a", "b")
    names = ["a", None, "b", "a", "b"]
    got = model.predict(PAIRS, adapter_names=names, **options)
    assert ("Batches" in capsys.readouterr().err) == ("show_progress_bar" in options)
    one_by_one = truth(made, names, **options)
    want = made.plain(CrossEncoder, None).predict(PAIRS, **options)
    assert type(got) is type(want) and len(got) == len(want)
    for a, b, c in zip(got, one_by_one, want, strict=True):
        assert type(a) is type(c) and a.dtype == c.dtype and a.shape == c.shape
        assert abs(torch.as_tensor(a) - torch.as_tensor(b)).max() < 1e-5
    assert near(np.stack(list(want)), np.stack(list(got))) > 1e-3, "the base's scores would pass"


def test_forms_of_input(one: Bed, ranker: MultiLoRACrossEncoder) -> None:
    want = np.stack(truth(one, NAMES))
    for form in (PAIRS, tuple(PAIRS), [list(pair) for pair in PAIRS], np.array(PAIRS), np.array(PAIRS, dtype=object)):
        assert near(ranker.predict(form, adapter_names=NAMES), want) < 1e-5
    assert near(ranker.predict(sentences=PAIRS, adapter_names=NAMES), want) < 1e-5
    for pair in (PAIRS[2], list(PAIRS[2]), np.array(PAIRS[2])):
        got = ranker.predict(pair, adapter_names=["b"])
        assert got.shape == () and near(got, want[2]) < 1e-5
        assert near(ranker.predict(pair, adapter_name="b", convert_to_tensor=True), want[2]) < 1e-5
    assert ranker.predict([], adapter_names=[]).shape == (0,)
    assert ranker.predict([], adapter_name="a", convert_to_tensor=True).shape == (0,)


def test_one_adapter_for_all_the_default_and_the_base(one: Bed, ranker: MultiLoRACrossEncoder) -> None:
    want = {name: np.stack(truth(one, [name] * 5)) for name in ("a", "b", None)}
    assert near(want["a"], want["b"]) > 1e-3 and near(want["a"], want[None]) > 1e-3
    assert near(ranker.predict(PAIRS), want[None]) < 1e-5
    assert near(ranker.predict(PAIRS, adapter_name="a"), want["a"]) < 1e-5
    ranker.set_adapter("b")
    assert near(ranker.predict(PAIRS), want["b"]) < 1e-5
    assert near(ranker.predict(PAIRS, adapter_name="__base__"), want[None]) < 1e-5
    assert near(ranker.predict(PAIRS, adapter_names=[None] * 5), want[None]) < 1e-5


def test_more_adapters_in_a_batch_than_slots(one: Bed) -> None:
    model = one.wrapped(MultiLoRACrossEncoder, max_loras=1)
    assert near(model.predict(PAIRS, adapter_names=NAMES), np.stack(truth(one, NAMES))) < 1e-5
    model.pin_adapter("a")
    with pytest.raises(CapacityError, match="max_loras"):
        model.predict(PAIRS, adapter_names=NAMES)


# --- heads of the adapters' own


def assert_own_widths(got: Any, want: list[Any], kind: type) -> None:
    assert type(got) is list and len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        assert isinstance(a, kind) and tuple(a.shape) == tuple(b.shape)
        assert abs(torch.as_tensor(a) - torch.as_tensor(b)).max() < 1e-5


@pytest.mark.parametrize("kind", ["bert", "roberta", "qwen3"])
def test_rows_of_different_heads_have_their_own_widths(tmp_path: Path, kind: str) -> None:
    made = bed(tmp_path, kind, num_labels=2, heads={"a": 3, "b": 1})
    model = made.wrapped(MultiLoRACrossEncoder)
    want = truth(made, NAMES)
    assert [w.shape for w in want] == [(3,), (2,), (), (3,), (2,)]
    for size in (2, 5):
        assert_own_widths(model.predict(PAIRS, adapter_names=NAMES, batch_size=size), want, np.ndarray)
    shifted = model.predict(PAIRS, adapter_names=["a", None, "b", "c", "a"], batch_size=2)
    assert [s.shape for s in shifted] == [(3,), (2,), (), (2,), (3,)] and near(shifted[0], want[0]) < 1e-5


WIDE_OPTIONS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "activation": {"activation_fn": nn.Tanh()},
    "softmax": {"apply_softmax": True},
    "activation over the labels": {"activation_fn": nn.Softmax(dim=-1)},
    "prompt": {"prompt": "w20 w21 ", "batch_size": 2},
}


@pytest.mark.parametrize("options", WIDE_OPTIONS.values(), ids=WIDE_OPTIONS)
def test_activations_are_applied_per_own_width(
    heads: Bed, headed: MultiLoRACrossEncoder, options: dict[str, Any]
) -> None:
    want = truth(heads, NAMES, **options)
    assert [w.shape for w in want] == [(3,), (), (), (3,), ()]
    assert_own_widths(headed.predict(PAIRS, adapter_names=NAMES, **options), want, np.ndarray)
    for how in ({"convert_to_tensor": True}, {"convert_to_numpy": False}):
        assert_own_widths(headed.predict(PAIRS, adapter_names=NAMES, **options, **how), want, Tensor)


def test_rows_of_one_width_come_as_one_array(heads: Bed, headed: MultiLoRACrossEncoder) -> None:
    want = np.stack(truth(heads, ["a"] * 5))
    assert want.shape == (5, 3)
    got = headed.predict(PAIRS, adapter_name="a", batch_size=2)
    assert isinstance(got, np.ndarray) and near(got, want) < 1e-5
    tensor = headed.predict(PAIRS, adapter_names=["a"] * 5, convert_to_tensor=True)
    assert isinstance(tensor, Tensor) and near(tensor, want) < 1e-5
    assert near(headed.predict(PAIRS[2], adapter_name="a"), want[2]) < 1e-5
    headed.set_adapter("a")
    assert near(headed.predict(PAIRS), want) < 1e-5, "the default adapter's head counts, too"
    assert near(headed.predict(PAIRS, adapter_name="b"), np.stack(truth(heads, ["b"] * 5))) < 1e-5


def test_half_precision_logits_are_activated_in_full(heads: Bed) -> None:
    model = heads.wrapped(MultiLoRACrossEncoder, model_kwargs={"dtype": torch.bfloat16})
    got = model.predict(PAIRS, adapter_names=NAMES, convert_to_tensor=True)
    assert {g.dtype for g in got} == {torch.float32}
    for g, w in zip(got, truth(heads, NAMES), strict=True):
        assert abs(g - torch.as_tensor(w)).max() < 0.1


# --- rank


def test_rank(one: Bed, ranker: MultiLoRACrossEncoder) -> None:
    query, documents = "w1", [document for _, document in PAIRS]
    orders = set()
    for name in ("a", "b", None):
        plain = one.plain(CrossEncoder, name)
        got = ranker.rank(query, documents, adapter_name="__base__" if name is None else name, batch_size=2)
        want = plain.rank(query, documents, batch_size=2)
        assert [row["corpus_id"] for row in got] == [row["corpus_id"] for row in want]
        assert [row["score"] for row in got] == pytest.approx([row["score"] for row in want], rel=1e-4)
        assert {type(row["score"]) for row in got} == {float}
        orders.add(tuple(row["corpus_id"] for row in got))
    assert len(orders) > 1, "all adapters rank alike: the check says little"
    best = ranker.rank(query, documents, adapter_name="a", top_k=2, return_documents=True)
    assert [row["text"] for row in best] == [documents[row["corpus_id"]] for row in best] and len(best) == 2
    ranker.set_adapter("a")
    assert ranker.rank(query, documents, top_k=2, return_documents=True) == best
    assert ranker.rank(query, [], adapter_name="a") == []


def test_rank_needs_one_label(three: Bed, headed: MultiLoRACrossEncoder) -> None:
    with pytest.raises(ValueError, match="the base has 3 labels"):
        three.wrapped(MultiLoRACrossEncoder, "a").rank("w1", ["w2"])
    with pytest.raises(ValueError, match="adapter 'a' has 3 labels"):
        headed.rank("w1", ["w2"], adapter_name="a")
    headed.set_adapter("a")
    with pytest.raises(ValueError, match="adapter 'a' has 3 labels"):
        headed.rank("w1", ["w2"])
    assert headed.rank("w1", ["w2"], adapter_name="b")[0]["corpus_id"] == 0


# --- errors come before any work

CALLS: dict[str, tuple[type[Exception], str, dict[str, Any]]] = {
    "too few": (RoutingError, "one adapter per pair, got 2 for 5", {"adapter_names": ["a", None]}),
    "too many": (RoutingError, "got 6 for 5", {"adapter_names": [*NAMES, "a"]}),
    "unknown": (UnknownAdapterError, "'law'", {"adapter_names": ["a", None, "law", "a", "b"]}),
    "unknown for all": (UnknownAdapterError, "'law'", {"adapter_name": "law"}),
    "a name as list": (TypeError, "must be a list", {"adapter_names": "a"}),
    "a list as name": (TypeError, "one name for all", {"adapter_name": NAMES}),
    "both": (ValueError, "once", {"adapter_names": NAMES, "adapter_name": "a"}),
    "misspelled": (TypeError, "'adapter'", {"adapter": "a"}),
    "ids": (TypeError, "'adapter_ids'", {"adapter_ids": [1, 0, 1, 0, 1]}),
    "devices": (NotImplementedError, "one device", {"adapter_names": NAMES, "device": ["cpu", "cpu"]}),
    "devices for the default": (NotImplementedError, "one device", {"device": ["cpu", "cpu"]}),
    "pool": (NotImplementedError, "one device", {"adapter_name": "a", "pool": {"processes": []}}),
}


@pytest.mark.parametrize(("kind", "message", "call"), CALLS.values(), ids=CALLS)
def test_errors_before_any_work(
    ranker: MultiLoRACrossEncoder, monkeypatch: pytest.MonkeyPatch, kind: Any, message: str, call: dict[str, Any]
) -> None:
    monkeypatch.setattr(ranker[0], "preprocess", lambda *args, **kwargs: pytest.fail("work was done"))
    with pytest.raises(kind, match=message):
        ranker.predict(PAIRS, **call)


def test_not_inside_a_block_whose_rows_would_be_sorted(ranker: MultiLoRACrossEncoder) -> None:
    with ranker.model.adapters(NAMES), pytest.raises(RoutingError, match="inside an adapters"):
        ranker.predict(PAIRS)
    with pytest.raises(NotImplementedError, match="pool"):
        ranker.start_multi_process_pool(["cpu"])


# --- the object


def test_a_loaded_cross_encoder_is_changed_in_place_and_given_back(one: Bed) -> None:
    plain = CrossEncoder(one.save(one.base, "loaded"), device="cpu")
    before = plain.predict(PAIRS)
    params, inner = copy.copy(plain[0].model_forward_params), plain.model
    model = MultiLoRACrossEncoder.from_pretrained(plain, {"a": one.paths["a"]}, max_loras=2)
    assert model is plain and isinstance(model, MultiLoRACrossEncoder) and isinstance(model, CrossEncoder)
    assert isinstance(model.model, MultiLoRAModel) and model.model is inner
    names = ["a", None, "a", None, "a"]
    assert near(model.predict(PAIRS, adapter_names=names), np.stack(truth(one, names))) < 1e-5
    with pytest.raises(ValueError, match="already"):
        MultiLoRACrossEncoder.from_pretrained(model, [one.paths["b"]])
    assert model.unpatch() is plain and type(plain) is CrossEncoder and not isinstance(inner, MultiLoRAModel)
    assert plain[0].model_forward_params == params
    assert np.array_equal(plain.predict(PAIRS), before)


def test_a_failed_load_changes_nothing(one: Bed, tmp_path: Path) -> None:
    plain = CrossEncoder(one.save(one.base, "loaded"), device="cpu")
    before, params = plain.predict(PAIRS), copy.copy(plain[0].model_forward_params)
    with pytest.raises(FileNotFoundError):
        MultiLoRACrossEncoder.from_pretrained(plain, [one.paths["a"], str(tmp_path / "nothing")])
    assert type(plain) is CrossEncoder and plain[0].model_forward_params == params
    assert not isinstance(plain.model, MultiLoRAModel) and np.array_equal(plain.predict(PAIRS), before)


def test_an_encoder_without_a_classifier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It gets a random one, which no row may see."""
    made = bed(tmp_path, num_labels=1, heads={"a": 3, "b": 1})
    chosen = {name: made.paths[name] for name in "abc"}
    model = MultiLoRACrossEncoder(made.save(made.base.bert, "encoder"), adapters=chosen, device="cpu")
    names = ["a", "b", "b", "a", "b"]
    for g, w in zip(model.predict(PAIRS, adapter_names=names), truth(made, names), strict=True):
        assert g.shape == w.shape and abs(g - w).max() < 1e-5
    monkeypatch.setattr(model[0], "preprocess", lambda *args, **kwargs: pytest.fail("work was done"))
    for call in ({}, {"adapter_names": ["a", None, "b", "a", "b"]}, {"adapter_name": "c"}):
        with pytest.raises(RoutingError, match="must have its classifier from its adapter"):
            model.predict(PAIRS, **call)


class Own(CrossEncoder):
    """Somebody's subclass."""


def test_what_is_refused(one: Bed) -> None:
    folder = one.save(one.base, "loaded")
    with pytest.raises(TypeError, match="from_pretrained"):
        MultiLoRACrossEncoder(CrossEncoder(folder, device="cpu"))
    with pytest.raises(TypeError, match="subclass"):
        MultiLoRACrossEncoder.from_pretrained(Own(folder, device="cpu"))
    with pytest.raises(TypeError, match="CrossEncoder"):
        MultiLoRACrossEncoder.from_pretrained(one.base)


def test_a_folder_by_from_pretrained(one: Bed) -> None:
    folder = one.save(one.base, "loaded")
    model = MultiLoRACrossEncoder.from_pretrained(folder, [one.paths["a"]], max_loras=1, device="cpu", max_length=12)
    assert model.max_seq_length == 12 and [row["name"] for row in model.list_adapters()] == ["a"]


def test_verbs(one: Bed) -> None:
    model = one.wrapped(MultiLoRACrossEncoder, "a", max_loras=2)
    want = np.stack(truth(one, ["b"] * 5))
    assert model.load_adapter(one.paths["b"]) == "b"
    assert near(model.predict(PAIRS, adapter_name="b"), want) < 1e-5
    model.pin_adapter("b")
    assert {row["name"]: row["pinned"] for row in model.list_adapters()} == {"a": False, "b": True}
    model.unpin_adapter("b")
    assert model.memory_report().device_bytes == model.model.memory_report().device_bytes
    model.set_adapter("b")
    assert model.active_adapters() == model.active_adapter() == ["b"]
    assert near(model.predict(PAIRS), want) < 1e-5
    model.disable_adapters()
    assert near(model.predict(PAIRS), np.stack(truth(one, [None] * 5))) < 1e-5
    assert model.verify("a").ok
    model.delete_adapter("b")
    with pytest.raises(UnknownAdapterError):
        model.predict(PAIRS, adapter_name="b")
    for verb in (model.add_adapter, model.get_adapter_state_dict):
        with pytest.raises(NotImplementedError, match=r"files|load_adapter"):
            verb("b")
    with pytest.raises(NotImplementedError, match="set_adapter"):
        model.enable_adapters()


def test_copies_pickles_and_saves(one: Bed, ranker: MultiLoRACrossEncoder, tmp_path: Path) -> None:
    want = np.stack(truth(one, NAMES))
    for other in (copy.deepcopy(ranker), pickle.loads(pickle.dumps(ranker))):
        assert type(other) is MultiLoRACrossEncoder and other.model is not ranker.model
        assert near(other.predict(PAIRS, adapter_names=NAMES, batch_size=2), want) < 1e-5
    ranker.save_pretrained(str(tmp_path / "saved"))
    again = CrossEncoder(str(tmp_path / "saved"), device="cpu")
    assert near(again.predict(PAIRS), np.stack(truth(one, [None] * 5))) < 1e-5


def test_compiled(tmp_path: Path) -> None:
    made = bed(tmp_path, num_labels=1, num_hidden_layers=1, heads={"a": 3})
    model = made.wrapped(MultiLoRACrossEncoder)
    model.compile(backend="eager", dynamic=True)
    for names in (NAMES, [None] * 5, OTHERS):
        got = model.predict(PAIRS, adapter_names=names)
        for g, w in zip(got, truth(made, names), strict=True):
            assert g.shape == w.shape and abs(g - w).max() < 1e-5
    assert near(model.predict(PAIRS), np.stack(truth(made, [None] * 5))) < 1e-5


def test_evaluators_and_other_callers_get_the_default(one: Bed, ranker: MultiLoRACrossEncoder) -> None:
    ranker.set_adapter("a")
    features = ranker.preprocess(PAIRS)
    with torch.no_grad():
        got = ranker(features)["scores"].sigmoid().squeeze(-1)
    assert near(got, np.stack(truth(one, ["a"] * 5))) < 1e-5


def test_dropout_is_off(one: Bed) -> None:
    model = one.wrapped(MultiLoRACrossEncoder)
    model.train()
    assert near(model.predict(PAIRS, adapter_names=NAMES), np.stack(truth(one, NAMES))) < 1e-5
    assert not nn.Module.__getattr__(model, "0").training
