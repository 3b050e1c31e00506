"""Every way to generate: a mixed batch equals each row run alone by PEFT, and the rows of other names are different."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as tf

from tests.models import (
    LENGTHS,
    NAMES,
    NEW,
    PAD,
    Family,
    check_generate,
    generated,
    prompts,
    right_rows,
    row_of,
)

pytest_plugins = ("tests.fixtures",)

Served = Callable[[str], tuple[Family, Any]]
DECODERS = ["llama", "gpt2", "opt"]
ENCODER_DECODERS = ["t5", "bart"]
ALL = [*DECODERS, *ENCODER_DECODERS]

# a way to generate that does not depend on which rows run together -> arguments of generate
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 3},
    "beams in the config": {"generation_config": {"num_beams": 3}},
    "beams and return sequences": {"num_beams": 4, "num_return_sequences": 2},
    "beams and return sequences in the config": {"generation_config": {"num_beams": 4, "num_return_sequences": 2}},
    "beams with a length penalty": {"num_beams": 2, "length_penalty": 2.0, "early_stopping": True},
    "sampling of one": {"do_sample": True, "top_k": 1, "num_return_sequences": 3},
    "sampling of one in the config": {
        "generation_config": {"do_sample": True, "top_k": 1, "num_return_sequences": 3}
    },
    "repetition penalty": {"repetition_penalty": 1.7, "no_repeat_ngram_size": 2},
    "no cache": {"use_cache": False},
    "scores": {"return_dict_in_generate": True, "output_scores": True, "output_logits": True},
}  # fmt: skip
# the same for decoders only
DECODER_WAYS: dict[str, dict[str, Any]] = {
    "guidance": {"guidance_scale": 1.6},
    "guidance with beams": {"guidance_scale": 1.6, "num_beams": 2},
    "chunked prefill": {"prefill_chunk_size": 2},
    "static cache": {"cache_implementation": "static"},
    "static cache with beams": {"cache_implementation": "static", "num_beams": 2},
    "dynamic cache": {"cache_implementation": "dynamic"},
}


def settings_of(way: dict[str, Any]) -> dict[str, Any]:
    """The arguments with their config as an object, which is then the only place that says how to decode."""
    if "generation_config" not in way:
        return way
    return {"generation_config": tf.GenerationConfig(**way["generation_config"])}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ALL)
def test_a_mixed_batch_is_each_row_alone(served: Served, name: str, way: str) -> None:
    # the penalty of Transformers 5.17 also counts padding as a repeated token, so its prompts are of one length
    lengths = [max(LENGTHS)] * len(LENGTHS) if way == "repetition penalty" else LENGTHS
    check_generate(*served(name), NAMES, prompts(lengths), **settings_of(WAYS[way]))


@pytest.mark.parametrize("way", DECODER_WAYS)
@pytest.mark.parametrize("name", DECODERS)
def test_decoders(served: Served, name: str, way: str) -> None:
    check_generate(*served(name), NAMES, prompts(LENGTHS), **DECODER_WAYS[way])


@pytest.mark.parametrize("name", DECODERS)
def test_right_padding(served: Served, name: str) -> None:
    """Right padding as Transformers itself takes it: the pads stand between prompt and answer, for PEFT as well."""
    family, model = served(name)
    inputs = prompts(LENGTHS, side="right")
    got = model.generate(**inputs, adapter_names=NAMES, max_new_tokens=NEW)[:, max(LENGTHS) :]
    rows = [row_of(inputs, i) for i in range(len(NAMES))]
    for other in (NAMES, [*NAMES[1:], NAMES[0]]):
        truth = []
        for i, adapter in enumerate(other):
            with family.alone(adapter) as alone:
                truth.append(alone.generate(**rows[i], max_new_tokens=NEW)[:, max(LENGTHS) :])
        assert right_rows(got, truth) == [other is NAMES] * len(NAMES)


@pytest.mark.parametrize("name", DECODERS)
def test_negative_prompts(served: Served, name: str) -> None:
    negative = prompts([2, 3, 2, 3], seed=5)
    inputs = prompts(LENGTHS) | {
        "negative_prompt_ids": negative["input_ids"], "negative_prompt_attention_mask": negative["attention_mask"],
    }  # fmt: skip
    check_generate(*served(name), NAMES, inputs, guidance_scale=1.8)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_inputs_embeds(served: Served, name: str) -> None:
    family, model = served(name)
    inputs = prompts(LENGTHS)
    ids = inputs.pop("input_ids")
    inputs["inputs_embeds"] = family.base.get_input_embeddings()(ids).detach()
    check_generate(family, model, NAMES, inputs)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("beams", [1, 3])
def test_rows_that_end_early(served: Served, name: str, beams: int) -> None:
    """The end token is one that the row of adapter "b" gives early; its row is padded, the others go on."""
    family, model = served(name)
    inputs = prompts(LENGTHS)
    settings = {"num_beams": beams, "length_penalty": -3.0}  # of beams, short ones win
    eos = int(family.row("b", row_of(inputs, 2), max_new_tokens=NEW, **settings)[0, 2])
    got = check_generate(family, model, NAMES, inputs, eos_token_id=eos, max_new_tokens=NEW + 2, **settings)
    assert (got[2, 4:] == PAD).all() and not (got[:, 4:] == PAD).all()


def test_scores_are_each_rows(served: Served) -> None:
    family, model = served("llama")
    inputs = prompts(LENGTHS)
    wanted = {"max_new_tokens": 3, "return_dict_in_generate": True, "output_logits": True, "output_hidden_states": True}
    got = model.generate(**inputs, adapter_names=NAMES, **wanted)
    for i, name in enumerate(NAMES):
        with family.alone(name) as alone:
            truth = alone.generate(**row_of(inputs, i), **wanted)
        with family.alone(NAMES[i - 1]) as other:
            wrong = other.generate(**row_of(inputs, i), **wanted)
        for step in range(3):
            torch.testing.assert_close(got.logits[step][i : i + 1], truth.logits[step], atol=1e-4, rtol=1e-4)
            assert (got.logits[step][i] - wrong.logits[step][0]).abs().max() > 1e-2
        torch.testing.assert_close(
            got.hidden_states[1][-1][i : i + 1], truth.hidden_states[1][-1], atol=1e-4, rtol=1e-4
        )


# -- one prompt at a time, because Transformers allows no more --------------------------------------------------------
ONE_ROW = ["a", None, "b", "c"]


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("way", ["assistant", "prompt look-up"])
def test_speculation(served: Served, name: str, way: str) -> None:
    """The draft comes from a model without adapters, or from the prompt; the answer is the adapter's."""
    family, model = served(name)
    inputs = prompts([6])
    draft: dict[str, Any] = {"assistant_model": family.base} if way == "assistant" else {"prompt_lookup_num_tokens": 2}
    answers = [generated(model.generate(**inputs, adapter_names=[n], max_new_tokens=8, **draft), 6) for n in ONE_ROW]
    truth = [family.row(n, inputs, max_new_tokens=8) for n in ONE_ROW]
    assert [torch.equal(x, y) for x, y in zip(answers, truth, strict=True)] == [True] * 4
    assert not any(torch.equal(answers[i], truth[i - 1]) for i in range(4))


def test_an_assistant_with_adapters_of_its_own_does_not_take_the_request(served: Served, family: Any) -> None:
    made, model = served("llama")
    inputs = prompts([6])
    assistant = made.model(["c"])
    got = model.generate(**inputs, adapter_names=["b"], assistant_model=assistant, max_new_tokens=8)
    assert torch.equal(got[:, 6:], made.row("b", inputs, max_new_tokens=8))
    assert not torch.equal(got[:, 6:], made.row("c", inputs, max_new_tokens=8))
    assert not assistant._multilora.routing.open


class Collected:
    """A streamer that keeps what it is given."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.ended = False

    def put(self, value: torch.Tensor) -> None:
        self.tokens += value.flatten().tolist()

    def end(self) -> None:
        self.ended = True


@pytest.mark.parametrize("name", ["llama", "t5"])
def test_streaming(served: Served, name: str) -> None:
    family, model = served(name)
    inputs = prompts([5], seed=1)
    for adapter, other in (("a", "b"), ("b", "c"), (None, "a")):
        streamer = Collected()
        model.generate(**inputs, adapter_names=[adapter], streamer=streamer, max_new_tokens=NEW)
        truth, wrong = (family.row(x, inputs, max_new_tokens=NEW)[0].tolist() for x in (adapter, other))
        count = len(truth) - family.seq2seq  # a decoder's start token is not streamed anew
        assert streamer.ended and streamer.tokens[-count:] == truth[-count:] != wrong[-count:]


# -- compiled ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["llama", "gpt2", "opt"])
def test_a_compiled_static_cache(family: Callable[[str], Family], name: str) -> None:
    """The decode step that `generate` compiles serves any mix without being compiled again."""
    made = family(name)
    model = made.model()
    graphs: list[int] = []

    def backend(graph: torch.fx.GraphModule, example: list[Any]) -> Any:
        graphs.append(len(example))
        return graph.forward

    torch._dynamo.reset()
    config = tf.CompileConfig(backend=backend, mode=None, fullgraph=True)
    config._compile_all_devices = True
    inputs = prompts(LENGTHS)
    settings = {"cache_implementation": "static", "max_new_tokens": NEW}
    counts = []
    for names in (NAMES, ["c", "b", None, "a"], ["b", "b", "b", "b"], [None] * 4):
        got = model.generate(**inputs, adapter_names=names, compile_config=config, **settings)[:, max(LENGTHS) :]
        counts.append(len(graphs))
        assert all(right_rows(got, made.truth(names, inputs, max_new_tokens=NEW)))
        if len(set(names)) > 1:
            assert not any(right_rows(got, made.truth([*names[1:], names[0]], inputs, max_new_tokens=NEW)))
    torch._dynamo.reset()
    assert counts[0] > 0 and counts[1:] == [counts[0]] * 3, f"graphs compiled after each mix: {counts}"
