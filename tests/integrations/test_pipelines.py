"""Pipelines with one adapter per input: every row is what a pipeline on the merged copy answers to that input alone."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from peft import PeftModel
from torch.utils.data import Dataset, IterableDataset
from transformers.pipelines.pt_utils import KeyDataset

from hf_multilora import CapacityError, MultiLoRAModel, RoutingError, UnknownAdapterError
from hf_multilora.integrations.pipelines import pipeline
from tests import tiny
from tests.integrations.pipes import CASES, CHATS, GREEDY, LLAMA, NAMES, TEXTS, Served, close, tokenizer

Get = Callable[[str], Served]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Get]:
    made: dict[str, Served] = {}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)

    def get(name: str) -> Served:
        if name not in made:
            made[name] = Served(CASES[name], tmp_path_factory.mktemp(name.replace(",", "").replace(" ", "-")))
        return made[name]

    yield get
    torch.set_num_threads(threads)


def pipe_of(served: Served, **settings: Any) -> Any:
    model = served.family.model(**settings)
    return pipeline(served.case.task, model=model, tokenizer=served.tokenizer(), device="cpu")


class Rows(Dataset[Any]):
    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> Any:
        return self.rows[i]


class Stream(IterableDataset[Any]):
    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[Any]:
        return iter(self.rows)


class Table:
    """Rows like those of the datasets library: no torch Dataset."""

    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> Any:
        return self.rows[i]


# -- every task ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("batch_size", [1, 2, 5])
@pytest.mark.parametrize("name", CASES)
def test_rows_are_each_adapters_own(served: Get, name: str, batch_size: int) -> None:
    case = served(name)
    pipe = pipe_of(case)
    got = pipe(list(case.case.inputs), adapter_names=NAMES, batch_size=batch_size, **case.case.params)
    case.check(got)
    turned = [NAMES[-1], *NAMES[:-1]]  # another order of the adapters over the same inputs
    case.check(pipe(list(case.case.inputs), adapter_names=turned, batch_size=batch_size, **case.case.params), turned)


# -- the ways of giving inputs ---------------------------------------------------------------------------------------
def named(key: str, inputs: Any = TEXTS) -> list[dict[str, Any]]:
    return [{key: item, "adapter": name} for item, name in zip(inputs, NAMES, strict=True)]


WAYS: dict[str, Callable[[Any], Any]] = {
    "list and names": lambda pipe: pipe(TEXTS, adapter_names=NAMES),
    "tuple of names": lambda pipe: pipe(TEXTS, adapter_names=tuple(NAMES)),
    "generator and names": lambda pipe: pipe((t for t in TEXTS), adapter_names=NAMES),
    "dataset and names": lambda pipe: pipe(Rows(TEXTS), adapter_names=NAMES),
    "KeyDataset and names": lambda pipe: pipe(KeyDataset(Rows(named("text")), "text"), adapter_names=NAMES),
    "stream and names": lambda pipe: pipe(Stream(TEXTS), adapter_names=NAMES),
    "list of rows": lambda pipe: pipe(named("text")),
    "generator of rows": lambda pipe: pipe(row for row in named("text")),
    "dataset of rows": lambda pipe: pipe(Rows(named("text"))),
    "stream of rows": lambda pipe: pipe(Stream(named("text"))),
    "table of rows": lambda pipe: pipe(Table(named("text"))),
}


@pytest.mark.parametrize("name", ["text", "zero-shot", "generation"])
@pytest.mark.parametrize("way", WAYS)
def test_ways_of_giving_inputs(served: Get, way: str, name: str) -> None:
    case = served(name)
    pipe = pipe_of(case)
    pipe._batch_size = 1 if name == "text" else 2
    call = lambda inputs, **names: pipe(inputs, **names, **case.case.params)  # noqa: E731
    case.check(list(WAYS[way](call)))


@pytest.mark.parametrize("rows", [list, iter, Rows, Stream])
def test_chats_in_rows(served: Get, rows: Callable[[Any], Any]) -> None:
    case = served("chats")
    inputs = (row for row in named("messages", CHATS)) if rows is iter else rows(named("messages", CHATS))
    case.check(list(pipe_of(case)(inputs, batch_size=2, **GREEDY)))


@pytest.mark.parametrize("rows", [list, Rows])
def test_pairs_in_rows(served: Get, rows: Callable[[Any], Any]) -> None:
    case = served("pairs")
    inputs = [row | {"adapter": name} for row, name in zip(case.case.inputs, NAMES, strict=True)]
    case.check(list(pipe_of(case)(rows(inputs), batch_size=2)))


@pytest.mark.parametrize("workers", [1, 2])
def test_worker_processes(served: Get, workers: int) -> None:
    case = served("text")
    pipe = pipe_of(case)
    case.check(pipe(TEXTS, adapter_names=NAMES, batch_size=2, num_workers=workers))
    case.check(list(pipe(Rows(named("text")), batch_size=2, num_workers=workers)))


def test_datasets_and_generators_stream(served: Get) -> None:
    case = served("text")
    answers = pipe_of(case)(Rows(named("text")), batch_size=2)
    assert len(answers) == 3  # batches
    case.check(list(answers))
    asked = []
    lazy = iter(pipe_of(case)((asked.append(i) or row for i, row in enumerate(named("text"))), batch_size=2))  # type: ignore[func-returns-value]
    assert len(asked) <= 1 and next(lazy) and len(asked) < len(TEXTS)


def test_a_generator_iterated_again_goes_on_with_its_names(served: Get) -> None:
    """A for loop over what next() was called on starts Transformers' loader anew, not the generator."""
    case = served("text")
    pipe = pipe_of(case)
    for ways in ({"inputs": (t for t in TEXTS), "adapter_names": NAMES}, {"inputs": (row for row in named("text"))}):
        answers = iter(pipe(**ways))
        case.check([next(answers), next(answers), *answers])
        assert list(answers) == []


@pytest.mark.parametrize("name", ["text", "tokens", "masks", "features", "zero-shot", "generation", "chats"])
def test_single_inputs_and_one_name_for_all(served: Get, name: str) -> None:
    case = served(name)
    pipe = pipe_of(case)
    item, params = case.case.inputs[0], case.case.params
    first = "text_inputs" if case.case.task == "text-generation" else None
    for adapter in ("a", "b", "__base__"):
        want = case.plain(None if adapter == "__base__" else adapter)(item, **params)
        rows = [pipe(item, adapter_names=adapter, **params), pipe(item, adapter_names=[adapter], **params)]
        rows.append(pipe({"x": item, "adapter": adapter}, **params))
        if first:
            rows.append(pipe(**{first: item}, adapter_names=adapter, **params))
            rows.append(pipe(**{first: {"x": item, "adapter": adapter}}, **params))
        assert all(close(row, want) for row in rows)
        assert not close(rows[0], case.plain("c")(item, **params))
    case.check(pipe(list(case.case.inputs), adapter_names="b", batch_size=2, **params), ["b"] * len(NAMES))


# -- calls that name none --------------------------------------------------------------------------------------------
@pytest.mark.parametrize("ours", [True, False])
@pytest.mark.parametrize("name", ["text", "tokens", "zero-shot", "generation"])
def test_default_and_block(served: Get, name: str, ours: bool) -> None:
    """Also in Transformers' own pipeline."""
    case = served(name)
    make: Any = pipeline if ours else tf.pipeline
    model, inputs, params = case.family.model(), list(case.case.inputs), case.case.params
    pipe = make(case.case.task, model=model, tokenizer=case.tokenizer(), device="cpu")
    assert isinstance(pipe.model, MultiLoRAModel)
    case.check(pipe(inputs, batch_size=2, **params), [None] * len(NAMES))
    model.set_adapter("b")
    case.check(pipe(inputs, batch_size=2, **params), ["b"] * len(NAMES))
    if name != "zero-shot":  # there a batch has one row per label, not per input
        with model.adapters(NAMES):
            case.check(pipe(inputs, batch_size=len(NAMES), **params))
    case.check(pipe(inputs, batch_size=2, **params), ["b"] * len(NAMES))
    if ours:
        case.check(pipe(inputs, batch_size=2, adapter_names=NAMES, **params))
        case.check(pipe(inputs, batch_size=2, adapter_names="__base__", **params), [None] * len(NAMES))
    model.set_adapter(None)
    case.check(pipe(inputs, batch_size=2, **params), [None] * len(NAMES))


# -- pipelines that are not known to call the model once --------------------------------------------------------------
def sounds() -> Any:
    config = tf.Wav2Vec2Config(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=20, conv_dim=(8, 8),
        conv_kernel=(4, 4), conv_stride=(4, 4), num_feat_extract_layers=2, num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2, classifier_proj_size=8, num_labels=3, initializer_range=0.3,
    )  # fmt: skip
    return tf.Wav2Vec2ForSequenceClassification(config).eval()


def test_other_pipelines_run_in_a_request(tmp_path: Path) -> None:
    family = tiny.Family(sounds(), tmp_path, {name: {"targets": LLAMA[:2]} for name in "abc"})
    inputs = [0.5 * torch.randn(400, generator=torch.Generator().manual_seed(i)).numpy() for i in range(5)]
    parts: Any = {"feature_extractor": tf.Wav2Vec2FeatureExtractor(), "device": "cpu"}
    pipe = pipeline("audio-classification", model=family.model(max_loras=3), **parts)
    models = {n: family.base if n is None else tiny.merged(family.base, family.paths[n]) for n in NAMES}
    plain = {n: tf.pipeline("audio-classification", model=model, **parts) for n, model in models.items()}
    for batch_size in (1, 2, 5):
        got = pipe(inputs, adapter_names=NAMES, batch_size=batch_size)
        for i, name in enumerate(NAMES):
            assert close(got[i], plain[name](inputs[i])) and not close(got[i], plain[NAMES[i - 1]](inputs[i]))
    narrow = pipeline("audio-classification", model=family.model(max_loras=2), **parts)
    with pytest.raises(CapacityError, match=r"3 distinct adapters must fit in 2 .*raise max_loras to 3"):
        narrow(inputs, adapter_names=NAMES, batch_size=5)
    assert close(narrow(inputs, adapter_names=NAMES, batch_size=2), got)


# -- more adapters than slots ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", CASES)
def test_more_adapters_than_slots(served: Get, name: str) -> None:
    case = served(name)
    pipe = pipe_of(case, max_loras=1)
    case.check(pipe(list(case.case.inputs), adapter_names=NAMES, batch_size=5, **case.case.params))


def test_sampling_needs_a_slot_for_each(served: Get) -> None:
    case = served("generation")
    pipe = pipe_of(case, max_loras=2)
    with pytest.raises(
        CapacityError, match=r"3 distinct adapters, 2 fit at once.*max_loras=3; a split.*do_sample=True"
    ):
        pipe(TEXTS, adapter_names=NAMES, batch_size=5, do_sample=True, max_new_tokens=2)
    assert len(pipe(TEXTS, adapter_names=NAMES, batch_size=2, do_sample=True, max_new_tokens=2)) == 5
    case.check(pipe(TEXTS, adapter_names=NAMES, batch_size=5, **GREEDY))


# -- what is refused -------------------------------------------------------------------------------------------------
ROWS = named("text")
WRONG: dict[str, tuple[Callable[[Any], Any], type[Exception], str]] = {
    "too few": (lambda pipe: pipe(TEXTS, adapter_names=NAMES[:4]), RoutingError, "got 4 for 5 inputs"),
    "too many": (lambda pipe: pipe(TEXTS[:4], adapter_names=NAMES), RoutingError, "got 5 for 4 inputs"),
    "none": (lambda pipe: pipe(TEXTS, adapter_names=[]), RoutingError, "got 0 for 5 inputs"),
    "two for one": (lambda pipe: pipe(TEXTS[0], adapter_names=["a", "b"]), RoutingError, "got 2 for 1 inputs"),
    "too few for a dataset": (lambda pipe: pipe(Rows(TEXTS), adapter_names=["a"]), RoutingError, "got 1 for 5 inputs"),
    "unknown": (lambda pipe: pipe(TEXTS, adapter_names=[*NAMES[:4], "bb"]), UnknownAdapterError, "'bb'; did you mean"),
    "unknown for all": (lambda pipe: pipe(TEXTS, adapter_names="d"), UnknownAdapterError, "no adapter is named 'd'"),
    "unknown in a row": (
        lambda pipe: pipe([*ROWS[:4], {"text": "w5", "adapter": "d"}]), UnknownAdapterError, "no adapter is named 'd'",
    ),
    "no name": (lambda pipe: pipe(TEXTS, adapter_names=[1, *NAMES[1:]]), TypeError, "must hold names or None, got 1"),
    "a set": (lambda pipe: pipe(TEXTS, adapter_names={"a"}), TypeError, "must be a list with one name"),
    "twice": (lambda pipe: pipe(ROWS, adapter_names=NAMES), ValueError, "named once.*got both"),
    "twice in one": (lambda pipe: pipe(ROWS[0], adapter_names="a"), ValueError, "named once.*got both"),
    "twice in a dataset": (lambda pipe: pipe(Rows(ROWS), adapter_names=NAMES), ValueError, "named once.*got both"),
    "a row without": (lambda pipe: pipe([ROWS[0], {"text": "w5"}]), ValueError, r"got \['text'\] for input 1"),
    "a text among rows": (lambda pipe: pipe([ROWS[0], "w5"]), ValueError, "or none of them, got str for input 1"),
    "a row with": (lambda pipe: pipe(["w5", ROWS[0]]), ValueError, "or none of them, got str for input 0"),
    "spelled otherwise": (lambda pipe: pipe(TEXTS, adapter="a"), TypeError, r"as adapter_names, got \['adapter'\]"),
    "ids": (lambda pipe: pipe(TEXTS, adapter_ids=[1] * 5), TypeError, r"as adapter_names, got \['adapter_ids'\]"),
}  # fmt: skip
LATE: dict[str, tuple[Callable[[Any], Any], type[Exception], str]] = {
    "too few": (lambda pipe: pipe((t for t in TEXTS), adapter_names=NAMES[:4]), RoutingError, "got 4 for more than 4"),
    "too many": (lambda pipe: pipe((t for t in TEXTS), adapter_names=[*NAMES, "a"]), RoutingError, "got 6 for 5"),
    "unknown": (lambda pipe: pipe(r | {"adapter": "d"} for r in ROWS), UnknownAdapterError, "no adapter is named 'd'"),
    "a row without": (lambda pipe: pipe(Rows([*ROWS[:4], {"text": "w5"}])), ValueError, "for input 4"),
    "a streamed row without": (lambda pipe: pipe(r for r in [*ROWS[:4], "w5"]), ValueError, "got str for input 4"),
    "a row with": (lambda pipe: pipe(Rows(["w5", ROWS[0]])), ValueError, "one that does.*after one that does not"),
    "a streamed row with": (lambda pipe: pipe(r for r in ["w5", ROWS[0]]), ValueError, "one that does.*after one that"),
    "twice": (lambda pipe: pipe((r for r in ROWS), adapter_names=NAMES), ValueError, "named once.*got both"),
}  # fmt: skip


@pytest.mark.parametrize("name", ["text", "tokens", "generation"])
def test_what_is_refused_before_any_work(served: Get, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = served(name)
    pipe = pipe_of(case)
    for call, error, message in WRONG.values():
        with monkeypatch.context() as patch, pytest.raises(error, match=message):
            patch.setattr(type(pipe), "preprocess", None)
            call(pipe)
    case.check(pipe(TEXTS, adapter_names=NAMES, **case.case.params))
    runtime = pipe.model._multilora
    assert not runtime.routing.open and all(e.in_flight == 0 for e in runtime.store.catalogue)


@pytest.mark.parametrize("batch_size", [1, 2])
@pytest.mark.parametrize("what", LATE)
def test_what_a_stream_shows_late(served: Get, what: str, batch_size: int) -> None:
    case, (call, error, message) = served("text"), LATE[what]
    pipe = pipe_of(case)
    pipe._batch_size = batch_size
    with pytest.raises(error, match=message):
        list(call(pipe))
    case.check(pipe(TEXTS, adapter_names=NAMES))


def test_an_adapter_deleted_meanwhile(served: Get) -> None:
    case = served("text")
    pipe = pipe_of(case)
    answers = iter(pipe(Rows(named("text")), batch_size=1))
    assert close(next(answers), case.alone("a", TEXTS[0]))
    pipe.model.delete_adapter("b")
    assert close(next(answers), case.alone(None, TEXTS[1]))
    with pytest.raises(UnknownAdapterError, match="no adapter is named 'b'"):
        next(answers)
    case.check(pipe(TEXTS[:2], adapter_names=["c", "a"]), ["c", "a"])


# -- the pipeline itself ---------------------------------------------------------------------------------------------
def test_it_is_transformers_own_pipeline(served: Get) -> None:
    case = served("text")
    pipe = pipe_of(case)
    own = tf.TextClassificationPipeline
    assert isinstance(pipe, own) and type(pipe).__name__ == own.__name__ and type(pipe).__module__ == own.__module__
    for again in (copy.deepcopy(pipe), pickle.loads(pickle.dumps(pipe))):
        assert type(again) is type(pipe) and again.model is not pipe.model
        case.check(again(TEXTS, adapter_names=NAMES, batch_size=2))


def test_a_base_by_its_folder(served: Get, tmp_path: Any) -> None:
    case = served("text")
    case.family.base.save_pretrained(tmp_path)
    case.tokenizer().save_pretrained(tmp_path)
    paths = {name: str(path) for name, path in case.family.paths.items()}
    pipe = pipeline("text-classification", str(tmp_path), adapters=paths, max_loras=2, device="cpu", batch_size=2)
    assert pipe.model._multilora.config.max_loras == 2
    case.check(pipe(TEXTS, adapter_names=NAMES))
    alone = pipeline("text-classification", str(tmp_path), device="cpu")
    assert alone.model.load_adapter(paths["b"]) == "b"
    case.check(alone(TEXTS, adapter_names=["b", None, "b", None, "b"]), ["b", None, "b", None, "b"])


def test_a_loaded_model_is_taken(served: Get) -> None:
    case = served("text")
    base = copy.deepcopy(case.family.base)
    with pytest.raises(FileNotFoundError):
        pipeline("text-classification", base, tokenizer=tokenizer(), adapters=["nowhere"], device="cpu")
    assert type(base) is type(case.family.base)
    paths = [str(path) for path in case.family.paths.values()]
    pipe = pipeline("text-classification", base, tokenizer=tokenizer(), adapters=paths, device="cpu")
    assert pipe.model is base
    case.check(pipe(TEXTS, adapter_names=NAMES))
    for wrong in ({"adapters": paths}, {"max_loras": 3}):
        with pytest.raises(ValueError, match=f"got a MultiLoRAModel and .*{next(iter(wrong))}"):
            pipeline("text-classification", base, tokenizer=tokenizer(), device="cpu", **wrong)
    for name in ("adapter_names", "adapter"):
        with pytest.raises(TypeError, match=f"as adapter_names, got \\['{name}'\\]"):
            pipeline("text-classification", base, tokenizer=tokenizer(), device="cpu", **{name: "a"})
    with pytest.raises(ValueError, match="must be given a model: a folder, a Hub id or a loaded model, got None"):
        pipeline("text-classification", tokenizer=tokenizer(), adapters=paths)
    base.unpatch()
    with pytest.raises(TypeError, match="must be a MultiLoRAModel, got a BertForSequenceClassification"):
        pipe(TEXTS, adapter_names=NAMES)


def test_a_peft_model_is_taken_over(served: Get) -> None:
    case = served("generation")
    peft = PeftModel.from_pretrained(copy.deepcopy(case.family.base), str(case.family.paths["b"]), adapter_name="b")
    more = {name: str(case.family.paths[name]) for name in "ac"}
    pipe = pipeline("text-generation", peft, tokenizer=case.tokenizer(), adapters=more, device="cpu")
    case.check(pipe(TEXTS, adapter_names=NAMES, batch_size=2, **GREEDY))


def test_threads_share_a_pipeline(served: Get) -> None:
    case = served("text")
    pipe = pipe_of(case)
    got: dict[str, Any] = {}

    def work(name: str) -> None:
        got[name] = [pipe(TEXTS, adapter_names=name, batch_size=2) for _ in range(5)]

    threads = [threading.Thread(target=work, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for name in "abc":
        for answers in got[name]:
            case.check(answers, [name] * len(NAMES))
