"""What surrounds an adapted linear: hooks, instance forwards, gradients, normed weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from hf_multilora.layers import AdaptedLayer, unwrap
from hf_multilora.layers.augmented import is_laid
from hf_multilora.layers.rows import home_of
from hf_multilora.pool import BASE
from tests.layers.bed import ROWS, Bed, K, N, check, linear


def instance_forward(module: nn.Module) -> Callable[[], Any]:
    own = module.forward
    module.forward = lambda x: own(x) + 1  # type: ignore[method-assign]
    return lambda: module.__dict__.pop("forward")


def accelerate_hook(module: nn.Module) -> Callable[[], Any]:
    from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module

    class PlusOne(ModelHook):
        def post_forward(self, module: nn.Module, output: Any) -> Any:
            return output + 1

    add_hook_to_module(module, PlusOne())
    return lambda: remove_hook_from_module(module)


def forward_hook(module: nn.Module) -> Callable[[], Any]:
    return module.register_forward_hook(lambda _m, _x, y: y + 1).remove


def global_hook(module: nn.Module) -> Callable[[], Any]:
    return nn.modules.module.register_module_forward_hook(lambda m, _x, y: y + 1 if m is module else None).remove


WAYS = [instance_forward, accelerate_hook, forward_hook, global_hook]


@pytest.mark.parametrize("install", WAYS)
@pytest.mark.parametrize("when", ["before", "after", "after a call"])
@torch.no_grad()
def test_whatever_surrounds_the_forward_runs(install: Callable[[nn.Module], Callable[[], Any]], when: str) -> None:
    module, x = linear(), torch.randn(4, 3, K)
    base = module(x)
    if when == "before":
        remove = install(module)
    bed = Bed(module)
    if when == "after a call":
        bed(x)
    if when != "before":
        remove = install(module)
    check(bed, x, base + 1)
    remove()
    check(bed, x, base)
    assert is_laid(module, bed.slots) or "forward" in module.__dict__  # accelerate leaves one behind


@torch.no_grad()
def test_user_hooks_see_the_base_output() -> None:
    module, x, seen = linear(), torch.randn(4, 3, K), []
    base = module(x)
    bed = Bed(module)
    module.register_forward_hook(lambda _m, _x, y: seen.append(y))
    check(bed, x, base)
    assert torch.equal(seen[0], base)


@pytest.mark.parametrize("tokens", [3, 30])
def test_gradients_of_the_base_weights(tokens: int) -> None:
    module, x = linear(), torch.randn(4, tokens, K, requires_grad=True)
    bed = Bed(module)
    with torch.no_grad():
        bed(x[:, :3])  # laid
    assert is_laid(module, bed.slots)
    towards = torch.randn(4, tokens, N)
    (bed(x) * towards).sum().backward()
    flat, out = x.detach().flatten(0, 1), towards.flatten(0, 1)
    torch.testing.assert_close(module.weight.grad, out.T @ flat, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(module.bias.grad, out.sum(0), rtol=1e-4, atol=1e-4)
    want = torch.stack([
        t @ (bed.weight if s == BASE else bed.weight + bed.factors[s][1].T @ bed.factors[s][0])
        for t, s in zip(towards, ROWS, strict=True)
    ])  # fmt: skip
    torch.testing.assert_close(x.grad, want, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(x.grad.roll(1, 0), want, rtol=0.1, atol=0.1)


def test_a_training_step_is_seen() -> None:
    module, x = linear(), torch.randn(4, 3, K)
    bed = Bed(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with torch.no_grad():
        before = bed(x)
    bed(x).square().mean().backward()
    optimizer.step()
    with torch.no_grad():
        bare = nn.functional.linear(x, module.weight, module.bias)
        assert not torch.equal(module.weight, bed.weight) and not torch.allclose(bed(x), before)
    check(bed, x, bare)


@pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated")
@pytest.mark.parametrize("way", [parametrizations.weight_norm, nn.utils.weight_norm, nn.utils.spectral_norm])
def test_normed_weights_take_the_plain_path(way: Callable[[nn.Module], Any]) -> None:
    module, x = linear(), torch.randn(4, 3, K)
    way(module)
    module.eval()
    base = module(x).detach()
    bed = Bed(module)
    check(bed, x, base)
    assert bed(x).requires_grad and bed.slots.buffer is None
    unwrap(module, bed.slots)
    assert type(module) is bed.bare_class and torch.equal(module(x), base)


def test_a_norm_added_later_must_be_taken_off_before_unwrapping() -> None:
    module, x = linear(), torch.randn(4, 3, K)
    base = module(x).detach()
    bed = Bed(module)
    check(bed, x, base)
    parametrizations.weight_norm(module)
    check(bed, x, base)
    with pytest.raises(RuntimeError, match="bed: its class must be the one it was adapted with, it became P"):
        unwrap(module, bed.slots)
    nn.utils.parametrize.remove_parametrizations(module, "weight")
    check(bed, x, base)
    unwrap(module, bed.slots)
    assert type(module) is nn.Linear and not isinstance(module, AdaptedLayer)


def test_an_offloaded_module_computes_where_its_hooks_say() -> None:
    """accelerate gives the root of what it offloads two hooks in one."""
    from accelerate import cpu_offload

    module = linear()
    assert home_of(module) == torch.device("cpu")
    cpu_offload(module, torch.device("cuda:1"))
    assert module.weight.is_meta and home_of(module) == torch.device("cuda:1")
