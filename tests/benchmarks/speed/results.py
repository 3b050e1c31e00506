"""One file for all stages: each merges what it found, with the commit, the card and the versions that it ran on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..gpu import device_facts
from ..run import environment

# cells of two runs of one stage stand side by side only where these agree
SAME = ("commit", "changed", "device", "versions", "triton", "shape", "layers", "dtype", "rank")


class Results:
    """The file, read again before every merge: stages may run in processes of their own."""

    def __init__(self, path: Path, device: str) -> None:
        self.path = path
        self.header = environment() | device_facts(device)

    def read(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.path.read_text()) if self.path.exists() else {}
        return found | {"stages": found.get("stages", {})}

    def open(self, stage: str, facts: Mapping[str, Any]) -> dict[str, Any]:
        """The record of a stage that starts: with the cells of an earlier run where that ran on the same."""
        record: dict[str, Any] = self.header | dict(facts) | {"seconds": 0.0, "error": None, "cells": {}}
        earlier = self.read()["stages"].get(stage)
        if earlier is not None and all(earlier.get(key) == record.get(key) for key in SAME):
            record["cells"], record["seconds"] = dict(earlier["cells"]), earlier["seconds"]
        return record

    def merge(self, stage: str, record: Mapping[str, Any]) -> dict[str, Any]:
        """Write the stage's record into the file; gives the whole."""
        whole = self.read()
        whole["stages"][stage] = dict(record)
        stages = whole["stages"].values()
        whole |= {key: self.header[key] for key in ("device", "versions", "triton", "cpu", "date")}
        whole["commits"] = sorted({s["commit"] + (" and changes" if s["changed"] else "") for s in stages})
        whole["seconds"] = {name: s["seconds"] for name, s in whole["stages"].items()}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        scratch = self.path.with_suffix(".part")
        scratch.write_text(json.dumps(whole, indent=1) + "\n")
        scratch.replace(self.path)
        return whole
