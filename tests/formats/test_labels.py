"""The names of an adapter's labels: where they are found, and that they fit its head."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from hf_multilora.formats import AdapterError, adapter_from_tensors
from tests.formats import tiny

NAMES = {"0": "sad", "1": "glad", "2": "neither"}
READ = ("sad", "glad", "neither")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny.save(tiny.twin(tiny.scorer), tmp_path, touch=tiny.touch_saved, task_type="SEQ_CLS")
    return tmp_path


def read(folder: Path, **settings: Any) -> Any:
    return tiny.read(folder, tiny.twin(tiny.scorer), **settings)


def beside(folder: Path, id2label: Any) -> None:
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "id2label": id2label}))


def test_in_the_adapters_config(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert read(folder).labels is None
    tiny.edit_config(folder, id2label=NAMES)
    assert read(folder).labels == READ
    assert not caplog.text  # a known setting
    tiny.edit_config(folder, id2label=dict(reversed(NAMES.items())))
    assert read(folder).labels == READ
    beside(folder, {"0": "x", "1": "y", "2": "z"})
    assert read(folder).labels == READ  # what the adapter says itself comes first


def test_in_a_config_beside_it(folder: Path) -> None:
    (folder / "config.json").write_text("{}")
    assert read(folder).labels is None
    beside(folder, NAMES)
    assert read(folder).labels == READ
    for count in (2, 3, 5):  # the base's own, which nobody named
        beside(folder, {str(n): f"LABEL_{n}" for n in range(count)})
        assert read(folder).labels is None


def test_labels_are_part_of_what_an_adapter_is(folder: Path) -> None:
    bare = read(folder).digest
    beside(folder, {str(n): f"LABEL_{n}" for n in range(3)})
    assert read(folder).digest == bare
    beside(folder, NAMES)
    named = read(folder).digest
    assert named != bare
    (folder / "config.json").write_text(json.dumps({"id2label": NAMES, "hidden_size": 16}, indent=3))
    assert read(folder).digest == named  # the rest of that file is none of the adapter's
    beside(folder, NAMES | {"2": "other"})
    assert read(folder).digest not in (bare, named)


def test_in_memory(folder: Path) -> None:
    """As a PeftModel's config may hold them: with numbers for ids."""
    config, tensors = json.loads((folder / tiny.CONFIG).read_text()), load_file(folder / tiny.WEIGHTS)
    modules = tiny.shapes(tiny.twin(tiny.scorer))
    numbered = config | {"id2label": {int(key): name for key, name in NAMES.items()}}
    adapter = adapter_from_tensors("memory", numbered, tensors, modules)
    assert adapter.labels == READ and adapter_from_tensors("memory", config, tensors, modules).labels is None
    other = numbered | {"id2label": {0: "a", 1: "b", 2: "c"}}
    assert adapter_from_tensors("memory", other, tensors, modules).digest != adapter.digest


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"0": "a", "1": "b"}, r"labels clash: id2label in .* names 2, but module score of the adapter has 3 outputs"),
        ({str(n): f"n{n}" for n in range(4)}, r"labels clash: .* names 4, but .* has 3 outputs"),
        ({"0": "a", "1": "b", "3": "c"}, r"must have the ids 0 to 2, got \['0', '1', '3'\]"),
        ({"1": "a", "2": "b", "3": "c"}, "must have the ids 0 to 2"),
        ({"0": "a", "1": "b", "2": "a"}, r"must name each label once, got \['a'\] more than once"),
        ({}, None),
        (["a", "b", "c"], "must map ids to names"),
        ("a", "must map ids to names"),
    ],
)
@pytest.mark.parametrize("where", ["adapter_config.json", "config.json"])
def test_labels_that_do_not_fit(where: str, given: Any, message: str | None, folder: Path) -> None:
    if where == "config.json":
        beside(folder, given)
    else:
        tiny.edit_config(folder, id2label=given)
    if message is None:
        assert read(folder).labels is None
        return
    with pytest.raises(AdapterError, match=message) as raised:
        read(folder)
    assert f"in {where}" in str(raised.value)


def test_a_config_that_is_none(folder: Path) -> None:
    (folder / "config.json").write_text("{")
    with pytest.raises(AdapterError, match=r": config\.json must be JSON"):
        read(folder)
    tiny.edit_config(folder, id2label=NAMES)  # it is not needed then
    assert read(folder).labels == READ


def test_without_a_head_of_its_own(tmp_path: Path) -> None:
    """The head is the base's, and so are its labels."""
    tiny.save(tiny.twin(tiny.scorer), tmp_path / "plain")
    tiny.save(tiny.twin(tiny.llama), tmp_path / "language", touch=tiny.touch_saved, modules_to_save=["lm_head"])
    for name in ("plain", "language"):
        beside(tmp_path / name, {"0": "a", "1": "b"})
        tiny.edit_config(tmp_path / name, id2label={"0": "a"})
    assert read(tmp_path / "plain").labels is None
    adapter = tiny.read(tmp_path / "language", tiny.twin(tiny.llama))
    assert "lm_head:saved" in adapter.factors and adapter.labels is None


def test_with_lora_on_the_head(tmp_path: Path) -> None:
    tiny.save(tiny.twin(tiny.scorer), tmp_path, target_modules=["score"])
    tiny.edit_config(tmp_path, id2label=NAMES)
    assert read(tmp_path).labels == READ
    tiny.edit_config(tmp_path, id2label={"0": "a", "1": "b"})
    with pytest.raises(AdapterError, match=r"labels clash.*names 2, but module score of the adapter has 3"):
        read(tmp_path)


def test_heads_of_other_widths(tmp_path: Path) -> None:
    """The labels are those of the adapter's head, not of the base's."""
    peft_model = tiny.save(tiny.twin(lambda: tiny.scorer(5)), tmp_path, touch=tiny.touch_saved, task_type="SEQ_CLS")
    tiny.edit_config(tmp_path, id2label={str(n): f"n{n}" for n in range(5)})
    assert read(tmp_path).labels == tuple(f"n{n}" for n in range(5))
    assert torch.equal(read(tmp_path).factors["score:saved"].a, tiny.saved_modules(peft_model)["score"].weight)
    tiny.edit_config(tmp_path, id2label=NAMES)
    with pytest.raises(AdapterError, match=r"labels clash.*names 3, but .* has 5"):
        read(tmp_path)


def test_on_the_hub(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hf_multilora.formats import files
    from tests.formats.test_hub import FakeHub

    beside(folder, NAMES)
    hub = FakeHub(tmp_path / "cache", folder)
    monkeypatch.setattr(files, "snapshot_download", hub)
    assert read("org/name").labels == READ  # type: ignore[arg-type]
    (folder / "config.json").unlink()
    monkeypatch.setattr(files, "snapshot_download", FakeHub(tmp_path / "cache2", folder))
    assert read("org/name").labels is None  # type: ignore[arg-type]
