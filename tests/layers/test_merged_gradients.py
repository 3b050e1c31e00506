"""Gradients through linears of one buffer: of the input, of weights and biases, with checkpoints and hooks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.layers.trio import ALL_WAYS, NAMES, WIDTHS, K, Trio, setting, table, x_of
from tests.tiny import Family, Names, error

pytest_plugins = ("tests.layers.trio_fixtures",)
GRADIENTS = pytest.mark.parametrize(
    "way", [w for w in ALL_WAYS if w.values[0] in ("dense", "alone", "rows", "grouped")]
)
TOWARDS = [torch.randn(4, 1, n, generator=torch.Generator().manual_seed(n)) for n in WIDTHS]


def made(own: Family, monkeypatch: pytest.MonkeyPatch, way: str) -> Trio:
    trio = Trio(own, setting(monkeypatch, way), max_loras=4)
    trio.lay()
    return trio


def loss(outs: dict[str, Tensor]) -> Tensor:
    return sum((out * towards).sum() for out, towards in zip((outs[c] for c in "qkv"), TOWARDS, strict=True))


def weight_of(trio: Trio, child: str, name: str | None) -> Tensor:
    """float64, with the adapter's part."""
    weight, key = trio.module(child).weight.detach().double(), f"base_model.model.first.{child}_proj.lora_"
    if name is None or f"{key}A.weight" not in trio.factors[name]:
        return weight
    a, b = (trio.factors[name][f"{key}{half}.weight"].double() for half in "AB")
    return weight + 2 * b @ a


def of_input(trio: Trio, names: Names = NAMES) -> Tensor:
    """The gradient that x must get."""
    grad = torch.zeros(4, 1, K, dtype=torch.float64)
    for child, towards in zip("qkv", TOWARDS, strict=True):
        for row, name in enumerate(names):
            grad[row] += towards[row].double() @ weight_of(trio, child, name)
    return grad


def check_gradient(trio: Trio, got: Tensor | None, names: Names = NAMES) -> None:
    want, turned = of_input(trio, names), of_input(trio, [*names[1:], *names[:1]])
    assert got is not None and error(got, want) < 1e-5
    assert len(set(names)) == 1 or error(got, turned) > 1e-3


# -- of the input -----------------------------------------------------------------------------------
@GRADIENTS
@pytest.mark.parametrize("names", [NAMES, ["a"] * 4, ["b", None, None, "b"]], ids=["mixed", "uniform", "two of three"])
def test_of_the_input(own: Family, monkeypatch: pytest.MonkeyPatch, names: Names, way: str) -> None:
    trio, x = made(own, monkeypatch, way), x_of(tokens=1).requires_grad_()
    with trio.counted() as runs, trio.open(names):
        loss(trio.ask(x, names=names)).backward()
    check_gradient(trio, x.grad, names)
    assert len(runs) == int(way in ("dense", "rows") and len(set(names)) > 1)
    assert trio.routing.shared is None


@GRADIENTS
def test_of_an_input_that_a_norm_gives(own: Family, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """Outputs may be changed in place, as rotary embeddings and activations do; the next layer's norm keeps some."""
    trio, x, got = made(own, monkeypatch, way), x_of(tokens=1), list[Tensor]()
    for plain in (False, True):
        norm, after = nn.LayerNorm(K), nn.LayerNorm(WIDTHS[1])
        with trio.open():
            given = norm(x)
            outs = {child: trio.module(child)(given) for child in "qkv"}
            if plain:
                outs = {child: out.clone() for child, out in outs.items()}
            outs["q"].mul_(2).add_(1)
            outs["v"][:, :, 0] = 0
            kept = after(outs["k"])
            outs["q"].tanh_()
            (loss({"q": outs["q"], "k": kept, "v": outs["v"]})).backward()
        grads = [norm.weight.grad, norm.bias.grad, after.weight.grad]
        got.append(torch.cat([g for g in grads if g is not None]))
    assert len(got[0]) == 2 * K + WIDTHS[1]
    torch.testing.assert_close(got[0], got[1], rtol=1e-5, atol=1e-6)
    with torch.no_grad(), trio.open([*NAMES[1:], *NAMES[:1]]):
        assert not torch.allclose(trio.module("q")(norm(x)).tanh(), outs["q"], rtol=0.1, atol=0.1)


@GRADIENTS
def test_no_gradient_where_none_is_wanted(own: Family, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """Outputs without gradient, with gradients enabled, may be changed in place and be kept for others' gradients."""
    trio, x, norm = made(own, monkeypatch, way), x_of(tokens=1), nn.LayerNorm(WIDTHS[1])
    with trio.counted() as runs, trio.open():
        outs = trio.ask(x)
        assert not any(out.requires_grad for out in outs.values())
        kept = norm(outs["k"])
        outs["q"].mul_(3), outs["v"].add_(1)
        kept.square().sum().backward()
    assert norm.weight.grad is not None and norm.weight.grad.any()
    assert len(runs) == (way != "alone")


@GRADIENTS
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints(own: Family, monkeypatch: pytest.MonkeyPatch, reentrant: bool, way: str) -> None:
    """The forward runs again inside the backward, without gradients before (reentrant) or with."""
    trio, x = made(own, monkeypatch, way), x_of(tokens=1).requires_grad_()
    with trio.open():
        out = checkpoint(trio.model.first, x, use_reentrant=reentrant)
        (out * torch.cat(TOWARDS, -1)).sum().backward()
    check_gradient(trio, x.grad)


@table(("no grad, then grad", "grad, then no grad", "nested"), ("no grad, then grad",))
def test_gradients_switched_between_calls(own: Family, monkeypatch: pytest.MonkeyPatch, name: str, way: str) -> None:
    trio, x = made(own, monkeypatch, way), x_of(tokens=1).requires_grad_()
    with trio.open():
        if name == "grad, then no grad":
            first = trio.ask(x, "q")
            with torch.no_grad():
                second = trio.ask(x, "kv")
            assert first["q"].requires_grad and not second["k"].requires_grad
            return
        with torch.inference_mode() if name == "nested" else torch.no_grad():
            first = trio.ask(x, "q")
        second = trio.ask(x, "kv")
        assert not first["q"].requires_grad and second["k"].requires_grad and second["v"].requires_grad
        loss(second | {"q": trio.module("q")(x)}).backward()
    check_gradient(trio, x.grad)


# -- of weights and biases --------------------------------------------------------------------------
TRAINED = {"a weight": ["k_proj.weight"], "a bias": ["v_proj.bias"], "both": ["q_proj.weight", "q_proj.bias"]}


@table(TRAINED, ("a weight", "a bias"))
def test_of_what_is_trained(own: Family, monkeypatch: pytest.MonkeyPatch, name: str, way: str) -> None:
    trio, x = made(own, monkeypatch, way), x_of(tokens=1)
    parameters = [trio.model.first.get_parameter(path) for path in TRAINED[name]]
    for parameter in parameters:
        parameter.requires_grad_()
    with trio.open():
        outs = trio.ask(x)
        loss(outs).backward()
    for path, parameter in zip(TRAINED[name], parameters, strict=True):
        towards = TOWARDS["qkv".index(path[0])].flatten(0, 1)
        want = towards.sum(0) if path.endswith("bias") else towards.T @ x.flatten(0, 1)
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, want, rtol=1e-4, atol=1e-5)
    with torch.no_grad(), trio.counted() as runs:
        trio.call(x)
        assert len(runs) == 1, "without gradients the buffer serves"
    optimizer = torch.optim.SGD(parameters, lr=0.5)
    before = {child: trio.want(child, x) for child in "qkv"}
    optimizer.step()
    with torch.no_grad():
        after = trio.call(x)
    moved = {path[0] for path in TRAINED[name]}
    assert {child for child in "qkv" if error(after[child], before[child]) > 1e-3} == moved
    for parameter in parameters:
        parameter.requires_grad_(False)
    with trio.counted() as runs:
        trio.call(x)
    assert len(runs) == 1 and trio.together() == ["qkv"]


# -- hooks ------------------------------------------------------------------------------------------
@table(("register_full_backward_hook", "register_full_backward_pre_hook"), ())
@pytest.mark.parametrize("when", ["before", "between"])
def test_backward_hooks_fire(own: Family, monkeypatch: pytest.MonkeyPatch, name: str, when: str, way: str) -> None:
    trio, x, fired = made(own, monkeypatch, way), x_of(tokens=1).requires_grad_(), list[Any]()

    def add() -> Any:
        return getattr(trio.module("k"), name)(lambda *_: fired.append(1))

    handle = add() if when == "before" else None
    with trio.open():
        outs = trio.ask(x, "q")
        handle = add() if handle is None else handle
        outs |= trio.ask(x, "kv")
        loss(outs).backward()
    assert fired
    check_gradient(trio, x.grad)
    handle.remove(), fired.clear()
    x.grad = None
    loss(trio.call(x)).backward()
    assert not fired and trio.together() == ["qkv"]
    check_gradient(trio, x.grad)
