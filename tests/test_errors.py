"""Bad input and failures: a specific error that says what to do, and a model that answers as before."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_multilora import (
    AdapterError,
    CapacityError,
    MultiLoRACollator,
    MultiLoRAModel,
    RoutingError,
    UnknownAdapterError,
)
from tests.models import INPUTS, NAMES, NEW, VOCAB, right_rows

pytest_plugins = ("tests.fixtures",)


Wrong = tuple[Any, type[BaseException], str]
# what a call names -> error and what its message holds
WRONG_NAMES: dict[str, Wrong] = {
    "unknown": (["a", "bb", "b", "c"], UnknownAdapterError, r"no adapter is named 'bb'; did you mean \['b'\]\?"),
    "unknown, none close": (["a", "zzz", "b", "c"], UnknownAdapterError, r"'zzz'; known: \['a', 'b', 'c'\]"),
    "empty": (["a", "", "b", "c"], UnknownAdapterError, "no adapter is named ''"),
    "other case": (["A", None, None, None], UnknownAdapterError, "no adapter is named 'A'"),
    "too few": (["a"], RoutingError, r"one adapter per (prompt|row), got 1 for 4"),
    "too many": (["a"] * 5, RoutingError, r"one adapter per (prompt|row), got 5 for 4"),
    "twice as many": (["a"] * 8, RoutingError, r"one adapter per (prompt|row), got 8 for 4"),
    "none": ([], RoutingError, r"one adapter per (prompt|row), got 0 for 4"),
    "a string": ("abca", TypeError, "must be a list with one name .* got 'abca'"),
    "a dict": ({"a": 1}, TypeError, "must be a list"),
    "an iterator": (iter(NAMES), TypeError, "must be a list"),
    "numbers": ([1, 2, 3, 1], TypeError, "adapter_names must hold names or None, got 1"),
    "a tensor": (torch.tensor([1, 2, 3, 1]), TypeError, "must be a list"),
    "nested": ([["a"], None, None, None], TypeError, "must hold names or None"),
}
WRONG_IDS: dict[str, Wrong] = {
    "unknown": (
        torch.tensor([1, 0, 9, 2]),
        UnknownAdapterError,
        r"no adapter has id 9; 0 is the base, known: \{1: 'a'",
    ),
    "negative": (torch.tensor([1, 0, -1, 2]), UnknownAdapterError, "no adapter has id -1"),
    "floats": (torch.tensor([1.0, 0, 2, 3]), TypeError, r"must be integers \[rows\], got torch.float32 \(4,\)"),
    "bools": (torch.tensor([True, False, True, False]), TypeError, "must be integers .* got torch.bool"),
    "a list of floats": ([1.0, 0.0, 2.0, 3.0], TypeError, "must be integers"),
    "a list of bools": ([True, False, True, False], TypeError, "must be integers"),
    "a list of names": (["a", "b", "c", "a"], TypeError, "must be integers"),
    "two dimensions": (torch.ones(4, 1, dtype=torch.int64), TypeError, r"\(4, 1\)"),
    "one number": (1, TypeError, "must be integers"),
    "a scalar tensor": (torch.tensor(1), TypeError, "must be integers"),
    "too few": (torch.tensor([1, 2]), RoutingError, "one adapter per (prompt|row), got 2 for 4"),
    "too many": ([1] * 8, RoutingError, "one adapter per (prompt|row), got 8 for 4"),
}


@pytest.mark.parametrize("call", ["generate", "forward", "generate with return sequences"])
@pytest.mark.parametrize(
    ("key", "what"), [("adapter_names", w) for w in WRONG_NAMES] + [("adapter_ids", w) for w in WRONG_IDS]
)
def test_wrong_names_and_ids(model: Any, key: str, what: str, call: str) -> None:
    value, error, message = (WRONG_NAMES if key == "adapter_names" else WRONG_IDS)[what]
    settings = {"num_return_sequences": 2, "do_sample": True} if call.endswith("sequences") else {}
    with pytest.raises(error, match=message) as raised:
        (model if call == "forward" else model.generate)(**INPUTS, **settings, **{key: value})
    assert raised.type is error


def test_one_name_per_return_sequence_is_not_one_per_prompt(model: Any) -> None:
    """Two prompts with two return sequences are four rows; four names must still not pass for them."""
    two = {k: v[:2] for k, v in INPUTS.items()}
    settings = {"num_return_sequences": 2, "do_sample": True, "max_new_tokens": 2}
    with pytest.raises(RoutingError, match="one adapter per prompt, got 4 for 2 prompts; beams and return sequences"):
        model.generate(**two, adapter_names=NAMES, **settings)
    with model.adapters(NAMES), pytest.raises(RoutingError, match="got 4 for 2 prompts"):
        model.generate(**two, **settings)
    assert model.generate(**two, adapter_names=NAMES[:2], **settings).shape[0] == 4


@pytest.mark.parametrize("call", ["generate", "forward"])
def test_names_and_ids_at_once(model: Any, call: str) -> None:
    with pytest.raises(ValueError, match="pass adapter_names or adapter_ids, not both"):
        (model if call == "forward" else model.generate)(
            **INPUTS, adapter_names=NAMES, adapter_ids=torch.tensor([1, 0, 2, 3])
        )


@pytest.mark.parametrize("what", ["unknown", "too few", "too many", "a string", "numbers", "none"])
def test_a_block_with_wrong_names(model: Any, what: str) -> None:
    names, error, _ = WRONG_NAMES[what]
    with pytest.raises(error), model.adapters(names):
        model.generate(**INPUTS, max_new_tokens=2)


def test_a_block_without_names(model: Any) -> None:
    with pytest.raises(TypeError, match="adapter_names must be a list"), model.adapters(None):
        raise AssertionError("the block must not start")


def test_a_call_without_rows(model: Any) -> None:
    with pytest.raises(RoutingError, match=r"a tensor with its rows in front, LlamaForCausalLM got \['use_cache'\]"):
        model(use_cache=False, adapter_names=NAMES)


@pytest.mark.parametrize(
    ("positions", "said"),
    [(None, "got None"), ([[0, 1, 2, 0, 1, 2]], r"with 3 sequences, got \[3, 3\]"), ([[1, 2, 0, 1, 0, 1]], "got None")],
)
def test_a_packed_row_whose_sequences_cannot_be_told(model: Any, positions: Any, said: str) -> None:
    packed = {"input_ids": torch.randint(3, VOCAB, (1, 6)), "use_cache": False}
    if positions is not None:
        packed["position_ids"] = torch.tensor(positions)
    with pytest.raises(RoutingError, match=said):
        model(**packed, adapter_names=["a", "b", "c"])


@pytest.mark.parametrize("how", ["generate_batch", "generate_batch in a block", "paged"])
def test_continuous_batching_with_adapters_per_row(model: Any, how: str) -> None:
    with pytest.raises(NotImplementedError, match=r"one adapter for all requests.*set_adapter\(name\)"):
        if how == "paged":
            model.generate(INPUTS["input_ids"], adapter_names=NAMES, cache_implementation="paged")
        elif how == "generate_batch":
            model.generate_batch([[3, 4]], adapter_names=["a"])
        else:
            with model.adapters(["a"]):
                model.generate_batch([[3, 4]])


def test_replicas_of_data_parallel_are_refused(model: Any) -> None:
    """The flag is what DataParallel sets on its replicas."""
    model._is_replica = True
    try:
        with pytest.raises(RoutingError, match=r"DataParallel shares one routing.*use one process per GPU"):
            model(**INPUTS, adapter_names=NAMES)
    finally:
        del model._is_replica


# -- registration ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["", "  ", "__base__", 3])
def test_names_that_could_not_be_told_from_the_base(model: Any, family: Any, name: Any) -> None:
    with pytest.raises(ValueError, match="must be a non-empty string other than '__base__', got"):
        model.load_adapter(str(family("llama").adapter("aa")), name)


def test_a_name_that_is_taken(model: Any, family: Any) -> None:
    with pytest.raises(ValueError, match=r"'a' is registered already .*choose another .*load_inplace"):
        model.load_adapter(str(family("llama").adapter("b")), "a")
    with pytest.raises(ValueError, match=r"must have different names.*pass a dict"):
        folder = str(family("llama").adapter("a"))
        MultiLoRAModel.from_pretrained(family("llama").model([]).unpatch(), [folder, folder + "/"])


@pytest.mark.parametrize("verb", ["delete_adapter", "pin_adapter", "unpin_adapter", "set_adapter", "verify"])
def test_verbs_with_an_unknown_name(model: Any, verb: str) -> None:
    with pytest.raises(UnknownAdapterError, match="no adapter is named 'aa'; did you mean"):
        getattr(model, verb)("aa")


@pytest.mark.parametrize("folder", ["nowhere", "empty"])
def test_a_folder_without_an_adapter(model: Any, tmp_path: Any, folder: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises((AdapterError, OSError)):
        model.load_adapter(str(tmp_path / folder))


@pytest.mark.parametrize("value", [0, -1, True, 1.5, None, "8"])
def test_slots_that_are_no_number_of_slots(family: Any, value: Any) -> None:
    base = family("llama").model([]).unpatch()
    kind = type(base)
    with pytest.raises(ValueError, match=f"max_loras must be a positive integer, got {value!r}"):
        MultiLoRAModel.from_pretrained(base, max_loras=value)
    assert type(base) is kind and not hasattr(base, "_multilora")


def test_a_pin_too_many(family: Any) -> None:
    model = family("llama").model(max_loras=2)
    model.pin_adapter("a")
    model.pin_adapter("b")
    with pytest.raises(CapacityError, match=r"at most max_loras=2 .*\['a', 'b'\] are; unpin one or raise max_loras"):
        model.pin_adapter("c")
    assert [row["pinned"] for row in model.list_adapters()] == [True, True, False]
    with pytest.raises(CapacityError, match="max_loras"):
        model.generate(**INPUTS, adapter_names=[None, None, None, "c"], max_new_tokens=2)
    model.unpin_adapter("b")
    got = model.generate(**INPUTS, adapter_names=["c"] * 4, max_new_tokens=NEW)[:, 7:]
    assert all(right_rows(got, family("llama").truth(["c"] * 4, INPUTS, max_new_tokens=NEW)))


# -- slips of the pen -------------------------------------------------------------------------------
def test_slips(served: Any) -> None:
    """What a `**kwargs` would swallow, or an attribute error would hide, is a clear error."""
    family, model = served("llama")
    for typo in ("adapter_name", "adapter_id"):
        with pytest.raises(TypeError, match=f"'{typo}' must be spelled '{typo}s'"):
            model(**INPUTS, **{typo: NAMES})
    with pytest.raises(TypeError, match="set_adapter takes one name"):
        model.set_adapter(["a", "b"])
    with pytest.raises(UnknownAdapterError, match="no adapter is named 'late'"):
        model.load_adapter("anywhere", "late", load_inplace=True)
    with pytest.raises(TypeError, match=r"made by MultiLoRAModel\.from_pretrained"):
        MultiLoRAModel(family.base)
    with pytest.raises(TypeError, match="model must be a MultiLoRAModel, got LlamaForCausalLM"):
        MultiLoRACollator(None, family.base)
    with pytest.raises(UnknownAdapterError, match="this collator knows the names from when it was made"):
        MultiLoRACollator(None, model)([{"input_ids": [1], "adapter": "late"}])
