"""Adapters read from where they came from, also again after their host copy was dropped."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .agreement import number_of
from .formats import Adapter, read_adapter


@dataclass(frozen=True)
class Reader:
    """Reads an adapter (again) from where it was first read, for the base of a Runtime."""

    runtime: Any
    path: str
    revision: str | None = None
    subfolder: str = ""

    def __call__(self) -> Adapter:
        """Raises as `read_adapter` does. Of a sharded base every process reads: files are mapped, so a node's disk
        gives them once, and `pack` keeps this process's part."""
        runtime = self.runtime

        def read() -> Adapter:
            return read_adapter(
                self.path, runtime.census(), revision=self.revision, subfolder=self.subfolder, **runtime.reading()
            )

        found: Adapter = runtime.agree(f"reading {self.path}", read, fingerprint)
        return found


def fingerprint(adapter: Adapter) -> int:
    """Of what was read, and for which sites: below 2 ** 60."""
    return number_of("\n".join([adapter.digest, *sorted(adapter.factors)]))
