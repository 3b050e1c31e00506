"""The settings of a MultiLoRAModel, validated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

BACKENDS = ("auto", "triton", "torch")


@dataclass(frozen=True)
class MultiLoRAConfig:
    """Capacity and dtype of the adapters.

    Args:
        max_loras: adapters on the device at once, so also distinct adapters in one batch that runs in one pass.
        max_cpu_loras: adapters kept in host memory, at least `max_loras`. None: as many as fit in a quarter of the
            memory that is free at the start.
        max_lora_rank: upper bound per adapter and module; an adapter above it is refused. With it the pool has
            `max_loras * max_lora_rank` rank rows per module, rounded up to a multiple of 16, from the start and never
            grows. Without it pools grow to the `max_loras` largest ranks of their module, rounded up alike.
        lora_dtype: "auto" follows each base module; or a torch dtype or its name.
        target_modules: narrows what may be adapted, as in PEFT: names (suffixes), one regex, or "all-linear" (all but
            the output head). An adapter that trained another module is refused.
        fully_sharded_loras: of a tensor-parallel base: split A and B over its processes also where the base's own
            split would leave one of them whole, for a sum of width r per linear. Each then holds 1/N of both.
        backend: what computes the deltas: "triton" (on CUDA devices), "torch", or "auto": Triton where it can.
        deterministic: a row's delta does not depend on what else is in the batch, at the price of speed; needs Triton.
            It covers the delta, not the base's own matmuls.

    Raises ValueError for values out of range.
    """

    max_loras: int = 8
    max_cpu_loras: int | None = None
    max_lora_rank: int | None = None
    lora_dtype: str | torch.dtype = "auto"
    target_modules: Sequence[str] | str | None = None
    fully_sharded_loras: bool = False
    backend: str = "auto"
    deterministic: bool = False

    def __post_init__(self) -> None:
        for name in ("max_loras", "max_cpu_loras", "max_lora_rank"):
            value = getattr(self, name)
            if name != "max_loras" and value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} must be a positive integer, got {value!r}")
        if self.max_cpu_loras is not None and self.max_cpu_loras < self.max_loras:
            raise ValueError(
                f"max_cpu_loras must be at least max_loras ({self.max_loras}), got {self.max_cpu_loras}: an adapter on "
                f"the device is also kept in host memory"
            )
        if self.backend not in BACKENDS:
            raise ValueError(f"backend must be one of {BACKENDS}, got {self.backend!r}")
        if self.deterministic and self.backend == "torch":
            raise ValueError("deterministic=True needs the Triton kernels, got backend='torch'; leave one of them out")
        self.dtype  # noqa: B018 (validates the name)

    @property
    def dtype(self) -> torch.dtype | None:
        """The fixed dtype of A and B, None where they follow the base."""
        if self.lora_dtype == "auto":
            return None
        dtype = getattr(torch, self.lora_dtype, None) if isinstance(self.lora_dtype, str) else self.lora_dtype
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise ValueError(f"lora_dtype must be 'auto' or a floating point dtype, got {self.lora_dtype!r}")
        return dtype
