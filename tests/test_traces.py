"""Where a trace begins: what it takes of the routing as constant holds only where an entry point has read it."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from hf_multilora.layers import merged
from hf_multilora.layers.merged import Merged
from tests.tiny import Family, error, llama, logits, same_ids

INPUTS, MIXES = same_ids(3), (["a", None, "b"], ["b", "a", None], [None, "b", "b"])
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
BASE = [None] * 3
TOLERANCE = 1e-5


@pytest.fixture
def family(tmp_path: Path) -> Iterator[Family]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield Family(llama(num_hidden_layers=2), tmp_path, {n: {"r": r, "targets": ALL} for n, r in (("a", 2), ("b", 5))})
    torch._dynamo.reset()


def made(family: Family) -> Any:
    model = family.model("a", "b", max_loras=2)
    logits(model, INPUTS, MIXES[0])  # pools have their size, weights lie in buffers
    return model


def check(family: Family, answer: Callable[[], Tensor], model: Any) -> None:
    """Mixes in turns, and the base between them: a closed request is no constant."""
    for names in (*MIXES, None, MIXES[0], None):
        if names is None:
            got = answer()
        else:
            with model.adapters(names):
                got = answer()
        assert error(got, family.truth(INPUTS, names or BASE)) < TOLERANCE
        assert error(got, family.truth(INPUTS, MIXES[1 if names != MIXES[1] else 0])) > 100 * TOLERANCE


def whole(model: Any) -> Any:
    return torch.compile(model, fullgraph=True, backend="eager")


def layers(model: Any) -> Any:
    """Each layer by itself, in a model that is not traced."""
    for layer in model.model.layers:
        layer.compile(backend="eager", fullgraph=True)
    return model


def parts(model: Any) -> Any:
    for layer in model.model.layers:
        layer.self_attn.compile(backend="eager", fullgraph=True)
        layer.mlp.compile(backend="eager", fullgraph=True)
    return model


def inside_first(model: Any) -> Any:
    """A linear comes before the entry point in one trace."""

    def run(input_ids: Tensor) -> Any:
        model.model.layers[1].mlp.down_proj(torch.ones(3, 1, model.config.intermediate_size))
        return model(input_ids=input_ids)

    return torch.compile(run, fullgraph=True, backend="eager")


def broken(model: Any) -> Any:
    """Layers after a graph break are traced by themselves."""
    model.model.layers[0].register_forward_hook(lambda *_: torch._dynamo.graph_break())
    return torch.compile(model, backend="eager")


def after_the_whole(model: Any) -> Any:
    """An entry point was traced before."""
    with model.adapters(MIXES[0]):
        whole(model)(input_ids=INPUTS)
    return layers(model)


@pytest.mark.parametrize("begin", [whole, layers, parts, inside_first, broken, after_the_whole])
@torch.no_grad()
def test_wherever_it_begins(family: Family, begin: Callable[[Any], Any]) -> None:
    model = made(family)
    run = begin(model)
    check(family, lambda: run(input_ids=INPUTS).logits, model)


@torch.no_grad()
def test_one_trace_serves_all_layers(family: Family) -> None:
    model, count = made(family), CompileCounterWithBackend("eager")
    for layer in model.model.layers:
        layer.compile(backend=count, fullgraph=True)
    for names in MIXES:
        with model.adapters(names):
            assert error(model(input_ids=INPUTS, use_cache=False).logits, family.truth(INPUTS, names)) < TOLERANCE
    assert count.frame_count == 1
    assert error(model(input_ids=INPUTS, use_cache=False).logits, family.truth(INPUTS, BASE)) < TOLERANCE
    assert count.frame_count == 2


@torch.no_grad()
def test_two_models_in_one_trace(family: Family) -> None:
    one, other, count = made(family), made(family), CompileCounterWithBackend("eager")

    @torch.compile(fullgraph=True, backend=count)
    def run() -> tuple[Tensor, Tensor]:
        return one(input_ids=INPUTS).logits, other(input_ids=INPUTS).logits

    for names, others in ((MIXES[0], MIXES[1]), (MIXES[1], MIXES[0]), (MIXES[2], MIXES[2])):
        with one.adapters(names), other.adapters(others):
            found = run()
        for got, mix in zip(found, (names, others), strict=True):
            assert error(got, family.truth(INPUTS, mix)) < TOLERANCE
    assert count.frame_count == 1
    with other.adapters(MIXES[1]):
        base, own = run()
    assert error(base, family.truth(INPUTS, BASE)) < TOLERANCE
    assert error(own, family.truth(INPUTS, MIXES[1])) < TOLERANCE


@torch.no_grad()
def test_code_that_was_traced_for_a_model_serves_no_other(family: Family) -> None:
    """Dynamo keeps code by class; of a second model nothing of the first may be in it."""
    for _ in range(2):
        model = made(family)
        run = whole(model)
        check(family, lambda run=run: run(input_ids=INPUTS).logits, model)  # type: ignore[misc]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
@torch.no_grad()
def test_copies_take_nothing_that_was_told(family: Family, copied: Callable[[Any], Any]) -> None:
    model = made(family)
    assert all("_traced" in layer.mlp.gate_proj.__dict__ for layer in model.model.layers)
    twin = copied(model)
    assert not any("_traced" in module.__dict__ for module in twin.modules())
    check(family, lambda: whole(twin)(input_ids=INPUTS).logits, twin)
    bare = model.unpatch()
    assert not any(name.startswith(("_traced", "_gated")) for module in bare.modules() for name in module.__dict__)


@pytest.mark.parametrize("where", ["untell", "joint", "tell"])
@torch.no_grad()
def test_an_interrupt_while_tables_get_other_names(tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a request inside another: what is traced in the outer one is right or raises, as tables lack its rows; after
    an untraced call it is right."""
    torch._dynamo.reset()
    adapters: dict[str, Any] = {"a": {"r": 2, "targets": ALL}, "b": {"r": 5, "targets": ALL}}
    adapters |= {"v": {"r": 4, "targets": ("v_proj",)}, "up": {"r": 3, "targets": ("q_proj", "up_proj")}}
    family = Family(llama(num_hidden_layers=2), tmp_path, adapters)
    steps: dict[str, tuple[Any, str, Any]] = {
        "untell": (Merged, "untell", Merged.untell), "joint": (Merged, "joint", Merged.joint.fset),  # type: ignore[attr-defined]
        "tell": (merged, "tell", merged.tell),
    }  # fmt: skip
    place, name, real = steps[where]
    left, cut = [0], 0

    def counted(*args: Any) -> Any:
        left[0] -= 1
        if left[0] == -1:
            raise KeyboardInterrupt
        return real(*args)

    changed: Any = Merged.joint.setter(counted) if where == "joint" else counted  # type: ignore[attr-defined]
    for other in ("v", "up"):
        for step in (0, 4, 9):
            model = family.model(*adapters, max_loras=4)
            logits(model, INPUTS, MIXES[0])
            run = whole(model)
            with model.adapters(MIXES[0]):
                assert error(run(input_ids=INPUTS).logits, family.truth(INPUTS, MIXES[0])) < TOLERANCE
                for _ in range(2):
                    with monkeypatch.context() as patched:
                        patched.setattr(place, name, changed)
                        left[0] = step
                        try:
                            with model.adapters([other, None, other]):
                                pass
                        except KeyboardInterrupt:
                            cut += 1
                    try:
                        got = run(input_ids=INPUTS).logits
                    except torch._dynamo.exc.TorchDynamoException:
                        pass
                    else:
                        assert error(got, family.truth(INPUTS, MIXES[0])) < TOLERANCE
                    for answer in (model, run):
                        assert error(answer(input_ids=INPUTS).logits, family.truth(INPUTS, MIXES[0])) < TOLERANCE
            if left[0] > 0:
                break
    assert cut > 3
