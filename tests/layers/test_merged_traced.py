"""Linears of one buffer under torch.compile(fullgraph=True): right, traced once, and nothing kept beside the output."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.layers.trio import ALL_WAYS, NAMES, WIDTHS, Parent, Trio, family, setting, x_of
from tests.tiny import Family, Names

pytest_plugins = ("tests.layers.trio_fixtures",)
ROWS = pytest.mark.parametrize("way", [way for way in ALL_WAYS if way.values[0] in ("dense", "rows")])


class Changed(Parent):
    """Its input changes between the calls, in ways that a trace does not tell from no change."""

    def forward(self, x: Tensor) -> Tensor:
        x = x * 1
        q = self.q_proj(x)
        x.mul_(2)
        k = self.k_proj(x)
        x[0] += 1
        return torch.cat((q, k, self.v_proj(x)), -1)


class Few(Parent):
    """One of its siblings is asked under a condition that a trace decides."""

    def forward(self, x: Tensor) -> Tensor:
        q = self.q_proj(x)
        k = self.k_proj(x)
        v = self.v_proj(x) if self.training else q[..., : WIDTHS[2]]
        return torch.cat((q, k, v), -1)


class Late(Parent):
    """May leave its first sibling to another."""

    def forward(self, x: Tensor) -> Tensor:
        q = self.q_proj(x) if self.training else x[..., :1].expand(*x.shape[:-1], WIDTHS[0])
        k = self.k_proj(x)
        v = self.v_proj(x)
        return torch.cat((q, k, v), -1)


class First(Parent):
    """May ask a sibling before the others, or not."""

    def forward(self, x: Tensor) -> Tensor:
        v = self.v_proj(x) if self.training else x[..., : WIDTHS[2]]
        q = self.q_proj(x)
        return torch.cat((q, self.k_proj(x), v), -1)


class Twice(Parent):
    """Asks one of its siblings again, after a change."""

    def forward(self, x: Tensor) -> Tensor:
        v = self.v_proj(x)
        q = self.q_proj(x)
        k = self.k_proj(x)
        x = x.mul_(2)
        k = k + self.k_proj(x)
        x = x.mul_(0.5)
        q = q + self.q_proj(x)
        return torch.cat((q - self.q_proj(x), k, v), -1)


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Traced:
    """A compiled parent; outputs: how many each graph gave."""

    def __init__(self, trio: Trio) -> None:
        self.trio, self.outputs = trio, list[int]()
        self.run = torch.compile(trio.model.first, fullgraph=True, backend=self._keep)

    def _keep(self, graph: Any, _: Any) -> Any:
        (outputs,) = next(node for node in graph.graph.nodes if node.op == "output").args
        self.outputs.append(len(outputs))
        return graph

    @torch.no_grad()
    def check(self, x: Tensor, names: Names = NAMES) -> None:
        with self.trio.open(names):
            out = self.run(x)
        for child, own in zip("qkv", out.split(WIDTHS, -1), strict=True):
            self.trio.check(own, child, x, names)
        assert self.trio.routing.shared is None


@ROWS
@pytest.mark.parametrize("tokens", [1, 6, 12])  # 12, with kernels: each linear alone
def test_one_trace_and_one_output_for_every_mix(
    own: Family, monkeypatch: pytest.MonkeyPatch, tokens: int, way: str
) -> None:
    if (tokens, way) == (12, "rows"):
        setting(monkeypatch, "grouped")
        tokens = 1
    trio, x = Trio(own, way, max_loras=4), x_of(tokens=tokens)
    trio.lay(["a", "b", "k", "wide"])  # pools have their size
    traced = Traced(trio)
    uniform: list[Names] = [[None] * 4, ["a"] * 4]
    for names in (NAMES, ["wide", "a", None, "b"], ["b", None, "b", None], *uniform, ["k", None, "a", "k"]):
        traced.check(x, names)
    assert traced.outputs == [1], "one trace, and nothing but the output is kept"
    trio.call(x)
    assert trio.together() == ["qkv"]


@ROWS
def test_a_sibling_without_rank_rows(own: Family, way: str) -> None:
    trio, x = Trio(own, way, "b", max_loras=2), x_of(tokens=1)
    traced = Traced(trio)
    for names in (["b", None, None, "b"], ["b"] * 4, [None] * 4, [None, "b", "b", "b"]):
        traced.check(x, names)
    assert traced.outputs == [1] and trio.together() == ["qv"]


@ROWS
@torch.no_grad()
def test_an_input_that_changes_between_the_calls(tmp_path: Path, way: str) -> None:
    trio, x = Trio(family(tmp_path, parent=Changed), way, max_loras=4), x_of(tokens=1)
    traced = Traced(trio)
    with trio.open():
        outs = [traced.run(x), trio.model.first(x)]
    with torch.inference_mode(), trio.open():
        outs.append(trio.model.first(x.clone()))
    twice = 2 * x
    last = twice.clone()
    last[0] += 1
    for out in outs:
        for child, own, given in zip("qkv", out.split(WIDTHS, -1), (x, twice, last), strict=True):
            trio.check(own, child, given)


@ROWS
def test_a_sibling_that_is_not_asked(tmp_path: Path, way: str) -> None:
    """Right, though its output is computed, and may be an output of the graph."""
    trio, x = Trio(family(tmp_path, parent=Few), way, max_loras=4), x_of(tokens=1)
    traced = Traced(trio)
    for names in (NAMES, NAMES[::-1]):
        with torch.no_grad(), trio.open(names):
            q, k, _ = traced.run(x).split(WIDTHS, -1)
        trio.check(q, "q", x, names)
        trio.check(k, "k", x, names)
        assert trio.routing.shared is None, "with the request it is gone"
    assert len(traced.outputs) <= 2


@ROWS
@torch.no_grad()
def test_hooks_and_weights_that_come_after_a_trace(own: Family, way: str) -> None:
    trio, x, fired = Trio(own, way, max_loras=4), x_of(tokens=1), list[int]()
    traced = Traced(trio)
    traced.check(x)
    trio.module("k").weight.mul_(-2)
    traced.check(x)
    trio.module("v").weight.data = torch.randn_like(trio.module("v").weight)
    traced.check(x)
    assert traced.outputs == [1] * len(traced.outputs) and len(traced.outputs) <= 2
    handle = trio.module("k").register_forward_hook(lambda *_: fired.append(1) or None)
    run = torch.compile(trio.model.first, backend="eager")  # a hook of any kind may break a graph
    with trio.open():
        for child, own_part in zip("qkv", run(x).split(WIDTHS, -1), strict=True):
            trio.check(own_part, child, x)
    assert fired
    handle.remove()
    traced.check(x)


@ROWS
@torch.no_grad()
def test_a_hook_that_comes_while_a_request_is_open(own: Family, way: str) -> None:
    """It may change the input of the siblings after it, which what was computed for them has not seen."""
    trio, x = Trio(own, way, max_loras=4), x_of(tokens=1)
    twice = 2 * x
    with trio.open():
        handle = trio.module("k").register_forward_pre_hook(lambda _, args: (args[0].mul_(2),))
        parts = torch.compile(trio.model.first, backend="eager")(x).split(WIDTHS, -1)
        handle.remove()
    for child, part, given in zip("qkv", parts, (twice / 2, twice, twice), strict=True):
        trio.check(part, child, given)


@ROWS
@pytest.mark.parametrize("what", ["weight", "bias"])
@torch.no_grad()
def test_what_is_assigned_while_a_request_is_open(own: Family, way: str, what: str) -> None:
    """Before the first trace, and after it."""
    for traced_before in (False, True):
        trio, x = Trio(own, way, max_loras=4), x_of(tokens=1)
        run = torch.compile(trio.model.first, backend="eager")
        with trio.open():
            if traced_before:
                run(x)
            old = trio.module("k").weight
            if what == "weight":
                trio.module("k").weight = nn.Parameter(-3 * old, requires_grad=False)
            else:
                trio.module("k").bias = nn.Parameter(torch.ones(len(old)), requires_grad=False)
            parts = run(x).split(WIDTHS, -1)
        for child, part in zip("qkv", parts, strict=True):
            trio.check(part, child, x)


@ROWS
def test_a_gradient_of_one_sibling(own: Family, way: str) -> None:
    """It is computed alone, with its own weight."""
    trio, x = Trio(own, way, max_loras=4), x_of(tokens=1)
    with trio.open():
        trio.module("k").weight.requires_grad_()
        out = torch.compile(trio.model.first, backend="aot_eager")(x)
        (got,) = torch.autograd.grad(out.sum(), trio.module("k").weight)
    for child, part in zip("qkv", out.detach().split(WIDTHS, -1), strict=True):
        trio.check(part, child, x)
    torch.testing.assert_close(got, x.sum((0, 1)).expand_as(got))


@ROWS
@torch.no_grad()
def test_what_traced_code_shares_is_not_for_other_code(tmp_path: Path, way: str) -> None:
    """A trace has seen no version of its input, and cannot see that of another's."""
    trio, x = Trio(family(tmp_path, parent=Late), way, max_loras=4), x_of(tokens=1)
    run = torch.compile(lambda x: trio.model.first.q_proj(x), fullgraph=True, backend="eager")
    with trio.open():
        trio.check(run(x), "q", x)
        x.mul_(3)
        for child, own in zip("qkv", trio.model.first(x).split(WIDTHS, -1), strict=True):
            if child != "q":
                trio.check(own, child, x)
        trio.ask(x, "q")
        x.mul_(3)
        trio.check(torch.compile(lambda x: trio.model.first.k_proj(x), fullgraph=True, backend="eager")(x), "k", x)


@ROWS
@pytest.mark.parametrize("inference", [True, False], ids=["inference", "traced"])
@torch.no_grad()
def test_what_a_call_leaves_is_not_for_the_next(tmp_path: Path, way: str, inference: bool) -> None:
    """Its input may be the same tensor, changed since, of which neither can know."""
    trio = Trio(family(tmp_path, parent=First), way, max_loras=4)
    first = trio.model.first
    run = first if inference else torch.compile(first, fullgraph=True, backend="eager")
    with torch.inference_mode(inference), trio.open():
        x = x_of(tokens=1).clone()
        for training in (False, True, False, True):
            first.training = training
            for child, own in zip("qkv", run(x).split(WIDTHS, -1), strict=True):
                if training or child != "v":
                    trio.check(own, child, x)
            x.mul_(2)


@ROWS
@pytest.mark.parametrize("inference", [True, False], ids=["inference", "traced"])
@torch.no_grad()
def test_a_sibling_that_is_asked_again_after_a_change(tmp_path: Path, way: str, inference: bool) -> None:
    trio = Trio(family(tmp_path, parent=Twice), way, max_loras=4)
    run = trio.model.first if inference else torch.compile(trio.model.first, fullgraph=True, backend="eager")
    with torch.inference_mode(inference), trio.open():
        x = x_of(tokens=1).clone()
        q, k, v = run(x.clone()).split(WIDTHS, -1)
        trio.check(v, "v", x)
        trio.check(q, "q", x)
        twice = trio.want("k", 2 * x) + trio.want("k", x)
        torch.testing.assert_close(k.double(), twice, rtol=1e-4, atol=1e-5)
