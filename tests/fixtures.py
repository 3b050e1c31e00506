"""Session-wide tiny models: `pytest_plugins = ("tests.fixtures",)` in a test module brings them in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.models import FAMILIES, Family


@pytest.fixture(scope="session")
def family(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Family]:
    """family("llama"): the tiny architecture of that name, made once."""
    made: dict[str, Family] = {}

    def get(name: str) -> Family:
        if name not in made:
            build, task, targets = FAMILIES[name]
            torch.manual_seed(7)
            made[name] = Family(name, build().eval(), task, targets, tmp_path_factory.mktemp(name))
        return made[name]

    return get


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
