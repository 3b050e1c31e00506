"""The rules of the house: who may import whom, how large a file is, what no file may hold."""

from __future__ import annotations

import ast
import os
import re
import sys

import pytest

from tests.tree import LINKED, PACKAGE, ROOT, git_files, module_name, package_files

MAX_LINES = 300

# What a unit (a folder or a module of the package) may import besides itself. Imports run downhill only: every unit
# named on the right has its own row further up.
BELOW_LAYERS = {"cuts", "kernels", "patches", "pool", "parallel", "routing"}
BELOW_MODEL = {
    "config", "formats", "moe", "census", "host", "ahead", "staging", "catalogue", "hosting", "store", "layers",
    "entry", *BELOW_LAYERS,
}  # fmt: skip
EDGES: dict[str, set[str]] = {
    "config": set(),
    "kernels": set(),
    "patches": set(),
    "pool": set(),
    "trace": set(),
    "routing": {"pool", "trace"},
    "entry": {"routing"},
    "agreement": set(),
    "cuts": set(),
    "formats": {"cuts"},
    "parallel": {"cuts", "formats"},
    "sources": set(),
    "siblings": {"sources"},
    "gates": {"sources"},
    "moe": {"cuts", "formats", "patches", "sources"},
    "census": {"formats", "moe", "patches", "sources"},
    "layers": {*BELOW_LAYERS, "gates"},
    "host": {"formats"},
    "ahead": {"host"},
    "staging": {"ahead", "host", "kernels"},
    "catalogue": {"formats", "host"},
    "collator": {"catalogue"},
    "hosting": {"catalogue", "formats", "host"},
    "store": {"catalogue", "formats", "host", "hosting", "pool"},
    "passes": {"catalogue", "pool", "store"},
    "sites": {*BELOW_MODEL, "agreement", "gates", "siblings"},
    "filling": {*BELOW_MODEL, "sites"},
    "residency": {*BELOW_MODEL, "agreement", "filling"},
    "reader": {"agreement", "formats"},
    "runtime": {*BELOW_MODEL, "agreement", "reader", "residency"},
    "prefetch": {"catalogue", "host", "runtime"},
    "heads": {"census", "formats", "routing", "runtime"},
    "calls": {"entry", "heads", "passes", "routing", "runtime", "sources"},
    "display": set(),
    "reports": {*BELOW_MODEL, "display", "runtime"},
    "compare": {"catalogue", "display", "passes", "routing", "runtime"},
    "merging": {"formats", "layers", "moe"},
    "verify": {*BELOW_MODEL, "merging", "runtime", "calls", "reports"},
    "plan": set(),
    "inherited": {"layers", "runtime"},
    "saving": {"formats", "runtime"},
    "verbs": {"compare", "prefetch", "saving", "heads", "inherited", "reader", "runtime", "reports", "verify"},
    "model": {*BELOW_MODEL, "verbs", "runtime", "calls", "plan", "collator"},
    "renames": set(),
    "loading": {*BELOW_MODEL, "renames", "runtime", "model"},
    "skeleton": {*BELOW_MODEL, "runtime", "loading"},
    "planning": {*BELOW_MODEL, "cuts", "reader", "renames", "sites", "runtime", "plan", "model", "loading", "skeleton"},
    "warmup": {*BELOW_MODEL, "sites", "runtime", "planning", "reports", "verify"},
    "__init__": {"config", "routing", "formats", "catalogue", "store", "collator", "model"},
}
# The one way uphill: inside a function, where a method of the model hands over to the modules that make or plan models.
IN_FUNCTIONS = {"model": {"loading", "planning"}, "verbs": {"loading", "warmup"}}
ABOVE = ("integrations", "cli", "server")  # these may import everything, and nothing may import them

# Third-party packages by unit; without a row: the declared dependencies. What stands above the model may import any.
EXTERNAL: dict[str, set[str]] = {"kernels": {"torch", "triton"}, "patches": {"torch", "transformers"}}
DEPENDENCIES = {"torch", "transformers", "accelerate", "peft", "safetensors", "huggingface_hub", "psutil"}


def unit_of(dotted: str) -> str:
    """hf_multilora.layers.linear -> layers; hf_multilora itself -> __init__."""
    parts = dotted.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def imported(source: str, place: str) -> list[tuple[int, str, bool]]:
    """(line, absolute dotted name, whether inside a function) of every import in a file."""
    here = place.removesuffix(".py").split("/")[:-1]
    tree = ast.parse(source)
    functions = [node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    inside = {id(node) for function in functions for node in ast.walk(function)}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = here[: len(here) - node.level + 1] if node.level else []
            name = ".".join(base + (node.module.split(".") if node.module else []))
            names = [name]
            if name == PACKAGE:  # from . import pool: a unit, or else a public name of the package
                units = {*EDGES, *ABOVE}
                names = [f"{name}.{alias.name}" if alias.name in units else name for alias in node.names]
        else:
            continue
        found += [(node.lineno, name, id(node) in inside) for name in names]
    return found


def violations(source: str, place: str) -> list[str]:
    """What a file at that place of the wheel imports against the rules."""
    unit = unit_of(module_name(place))
    if unit in ABOVE:
        return []
    if unit not in EDGES:
        return [f"{place}: unit {unit!r} has no row in EDGES"]
    external = EXTERNAL.get(unit, DEPENDENCIES)
    found = []
    for line, name, in_function in imported(source, place):
        allowed = {unit} | EDGES[unit] | (IN_FUNCTIONS.get(unit, set()) if in_function else set())
        top = name.split(".")[0]
        if top in LINKED:
            found.append(f"{place}:{line}: {name} must be reached as {PACKAGE}.{name}")
        elif top == PACKAGE and unit_of(name) not in allowed:
            found.append(f"{place}:{line}: {unit} must not import {unit_of(name)}")
        elif top not in {PACKAGE, *external} and top not in sys.stdlib_module_names:
            found.append(f"{place}:{line}: {unit} must not import the package {top}")
    return found


def test_edges_run_downhill() -> None:
    units = list(EDGES)
    uphill = [(unit, up) for unit, ups in EDGES.items() for up in ups if up not in units[: units.index(unit)]]
    assert not uphill


def test_imports_run_downhill() -> None:
    files = package_files()
    assert files, "no package files found"
    found = [line for place, name in files.items() for line in violations((ROOT / name).read_text("utf-8"), place)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("place", "source", "reported"),
    [
        ("hf_multilora/layers/linear.py", "from ..model import MultiLoRAModel", "layers must not import model"),
        ("hf_multilora/layers/linear.py", "from .. import store", "layers must not import store"),
        ("hf_multilora/layers/linear.py", "def f():\n    import hf_multilora.store", "layers must not import store"),
        ("hf_multilora/layers/__init__.py", "from ..store import AdapterStore", "layers must not import store"),
        ("hf_multilora/store.py", "from .layers.base import Slots", "store must not import layers"),
        ("hf_multilora/pool.py", "from . import MultiLoRAModel", "pool must not import __init__"),
        ("hf_multilora/pool.py", "from .integrations import ray", "pool must not import integrations"),
        ("hf_multilora/kernels/ops.py", "from hf_multilora.routing import Routing", "kernels must not import routing"),
        ("hf_multilora/kernels/ops.py", "import numpy as np", "kernels must not import the package numpy"),
        ("hf_multilora/patches/dbrx.py", "from peft import PeftModel", "patches must not import the package peft"),
        ("hf_multilora/model.py", "from kernels.ops import shrink", "must be reached as hf_multilora.kernels.ops"),
        ("hf_multilora/model.py", "from .loading import load", "model must not import loading"),
        ("hf_multilora/store.py", "def f():\n    from .loading import load", "store must not import loading"),
        ("hf_multilora/model.py", "import pandas", "model must not import the package pandas"),
        ("hf_multilora/helpers.py", "import torch", "'helpers' has no row in EDGES"),
    ],
)
def test_a_forbidden_import_is_reported(place: str, source: str, reported: str) -> None:
    found = violations(source, place)
    assert len(found) == 1 and reported in found[0], found


@pytest.mark.parametrize(
    ("place", "source"),
    [
        (
            "hf_multilora/layers/linear.py",
            "from ..kernels.ops import shrink\nfrom .base import Slots\nimport math",
        ),
        ("hf_multilora/model.py", "from . import pool, store\nfrom .layers import wrap"),
        ("hf_multilora/model.py", "def f():\n    from .loading import load"),
        ("hf_multilora/integrations/ray.py", "import ray\nfrom ..model import MultiLoRAModel"),
    ],
)
def test_an_allowed_import_is_not_reported(place: str, source: str) -> None:
    assert violations(source, place) == []


@pytest.mark.parametrize("name", LINKED)
def test_linked_folders(name: str) -> None:
    """A root kernels/__init__.py would stand in for Hugging Face's package of that name (see the test below)."""
    assert not (ROOT / name / "__init__.py").exists(), f"{name}/ at the root must stay without __init__.py"
    assert not (ROOT / name).is_symlink()
    link = ROOT / PACKAGE / name
    assert link.is_symlink(), f"{link} must be a link to ../{name}; git on this system may not support links"
    assert os.readlink(link) == f"../{name}"


def test_files_stay_small() -> None:
    sizes = {name: (ROOT / name).read_text("utf-8").count("\n") for name in package_files().values()}
    assert not {name: size for name, size in sizes.items() if size > MAX_LINES}


# Written in pieces, so that this file does not hold what it looks for.
MACHINE_PATH = re.compile(rb"(?<![\w.])/(?:root|work|tmp|farm)" + rb"/")
HOSTS = ("python" + "hosted", "pypi" + ".org", "download" + ".pytorch", "registry" + ".npm")
HOST = re.compile("|".join(re.escape(host) for host in HOSTS).encode())


def local_traces(content: bytes) -> list[str]:
    """Paths of somebody's machine, or names of package registries."""
    return [match.group().decode() for pattern in (MACHINE_PATH, HOST) for match in pattern.finditer(content)]


def test_nothing_local_is_committed() -> None:
    found = {}
    for name in git_files():
        path = ROOT / name
        if path.is_file() and not path.is_symlink() and (traces := local_traces(path.read_bytes())):
            found[name] = traces
    assert not found


@pytest.mark.parametrize("root", ["root", "work", "tmp"])
def test_local_traces_are_found(root: str) -> None:
    assert local_traces(f'{{"base_model_name_or_path": "/{root}/model"}}'.encode())
    assert local_traces(b"https://files.python" + b"hosted.org/x.whl")
    assert not local_traces(f"frame/{root}/x and net{root}/ are no absolute paths".encode())


def test_no_two_plugins_of_the_tests_share_a_fixture_name() -> None:
    """pytest brings the fixtures of a plugin into every test module: of one name, the last would stand for both."""
    sources = {path: (ROOT / path).read_text("utf-8") for path in git_files() if path.startswith("tests/")}
    named = [line for source in sources.values() for line in re.findall(r"^pytest_plugins = .*", source, re.M)]
    plugins = {plugin for line in named for plugin in re.findall(r'"(tests\.\w+)"', line)}
    owners: dict[str, str] = {}
    for plugin in plugins:
        for name in re.findall(r"^@pytest\.fixture.*\ndef (\w+)", sources[plugin.replace(".", "/") + ".py"], re.M):
            assert owners.setdefault(name, plugin) == plugin, f"{name}: in {owners[name]} and {plugin}"
    assert len(plugins) > 1 and len(owners) > 3
