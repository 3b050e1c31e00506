"""Which adapter slot every row of the current call uses.

One `Routing` object is shared by reference by the model and all its adapted layers. A request (a `generate`, a
`forward`, an `adapters()` block) opens it with one slot per request row; each entry point of the model (the model
itself, an encoder, a decoder) then states how many rows and tokens really arrive, and the request's rows are repeated
to match. Layers only read. Everything a kernel needs is written once per change of (rows, slots), one copy per device,
at addresses that belong to the number of rows: a captured graph finds them again.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from .pool import BASE, Layout, RowTables, upload
from .trace import Trace


class RoutingError(RuntimeError):
    """Rows that cannot be attributed to adapters."""


def current_task() -> object:
    try:
        return asyncio.current_task()
    except RuntimeError:  # no event loop runs in this thread
        return None


@dataclass(eq=False)
class Request:
    """One open request. `factors`: how many rows of the model one request row may stand for (1, beams, ...).

    task: the asyncio task that opened it, since tasks take turns in one thread, which no lock sees.
    """

    slots: tuple[int, ...]
    factors: set[int] = field(default_factory=lambda: {1})
    ragged: bool = False  # slots are per token of one packed row, not per row
    task: object = field(default_factory=current_task)


class Routing:
    """The rows of the current call -> slots.

    rows    int         R, rows of the entry point being run (ragged: tokens of the packed row)
    tokens  int | None  T, tokens per row where the entry point has them
    active  bool        some row has an adapter
    uniform int | None  the slot that all rows share, if they do: then any shape of input is attributed
    capturing bool      a CUDA graph is being captured: what is done must hold for every mix
    idle    bool        neither active nor capturing: untraced code computes the base alone
    moves   int         how often a module's factors or layout got another address or width, which graphs hold
    shifts  int         how often rank rows went elsewhere in their memory, as gaps between them were closed
    captured_at         `moves` when a graph was captured
    stamp               another number whenever anything above, or a layout, is another
    trace               whether what is traced began at an entry point
    joints              the tables of linears that are computed together, by name: see layers/joint.py
    shared              what one of several linears computed for the others: see layers/merged.py
    """

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.layouts: list[Layout] = []
        self.on_cuda = False
        self.standing = BASE
        self.stack: list[Request] = []
        self.open = False  # whether there is one: an attribute, as traced code must read it
        self.rows = 0
        self.tokens: int | None = None
        self.ragged = False
        self.capturing = False
        self.moves = self.shifts = 0
        self.captured_at: int | None = None
        self.shared: tuple[Any, ...] | None = None
        self.joints = SimpleNamespace()
        self.trace = Trace()
        self.stamp = 0
        self._entered: tuple[Any, ...] | None = None
        self.tables: dict[tuple[torch.device, int], RowTables] = {}
        self._written: tuple[int, ...] | None = None
        self.wrote: dict[torch.device, tuple[Any, Any]] = {}  # stream and event (torch.cuda) of the last tables
        self._loose = False  # it went to tables that are not kept, so no graph may read them
        self._settle()

    @property
    def place(self) -> tuple[int, int]:
        """Another one whenever rank rows that were there before may lie elsewhere."""
        return self.moves, self.shifts

    def _settle(self) -> None:
        """State between requests: the standing adapter for everything, or the base."""
        self.active = self.standing != BASE
        self.uniform: int | None = self.standing if self.active else None
        self.rows, self.tokens, self.ragged, self.capturing = 0, None, False, False
        self.idle = not self.active
        self.shared, self._entered = None, None
        self.stamp += 1

    def stand(self, slot: int) -> None:
        """What calls that name no adapter get: a slot, or BASE."""
        self.standing, self.shared, self._entered = slot, None, None
        self.stamp += 1
        self._ready()
        if not self.stack:
            self._settle()

    def _ready(self) -> None:
        """Make the tables of the standing slot: traced code, which asks for them, must not make any."""
        for layout in self.layouts:
            if self.standing in layout.spans:
                layout.alone(self.standing)

    def push(self, request: Request) -> None:
        self.require_own()
        try:
            self.stack.append(request)
            self.open = True
            self.enter(len(request.slots))
        except BaseException:
            if request in self.stack:
                self.pop(request)
            raise

    def pop(self, request: Request | None = None) -> None:
        """Close a request (None: the innermost); the one around it, if any, is in force again with its own rows.

        Raises RoutingError where one that was opened later is still open: generators that take turns do that.
        """
        request = self.stack[-1] if request is None else request
        innermost = self.stack[-1] is request
        self.shared = None
        self.open = len(self.stack) > 1
        self.stack.remove(request)
        if self.stack:
            self.enter(len(self.stack[-1].slots))
        else:
            self._settle()
        if not innermost:
            raise RoutingError(
                "adapters() blocks must be left in the opposite order of entering them, a later one is still open "
                "(generators that take turns?): calls since then may have had the adapters of the other block. Do not "
                "yield inside a block"
            )

    def require_own(self) -> None:
        """Raises RoutingError inside a request that another asyncio task has open: its rows are not the caller's."""
        if self.stack and self.stack[-1].task is not current_task():
            raise RoutingError(
                "no other asyncio task may have an adapters() block open on this model, one waits inside its block: do "
                "not await inside a block, or hold an asyncio.Lock around it"
            )

    @staticmethod
    def require_no_transform() -> None:
        """Raises RoutingError inside a transform of torch.func: what is made there ends with it."""
        if torch._C._functorch.maybe_current_level() is not None:
            raise RoutingError(
                "inside a torch.func transform (grad, vjp, vmap, ...) adapters cannot be named or loaded: open "
                "`with model.adapters(names):` around the transform, and name none inside"
            )

    @property
    def row_slots(self) -> tuple[int, ...]:
        """The slot of each of `rows`, known on the host."""
        assert self._written is not None
        return self._written

    def relayout(self, layouts: list[Layout]) -> None:
        """Slots moved: take the new layouts and write the rows in force into them."""
        self.layouts, self.shared, self._entered = layouts, None, None
        self.stamp += 1
        self.on_cuda = any(layout.device.type == "cuda" for layout in layouts)
        self._ready()
        self._note()
        written, self._written = self._written, None  # what was written went to the old layouts
        if self.stack and written is not None:
            self._write(written)

    def enter(self, rows: int, tokens: int | None = None, where: str = "the model") -> None:
        """An entry point runs `rows` rows of `tokens` tokens; raises RoutingError where they do not fit the request."""
        request = self.stack[-1]
        self.shared = None
        n = len(request.slots)
        if request.ragged:
            if rows * (tokens or 1) != n and rows != n:
                raise RoutingError(f"the packed row must hold {n} tokens, {where} got {rows} x {tokens}")
            slots = request.slots
        else:
            factor = rows // n if n else 0
            if factor * n != rows or factor not in request.factors:
                raise RoutingError(
                    f"the rows of a call must be the {n} rows of its adapter_names times one of "
                    f"{sorted(request.factors)}, {where} got {rows} rows; pass one name (or None) per row"
                )
            slots = request.slots if factor == 1 else tuple(s for s in request.slots for _ in range(factor))
        self.rows, self.tokens, self.ragged = len(slots), tokens, request.ragged
        self.capturing = self.on_cuda and torch.cuda.is_current_stream_capturing()
        if self.capturing:
            self.captured_at = self.moves
        entered = slots, tokens, self.ragged, self.capturing, self.stack[-1]
        if entered != self._entered:
            self._entered = entered
            self.stamp += 1
        if slots != self._written or (self._loose and not self.ragged):
            self._write(slots)
        present = set(slots)
        self.active = present != {BASE} and bool(present)
        self.idle = not (self.active or self.capturing)
        self.uniform = slots[0] if self.active and len(present) == 1 else None

    def _write(self, slots: tuple[int, ...]) -> None:
        self._written = None  # an interrupt half way must not pass for what was written before
        with torch.inference_mode(False), torch.no_grad():  # else the buffers could never be written again
            host = RowTables(len(slots), self.slots, torch.device("cpu"))
            host.row_slots.copy_(torch.tensor(slots, dtype=torch.int32))
            key = torch.where(host.row_slots == BASE, self.slots, host.row_slots)
            host.order.copy_(torch.argsort(key, stable=True))
            host.offsets[1:] = torch.bincount(key, minlength=self.slots + 1)[: self.slots].cumsum(0)
            present = frozenset(slots)
            written = {}
            for layout in self.layouts:
                if layout.device not in written:
                    written[layout.device] = self._table(layout.device, len(slots))
                    upload(written[layout.device].data, host.data)
                layout.write(written[layout.device], present, keep=not self.ragged)
            self._note()
        self._written, self._loose = slots, self.ragged

    def _note(self) -> None:
        """Tables were written on the current streams of their devices."""
        for device in {layout.device for layout in self.layouts if layout.device.type == "cuda"}:
            stream = torch.cuda.current_stream(device)
            self.wrote[device] = stream, stream.record_event()

    def follow(self) -> None:
        """What comes on the current stream comes after the tables that were written on another."""
        for device, (stream, event) in self.wrote.items():
            current = torch.cuda.current_stream(device)
            if current != stream and not torch.cuda.is_current_stream_capturing():  # a capture begins when all is done
                current.wait_event(event)

    def _table(self, device: torch.device, rows: int) -> RowTables:
        """The tables for that many rows on a device. Those of packed rows, which have any number of tokens, are not
        kept."""
        table = self.tables.get((device, rows)) or RowTables(rows, self.slots, device)
        if not self.ragged:
            self.tables[device, rows] = table
        return table

    def align(self, x: torch.Tensor, rows: int, module: str, *, trailing: int = 1, flat: bool = False) -> torch.Tensor:
        """`x` with its rows in front: [R, T, ...] of the same data, T tokens per row.

        rows: R, from a tensor's shape (a traced graph would be traced anew for a number). trailing: dimensions that
        belong to one token (1: features, 0: an id). flat: the module is known to get its tokens flattened, row after
        row. Raises RoutingError where rows cannot be told.
        """
        if x.dim() == 3 and x.shape[0] == rows and trailing == 1 and not self.ragged:  # most calls
            return x
        tail = x.shape[x.dim() - trailing :]
        lead = x.shape[: x.dim() - trailing]
        if self.ragged:
            if lead in ((1, rows), (rows,)):
                return x.reshape(rows, 1, *tail)
        elif flat and len(lead) == 1:
            if lead[0] % rows == 0 and (torch.compiler.is_compiling() or lead[0] == rows * (self.tokens or 1)):
                return x.reshape(rows, -1, *tail)
        elif lead and lead[0] == rows and not (trailing == 0 and len(lead) == 1 and 1 < rows == self.tokens):
            return x.reshape(rows, -1, *tail)  # a list of ids may be one per row, or as long as the rows are: positions
        raise RoutingError(
            f"{module}: the first dimension of its input must be the {rows} rows of this call, got shape "
            f"{tuple(x.shape)}; its rows cannot be attributed to adapters. Run one adapter per call for this module"
        )

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles carry no request: they answer with the standing adapter."""
        state = dict(
            self.__dict__,
            stack=[],
            open=False,
            _written=None,
            layouts=[],
            tables={},
            shared=None,
            _entered=None,
            captured_at=None,
            wrote={},
            joints=SimpleNamespace(),
            trace=Trace(),
        )
        state.update(active=self.standing != BASE, uniform=self.standing if self.standing != BASE else None)
        state.update(rows=0, tokens=None, ragged=False)
        return state
