"""The built wheel, Hugging Face's package `kernels` beside the folder of that name, and what importing costs."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.tree import PACKAGE, ROOT, git_files, module_name, package_files

# --- what a process with a given sys.path sees


def site_packages() -> list[str]:
    """The test environment's packages as plain folders: .pth files, so editable installs too, do not count there."""
    return list(dict.fromkeys(sysconfig.get_path(kind) for kind in ("purelib", "platlib")))


def run_isolated(code: str, path: list[str], cwd: Path, *, in_cwd: bool = False) -> subprocess.CompletedProcess[str]:
    """Run code with exactly the standard library, `path` and, if asked, the working directory in front."""
    head = f"import sys; sys.path[:0] = {path!r}\n" + ("sys.path.insert(0, '')\n" if in_cwd else "")
    env = {**os.environ, "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        [sys.executable, "-I", "-S", "-c", head + code], cwd=cwd, env=env, capture_output=True, text=True, timeout=300
    )


def output_of(done: subprocess.CompletedProcess[str]) -> dict[str, object]:
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


IMPORT_ALL = f"""
import importlib, json, {PACKAGE}
failed = {{}}
for name in %r:
    try:
        importlib.import_module(name)
    except ImportError as error:
        failed[name] = str(error)
missing = [name for name in {PACKAGE}.__all__ if not hasattr({PACKAGE}, name)]
places = {{name: getattr(sys.modules.get(name), "__file__", None) for name in %r}}
print(json.dumps(dict(failed=failed, missing=missing, places=places)))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from an sdist, and that from a copy of the tree, so that nothing stale gets in."""
    place = tmp_path_factory.mktemp("build")
    for name in git_files():
        (place / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, place / "tree" / name, follow_symlinks=False)

    def build(what: str, cwd: Path) -> Path:
        code = f"from setuptools import build_meta\nprint('built', build_meta.build_{what}({str(place)!r}), sep='\\n')"
        done = subprocess.run([sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-4000:]
        return place / done.stdout.split("built\n")[-1].strip()

    with tarfile.open(build("sdist", place / "tree")) as sdist:
        sdist.extractall(place / "sdist", filter="data")
    (unpacked,) = (place / "sdist").iterdir()
    return build("wheel", unpacked)


def test_wheel_holds_every_module(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if name.endswith(".py")}
    assert held == set(package_files())


def test_every_module_of_the_wheel_imports(wheel: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(target)
        names = sorted(module_name(name) for name in archive.namelist() if name.endswith(".py"))
    names = [name for name in names if not name.endswith("__main__")]
    seen = output_of(run_isolated(IMPORT_ALL % (names, names), [str(target), *site_packages()], tmp_path))
    assert seen["failed"] == {} and seen["missing"] == []
    outside = {name: place for name, place in seen["places"].items() if not str(place).startswith(str(target))}
    assert outside == {}, "imported from elsewhere than the wheel"


def test_a_module_missing_from_the_wheel_would_be_seen(tmp_path: Path) -> None:
    (tmp_path / PACKAGE).mkdir()
    (tmp_path / PACKAGE / "__init__.py").write_text("__all__ = ['nothing']")
    name = f"{PACKAGE}.kernels.ops"
    seen = output_of(run_isolated(IMPORT_ALL % ([name], [name]), [str(tmp_path), *site_packages()], tmp_path))
    assert list(seen["failed"]) == [name] and seen["missing"] == ["nothing"]


# --- Hugging Face's own package `kernels`

STUB = """
from unittest.mock import MagicMock
use_kernel_forward_from_hub = lambda name: lambda cls: cls
use_kernelized_func = lambda *functions: lambda cls: cls
class Device(MagicMock): pass
class Mode(MagicMock): pass
def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return MagicMock()
"""
USE_TRANSFORMERS = f"""
import json
from transformers import LlamaForCausalLM
from transformers.utils import is_kernels_available
import {PACKAGE}
from {PACKAGE}.kernels import ops
kernels = sys.modules.get("kernels")
print(json.dumps(dict(used=is_kernels_available(), kernels=getattr(kernels, "__file__", None), ops=ops.__file__)))
"""


@pytest.fixture
def fake_kernels(tmp_path: Path) -> Path:
    """An installed distribution named `kernels`, of the version that this Transformers asks for."""
    wanted = [line for line in importlib.metadata.requires("transformers") or [] if line.startswith("kernels")]
    version = re.search(r">=([\d.]+)", wanted[0])
    assert version, wanted
    site = tmp_path / "site"
    (site / "kernels").mkdir(parents=True)
    (site / "kernels" / "__init__.py").write_text(STUB)
    info = site / f"kernels-{version[1]}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: kernels\nVersion: {version[1]}\n")
    return site


def test_transformers_works_from_the_root_with_and_without_kernels(fake_kernels: Path) -> None:
    without = output_of(run_isolated(USE_TRANSFORMERS, site_packages(), ROOT, in_cwd=True))
    assert not without["used"] and without["kernels"] is None and str(without["ops"]).startswith(str(ROOT))
    real = output_of(run_isolated(USE_TRANSFORMERS, [str(fake_kernels), *site_packages()], ROOT, in_cwd=True))
    assert real["used"] and real["kernels"] == str(fake_kernels / "kernels" / "__init__.py")


def test_a_root_kernels_package_would_break_transformers(fake_kernels: Path, tmp_path: Path) -> None:
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").touch()
    path = [str(fake_kernels), *site_packages(), str(ROOT)]
    done = run_isolated(USE_TRANSFORMERS, path, tmp_path, in_cwd=True)
    assert done.returncode != 0 and "ImportError" in done.stderr, done.stderr[-2000:]


# --- what `import hf_multilora` costs

HEAVY = ("torch", "triton", "transformers.modeling_utils", "accelerate", "peft", "safetensors", "datasets")


def loaded_by(module: str) -> set[str]:
    code = f"import json, {module}; print(json.dumps({{name: 1 for name in {HEAVY!r} if name in sys.modules}}))"
    return set(output_of(run_isolated(code, [*site_packages(), str(ROOT)], ROOT.parent)))


def test_importing_the_package_loads_nothing_heavy() -> None:
    """Transformers loads lazily, and so does this package: nothing until a public name is used."""
    assert loaded_by(PACKAGE) == set()
    assert "torch" in loaded_by(f"{PACKAGE}.kernels.ops")
