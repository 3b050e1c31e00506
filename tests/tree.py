"""The files of the project as git sees them, and where the wheel must hold them."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "hf_multilora"
LINKED = ("kernels", "patches")  # real folders at the root, links inside the package


def git_files(*paths: str) -> list[str]:
    """Files of the tree, also new ones that git does not know yet; in a clean clone, exactly what is committed."""
    listed = subprocess.run(
        ["git", "-c", "safe.directory=*", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *paths],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split("\0")
    return sorted({name for name in listed if name and os.path.lexists(ROOT / name)})


def package_files() -> dict[str, str]:
    """Every Python file of the package: its place in the wheel -> its place in the repository."""
    files = {name: name for name in git_files(PACKAGE) if name.endswith(".py")}
    files |= {f"{PACKAGE}/{name}": name for name in git_files(*LINKED) if name.endswith(".py")}
    return files


def module_name(place: str) -> str:
    return place.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
