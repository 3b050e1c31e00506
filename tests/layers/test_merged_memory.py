"""The memory of linears in one buffer: what laying takes, what is left behind, interrupts half way, unpatch."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from hf_multilora import residency
from hf_multilora.layers import augmented
from tests.layers.test_merged_life import storages
from tests.layers.trio import WIDTHS, K, Trio, x_of
from tests.tiny import Family, snapshot

pytest_plugins = ("tests.layers.trio_fixtures",)
pytestmark = pytest.mark.parametrize("way", ["dense"])


def behind(tensor: Tensor) -> Tensor:
    """All numbers of the storage that a tensor lies in."""
    return torch.empty(0).set_(tensor.untyped_storage())


def factors(trio: Trio, parent: str = "first") -> list[Tensor]:
    """A's rows of all adapters and siblings."""
    return [t for held in trio.factors.values() for key, t in held.items() if "lora_A" in key and parent in key]


def holds(storage: Tensor, rows: Tensor) -> bool:
    """Whether the storage holds one of these rows."""
    whole = storage[: storage.numel() // K * K].view(-1, K)
    return any(bool((whole == row).all(1).any()) for row in rows)


def held(model: nn.Module) -> int:
    """Bytes of all storages of its parameters."""
    return sum({p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}.values())


# -- laying -----------------------------------------------------------------------------------------
def test_laying_takes_the_buffers_and_nothing_else(own: Family, way: str) -> None:
    trio, sizes = Trio(own, way, max_loras=4), list[int]()
    with trio.open(["a", None]), trio.open(["wide", None]):  # pools have their size
        pass
    for module in (trio.module(c) for c in "qkv"):
        module.weight.data = module.weight.data.clone()

    def counted(real: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def make(*args: Any, **kwargs: Any) -> Tensor:
            made = real(*args, **kwargs)
            sizes.append(made.numel())
            return made

        return make

    real = augmented.lay

    def lay(members: Any) -> None:
        with mock.patch.multiple(torch, **{name: counted(getattr(torch, name)) for name in ("empty", "zeros")}):
            real(members)

    with mock.patch.object(augmented, "lay", lay):
        trio.lay()
    rows = max(trio.module(c)._lora.rows.capacity for c in "qkv")
    n = sum(WIDTHS)
    b = sum(trio.module(c)._lora.rows.capacity * size for c, size in zip("qkv", WIDTHS, strict=True))
    assert sorted(sizes) == sorted([(n + 3 * rows) * K, n + 3 * rows, b])


@pytest.mark.parametrize("left", ["k", "qv", "all"])
def test_a_buffer_goes_with_its_last_weight(trio: Trio, left: str) -> None:
    """One that is not laid with its siblings any more does not keep their weights."""
    buffer = weakref.ref(trio.merged("q").buffer)
    removes = [trio.module(c).register_forward_hook(lambda *_: None).remove for c in ("qkv" if left == "all" else left)]
    trio.call(x_of(tokens=1))
    gc.collect()
    assert trio.together() == {"k": ["qv"], "qv": ["k"], "all": ["qkv"]}[left]
    assert (buffer() is None) == (left != "all"), "while all lie in it, it serves again when the hooks are gone"
    weights = sum(p.nbytes for p in trio.model.parameters())
    assert held(trio.model) - weights <= trio.model.memory_report().device_bytes
    for remove in removes:
        remove()
    trio.call(x_of(tokens=1))
    assert trio.together() == ["qkv"]


def test_a_weight_taken_out_takes_no_tenants_rows_along(trio: Trio) -> None:
    trio.call(x_of(tokens=1))
    taken = trio.module("k").weight
    assert any(holds(behind(taken), rows) for rows in factors(trio))
    trio.module("k").weight = nn.Parameter(taken.clone(), requires_grad=False)
    trio.call(x_of(tokens=1))
    assert not any(holds(behind(taken), rows) for rows in factors(trio)), "of no sibling"
    assert any(holds(behind(trio.module("k").weight), rows) for rows in factors(trio))


# -- unpatch ----------------------------------------------------------------------------------------
def test_unpatch_gives_back_what_was_there(own: Family, way: str) -> None:
    trio = Trio(own, way, max_loras=4)
    weights, before = {k: v.clone() for k, v in own.base.state_dict().items()}, dict(trio.model.named_parameters())
    x = x_of(tokens=1)
    trio.call(x)
    base = trio.model.unpatch()
    assert dict(base.named_parameters()).keys() == before.keys()
    assert all(before[name] is parameter for name, parameter in base.named_parameters())
    assert not storages(before) and all(torch.equal(base.state_dict()[key], weights[key]) for key in weights)
    plain = snapshot(own.base)
    for name, (_, kind, keys, _) in ((n, v) for n, v in snapshot(base).items() if not n.startswith("tensor")):
        assert (kind, keys) == (plain[name][1], plain[name][2]), name
    trio.model = base
    with torch.no_grad():
        for child in "qkv":
            trio.check(trio.module(child)(x), child, x, [None] * 4)


# -- interrupts -------------------------------------------------------------------------------------
def interrupt(trio: Trio, code: Any, line: int) -> bool:
    """A request, interrupted at the line-th line that `code` runs. False where it has no more."""
    count, before = [0], sys.gettrace()

    def local(frame: FrameType, event: str, _: Any) -> Any:
        count[0] += event == "line"
        if event == "line" and count[0] == line:
            raise KeyboardInterrupt
        return local

    sys.settrace(lambda frame, event, _: local if frame.f_code is code else None)
    try:
        trio.lay(["a", None])
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def replaced(trio: Trio) -> None:
    """So that all are laid anew, from a buffer they share."""
    module = trio.module("q")
    module.weight = nn.Parameter(module.weight.detach().clone(), requires_grad=False)


@pytest.mark.parametrize("again", [False, True], ids=["laid", "laid anew"])
@pytest.mark.parametrize("function", [augmented.lay, augmented.unlay, augmented.prepare])
def test_an_interrupt_at_every_line(own: Family, way: str, function: Any, again: bool) -> None:
    weights, x, line = {k: v.clone() for k, v in own.base.state_dict().items()}, x_of(2, 1), 0
    while True:
        line += 1
        done = False
        for after in ("call", "unpatch"):
            trio = Trio(own, way, "a", "b", max_loras=1)
            parameters = {name: id(p) for name, p in trio.model.named_parameters() if "q_proj" not in name}
            if again:
                trio.lay(["a", None])
                replaced(trio)
            done = not interrupt(trio, function.__code__, line)
            assert all(torch.equal(value, weights[key]) for key, value in trio.model.state_dict().items()), line
            assert not storages(trio.model.state_dict()), line
            with torch.no_grad():
                if after == "call":
                    for name, parent in (("a", "first"), ("b", "first"), ("b", "second")):  # b comes into a's slot
                        trio.call(x, names=[name, None], parent=parent)
                    assert trio.together() == trio.together("second") == ["qkv"], line
                base = trio.model.unpatch()
            assert not storages(dict(base.named_parameters())), (line, after)
            assert all(torch.equal(base.state_dict()[key], weights[key]) for key in weights), line
            assert all(id(base.get_parameter(name)) == own_id for name, own_id in parameters.items())
        if done:
            break
    expected = {augmented.lay: 30, augmented.prepare: 20, augmented.unlay: 8 if again else 0}
    assert line > expected[function], "it must have been interrupted"


@torch.no_grad()
def test_an_error_after_linears_were_laid(own: Family, way: str) -> None:
    """The next request makes the tables that their buffers lack."""
    trio, x, full = Trio(own, way, max_loras=4), x_of(tokens=1), mock.Mock(side_effect=[True, MemoryError])

    def prepare(members: Any) -> bool:
        return augmented.prepare(members) and bool(full())

    with mock.patch.object(residency, "prepare", prepare), pytest.raises(MemoryError), trio.open():
        pass
    for parent in ("first", "second"):
        assert trio.together(parent) == ["qkv"] and trio.merged("q", parent).joint is None
    with trio.counted() as runs:
        trio.call(x)
        trio.call(x, parent="second")
    assert len(runs) == 2
