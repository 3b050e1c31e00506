"""A registered adapter, written back as a PEFT checkpoint."""

from __future__ import annotations

import os

from .formats import Adapter, write_adapter
from .runtime import Runtime


def save_adapter(runtime: Runtime, name: str, folder: str | os.PathLike[str], overwrite: bool) -> None:
    """See MultiLoRAModel.save_adapter. Of a sharded base every process calls it, and the first one writes."""
    entry = runtime.store.catalogue.entry(name)
    if entry.reader is not None:
        adapter = entry.read()  # in the dtype and with the scales of its files
    else:
        assert entry.host is not None  # it came from memory and stays there
        factors = entry.host.pairs()
        adapter = Adapter(entry.source, entry.digest, entry.base_model, factors, entry.config, entry.labels)

    def write() -> None:
        if runtime.agreement is None or runtime.agreement.first:
            write_adapter(folder, adapter, runtime.census(), aliases=runtime.reading()["aliases"], overwrite=overwrite)

    runtime.agree(f"writing adapter {name!r}", write)
