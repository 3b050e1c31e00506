"""Sharded bases: two processes over gloo answer as one process does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from .bases import BASES, RECENT, make
from .processes import first_of_two, torchrun

CLOSE, APART = 1e-5, 1e-2  # of the largest logit


def check(found: list[dict[str, Any]]) -> None:
    for name in found[0]:
        for mode in ("parts", "fully")[: 1 + BASES[name].fully]:
            for rank, each in enumerate(found):
                what, own = f"{name}, {mode}, process {rank}", each[name][mode]
                assert max(own["errors"].values()) < CLOSE, (what, own["errors"])
                assert own["wrong"] > APART, f"{what}: other rows' adapters pass, the comparison says nothing"
                assert own["tokens"], what
                assert own["bytes"] < each[name]["bytes"], what


def test_dense_bases(tmp_path: Path) -> None:
    found = torchrun("dense", tmp_path)
    assert set(found[0]) == {"llama", "qwen3", "phi3", "t5"}
    check(found)
    for name in ("llama", "qwen3", "phi3"):  # all linears are sharded; an embedding's B is not
        for each in found:
            assert each[name]["fully"]["bytes"] < 0.6 * each[name]["bytes"] < each[name]["parts"]["bytes"]
    kinds = set(found[0]["llama"]["fully"]["sharded"])
    assert "sharded linear" in kinds and ("sharded embedding" in kinds) is RECENT


def test_mixtures_of_experts(tmp_path: Path) -> None:
    found = torchrun("mixtures", tmp_path)
    assert set(found[0]) == {"mixtral", "mixtral, whole experts", "gpt_oss", "gpt_oss, whole experts"}
    check(found)


def test_an_adapter_of_one_process_experts(tmp_path: Path) -> None:
    """The other has experts that it does not train."""
    for each in torchrun("one expert", tmp_path):
        assert max(each["errors"].values()) < CLOSE, each
        assert each["moved"] > APART and each["sharded"]


def test_adapters_come_and_go(tmp_path: Path) -> None:
    found = torchrun("life", tmp_path)
    assert all(found[0][mode]["sizes"] == found[1][mode]["sizes"] for mode in found[0]), "all drop the same host copies"
    for rank, each in enumerate(found):
        for mode, own in each.items():
            assert len(own["errors"]) == 17
            assert max(own["errors"].values()) < CLOSE, (rank, mode, own["errors"])
            assert own["graphs"] == 1, "another mix must find the trace as it is"
            assert own["laid"] == (4 if mode == "parts" else 0), "q, k and v, gate and up of 2 layers"
            assert own["tokens"] and own["left"] == [] and own["class"] == "LlamaForCausalLM"


def test_weights_that_change(tmp_path: Path) -> None:
    for each in torchrun("changes", tmp_path):
        assert len(each["errors"]) == 8 and max(each["errors"].values()) < CLOSE, each["errors"]
        assert each["saved"] and each["moved"] > APART


SAID = {
    "missing in one": ("FileNotFoundError|AdapterError|OSError", "nowhere"),
    "another in one": ("ValueError", "all 2 processes must load the same"),
    "no host memory in one": ("MemoryError", "none left"),
    "not adapted in one": ("OSError", "an odd machine"),
    "no device memory in one": ("CapacityError", "out of memory, says this test"),
    "out of step": ("ValueError", "make the same calls in each"),
    "prefetch": ("NotImplementedError", "base in one process"),
    "copied": ("NotImplementedError", "load it again"),
    "resized": ("ValueError", "which adapters"),
    "verify": ("NotImplementedError", "base in one process"),
    "with gradients": ("RoutingError", "no_grad"),
    "saved whole": ("NotImplementedError", "q_proj"),
    "fully with whole experts": ("NotImplementedError", "leave fully_sharded_loras out"),
    "no plan": ("NotImplementedError", "mlp.up_proj"),
}
RECENT_ONLY = {
    "exchange": ("NotImplementedError", "ep_implementation='all_reduce'"),
    "style": ("NotImplementedError", "'all_reduce'"),
}


def test_what_fails_in_one_fails_in_all(tmp_path: Path) -> None:
    first, second = torchrun("refusals", tmp_path)
    assert first["found"] == second["found"]
    assert first["found"].pop("registered") == str(["a", "b"]) and first["found"].pop("grad") == "False"
    wanted = SAID | (RECENT_ONLY if RECENT else {})
    assert set(first["found"]) == set(wanted)
    for what, (kind, text) in wanted.items():
        said = first["found"][what]
        assert said.split(":")[0] in kind.split("|") and text in said, (what, said)
    for each in (first, second):
        assert max(each["errors"].values()) < CLOSE, each["errors"]


@pytest.mark.parametrize("scenario", ["ended", "late"])
def test_a_process_that_does_not_come(scenario: str, tmp_path: Path) -> None:
    make("llama", tmp_path)
    found = first_of_two(scenario, tmp_path)
    assert "RuntimeError: reading" in found["said"] and "did not answer" in found["said"] and found["names"] == ["a"]
    assert found["seconds"] < 30
