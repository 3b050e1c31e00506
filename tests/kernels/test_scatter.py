"""Factors from a flat buffer to their places, bit by bit as plain copies do it; the kernel in Triton's interpreter.

Used by tests/gpu/test_loads.py as well, on a CUDA device.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_multilora.kernels.backends import has_triton, interpreted
from tests.tree import ROOT

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.skipif(
    not (has_triton() and (DEVICE == "cuda" or interpreted())),
    reason="Triton on the CPU needs TRITON_INTERPRET=1 before its import",
)
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int8]
ALIGN = 256


def random_bits(*shape: int, dtype: torch.dtype) -> Tensor:
    """Any bits: also those of NaN, -0.0 and subnormal numbers."""
    raw = torch.randint(-128, 128, (*shape, dtype.itemsize), dtype=torch.int8)
    return raw.view(dtype).squeeze(-1).to(DEVICE)


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def flat_of(factors: list[Tensor]) -> tuple[Tensor, list[int]]:
    """The factors in a flat buffer as adapters have it, with other bytes between them; where each begins."""
    begins = list(itertools.accumulate((-(-f.nbytes // ALIGN) * ALIGN for f in factors), initial=0))
    flat = random_bits(begins.pop() + 8, dtype=torch.int8).view(torch.uint8)
    for begin, factor in zip(begins, factors, strict=True):
        flat[begin : begin + factor.nbytes] = bits(factor).flatten()
    return flat, begins


class Pools:
    """Targets inside larger pools, of which nothing else may change."""

    def __init__(self) -> None:
        self.pools: list[Tensor] = []
        self.targets: list[Tensor] = []

    def add(self, r: int, n: int, dtype: torch.dtype, members: int = 1, member: int = 0, start: int = 3) -> None:
        """Rank rows start:start + r of one of `members` modules, whose rows lie in turns."""
        pool = random_bits((start + r + 2) * members, n, dtype=dtype)
        self.pools.append(pool)
        self.targets.append(pool[member::members][start : start + r])

    def expect(self, factors: list[Tensor]) -> list[Tensor]:
        """The pools with these factors at the targets, by plain copies."""
        want = [pool.clone() for pool in self.pools]
        for copy, pool, target, factor in zip(want, self.pools, self.targets, factors, strict=True):
            at = target.storage_offset() - pool.storage_offset()
            copy.as_strided(target.shape, target.stride(), at).copy_(factor)
        return want

    def are(self, want: list[Tensor]) -> bool:
        return all(torch.equal(bits(pool), bits(copy)) for pool, copy in zip(self.pools, want, strict=True))


def moved(pools: Pools, factors: list[Tensor], flat: Tensor, begins: list[int], scatter: Any = None) -> Any:
    from hf_multilora.kernels.triton_scatter import Scatter

    shapes = [(factor.shape[0], factor.shape[1]) for factor in factors]
    scatter = scatter or Scatter(begins, shapes, [factor.dtype for factor in factors])
    assert scatter(flat, pools.targets) is True
    return scatter


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("r", "n", "members"),
    [(1, 1, 1), (5, 17, 1), (5, 17, 3), (16, 64, 2), (1, 64, 2), (3, 5000, 2), (7, 4097, 1), (3, 0, 1), (4, 8, 4)],
)
def test_one_factor_of_any_kind(dtype: torch.dtype, r: int, n: int, members: int) -> None:
    pools, factor = Pools(), random_bits(r, n, dtype=dtype)
    pools.add(r, n, dtype, members, members - 1)
    want = pools.expect([factor])
    assert pools.are(want) == (n == 0), "before, the pool holds something else"
    moved(pools, [factor], *flat_of([factor]))
    assert pools.are(want)


def mixed(kinds: list[tuple[int, int, torch.dtype, int, int]]) -> tuple[Pools, list[Tensor]]:
    pools, factors = Pools(), []
    for r, n, dtype, members, member in kinds:
        pools.add(r, n, dtype, members, member)
        factors.append(random_bits(r, n, dtype=dtype))
    return pools, factors


BF16 = torch.bfloat16
ADAPTER = [
    (5, 96, BF16, 3, 0), (5, 96, BF16, 1, 0), (5, 96, BF16, 3, 2), (2, 33, torch.int64, 1, 0), (7, 17, BF16, 2, 1),
    (1, 9000, BF16, 2, 1), (3, 1, BF16, 1, 0), (0, 4, torch.float32, 1, 0),
]  # fmt: skip


@pytest.mark.parametrize("some", [ADAPTER, ADAPTER[:3], ADAPTER[3:4], [ADAPTER[4]], []])
def test_all_factors_of_an_adapter_at_once(some: list[Any]) -> None:
    """Also loads after it, with what was kept, and into other pools of that kind."""
    pools, factors = mixed(some)
    want = pools.expect(factors)
    scatter = moved(pools, factors, *flat_of(factors))
    assert pools.are(want)
    for again in (pools, mixed(some)[0]):
        factors = [random_bits(*factor.shape, dtype=factor.dtype) for factor in factors]
        want = again.expect(factors)
        moved(again, factors, *flat_of(factors), scatter)
        assert again.are(want)


def test_pools_whose_strides_changed_are_looked_at_anew() -> None:
    factor = random_bits(4, 48, dtype=torch.float32)
    scatter = None
    for members in (1, 3, 2, 1):
        pools = Pools()
        pools.add(4, 48, torch.float32, members)
        want = pools.expect([factor])
        scatter = moved(pools, [factor], *flat_of([factor]), scatter)
        assert pools.are(want)


def test_factors_in_each_other_s_place_are_seen() -> None:
    """The control: the check above tells one factor from another."""
    pools, factors = mixed([ADAPTER[0], ADAPTER[0]])
    want = pools.expect(factors)
    flat, begins = flat_of(factors)
    moved(pools, factors, flat, begins[::-1])
    assert not pools.are(want)
    moved(pools, factors, flat, begins)
    assert pools.are(want)


def test_a_source_at_an_odd_address() -> None:
    """As a part of a buffer: the width of an access follows."""
    pools, factors = mixed(ADAPTER[:3])
    flat, begins = flat_of(factors)
    for shift in (1, 2, 4, 8):
        shifted = torch.cat([flat[:shift], flat])[shift:]
        assert shifted.data_ptr() % (2 * shift) == shift
        factors = [random_bits(*factor.shape, dtype=factor.dtype) for factor in factors]
        for begin, factor in zip(begins, factors, strict=True):
            shifted[begin : begin + factor.nbytes] = bits(factor).flatten()
        want = pools.expect(factors)
        moved(pools, factors, shifted, begins)
        assert pools.are(want)


def test_the_widest_access_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    from hf_multilora.kernels import launch as module

    seen: list[dict[str, Any]] = []
    monkeypatch.setattr(module, "launch", lambda kernel, grid, arguments, constants: seen.append(constants))
    kinds = [((2, 8), torch.bfloat16), ((3, 4), torch.bfloat16), ((2, 2), torch.bfloat16), ((2, 1), torch.bfloat16)]
    for (r, n), dtype in (*kinds, ((5, 1), torch.int64), ((5, 3), torch.int8), ((5, 32), torch.int8)):
        pools = Pools()
        pools.add(r, n, dtype, members=2, start=2)
        factor = random_bits(r, n, dtype=dtype)
        moved(pools, [factor], *flat_of([factor]))
    assert [each["WIDTH"] for each in seen] == [16, 8, 4, 2, 8, 1, 16]


@pytest.mark.parametrize("some", [ADAPTER, ADAPTER[4:5], []])
def test_zeros(some: list[Any]) -> None:
    from hf_multilora.kernels.triton_scatter import Wipe

    wipe = Wipe()
    for kinds in (some, some, ADAPTER[:2], some):  # the second time, and the last, with what was kept
        pools, factors = mixed(kinds)
        want = pools.expect([torch.zeros_like(factor) for factor in factors])
        assert pools.are(want) == (not kinds)
        assert wipe(pools.targets) is True
        assert pools.are(want)


def test_what_the_kernel_does_not_do() -> None:
    """Nothing is written where columns lie apart, rows overlap or a dtype differs; other shapes are an error."""
    from hf_multilora.kernels.triton_scatter import Scatter, Wipe

    flat, begins = flat_of([torch.zeros(4, 6, device=DEVICE)])
    scatter = Scatter(begins, [(4, 6)], [torch.float32])
    pool = random_bits(8, 12, dtype=torch.float32)
    before = pool.clone()
    for target in (pool[:4, ::2], pool[0].as_strided((4, 6), (3, 1))):
        assert scatter(flat, [target]) is False and Wipe()([target]) is False
    assert scatter(flat, [pool.bfloat16()[:4, :6]]) is False
    with pytest.raises(ValueError, match=r"targets must have the shapes of the factors, got .*4, 5"):
        scatter(flat, [pool[:4, :5]])
    with pytest.raises(ValueError, match=r"which end at byte 96, it has 95"):
        scatter(flat[:95], [pool[:4, :6]])
    assert torch.equal(bits(pool), bits(before))
    assert scatter(flat, [pool[:4, :6]]) is True and not pool[:4, :6].any()


COMPILED = """
from tests.kernels.compile_all import compiled
from hf_multilora.kernels.scatter import scatter_kernel
from hf_multilora.kernels.triton_scatter import BLOCK
for target in (80, 90):
    for width in (1, 2, 4, 8, 16):
        for zero in (False, True):
            constants = {"WIDTH": width, "BLOCK": BLOCK, "ZERO": zero}
            ptx = compiled(scatter_kernel, {"source": "*u8", "table": "*i64"}, constants, target, 4, 1).asm["ptx"]
            print(width, "st.global.v2.b64" in ptx, zero, "ld.global.v2.b64" in ptx)
"""


def test_it_compiles_to_accesses_of_16_bytes() -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", COMPILED], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [line.split() for line in done.stdout.splitlines()]
    assert len(rows) == 20 and all((width == "16") == (wide == "True") for width, wide, *_ in rows)
    assert all(loads == str(width == "16" and zero == "False") for width, _, zero, loads in rows)
