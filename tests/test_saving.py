"""save_adapter: PEFT loads what it writes, and answers as before."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from peft import PeftModel

from hf_multilora import MultiLoRAModel, UnknownAdapterError
from tests.heads import Heads, Made, ids, labels, llama, roberta, vocabulary
from tests.test_heads import assert_rows, rows_of

SEQ = {"task_type": "SEQ_CLS"}
RICH = {"rank_pattern": {"q_proj": 3}, "alpha_pattern": {"v_proj": 7}, "use_rslora": True}
FULL = {"modules_to_save": ["embed_tokens", "lm_head"]}
BASES: dict[str, Any] = {
    "classifier": (llama, {"a": Made(SEQ | RICH), "wide": Made(SEQ, labels("score", 5)), "plain": Made({})}),
    "composite head": (roberta, {"a": Made(SEQ), "wide": Made(SEQ, labels("classifier.out_proj", 6))}),
    "vocabulary": (lambda: llama(tf.LlamaForCausalLM), {"a": Made(FULL), "wide": Made(FULL, vocabulary(47))}),
    "token rows": (
        lambda: llama(tf.LlamaForCausalLM, tie_word_embeddings=True),
        {"a": Made({"trainable_token_indices": [9, 4]}), "norms": Made({"modules_to_save": ["input_layernorm"]})},
    ),
}


@pytest.mark.parametrize("name", BASES)
@torch.no_grad()
def test_what_is_saved_is_the_adapter(name: str, tmp_path: Path) -> None:
    build, adapters = BASES[name]
    torch.manual_seed(0)
    heads = Heads(build(), tmp_path, adapters)
    model, inputs = heads.model(), ids(1)
    for adapter, made in adapters.items():
        folder = tmp_path / "saved" / adapter
        model.save_adapter(adapter, str(folder))
        base = copy.deepcopy(heads.base)
        if made.prepare is not None:
            made.prepare(base)
        want = heads.truth(rows_of({"input_ids": inputs}), [adapter], "logits")
        assert_rows(PeftModel.from_pretrained(base, str(folder)).eval()(input_ids=inputs).logits, want)
        again = MultiLoRAModel.from_pretrained(copy.deepcopy(heads.base), {adapter: str(folder)})
        assert_rows(again(input_ids=inputs, adapter_names=[adapter]).logits, want)
        bare = again(input_ids=inputs).logits[0]
        assert bare.shape != want[0].shape or not torch.allclose(bare, want[0], atol=1e-3), "control: the base differs"


@torch.no_grad()
def test_an_adapter_of_a_peft_model_is_saved(tmp_path: Path) -> None:
    torch.manual_seed(0)
    heads = Heads(llama(), tmp_path, {"a": Made(SEQ | RICH)})
    model = MultiLoRAModel.from_pretrained(copy.deepcopy(heads.alone["a"]))
    assert model._multilora.store.catalogue.entry("default").reader is None
    model.save_adapter("default", str(tmp_path / "saved"))
    peft_model = PeftModel.from_pretrained(copy.deepcopy(heads.base), str(tmp_path / "saved")).eval()
    assert_rows(peft_model(input_ids=ids(1)).logits, heads.truth([{"input_ids": ids(1)}], ["a"], "logits"))


def test_what_is_there_stays(tmp_path: Path) -> None:
    heads = Heads(llama(), tmp_path, {"a": Made(SEQ), "b": Made({})})
    model = heads.model()
    with pytest.raises(FileExistsError):
        model.save_adapter("b", str(tmp_path / "a"))
    with pytest.raises(UnknownAdapterError):
        model.save_adapter("c", str(tmp_path / "c"))
    assert not (tmp_path / "c").exists()
    before = model.list_adapters()[0]["digest"]
    model.load_adapter(str(tmp_path / "a"), "a", load_inplace=True)
    assert model.list_adapters()[0]["digest"] == before
    model.save_adapter("b", str(tmp_path / "a"), overwrite=True)
    model.load_adapter(str(tmp_path / "a"), "a", load_inplace=True)
    assert model.list_adapters()[0]["digest"] != before
