"""One stage of the benchmark: its cells, its record, its time."""

from __future__ import annotations

import argparse
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from ..gate import GateError
from . import profile
from .results import Results
from .targets import Target, target
from .workshop import Workshop


class Stage:
    """Handed to a stage's `run`: which cells it should run, and where what it finds goes.

    small: the cells of a tiny model, for tests on a CPU. until: when no further cell starts.
    """

    def __init__(
        self, name: str, settings: argparse.Namespace, shop: Workshop, results: Results, facts: Mapping[str, Any]
    ) -> None:
        self.name, self.settings, self.shop, self.results = name, settings, shop, results
        self.device: str = settings.device
        self.cuda = self.device.startswith("cuda")
        self.small: bool = settings.small
        self.record = results.open(name, facts)
        self.started = time.perf_counter()
        self.before = self.record["seconds"]
        self.until = self.started + settings.limit
        self.at = ""  # the cell that runs

    def say(self, text: str) -> None:
        self.shop.say(f"{self.name}: {text}")

    def note(self, text: str) -> None:
        """A line below the table."""
        notes = self.record.setdefault("notes", [])
        if text not in notes:
            notes.append(text)

    def wanted(self, names: Sequence[str]) -> list[str]:
        """Those of the stage's cells that the command line names, all where it names none."""
        picked = self.settings.cells
        return [name for name in names if picked is None or name in picked]

    def in_time(self, name: str) -> bool:
        """Whether there is time for another cell; else it is recorded as not run."""
        if time.perf_counter() < self.until:
            return True
        self.record["cells"][name] = {"skipped": f"not run: the stage had its {self.settings.limit:.0f} s"}
        return False

    @contextmanager
    def cell(self, name: str) -> Iterator[dict[str, Any]]:
        """The record of a cell, written at the end. What goes wrong inside is recorded and the others go on: time on a
        GPU is dear."""
        found: dict[str, Any] = {}
        self.record["cells"][name], self.at = found, name
        try:
            yield found
        except GateError as error:
            found["failed"] = str(error)
        except Exception as error:
            found["failed"] = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"
            traceback.print_exc()
        self.say(f"{name}: {brief(found)}")
        self.save()

    def profile(self, found: dict[str, Any], blocks: Mapping[str, Callable[..., Any]]) -> None:
        """The kernels of a step of each side, with --profile or where the value misses its target.
        blocks: (steps, clock) -> what the clock gives."""
        known = Target() if self.small else target(self.name, self.at)
        if self.settings.profile or not known.reached(found["value"]):
            found["profile"] = {side: block(profile.STEPS, profile.kernels) for side, block in blocks.items()}
            self.say("kernels of a step\n" + "\n".join(profile.lines(found["profile"])))

    def save(self) -> None:
        self.record["seconds"] = self.before + time.perf_counter() - self.started
        self.results.merge(self.name, self.record)

    @property
    def failed(self) -> list[str]:
        wrong = [name for name, cell in self.record["cells"].items() if "failed" in cell]
        return wrong + ([self.record["error"]] if self.record["error"] else [])


Run = Callable[[Stage], None]


def brief(found: Mapping[str, Any]) -> str:
    """A cell in one line."""
    parts = [f"{side} {found[side]['ms']:.3f} ms" for side in ("bare", "ours") if "ms" in found.get(side, {})]
    parts += [f"value {found['value']:.4g}"] if "value" in found else []
    parts += [f"{key} {found[key]:.3g}" for key in ("floor",) if key in found]
    errors = found.get("errors", {})
    parts += [f"{key} {errors[key]:.2g}" for key in ("mixed", "bound", "over_plain") if key in errors]
    parts += [str(found[key]) for key in ("note", "skipped") if key in found]
    return ", ".join(parts) + (f" FAILED: {found['failed']}" if "failed" in found else "")
