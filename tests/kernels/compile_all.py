"""Compile the kernels for a GPU that need not be there: python -m tests.kernels.compile_all 80 90. One line each.

Triton's interpreter, in which the tests of a CPU run, takes what the compiler refuses: early returns around constants,
blocks too large for shared memory.
"""

from __future__ import annotations

import itertools
import sys
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from hf_multilora.kernels import triton_experts as experts
from hf_multilora.kernels import triton_gated as gated
from hf_multilora.kernels import triton_laid as laid
from hf_multilora.kernels.lora_expand import lora_expand_kernel
from hf_multilora.kernels.lora_shrink import lora_shrink_kernel
from hf_multilora.kernels.triton_backend import FIXED, LOW, tiles

SHARED = 99 << 10  # bytes of shared memory that a block can have on consumers' cards (sm_86, sm_89), the least of all
TABLES = {name: "*i32" for name in ("order", "offsets", "starts", "ranks")}
PARTS = {experts.SHRINK: "A x", experts.EXPAND: "B h", experts.COMBINE: "sum"}
DTYPES = {"bf16": ("tf32x3", 2), "fp32": ("ieee", 4)}


def compiled(
    kernel: Any, pointers: dict[str, str], constants: dict[str, Any], target: int, warps: int, stages: int,
    aligned: bool = False,
) -> Any:  # fmt: skip
    """aligned: all addresses and sizes are multiples of 16, as Triton finds those of most models."""
    names = kernel.arg_names
    kinds = {n: pointers.get(n, "constexpr" if n in constants else "i32") for n in names}
    facts = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if aligned and kinds[n] != "constexpr"}
    source = ASTSource(kernel, kinds, {(names.index(n),): value for n, value in constants.items()}, facts)
    options = {"num_warps": warps, "num_stages": stages}
    return triton.compile(source, target=GPUTarget("cuda", target, 32), options=options)


def compiled_experts(target: int, dtype: str, precision: str) -> dict[str, Any]:
    """The kernels of experts' LoRA for few and many pairs, by what the launchers choose for ranks up to 16 and 256."""
    found = {}
    pointers = {name: f"*{dtype}" for name in ("x", "a", "b", "y", "out", "weights")}
    pointers |= {name: "*i32" for name in ("begins", "ranks", "keys", "source")} | {"h": "*fp32", "places": "*i64"}
    kind = {"bf16": torch.bfloat16, "fp32": torch.float32}[dtype]
    for (op, amount), t in (experts.TILES | {(op, "fixed"): t for op, t in experts.FIXED.items()}).items():
        for max_rank, columns in ((16, 2048), (256, 771)):
            fixed = amount == "fixed"
            if op == experts.COMBINE:
                _, constants = experts._combine_plan(columns, 8, kind, t)
                kernel = experts.experts_combine_kernel
            else:
                plan = experts._shrink_plan if op == experts.SHRINK else experts._expand_plan
                kernel, _, _, constants = plan(512, columns, max_rank, kind, precision, True, fixed, t)
            options = {name: constants[name] for name in ("num_warps", "num_stages")}
            constants = {name: value for name, value in constants.items() if name not in options}
            name = f"experts' {PARTS[op]}, {amount}, rank {max_rank}"
            found[name] = compiled(
                kernel, pointers, constants, target, options["num_warps"], options["num_stages"], columns % 16 == 0
            )
    return found


def given(dtype: str, own: bool, lanes: int, bound: int, tokens: int) -> laid.Given:
    """8 rows of an 8B shape; h in 4 planes of single tokens where it has no column for every rank row."""
    columns, planes = bound if not own else 8 * bound, 1 if own or tokens > 1 else 4
    place = (28928, 28928, 28672, 0, 1) if own else (28672, lanes * bound, 0, 1 << 20, planes)
    kind, exact = {"bf16": torch.bfloat16, "fp32": torch.float32}[dtype], DTYPES[dtype][0]
    return laid.Given(8, tokens, 8, lanes, *place, columns, bound, own, kind, exact, torch.device("cpu"))


def compiled_laid(target: int, dtype: str) -> dict[str, Any]:
    """Of linears that are laid: for few tokens and for more, by what the launchers choose."""
    found = {}
    data = TABLES | dict.fromkeys(("y", "h", "out", "out_1", "out_2", "out_3", "b"), f"*{dtype}")
    data |= {"row_slots": "*i32"}
    for bound, pieces, lanes, own, even in (
        (16, 3, 3, True, True), (16, 3, 1, True, True), (64, 1, 1, True, True), (64, 3, 3, False, True),
        (8, 2, 2, True, False),
    ):  # fmt: skip
        for make in (laid._rows, laid._wide):
            if make is not laid._rows and dtype == "fp32":  # 16 bits only
                continue
            made = make(given(dtype, own, lanes, bound, 1 if make is laid._rows else 1024), 6144, pieces, even)
            pointers = data | ({"slices": "*i64"} if pieces > 1 else {}) | ({} if own else {"h": "*fp32"})
            constants = made.constants | {"PDL": target >= 90} | ({"slices": None} if pieces == 1 else {})
            name = f"{made.kernel.fn.__name__}, {pieces} slices in {lanes} lanes, {constants['BLOCK_R']} ranks"
            found[name] = of_launcher(made, pointers, constants, target, even)
    return found


def compiled_gated(target: int, dtype: str) -> dict[str, Any]:
    """Of gated MLPs, by what the launchers choose."""
    found = {}
    data = TABLES | dict.fromkeys(("y", "h", "out", "b"), f"*{dtype}") | {"row_slots": "*i32"}
    for act, piece, own, lanes in (
        ("silu", 0, True, 2), ("silu", 0, True, 1), ("gelu_tanh", 1, False, 2), ("silu", 0, False, 1)
    ):  # fmt: skip
        for make in (gated._rows, gated._wide, gated._tiles):
            if make is gated._wide and dtype == "fp32":
                continue
            g = given(dtype, own, lanes, 16 if own else 64, 1024 if make is gated._wide else 1)
            made = make(g, 14336, 1 << 20, piece, act)
            pointers = data if own else data | {"h": "*fp32"}
            name = f"{made.kernel.fn.__name__}, {act}, {lanes} lanes, {'[y | h]' if own else 'y, h'}"
            found[name] = of_launcher(made, pointers, made.constants | {"PDL": target >= 90}, target, True)
    return found


def of_launcher(made: Any, pointers: dict[str, str], constants: dict[str, Any], target: int, aligned: bool) -> Any:
    used = {name: kind for name, kind in pointers.items() if name in made.kernel.arg_names}
    warps, stages = (made.options[name] for name in ("num_warps", "num_stages"))
    return compiled(made.kernel, used, constants, target, warps, stages, aligned)


def main(targets: list[int]) -> int:
    worst = 0
    for target, (dtype, (precision, width)) in itertools.product(targets, DTYPES.items()):
        for t in (FIXED, tiles(1 << 16, 8, 128, width), LOW):  # the smallest, the largest, and of low ranks
            common = {"SLOTS": 16, "BLOCK_M": t.block_m, "BLOCK_R": t.block_r}
            common |= {"PRECISION": precision, "STEPS": 1 + (width == 4)}
            data = TABLES | {"x": f"*{dtype}", "a": f"*{dtype}", "h": "*fp32"}
            early = target >= 90
            constants = common | {"BLOCK_K": t.block_k // common["STEPS"], "EVEN_K": False, "SLICES": 1, "PDL": early}
            found = {"shrink": compiled(lora_shrink_kernel, data, constants, target, t.warps, 3)}
            data = TABLES | dict.fromkeys(("y", "b", "out", "out_1", "out_2", "out_3"), f"*{dtype}")
            for own, pieces, lanes, planes in (
                (False, 1, 1, 4), (True, 1, 1, 1), (False, 3, 3, 1), (True, 3, 3, 1), (False, 3, 1, 1), (True, 3, 1, 1)
            ):  # fmt: skip
                constants = common | {
                    "BLOCK_N": t.block_n, "SLICES": pieces, "LANES": lanes, "PLANES": planes, "OWN_COLUMNS": own,
                    "SCALE": pieces > 1, "BIAS": pieces > 1, "PDL": early, "EVEN": True,
                }  # fmt: skip
                pointers = data | {"h": f"*{dtype}" if own else "*fp32"}
                extra = {"slices": "*i64", "scale": f"*{dtype}", "bias": f"*{dtype}"}
                if pieces > 1:
                    pointers |= extra
                else:
                    constants |= dict.fromkeys(extra)
                name = f"expand{', own columns' if own else ''}, {pieces} slices in {lanes} lanes, {planes} planes"
                found[name] = compiled(lora_expand_kernel, pointers, constants, target, t.warps, 1)
            for name, kernel in found.items():
                worst = max(worst, kernel.metadata.shared / SHARED)
                print(f"sm_{target} {dtype} {t.block_m} x {t.block_r} {name}: {kernel.metadata.shared} bytes shared")
        rest = compiled_laid(target, dtype) | compiled_gated(target, dtype)
        for name, kernel in (rest | compiled_experts(target, dtype, precision)).items():
            worst = max(worst, kernel.metadata.shared / SHARED)
            print(f"sm_{target} {dtype} {name}: {kernel.metadata.shared} bytes shared")
    return int(worst > 1)


if __name__ == "__main__":
    sys.exit(main([int(target) for target in sys.argv[1:]]))
