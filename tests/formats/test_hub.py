"""Hub ids, with the Hub itself replaced: what is asked for, and what its answers become."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

from hf_multilora.formats import AdapterError, files
from tests.formats import tiny

BIN = "adapter_model.bin"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny.save(tiny.llama(), tmp_path / "good")
    return tmp_path / "good"


class FakeHub:
    """Stands in for `snapshot_download`: gives a folder that holds only the files asked for."""

    def __init__(self, root: Path, content: Path) -> None:
        self.root, self.content, self.calls = root, content, []

    def __call__(self, repo: str, **kwargs: Any) -> str:
        self.calls.append((repo, kwargs))
        for pattern in kwargs["allow_patterns"]:
            if (self.content / pattern).exists():
                (self.root / pattern).parent.mkdir(parents=True, exist_ok=True)
                (self.root / pattern).write_bytes((self.content / pattern).read_bytes())
        return str(self.root)


def test_hub_ids(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = FakeHub(tmp_path / "cache", tmp_path)
    monkeypatch.setattr(files, "snapshot_download", hub)
    adapter = tiny.read("org/name", tiny.llama(), revision="v1", subfolder="good", hub_kwargs={"token": False})
    assert adapter.source == "org/name@v1/good"
    patterns = ["good/adapter_config.json", "good/adapter_model.safetensors", "good/config.json"]
    assert hub.calls == [("org/name", {"revision": "v1", "allow_patterns": patterns, "token": False})]
    tiny.to_pickle(folder, BIN)
    hub = FakeHub(tmp_path / "cache2", tmp_path / "good")
    monkeypatch.setattr(files, "snapshot_download", hub)
    assert tiny.read("org/name", tiny.llama()).source == "org/name"
    assert [kwargs["allow_patterns"][1] for _, kwargs in hub.calls] == [tiny.WEIGHTS, BIN]
    with pytest.raises(AdapterError, match="subfolder must stay inside"):
        tiny.read("org/name", tiny.llama(), subfolder="../x")


def test_a_local_folder_comes_first(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent.parent)
    relative = f"{folder.parent.name}/good"
    assert tiny.read(relative, tiny.llama()).source == relative


def test_what_the_hub_does_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FileNotFoundError, match=r"no adapter folder at 'org/name'.*could not be fetched from the Hub"):
        tiny.read("org/name", tiny.llama())  # the tests are offline

    def answer(error: Exception) -> None:
        def call(*args: Any, **kwargs: Any) -> str:
            raise error

        monkeypatch.setattr(files, "snapshot_download", call)

    response: Any = SimpleNamespace(headers={}, request=None)
    for error in (RepositoryNotFoundError("gone", response=response), LocalEntryNotFoundError("no network")):
        answer(error)
        with pytest.raises(FileNotFoundError, match="at revision 'v2'"):
            tiny.read("org/name", tiny.llama(), revision="v2")
    answer(GatedRepoError("ask for access", response=response))
    with pytest.raises(GatedRepoError, match="ask for access"):
        tiny.read("org/name", tiny.llama())
