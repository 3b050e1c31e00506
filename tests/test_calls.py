"""How a call names its adapters, `forward`, and rows packed into one: each row equals PEFT alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as tf

from hf_multilora import RoutingError
from hf_multilora.pool import Layout
from tests.models import BOS, LENGTHS, NAMES, NEW, VOCAB, Family, check_rows, generated, prompts, right_rows, row_of

pytest_plugins = ("tests.fixtures",)

Served = Callable[[str], tuple[Family, Any]]
ALL = ["llama", "gpt2", "opt", "t5", "bart"]


# -- how the adapters are named ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["llama", "t5"])
@pytest.mark.parametrize("spelling", ["tuple", "__base__", "ids", "list of ids", "block", "positional"])
def test_spellings(served: Served, name: str, spelling: str) -> None:
    family, model = served(name)
    inputs = prompts(LENGTHS)
    ids = [0 if n is None else next(r["id"] for r in model.list_adapters() if r["name"] == n) for n in NAMES]
    how: dict[str, dict[str, Any]] = {
        "tuple": {"adapter_names": tuple(NAMES)},
        "__base__": {"adapter_names": [n or "__base__" for n in NAMES]},
        "ids": {"adapter_ids": torch.tensor(ids)},
        "list of ids": {"adapter_ids": ids},
        "positional": {"adapter_names": NAMES},
    }
    if spelling == "block":
        with model.adapters(NAMES):
            beams = model.generate(**inputs, max_new_tokens=NEW, num_beams=3, num_return_sequences=2)
            got = model.generate(**inputs, max_new_tokens=NEW)  # an encoder now meets the rows of beams
        check_rows(family, generated(beams, 0 if family.seq2seq else 7), NAMES, inputs, num_beams=3,
                   num_return_sequences=2, max_new_tokens=NEW)  # fmt: skip
    elif spelling == "positional":
        got = model.generate(inputs.pop("input_ids"), **inputs, **how[spelling], max_new_tokens=NEW)
        inputs = prompts(LENGTHS)
    else:
        got = model.generate(**inputs, **how[spelling], max_new_tokens=NEW)
    check_rows(family, generated(got, 0 if family.seq2seq else 7), NAMES, inputs, max_new_tokens=NEW)


@pytest.mark.parametrize("name", ["llama", "t5"])
def test_the_default_adapter_serves_calls_that_name_none(served: Served, name: str) -> None:
    family, model = served(name)
    inputs = prompts(LENGTHS)
    prompt = 0 if family.seq2seq else 7
    settings = {"num_beams": 2, "max_new_tokens": NEW}
    model.set_adapter("b")
    try:
        got = generated(model.generate(**inputs, **settings), prompt)
        mixed = generated(model.generate(**inputs, **settings, adapter_names=NAMES), prompt)
        with model.adapters(NAMES):
            block = generated(model.generate(**inputs, **settings), prompt)
    finally:
        model.set_adapter(None)
    assert all(right_rows(got, family.truth(["b"] * 4, inputs, **settings)))
    assert right_rows(got, family.truth(NAMES, inputs, **settings)) == [False, False, True, False]
    check_rows(family, mixed, NAMES, inputs, **settings)
    assert torch.equal(mixed, block)
    base = generated(model.generate(**inputs, **settings), prompt)
    assert all(right_rows(base, family.truth([None] * 4, inputs, **settings)))


def test_generate_from_nothing(served: Served) -> None:
    """Without a prompt `generate` starts one row from the BOS token."""
    family, model = served("llama")
    with family.alone("b") as alone:
        truth = alone.generate(max_new_tokens=NEW)
    assert int(truth[0, 0]) == BOS
    assert torch.equal(model.generate(adapter_names=["b"], max_new_tokens=NEW), truth)
    assert not torch.equal(model.generate(adapter_names=["a"], max_new_tokens=NEW), truth)


# -- forward ----------------------------------------------------------------------------------------------------------
def forwards(family: Family, name: str | None, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    with family.alone(name) as alone, torch.no_grad():
        return alone(**inputs).logits


@pytest.mark.parametrize("name", [*ALL, "bert"])
@pytest.mark.parametrize("tokens", [4, 9, 13])
def test_forward(served: Served, name: str, tokens: int) -> None:
    """9 tokens x 4 rows is beyond what the gated path serves; 4 tokens x 4 rows is a square that could be turned."""
    family, model = served(name)
    inputs: dict[str, torch.Tensor] = {"input_ids": torch.randint(3, VOCAB, (4, tokens))}
    if family.seq2seq:
        inputs["decoder_input_ids"] = torch.randint(3, VOCAB, (4, 5))
    with torch.no_grad():
        got = model(**inputs, adapter_names=NAMES).logits
    for i, adapter in enumerate(NAMES):
        torch.testing.assert_close(got[i : i + 1], forwards(family, adapter, row_of(inputs, i)), atol=2e-4, rtol=1e-3)
        wrong = forwards(family, NAMES[i - 1], row_of(inputs, i))
        assert (got[i : i + 1] - wrong).abs().max() > 1e-2


@pytest.mark.parametrize("ends", ["position_ids", "cu_seq_lens_q", "position_ids, the cache left out"])
def test_sequences_packed_into_one_row(served: Served, ends: str) -> None:
    """Sequences in one row, told apart by positions that restart, or by their lengths, each with its adapter."""
    family, model = served("llama")
    names, lengths = ["b", None, "a"], [4, 2, 5]
    ids = torch.randint(3, VOCAB, (1, sum(lengths)))
    packed: dict[str, Any] = {"input_ids": ids, "position_ids": torch.cat([torch.arange(n) for n in lengths])[None]}
    mask = torch.block_diag(*[torch.ones(n, n).tril() for n in lengths]).bool()[None, None]
    if ends == "cu_seq_lens_q":
        edges = torch.tensor([0, 4, 6, 11], dtype=torch.int32)
        packed |= {"cu_seq_lens_q": edges, "cu_seq_lens_k": edges, "attention_mask": mask}
    if "left out" not in ends:
        packed["use_cache"] = False  # Transformers looks for restarting positions where there is no cache
    with torch.no_grad():
        got = model(**packed, adapter_names=names).logits[0].split(lengths)
        turned = model(**packed, adapter_names=names[1:] + names[:1]).logits[0].split(lengths)
    for own, wrong, name, row in zip(got, turned, names, ids[0].split(lengths), strict=True):
        truth = forwards(family, name, {"input_ids": row[None]})[0]
        torch.testing.assert_close(own, truth, atol=2e-4, rtol=1e-3)
        assert (wrong - truth).abs().max() > 1e-2


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"use_cache": True}, "got use_cache=True"),
        ({"past_key_values": tf.DynamicCache()}, "got past_key_values"),
        ({"attention_mask": torch.ones(1, 6)}, r"got attention_mask \(1, 6\)"),
        ({"position_ids": None}, "got position_ids with sequences of None tokens"),
        ({"position_ids": torch.arange(6)[None]}, r"got position_ids with sequences of \[6\] tokens"),
    ],
)
def test_packed_sequences_that_would_see_each_other(served: Served, changes: dict[str, Any], said: str) -> None:
    _, model = served("llama")
    packed = {"input_ids": torch.full((1, 6), 3), "position_ids": torch.tensor([[0, 1, 0, 1, 2, 3]])}
    packed |= {"cu_seq_lens_q": torch.tensor([0, 2, 6]), **changes}
    with pytest.raises(RoutingError, match=f"must not see each other.*{said}"):
        model(**packed, adapter_names=["a", "b"])


@pytest.mark.parametrize(("beams", "writes"), [(1, 1), (3, 2)])
def test_unchanged_steps_write_nothing(
    family: Callable[[str], Family], monkeypatch: pytest.MonkeyPatch, beams: int, writes: int
) -> None:
    """Per layout one write for the prompts' rows, one for their beams, however many tokens follow."""
    model = family("llama").model()
    count: list[int] = []
    write = Layout.write
    monkeypatch.setattr(Layout, "write", lambda *args, **kw: (count.append(1), write(*args, **kw))[1])
    seen = []
    for tokens, names in ((2, NAMES), (8, NAMES), (8, [*NAMES[1:], NAMES[0]])):
        count.clear()
        model.generate(**prompts(LENGTHS), adapter_names=names, num_beams=beams, max_new_tokens=tokens)
        seen.append(len(count) / len(model._multilora.routing.layouts))
    again = writes if beams > 1 else 0  # after beams the prompts' rows are new again
    assert seen == [writes, again, writes]
