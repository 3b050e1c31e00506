"""Session-wide tiny mixtures of experts: `pytest_plugins = ("tests.experts_fixtures",)` brings them in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.experts_family import Family, adapters_of, require

Mixtures = Callable[[str], Family]


@pytest.fixture(scope="session")
def mixtures(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mixtures]:
    """mixtures("mixtral"): that architecture with the adapters of `adapters_of`, made once."""
    made: dict[str, Family] = {}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # matrices this small only wait for each other

    def get(name: str) -> Family:
        if name not in made:
            made[name] = Family(require(name), tmp_path_factory.mktemp(name), adapters_of(name))
        return made[name]

    yield get
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def served_mixture(mixtures: Mixtures) -> Callable[[str], tuple[Family, Any]]:
    """served_mixture("mixtral"): (family, a model with its adapters), shared by tests, which leave it as it was."""
    made: dict[str, Any] = {}

    def get(name: str) -> tuple[Family, Any]:
        if name not in made:
            made[name] = mixtures(name).model(experts="grouped_mm")
        return mixtures(name), made[name]

    return get
