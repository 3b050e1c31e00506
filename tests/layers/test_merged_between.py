"""Between the calls of two linears that are computed together anything may happen: the second sees it.

What sets `x.data` in place is not seen: torch counts no version for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from torch import Tensor, nn
from torch.nn.modules import module as nn_module

from tests.layers.trio import K, Trio, table, x_of

pytest_plugins = ("tests.layers.trio_fixtures",)


@dataclass(frozen=True)
class Between:
    """act: with the input, gives that of the calls that follow, and how to undo it. runs: how often linears are
    computed together, all in all. fires: it must be seen in k's call."""

    act: Callable[[Trio, Tensor, list[int]], tuple[Tensor, Callable[[], Any] | None]]
    runs: int
    fires: bool = False


def hook(register: str) -> Any:
    def act(trio: Trio, x: Tensor, fired: list[int]) -> Any:
        return x, getattr(trio.module("k"), register)(lambda *_: fired.append(1)).remove

    return act


def global_hook(register: Any) -> Any:
    def act(trio: Trio, x: Tensor, fired: list[int]) -> Any:
        return x, register(lambda module, *_: fired.append(1) if module is trio.module("k") else None).remove

    return act


def instance_forward(trio: Trio, x: Tensor, fired: list[int]) -> Any:
    module = trio.module("k")
    plain = module.forward
    module.forward = lambda x: (fired.append(1), plain(x))[1]
    return x, lambda: module.__dict__.pop("forward")


def accelerate_hook(trio: Trio, x: Tensor, fired: list[int]) -> Any:
    class Seen(ModelHook):
        def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            fired.append(1)
            return args, kwargs

    add_hook_to_module(trio.module("k"), Seen())
    return x, lambda: remove_hook_from_module(trio.module("k")).__dict__.pop("forward")


def new_parameter(trio: Trio, x: Tensor, fired: list[int]) -> Any:
    trio.module("k").weight = nn.Parameter(torch.randn(9, K), requires_grad=False)
    return x, None


def new_data(trio: Trio, x: Tensor, fired: list[int]) -> Any:
    trio.module("k").weight.data = torch.randn(9, K)
    return x, None


def to_bias(change: Callable[[nn.Linear], Any]) -> Any:
    return lambda trio, x, fired: (change(trio.module("k")), (x, None))[1]


def changed(change: Callable[[Tensor], Any]) -> Any:
    return lambda trio, x, fired: (change(x), (x, None))[1]


def other(made: Callable[[Tensor], Tensor]) -> Any:
    return lambda trio, x, fired: (made(x), None)


def loaded(assign: bool) -> Any:
    def act(trio: Trio, x: Tensor, fired: list[int]) -> Any:
        state = {key: torch.randn_like(value) for key, value in trio.module("k").state_dict().items()}
        trio.module("k").load_state_dict(state, assign=assign)
        return x, None

    return act


BETWEEN: Mapping[str, Between] = {
    "nothing": Between(other(lambda x: x), 1),
    "forward hook": Between(hook("register_forward_hook"), 1, fires=True),
    "forward pre-hook": Between(hook("register_forward_pre_hook"), 1, fires=True),
    "backward hook": Between(hook("register_full_backward_hook"), 1),
    "backward pre-hook": Between(hook("register_full_backward_pre_hook"), 1),
    "global hook": Between(global_hook(nn_module.register_module_forward_hook), 1, fires=True),
    "global pre-hook": Between(global_hook(nn_module.register_module_forward_pre_hook), 1, fires=True),
    "instance forward": Between(instance_forward, 1, fires=True),
    "accelerate hook": Between(accelerate_hook, 1, fires=True),
    "new weight": Between(new_parameter, 1),
    "new data": Between(new_data, 1),
    "weight changed": Between(to_bias(lambda k: k.weight.mul_(-2)), 2),
    "bias changed": Between(to_bias(lambda k: k.bias.mul_(-2)), 2),
    "new bias": Between(to_bias(lambda k: setattr(k, "bias", nn.Parameter(torch.ones(9)))), 1),
    "no bias": Between(to_bias(lambda k: setattr(k, "bias", None)), 1),
    "loaded": Between(loaded(False), 2),
    "assigned": Between(loaded(True), 1),
    "input changed": Between(changed(lambda x: x.mul_(3)), 2),
    "item set": Between(changed(lambda x: x.__setitem__((0, 0, 0), 9.0)), 2),
    "changed through a view": Between(changed(lambda x: x[1].view(-1).add_(2)), 2),
    "changed in inference mode": Between(changed(lambda x: torch.inference_mode()(x.mul_)(3)), 2),
    "equal values": Between(other(lambda x: x.clone()), 2),
    "a view": Between(other(lambda x: x.view(x.shape)), 2),
    "detached": Between(other(lambda x: x.detach()), 2),
    "another": Between(other(lambda x: x + 1), 2),
}


@table(
    BETWEEN,
    ("forward hook", "instance forward", "new weight", "weight changed", "bias changed", "input changed", "a view"),
)
@torch.no_grad()
def test_what_happens_between_two_calls(trio: Trio, name: str) -> None:
    between, fired, x = BETWEEN[name], list[int](), x_of(tokens=1)
    with trio.counted() as runs:
        with trio.open():
            trio.ask(x, "q")
            x, undo = between.act(trio, x, fired)
            trio.ask(x, "kv")
        assert len(runs) == between.runs and bool(fired) == between.fires
        if undo is not None:
            undo()
        fired.clear(), runs.clear()
        trio.call(x)
        assert trio.together() == ["qkv"] and len(runs) == 1 and not fired


@table([name for name, between in BETWEEN.items() if "hook" in name or between.fires], ("forward hook",))
@torch.no_grad()
def test_hooks_that_were_there_before_the_request(trio: Trio, name: str) -> None:
    between, fired, x = BETWEEN[name], list[int](), x_of(tokens=1)
    _, undo = between.act(trio, x, fired)
    assert undo is not None
    trio.call(x)
    assert bool(fired) == between.fires
    with trio.open(), trio.counted() as runs:
        assert trio.together() == (["qkv"] if "global" in name else ["qv"])
        trio.ask(x, "q")
        undo(), fired.clear()
        trio.ask(x, "kv")
    assert len(runs) == 1 and not fired, "gone is gone"
    trio.call(x)
    assert trio.together() == ["qkv"]
