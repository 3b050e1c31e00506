"""Bytes of adapters that are brought to a CUDA device ahead of their use, beside what computes there."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from .host import HostAdapter


class Bytes(NamedTuple):
    """uint8 [n] on a device: what an adapter's flat buffer holds from byte `start` on."""

    data: Tensor
    start: int

    def part(self, first: int, end: int) -> Tensor | None:
        """Bytes first:end of the flat buffer, None where they are not all here."""
        if first < self.start or end > self.start + self.data.nbytes:
            return None
        return self.data[first - self.start : end - self.start]


class Arrival(NamedTuple):
    """bytes: in a buffer of their own, all there when `event` has happened."""

    bytes: Bytes
    event: Any  # torch.cuda.Event


class Ahead:
    """Bytes by host copy. Where that goes, as its adapter was replaced or deleted or left host memory, so do they.

    Copies run on a stream of their own, and touch no slot: a call that computes is not disturbed.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.arrivals: WeakKeyDictionary[HostAdapter, Arrival] = WeakKeyDictionary()
        self.stream: torch.cuda.Stream | None = None

    @property
    def nbytes(self) -> int:
        return sum(arrival.bytes.data.nbytes for arrival in self.arrivals.values())

    def bring(self, host: HostAdapter, first: int, end: int) -> None:
        """Start to copy bytes first:end of the flat buffer, unless they are here. Raises torch.OutOfMemoryError."""
        held = self.arrivals.get(host)
        if held is not None and held.bytes.part(first, end) is not None:
            return
        host.pin()
        if self.stream is None:
            self.stream = torch.cuda.Stream(self.device)
        with torch.inference_mode(False), torch.no_grad(), torch.cuda.stream(self.stream):
            before = host.readers.get(self.device)
            if before is not None:
                self.stream.wait_event(before)
            data = torch.empty(end - first, dtype=torch.uint8, device=self.device)
            data.copy_(host.flat[first:end], non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        host.readers[self.device] = event  # copies are made in turn: the last one ends last
        self.arrivals[host] = Arrival(Bytes(data, first), event)

    def take(self, host: HostAdapter) -> Bytes | None:
        """What was brought of this one, given up here: the current stream waits until it is there. Whoever takes it
        must keep it until it says by `follow` when it was read."""
        arrival = self.arrivals.pop(host, None)
        if arrival is None:
            return None
        torch.cuda.current_stream(self.device).wait_event(arrival.event)
        return arrival.bytes

    def follow(self, event: Any) -> None:
        """Memory that was given up is used again after this event."""
        if self.stream is not None:
            self.stream.wait_event(event)

    def keep(self, hosts: Collection[HostAdapter]) -> bool:
        """Give up all others; returns whether there were any. Their memory is used again by copies on the same stream,
        which come after theirs."""
        others = [host for host in self.arrivals if host not in hosts]
        for host in others:
            del self.arrivals[host]
        return bool(others)
