"""The fixtures of tests/layers/test_merged*.py."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.layers.trio import Trio, family, setting
from tests.tiny import Family


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Family:
    return family(tmp_path_factory.mktemp("adapters"))


@pytest.fixture
def trio(own: Family, way: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Trio]:
    with torch.no_grad():
        made = Trio(own, setting(monkeypatch, way), max_loras=4)
        made.lay()
        assert made.together() == made.together("second") == ["qkv"]
        yield made
