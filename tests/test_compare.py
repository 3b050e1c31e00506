"""`compare`: the answers are those of each prompt alone with each adapter, and tables that show them."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers import models as token_models

from hf_multilora import CapacityError, RoutingError, UnknownAdapterError
from hf_multilora.compare import Comparison
from hf_multilora.display import columns, text_table, wrap
from tests import heads, tiny
from tests.models import PAD, VOCAB, Family

pytest_plugins = ("tests.fixtures",)

Served = Callable[[str], tuple[Family, Any]]
TEMPLATE = "{% for m in messages %}{{ m['content'] }} {% endfor %}{% if add_generation_prompt %}w9{% endif %}"
CHAT = [{"role": "user", "content": "w20 w21"}]
PROMPTS = ["w5 w6 w7 w8 w9 w10", CHAT, "w11"]
TEXTS = ["w5 w6 w7 w8 w9 w10", "w20 w21 w9", "w11"]
NAMES = ["__base__", "a", "b", "c"]


def make_tokenizer(vocabulary: int = VOCAB, pad: int = PAD, **settings: Any) -> Any:
    """Words w0, w1, ...; it pads on the right."""
    words = {f"w{i}": i for i in range(vocabulary)}
    words["<pad>"] = words.pop(f"w{pad}")
    made = Tokenizer(token_models.WordLevel(words, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    settings = {"pad_token": "<pad>", "chat_template": TEMPLATE, "padding_side": "right"} | settings
    return tf.PreTrainedTokenizerFast(tokenizer_object=made, **settings)


def ask(
    model: Any, prompts: Any, adapters: Any = None, *, tokenizer: Any = None, max_new_tokens: int | None = 6,
    batch_size: int = 16, **kwargs: Any,
) -> Comparison:  # fmt: skip
    tokenizer = make_tokenizer() if tokenizer is None else tokenizer
    settings = {"max_new_tokens": max_new_tokens, "batch_size": batch_size, **kwargs}
    found: Comparison = model.compare(prompts, adapters, tokenizer=tokenizer, **settings)
    return found


def texts(comparison: Comparison) -> list[list[str]]:
    return [[answer["text"] for answer in answers] for answers in comparison.answers]


def truth(family: Family, names: list[str], max_new_tokens: int = 6) -> list[list[str]]:
    """What PEFT says to each prompt alone, without padding."""
    tokenizer, found = make_tokenizer(), []
    for text in TEXTS:
        inputs = dict(tokenizer(text, return_tensors="pt"))
        inputs.pop("token_type_ids", None)
        new = [family.row(name, inputs, max_new_tokens=max_new_tokens, do_sample=False)[0] for name in names]
        found.append([tokenizer.decode(tokens, skip_special_tokens=True) for tokens in new])
    return found


@pytest.mark.parametrize("kind", ["llama", "t5"])
@pytest.mark.parametrize("batch_size", [1, 5, 64])
def test_answers_are_those_of_each_prompt_alone(served: Served, kind: str, batch_size: int) -> None:
    peft, model = served(kind)
    got = ask(model, PROMPTS, batch_size=batch_size)
    assert got.adapters == tuple(NAMES) and got.prompts == ("w5 w6 w7 w8 w9 w10", "w20 w21", "w11")
    assert texts(got) == truth(peft, NAMES)
    assert texts(got) != truth(peft, [*NAMES[1:], NAMES[0]]), "the order of adapters must matter"


def test_fewer_slots_than_adapters(family: Callable[[str], Family]) -> None:
    """Calls are grouped by the adapters that fit, so that sampling works too, which passes would refuse."""
    model = family("llama").model(max_loras=1)
    assert texts(ask(model, PROMPTS)) == truth(family("llama"), NAMES)
    assert len(ask(model, PROMPTS, do_sample=True, temperature=0.5)) == 12
    inputs = make_tokenizer()(["w3"] * 2, return_tensors="pt")["input_ids"]
    with pytest.raises(CapacityError):
        model.generate(inputs, adapter_names=["a", "b"], do_sample=True, max_new_tokens=2)


def test_some_adapters_in_the_order_given(served: Served) -> None:
    peft, model = served("llama")
    got = ask(model, PROMPTS, ["b", None])
    assert got.adapters == ("b", "__base__") and texts(got) == truth(peft, ["b", "__base__"])
    for prompt, alone in zip(PROMPTS, truth(peft, ["b"]), strict=True):  # one stands for a list of it
        assert texts(ask(model, prompt, ["b"])) == [alone]


def test_the_users_tokenizer_stays_as_it_is(served: Served) -> None:
    _, model = served("llama")
    tokenizer = make_tokenizer()
    before = copy.deepcopy(tokenizer.__dict__)
    text = tokenizer.backend_tokenizer.to_str()
    ask(model, PROMPTS, tokenizer=tokenizer)
    assert tokenizer.padding_side == "right" and tokenizer.backend_tokenizer.to_str() == text
    assert {k: v for k, v in tokenizer.__dict__.items() if k != "_tokenizer"} == {
        k: v for k, v in before.items() if k != "_tokenizer"
    }


def test_an_end_and_a_limit_are_told_apart(served: Served) -> None:
    _, model = served("llama")
    plain = ask(model, "w5 w6 w7", [None, "a"], max_new_tokens=5)
    assert not any(answer["finished"] for answer in plain.answers[0])
    words = plain.answers[0][0]["text"].split()
    stop = int(words[-1][1:])
    stopped = ask(model, "w5 w6 w7", [None, "a"], max_new_tokens=5, eos_token_id=stop)
    base, a = stopped.answers[0]
    assert base["finished"] and base["text"].split() == words[: words.index(words[-1]) + 1]
    assert a["finished"] == (f"w{stop}" in plain.answers[0][1]["text"].split())
    assert "…" in str(plain) and str(plain).count("…") == 2


@pytest.fixture(scope="module")
def classifiers(tmp_path_factory: pytest.TempPathFactory) -> heads.Heads:
    torch.manual_seed(0)
    seq = {"task_type": "SEQ_CLS"}
    adapters = {
        "one": heads.Made(seq, heads.labels("classifier", 1)),
        "two": heads.Made(seq),
        "five": heads.Made(seq, heads.labels("classifier", 5)),
    }
    made = heads.Heads(heads.bert(), tmp_path_factory.mktemp("classifiers"), adapters)
    file: Path = made.folder / "five" / "adapter_config.json"
    named = {str(i): f"name {i}" for i in range(5)}
    file.write_text(json.dumps({**json.loads(file.read_text()), "id2label": named}))
    return made


def test_labels_and_scores_of_classifiers(classifiers: heads.Heads) -> None:
    tokenizer = make_tokenizer(heads.VOCAB, heads.PAD)
    model, prompts = classifiers.model(), ["w5 w6", ("w7 w8", "w9"), "w10 w11 w12 w13"]
    got = ask(model, prompts, tokenizer=tokenizer, max_new_tokens=None, batch_size=5)
    assert got.adapters == ("__base__", "one", "two", "five") and got.prompts[1] == "w7 w8\nw9"
    for prompt, answers in zip(prompts, got.answers, strict=True):
        row = tokenizer(*([prompt] if isinstance(prompt, str) else prompt), return_tensors="pt")
        for name, answer in zip([None, "one", "two", "five"], answers, strict=True):
            (logits,) = classifiers.truth([row], [name], "logits")
            if name == "one":
                assert answer.keys() == {"score"} and answer["score"] == pytest.approx(logits.item(), abs=1e-5)
                continue
            chance, best = logits.softmax(0).max(0)
            assert answer["label"] == (f"name {best}" if name == "five" else f"LABEL_{best}")
            assert answer["probability"] == pytest.approx(chance.item(), abs=1e-5)
    assert len({json.dumps(answers) for answers in got.answers}) == 3
    assert re.search(r"name \d +\d+%|name \d \d+%", str(got)) and "LABEL_" in got._repr_html_()


def test_a_base_without_a_head_is_left_out(classifiers: heads.Heads, tmp_path: Path) -> None:
    classifiers.base.bert.save_pretrained(tmp_path / "encoder")
    adapters = {name: str(classifiers.folder / name) for name in ("two", "five")}
    model = tiny.MultiLoRAModel.from_pretrained(str(tmp_path / "encoder"), adapters)
    tokenizer = make_tokenizer(heads.VOCAB, heads.PAD)
    got = ask(model, "w5 w6", tokenizer=tokenizer, max_new_tokens=None)
    assert got.adapters == ("two", "five")
    assert got.answers == ask(classifiers.model("two", "five"), "w5 w6", tokenizer=tokenizer, max_new_tokens=None,
                              adapters=["two", "five"]).answers  # fmt: skip
    with pytest.raises(RoutingError, match="every row must have its classifier"):
        ask(model, "w5 w6", [None, "two"], tokenizer=tokenizer, max_new_tokens=None)


def test_several_labels_at_once(classifiers: heads.Heads) -> None:
    model = classifiers.model("five")
    model.config.problem_type = "multi_label_classification"
    tokenizer = make_tokenizer(heads.VOCAB, heads.PAD)
    (found,) = ask(model, "w5 w6", ["five"], tokenizer=tokenizer, max_new_tokens=None).rows()
    (logits,) = classifiers.truth([tokenizer("w5 w6", return_tensors="pt")], ["five"], "logits")
    assert found["labels"] == [f"name {i}" for i, logit in enumerate(logits.tolist()) if logit > 0]
    assert found["probabilities"] == pytest.approx([c for c in logits.sigmoid().tolist() if c > 0.5], abs=1e-5)


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        ({"prompts": []}, ValueError, "prompts must be a list"),
        ({"prompts": 7}, ValueError, "prompts must be a list"),
        ({"prompts": [""]}, ValueError, "a prompt must be a string"),
        ({"prompts": [["w5"]]}, ValueError, "a prompt must be a string"),
        ({"prompts": ["w5", None]}, ValueError, "a prompt must be a string"),
        ({"prompts": [("w5", "w6")]}, ValueError, "pairs of strings are for classifiers"),
        ({"prompts": ["w5 " * 200]}, ValueError, "1 to 100 tokens, got 200"),
        ({"prompts": ["  "]}, ValueError, "1 to 100 tokens, got 0"),
        ({"adapters": ["a", "z"]}, UnknownAdapterError, "no adapter is named 'z'"),
        ({"adapters": "a"}, TypeError, "adapters must be a list"),
        ({"adapters": []}, ValueError, "at least one"),
        ({"adapters": ["a", "a"]}, ValueError, "different names"),
        ({"adapters": [None, "__base__"]}, ValueError, "different names"),
        ({"batch_size": 0}, ValueError, "batch_size must be a positive integer"),
        ({"tokenizer": make_tokenizer(pad_token=None)}, ValueError, "must have a pad token"),
        ({"tokenizer": "name"}, TypeError, "must be a tokenizer of Transformers, got str"),
        ({"num_return_sequences": 2, "do_sample": True}, ValueError, "leave out num_return_sequences"),
        ({"max_new_token": 3}, ValueError, "max_new_token"),
    ],
)
def test_bad_arguments(served: Served, arguments: dict[str, Any], error: type[Exception], said: str) -> None:
    _, model = served("llama")
    settings = {"prompts": ["w5 w6"], "tokenizer": make_tokenizer(model_max_length=100)} | arguments
    with pytest.raises(error, match=said):
        ask(model, **settings)
    assert not model._multilora.routing.open


def test_models_without_answers_are_refused(classifiers: heads.Heads, tmp_path: Path) -> None:
    tokenizer = make_tokenizer(heads.VOCAB, heads.PAD)
    with pytest.raises(TypeError, match=r"takes no arguments of generate: \['max_new_tokens', 'top_p'\]"):
        ask(classifiers.model(), "w5", tokenizer=tokenizer, top_p=0.5)
    for cls, got in ((tf.BertModel, "no logits"), (tf.BertForMaskedLM, r"logits \(1, 1, 40\)")):
        model = tiny.MultiLoRAModel.from_pretrained(tiny.bert(cls))
        with pytest.raises(TypeError, match=got):
            ask(model, "w5", tokenizer=tokenizer, max_new_tokens=None)


# -- how it is shown -------------------------------------------------------------------------------------------
SHOWN = Comparison(
    ("What is <b>rain</b>?", "Why?\nTell me."),
    ("__base__", "a & b"),
    (
        ({"text": "Water that falls from clouds, as everybody knows who ever went out in autumn", "finished": True},)
        * 2,
        (
            {"text": "雨は雲から落ちる水です。" * 4, "finished": False},
            {"text": "x" * 70 + "\x1b[31m", "finished": True},
        ),
    ),
)


@pytest.mark.parametrize("width", [30, 60, 100, 400])
def test_text_fits_the_terminal(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    lines = str(SHOWN).splitlines()
    assert max(map(columns, lines)) <= width and "\x1b" not in str(SHOWN)
    flat = re.sub(r"\s+", "", str(SHOWN))
    assert all(part in flat for part in ("<b>rain</b>?", "a&b", "base", "…"))
    assert str(SHOWN).count("autumn") == 2


def test_a_wide_terminal_shows_columns_and_a_narrow_one_paragraphs() -> None:
    header, rows = ["prompt", "base", "a"], [["one two three four", "five six seven eight nine", "ten"]]
    assert text_table(header, rows, 80).splitlines() == [
        "prompt              base                       a",
        "------------------  -------------------------  ---",
        "one two three four  five six seven eight nine  ten",
    ]
    assert text_table(header, rows, 20).splitlines() == [
        "one two three four",
        "  base: five six",
        "    seven eight nine",
        "  a: ten",
    ]


def test_wrap_keeps_all_but_blanks() -> None:
    text = "a bb  ccc dddddddddd\n\n日本語日本語 e"
    for width in range(2, 25):
        lines = wrap(text, width)
        assert max(map(columns, lines)) <= width
        assert "".join(lines).replace(" ", "") == re.sub(r"\s", "", text)
    assert wrap("", 5) == [""]


def test_html_is_escaped() -> None:
    html = SHOWN._repr_html_()
    assert "&lt;b&gt;rain&lt;/b&gt;" in html and "<b>" not in html and "a &amp; b" in html
    assert html.count("<tr>") == 3 and "<script" not in html and "<style" not in html


def test_rows() -> None:
    rows = list(SHOWN)
    assert len(rows) == len(SHOWN) == 4
    assert rows[1] == {
        "prompt": "What is <b>rain</b>?", "adapter": "a & b", "text": SHOWN.answers[0][1]["text"], "finished": True,
    }  # fmt: skip
    assert [row["adapter"] for row in rows] == ["__base__", "a & b"] * 2
