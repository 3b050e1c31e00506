"""Where an adapter's files are, and how their tensors are read: nothing in a file is ever run."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import HFValidationError, validate_repo_id
from safetensors import SafetensorError, safe_open

from hf_multilora.formats.base import AdapterError
from hf_multilora.formats.keys import listed

CONFIG = "adapter_config.json"
LABELS = "config.json"  # of a model; beside an adapter it may name the labels of its head
SAFETENSORS = "adapter_model.safetensors"
PICKLES = ("adapter_model.bin", "adapter_model.pt")
# what torch.load(weights_only=True) raises on files that are cut, damaged or ask for code to be run
BROKEN_PICKLE = (
    pickle.UnpicklingError,
    RuntimeError,
    EOFError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    AssertionError,
    OverflowError,
    MemoryError,
    ImportError,
    OSError,  # a seek to a place that a damaged file names
    struct.error,
)


@dataclass(frozen=True)
class AdapterFiles:
    """The files of an adapter, on this machine."""

    source: str  # folder, or Hub id (with @revision)
    config: Path
    weights: Path
    labels: Path | None = None  # the config.json beside them


def locate(
    path: str | os.PathLike[str],
    *,
    revision: str | None = None,
    subfolder: str = "",
    hub_kwargs: Mapping[str, Any] | None = None,
) -> AdapterFiles:
    """Find the adapter in a local folder or, where there is none of that name, on the Hub (`hub_kwargs`: only there).

    FileNotFoundError for an absent folder, repository, revision or file; AdapterError for a `subfolder` that leaves it.
    """
    steps = PurePosixPath(subfolder.replace("\\", "/"))
    if steps.is_absolute() or ".." in steps.parts:
        raise AdapterError(f"{path}: subfolder must stay inside the adapter's folder, got {subfolder!r}")
    folder = Path(path).expanduser()
    if folder.is_dir():
        if revision is not None:
            raise AdapterError(f"{path}: revision={revision!r} applies to Hub ids only, and this is a local folder")
        inner = folder / steps
        if not inner.resolve().is_relative_to(folder.resolve()):
            raise AdapterError(f"{path}: subfolder must stay inside the adapter's folder, {subfolder!r} links outside")
        return _files_in(inner, str(inner))
    if folder.exists():
        raise AdapterError(f"{path}: an adapter must be a folder with {CONFIG} and its weights, got a file")
    repo = os.fspath(path)
    if not _could_be_hub_id(repo):
        raise FileNotFoundError(
            f"no adapter folder at {path!s} (looked from {Path.cwd()}); a Hub id has the form org/name"
        )
    source = (f"{repo}@{revision}" if revision else repo) + (f"/{steps}" if steps.parts else "")
    inner = _download(repo, revision, steps, SAFETENSORS, hub_kwargs)
    if not (inner / SAFETENSORS).is_file():
        for name in PICKLES:
            inner = _download(repo, revision, steps, name, hub_kwargs)
            if (inner / name).is_file():
                break
    return _files_in(inner, source)


def _could_be_hub_id(repo: str) -> bool:
    if repo.count("/") != 1 or repo.startswith((".", "~")) or "\\" in repo:
        return False
    try:
        validate_repo_id(repo)
    except HFValidationError:
        return False
    return True


def _download(
    repo: str, revision: str | None, steps: PurePosixPath, weights: str, hub_kwargs: Mapping[str, Any] | None
) -> Path:
    """One snapshot with the config and `weights`, so that both are of the same commit."""
    patterns = [str(steps / name) for name in (CONFIG, weights, LABELS)]
    try:
        return Path(snapshot_download(repo, revision=revision, allow_patterns=patterns, **(hub_kwargs or {}))) / steps
    except GatedRepoError:
        raise  # it says how to ask for access
    except (RepositoryNotFoundError, RevisionNotFoundError, LocalEntryNotFoundError) as error:
        at = f" at revision {revision!r}" if revision else ""
        raise FileNotFoundError(
            f"no adapter folder at {repo!r} (looked from {Path.cwd()}), and it could not be fetched from the Hub{at}: "
            f"{error}"
        ) from error


def _files_in(folder: Path, source: str) -> AdapterFiles:
    if not folder.is_dir():
        raise FileNotFoundError(f"{source}: no such folder in the adapter")
    held = sorted(entry.name for entry in folder.iterdir())
    weights = next((name for name in (SAFETENSORS, *PICKLES) if (folder / name).is_file()), None)
    if (folder / CONFIG).is_file() and weights is not None:
        labels = folder / LABELS
        return AdapterFiles(source, folder / CONFIG, folder / weights, labels if labels.is_file() else None)
    missing = CONFIG if not (folder / CONFIG).is_file() else " or ".join((SAFETENSORS, *PICKLES))
    inner = sorted(found.parent.relative_to(folder).as_posix() for found in folder.glob(f"*/{CONFIG}"))
    hint = f"; subfolder= could be {listed(inner)}" if inner else ""
    raise FileNotFoundError(
        f"{source}: an adapter folder must hold {missing}, it holds {listed(held) or 'nothing'}{hint}"
    )


def parse_config(source: str, data: bytes, name: str = CONFIG) -> dict[str, Any]:
    """The JSON object in `data` (the bytes of the file `name`)."""
    try:
        config = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise AdapterError(f"{source}: {name} must be JSON, got {len(data)} bytes that are not: {error}") from error
    if not isinstance(config, dict):
        raise AdapterError(f"{source}: {name} must hold a JSON object, got {type(config).__name__}")
    return config


class LazyTensors(Mapping[str, torch.Tensor]):
    """The tensors of an open safetensors file, each read when it is asked for.

    They map the file, which may be overwritten or cut later: whoever keeps one must clone it.
    """

    def __init__(self, source: str, handle: Any) -> None:
        self._source, self._handle = source, handle
        self._keys = tuple(handle.keys())

    def __getitem__(self, key: str) -> torch.Tensor:
        try:
            return self._handle.get_tensor(key)
        except SafetensorError as error:
            raise AdapterError(f"{self._source}: tensor {key!r} cannot be read: {error}") from error

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)


@contextmanager
def open_tensors(source: str, path: Path) -> Iterator[Mapping[str, torch.Tensor]]:
    """The tensors of a weights file by key; a pickle is read with `weights_only=True` and runs no code of its own."""
    if path.name == SAFETENSORS:
        try:
            handle = safe_open(path, framework="pt", device="cpu")
        except SafetensorError as error:
            size = path.stat().st_size
            raise AdapterError(f"{source}: {path.name} is cut or damaged ({size} bytes): {error}") from error
        with handle:
            yield LazyTensors(source, handle)
        return
    with path.open("rb") as stream:
        try:
            tensors = torch.load(stream, map_location="cpu", weights_only=True)
        except BROKEN_PICKLE as error:
            raise AdapterError(
                f"{source}: {path.name} must be a plain dictionary of tensors that loads with weights_only=True; it is "
                f"damaged or would run code, and is not loaded: {error}; ask its author for {SAFETENSORS}"
            ) from error
    if not isinstance(tensors, dict) or not all(
        isinstance(key, str) and isinstance(value, torch.Tensor) for key, value in tensors.items()
    ):
        raise AdapterError(f"{source}: {path.name} must be a dictionary of tensors by name")
    yield tensors


def file_digest(config: bytes, weights: Path) -> str:
    """sha256 over the config's bytes, then the weights file's."""
    total = hashlib.sha256(config)
    with weights.open("rb") as stream:
        while block := stream.read(1 << 20):
            total.update(block)
    return total.hexdigest()


def with_labels(digest: str, labels: Sequence[str] | None) -> str:
    """The digest of an adapter whose labels are in a file beside it: of that file, only the labels count."""
    if labels is None:
        return digest
    return hashlib.sha256(f"{digest} {json.dumps(list(labels))}".encode()).hexdigest()


def memory_digest(config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> str:
    """sha256 over the config as sorted JSON, then key, dtype, shape and bytes of every tensor in the order of keys."""
    total = hashlib.sha256(json.dumps(_plain(config), sort_keys=True).encode())
    for key in sorted(tensors):
        tensor = tensors[key].detach().to("cpu").contiguous()
        total.update(f"\n{key} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        total.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()


def _plain(value: Any) -> Any:
    """`value` in JSON's own types: PEFT's configs hold sets, enums and dataclasses."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted(map(str, value))
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, (bool, int, float)) else str(value)
