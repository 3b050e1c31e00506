"""From host memory to the slots of a device: one copy per adapter, and one launch that takes its factors apart."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .ahead import Ahead, Bytes
from .host import HostAdapter, Place, views_of

if TYPE_CHECKING:
    from .kernels.triton_scatter import Scatter, Way, Wipe

FITS = 16  # shapes of adapters that are kept


def remote(device: torch.device) -> bool:
    """Whether an adapter's bytes are brought to the device as they are, and moved to their places there."""
    return device.type == "cuda"


def span_of(places: Sequence[Place]) -> tuple[int, int]:
    """The first byte of these factors in a flat buffer, and where the last of them ends."""
    return min(place.offset for place in places), max(place.end for place in places)


@dataclass(eq=False)
class Fit:
    """Where the factors of some modules lie in adapters of one shape: A, B, A, B, ... in the order of `names`."""

    names: list[str]
    shape: Mapping[str, tuple[Place, Place]]
    places: list[Place]
    span: tuple[int, int]
    scatter: Scatter | None

    def of(self, host: HostAdapter, names: list[str]) -> bool:
        return names == self.names and host.places == self.shape


class Staging:
    """Where an adapter's bytes arrive on a CUDA device, before they are scattered to slots; on a host: where they are.

    kernel: one Triton launch scatters them, else copies within the device. The buffer is kept, as large as it ever was,
    and so is what follows from an adapter's shape: adapters of one shape follow each other, with hundreds of factors.

    Nobody waits for a load: what comes later on the stream it was made on comes after it, other streams wait for its
    event (`join`), and so does whoever frees the adapter's host memory (HostAdapter.readers).
    """

    def __init__(self, device: torch.device, kernel: bool = False) -> None:
        self.device, self.kernel = device, kernel
        self.buffer = torch.empty(0, dtype=torch.uint8, device=device)
        self.ahead = Ahead(device)
        self.fits: OrderedDict[int, Fit] = OrderedDict()  # by HostAdapter.key
        self.here: tuple[HostAdapter, Bytes] | None = None  # what `begin` found, or began to bring
        self.views: tuple[Fit | None, int, list[Tensor]] = (None, 0, [])  # the buffer's, for that address of its part
        self.ways: dict[int, tuple[Fit, Way]] = {}  # slot -> the way there
        self.zeros: Wipe | None = None
        self.came = False  # whether `begin` found it
        self.last: tuple[Any, Any] | None = None  # stream (torch.cuda.Stream) and event (torch.cuda.Event) of a load

    @property
    def nbytes(self) -> int:
        return self.buffer.nbytes + self.ahead.nbytes

    def begin(self, host: HostAdapter, whole: bool) -> None:
        """Take the adapter's bytes where they came ahead, else start their copy where it is known what to copy: `move`
        finds it under way. whole: all modules are on this device."""
        self.here = None
        if not remote(self.device):
            return
        stream = torch.cuda.current_stream(self.device)
        if torch.cuda.is_current_stream_capturing():
            stream.synchronize()  # which raises: no graph may hold a load
        if self.last is not None and self.last[0] != stream:
            self.join()  # memory goes back to the stream it was taken on, where what used it comes first
            self.buffer, self.views = torch.empty(0, dtype=torch.uint8, device=self.device), (None, 0, [])
            self.ways.clear()
        ahead = self.ahead.take(host)
        self.came = ahead is not None
        if ahead is not None:
            self.here = host, ahead
        elif host.pinned:
            fit = self.fits.get(host.key)
            first, end = (0, host.nbytes) if whole else (0, 0) if fit is None else fit.span
            if 0 < end - first <= self.buffer.nbytes:
                self.here = host, self._copy(host, first, end)

    def move(self, host: HostAdapter, names: list[str], targets: list[Tensor], slot: int | None = None) -> None:
        """Write the factors of these modules to A, B, A, B, ... `targets`. slot: keep the way to them for `again`.

        On a CUDA device this is under way on the current stream: until `finish` nobody may free or unpin `host`, or
        call this from another stream. Raises KernelError.
        """
        if not remote(self.device):
            torch._foreach_copy_(targets, [factor for name in names for factor in host.factors[name]])
            return
        fit = self._fit(host, names)
        source = self._source(host, fit)
        way = None if fit.scatter is None else fit.scatter.to(targets)
        if way is None:
            torch._foreach_copy_(targets, self._views(fit, source))
            return
        way(source)
        if slot is not None:
            self.ways[slot] = fit, way

    def again(self, host: HostAdapter, names: list[str], slot: int) -> bool:
        """Write them to where `move` kept the way to, all of which must still be there. False, with nothing done, where
        it kept none."""
        known = self.ways.get(slot)
        if known is None or not known[0].of(host, names):
            return False
        known[1](self._source(host, known[0]))
        return True

    def _source(self, host: HostAdapter, fit: Fit) -> Tensor:
        """The bytes of these modules on the device."""
        source = self.here[1].part(*fit.span) if self.here is not None and self.here[0] is host else None
        if source is None:
            self.here = host, self._copy(host, *fit.span)
            source = self.here[1].data
        return source

    def wipe(self, targets: list[Tensor]) -> None:
        """Zeros into the targets, in the order of the current stream. Raises KernelError."""
        if self.kernel:
            from .kernels.triton_scatter import Wipe

            self.zeros = self.zeros or Wipe()
            try:
                if self.zeros(targets):
                    return
            except torch.OutOfMemoryError:  # for its tables: what follows needs none
                pass
        torch._foreach_zero_(targets)

    def finish(self, host: HostAdapter) -> None:
        """All that was begun for `host` is under way: note what must wait for it."""
        if not remote(self.device):
            return
        stream = torch.cuda.current_stream(self.device)
        if not host.pinned or torch.cuda.is_current_stream_capturing():  # as in `begin`
            stream.synchronize()
        event, before = torch.cuda.Event(), host.readers.get(self.device)
        if before is not None and not before.query():
            stream.wait_event(before)
        event.record(stream)
        host.readers[self.device], self.last = event, (stream, event)
        if self.came:
            self.ahead.follow(event)
        self.here = None

    def join(self) -> None:
        """What comes on the current stream comes after the last load."""
        if self.last is None or self.last[0] == (stream := torch.cuda.current_stream(self.device)):
            return
        if not torch.cuda.is_current_stream_capturing():  # before which everything was waited for
            stream.wait_event(self.last[1])

    def _views(self, fit: Fit, source: Tensor) -> list[Tensor]:
        """The factors in `source`; of the buffer they are kept."""
        if self.views[0] is fit and self.views[1] == source.data_ptr():
            return self.views[2]
        views = views_of(source, fit.places, fit.span[0])
        if source.untyped_storage().data_ptr() == self.buffer.untyped_storage().data_ptr():
            self.views = fit, source.data_ptr(), views
        return views

    def _copy(self, host: HostAdapter, first: int, end: int) -> Bytes:
        if self.buffer.nbytes < end - first:
            self.views = (None, 0, [])
            self.buffer = torch.empty(0, dtype=torch.uint8, device=self.device)  # freed before the larger one is made
            self.buffer = torch.empty(end - first, dtype=torch.uint8, device=self.device)
        some = self.buffer[: end - first]
        some.copy_(host.flat[first:end], non_blocking=True)
        return Bytes(some, first)

    def _fit(self, host: HostAdapter, names: list[str]) -> Fit:
        fit = self.fits.get(host.key)
        if fit is None or not fit.of(host, names):
            places = [place for name in names for place in host.places[name]]
            fit = Fit(names, host.places, places, span_of(places), self._scatter(places) if self.kernel else None)
            self.fits[host.key] = fit
            if len(self.fits) > FITS:
                self.fits.popitem(last=False)
        self.fits.move_to_end(host.key)
        return fit

    @staticmethod
    def _scatter(places: list[Place]) -> Scatter:
        from .kernels.triton_scatter import Scatter

        first, _ = span_of(places)
        begins = [place.offset - first for place in places]
        return Scatter(begins, [place.shape for place in places], [place.dtype for place in places])
