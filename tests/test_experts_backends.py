"""Experts with the Triton kernels (in Triton's interpreter on a CPU), deterministic ones, and under torch.compile."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from hf_multilora.kernels.backends import has_triton, interpreted
from tests.experts import single
from tests.experts_adapters import EACH
from tests.experts_family import NAMES, TOLERANCE, Family, Names, adapters_of, error, errors, logits

Singles = Callable[[str], Family]
NOT_HERE = pytest.mark.skipif(
    not (has_triton() and interpreted()), reason="Triton on the CPU needs TRITON_INTERPRET=1 before its import"
)
TRITON: dict[str, dict[str, Any]] = {
    "triton": {"backend": "triton"},
    "triton, deterministic": {"backend": "triton", "deterministic": True},
}
MIXES: list[Names] = [
    NAMES,
    ["attention", "other", None, "whole"],
    ["other", "other", "whole", "other"],
    ["whole"] * 4,
    [None] * 4,
    [None, None, "other", None],
]


@pytest.fixture(scope="module")
def singles(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Singles]:
    """singles("mixtral"): that architecture with one layer."""
    made: dict[str, Family] = {}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)

    def get(name: str) -> Family:
        if name not in made:
            more = {"mixtral": {"single": {"layout": EACH, "r": 4, "seed": 8}}}.get(name, {})
            made[name] = Family(single(name), tmp_path_factory.mktemp(name), adapters_of(name) | more)
        return made[name]

    yield get
    torch.set_num_threads(threads)


# -- Triton --------------------------------------------------------------------------------------------------------
@NOT_HERE
@pytest.mark.parametrize(("name", "how"), [("granitemoe", "triton, deterministic"), ("gpt_oss", "triton")])
def test_kernels(singles: Singles, name: str, how: str) -> None:
    from hf_multilora.kernels.launch import Launcher

    family = singles(name)
    model = family.model(experts="grouped_mm", **TRITON[how])
    short = family.rows[2][None, :2].repeat(4, 1)
    inputs = {"input_ids": short, "attention_mask": torch.ones_like(short)}
    seen: list[str] = []
    call = Launcher.__call__

    def count(launcher: Launcher, *pointers: Any) -> None:
        seen.append(launcher.kernel.fn.__name__)
        call(launcher, *pointers)

    with mock.patch.object(Launcher, "__call__", count):
        got = logits(model, inputs, NAMES)
    assert seen
    want = [family.row(one, 2)[:2] for one in NAMES]
    assert max(errors(got, want)) < TOLERANCE
    assert min(error(one, want[i - 1]) for i, one in enumerate(got)) > 1e-2


@NOT_HERE
@pytest.mark.parametrize("name", ["qwen3_moe", "granitemoe"])
def test_a_tokens_delta_depends_on_nothing_else_when_deterministic(singles: Singles, name: str) -> None:
    """Bitwise, over a base whose experts are zero: in a batch, alone, and in another place and company."""
    family = singles(name)
    model = family.model(experts="grouped_mm", **TRITON["triton, deterministic"])
    module = model.get_submodule(family.mixture.paths(family.base, family.mixture.experts)[0])
    with torch.no_grad():
        module.down_proj.zero_()
        module.gate_up_proj.zero_()
    made = torch.Generator().manual_seed(1)
    x, weights = torch.randn(4, 32, generator=made), torch.rand(4, 2, generator=made)
    index = torch.stack([torch.randperm(5, generator=made)[:2] for _ in range(4)])
    names = ["whole", None, "other", "whole"]

    def run(*rows: int) -> torch.Tensor:
        chosen = list(rows)
        with torch.no_grad(), model.adapters([names[i] for i in chosen]):
            return module(x[chosen], index[chosen], weights[chosen])

    batch = run(0, 1, 2, 3)
    for i, one in enumerate(names):
        assert torch.equal(run(i)[0], batch[i]), "alone"
        assert torch.equal(run((i + 1) % 4, i)[1], batch[i]), "in other company"
        assert bool(batch[i].any()) == (one is not None)


# -- torch.compile ---------------------------------------------------------------------------------------------------
@pytest.fixture
def _fresh() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("_fresh")
@pytest.mark.parametrize(("name", "experts"), [("qwen3_moe", "grouped_mm"), ("gpt_oss", "batched_mm")])
def test_one_trace_serves_every_mix(singles: Singles, name: str, experts: str) -> None:
    family = singles(name)
    model = family.model(experts=experts, max_loras=3)
    counter = CompileCounterWithBackend("eager")
    run = torch.compile(model, fullgraph=True, backend=counter)
    row = family.rows[1][None].repeat(4, 1)
    mask = torch.ones_like(row)
    for names in MIXES:
        with model.adapters(names), torch.no_grad():
            got = run(input_ids=row, attention_mask=mask).logits
        want = [family.row(one, 1) for one in names]
        assert max(errors(list(got), want)) < TOLERANCE
        if len(set(names)) > 1:
            assert max(error(one, want[i - 1]) for i, one in enumerate(got)) > 1e-2
    assert counter.frame_count == 1


@pytest.mark.usefixtures("_fresh")
@pytest.mark.parametrize(("backend", "rank"), [("eager", 5), ("aot_eager", None)])
def test_other_adapters_in_the_slots(singles: Singles, backend: str, rank: int | None) -> None:
    """Of the same projections: no new trace. Of others: right, whether it is traced again or not."""
    family = singles("mixtral")
    model = family.model(experts="grouped_mm", max_loras=2, max_lora_rank=rank)
    counter = CompileCounterWithBackend(backend)
    run = torch.compile(model, fullgraph=True, backend=counter)
    row = family.rows[1][None].repeat(3, 1)

    def check(*names: str | None) -> None:
        with model.adapters(names), torch.no_grad():
            got = run(input_ids=row, attention_mask=torch.ones_like(row)).logits
        assert max(errors(list(got), [family.row(one, 1) for one in names])) < TOLERANCE

    check("other", None, "whole")
    check("single", None, "whole")
    check("whole", "single", None)
    assert counter.frame_count == 1
    if backend == "aot_eager":
        return
    check("attention", "single", None)
    check(None, "whole", "attention")
    check("other", None, "whole")
