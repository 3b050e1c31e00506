"""A memory plan: what adapters will take on the device and in host memory, and how many fit."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class ModulePlan:
    """The pool of one site: A [rank_rows, in_features] and B [rank_rows, out_features], `bytes` together.

    experts: how many have rank rows of their own in it; 1: it is no projection of experts, or they share its rows.
    """

    rank_rows: int
    bytes: int
    in_features: int
    out_features: int
    dtype: torch.dtype
    experts: int = 1


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes that adapters will take, once enough of them were used to fill all slots.

    per_module: the pools on the device, by site: the path of the adapted module, with its role if it is not LoRA's.
    base_bytes: the base's own parameters, tied ones once. adapter_bytes: the copy of each adapter in host memory. fits:
    how many adapters can be on the device at once within `budget` bytes (None: no budget): any so many of those given,
    or of rank max_lora_rank where that is set.
    """

    per_module: dict[str, ModulePlan]
    base_bytes: int
    adapter_bytes: dict[str, int]
    max_loras: int
    budget: int | None = None
    fits: int | None = None

    @property
    def device_bytes(self) -> int:
        """All pools together: what `memory_report().device_bytes` becomes at most. An A that adapters have for several
        linears of one input is planned for each, and may be there once."""
        return sum(module.bytes for module in self.per_module.values())

    @property
    def expert_bytes(self) -> int:
        """Pools with rank rows of single experts: what expert parallelism over N devices divides by N."""
        return sum(module.bytes for module in self.per_module.values() if module.experts > 1)

    @property
    def shared_expert_bytes(self) -> int:
        """What `expert_bytes` would be if all experts shared the factor on the side of the hidden states: A of the
        first projection, B of the last."""
        size = 0.0
        for name, module in self.per_module.items():
            if module.experts > 1:
                own, shared = module.out_features, module.in_features
                if _projection(name) == "down_proj":
                    own, shared = shared, own
                size += module.rank_rows * (own + shared / module.experts) * module.dtype.itemsize
        return round(size)

    @property
    def host_bytes(self) -> int:
        """All adapters together; `max_cpu_loras` may keep fewer of them in host memory."""
        return sum(self.adapter_bytes.values())

    def __str__(self) -> str:
        rows = [("module", "count", "rank rows", "MiB", "dtype")]
        kinds = dict.fromkeys((_kind(name), m.dtype) for name, m in self.per_module.items())
        for kind, dtype in kinds:
            found = [m for n, m in self.per_module.items() if (_kind(n), m.dtype) == (kind, dtype)]
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
                *([self._experts()] if self.expert_bytes else []),
                *table,
            ]
        )

    def _experts(self) -> str:
        return (
            f"experts take {_mib(self.expert_bytes)} MiB of it: {_mib(self.expert_bytes // 2)} MiB per device with "
            f"expert parallelism over 2, {_mib(self.shared_expert_bytes)} MiB if they shared A of the first projection "
            f"and B of the last"
        )


def _kind(site: str) -> str:
    """The last part of the module's path, and the role if it is not LoRA's."""
    path, colon, role = site.partition(":")
    return path.rpartition(".")[2] + colon + role


def _projection(site: str) -> str:
    """The projection of a site of experts, "" of any other."""
    return site.partition(":")[2].partition(".")[0]


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f}"
