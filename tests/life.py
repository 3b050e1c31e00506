"""What the tests of the augmented weight's life share: a family of adapters, and a life to lead."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_multilora.layers.augmented import is_laid
from tests.tiny import Family, assert_rows, llama, logits, same_ids

INPUTS = same_ids(3)
NAMES = ["a", None, "b"]
ADAPTERS = {"a": {"r": 3}, "b": {"r": 5}, "c": {"r": 3}, "big": {"r": 20}}


def make_family(tmp_path_factory: pytest.TempPathFactory) -> Family:
    torch.manual_seed(0)
    return Family(llama(), tmp_path_factory.mktemp("adapters"), ADAPTERS)


def make_model(family: Family) -> Any:
    """With a and b resident, its weights laid."""
    model = family.model("a", "b", max_loras=2)
    logits(model, INPUTS, NAMES)
    assert len(laid(model)) == len(model._multilora.sites)
    return model


def laid(model: Any) -> list[str]:
    return [name for name, site in model._multilora.sites.items() if is_laid(*site)]


def linear(model: Any) -> nn.Linear:
    return model.model.layers[0].self_attn.q_proj


def check(family: Family, model: Any, base: Any, names: Any = NAMES, tolerance: float = 1e-5) -> None:
    assert_rows(logits(model, INPUTS, names), family.truth(INPUTS, names, base), tolerance)


def live_on(family: Family, model: Any, base: Any, tolerance: float = 1e-5) -> None:
    """Compare, change W in place, compare, put another adapter into a slot, compare."""
    check(family, model, base, tolerance=tolerance)
    for each in (model, base):
        with torch.no_grad():
            linear(each).weight.mul_(-1.5)
    check(family, model, base, tolerance=tolerance)
    model.delete_adapter("a")
    model.load_adapter(str(family.paths["c"]), "c")
    check(family, model, base, ["c", None, "b"], tolerance)
    assert laid(model), "the fast path is back"


def hidden_bytes(state: dict[str, Tensor]) -> int:
    """Bytes behind the tensors of a state dict that are no weights of the base."""
    return sum(t.untyped_storage().nbytes() - t.nbytes for t in state.values())
