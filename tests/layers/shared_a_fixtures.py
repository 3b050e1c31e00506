"""The fixtures of tests/layers/test_shared_a*.py."""

from __future__ import annotations

import pytest

from tests.layers.shared_a import ADAPTERS, SHARED, share
from tests.layers.trio import Trio, family, setting
from tests.tiny import Family


@pytest.fixture(scope="module")
def shared_family(tmp_path_factory: pytest.TempPathFactory) -> Family:
    made = family(tmp_path_factory.mktemp("adapters"), ADAPTERS)
    for name in SHARED:
        share(made.paths[name])
    return made


@pytest.fixture
def shared(shared_family: Family, way: str, monkeypatch: pytest.MonkeyPatch) -> Trio:
    return Trio(shared_family, setting(monkeypatch, way), max_loras=3)
