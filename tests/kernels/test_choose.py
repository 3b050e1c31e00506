"""Which backend serves a module, and what is said where Triton cannot."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hf_multilora.kernels import backends
from hf_multilora.kernels.backends import TORCH, TRITON, TRITON_FIXED, KernelError, backend, choose
from tests.kernels.suite import INTERPRETED, case, run

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
WITH_TRITON = pytest.mark.skipif(not backends.has_triton(), reason="needs the package triton")


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    backend.cache_clear()
    yield
    backend.cache_clear()


@pytest.fixture
def missing(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "triton" else find(name, *rest)
    )


CHOICES: list[tuple[str, bool, torch.device, torch.dtype, str]] = [
    ("auto", False, CPU, torch.float32, TORCH),
    ("auto", False, CUDA, torch.float32, TRITON),
    ("auto", False, CUDA, torch.bfloat16, TRITON),
    ("auto", False, CUDA, torch.float16, TRITON),
    ("auto", False, CUDA, torch.float64, TORCH),
    ("auto", True, CUDA, torch.bfloat16, TRITON_FIXED),
    ("triton", False, CUDA, torch.bfloat16, TRITON),
    ("triton", True, CUDA, torch.bfloat16, TRITON_FIXED),
    ("torch", False, CUDA, torch.bfloat16, TORCH),
    ("torch", False, CPU, torch.float64, TORCH),
]
REFUSED: list[tuple[str, bool, torch.device, torch.dtype, str]] = [
    ("triton", False, CPU, torch.float32, r"backend='triton' needs .* must be on a CUDA device, got cpu"),
    ("auto", True, CPU, torch.float32, r"deterministic=True needs .* must be on a CUDA device, got cpu"),
    ("triton", True, torch.device("meta"), torch.float32, r"must be on a CUDA device, got meta"),
    ("triton", False, CUDA, torch.float64, r"must be float16, bfloat16 or float32, got torch.float64"),
    ("auto", True, CUDA, torch.float64, r"deterministic=True needs .*, got torch.float64"),
]


@WITH_TRITON
@pytest.mark.parametrize(
    ("rows", "tokens", "slots", "bound", "dtype", "kernel"),
    [
        (8, 1, 8, 16, torch.bfloat16, "rows"),
        (256, 1, 256, 64, torch.float32, "rows"),
        (64, 1, 8, 16, torch.bfloat16, "wide"),
        (1, 70, 8, 64, torch.float16, "wide"),
        (1, 70, 8, 65, torch.float16, "tiles"),
        (8, 512, 8, 16, torch.float32, "tiles"),
    ],
)
def test_which_kernel_expands(rows: int, tokens: int, slots: int, bound: int, dtype: torch.dtype, kernel: str) -> None:
    from hf_multilora.kernels.triton_laid import of_laid, of_parts

    both, b, starts = torch.empty(rows * tokens, 40), torch.empty(0, dtype=dtype), torch.empty(1, slots)
    assert of_laid(both, rows, b, starts, 8, bound, 1).kernel == kernel
    y = torch.empty(rows, tokens, 8)
    for planes in (1, 4):  # of h
        h = torch.empty(planes, rows, tokens, bound)
        assert of_parts(y, h, b, starts, 1).kernel == ("tiles" if planes > 1 and kernel != "rows" else kernel)


@WITH_TRITON
@pytest.mark.parametrize(("setting", "fixed", "device", "dtype", "name"), CHOICES)
def test_choice(setting: str, fixed: bool, device: torch.device, dtype: torch.dtype, name: str) -> None:
    chosen = choose(setting, fixed, device, dtype)
    assert chosen.name == name and chosen.fixed == (name == TRITON_FIXED)


@WITH_TRITON
@pytest.mark.parametrize(("setting", "fixed", "device", "dtype", "message"), REFUSED)
def test_what_cannot_be_is_refused(
    setting: str, fixed: bool, device: torch.device, dtype: torch.dtype, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backends, "interpreted", lambda: False)
    with pytest.raises(KernelError, match=message):
        choose(setting, fixed, device, dtype)


@INTERPRETED
def test_the_interpreter_serves_cpu_tensors() -> None:
    assert choose("triton", False, CPU, torch.float32).name == TRITON
    assert choose("auto", True, CPU, torch.float32).name == TRITON_FIXED
    assert choose("auto", False, CPU, torch.float32).name == TORCH


@pytest.mark.usefixtures("missing")
def test_without_triton() -> None:
    assert choose("auto", False, CUDA, torch.bfloat16).name == TORCH
    for setting, fixed in (("triton", False), ("auto", True), ("triton", True)):
        with pytest.raises(KernelError, match=r"must find the package triton, .* pip install .* backend='torch'"):
            choose(setting, fixed, CUDA, torch.bfloat16)
    for name in (TRITON, TRITON_FIXED):
        with pytest.raises(KernelError, match="triton"):
            backend(name)


def test_the_package_imports_without_triton() -> None:
    code = """
import sys
sys.modules["triton"] = None
import torch
import hf_multilora
from hf_multilora.kernels.backends import choose
assert choose("auto", False, torch.device("cuda"), torch.bfloat16).name == "torch"
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_unknown_names() -> None:
    with pytest.raises(ValueError, match=r"backend must be one of .*, got 'cuda'"):
        backend("cuda")


def _errors() -> list[Exception]:
    import triton
    from triton.runtime.errors import PTXASError

    return [
        triton.CompilationError("source", ast.Pass(lineno=1, col_offset=0), "no such thing"),
        PTXASError("ptxas died"),
        triton.OutOfResources(300_000, 232_448, "shared memory"),
        subprocess.CalledProcessError(1, ["gcc", "-O3"]),
        RuntimeError("Failed to find C compiler. Please specify via CC environment variable"),
    ]


def _breaks(monkeypatch: pytest.MonkeyPatch, which: str, error: Exception) -> None:
    from hf_multilora.kernels import triton_backend

    class Kernel:
        fn = SimpleNamespace(__name__=which)

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            def launch(*args: Any, **constants: Any) -> None:
                raise error

            return launch

    monkeypatch.setattr(triton_backend, which, Kernel())
    for plan in ("_shrink", "expand_launcher"):  # which keep launchers of the real kernels
        monkeypatch.setattr(triton_backend, plan, getattr(triton_backend, plan).__wrapped__)


@INTERPRETED
@pytest.mark.parametrize("which", ["lora_shrink_kernel", "lora_expand_kernel"])
@pytest.mark.parametrize("number", range(5))
def test_a_kernel_that_does_not_compile(which: str, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    error, c = _errors()[number], case(tokens=1)
    _breaks(monkeypatch, which, error)
    with pytest.raises(
        KernelError, match=rf"(?s)kernel {which} must compile on this machine.*backend='torch'"
    ) as caught:
        run(c, TRITON)
    assert caught.value.__cause__ is error and type(error).__name__ in str(caught.value)


@INTERPRETED
@pytest.mark.parametrize("error", [RuntimeError("CUDA error: an illegal memory access"), torch.OutOfMemoryError("no")])
def test_other_errors_are_not_the_kernels(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    _breaks(monkeypatch, "lora_shrink_kernel", error)
    with pytest.raises(RuntimeError) as caught:
        run(case(tokens=1), TRITON)
    assert caught.value is error
