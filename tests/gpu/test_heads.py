"""Heads, saved modules and token rows on a CUDA device: mixed batches against PEFT one row at a time, and in graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as tf

from hf_multilora.layers import saved
from tests.heads import Heads, Made, ids, inputs_of, labels, llama, roberta, vocabulary
from tests.test_heads import CASES, assert_rows, rows_of

FULL = {"modules_to_save": ["embed_tokens", "lm_head"]}
SEQ = {"task_type": "SEQ_CLS"}


def cuda(inputs: dict[str, Any]) -> dict[str, Any]:
    return {k: v.cuda() for k, v in inputs.items()}


@pytest.mark.parametrize("dense", [True, False], ids=["one product", "one per adapter"])
@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_mixed_rows_equal_each_adapter_alone(
    name: str, dense: bool, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not dense:
        monkeypatch.setattr(saved, "DENSE_WORK", 0)
    build, adapters, key = CASES[name]
    torch.manual_seed(0)
    heads = Heads(build().cuda(), tmp_path_factory.mktemp("adapters"), adapters)
    model = heads.model()
    known = [n for n in heads.alone if n is not None]
    names: list[str | None] = [*known, None, *known[::-1]]
    rows = inputs_of(heads.base, 1)
    same = cuda({k: v.repeat(len(names), *[1] * (v.dim() - 1)) for k, v in rows.items()})
    want = heads.truth(rows_of(same), names, key)
    got = model(**same, adapter_names=names)[key]
    assert_rows(got, want)
    with pytest.raises(AssertionError):
        assert_rows(list(got.roll(-1, 0)), want)
    for one in known:
        inputs = {k: v[:2] for k, v in same.items()}
        assert_rows(model(**inputs, adapter_names=[one] * 2)[key], heads.truth(rows_of(inputs), [one] * 2, key))


@pytest.mark.parametrize("kind", ["score", "composite", "words", "norms", "tokens"])
@torch.no_grad()
def test_a_captured_graph_serves_other_mixes_and_later_loads(kind: str, tmp_path: Any) -> None:
    base, adapters = {
        "score": (llama, {"a": Made(SEQ), "b": Made(SEQ, labels("score", 5)), "c": Made(SEQ, labels("score", 4))}),
        "composite": (roberta, {n: Made(SEQ) for n in "abc"}),
        "words": (
            lambda: llama(tf.LlamaForCausalLM),
            {"a": Made(FULL), "b": Made(FULL, vocabulary(47)), "c": Made(FULL)},
        ),
        "norms": (
            lambda: llama(tf.LlamaForCausalLM),
            {n: Made({"modules_to_save": ["input_layernorm", "norm"]}) for n in "abc"},
        ),
        "tokens": (
            lambda: llama(tf.LlamaForCausalLM, tie_word_embeddings=True),
            {"a": Made({"trainable_token_indices": [5, 9, 17]}), "b": Made({"trainable_token_indices": [9, 4, 30]}),
             "c": Made({"trainable_token_indices": [4, 5]})},
        ),
    }[kind]  # fmt: skip
    torch.manual_seed(0)
    heads = Heads(base().cuda(), tmp_path, adapters)
    model, inputs = heads.model(max_loras=2), ids(1).repeat(3, 1).cuda()
    mask = torch.ones_like(inputs)
    more = {} if kind == "composite" else {"use_cache": False}
    with model.adapters(["a", None, "b"]):
        for _ in range(3):
            model(input_ids=inputs, attention_mask=mask, **more)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = model(input_ids=inputs, attention_mask=mask, **more).logits
    for names in (["b", "a", None], ["a", "a", "b"], [None] * 3, ["b"] * 3, ["c", None, "a"], ["c", "b", "c"]):
        with model.adapters(names):
            graph.replay()
            got = out.clone()
        want = heads.truth(rows_of({"input_ids": inputs}), names, "logits")
        assert_rows(got, want)
        if len(set(names)) > 1:
            with pytest.raises(AssertionError):
                assert_rows(list(got.roll(1, 0)), want)
