"""Session-wide tiny models: `pytest_plugins = ("tests.fixtures",)` in a test module brings them in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.models import FAMILIES, INPUTS, NAMES, NEW, Family, right_rows

Steady = tuple[Any, list[torch.Tensor], dict[str, Any]]


@pytest.fixture(scope="session")
def family(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Family]]:
    """family("llama"): the tiny architecture of that name, made once."""
    made: dict[str, Family] = {}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # matrices this small only wait for each other, many times over on a busy machine

    def get(name: str) -> Family:
        if name not in made:
            build, task, targets = FAMILIES[name]
            torch.manual_seed(7)
            made[name] = Family(name, build().eval(), task, targets, tmp_path_factory.mktemp(name))
        return made[name]

    yield get
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def shared_models(family: Callable[[str], Family]) -> Callable[[str], Any]:
    made: dict[str, Any] = {}

    def get(name: str) -> Any:
        if name not in made:
            made[name] = family(name).model()
        return made[name]

    return get


@pytest.fixture
def served(family: Callable[[str], Family], shared_models: Callable[[str], Any]) -> Iterator[Callable[[str], Any]]:
    """served("llama"): (Family, its MultiLoRAModel with adapters a, b, c), shared by tests, which restore it."""
    used: list[Any] = []

    def get(name: str) -> tuple[Family, Any]:
        used.append(shared_models(name))
        return family(name), used[-1]

    yield get
    for model in used:
        runtime = model._multilora
        assert not runtime.routing.open and runtime.default is None
        assert [e.name for e in runtime.store.catalogue] == ["a", "b", "c"]
        assert all(e.in_flight == 0 for e in runtime.store.catalogue)


def answers(model: Any) -> list[torch.Tensor]:
    """What the model gives now: mixed rows, the base, a forward."""
    with torch.no_grad():
        return [
            model.generate(**INPUTS, adapter_names=NAMES, max_new_tokens=NEW),
            model.generate(**INPUTS, max_new_tokens=NEW),
            model(**INPUTS, adapter_names=NAMES).logits,
        ]


def state(model: Any) -> dict[str, Any]:
    """What no failed call may change."""
    runtime = model._multilora
    return {
        "open": runtime.routing.open,
        "active": runtime.routing.active,
        "uniform": runtime.routing.uniform,
        "rows": runtime.routing.rows,
        "adapters": [
            (e.name, e.id, e.digest, e.id in runtime.store.pins, e.in_flight) for e in runtime.store.catalogue
        ],
        "sites": set(runtime.sites),
        "default": runtime.default,
        "held by this thread": runtime.lock._is_owned(),
    }


@pytest.fixture(scope="session")
def steady(family: Callable[[str], Family]) -> Steady:
    model = family("llama").model()
    first = answers(model)
    truth = family("llama").truth(NAMES, INPUTS, max_new_tokens=NEW)
    assert all(right_rows(first[0][:, 7:], truth)) and not torch.equal(first[0], first[1])
    return model, first, state(model)


@pytest.fixture
def model(steady: Steady) -> Iterator[Any]:
    """A model that must answer after the test what it answered before."""
    model, first, before = steady
    yield model
    assert state(model) == before
    for now, then in zip(answers(model), first, strict=True):
        torch.testing.assert_close(now, then, atol=1e-5, rtol=1e-5)
