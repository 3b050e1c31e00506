"""A stream of requests in batches: which adapters they ask for, when they come, and what serves them.

There is no continuous batching here: a batch is one prompt and then a fixed number of replays of one captured decode
step, and the next batch starts when it is done.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, quantiles
from typing import Any

import torch

from .. import gpu_gate as gate
from .. import gpu_timing as timing
from ..gate import GateError
from ..gpu_contenders import Rows
from ..gpu_gate import Truth
from ..registry import Work
from ..timing import now
from .sides import Side


def popular(count: int, exponent: float) -> list[float]:
    """Chances of `count` adapters: that of the i-th is 1 / i ** exponent of the first. exponent 0: all alike."""
    weights = [(i + 1) ** -exponent for i in range(count)]
    return [weight / sum(weights) for weight in weights]


def drawn(names: Sequence[str], exponent: float, count: int, seed: int) -> list[str]:
    """`count` requests, each for one of the names."""
    generator = torch.Generator().manual_seed(seed)
    chances = torch.tensor(popular(len(names), exponent), dtype=torch.float64)
    return [names[i] for i in torch.multinomial(chances, count, replacement=True, generator=generator).tolist()]


def arrivals(rate: float, cv: float, count: int, seed: int) -> list[float]:
    """Seconds at which requests come: gaps from a gamma distribution of mean 1 / rate and variation cv (1: Poisson)."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        shape = torch.tensor(1 / cv**2, dtype=torch.float64)
        gaps = torch.distributions.Gamma(shape, shape * rate).sample((count,))
    return gaps.cumsum(0).tolist()


@dataclass
class Server:
    """Serves batches of `rows` requests: their prompts, then `steps` tokens each."""

    side: Side
    steps: int

    def __post_init__(self) -> None:
        self.rows = self.side.work.rows
        self.device = self.side.device
        self.store = self.side.subject.model._multilora.store
        if timing.why_no_graph(self.device) is None:
            self.side.capture()

    @property
    def can_prefetch(self) -> bool:
        return hasattr(self.side.subject.model, "prefetch")

    def serve(self, names: Rows, upcoming: Sequence[str] = ()) -> None:
        """One batch, done on return. upcoming: adapters of the next one, fetched while this one computes."""
        side = self.side
        with side.subject.route([*names, *[None] * (self.rows - len(names))]) as call:
            side.batch.prompt(call)
            step = side.replay or (lambda: side.step(call))
            for _ in range(self.steps):
                step()
            if upcoming:
                side.subject.model.prefetch(list(dict.fromkeys(upcoming)))
            now(self.device)

    def stream(self, batches: Sequence[Rows], *, lead: int, prefetch: bool) -> dict[str, float]:
        """Batches one after the other; the first `lead` are not counted. requests_s: requests per second."""
        start = loads = wanted = 0.0
        for i, names in enumerate(batches):
            if i == lead:
                start, loads = now(self.device), self.store.loads
            if i >= lead:
                wanted += len({*names} - {None})
            following = batches[i + 1] if prefetch and i + 1 < len(batches) else []
            self.serve(names, [name for name in following if name is not None])
        took = now(self.device) - start
        loads = self.store.loads - loads
        served = sum(len(names) for names in batches[lead:])
        return {
            "requests_s": served / took, "seconds": took, "loads": loads, "hit_rate": max(0.0, 1 - loads / wanted),
        }  # fmt: skip

    def queue(self, names: Sequence[str], times: Sequence[float], *, prefetch: bool) -> dict[str, Any]:
        """Requests that come at those seconds, in batches of what waits when the last batch is done."""
        served, waits, sizes, wanted = 0, list[float](), list[int](), 0
        loads, start = self.store.loads, now(self.device)
        while served < len(names):
            passed = time.perf_counter() - start
            ready = sum(t <= passed for t in times[served : served + 2 * self.rows])
            if not ready:
                time.sleep(max(0.0, times[served] - passed))
                continue
            size = min(ready, self.rows)
            some, rest = names[served : served + size], names[served + size : served + ready]
            self.serve(list(some), rest if prefetch else ())
            wanted += len({*some})
            passed = now(self.device) - start
            waits += [passed - t for t in times[served : served + size]]
            sizes.append(size)
            served += size
        took = now(self.device) - start
        loads = self.store.loads - loads
        return {
            "requests_s": served / took, "seconds": took, "batches": len(sizes), "mean_batch": mean(sizes),
            "mean_wait_s": mean(waits), "p99_wait_s": quantiles(waits, n=100)[-1], "loads": loads,
            "hit_rate": max(0.0, 1 - loads / wanted),
        }  # fmt: skip


def check_batches(
    server: Server, works: Sequence[Work], truths: dict[Work, Truth], *, prefetch: bool
) -> dict[str, float]:
    """The replayed answers of batches, each brought to slots that others held: against the formula, and unlike each
    other. Raises GateError."""
    side, found = server.side, {"bound": 0.0, "mixed": 0.0, "control": 1.0}
    for i, work in enumerate(works):
        rows, exact = work.mix(), truths[work]
        if prefetch:
            with side.subject.route(works[i - 1].mix()):
                side.subject.model.prefetch([name for name in dict.fromkeys(rows) if name is not None])
        got = side.replayed(rows) if side.replay else side.answer(rows)
        error = gate.errors(got, exact.logits).max().item()
        control = gate.errors(got, truths[works[i - 1]].logits).min().item()
        if not error <= exact.bound < control:
            raise GateError(
                f"a batch with {sorted({*map(str, rows)})[:4]} ... must be within {exact.bound:.3g} of the formula and "
                f"further from that of other adapters, got {error:.3g} and {control:.3g}"
            )
        found = {
            "bound": exact.bound, "mixed": max(found["mixed"], error), "control": min(found["control"], control),
            "over_plain": gate.rms(gate.errors(got, exact.logits)) / exact.plain_rms,
        }  # fmt: skip
    return found


def resident(batches: Sequence[Rows], names: Sequence[str]) -> list[Rows]:
    """The same batches with the first few of `names` instead of theirs: as many distinct ones in each."""
    found = []
    for rows in batches:
        known = dict(zip(dict.fromkeys(rows), names, strict=False))
        found.append([known[name] for name in rows])
    return found
