"""The processes of a sharded base do the same: a load is done by all or by none.

They need no word per step: every process is called with the same rows, so all come to the same loads. A load itself may
fail in one of them alone (a folder that is not there, memory that runs out), after which they would go different ways:
so each load ends with one small sum over a gloo group of their own, whatever the base communicates by.
"""

from __future__ import annotations

import functools
import hashlib
import pickle
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import distributed

T = TypeVar("T")
TIMEOUT = timedelta(minutes=10)  # for the slowest process to come to the end of a load


class Agreement:
    """Among the processes with these global numbers; every one of them must make it."""

    def __init__(self, ranks: Iterable[int]) -> None:
        self.ranks = sorted(ranks)
        self.group = _group(distributed.group.WORLD, tuple(self.ranks), TIMEOUT)

    @property
    def first(self) -> bool:
        """Whether this is the first of the processes."""
        return distributed.get_rank() == self.ranks[0]

    def reach(self, what: str, run: Callable[[], T], key: Callable[[T], int] = lambda result: 0) -> T:
        """The result of `run`, which every process calls, if it ended without an error in all of them.

        key: a number below 2 ** 62 that must be the same everywhere. Raises the process's own error, else that of
        the first that had one, ValueError where keys differ, RuntimeError where a process does not answer.
        """
        result: Any = None
        error: BaseException | None = None
        own = 0
        try:
            result = run()
            own = key(result)
        except BaseException as raised:  # of an interrupt the others must hear as well
            error = raised
        answer = torch.tensor([int(error is not None), own, -own])
        self._exchange(what, lambda: distributed.all_reduce(answer, distributed.ReduceOp.MAX, group=self.group))
        failed, most, least = answer.tolist()
        if not failed and most == -least:
            return result
        each: list[Any] = [None] * len(self.ranks)
        said = (what, own, _sendable(error))
        self._exchange(what, lambda: distributed.all_gather_object(each, said, group=self.group))
        if error is not None:
            raise error
        for rank, (_, _, first) in zip(self.ranks, each, strict=True):
            if first is not None:
                raise first from RuntimeError(f"{what} failed in process {rank}, so it is undone in all")
        kinds = {number: f"{text} (process {rank})" for rank, (text, number, _) in zip(self.ranks, each, strict=True)}
        raise ValueError(
            f"all {len(self.ranks)} processes must load the same, got different contents from "
            f"{', '.join(list(kinds.values())[:4])}; make the same calls in each, and give all of them the same folder "
            f"(a file whose copy of a sharded weight of the base differs from it in a part of its rows is not served)"
        )

    def most(self, number: int) -> int:
        """The largest of all processes' numbers."""
        answer = torch.tensor([number])
        self._exchange("a count", lambda: distributed.all_reduce(answer, distributed.ReduceOp.MAX, group=self.group))
        return int(answer)

    def least(self, number: int) -> int:
        """The least of them."""
        return -self.most(-number)

    def _exchange(self, what: str, call: Callable[[], Any]) -> None:
        try:
            call()
        except RuntimeError as error:  # of gloo: a closed connection, or nothing until the timeout
            raise RuntimeError(
                f"{what}: all {len(self.ranks)} processes must come to the end of it, at least one did not answer: it "
                f"ended, or is not in the same call (every process must make the same calls); restart them all"
            ) from error


def number_of(text: str) -> int:
    """A number for a text, below 2 ** 60."""
    return int(hashlib.sha256(text.encode()).hexdigest()[:15], 16)


def _sendable(error: BaseException | None) -> Exception | None:
    try:
        if isinstance(error, Exception):
            pickle.loads(pickle.dumps(error))
    except Exception:  # of classes that want other arguments than they keep
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error if error is None or isinstance(error, Exception) else RuntimeError(f"it got a {type(error).__name__}")


@functools.cache
def _group(world: Any, ranks: tuple[int, ...], timeout: timedelta) -> Any:
    """One for all models of these processes: a group holds sockets and threads, and goes with `world`."""
    return distributed.new_group(list(ranks), timeout=timeout, backend="gloo", use_local_synchronization=True)
