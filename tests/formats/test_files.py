"""Folders, Hub ids and broken files: the right error, and no code of a file is ever run."""

from __future__ import annotations

import json
import os
import pickle
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from hf_multilora.formats import Adapter, AdapterError, files
from tests.formats import tiny

BIN = "adapter_model.bin"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny.save(tiny.llama(), tmp_path / "good")
    return tmp_path / "good"


def test_absent_folders_and_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def hub(*args: Any, **kwargs: Any) -> str:
        raise AssertionError("the Hub must not be asked")

    monkeypatch.setattr(files, "snapshot_download", hub)
    for path in (folder / "nowhere", "./nowhere/x", "~/nowhere", "a/b/c", "nowhere", "a/../b", "org/bad name", "C:\\a"):
        with pytest.raises(FileNotFoundError, match="no adapter folder at"):
            tiny.read(path, tiny.llama())
    with pytest.raises(AdapterError, match="must be a folder"):
        tiny.read(folder / tiny.CONFIG, tiny.llama())
    empty = folder.parent / "empty"
    empty.mkdir()
    with pytest.raises(FileNotFoundError, match=r"must hold adapter_config\.json, it holds nothing"):
        tiny.read(empty, tiny.llama())
    with pytest.raises(
        FileNotFoundError, match=r"must hold adapter_config\.json, it holds good.*subfolder= could be good"
    ):
        os.rmdir(empty)
        tiny.read(folder.parent, tiny.llama())
    (folder / tiny.WEIGHTS).unlink()
    with pytest.raises(FileNotFoundError, match=r"must hold adapter_model\.safetensors or adapter_model\.bin"):
        tiny.read(folder, tiny.llama())


def test_subfolders_stay_inside(folder: Path, tmp_path: Path) -> None:
    assert tiny.read(tmp_path, tiny.llama(), subfolder="good").source == str(folder)
    inside = tmp_path / "inside"
    inside.mkdir()
    (inside / "link").symlink_to(folder, target_is_directory=True)
    for subfolder in ("../good", str(folder), "x/../../good", "..\\good"):
        with pytest.raises(AdapterError, match="subfolder must stay inside"):
            tiny.read(inside, tiny.llama(), subfolder=subfolder)
    with pytest.raises(AdapterError, match="'link' links outside"):
        tiny.read(inside, tiny.llama(), subfolder="link")
    with pytest.raises(FileNotFoundError, match="no such folder in the adapter"):
        tiny.read(inside, tiny.llama(), subfolder="absent")
    with pytest.raises(AdapterError, match="revision='main' applies to Hub ids only"):
        tiny.read(folder, tiny.llama(), revision="main")


def test_linked_files_are_read(folder: Path, tmp_path: Path) -> None:
    """As in the Hub's cache, whose snapshots are links."""
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for name in (tiny.CONFIG, tiny.WEIGHTS):
        (snapshot / name).symlink_to(folder / name)
    assert tiny.read(snapshot, tiny.llama()).digest == tiny.read(folder, tiny.llama()).digest


@pytest.mark.parametrize(
    "text", ["", "{", '["r"]', "null", "\ufeff", "[" * 100_000, '{"r": ' + "9" * 5000 + "}", b"\xff\xfe{"]
)
def test_configs_that_are_none(text: str | bytes, folder: Path) -> None:
    (folder / tiny.CONFIG).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(AdapterError, match=r"adapter_config\.json must (be JSON|hold a JSON object)"):
        tiny.read(folder, tiny.llama())


def test_pickles_give_the_same_adapter(folder: Path) -> None:
    expected = {name: pair.a for name, pair in tiny.read(folder, tiny.llama()).factors.items()}
    for name in (BIN, "adapter_model.pt"):
        torch.save(load_file(folder / tiny.WEIGHTS), folder / name)
    torch.save({}, folder / BIN)  # both kinds are there: safetensors is read
    assert len(tiny.read(folder, tiny.llama()).factors) == 6
    with pytest.raises(AdapterError, match="the weights file is empty"):
        (folder / tiny.WEIGHTS).unlink()
        tiny.read(folder, tiny.llama())
    (folder / BIN).unlink()
    got = tiny.read(folder, tiny.llama()).factors
    assert sorted(got) == sorted(expected) and all(torch.equal(got[name].a, a) for name, a in expected.items())


class Bomb:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("zipped", [True, False])
def test_a_hostile_pickle_does_not_run(zipped: bool, folder: Path, tmp_path: Path) -> None:
    proof = tmp_path / "proof"
    payload = load_file(folder / tiny.WEIGHTS) | {"x": Bomb(proof)}
    (folder / tiny.WEIGHTS).unlink()
    if zipped:
        torch.save(payload, folder / BIN)
    else:
        (folder / BIN).write_bytes(pickle.dumps({"x": Bomb(proof)}))
    with pytest.raises(AdapterError, match="would run code, and is not loaded"):
        tiny.read(folder, tiny.llama())
    assert not proof.exists()
    # negative control: the file is indeed hostile
    if zipped:
        torch.load(folder / BIN, weights_only=False)
    else:
        pickle.loads((folder / BIN).read_bytes())
    assert proof.exists()


@pytest.mark.parametrize(
    "content", [[1, 2], {"x": 1}, {1: torch.ones(1)}, torch.ones(1), {"x": {"y": torch.ones(1)}}], ids=str
)
def test_pickles_of_other_things(content: Any, folder: Path) -> None:
    (folder / tiny.WEIGHTS).unlink()
    torch.save(content, folder / BIN)
    with pytest.raises(AdapterError, match="must be a dictionary of tensors by name"):
        tiny.read(folder, tiny.llama())


def test_pickled_tensors_that_hold_no_plain_data(folder: Path) -> None:
    key = next(key for key in load_file(folder / tiny.WEIGHTS) if "lora_A" in key)
    tensors = load_file(folder / tiny.WEIGHTS)
    (folder / tiny.WEIGHTS).unlink()
    for odd in (tensors[key].to_sparse(), tensors[key].to("meta")):
        torch.save(tensors | {key: odd}, folder / BIN)
        with pytest.raises(AdapterError, match=r"must be a dense tensor with data|damaged"):
            tiny.read(folder, tiny.llama())
    torch.save(tensors | {key: torch.ones(1).expand(2, 16)}, folder / BIN)
    adapter = tiny.read(folder, tiny.llama())
    assert all(pair.a.is_contiguous() for pair in adapter.factors.values())


def _outcome(folder: Path) -> Adapter | None:
    """The adapter, or None after an AdapterError; any other exception fails the test."""
    try:
        return tiny.read(folder, tiny.llama())
    except AdapterError:
        return None


@pytest.mark.parametrize("name", [tiny.WEIGHTS, BIN])
def test_damaged_files(name: str, folder: Path) -> None:
    """Cut anywhere, or one bit changed: an AdapterError, or an adapter of the same modules and shapes.

    In a safetensors file, whose header says each thing once, at most one number differs then.
    """
    good = tiny.read(folder, tiny.llama())
    if name == BIN:
        tiny.to_pickle(folder, BIN)
    path, chance = folder / name, random.Random(0)
    data = path.read_bytes()
    assert _outcome(folder) is not None
    for cut in [0, 1, 7, 8, 9, len(data) - 1, *(chance.randrange(len(data)) for _ in range(20))]:
        path.write_bytes(data[:cut])
        assert _outcome(folder) is None
    path.write_bytes(data + b"\0")  # more than it claims
    if name == tiny.WEIGHTS:
        assert _outcome(folder) is None
    header = int.from_bytes(data[:8], "little") + 8 if name == tiny.WEIGHTS else len(data)
    refused = 0
    places = [
        *range(10),
        *(chance.randrange(header) for _ in range(150)),
        *(chance.randrange(len(data)) for _ in range(40)),
    ]
    for place in places:
        damaged = bytearray(data)
        damaged[place] ^= 1 << chance.randrange(8)
        path.write_bytes(damaged)
        adapter = _outcome(folder)
        if adapter is None:
            refused += 1
            continue
        assert sorted(adapter.factors) == sorted(good.factors)
        assert {n: (p.a.shape, p.b.shape) for n, p in adapter.factors.items()} == {
            n: (p.a.shape, p.b.shape) for n, p in good.factors.items()
        }
        changed = sum(
            int((getattr(adapter.factors[module], side) != getattr(pair, side)).sum())
            for module, pair in good.factors.items()
            for side in ("a", "b")
        )
        assert changed <= 1 or name == BIN
    assert refused > 20


def test_hostile_headers(folder: Path) -> None:
    path = folder / tiny.WEIGHTS
    huge = {"x": {"dtype": "F32", "shape": [1 << 40, 1 << 20], "data_offsets": [0, 1 << 62]}}
    for header in (huge, {"x": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}, [], {"x": {}}):
        text = json.dumps(header).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(64))
        with pytest.raises(AdapterError, match=r"adapter_model\.safetensors is cut or damaged"):
            tiny.read(folder, tiny.llama())
    path.write_bytes((1 << 63).to_bytes(8, "little") + bytes(64))
    with pytest.raises(AdapterError, match="cut or damaged"):
        tiny.read(folder, tiny.llama())


def test_a_file_that_changes_while_it_is_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hf_multilora.formats import peft

    original = peft.file_digest

    def slow(config: bytes, weights: Path) -> str:
        digest = original(config, weights)
        os.utime(weights, ns=(1, 1))
        return digest

    monkeypatch.setattr(peft, "file_digest", slow)
    with pytest.raises(AdapterError, match="changed while it was being read"):
        tiny.read(folder, tiny.llama())
