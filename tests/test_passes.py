"""More adapters in a batch than slots: passes give what one pass gives, and what a split would change is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers as tf

from hf_multilora import CapacityError, RoutingError
from hf_multilora.catalogue import Limits
from hf_multilora.passes import check_generate, cut, merge, merge_sequences, plan_passes
from tests.models import NEW, PAD, VOCAB, Family, check_rows, generated, prompts, row_of

pytest_plugins = ("tests.fixtures",)

NINE = ["a", "b", "c", "aa", "bb", "cc", "aaa", "bbb", "ccc"]
NAMES = [*NINE, None, "a", None]  # 12 rows, 9 adapters, base rows first and last in no pass
ROWS = len(NAMES)
LENGTHS = [3, 5, 4, 5, 2, 3, 5, 4, 3, 2, 5, 4]


@pytest.fixture(scope="module")
def small(family: Callable[[str], Family]) -> Callable[[str, int], Any]:
    """small("llama", 2): a model with nine adapters and two slots, made once."""
    made: dict[tuple[str, int], Any] = {}

    def get(name: str, max_loras: int) -> Any:
        if (name, max_loras) not in made:
            made[name, max_loras] = family(name).model(NINE, max_loras=max_loras)
        return made[name, max_loras]

    return get


# -- what is equal ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("max_loras", [2, 3, 5, 8])
@pytest.mark.parametrize("name", ["llama", "t5"])
def test_forward(family: Callable[[str], Family], small: Any, name: str, max_loras: int) -> None:
    made, model = family(name), small(name, max_loras)
    inputs = prompts(LENGTHS)
    if made.seq2seq:
        inputs["decoder_input_ids"] = torch.randint(3, VOCAB, (ROWS, 3))
    with torch.no_grad():
        out = model(**inputs, adapter_names=NAMES, output_hidden_states=True)
    assert type(out).__name__ == type(made.base(**inputs)).__name__ and out.past_key_values is None
    hidden = out.decoder_hidden_states if made.seq2seq else out.hidden_states
    for i, adapter in enumerate(NAMES):
        with made.alone(adapter) as alone, torch.no_grad():
            truth = alone(**row_of(inputs, i), output_hidden_states=True)
        own = truth.decoder_hidden_states if made.seq2seq else truth.hidden_states
        mask = inputs["attention_mask"][i].bool() if not made.seq2seq else slice(None)
        torch.testing.assert_close(out.logits[i][mask], truth.logits[0][mask], atol=3e-4, rtol=1e-3)
        torch.testing.assert_close(hidden[-1][i][mask], own[-1][0][mask], atol=3e-4, rtol=1e-3)
        assert (out.logits[(i + 1) % ROWS][-1] - truth.logits[0][-1]).abs().max() > 1e-2


@pytest.mark.parametrize("max_loras", [2, 4, 8])
@pytest.mark.parametrize("name", ["llama", "gpt2", "t5"])
def test_greedy(family: Callable[[str], Family], small: Any, name: str, max_loras: int) -> None:
    made, model = family(name), small(name, max_loras)
    inputs = prompts(LENGTHS)
    got = model.generate(**inputs, adapter_names=NAMES, max_new_tokens=NEW)
    check_rows(made, generated(got, 0 if made.seq2seq else 5), NAMES, inputs, max_new_tokens=NEW)


@pytest.mark.parametrize("pad", [PAD, 0, None])
@pytest.mark.parametrize("beams", [1, 3])
def test_rows_that_end_early_are_padded_as_in_one_pass(
    family: Callable[[str], Family], small: Any, beams: int, pad: int | None
) -> None:
    """Beam search takes a pad token of 0 for none and pads with the end token; so must the merge of passes."""
    made, inputs = family("llama"), prompts(LENGTHS)
    eos = int(made.row("b", row_of(inputs, 1), max_new_tokens=NEW)[0, 1])
    returned = 2 if beams > 1 else 1
    settings = {"num_beams": beams, "num_return_sequences": returned, "length_penalty": -3.0, "max_new_tokens": NEW}
    whole, split = made.model(NINE, max_loras=9), small("llama", 2)
    configs = []
    for model in (whole, split):
        configs.append(model.generation_config)
        model.generation_config = tf.GenerationConfig(eos_token_id=eos, pad_token_id=pad)
    try:
        one, many = (m.generate(**inputs, adapter_names=NAMES, **settings) for m in (whole, split))
        assert torch.equal(one, many) and (one[:, -1] == (eos if not pad and (beams > 1 or pad is None) else pad)).any()
        free = split.generate(**inputs, adapter_names=NAMES, **settings, eos_token_id=None)
        assert free.shape[1] == 5 + NEW and not torch.equal(free, many), "an argument None overrides the config"
    finally:
        split.generation_config = configs[1]


def test_pinned_adapters_and_a_default_take_their_slots(family: Callable[[str], Family]) -> None:
    """Two of four slots are held by adapters that the batch does not use: three adapters then need two passes."""
    made = family("llama")
    model = made.model(NINE, max_loras=4)
    model.pin_adapter("aaa")
    model.set_adapter("bbb")
    inputs = prompts(LENGTHS[:4])
    names = ["a", "b", None, "c"]
    check_rows(made, model.generate(**inputs, adapter_names=names, max_new_tokens=NEW)[:, 5:], names, inputs,
               max_new_tokens=NEW)  # fmt: skip
    with pytest.raises(CapacityError, match=r"3 distinct adapters, 2 fit at once.*do_sample"):
        model.generate(**inputs, adapter_names=names, do_sample=True)
    model.unpin_adapter("aaa")
    torch.manual_seed(0)
    model.generate(**inputs, adapter_names=names, do_sample=True, max_new_tokens=2)  # control: now they fit


def test_a_positional_call(family: Callable[[str], Family], small: Any) -> None:
    made, model = family("llama"), small("llama", 2)
    inputs = prompts(LENGTHS)
    with torch.no_grad():
        named = model(**inputs, adapter_names=NAMES).logits
        placed = model(inputs["input_ids"], inputs["attention_mask"], adapter_names=NAMES).logits
    torch.testing.assert_close(named, placed)
    got = model.generate(inputs["input_ids"], attention_mask=inputs["attention_mask"], adapter_names=NAMES,
                         max_new_tokens=NEW)  # fmt: skip
    check_rows(made, got[:, 5:], NAMES, inputs, max_new_tokens=NEW)


def test_modules_that_cannot_mix_run_one_adapter_at_a_time(family: Callable[[str], Family], tmp_path: Any) -> None:
    """T5's relative position bias is one table for the whole batch: rows of different adapters need passes."""
    from tests.models import save_adapter

    made = family("t5")
    for name in ("bias", "bias2"):
        made.adapters[name] = save_adapter(
            made.base, tmp_path / name, 2, ["relative_attention_bias", "q"], made.task, len(name)
        )
    names = ["bias", None, "bias2", "a"]
    model = made.model(["bias", "bias2", "a"])
    inputs = prompts(LENGTHS[:4])
    check_rows(made, model.generate(**inputs, adapter_names=names, max_new_tokens=NEW), names, inputs,
               max_new_tokens=NEW)  # fmt: skip
    with pytest.raises(CapacityError, match=r"rows cannot be attributed.*do_sample"):
        model.generate(**inputs, adapter_names=names, do_sample=True)
    with pytest.raises(RoutingError, match="relative_attention_bias"), model.adapters(names):
        model.generate(**inputs, max_new_tokens=NEW)


# -- what is refused, before any work --------------------------------------------------------------------------------
class Keep(tf.LogitsProcessor):
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores


class Silent:
    def put(self, value: Any) -> None: ...
    def end(self) -> None: ...


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "sampling": ({"do_sample": True}, "do_sample=True"),
    "sampling in the config": ({"generation_config": tf.GenerationConfig(do_sample=True)}, "do_sample=True"),
    "a streamer": ({"streamer": Silent()}, "streamer"),
    "a processor": ({"logits_processor": tf.LogitsProcessorList([Keep()])}, "logits_processor"),
    "a criterion": ({"stopping_criteria": [lambda ids, scores: False]}, "stopping_criteria"),
    "allowed tokens": ({"prefix_allowed_tokens_fn": lambda row, ids: [3]}, "prefix_allowed_tokens_fn"),
    "a cache": ({"past_key_values": tf.DynamicCache()}, "past_key_values"),
    "an output object": ({"return_dict_in_generate": True}, "return_dict_in_generate=True"),
    "a time limit": ({"max_time": 5.0}, "max_time"),
    "a time limit in the config": ({"generation_config": tf.GenerationConfig(max_time=5.0)}, "max_time"),
    "an unknown tensor": ({"token_types": torch.zeros(ROWS, 3)}, r"token_types \(12, 3\) is not known to hold one"),
    "a list of tensors": ({"images": [torch.zeros(2)] * ROWS}, "images list is not known to hold one"),
}  # fmt: skip
REFUSED_FORWARD: dict[str, tuple[dict[str, Any], str]] = {
    "a cache": ({"past_key_values": tf.DynamicCache()}, "past_key_values"),
    "a cache asked for": ({"use_cache": True}, "use_cache=True"),
    "labels": ({"labels": torch.zeros(ROWS, 5, dtype=torch.int64)}, "labels"),
    "an unknown tensor": ({"extra": torch.zeros(ROWS)}, r"extra \(12,\) is not known to hold one entry"),
    "positions in planes": ({"position_ids": torch.zeros(ROWS, ROWS, 5)}, r"position_ids \(12, 12, 5\) is not known"),
    "outputs of an encoder": ({"encoder_outputs": (torch.zeros(ROWS, 5, 32),)}, "encoder_outputs tuple is not known"),
}


@pytest.fixture
def untouched(small: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The model with two slots; a forward of its layers, or a change of its slots, fails the test."""
    model = small("llama", 2)
    before = dict(model._multilora.store.slots)

    def never(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("work was done before the refusal")

    monkeypatch.setattr(model.model, "forward", never)
    yield model
    assert dict(model._multilora.store.slots) == before and not model._multilora.routing.open


@pytest.mark.parametrize("what", REFUSED)
def test_generate_refuses(untouched: Any, what: str) -> None:
    settings, said = REFUSED[what]
    with pytest.raises(CapacityError, match=said) as raised:
        untouched.generate(**prompts(LENGTHS), adapter_names=NAMES, **settings)
    assert "max_loras" in str(raised.value)
    if "not known" not in said:
        assert "9 distinct adapters, 2 fit at once: it needs max_loras=9" in str(raised.value)


def test_sampling_by_the_models_own_config_is_refused(untouched: Any) -> None:
    """A config passed to the call takes what it leaves open from the model's."""
    config = untouched.generation_config
    untouched.generation_config = tf.GenerationConfig(do_sample=True)
    try:
        for passed in ({}, {"generation_config": tf.GenerationConfig(max_new_tokens=2)}):
            with pytest.raises(CapacityError, match="do_sample=True"):
                untouched.generate(**prompts(LENGTHS), adapter_names=NAMES, **passed)
    finally:
        untouched.generation_config = config


def test_sampling_switched_off_by_the_call_is_no_sampling(family: Callable[[str], Family], small: Any) -> None:
    model, inputs = small("llama", 2), prompts(LENGTHS)
    config = model.generation_config
    model.generation_config = tf.GenerationConfig(do_sample=True, pad_token_id=PAD)
    try:
        got = model.generate(**inputs, adapter_names=NAMES, do_sample=False, max_new_tokens=NEW)
    finally:
        model.generation_config = config
    check_rows(family("llama"), got[:, 5:], NAMES, inputs, max_new_tokens=NEW)


@pytest.mark.parametrize("what", REFUSED_FORWARD)
def test_forward_refuses(untouched: Any, what: str) -> None:
    settings, said = REFUSED_FORWARD[what]
    with pytest.raises(CapacityError, match=said) as raised:
        untouched(**prompts(LENGTHS) | settings, adapter_names=NAMES)
    assert "max_loras" in str(raised.value)


def test_a_block_and_a_packed_row_do_not_split(small: Any) -> None:
    model = small("llama", 2)
    with pytest.raises(CapacityError, match=r"9 distinct adapters must fit in 2 .*raise max_loras to 9"):
        with model.adapters(NAMES):
            raise AssertionError("the block must not start")
    packed = {"input_ids": torch.randint(3, VOCAB, (1, 6)), "position_ids": torch.tensor([[0, 1, 0, 1, 0, 1]])}
    with pytest.raises(CapacityError, match="raise max_loras to 3"):
        model(**packed, use_cache=False, adapter_names=["a", "b", "c"])


# -- the parts -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("given", "model", "pad"),
    [
        ({}, {"pad_token_id": 2, "eos_token_id": 5}, 2),
        ({}, {"eos_token_id": [5, 6]}, 5),
        ({}, {"pad_token_id": 0, "eos_token_id": 5}, 0),
        ({"num_beams": 3}, {"pad_token_id": 0, "eos_token_id": 5}, 5),
        ({"num_beams": 3}, {"pad_token_id": 2, "eos_token_id": 5}, 2),
        ({"num_beams": 3, "eos_token_id": None}, {"pad_token_id": 0, "eos_token_id": 5}, 0),
        ({"pad_token_id": 7, "generation_config": {"pad_token_id": 8}}, {"pad_token_id": 2}, 7),
        ({"generation_config": {"pad_token_id": 8}}, {"pad_token_id": 2}, 8),
        ({"generation_config": {"num_beams": 3}}, {"pad_token_id": 0, "eos_token_id": torch.tensor([5, 6])}, 5),
        ({}, {}, 0),
    ],
)
def test_what_shorter_passes_are_padded_with(given: dict[str, Any], model: dict[str, Any], pad: int) -> None:
    """As Transformers pads rows that end early: its beam search takes a pad token of 0 for none."""
    passed = given.get("generation_config")
    configs = [tf.GenerationConfig(**c) for c in (passed, model) if c is not None]
    assert check_generate(given, configs, "why") == pad


# ids of the rows, room, those that hold a slot, whether rows can mix -> rows of each pass
PLANS = [
    ([1, 2, 0, 1], 2, (), True, [[0, 1, 2, 3]]),
    ([1, 2, 3, 0, 1], 2, (), True, [[0, 1, 3, 4], [2]]),
    ([0, 0], 1, (), True, [[0, 1]]),
    ([0, 0], 1, (), False, [[0, 1]]),
    ([1, 1], 1, (), False, [[0, 1]]),
    ([1, 0, 2, 1], 8, (), False, [[0, 3], [1], [2]]),
    ([1, 2, 3, 0, 4], 1, (3, 9), True, [[0, 2, 3], [1], [4]]),  # 3 has its slot in every pass
    ([1, 2, 0], 0, (1, 2), True, [[0, 1, 2]]),
    ([1, 2, 3], 0, (1, 2), True, [[0, 1, 2]]),  # no room for 3 in any pass: one, which raises before any work
    ([1, 0, 2], -1, (1,), False, [[0, 1, 2]]),
    ([1, 0, 2], 0, (1, 2), False, [[0], [1], [2]]),
]


@pytest.mark.parametrize(("ids", "room", "held", "mixable", "passes"), PLANS)
def test_plans(ids: list[int], room: int, held: tuple[int, ...], mixable: bool, passes: list[list[int]]) -> None:
    assert plan_passes(ids, Limits(room, frozenset(held), mixable, 8)) == passes


def test_cuts_and_merges_are_each_others_inverse() -> None:
    plan = [[0, 2, 4], [1], [3, 5]]
    x, shared = torch.arange(12).reshape(6, 2), torch.arange(3)[None]
    arguments = {"input_ids": x, "position_ids": shared, "use_cache": None, "scale": 2.0}
    parts = [cut(arguments, rows, 6) for rows in plan]
    assert [p["input_ids"].tolist() for p in parts][1] == [[2, 3]]
    assert all(p["position_ids"] is shared and p["use_cache"] is None and p["scale"] == 2.0 for p in parts)
    whole = [p["input_ids"] for p in parts]
    assert torch.equal(merge(whole, plan), x) and not torch.equal(torch.cat(whole), x)
    nested = merge([(w, [w, None]) for w in whole], plan)
    assert torch.equal(nested[0], x) and torch.equal(nested[1][0], x) and nested[1][1] is None
    with pytest.raises(CapacityError, match=r"one entry per row, got \(1,\) for 3 rows"):
        merge([torch.zeros(1)] * 3, plan)
    with pytest.raises(CapacityError, match="cannot be merged: str"):
        merge(["a", "b", "c"], plan)


def test_sequences_of_different_lengths_merge_in_order() -> None:
    first = torch.tensor([[1, 1, 1], [1, 2, 1]])  # two return sequences of row 1
    rest = torch.tensor([[0, 1], [0, 2], [2, 1], [2, 2]])  # of rows 0 and 2
    merged = merge_sequences([first, rest], [[1], [0, 2]], 9)
    assert merged.tolist() == [[0, 1, 9], [0, 2, 9], [1, 1, 1], [1, 2, 1], [2, 1, 9], [2, 2, 9]]
