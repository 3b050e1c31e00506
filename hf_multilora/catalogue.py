"""Registered adapters: names, ids, identities."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from .formats import Adapter, AdapterError
from .host import HostAdapter

BASE_NAMES = (None, "__base__")


class UnknownAdapterError(KeyError):
    """A name or id that no adapter has."""

    def __str__(self) -> str:  # KeyError would show the message quoted
        return str(self.args[0])


@dataclass
class Entry:
    """One registered adapter. `reader` reads it again once host memory has dropped it; None: it cannot be dropped."""

    name: str
    id: int
    digest: str
    source: str
    base_model: str | None
    ranks: Mapping[str, int]
    nbytes: int
    config: Mapping[str, Any]
    reader: Callable[[], Adapter] | None
    host: HostAdapter | None = None
    in_flight: int = 0
    labels: tuple[str, ...] | None = None  # names of what its own head tells apart, where its files say them
    max_rank: int = 0  # the largest rank of its low-rank sites

    @property
    def identity(self) -> tuple[str, str]:
        """Name and content: what caches of anything computed under the adapter must key on."""
        return self.name, self.digest

    def read(self) -> Adapter:
        """The adapter from its files once more. Raises FileNotFoundError where they are gone, AdapterError where they
        are damaged or others.
        """
        assert self.reader is not None
        remedy = f"put the files back, or delete_adapter({self.name!r})"
        try:
            adapter = self.reader()
        except OSError as error:
            raise FileNotFoundError(
                f"adapter {self.name!r} left host memory and must be read again from {self.source}, which cannot be "
                f"read: {error}; {remedy}"
            ) from error
        except AdapterError as error:
            raise AdapterError(
                f"adapter {self.name!r} left host memory and must be read again: {error}; {remedy}"
            ) from error
        if adapter.digest != self.digest:
            raise AdapterError(
                f"the files of adapter {self.name!r} ({self.source}) must be those it was registered with, they "
                f"changed; load_adapter(..., {self.name!r}, load_inplace=True) takes the new ones"
            )
        return adapter


class Limits(NamedTuple):
    """What a call with certain adapters must keep to: see `AdapterStore.room`. mixable: whether its rows can mix."""

    room: int
    held: frozenset[int]
    mixable: bool
    max_loras: int


@dataclass
class Catalogue:
    """Name <-> id <-> entry. Ids start at 1 and are never reused; 0 is the base."""

    entries: dict[str, Entry] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)
    next_id: int = 1

    def __iter__(self) -> Iterator[Entry]:
        return iter(list(self.entries.values()))

    def __contains__(self, name: object) -> bool:
        return name in self.entries

    def entry(self, name: str) -> Entry:
        """Raises UnknownAdapterError, which lists close names."""
        found = self.entries.get(name) if isinstance(name, str) else None
        if found is None:
            close = difflib.get_close_matches(str(name), self.entries, n=3)
            more = f" and {len(self.entries) - 8} more" if len(self.entries) > 8 else ""
            known = f"did you mean {close}?" if close else f"known: {sorted(self.entries)[:8] or 'none'}{more}"
            raise UnknownAdapterError(f"no adapter is named {name!r}; {known}")
        return found

    def by_id(self, adapter_id: int) -> Entry:
        """Raises UnknownAdapterError, also for the id of a deleted adapter."""
        if adapter_id not in self.names:
            known = {i: self.names[i] for i in list(self.names)[:8]}
            raise UnknownAdapterError(f"no adapter has id {adapter_id}; 0 is the base, known: {known}")
        return self.entries[self.names[adapter_id]]

    def ids_of(self, names: Iterable[str | None]) -> list[int]:
        """0 for the base (None or "__base__"), else the adapter's id."""
        return [0 if name in BASE_NAMES else self.entry(name).id for name in names]

    def names_only(self) -> Catalogue:
        """A snapshot of names and ids without weights."""
        bare = {e.name: replace(e, host=None, reader=None, config={}, ranks={}) for e in self}
        return Catalogue(bare, dict(self.names), self.next_id)

    def put(self, entry: Entry) -> None:
        self.entries[entry.name], self.names[entry.id] = entry, entry.name
        self.next_id = max(self.next_id, entry.id + 1)

    def drop(self, entry: Entry) -> None:
        del self.entries[entry.name], self.names[entry.id]


def check_name(name: str) -> None:
    """Raises ValueError for names that could not be told from the base."""
    if not isinstance(name, str) or not name.strip() or name in BASE_NAMES:
        raise ValueError(f"an adapter's name must be a non-empty string other than '__base__', got {name!r}")
