"""The collator's batch, and its way through workers, pinning, slicing, accelerate and Trainer."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf
from accelerate import Accelerator, DataLoaderConfiguration, PartialState
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import send_to_device
from tokenizers import Tokenizer, pre_tokenizers, processors
from tokenizers import models as token_models
from torch.utils.data import DataLoader, Dataset

from hf_multilora import MultiLoRACollator, UnknownAdapterError
from tests.models import NEW, PAD, VOCAB, Family, generated, right_rows

pytest_plugins = ("tests.fixtures",)

Served = Callable[[str], tuple[Family, Any]]
TEMPLATE = "{% for m in messages %}{{ m['content'] }} {% endfor %}{% if add_generation_prompt %}w9{% endif %}"
WORDS = {"<unk>": 0, "<s>": 1, "<pad>": PAD, **{f"w{i}": i for i in range(3, VOCAB)}}
NAMES = ["a", None, "b", "c", "b", "__base__", "c", None]
TEXTS = ["w5 w6 w7", "w8", "w9 w10 w11 w12", "w13 w14", "w15 w16 w17", "w18 w19", "w20", "w21 w22 w23 w24"]
ROWS: list[dict[str, Any]] = [{"text": t, "adapter": n} for t, n in zip(TEXTS, NAMES, strict=True)]


class Rows(Dataset[dict[str, Any]]):
    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> dict[str, Any]:
        return dict(self.rows[i])


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    words = Tokenizer(token_models.WordLevel(WORDS, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tf.PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="<unk>", bos_token="<s>", pad_token="<pad>", padding_side="left",
        chat_template=TEMPLATE,
    )  # fmt: skip


@pytest.fixture
def fresh_accelerate() -> Iterator[None]:
    """accelerate keeps its state for the whole process."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def answers(model: Any, batches: Any) -> list[torch.Tensor]:
    """New tokens of every row, over all batches."""
    new = []
    for batch in batches:
        width = batch["input_ids"].shape[1]
        new += list(model.generate(**batch, max_new_tokens=NEW)[:, width:].split(1))
    return new


def check(family: Family, tokenizer: Any, got: list[torch.Tensor], names: list[Any] = NAMES) -> None:
    """Row i is PEFT's answer to text i by adapter i; control: not that by the adapter of the next row."""
    alone = [tokenizer(text, return_tensors="pt") for text in TEXTS[: len(names)]]
    for shift in (0, 1):
        turned = [*names[shift:], *names[:shift]]
        truth = [family.row(n, dict(x), max_new_tokens=NEW) for n, x in zip(turned, alone, strict=True)]
        assert right_rows(torch.cat(got), truth) == [shift == 0] * len(names)


# -- the batch -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("side", ["left", "right"])
def test_rows_are_padded_on_the_tokenizers_side(served: Served, tokenizer: Any, side: str) -> None:
    _, model = served("llama")
    tokenizer.padding_side = side
    try:
        batch = MultiLoRACollator(tokenizer, model)(ROWS[:3])
    finally:
        tokenizer.padding_side = "left"
    rows = [[5, 6, 7], [8], [9, 10, 11, 12]]
    pads = [[PAD] * (4 - len(row)) for row in rows]
    padded = [p + row if side == "left" else row + p for p, row in zip(pads, rows, strict=True)]
    assert batch["input_ids"].tolist() == padded
    assert batch["attention_mask"].tolist() == [[int(i != PAD) for i in row] for row in padded]
    assert batch["adapter_ids"].tolist() == [1, 0, 2] and batch["adapter_ids"].dtype == torch.int64
    assert set(batch) == {"input_ids", "attention_mask", "adapter_ids"}


def test_text_messages_and_tokens_make_the_same_rows(served: Served, tokenizer: Any) -> None:
    _, model = served("llama")
    turns = [{"role": "user", "content": "w5 w6"}, {"role": "assistant", "content": "w7"}]
    rows = [
        {"text": "w5 w6 w7 w9", "adapter": "a"},
        {"messages": turns, "adapter": "b", "id": 17, "reference": "not for the model"},
        {"input_ids": [5, 6, 7, 9], "adapter_ids": 3},
        {"input_ids": torch.tensor([5, 6, 7, 9]), "adapter_ids": torch.tensor(0)},
        {"input_ids": np.array([5, 6, 7, 9]), "attention_mask": [0, 1, 1, 1], "adapter_ids": np.int64(1)},
    ]
    batch = MultiLoRACollator(tokenizer, model)(rows)
    assert batch["input_ids"].tolist() == [[5, 6, 7, 9]] * 5
    assert batch["attention_mask"].tolist() == [[1] * 4] * 4 + [[0, 1, 1, 1]]
    assert batch["adapter_ids"].tolist() == [1, 2, 3, 0, 1]


def test_tokenize_kwargs_reach_the_tokenizer(served: Served, tokenizer: Any) -> None:
    _, model = served("llama")
    batch = MultiLoRACollator(tokenizer, model, truncation=True, max_length=2)(ROWS[:3])
    assert batch["input_ids"].shape == (3, 2)


def test_labels_come_along(served: Served, tokenizer: Any) -> None:
    _, model = served("llama")
    collate = MultiLoRACollator(tokenizer, model)
    rows = [row | {"label": i} for i, row in enumerate(ROWS[:3])]
    assert collate(rows)["labels"].tolist() == [0, 1, 2]
    assert collate([row | {"label": 0.5} for row in rows])["labels"].dtype == torch.float32
    tokens = [{"input_ids": x, "labels": x, "adapter": None} for x in ([5, 6, 7], [8])]
    assert collate(tokens)["labels"].tolist() == [[5, 6, 7], [-100, -100, 8]]
    for wrong in ([tokens[0], tokens[1] | {"labels": [8, 9]}], [rows[0], ROWS[1]], [tokens[0], rows[1]]):
        with pytest.raises(ValueError, match="labels must be a number or one per token in every row"):
            collate(wrong)


def test_targets_of_an_encoder_decoder_have_any_length(served: Served, tokenizer: Any) -> None:
    collate = MultiLoRACollator(tokenizer, served("t5")[1])
    rows = [{"text": "w5", "labels": x, "adapter": "a"} for x in ([5, 6, 7], "w8 w9", torch.tensor([10]))]
    batch = collate(rows)
    assert batch["labels"].tolist() == [[5, 6, 7], [8, 9, -100], [10, -100, -100]]
    assert batch["input_ids"].tolist() == [[5]] * 3 and tokenizer.padding_side == "left"
    assert collate([row | {"labels": 1} for row in rows])["labels"].tolist() == [1, 1, 1]
    for wrong in ([rows[0], ROWS[1]], [rows[0], rows[1] | {"labels": 1}], [rows[0], rows[1] | {"labels": [[8]]}]):
        with pytest.raises(ValueError, match="labels must be a number or a target in every row"):
            collate(wrong)
    with pytest.raises(
        TypeError, match="labels must be numbers where the model has no decoder of its own, got 'w8 w9'"
    ):
        MultiLoRACollator(tokenizer, served("llama")[1])(rows)


def test_pairs_are_read_as_pairs(served: Served, tokenizer: Any) -> None:
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer._tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B:1", special_tokens=[("<s>", 1)]
    )
    pairs = [("w5 w6", "w7"), ("w8", "w9 w10 w11")]
    tokenizer.model_input_names = ["input_ids", "attention_mask", "token_type_ids"]
    collate = MultiLoRACollator(tokenizer, served("bert")[1])
    batch = collate([{"text": a, "text_pair": b, "adapter": "a"} for a, b in pairs])
    wanted = tokenizer([a for a, _ in pairs], [b for _, b in pairs], padding=True, return_tensors="pt")
    assert wanted["token_type_ids"].sum() == 4 and set(batch) == {*wanted, "adapter_ids"}
    assert all(torch.equal(batch[key], wanted[key]) for key in wanted)
    alone = collate([{"text": a, "text_pair": None, "adapter": "a"} for a, _ in pairs])
    assert alone["input_ids"].tolist() == [[1, 5, 6], [PAD, 1, 8]]


WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "unknown name": ({"text": "w3", "adapter": "bb"}, UnknownAdapterError, r"'bb'; did you mean \['b'\]"),
    "unknown id": ({"text": "w3", "adapter_ids": 9}, UnknownAdapterError, "no adapter has id 9"),
    "negative id": ({"text": "w3", "adapter_ids": -1}, UnknownAdapterError, "no adapter has id -1"),
    "a number as name": ({"text": "w3", "adapter": 1}, UnknownAdapterError, "no adapter is named 1"),
    "a name as id": ({"text": "w3", "adapter_ids": "a"}, TypeError, "must be an integer, got 'a'"),
    "a float": ({"text": "w3", "adapter_ids": 1.7}, TypeError, "must be an integer, got 1.7"),
    "a bool": ({"text": "w3", "adapter_ids": True}, TypeError, "must be an integer, got True"),
    "both": ({"text": "w3", "adapter": "a", "adapter_ids": 1}, ValueError, "name its adapter once"),
    "neither": ({"text": "w3"}, ValueError, r"name its adapter once.*got \['text'\].*remove_unused_columns=False"),
    "no text": ({"adapter": "a", "prompt": "w3"}, ValueError, r"must hold .*got \['adapter', 'prompt'\]"),
}


@pytest.mark.parametrize("what", WRONG)
def test_rows_that_are_refused(served: Served, tokenizer: Any, what: str) -> None:
    row, error, message = WRONG[what]
    with pytest.raises(error, match=message):
        MultiLoRACollator(tokenizer, served("llama")[1])([ROWS[0], row])


def test_it_travels_without_weights_and_knows_what_was_registered(family: Any, tokenizer: Any) -> None:
    model = family("llama").model()
    collate = MultiLoRACollator(tokenizer, model)
    weights = sum(p.nbytes for p in model.parameters()) + model.memory_report().host_bytes
    size, bare = len(pickle.dumps(collate)), len(pickle.dumps(tokenizer))
    assert size - bare < 2000 < weights
    model.delete_adapter("c")
    model.load_adapter(str(family("llama").adapter("aa")), "later")
    again = pickle.loads(pickle.dumps(collate))
    assert again(ROWS)["adapter_ids"].tolist() == [1, 0, 2, 3, 2, 0, 3, 0]
    with pytest.raises(UnknownAdapterError, match="later"):
        again([{"text": "w3", "adapter": "later"}])
    with pytest.raises(UnknownAdapterError, match="no adapter has id 3"):  # ids are never used again
        model.generate(**again(ROWS), max_new_tokens=2)


# -- its way to the model --------------------------------------------------------------------------------------------
@pytest.mark.parametrize("workers", [0, 2])
def test_data_loaders(served: Served, tokenizer: Any, workers: int) -> None:
    family, model = served("llama")
    collate = MultiLoRACollator(tokenizer, model)
    loader = DataLoader(Rows(ROWS), batch_size=3, collate_fn=collate, num_workers=workers)
    check(family, tokenizer, answers(model, loader))


def test_batches_are_moved_and_sliced_with_their_ids(served: Served, tokenizer: Any) -> None:
    family, model = served("llama")
    batch = MultiLoRACollator(tokenizer, model)(ROWS)
    assert batch.to("meta")["adapter_ids"].device.type == "meta"
    moved = send_to_device(batch.to("cpu"), "cpu")
    assert type(moved) is type(batch)
    order = [3, 1, 0, 2]
    part = {k: v[order] for k, v in moved.items()}
    got = answers(model, [part])
    back = [got[order.index(i)] for i in range(4)]
    check(family, tokenizer, back, NAMES[:4])


@pytest.mark.parametrize("dispatch", [True, False])
def test_accelerate_prepares_the_loader(served: Served, tokenizer: Any, fresh_accelerate: None, dispatch: bool) -> None:
    family, model = served("llama")
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=dispatch))
    collate = MultiLoRACollator(tokenizer, model)
    loader = accelerator.prepare(DataLoader(Rows(ROWS), batch_size=3, collate_fn=collate))
    assert type(loader).__name__ == ("DataLoaderDispatcher" if dispatch else "DataLoaderShard")
    check(family, tokenizer, answers(model, loader))


def test_accelerate_splits_a_batch_between_processes(
    served: Served, tokenizer: Any, fresh_accelerate: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of three processes would get its rows with their ids."""
    family, model = served("llama")
    collate = MultiLoRACollator(tokenizer, model)
    state = PartialState(cpu=True)
    got: list[torch.Tensor] = []
    monkeypatch.setattr(state, "num_processes", 3)
    monkeypatch.setattr(type(state), "distributed_type", "MULTI_CPU", raising=False)
    for process in range(3):
        monkeypatch.setattr(state, "process_index", process)
        with state.split_between_processes(collate(ROWS)) as part:
            assert part["adapter_ids"].shape[0] == part["input_ids"].shape[0] == (3, 3, 2)[process]
            got += answers(model, [part])
    check(family, tokenizer, got)


def arguments(folder: Any, **settings: Any) -> tf.TrainingArguments:
    return tf.TrainingArguments(
        str(folder), per_device_eval_batch_size=3, report_to=[], use_cpu=True, disable_tqdm=True, **settings
    )


@pytest.mark.parametrize("workers", [0, 2])
def test_trainer_predicts_classes(
    served: Served, tokenizer: Any, tmp_path: Any, fresh_accelerate: None, workers: int
) -> None:
    family, model = served("bert")
    rows = [row | {"label": i % 3} for i, row in enumerate(ROWS)]
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.padding_side = "right"  # BERT counts positions from the left, pads included
    trainer = tf.Trainer(
        model, arguments(tmp_path, remove_unused_columns=False, dataloader_num_workers=workers),
        data_collator=MultiLoRACollator(tokenizer, model),
    )  # fmt: skip
    out = trainer.predict(Rows(rows))
    assert out.label_ids.tolist() == [i % 3 for i in range(8)] and "test_loss" in out.metrics
    for i, name in enumerate(NAMES):
        for adapter in (name, NAMES[i - 1]):
            with family.alone(adapter) as alone, torch.no_grad():
                truth = alone(**tokenizer(TEXTS[i], return_tensors="pt")).logits[0]
            assert np.allclose(out.predictions[i], truth.numpy(), atol=2e-4) == (adapter == name)


@pytest.mark.parametrize("removed", [True, False])
def test_trainer_predicts_logits_of_a_causal_model(
    served: Served, tokenizer: Any, tmp_path: Any, fresh_accelerate: None, removed: bool
) -> None:
    """With remove_unused_columns=True ids pass, since forward takes adapter_ids; names do not, which is an error."""
    family, model = served("llama")
    ids = {None: 0, "__base__": 0, "a": 1, "b": 2, "c": 3}
    rows = [
        {"input_ids": tokenizer(text)["input_ids"], "adapter_ids": ids[name], "reference": "left out"}
        for text, name in zip(TEXTS, NAMES, strict=True)
    ]
    trainer = tf.Trainer(
        model, arguments(tmp_path, remove_unused_columns=removed), data_collator=MultiLoRACollator(tokenizer, model),
        preprocess_logits_for_metrics=lambda logits, labels: logits[0] if isinstance(logits, tuple) else logits,
    )  # fmt: skip
    logits = trainer.predict(Rows(rows), ignore_keys=["past_key_values"]).predictions
    ends = (logits[..., 0] != -100).sum(1) - 1  # Trainer pads batches of different widths on the right
    last = logits[np.arange(len(rows)), ends]
    for i, name in enumerate(NAMES):
        for adapter in (name, NAMES[i - 1]):
            with family.alone(adapter) as alone, torch.no_grad():
                truth = alone(**tokenizer(TEXTS[i], return_tensors="pt")).logits[0, -1]
            assert np.allclose(last[i], truth.numpy(), atol=2e-3) == (adapter == name)
    named = Rows([{k: v for k, v in r.items() if k != "adapter_ids"} | {"adapter": "a"} for r in rows])
    if removed:
        with pytest.raises(ValueError, match=r"got \['input_ids'\]; with Trainer pass remove_unused_columns=False"):
            trainer.predict(named)
    else:
        trainer.predict(named, ignore_keys=["past_key_values"])


def test_seq2seq_trainer_generates(served: Served, tokenizer: Any, tmp_path: Any, fresh_accelerate: None) -> None:
    family, model = served("t5")
    config = tf.Seq2SeqTrainingArguments(
        str(tmp_path), per_device_eval_batch_size=3, report_to=[], use_cpu=True, disable_tqdm=True,
        remove_unused_columns=False, predict_with_generate=True,
    )  # fmt: skip
    trainer = tf.Seq2SeqTrainer(model, config, data_collator=MultiLoRACollator(tokenizer, model))
    out = trainer.predict(Rows(ROWS), max_new_tokens=NEW)
    got = [generated(torch.as_tensor(row)[None], 0) for row in out.predictions]
    check(family, tokenizer, got)
