"""Any other module that adapters save in full (norms, convolutions, ...): run once per adapter with its tensors."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..pool import BASE
from ..routing import RoutingError
from .base import AdaptedLayer
from .rows import BASE_ONLY, ONE
from .saved import SavedSlots


class SavedWhole(AdaptedLayer, role="saved", kind="other"):
    """The module of each row's adapter: each group of rows runs through the module's own forward, with its tensors."""

    _saved: SavedSlots

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        slots = self._saved
        path = slots.path()
        if path == BASE_ONLY:
            return super().__call__(*args, **kwargs)
        layout, routing = slots.layout, slots.routing
        assert layout is not None
        if path == ONE:
            assert routing.uniform is not None
            with wearing(self, slots, layout.spans[routing.uniform][0]):  # type: ignore[arg-type]
                return super().__call__(*args, **kwargs)
        table, r = layout.table, layout.own.shape[1]
        assert table is not None
        if not args or not isinstance(args[0], Tensor):
            raise RoutingError(
                f"{slots.name}: its first argument must be a tensor with the rows of this call in front, got "
                f"{type(args[0]).__name__ if args else 'none'}: it computes what all rows share, so its rows cannot be "
                f"attributed to adapters. Run one adapter per call for this module"
            )
        (x, *rest), lead = args, args[0].shape[:-1]
        if routing.ragged or slots.flat:
            x = routing.align(x, r, slots.name, flat=slots.flat)
        elif x.shape[0] != r:
            routing.align(x, r, slots.name)  # raises
        if slots.open_mix():
            y = super().__call__(x, *rest, **kwargs)
            for row in range(slots.a.shape[0]):  # those in use or not: which are may change while a graph stays
                with wearing(self, slots, row):  # type: ignore[arg-type]
                    own = super().__call__(x, *rest, **kwargs)
                y = _choose(slots.name, (layout.own[0] == row) & (layout.own[1] > 0), own, y)
        else:
            parts, order, low = [], table.order.long(), 0  # rows sorted by slot, those of the base last
            for slot, group in itertools.groupby(sorted(routing.row_slots, key=lambda s: (s == BASE, s))):
                at = order[low : low + len(list(group))]
                low += at.shape[0]
                some, named = [_pick(v, at, r) for v in (x, *rest)], {k: _pick(v, at, r) for k, v in kwargs.items()}
                with wearing(self, slots, layout.spans.get(slot, (None, 0))[0]):  # type: ignore[arg-type]
                    parts.append(super().__call__(*some, **named))
            y = _merge(slots.name, parts, order.argsort())
        return y.view(*lead, -1) if routing.ragged or slots.flat else y


@contextmanager
def wearing(module: nn.Module, slots: SavedSlots, row: int | None) -> Iterator[None]:
    """The module with the tensors of a rank row in place of its own while the block runs; None: with its own."""
    if row is None:
        yield
        return
    flat, at = slots.a[row], 0
    before: list[tuple[dict[str, Any], str, Any]] = []
    homes: tuple[Mapping[str, Any], ...] = (module._parameters, module._buffers)
    try:
        try:
            for home in homes:
                for name in own_names(module, home):
                    tensor = home[name]
                    before.append((home, name, tensor))  # type: ignore[arg-type]
                    home[name] = flat[at : at + tensor.numel()].view(tensor.shape)  # type: ignore[index]
                    at += tensor.numel()
            if "_hf_hook" in module.__dict__:  # which would load the base's tensors, offloaded, in their place
                before.append((module.__dict__, "forward", module.__dict__["forward"]))
                module.__dict__["forward"] = module.__dict__["_old_forward"]
            yield
        finally:
            _put_back(before)
    finally:  # once more, as an interrupt of the first would leave an adapter's tensors to the base
        _put_back(before)


def _put_back(before: list[tuple[dict[str, Any], str, Any]]) -> None:
    for home, name, tensor in before:
        home[name] = tensor


def own_names(module: nn.Module, home: Mapping[str, Tensor | None]) -> list[str]:
    """Floating point tensors of the module's parameters or persistent buffers, as `ModuleShape.own` lists them."""
    hidden = module._non_persistent_buffers_set
    return [k for k, v in home.items() if v is not None and v.is_floating_point() and k not in hidden]


def _pick(value: Any, rows: Tensor, r: int) -> Any:
    """An argument's rows, where it has one entry for each of the r rows."""
    return value[rows] if isinstance(value, Tensor) and value.dim() and value.shape[0] == r else value


def _merge(name: str, parts: list[Any], order: Tensor) -> Any:
    if isinstance(parts[0], Tensor) and sum(part.shape[0] for part in parts) == order.shape[0]:
        return torch.cat(parts)[order]
    if isinstance(parts[0], tuple):
        return tuple(_merge(name, list(some), order) for some in zip(*parts, strict=True))
    raise _unknown(name, parts[0])


def _choose(name: str, mine: Tensor, own: Any, y: Any) -> Any:
    if isinstance(y, Tensor):
        return torch.where(mine.view(-1, *[1] * (y.dim() - 1)), own, y)
    if isinstance(y, tuple):
        return tuple(_choose(name, mine, *pair) for pair in zip(own, y, strict=True))
    raise _unknown(name, y)


def _unknown(name: str, output: Any) -> RoutingError:
    return RoutingError(
        f"{name}: it must return tensors with rows in front where adapters of a batch save it in full, it returned "
        f"{type(output).__name__}; run one adapter per call"
    )
