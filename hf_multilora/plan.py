"""A memory plan: what adapters will take on the device and in host memory, and how many fit."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class ModulePlan:
    """The pool of one module: A [rank_rows, in_features] and B [rank_rows, out_features], `bytes` together."""

    rank_rows: int
    bytes: int
    in_features: int
    out_features: int
    dtype: torch.dtype


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes that adapters will take, once enough of them were used to fill all slots.

    per_module: the pools on the device, by path of the adapted module. base_bytes: the base's own parameters, tied ones
    once. adapter_bytes: the copy of each adapter in host memory. fits: how many adapters can be on the device at once
    within `budget` bytes (None: no budget): any so many of those given, or of rank max_lora_rank where that is set.
    """

    per_module: dict[str, ModulePlan]
    base_bytes: int
    adapter_bytes: dict[str, int]
    max_loras: int
    budget: int | None = None
    fits: int | None = None

    @property
    def device_bytes(self) -> int:
        """All pools together: what `memory_report().device_bytes` becomes."""
        return sum(module.bytes for module in self.per_module.values())

    @property
    def host_bytes(self) -> int:
        """All adapters together; `max_cpu_loras` may keep fewer of them in host memory."""
        return sum(self.adapter_bytes.values())

    def __str__(self) -> str:
        rows = [("module", "count", "rank rows", "MiB", "dtype")]
        kinds = dict.fromkeys((name.rpartition(".")[2], m.dtype) for name, m in self.per_module.items())
        for kind, dtype in kinds:
            found = [m for n, m in self.per_module.items() if (n.rpartition(".")[2], m.dtype) == (kind, dtype)]
            ranks, size = sum(m.rank_rows for m in found), sum(m.bytes for m in found)
            rows.append((kind, str(len(found)), str(ranks), _mib(size), str(dtype).removeprefix("torch.")))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        table = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        fits = "" if self.budget is None else f"; in {_mib(self.budget)} MiB {self.fits} adapters fit at once"
        return "\n".join(
            [
                f"device {_mib(self.device_bytes)} MiB for {self.max_loras} slots in {len(self.per_module)} modules, "
                f"base {_mib(self.base_bytes)} MiB, host {_mib(self.host_bytes)} MiB for {len(self.adapter_bytes)} "
                f"adapters{fits}",
                *table,
            ]
        )


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f}"
