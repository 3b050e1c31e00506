"""Inputs of a pipeline -> Rows: one adapter id beside every input, from a list of names or from the inputs' own.

ids: one per input, one for all, or None where the inputs name their adapters, if anything does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sized
from dataclasses import dataclass
from typing import Any

from torch.utils.data import Dataset, IterableDataset
from transformers.utils.chat_template_utils import Chat, is_valid_message

from ..routing import RoutingError

COLUMN = "adapter"  # the key of an input that names its adapter
NOT_DATASETS = (str, bytes, list, tuple, Mapping, Chat)
SOME = 'all inputs must name their adapter in "adapter" (None for the base), or none of them'
Ids = int | list[int] | None


@dataclass(frozen=True)
class Row:
    """An input on its way to `preprocess`, with its adapter's id."""

    value: Any
    adapter_id: int


@dataclass(frozen=True)
class Namer:
    """Makes Rows. resolve: an adapter's name -> its id."""

    ids: Ids
    resolve: Callable[[Any], int]

    def row(self, item: Any, i: int) -> Row:
        """Input i as a Row. Raises ValueError where it is named twice, or not at all."""
        if isinstance(item, Row):
            return item
        if self.ids is not None:
            if names_adapter(item):
                raise named_twice()
            return Row(item, self.ids[i] if isinstance(self.ids, list) else self.ids)
        value, name = split(item, i)
        chat = isinstance(value, (list, tuple)) and len(value) > 0 and is_valid_message(value[0])
        return Row(Chat(value) if chat else value, self.resolve(name))

    def rows(self, inputs: Any) -> Any:
        """The inputs as Rows; or as they are where no ids are given (a stream: and its first row names no adapter)."""
        if not isinstance(inputs, Sized) or isinstance(inputs, IterableDataset):
            return StreamedRows(self, inputs)
        if isinstance(self.ids, list) and len(self.ids) != len(inputs):
            raise miscounted(len(self.ids), len(inputs))
        return inputs if self.ids is None else SizedRows(self, inputs)


class SizedRows(Dataset[Row]):
    """Inputs that can be counted, as Rows."""

    def __init__(self, namer: Namer, inputs: Any) -> None:
        self.namer, self.inputs = namer, inputs

    def __len__(self) -> int:
        return len(self.inputs)

    def __iter__(self) -> Iterator[Row]:
        return (self[i] for i in range(len(self)))

    def __getitem__(self, i: int) -> Row:
        return self.namer.row(self.inputs[i], i)


class StreamedRows:
    """Inputs that come one after another, as Rows; or as they are where the first of them names no adapter.

    A generator that is iterated again goes on where it was (Transformers' iterators start their loaders anew), so its
    count does, too.
    """

    def __init__(self, namer: Namer, inputs: Any) -> None:
        self.namer, self.inputs = namer, inputs
        self.count, self.named = 0, False

    def __iter__(self) -> Iterator[Any]:
        source, ids = iter(self.inputs), self.namer.ids
        given = len(ids) if isinstance(ids, list) else None
        if source is not self.inputs:
            self.count = 0
        for item in source:
            if self.count == 0:
                self.named = ids is not None or names_adapter(item)
            if self.count == given:
                raise miscounted(given, f"more than {given}")
            self.count += 1
            yield self.namer.row(item, self.count - 1) if self.named else item
        if given is not None and self.count < given:
            raise miscounted(given, self.count)


def names_adapter(item: Any) -> bool:
    return isinstance(item, Mapping) and COLUMN in item and not is_valid_message(item)


def first_row(inputs: Any) -> Any:
    """The first row of a dataset; None of anything else."""
    if isinstance(inputs, NOT_DATASETS) or not isinstance(inputs, Sized) or not hasattr(inputs, "__getitem__"):
        return None
    return inputs[0] if len(inputs) else None


def split(item: Any, i: int) -> tuple[Any, Any]:
    """(input, name) of input i, which must name its adapter; what stands beside the name alone is the input."""
    if not names_adapter(item):
        got = sorted(item) if isinstance(item, Mapping) else type(item).__name__
        raise ValueError(f"{SOME}, got {got} for input {i}")
    rest = {key: value for key, value in item.items() if key != COLUMN}
    return next(iter(rest.values())) if len(rest) == 1 else rest, item[COLUMN]


def named_twice() -> ValueError:
    return ValueError('adapters must be named once, in adapter_names or in the "adapter" of the inputs, got both')


def miscounted(names: int, inputs: int | str) -> RoutingError:
    return RoutingError(f"a pipeline must have one adapter per input, got {names} for {inputs} inputs")
