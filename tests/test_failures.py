"""Calls that fail or are interrupted, and verbs used inside a running call: the model answers as before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as tf

from hf_multilora import AdapterInUseError, UnknownAdapterError
from tests.models import INPUTS, NAMES, NEW

pytest_plugins = ("tests.fixtures",)


class At(tf.LogitsProcessor):
    """Does something at the second token."""

    def __init__(self, action: Callable[[], Any]) -> None:
        self.action = action
        self.calls = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls == 2:
            self.action()
        return scores


def fail(error: BaseException) -> Callable[[], Any]:
    def action() -> None:
        raise error

    return action


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError("a bug of the user"), torch.OutOfMemoryError()])
def test_a_generate_that_is_interrupted(model: Any, error: BaseException, beams: int) -> None:
    step = At(fail(error))
    with pytest.raises(type(error)):
        model.generate(**INPUTS, adapter_names=NAMES, logits_processor=[step], num_beams=beams, max_new_tokens=NEW)
    assert step.calls == 2


def test_a_forward_that_is_interrupted_inside_a_layer(model: Any) -> None:
    handle = model.model.layers[1].register_forward_hook(lambda *_: fail(KeyboardInterrupt())())
    try:
        for call in (model, model.generate):
            with pytest.raises(KeyboardInterrupt):
                call(**INPUTS, adapter_names=NAMES)
    finally:
        handle.remove()


def test_a_block_that_fails(model: Any) -> None:
    with pytest.raises(ZeroDivisionError), model.adapters(NAMES):
        model.generate(**INPUTS, max_new_tokens=2)
        _ = 1 / 0


def test_an_error_that_is_caught_inside_a_block_leaves_the_block_as_it_was(model: Any, steady: Any) -> None:
    with model.adapters(NAMES):
        with pytest.raises(ValueError):
            model.generate(**INPUTS, num_beams=3, logits_processor=[At(fail(ValueError()))], max_new_tokens=NEW)
        with pytest.raises(UnknownAdapterError):
            model.generate(**INPUTS, adapter_names=["zzz"] * 4)
        assert torch.equal(model.generate(**INPUTS, max_new_tokens=NEW), steady[1][0])


@pytest.mark.parametrize("verb", ["delete_adapter", "reload"])
def test_an_adapter_in_use_is_neither_deleted_nor_replaced(model: Any, family: Any, steady: Any, verb: str) -> None:
    """The call goes on with the adapter as it was; an adapter that no row of it uses may go."""
    other = str(family("llama").adapter("c"))
    said: list[str] = []

    def action() -> None:
        with pytest.raises(AdapterInUseError) as raised:
            if verb == "reload":
                model.load_adapter(other, "b", load_inplace=True)
            else:
                model.delete_adapter("b")
        said.append(str(raised.value))
        model.load_adapter(other, "unused")
        model.delete_adapter("unused")

    got = model.generate(**INPUTS, adapter_names=NAMES, logits_processor=[At(action)], max_new_tokens=NEW)
    assert len(said) == 1 and "'b' must not be" in said[0] and "while a call uses it" in said[0]
    assert torch.equal(got, steady[1][0])


def test_the_default_is_neither_deleted_nor_replaced(family: Any) -> None:
    model = family("llama").model()
    model.set_adapter("b")
    with pytest.raises(AdapterInUseError, match=r"'b' must not be deleted while .* default; set_adapter\(None\)"):
        model.delete_adapter("b")
    with pytest.raises(AdapterInUseError, match="'b' must not be replaced"):
        model.load_adapter(str(family("llama").adapter("a")), "b", load_inplace=True)
    model.set_adapter(None)
    model.delete_adapter("b")
    with pytest.raises(UnknownAdapterError):
        model.generate(**INPUTS, adapter_ids=[2, 0, 0, 0])


def test_a_model_that_is_in_a_call_is_not_unpatched(model: Any) -> None:
    with model.adapters(NAMES), pytest.raises(RuntimeError, match="unpatch must not run inside a call"):
        model.unpatch()
