"""A small set of calls of the kernels, each checked: what compute-sanitizer watches, or NaN around all tensors.

python -m tests.benchmarks.speed.kernel_calls --models float32 bfloat16; prints DONE at the end.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from hf_multilora.kernels import ops, triton_laid
from hf_multilora.kernels.backends import TORCH, TRITON, TRITON_FIXED
from tests.kernels import properties, test_gated, test_laid
from tests.kernels.suite import EXPANDS, SHAPES, Case, case, closed, joined, own_columns, poisoned_h

from .. import gpu_gate as gate
from ..gate import GateError
from ..material import prompts
from ..registry import Work
from .settings import arguments
from .workshop import Workshop

DONE = "all calls were right"
GUARD = 4096  # elements of NaN on both sides of a tensor
MORE: dict[str, dict[str, Any]] = {
    "a wide decode": {"slots": 64, "rows": 70, "tokens": 1, "r": 16, "k": 200, "widths": (136,)},
    "a prompt": {"slots": 8, "rows": 3, "tokens": 70, "r": 13, "k": 256, "widths": (256, 64, 64)},
}
LAID: dict[str, dict[str, Any]] = {
    "a decode": {"rows": 9, "tokens": 1, "r": 16},
    "longer rows": {"rows": 3, "tokens": 21, "r": 40},
}
WORKS = (
    Work("decode", 1, 5, 1, 4),
    Work("decode", 4, 5, 4, 4),
    Work("prefill", 4, 37, 3, 4),
    Work("decode", 7, 5, 3, 4),
)


class Guards:
    """Tensors that lie between NaN; `check` says whether it is still there."""

    def __init__(self) -> None:
        self.edges: list[Tensor] = []

    def around(self, tensor: Tensor) -> Tensor:
        """The tensor's data, its strides kept, between two guards."""
        size = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) if tensor.numel() else 0
        whole = torch.full((size + 2 * GUARD,), torch.nan, dtype=tensor.dtype, device=tensor.device)
        self.edges += [whole[:GUARD], whole[GUARD + size :]]
        return whole.as_strided(tensor.shape, tensor.stride(), GUARD).copy_(tensor)

    def case(self, c: Case) -> Case:
        """With all its floating point tensors guarded."""
        floats = {f.name: value for f in fields(c) if isinstance(value := getattr(c, f.name), Tensor)}
        return replace(c, **{name: self.around(t) for name, t in floats.items() if t.is_floating_point()})

    @contextmanager
    def outputs(self) -> Iterator[None]:
        """What torch.empty hands out meanwhile is guarded too."""
        real = torch.empty

        def empty(*args: Any, **kwargs: Any) -> Tensor:
            tensor = real(*args, **kwargs)
            return self.around(tensor) if tensor.is_floating_point() and tensor.is_contiguous() else tensor

        with mock.patch.object(torch, "empty", empty):
            yield

    def check(self, what: str) -> None:
        """Raises GateError where something was written beside a tensor."""
        if not all(bool(edge.isnan().all()) for edge in self.edges):
            raise GateError(f"{what}: nothing must be written beside a tensor")


def check_there(c: Case, name: str, device: str) -> None:
    """A case of the host, of which the device computes the operations and nothing else: a tool watches each launch."""
    away = c.on(device)
    tables, extras = away.tables(), away.extras()
    h = ops.lora_shrink(away.x, away.a, *tables, c.max_rank, backend=name).cpu()
    some = poisoned_h(c, h, c.tables()).to(device)
    out = ops.lora_expand(away.y, some, away.b, *tables, **extras, backend=name).cpu()
    own = own_columns(c)[1].masked_fill(closed(c)[None, :, None], torch.nan).to(device)
    all_columns = ops.lora_expand(away.y, own, away.b, *tables, **extras, own_columns=True, backend=name).cpu()
    properties.check_answers(c, h.sum(0), [joined(c, out), joined(c, all_columns)])


def operations(device: str, backends: Sequence[str], *, guarded: bool) -> int:
    """The operations over the shapes of their tests; how many calls there were."""
    dtypes = (torch.float32,) if device == "cpu" else (torch.bfloat16, torch.float32)
    count = 0
    for shape, told in (SHAPES | MORE).items():
        for dtype in dtypes:
            for name in backends:
                guards, what = Guards(), f"{name}, {shape}, {dtype}"
                try:
                    if guarded:
                        c = guards.case(case(dtype, device=device, **told))
                        with guards.outputs():
                            properties.check_numbers(c, name)
                    else:
                        check_there(case(dtype, **told), name, device)
                except AssertionError as error:
                    at = traceback.extract_tb(error.__traceback__)[-1].line
                    raise GateError(f"{what}: the kernels must give the numbers of the formula: {at}") from error
                guards.check(what)
                count += 1
    return count


def laid(device: str) -> int:
    """The expands of linears in one buffer and of gated MLPs, by each of their kernels; how many calls there were."""
    count, small = 0, torch.float16 if device == "cpu" else torch.bfloat16
    for kernel, constants in EXPANDS.items():
        for dtype in (torch.float32, small) if kernel != "wide" else (small,):
            for shape, told in LAID.items():
                with mock.patch.multiple(triton_laid, **constants):
                    c, both = case(dtype, widths=(144, 32, 16), **told), test_gated.pair(dtype, 80, **told)
                    try:
                        for run in (test_laid.laid, test_laid.after_shrink):
                            test_laid.check(c, lambda c, run=run: [out.cpu() for out in run(c.on(device))])
                        for run in (test_gated.laid, test_gated.after_shrink):
                            test_gated.check(both, run(both.on(device), 0, "silu").cpu(), 0, "silu")
                    except AssertionError as error:
                        raise GateError(f"{kernel}, {shape}, {dtype}: {run.__module__}.{run.__name__}") from error
                count += 4
    return count


def models(shop: Workshop, backend: str, dtype: torch.dtype) -> int:
    """Mixed batches of a tiny model, whose layers launch the kernels as they do in use; the wide ones with 16 bits
    only."""
    shop.clear()
    shop.settings.backend, shop.dtype = backend, dtype
    shop.use("tiny", None)
    adapters = {f"adapter-{i}": shop.make(i, rank) for i, rank in enumerate((5, 16, 1, 64))}

    def ids(work: Work) -> Tensor:
        return prompts(work.rows, work.tokens + (work.phase == "decode"), 64, shop.device)["input_ids"]

    truths = gate.truths(shop.bare, adapters, shop.scaling, WORKS, ids)
    with shop.ours(4, adapters, rank=64) as ours:
        for work in WORKS:
            gate.check(ours, work, ids(work), truths[work], all_checks=work.rows < 5)
    shop.clear()
    return len(WORKS)


@torch.no_grad()
def run(shop: Workshop, kinds: Sequence[torch.dtype], *, guarded: bool) -> int:
    """All calls on the workshop's device, models of these dtypes; raises AssertionError where one is wrong."""
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("highest")
    cuda = shop.device.startswith("cuda")
    count = operations(shop.device, (TRITON, TRITON_FIXED) if cuda else (TORCH,), guarded=guarded)
    count += laid(shop.device) if cuda else 0
    dtype = shop.dtype
    for kind in kinds:
        count += models(shop, TRITON if cuda else TORCH, kind)
    shop.dtype = dtype
    return count


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--models", nargs="*", default=[], choices=("float32", "bfloat16"), help="dtypes")
    given = parser.parse_args(argv)
    settings = arguments(["--device", given.device, "--shape", "tiny", "--dtype", "float32"], None, ["all"])
    kinds = [getattr(torch, name) for name in given.models]
    count = run(Workshop(settings, print), kinds, guarded=False)
    print(f"{count} calls\n{DONE}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
