"""Trainer and Seq2SeqTrainer on rows that name their adapter: losses and predictions of each row's adapter alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf
from accelerate.state import AcceleratorState, GradientState
from torch.utils.data import Dataset

from hf_multilora import CapacityError, MultiLoRACollator
from hf_multilora.integrations.trainers import row_loss
from hf_multilora.pool import FILL
from tests.heads import Heads, Made, bert, labels
from tests.integrations.pipes import TEXTS, tokenizer
from tests.models import NEW, PAD, Family, right_rows

pytest_plugins = ("tests.fixtures",)

NAMES = ["a", None, "b", "c", "b"]
TARGETS = [[5, 6], [7, 8, 9, 10], [11], [12, 13, 14], [15, 16]]


class Rows(Dataset[dict[str, Any]]):
    def __init__(self, rows: Sequence[dict[str, Any]]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> dict[str, Any]:
        return dict(self.rows[i])


@pytest.fixture(autouse=True)
def _fresh_accelerate() -> Iterator[None]:
    """accelerate keeps its state for the whole process."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def arguments(kind: Any, folder: Path, rows: int, **settings: Any) -> Any:
    settings = {"report_to": [], "use_cpu": True, "disable_tqdm": True, "remove_unused_columns": False} | settings
    return kind(str(folder), per_device_eval_batch_size=rows, **settings)


# -- encoder-decoders ------------------------------------------------------------------------------------------------
def seq2seq(model: Any, folder: Path, rows: int = 5, **settings: Any) -> tf.Seq2SeqTrainer:
    words = tokenizer(pad_token="<s>", bos_token=None)  # its number is tests.models.PAD
    assert words.pad_token_id == PAD
    settings = {"predict_with_generate": True} | settings
    config = arguments(tf.Seq2SeqTrainingArguments, folder, rows, **settings)
    return tf.Seq2SeqTrainer(model, config, data_collator=MultiLoRACollator(words, model), processing_class=words)


def targets(names: Sequence[str | None] = NAMES, *, words: bool = False) -> Rows:
    made = [" ".join(f"w{i}" for i in target) if words else target for target in TARGETS]
    return Rows([{"text": t, "labels": m, "adapter": n} for t, m, n in zip(TEXTS, made, names, strict=True)])


def loss_of(family: Family, names: Sequence[str | None]) -> float:
    """Mean over all target tokens, from PEFT's losses of each row alone."""
    total = 0.0
    for text, target, name in zip(TEXTS, TARGETS, names, strict=True):
        with family.alone(name) as alone, torch.no_grad():
            inputs = tokenizer()(text, return_tensors="pt")
            total += float(alone(**inputs, labels=torch.tensor([target])).loss) * len(target)
    return total / sum(map(len, TARGETS))


@pytest.mark.parametrize("name", ["t5", "bart"])
@pytest.mark.parametrize("words", [True, False])
def test_seq2seq_predicts_and_evaluates(served: Any, tmp_path: Path, name: str, words: bool) -> None:
    family, model = served(name)
    out = seq2seq(model, tmp_path).predict(targets(words=words), max_new_tokens=NEW)
    alone = [dict(tokenizer()(text, return_tensors="pt")) for text in TEXTS]
    turned = [*NAMES[1:], NAMES[0]]
    for names in (NAMES, turned):
        truth = [family.row(n, x, max_new_tokens=NEW) for n, x in zip(names, alone, strict=True)]
        got = torch.as_tensor(out.predictions)[:, : NEW + 1]
        assert right_rows(got, truth) == [names == NAMES] * len(NAMES)
        assert (abs(out.metrics["test_loss"] - loss_of(family, names)) < 1e-3) == (names == NAMES)
    for row, target in zip(out.label_ids, TARGETS, strict=True):
        assert row[: len(target)].tolist() == target and set(row[len(target) :].tolist()) <= {-100, PAD}
    plain = seq2seq(model, tmp_path, predict_with_generate=False).evaluate(targets(words=words))
    assert abs(plain["eval_loss"] - loss_of(family, NAMES)) < 1e-3


def test_seq2seq_with_fewer_slots(family: Callable[[str], Family], tmp_path: Path) -> None:
    """Targets can only be generated in passes: a loss over the batch would change."""
    model = family("t5").model(max_loras=1)
    rows = Rows([{k: v for k, v in row.items() if k != "labels"} for row in targets()])
    out = seq2seq(model, tmp_path).predict(rows, max_new_tokens=NEW)
    alone = [dict(tokenizer()(text, return_tensors="pt")) for text in TEXTS]
    truth = [family("t5").row(n, x, max_new_tokens=NEW) for n, x in zip(NAMES, alone, strict=True)]
    assert all(right_rows(torch.as_tensor(out.predictions)[:, : NEW + 1], truth))
    with pytest.raises(CapacityError, match="labels"):
        seq2seq(model, tmp_path, predict_with_generate=False).evaluate(targets())
    one = seq2seq(model, tmp_path, rows=1, predict_with_generate=False).evaluate(targets())
    assert np.isfinite(one["eval_loss"])


def test_removed_columns_are_told(served: Any, tmp_path: Path) -> None:
    _, model = served("t5")
    trainer = seq2seq(model, tmp_path, remove_unused_columns=True)
    with pytest.raises(ValueError, match=r"name its adapter once.*pass remove_unused_columns=False"):
        trainer.predict(targets())


# -- heads of different widths ---------------------------------------------------------------------------------------
SEQ, TOK = {"task_type": "SEQ_CLS"}, {"task_type": "TOKEN_CLS"}
WIDE = ["five", None, "two", "four", "five"]
CLASSES = [4, 0, 1, 3, 2]


@pytest.fixture(scope="module")
def classifiers(tmp_path_factory: pytest.TempPathFactory) -> Heads:
    made = {"five": Made(SEQ, labels("classifier", 5)), "two": Made(SEQ), "four": Made(SEQ, labels("classifier", 4))}
    return Heads(bert(num_labels=3), tmp_path_factory.mktemp("classifiers"), made)


@pytest.fixture(scope="module")
def taggers(tmp_path_factory: pytest.TempPathFactory) -> Heads:
    made = {"five": Made(TOK, labels("classifier", 5)), "two": Made(TOK, labels("classifier", 2)), "four": Made(TOK)}
    return Heads(bert(tf.BertForTokenClassification, num_labels=3), tmp_path_factory.mktemp("taggers"), made)


@torch.no_grad()
def logits_of(heads: Heads, name: str | None, text: str) -> torch.Tensor:
    return heads.alone[name](**tokenizer()(text, return_tensors="pt")).logits[0]


def trainer_of(model: Any, folder: Path, rows: int, **settings: Any) -> tf.Trainer:
    config = arguments(tf.TrainingArguments, folder, rows)
    return tf.Trainer(model, config, data_collator=MultiLoRACollator(tokenizer(), model), **settings)


def texts(**more: Sequence[Any]) -> Rows:
    rows = [{"text": text, "adapter": name} for text, name in zip(TEXTS, WIDE, strict=True)]
    return Rows([row | {key: values[i] for key, values in more.items()} for i, row in enumerate(rows)])


@pytest.mark.parametrize("max_loras", [8, 2])
@pytest.mark.parametrize("rows", [1, 2, 5])
def test_predictions_are_cut_to_each_rows_own_width(
    classifiers: Heads, tmp_path: Path, rows: int, max_loras: int
) -> None:
    """Trainer fills up with -100 between batches, the model with -inf inside one: split_logits takes both away."""
    model = classifiers.model(max_loras=max_loras)
    out = trainer_of(model, tmp_path, rows).predict(texts())
    assert out.predictions.shape == (5, 5)
    got = model.split_logits(torch.as_tensor(out.predictions), WIDE)
    for i, name in enumerate(WIDE):
        torch.testing.assert_close(got[i], logits_of(classifiers, name, TEXTS[i]), atol=1e-4, rtol=1e-4)
        other = logits_of(classifiers, WIDE[i - 2], TEXTS[i])
        assert other.shape != got[i].shape or not torch.allclose(got[i], other, atol=1e-2)


@pytest.mark.parametrize("max_loras", [8, 2])
@pytest.mark.parametrize("rows", [1, 2, 5])
def test_losses_of_each_rows_own_head(classifiers: Heads, tmp_path: Path, rows: int, max_loras: int) -> None:
    model = classifiers.model(max_loras=max_loras)
    trainer = trainer_of(
        model, tmp_path, rows, compute_loss_func=row_loss,
        compute_metrics=lambda out: {"right": float((out.predictions.argmax(-1) == out.label_ids).mean())},
    )  # fmt: skip
    metrics = trainer.evaluate(texts(label=CLASSES))
    logits = [logits_of(classifiers, name, text) for name, text in zip(WIDE, TEXTS, strict=True)]
    losses = [torch.nn.functional.cross_entropy(x, torch.tensor(c)) for x, c in zip(logits, CLASSES, strict=True)]
    assert abs(metrics["eval_loss"] - float(torch.stack(losses).mean())) < 1e-4
    assert metrics["eval_right"] == sum(int(x.argmax()) == c for x, c in zip(logits, CLASSES, strict=True)) / 5
    other = trainer.evaluate(texts(label=[0, 1, 1, 0, 4]))["eval_loss"]
    assert abs(other - metrics["eval_loss"]) > 1e-3
    with pytest.raises(ValueError, match=r"labels must be those of their row's own head, row \d has \d of them"):
        trainer.evaluate(texts(label=[0, 3, 0, 0, 0]))  # the base has three


def test_transformers_own_loss_refuses_other_widths(classifiers: Heads, tmp_path: Path) -> None:
    """It takes all rows to have the base's number of labels."""
    model = classifiers.model()
    for rows in (1, 2, 5):
        with pytest.raises((ValueError, RuntimeError)):
            trainer_of(model, tmp_path, rows).evaluate(texts(label=CLASSES))
    narrow = Rows([row | {"adapter": None, "label": 1} for row in texts()])
    assert np.isfinite(trainer_of(model, tmp_path, 5).evaluate(narrow)["eval_loss"])


def test_token_labels(taggers: Heads, tmp_path: Path) -> None:
    """Trainer cannot put batches together whose last dimensions differ: the labels of all rows can."""
    model = taggers.model()
    tags = [[(i + k) % 2 for k in range(len(text.split()))] for i, text in enumerate(TEXTS)]
    trainer = trainer_of(
        model, tmp_path, 2, compute_loss_func=row_loss,
        preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1),
    )  # fmt: skip
    out = trainer.predict(texts(labels=tags))
    for i, name in enumerate(WIDE):
        alone = logits_of(taggers, name, TEXTS[i])
        assert out.predictions[i, : len(alone)].tolist() == alone.argmax(-1).tolist()
        assert out.label_ids[i][out.label_ids[i] != -100].tolist() == tags[i]
    logits = [logits_of(taggers, name, text) for name, text in zip(WIDE, TEXTS, strict=True)]
    one = trainer_of(model, tmp_path, 5, compute_loss_func=row_loss).evaluate(texts(labels=tags))["eval_loss"]
    losses = [
        torch.nn.functional.cross_entropy(x, torch.tensor(t), reduction="none")
        for x, t in zip(logits, tags, strict=True)
    ]
    assert abs(one - float(torch.cat(losses).mean())) < 1e-4


# -- the loss by itself ----------------------------------------------------------------------------------------------
def test_row_loss_takes_what_it_can_tell() -> None:
    logits = torch.tensor([[1.0, 2.0, FILL], [0.5, -1.0, 3.0]])
    each = [torch.nn.functional.cross_entropy(x, torch.tensor(1)) for x in (logits[0, :2], logits[1])]
    torch.testing.assert_close(row_loss({"logits": logits}, torch.tensor([1, 1])), (each[0] + each[1]) / 2)
    torch.testing.assert_close(row_loss((logits,), torch.tensor([1, -100])), each[0])
    torch.testing.assert_close(row_loss((logits,), torch.tensor([1, 1]), 4), (each[0] + each[1]) / 4)
    single = {"logits": torch.tensor([[1.0, FILL], [3.0, FILL]])}
    torch.testing.assert_close(row_loss(single, torch.tensor([2.0, 1.0])), torch.tensor(2.5))
    for wrong in ([2, 1], [0, 3], [-1, 0]):
        with pytest.raises(
            ValueError, match=r"labels must be those of their row's own head, row [01] has [23] of them"
        ):
            row_loss((logits,), torch.tensor(wrong))
    for labels_of in (None, torch.tensor([1]), torch.tensor([[1, 1]])):
        with pytest.raises(ValueError, match=r"labels must be \(2,\) for logits \(2, 3\)"):
            row_loss((logits,), labels_of)
    with pytest.raises(ValueError, match="floats must be labels of rows with one output each"):
        row_loss((logits,), torch.tensor([1.0, 0.0]))
    half = row_loss((logits.bfloat16(),), torch.tensor([1, 1]))
    assert half.dtype == torch.float32 and half.isfinite()
