"""Modules that adapters saved in full and token rows, in mixed batches of whole models, against PEFT one row at a time.

Every case runs with the adapters loaded in both orders, and with slots for all and for two.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor

from tests.heads import Heads, Made, bert, convnext, gemma, gpt2, ids, inputs_of, labels, llama, roberta, vocabulary

LORA = Made({})
SEQ = {"task_type": "SEQ_CLS"}
TOKENS = Made({"trainable_token_indices": [5, 9, 17]})

# name -> (base, adapters, key of the output)
CASES: Mapping[str, tuple[Any, Mapping[str, Made], str]] = {
    "score": (llama, {"a": Made(SEQ), "b": Made(SEQ), "plain": LORA}, "logits"),
    "score, label counts": (
        llama,
        {"two": Made(SEQ), "five": Made(SEQ, labels("score", 5)), "one": Made(SEQ, labels("score", 1)), "plain": LORA},
        "logits",
    ),
    "lora on the score": (
        llama,
        {"lora": Made({"target_modules": ["score", "q_proj"]}), "own": Made(SEQ, labels("score", 4)), "plain": LORA},
        "logits",
    ),
    "classifier": (bert, {"a": Made(SEQ), "b": Made(SEQ, labels("classifier", 6)), "plain": LORA}, "logits"),
    "composite head": (
        roberta,
        {"a": Made(SEQ), "b": Made(SEQ, labels("classifier.out_proj", 7)), "plain": LORA},
        "logits",
    ),
    "token classification": (
        lambda: bert(tf.BertForTokenClassification),
        {"a": Made({"task_type": "TOKEN_CLS"}), "b": Made({"task_type": "TOKEN_CLS"}, labels("classifier", 5))},
        "logits",
    ),
    "question answering": (
        lambda: bert(tf.BertForQuestionAnswering),
        {"a": Made({"task_type": "QUESTION_ANS"}), "plain": LORA},
        "start_logits",
    ),
    "Conv1D": (
        gpt2,
        {"a": Made({"modules_to_save": ["c_fc", "ln_1"]} | SEQ), "b": Made(SEQ, labels("score", 5)), "plain": LORA},
        "logits",
    ),
    "convolutions": (
        convnext,
        {"a": Made({"modules_to_save": ["dwconv", "classifier", "patch_embeddings"]}), "plain": LORA},
        "logits",
    ),
    "norms": (
        lambda: llama(tf.LlamaForCausalLM),
        {"a": Made({"modules_to_save": ["input_layernorm", "norm"]}), "plain": LORA},
        "logits",
    ),
    "layer norms": (bert, {"a": Made({"modules_to_save": ["LayerNorm"]} | SEQ), "plain": LORA}, "logits"),
    "a linear in the middle": (
        bert,
        {"a": Made({"modules_to_save": ["intermediate.dense", "pooler"]}), "plain": LORA},
        "logits",
    ),
    "position embeddings": (bert, {"a": Made({"modules_to_save": ["position_embeddings"]}), "plain": LORA}, "logits"),
    "embedding and head": (
        lambda: llama(tf.LlamaForCausalLM),
        {"a": Made({"modules_to_save": ["embed_tokens", "lm_head"]}), "plain": LORA},
        "logits",
    ),
    "tied embedding and head": (
        lambda: llama(tf.LlamaForCausalLM, tie_word_embeddings=True),
        {"a": Made({"modules_to_save": ["embed_tokens", "lm_head"]}), "b": Made({"modules_to_save": ["lm_head"]})},
        "logits",
    ),
    "scaled embedding": (gemma, {"a": Made({"modules_to_save": ["embed_tokens"]}), "plain": LORA}, "logits"),
    "resized vocabulary": (
        lambda: llama(tf.LlamaForCausalLM),
        {
            "more": Made({"modules_to_save": ["embed_tokens", "lm_head"]}, vocabulary(47)),
            "most": Made({"modules_to_save": ["embed_tokens", "lm_head"]}, vocabulary(52)),
            "plain": LORA,
        },
        "logits",
    ),
    "token rows": (lambda: llama(tf.LlamaForCausalLM), {"a": TOKENS, "b": LORA}, "logits"),
    "token rows, tied": (
        lambda: llama(tf.LlamaForCausalLM, tie_word_embeddings=True),
        {"a": TOKENS, "b": Made({"trainable_token_indices": [9, 4]}), "plain": LORA},
        "logits",
    ),
    "token rows, scaled": (gemma, {"a": TOKENS, "plain": LORA}, "logits"),
}


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Heads, str]:
    build, adapters, key = CASES[request.param]
    torch.manual_seed(0)
    return Heads(build(), tmp_path_factory.mktemp("adapters"), adapters), key


def rows_of(inputs: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    n = next(iter(inputs.values())).shape[0]
    return [{k: v[i : i + 1] for k, v in inputs.items()} for i in range(n)]


def unpadded(logits: Tensor, width: int) -> Tensor:
    """A row's own logits; what follows must be the fill."""
    assert bool((logits[..., width:] == -torch.inf).all())
    return logits[..., :width]


def assert_rows(got: Sequence[Tensor], want: Sequence[Tensor]) -> None:
    for row, alone in zip(got, want, strict=True):
        own = row if row.shape == alone.shape else unpadded(row, alone.shape[-1])
        torch.testing.assert_close(own, alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("order", [1, -1], ids=["loaded in order", "loaded in reverse"])
@pytest.mark.parametrize("slots", [8, 2])
@torch.no_grad()
def test_mixed_rows_equal_each_adapter_alone(case: tuple[Heads, str], order: int, slots: int) -> None:
    heads, key = case
    known = [name for name in heads.alone if name is not None]
    model = heads.model(*known[::order], max_loras=slots)
    names: list[str | None] = [*known, None, *known[::-1]]
    same = {k: v.repeat(len(names), *[1] * (v.dim() - 1)) for k, v in inputs_of(heads.base, 1).items()}
    rows = rows_of(same)  # all alike: they differ by their adapters only
    want = heads.truth(rows, names, key)
    got = model(**same, adapter_names=names)
    assert_rows(got[key], want)
    with pytest.raises(AssertionError):
        assert_rows(list(got[key].roll(-1, 0)), want)
    for name in heads.alone:  # one adapter for all rows is another way through the layers
        one = model(**{k: v[:2] for k, v in same.items()}, adapter_names=[name] * 2)[key]
        alone = heads.truth(rows[:2], [name] * 2, key)
        assert_rows(one, alone)
        assert one.shape[-1] == alone[0].shape[-1], "without others there is nothing to pad for"
    for name in known:
        report = model.verify(name, None if "input_ids" in same else {k: v[:2] for k, v in same.items()})
        assert report and report.effect > 10 * report.tolerance, str(report)


@torch.no_grad()
def test_left_and_right_padding(case: tuple[Heads, str]) -> None:
    heads, key = case
    if heads.base.main_input_name != "input_ids":
        pytest.skip("images are not padded")
    model, names = heads.model(), [*heads.alone, *heads.alone]
    rows = [{"input_ids": ids(1, 3 + i % 4, seed=i)} for i in range(len(names))]
    want = heads.truth(rows, names, key)
    longest = max(row["input_ids"].shape[1] for row in rows)
    for side in ("right", "left"):
        if side == "left" and not isinstance(heads.base, (tf.LlamaPreTrainedModel, tf.Gemma2PreTrainedModel)):
            continue
        inputs, mask = torch.zeros(2, len(names), longest, dtype=torch.int64)
        for i, row in enumerate(rows):
            n = row["input_ids"].shape[1]
            part = slice(0, n) if side == "right" else slice(longest - n, longest)
            inputs[i, part], mask[i, part] = row["input_ids"][0], 1
        positions = {"position_ids": (mask.cumsum(1) - 1).clamp(min=0)} if side == "left" else {}
        got = model(input_ids=inputs, attention_mask=mask, **positions, adapter_names=names)[key]
        if want[0].dim() > 1 or key == "start_logits":  # one entry per token
            got = [row[mask[i].bool()] for i, row in enumerate(got)]
        assert_rows(list(got), want)


@torch.no_grad()
def test_deleted_and_loaded_again(case: tuple[Heads, str]) -> None:
    heads, key = case
    model, inputs = heads.model(max_loras=1), inputs_of(heads.base, 2)
    names, rows = [name for name in heads.alone if name is not None], rows_of(inputs)

    def check(*mix: str | None) -> None:
        assert_rows(model(**inputs, adapter_names=list(mix))[key], heads.truth(rows, mix, key))

    for name in [*names, *names[::-1]]:
        check(name, None)
    model.delete_adapter(names[0])
    model.load_adapter(str(heads.folder / names[0]), names[0])
    check(None, names[0])
    base = model.unpatch()
    assert not [name for name, module in base.named_modules() if {"_saved", "_lora", "_tokens"} & vars(module).keys()]
    assert_rows(base(**inputs)[key], heads.truth(rows, [None] * 2, key))
