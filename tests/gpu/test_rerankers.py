"""Rerankers and embedders on a CUDA device: each row against a plain model on the CPU with its adapter merged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers import CrossEncoder, SentenceTransformer

from hf_multilora import MultiLoRAModel
from hf_multilora.integrations.reranker import Reranker
from hf_multilora.integrations.sentence_transformers import MultiLoRACrossEncoder, MultiLoRASentenceTransformer
from tests.integrations import test_embedder, test_reranker
from tests.integrations.texts import KINDS, NAMES, PAIRS, TEXTS, Bed
from tests.tiny import error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
OTHERS = ["b", "a", None, "c", "a"]


def near(got: Any, want: Any) -> float:
    return error(torch.as_tensor(got).cpu(), torch.as_tensor(want))


@pytest.mark.parametrize("kind", ["bert", "roberta", "qwen3"])
def test_cross_encoder(tmp_path: Path, kind: str) -> None:
    made = Bed(tmp_path, KINDS[kind], num_labels=2, heads={"a": 3, "b": 1})
    folder = made.save(made.base, "base")
    model = MultiLoRACrossEncoder(folder, adapters=made.paths, device="cuda", max_loras=2)
    want = [made.plain(CrossEncoder, n).predict([p])[0] for n, p in zip(NAMES, PAIRS, strict=True)]
    for size in (2, 5):
        got = model.predict(PAIRS, adapter_names=NAMES, batch_size=size)
        for g, w in zip(got, want, strict=True):
            assert g.shape == w.shape and abs(g - w).max() < 2e-4
    tensors = model.predict(PAIRS, adapter_names=NAMES, convert_to_tensor=True)
    assert {t.device.type for t in tensors} == {"cuda"}
    moved = model.predict(PAIRS, adapter_names=NAMES, device="cpu")
    for g, w in zip(moved, want, strict=True):
        assert abs(g - w).max() < 2e-4
    other = model.predict(PAIRS, adapter_names=["c", "c", "a", "c", "a"], device="cuda")
    assert near(other[4], want[0]) > 1e-3 and other[0].shape == (2,)


def test_sentence_transformer(tmp_path: Path) -> None:
    made = Bed(tmp_path, test_embedder.KINDS["bert"])
    model = MultiLoRASentenceTransformer(made.save(made.base, "base"), adapters=made.paths, device="cuda")
    want = np.stack([made.plain(SentenceTransformer, n).encode([t])[0] for n, t in zip(NAMES, TEXTS, strict=True)])
    assert near(model.encode(TEXTS, adapter_names=NAMES, batch_size=2), want) < 2e-4
    assert near(model.encode(TEXTS, adapter_names=OTHERS, batch_size=2), want) > 1e-2


@pytest.mark.parametrize("name", ["tied", "soft caps", "learned positions"])
def test_yes_and_no(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = test_reranker.llm_bed(tmp_path, name)
    want = test_reranker.asked(made, NAMES).softmax(-1)[:, 1]
    model = MultiLoRAModel.from_pretrained(made.base.cuda(), made.paths)
    ranker, cut = Reranker(model, made.tokenizer, **test_reranker.PROMPT), test_reranker.spy(monkeypatch)
    assert near(ranker.predict(PAIRS, NAMES, batch_size=2), want) < 2e-4 and len(cut) == 3
    assert near(ranker.predict(PAIRS, OTHERS, batch_size=2), want) > 1e-3
