"""The rank rows of one site on its device: storage, and whether the rows of a call have something there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from ..kernels.backends import TORCH, Backend, backend, has_triton
from ..pool import Layout, RankRows, fixed
from ..routing import Routing, RoutingError

BASE_ONLY, ONE, MIXED = 0, 1, 2  # what a call of the module has to do: see SlotRows.path
VIEWS = 64  # of spans that are kept per module

Pool = tuple[Tensor, Tensor, bool, int, dict[int, tuple[int, int]]]  # A, B, laid, capacity, spans


class SlotRows:
    """a [P, in_features] and b [P, out_features] of one site, rows handed out by `rows`. Lives in the module's `_role`.

    An adapter owns r rows of both while it is in a slot; what they hold is in the docstring of formats/base.py.
    """

    role = ""
    kind = ""  # of the module, as the registry of layers calls it; set by `wrap`
    attribute = ""  # of the module that holds it: "_" + role
    gated = False  # whether its layout says which rank rows are closed to a batch row, or where a row's own rows lie
    unit = 1  # pools are made in multiples of it
    laid = False
    count: int | None = None  # of experts that have rank rows of their own here
    parts: Mapping[int, tuple[int, ...]] = MappingProxyType({})  # slot -> rank of each expert

    def __init__(
        self,
        name: str,
        in_features: int,
        out_features: int,
        routing: Routing,
        *,
        flat: bool = False,
        mixable: bool = True,
        whole_numbers: bool = False,
    ) -> None:
        self.name = name
        self.in_features = in_features
        self.out_features = out_features
        self.routing = routing
        self.flat = flat  # the module is known to get its tokens flattened, row after row
        self.mixable = mixable  # the rows of its input are batch rows
        self.whole_numbers = whole_numbers  # b is int64: token ids
        self.fixed_dtype: torch.dtype | None = None
        self.backend: Backend = backend(TORCH)
        self.rows = RankRows()
        self.layout: Layout | None = None
        self.where = (0, 0, 0)  # addresses of what a captured graph reads, and what ranks it serves
        self.a = torch.zeros(0, in_features)
        self.b = torch.zeros(0, out_features, dtype=self.b_dtype(torch.float32))
        self.converted = False  # to another dtype since they were filled: they may have lost digits
        self.sources: dict[int, int] = {}  # slot -> where its A came from, in the adapter's host copy
        self.look()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.attribute = f"_{cls.role}"

    def b_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype of b where a has `dtype`."""
        return torch.int64 if self.whole_numbers else dtype

    def row_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of one rank row where a has `dtype`."""
        return self.in_features * dtype.itemsize + self.out_features * self.b_dtype(dtype).itemsize

    @property
    def buffer(self) -> Tensor | None:
        """What the module's weight lies in together with rank rows, if it does."""
        return None

    def of_one_a(self) -> Sequence[SlotRows]:
        """All with the same memory for A, of which the first counts it."""
        return (self,)

    @property
    def nbytes(self) -> int:
        return self.b.nbytes + (self.a.nbytes if self.of_one_a()[0] is self else 0)

    def path(self) -> int:
        """BASE_ONLY: no row has an adapter here. ONE: all rows share one. MIXED: routing.rows rows, each its own.

        In a traced or captured graph the mix is data: any open request is MIXED, so that it serves every mix.
        """
        layout, routing = self.layout, self.routing
        if layout is None:
            return BASE_ONLY
        if self.open_mix():
            return self._mixed()
        if not routing.active:
            return BASE_ONLY
        if routing.uniform is not None:
            return ONE if routing.uniform in layout.spans else BASE_ONLY
        return self._mixed() if layout.live else BASE_ONLY

    def open_mix(self) -> bool:
        """Whether what is done must hold for every mix: the call is traced or captured."""
        return self.routing.open and (self.routing.capturing or torch.compiler.is_compiling())

    def _mixed(self) -> int:
        if not self.mixable:
            raise RoutingError(
                f"{self.name}: the rows of its input are not the rows of the batch (positions, patches, ...), so all "
                f"rows of a call must have one adapter where an adapter trains it. Pass adapter_names to forward or "
                f"generate, which then run one adapter at a time, or split the batch"
            )
        return MIXED

    def own(self) -> tuple[Tensor, Tensor]:
        """A [r, in] and B [r, out] of the one adapter that all rows share."""
        assert self.layout is not None and self.routing.uniform is not None
        start, r = self.layout.spans[self.routing.uniform]
        return self.a[start : start + r], self.b[start : start + r]

    def disturb(self) -> None:
        """Before A or B go to other memory: an interrupt half way must leave no views of, nor ways to, the old one."""
        self.looked = False
        self.views.clear()
        self.routing.moves += 1

    def look(self) -> None:
        """Set the views that calls and loads read, and notice where memory moved."""
        self.looked = False  # an interrupt half way must not leave views of two states
        self._see()
        self.looked = True

    def _see(self) -> None:
        layout = self.layout
        fixed(self.a, self.b)
        self.views: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        where = self.a.data_ptr(), self.b.data_ptr(), 0 if layout is None else layout.most
        self.routing.moves += where != self.where
        self.where, self.seen = where, None if layout is None else (layout.width, layout.bound)

    def bound(self) -> int:
        """Of the ranks; while a graph is captured, of all that may come."""
        assert self.layout is not None
        return self.layout.most if self.routing.capturing else self.layout.no_rows.shape[1]

    def tables(self, slot: int | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """order, offsets, starts, ranks: what the grouped operations take. slot: for one row, which has that slot."""
        assert self.layout is not None
        rows = self.layout.table if slot is None else self.layout.alone(slot)
        assert rows is not None
        return rows.order, rows.offsets, self.layout.starts, self.layout.ranks

    def reserve(self, capacity: int, device: torch.device, dtype: torch.dtype, anew: bool = False) -> Pool | None:
        """Make room for `capacity` rank rows; rows in use keep their place. Returns what `restore` takes, None where
        nothing was done. anew: in other memory in any case.
        """
        if not anew and capacity <= self.rows.capacity and self.a.device == device and self.a.dtype == dtype:
            return None
        before = self.a, self.b, self.laid, self.rows.capacity, dict(self.rows.spans)
        capacity = max(capacity, self.rows.capacity)
        with torch.inference_mode(False), torch.no_grad():
            a = torch.zeros(capacity, self.in_features, device=device, dtype=dtype)
            b = torch.zeros(capacity, self.out_features, device=device, dtype=self.b_dtype(dtype))
            end = self.rows.end
            a[:end], b[:end] = self.a[:end], self.b[:end]
        self.disturb()
        self.a, self.b, self.rows.capacity, self.laid = a, b, capacity, False
        self.look()
        return before

    def restore(self, pool: Pool) -> None:
        """Undo a `reserve` and what came after it: the memory from before was only read."""
        self.disturb()
        self.a, self.b, self.laid, self.rows.capacity, self.rows.spans = pool
        self.look()

    def place(self, slot: int, r: int, parts: tuple[int, ...] | None = None) -> tuple[Tensor, Tensor]:
        """Rows of A and B for an adapter of rank r in `slot`, to be filled by the caller; compacts when it must.

        parts: how many of them each expert has.
        """
        start = self.rows.allocate(slot, r)
        if start is None:
            self._compact()
            start = self.rows.allocate(slot, r)
        if start is None:
            raise RuntimeError(
                f"{self.name}: {r} rank rows must fit beside the {self.rows.used} in use, the pool holds "
                f"{self.rows.capacity}"
            )
        return self.tenant(slot)

    @torch.no_grad()
    def _compact(self) -> None:
        """Close the gaps between rows in use, also of who has the same A; undone where it is interrupted."""
        of_one_a, end = self.of_one_a(), self.rows.end
        self.routing.shifts += 1
        spans = [dict(slots.rows.spans) for slots in of_one_a]
        moved = [self.a, *(slots.b for slots in of_one_a)]
        copies = [rows[:end].clone() for rows in moved]
        try:
            moves, *_ = [slots.rows.compact() for slots in of_one_a]
            for rows, copy in zip(moved, copies, strict=True):
                for old, new, width in moves:
                    rows[new : new + width] = copy[old : old + width]
                rows[self.rows.end : end].zero_()  # what was moved is not left behind as well
        except BaseException:
            for slots, before in zip(of_one_a, spans, strict=True):
                slots.rows.spans = before
            for rows, copy in zip(moved, copies, strict=True):
                rows[:end] = copy
            raise

    def tenant(self, slot: int) -> tuple[Tensor, Tensor]:
        """Rows of A and B that `slot` owns; the views are kept, as loads use the same ones again and again."""
        span = self.rows.spans[slot]
        if span not in self.views:
            if len(self.views) == VIEWS:
                self.views.clear()
            start, r = span
            self.views[span] = self.a[start : start + r], self.b[start : start + r]
        return self.views[span]

    def clear(self, slot: int) -> None:
        """Give up the rows of `slot`, which the caller has wiped."""
        self.rows.free(slot)

    def settle(self, layout: Layout | None) -> None:
        """Take the layout that describes the rows as they now are."""
        if layout is not self.layout or not self.looked:
            self.routing.moves += 1
            self.looked, self.layout = False, layout
            self.look()
        elif layout is not None and self.seen != (layout.width, layout.bound):
            self.look()

    def use(self, backend: Backend) -> None:
        """Compute with this backend from now on."""
        if backend is not self.backend:
            self.looked, self.backend = False, backend
            self.look()

    def layout_key(self) -> tuple[Any, ...] | None:
        """(spans, parts, capacity, device, gated, experts): what modules must have in common to share one Layout; None
        without adapters."""
        if not self.rows.spans:
            return None
        spans, parts = tuple(self.rows.spans.items()), tuple((slot, self.parts.get(slot)) for slot in self.rows.spans)
        return spans, parts if self.count else (), self.rows.capacity, self.a.device, self.gated, self.count

    def apply(self, fn: Any) -> None:
        """Follow the module to another device or dtype (`nn.Module._apply`)."""
        with torch.inference_mode(False), torch.no_grad():
            a, b = fn(self.a), fn(self.b)
            if a.dtype != self.a.dtype:
                self.converted = True
                self.sources.clear()  # what came from one place may differ now
            if self.fixed_dtype is not None:
                a, b = a.to(self.fixed_dtype), b.to(self.b_dtype(self.fixed_dtype))
            if a is not self.a or b is not self.b:
                self.disturb()
            if a is not self.a:
                self.a, self.laid = a.clone() if a.data_ptr() == self.a.data_ptr() else a, False
            self.b = b
        self.look()

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles carry the rank rows."""
        own = {"a": self.a.detach().clone(), "backend": self.backend.name, "views": {}}
        return self.__dict__ | own

    def __setstate__(self, state: dict[str, Any]) -> None:
        name = state["backend"] if has_triton() else TORCH  # until the copy's Residency chooses
        self.__dict__.update(state, backend=backend(name))
        self.look()


def own_tensor(module: nn.Module) -> Tensor | None:
    """The module's weight, else the first floating point tensor that is its own."""
    weight = module._parameters.get("weight")
    if weight is not None:
        return weight
    tensors = (*module._parameters.values(), *module._buffers.values())
    return next((t for t in tensors if t is not None and t.is_floating_point()), None)


def home_of(module: nn.Module) -> torch.device:
    """Where the module computes: its offload hook's execution device, else where its weight is."""
    hook = module.__dict__.get("_hf_hook")
    devices = [getattr(each, "execution_device", None) for each in getattr(hook, "hooks", (hook,))]  # of several in one
    device = next((device for device in devices if device is not None), None)
    if device is not None:
        return torch.device(device if not isinstance(device, int) else f"cuda:{device}")
    tensor = own_tensor(module)
    return tensor.device if tensor is not None else torch.device("cpu")
