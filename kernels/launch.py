"""Launches of Triton kernels: on the right device, with a clear error where one cannot be built, and cheaply again.

Triton's own launch looks at every argument to find the compiled kernel: 17 us of CPU on an H200's host, 4.5 of
them for the launch itself. A `Launcher` keeps what it found, by what the kernel was specialised for.
"""

from __future__ import annotations

import functools
import subprocess
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.errors import PTXASError

from .backends import KernelError

# of the compiler, its assembler, and the C compiler (a missing one too) that builds launchers
BROKEN = (triton.CompilationError, PTXASError, triton.OutOfResources, subprocess.CalledProcessError, FileNotFoundError)


@functools.cache
def dependent_launch(device: torch.device) -> bool:
    """Whether kernels may be launched while the one before them still runs (programmatic dependent launch, from
    compute capability 9.0 on); elsewhere they are launched after its end, about 0.5 us later each."""
    return (
        device.type == "cuda"
        and torch.version.hip is None
        and torch.cuda.get_device_capability(device) >= (9, 0)
        and hasattr(tl.extra.cuda, "gdc_wait")
    )


def launch(kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], constants: dict[str, Any]) -> Any:
    """On the device of the first argument, which need not be the current one. Returns the compiled kernel (in the
    interpreter None). Raises KernelError where the kernel cannot be compiled."""
    device = arguments[0].device
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            return launch(kernel, grid, arguments, constants)
    try:
        return kernel[grid](*arguments, **constants)
    except BROKEN as error:
        raise _broken(kernel, error) from error
    except RuntimeError as error:
        if "C compiler" not in str(error):  # Triton builds its launcher with one
            raise
        raise _broken(kernel, error) from error


def _broken(kernel: Any, error: Exception) -> KernelError:
    return KernelError(
        f"the Triton kernel {kernel.fn.__name__} must compile on this machine, it did not: {type(error).__name__}: "
        f"{str(error)[:300]}; install a C compiler and a Triton that fits torch and this GPU, or pass backend='torch' "
        f"to from_pretrained"
    )


Kind = tuple[tuple[torch.dtype, bool] | None, ...]  # for each pointer


def kind_of(pointers: Sequence[Tensor | None], addresses: Sequence[int | None]) -> Kind:
    return tuple(
        [None if t is None else (t.dtype, not at & 15) for t, at in zip(pointers, addresses, strict=True)]  # type: ignore[operator]
    )


class Launcher:
    """One kernel with its grid, numbers and constants, for one device.

    numbers, constants: in the order of the kernel's parameters, after its pointers. What was compiled is kept by what
    else Triton specialises for: dtypes, and whether addresses are multiples of 16.
    """

    def __init__(
        self,
        kernel: Any,
        grid: tuple[int, int, int],
        numbers: tuple[int, ...],
        constants: dict[str, Any],
        warps: int,
        stages: int,
    ) -> None:
        self.kernel, self.grid, self.numbers, self.constants = kernel, grid, numbers, constants
        self.options = {"num_warps": warps, "num_stages": stages} | (
            {"launch_pdl": True} if constants.get("PDL") else {}
        )
        self.rest = (*numbers, *constants.values())
        self.compiled: dict[Kind, Any] = {}

    def __call__(self, *pointers: Tensor | None) -> None:
        """Raises as `launch` does."""
        addresses = [None if t is None else t.data_ptr() for t in pointers]
        kind = kind_of(pointers, addresses)
        compiled, device = self.compiled.get(kind), pointers[0].get_device()  # type: ignore[union-attr]
        if compiled is not None and device == torch.cuda.current_device():
            self.again(compiled, device, addresses)
            return
        compiled = launch(self.kernel, self.grid, (*pointers, *self.numbers), self.constants | self.options)
        if compiled is not None:
            self.compiled[kind] = compiled

    def again(self, compiled: Any, device: int, addresses: Sequence[int | None]) -> None:
        """Launch what was compiled for such arguments, on the current device."""
        hooks = triton.knobs.runtime
        enter, leave = hooks.launch_enter_hook, hooks.launch_exit_hook
        # somebody traces launches: a function, or a chain of them, which Triton has from the start, empty
        if getattr(enter, "calls", enter) or getattr(leave, "calls", leave):
            compiled[self.grid](*addresses, *self.rest)
            return
        stream = torch._C._cuda_getCurrentRawStream(device)
        function, metadata = compiled.function, compiled.packed_metadata
        compiled.run(*self.grid, stream, function, metadata, None, None, None, *addresses, *self.rest)


class Bound:
    """A launcher for what one matmul after the other gives: its kernel takes [y | h] twice, its outputs, and the last
    pointers, which stay where they are. The tensors have the same dtypes each time.

    outputs: pointers of the kernel for them; those beyond the outputs of a call get the first one.
    """

    def __init__(self, launcher: Launcher, outputs: int, *last: Tensor | None) -> None:
        self.launcher, self.outputs, self.last = launcher, outputs, last
        self.addresses = [None if t is None else t.data_ptr() for t in last]
        self.kind = kind_of(last, self.addresses)
        self.compiled: Any = None  # for aligned first pointers, as those of new tensors are
        self.one_device = torch.cuda.device_count() == 1  # asked once, not which one is current at each call

    def __call__(self, both: Tensor, outs: list[Tensor]) -> None:
        """Raises as `launch` does."""
        odd = at = both.data_ptr()
        addresses: list[int | None] = [at, at]
        for out in outs:
            at = out.data_ptr()
            odd |= at
            addresses.append(at)
        spare = self.outputs - len(outs)
        if spare:
            addresses += addresses[2:3] * spare
        compiled, device = self.compiled, both.get_device()
        if odd & 15 or compiled is None or not (self.one_device or device == torch.cuda.current_device()):
            first = (both, both, *outs, *outs[:1] * spare)
            self.launcher(*first, *self.last)
            self.compiled = self.launcher.compiled.get((*[(t.dtype, True) for t in first], *self.kind))
        else:
            self.launcher.again(compiled, device, addresses + self.addresses)
