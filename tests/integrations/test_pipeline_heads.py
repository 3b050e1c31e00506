"""Pipelines whose adapters bring heads of their own: labels, widths and functions of each row are its adapter's."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf

from hf_multilora.integrations.pipelines import pipeline
from tests.heads import Heads, Made, bert, labels
from tests.integrations.pipes import TEXTS, ZERO_SHOT, close, tokenizer

LORA, SEQ, TOK = Made({}), {"task_type": "SEQ_CLS"}, {"task_type": "TOKEN_CLS"}


@dataclass(frozen=True)
class Case:
    """names: adapter (None: the base) -> (file that tells its labels, or "" where none does; the labels)."""

    task: str
    build: Callable[[], Any]
    adapters: Mapping[str, Made]
    names: Mapping[str | None, tuple[str, Sequence[str]]]
    params: Mapping[str, Any] = field(default_factory=dict)


def base(cls: Any, *names: str) -> Callable[[], Any]:
    def build() -> Any:
        config = {"id2label": dict(enumerate(names)), "label2id": {name: i for i, name in enumerate(names)}}
        return bert(cls, **config)

    return build


FIVE, TWO, ONE = ("law", "tax", "art", "war", "sea"), ("yes", "no"), ("relevant",)
BIO, NLI = ("O", "B-X", "I-X", "B-Y", "I-Y"), ("contradiction", "neutral", "entailment")
SEQUENCES = {
    "five": Made(SEQ, labels("classifier", 5)), "two": Made(SEQ), "one": Made(SEQ, labels("classifier", 1)),
    "four": Made(SEQ, labels("classifier", 4)), "plain": LORA,
}  # fmt: skip
SEQUENCE_NAMES = {
    None: ("", ("good", "bad")), "five": ("adapter_config.json", FIVE), "two": ("config.json", TWO),
    "one": ("config.json", ONE), "four": ("", [f"LABEL_{i}" for i in range(4)]), "plain": ("", ("good", "bad")),
}  # fmt: skip
TAGGERS = {"five": Made(TOK, labels("classifier", 5)), "two": Made(TOK), "plain": LORA}
TAGGER_NAMES = {
    None: ("", ("O", "B-Z", "I-Z")), "five": ("adapter_config.json", BIO), "two": ("config.json", ("B-Q", "I-Q", "O")),
    "plain": ("", ("O", "B-Z", "I-Z")),
}  # fmt: skip
JUDGES = {"turned": Made(SEQ), "two": Made(SEQ, labels("classifier", 2)), "plain": LORA}
JUDGE_NAMES = {
    None: ("", NLI), "turned": ("adapter_config.json", NLI[::-1]), "two": ("config.json", ("entails", "not")),
    "plain": ("", NLI),
}  # fmt: skip
SEQUENCE_BASE = base(tf.BertForSequenceClassification, "good", "bad")
TAGGER_BASE = base(tf.BertForTokenClassification, "O", "B-Z", "I-Z")
JUDGE_BASE = base(tf.BertForSequenceClassification, *NLI)
CASES = {
    "text": Case("text-classification", SEQUENCE_BASE, SEQUENCES, SEQUENCE_NAMES),
    "all scores": Case("text-classification", SEQUENCE_BASE, SEQUENCES, SEQUENCE_NAMES, {"top_k": None}),
    "sigmoid": Case(
        "text-classification", SEQUENCE_BASE, SEQUENCES, SEQUENCE_NAMES, {"top_k": 9, "function_to_apply": "sigmoid"}
    ),
    "tokens": Case("token-classification", TAGGER_BASE, TAGGERS, TAGGER_NAMES, {"ignore_labels": ["I-X"]}),
    "entities": Case(
        "ner", TAGGER_BASE, TAGGERS, TAGGER_NAMES, {"ignore_labels": [], "aggregation_strategy": "simple"}
    ),
    "zero-shot": Case("zero-shot-classification", JUDGE_BASE, JUDGES, JUDGE_NAMES, ZERO_SHOT),
    "zero-shot, several": Case(
        "zero-shot-classification", JUDGE_BASE, JUDGES, JUDGE_NAMES, ZERO_SHOT | {"multi_label": True}
    ),
}


class Served:
    def __init__(self, case: Case, folder: Path) -> None:
        self.case = case
        self.heads = Heads(case.build(), folder, case.adapters)
        self._alone: dict[str | None, Any] = {}
        for name, (file, names) in case.names.items():
            if file:
                path = folder / str(name) / file
                settings = json.loads(path.read_text()) if path.exists() else {}
                path.write_text(json.dumps(settings | {"id2label": dict(enumerate(names))}))

    def pipe(self, **settings: Any) -> Any:
        return pipeline(self.case.task, model=self.heads.model(**settings), tokenizer=tokenizer(), device="cpu")

    def alone(self, name: str | None, text: str) -> Any:
        """What Transformers' own pipeline answers with PEFT's adapter merged, under the adapter's labels."""
        if name not in self._alone:
            model = copy.deepcopy(self.heads.alone[name])
            model = model if name is None else model.merge_and_unload()
            names = self.case.names[name][1]
            model.config.id2label = dict(enumerate(names))
            model.config.label2id = {label: i for i, label in enumerate(names)}
            self._alone[name] = tf.pipeline(self.case.task, model=model, tokenizer=tokenizer(), device="cpu")
        return next(iter(self._alone[name]((t for t in [text]), **self.case.params)))

    @property
    def names(self) -> list[str | None]:
        return [*self.case.names, *self.case.names][:5]

    def check(self, got: Sequence[Any], names: Sequence[str | None]) -> None:
        for answer, text, name, other in zip(got, TEXTS, names, [*names[1:], names[0]], strict=True):
            wanted = self.alone(name, text)
            assert close(answer, wanted), f"{name} must answer {wanted} to {text}, got {answer}"
            assert name == other or not close(answer, self.alone(other, text)), "the control passes"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Served]]:
    made: dict[str, Served] = {}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)

    def get(name: str) -> Served:
        if name not in made:
            made[name] = Served(CASES[name], tmp_path_factory.mktemp("heads"))
        return made[name]

    yield get
    torch.set_num_threads(threads)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("batch_size", "max_loras"), [(1, 8), (2, 8), (5, 8), (5, 2)])
def test_labels_are_each_adapters_own(served: Any, name: str, batch_size: int, max_loras: int) -> None:
    case = served(name)
    pipe = case.pipe(max_loras=max_loras)
    config = pipe.model.config.to_dict()
    for names in (case.names, case.names[::-1]):
        case.check(pipe(TEXTS, adapter_names=names, batch_size=batch_size, **case.case.params), names)
    assert pipe.model.config.to_dict() == config


@pytest.mark.parametrize("name", CASES)
def test_labels_of_the_default_and_of_a_block(served: Any, name: str) -> None:
    case = served(name)
    pipe, params = case.pipe(), case.case.params
    for adapter in (*case.case.names, None):
        pipe.model.set_adapter(adapter)
        case.check(pipe(TEXTS, batch_size=2, **params), [adapter] * 5)
    if not name.startswith("zero-shot"):  # there a batch has one row per label, not per input
        with pipe.model.adapters(case.names):
            case.check(pipe(TEXTS, batch_size=5, **params), case.names)


def test_adapters_that_change_while_their_answers_are_read(served: Any) -> None:
    """A batch was computed before its first answer is read: what follows must not see other labels."""
    case = served("all scores")
    pipe = case.pipe()
    answers = iter(pipe((t for t in TEXTS), adapter_names=case.names, batch_size=5, top_k=None))
    got = [next(answers)]
    for name in ("two", "one"):
        pipe.model.load_adapter(str(case.heads.folder / "five"), name, load_inplace=True)
    pipe.model.delete_adapter("five")
    got += [next(answers) for _ in range(4)]
    case.check(got, case.names)
    again = pipe(TEXTS, adapter_names="two", top_k=None)
    case.check(again, ["five"] * 5)


def test_a_regression_base_is_no_reason_to_show_logits(served: Any) -> None:
    """Transformers says so of a base of one label once it was given labels; adapters of several are no regressions."""
    case = served("all scores")
    pipe = pipeline("text-classification", model=case.heads.model(), tokenizer=tokenizer(), device="cpu")
    pipe.model.config.problem_type = "regression"
    five, two = pipe(TEXTS[:2], adapter_names=["five", "two"], top_k=None)
    assert close(five, case.alone("five", TEXTS[0]))
    assert not close(two, case.alone("two", TEXTS[1])) and abs(sum(s["score"] for s in two) - 1) > 1e-3  # as the base


def test_a_base_whose_checkpoint_has_no_head(served: Any, tmp_path: Path) -> None:
    case = served("text")
    case.heads.base.bert.save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    adapters = {name: str(case.heads.folder / name) for name in ("five", "two", "plain")}
    pipe = pipeline("text-classification", str(tmp_path), adapters=adapters, device="cpu")
    got = pipe(TEXTS, adapter_names=["five", "two", "five", "two", "five"], batch_size=2)
    case.check(got, ["five", "two", "five", "two", "five"])
    for name in (None, "plain"):
        with pytest.raises(RuntimeError, match="every row must have its classifier from its adapter"):
            pipe(TEXTS[:2], adapter_names=["five", name], batch_size=2)
    case.check(pipe(TEXTS, adapter_names="five"), ["five"] * 5)
