"""Adapters with one A for all linears of one input, others beside them, and what a model of them must hold."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tests.layers.trio import ALL_WAYS, LINEARS, Trio
from tests.tiny import Names

MIX: Names = ["s", None, "t", "s"]
ADAPTERS: dict[str, dict[str, Any]] = {
    "s": {"r": 3, "targets": LINEARS},
    "t": {"r": 5, "targets": LINEARS},
    "u": {"r": 12, "targets": LINEARS},
    "big": {"r": 17, "targets": LINEARS},
    "own": {"r": 3, "targets": LINEARS},  # of the ranks of s, with an A for each
    "qv": {"r": 4, "targets": ("q_proj", "v_proj")},
    "uneven": {"r": {"q_proj": 2, "k_proj": 5, "v_proj": 3}, "targets": LINEARS},
}
SHARED = ("s", "t", "u", "big", "qv")
ROWS = pytest.mark.parametrize("way", [way for way in ALL_WAYS if way.values[0] in ("dense", "rows")])


def share(path: Path, groups: Sequence[Sequence[str]] = (LINEARS,)) -> None:
    """Give the linears of each group, under one parent, the A of its first one that is there."""
    file = path / "adapter_model.safetensors"
    tensors = load_file(file)
    for key in tensors:
        parent, child, _, _ = key.rsplit(".", 3)
        group = next((group for group in groups if child in group), ())
        first = next((one for one in group if f"{parent}.{one}.lora_A.weight" in tensors), None)
        if first is not None and "lora_A" in key:
            tensors[key] = tensors[f"{parent}.{first}.lora_A.weight"].clone()
    save_file(tensors, file)


def sites(trio: Trio, parent: str = "first") -> list[Any]:
    return [trio.module(child, parent)._lora for child in "qkv"]


def is_one(trio: Trio, parent: str = "first") -> bool:
    """Whether A lies there once. What must go with it does."""
    group, laid = trio.merged("q", parent), sites(trio, parent)
    capacity, addresses = laid[0].rows.capacity, {site.a.data_ptr() for site in laid}
    width = group.used[0].shape[0] - group.n
    assert all(site.laid and site.merged is group for site in laid)
    if group.one_a:
        assert len({str((site.rows.spans, site.rows.capacity)) for site in laid}) == 1
        assert group.buffer.shape[0] == group.n + capacity and len(addresses) == 1 and width == group.width
    else:
        assert group.buffer.shape[0] == group.n + 3 * max(site.rows.capacity for site in laid)
        assert len(addresses) == 3 and width == 3 * group.width
    return bool(group.one_a)
