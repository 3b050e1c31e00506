"""The two sides of a cell: a batch of one subject, its step, the CUDA graph of that step, and what must hold."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from .. import gpu_gate as gate
from .. import gpu_timing as timing
from ..gate import GateError
from ..gpu_contenders import Batch, Rows, Subject
from ..gpu_gate import Truth
from ..registry import Work

WARM = 2  # steps at the start of a block that are not counted


class Side:
    """One subject with one batch: what a block of steps takes, eager or as replays of one captured step.

    room: steps that the static cache has room for after the prompt, without another one in between.
    """

    def __init__(self, subject: Subject, work: Work, ids: Tensor, room: int, device: str) -> None:
        self.subject, self.work, self.device, self.room = subject, work, device, room
        self.batch = Batch(subject, work, ids, room)
        self.decode = work.phase == "decode"
        self.replay: Callable[[], Any] | None = None
        self.out: Tensor | None = None

    def step(self, call: Mapping[str, Any]) -> Tensor:
        return self.batch.step(call) if self.decode else self.batch.prompt(call)

    def capture(self) -> None:
        """Capture one step under the batch's own mix. Raises what the capture raises."""
        with self.subject.route(self.work.mix()) as call:
            if self.decode:
                self.batch.prompt(call)
            graph, self.out = timing.capture(lambda: self.step(call))
        self.replay = graph.replay

    def block(self, count: int, measure: Callable[..., Any] = timing.intervals) -> Any:
        """ms of `count` steps, or what else `measure` gives of them; of decode after the prompt, so that every block
        starts at the same length."""
        if self.decode and count + WARM > self.room:
            raise ValueError(f"a block must have at most {self.room - WARM} steps, got {count}")
        with self.subject.route(self.work.mix()) as call:
            if self.decode:
                self.batch.prompt(call)
            step = self.replay or (lambda: self.step(call))
            for _ in range(WARM):
                step()
            return measure(step, count, self.device)

    def answer(self, rows: Rows) -> Tensor:
        """Eager logits [rows, V] of one step under any mix."""
        with self.subject.route(rows) as call:
            return self.batch.answer(call).clone()

    def replayed(self, rows: Rows) -> Tensor:
        """Those of a replay under any mix."""
        assert self.replay is not None and self.out is not None
        with self.subject.route(rows) as call:
            if self.decode:
                self.batch.prompt(call)
            self.replay()
            return self.out.clone()


def check_replays(side: Side, bound: float) -> dict[str, Any]:
    """The captured step must serve its own mix, another one and the base alone, without a new capture."""
    rows, found = side.work.mix(), dict[str, Any]()
    first = side.replayed(rows)
    found["own"] = gate.check_replay(side.subject, side.work, "its own mix", first, side.answer(rows), bound)["error"]
    if not any(rows):
        return found
    mixes: dict[str, Rows] = {"all base": [None] * len(rows)}
    if len(set(rows)) > 1:
        mixes["another mix"] = [None, *gate.moved(rows)[1:]]
    for what, mix in mixes.items():
        again, eager = side.replayed(mix), side.answer(mix)
        found[what] = gate.check_replay(side.subject, side.work, what, again, eager, bound, first)["error"]
    return found


def check_base_rows(ours: Side, bare: Side, truth: Truth) -> dict[str, float]:
    """Rows of the base beside rows with adapters: their error may be twice that of the bare model, plus the floor.

    truth: of the batch without adapters. over_bare: root mean square error over that of the bare model's same rows.
    """
    rows = ours.work.mix()
    rows[::2] = [None] * len(rows[::2])
    got, own, exact = ours.answer(rows)[::2], bare.answer([None] * len(rows))[::2], truth.logits[::2]
    off, plain = gate.errors(got, exact), gate.errors(own, exact)
    bound = max(truth.bound, 2 * plain.max().item() + gate.FLOOR[got.dtype])
    found = {
        "error": off.max().item(), "bound": bound, "over_bare": gate.rms(off) / gate.rms(plain),
        "from_bare": gate.errors(got, own.to(exact.dtype)).max().item(),
    }  # fmt: skip
    if not found["error"] <= bound:
        raise GateError(
            f"{ours.work.name}: base rows beside adapters must be within {bound:.3g} of the base in the wider dtype, "
            f"they differ by {found['error']:.3g} (the bare model: {plain.max().item():.3g})"
        )
    return found


def check_bare(ours: Side, bare: Side, truth: Truth) -> dict[str, Any]:
    """A batch without adapters: within rounding of the bare model, and whether bit for bit."""
    rows: Rows = [None] * ours.work.rows
    got, own = ours.answer(rows), bare.answer(rows)
    off = gate.errors(got, truth.logits)
    if not off.max().item() <= truth.bound:
        raise GateError(
            f"{ours.work.name}: a batch without adapters must be within {truth.bound:.3g} of the base in the wider "
            f"dtype, it differs by {off.max().item():.3g}"
        )
    over = gate.rms(off) / gate.rms(gate.errors(own, truth.logits))
    return {"mixed": off.max().item(), "bound": truth.bound, "over_plain": over, "identical": torch.equal(got, own)}
