"""From host memory to a device: one copy per adapter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .host import HostAdapter, views_of


class Staging:
    """Where an adapter's bytes arrive on a CUDA device, before they are scattered to slots; on a host: where they are.

    Buffer and views are kept, since adapters of one shape follow each other: a fill has hundreds of views.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.buffer = torch.empty(0, dtype=torch.uint8, device=device)
        self.shape: tuple[list[str], Mapping[str, Any]] = ([], {})  # modules, and where their factors lie
        self.key = 0  # of the adapter that it was made for
        self.span = (0, 0)  # bytes of the flat buffer that hold them
        self.begun: HostAdapter | None = None
        self.views: list[Tensor] = []

    def take(self, host: HostAdapter, names: list[str]) -> list[Tensor]:
        """A, B, A, B, ... of these modules on the device, by one copy of the bytes from their first to their last.

        On a CUDA device the copy is under way on the current stream: until it is done nobody may free or unpin `host`,
        or call this again from another stream.
        """
        if self.device.type != "cuda":
            return [factor for name in names for factor in host.factors[name]]
        begun, self.begun = self.begun, None
        if self.shape != (names, host.places):
            self._fit(host, names)
            begun = None
        if begun is not host:
            self._copy(host)
        return self.views

    def begin(self, host: HostAdapter) -> None:
        """Start the copy, if the last adapter was of this shape: `take` finds it under way, and checks the shape."""
        self.begun = None
        if self.device.type == "cuda" and host.pinned and host.key == self.key:
            self._copy(host)
            self.begun = host

    def _copy(self, host: HostAdapter) -> None:
        start, end = self.span
        some = host.flat[start:end]
        self.buffer[: some.nbytes].copy_(some, non_blocking=True)

    def _fit(self, host: HostAdapter, names: list[str]) -> None:
        self.shape, self.key, self.views = ([], {}), 0, []
        places = [place for name in names for place in host.places[name]]
        self.span = min(place.offset for place in places), max(place.end for place in places)
        size = self.span[1] - self.span[0]
        if self.buffer.nbytes < size:
            self.buffer = torch.empty(0, dtype=torch.uint8, device=self.device)  # freed before the larger one is made
            self.buffer = torch.empty(size, dtype=torch.uint8, device=self.device)
        self.views = views_of(self.buffer, places, self.span[0])
        self.shape, self.key = (names, host.places), host.key
