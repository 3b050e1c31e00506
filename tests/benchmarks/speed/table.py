"""The results as text: what was measured beside the best peer, the probe, the target and the floor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .targets import Target, target

COLUMNS = (
    ("bare ms", 9), ("ours ms", 9), ("value", 11), ("floor", 7), ("peer", 7), ("probe", 7), ("target", 7), ("", 12),
    ("err/PEFT", 9),
)  # fmt: skip
WIDTH = 20


def table(stage: str, record: Mapping[str, Any]) -> str:
    """One line per cell.

    value: ratio to the bare model, the median of neighbouring blocks, unless a unit follows. floor: the least that the
    device allows, in the value's unit.
    err/PEFT: root mean square of the rows' errors against a wider dtype, over that of PEFT's formula in the base's own.
    """
    told = ", ".join(f"{record[key]}" for key in ("shape", "layers", "dtype", "device") if record.get(key) is not None)
    lines = [f"{stage}: {told} ({record['seconds']:.0f} s)"]
    lines += ["".join([f"{'':{WIDTH}}", *(f"{name:>{width}}" for name, width in COLUMNS)])]
    for name, cell in record["cells"].items():
        known = target(stage, name) if record["shape"] != "tiny" else Target()
        lines.append(line(name, cell, known))
    if record.get("error"):
        lines.append(f"FAILED: {record['error']}")
    lines += [f"- {note}" for note in record.get("notes", ())]
    return "\n".join(lines) + "\n"


def line(name: str, cell: Mapping[str, Any], known: Target) -> str:
    value = cell.get("value")
    unit = cell.get("unit", known.unit)
    shown = [
        number(cell.get("bare", {}).get("ms")), number(cell.get("ours", {}).get("ms")),
        "-" if value is None else number(value) + ("" if unit == "x" else f" {unit}"), number(cell.get("floor")),
        number(known.peer), number(known.probe), number(known.target),
        "" if value is None else known.verdict(value), number(cell.get("errors", {}).get("over_plain")),
    ]  # fmt: skip
    text = f"{name:{WIDTH}}" + "".join(f"{s:>{width}}" for s, (_, width) in zip(shown, COLUMNS, strict=True))
    more = [cell[key] for key in ("note", "skipped") if key in cell]
    if "failed" in cell:
        more.append(f"FAILED: {cell['failed']}")
    return text.rstrip() + ("  " + "; ".join(more) if more else "")


def number(value: float | None) -> str:
    """Four digits."""
    if value is None:
        return ""
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}" if abs(value) >= 10 else f"{value:.3f}"
