"""The results of `gpu` as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .registry import Work

KINDS = ("eager", "graph")
HEADER = f"{'':42}" + "".join(f"{kind:>10} {'/before':>7} {'/after':>7}" for kind in KINDS) + f" {'peft/':>6}"


def table(result: Mapping[str, Any], works: Sequence[Work]) -> str:
    """One line per cell: ms of a step or a prefill, and their ratios to the bare model before and after.

    bytes: (weights + distinct adapters) / weights. floor: 1 + the time in which the device's copy speed reads the
    distinct adapters, over the bare model's step (under a graph, if there is one). peft/: PEFT's eager ms / this one's.
    """
    lines, skipped = [HEADER], set()
    for work in works:
        ratio = 1 + work.distinct * result["adapter_bytes"] / result["weight_bytes"]
        lines.append(f"{work.name}: bytes {ratio:.3f}{_floor(result, work)}")
        found = {f"bare {when}": shapes.get(work.shape, {}) for when, shapes in result["bare"].items()}
        for name, record in result["contenders"].items():
            cell = record["cells"].get(work.name, {})
            found[name + ("" if cell.get("resident") is None else f", {cell['resident']} resident")] = cell
            skipped |= {cell[kind]["skipped"] for kind in KINDS if "skipped" in cell.get(kind, {})}
        peft = found.get("peft", {}).get("eager", {}).get("ms")
        lines += [_line(name, result, work, cell, peft) for name, cell in found.items() if cell]
    lines += [f"- under graph: {why}" for why in skipped]
    for name, record in result["contenders"].items():
        for model, note in record["models"].items():
            if "slot" in note:
                slot = note["slot"]
                lines.append(
                    f"one adapter to its slot, {name}, {model}: {slot['load_ms']:.2f} ms (request with a load "
                    f"{slot['ms']:.2f}, without {slot['resident_ms']:.2f})"
                )
        if "load_adapter_ms" in record:
            lines.append(f"load_adapter of {name}: {record['load_adapter_ms']:.0f} ms")
        if record["error"]:
            lines.append(f"{name} FAILED: {record['error']}")
    pinned = result["pinned_copy_ms"]
    lines.append(
        f"one adapter: {result['adapter_bytes'] / 1e6:.1f} MB, pinned copy of as much "
        f"{'not measured' if pinned is None else f'{pinned:.2f} ms'}; copy within the device "
        f"{result['copy_bytes_per_ms'] / 1e9:.2f} TB/s"
    )
    return "\n".join(lines) + "\n"


def _line(name: str, result: Mapping[str, Any], work: Work, cell: Mapping[str, Any], peft: float | None) -> str:
    line = f"  {name:40}"
    for kind in KINDS:
        ms = cell.get(kind, {}).get("ms")
        line += f"{'-' if ms is None else f'{ms:.3f}':>10}"
        for when in ("before", "after"):
            unit = _bare_ms(result, work, when, kind)
            line += f" {'' if ms is None or unit is None else f'{ms / unit:.3f}':>7}"
    eager = cell.get("eager", {}).get("ms")
    line += f" {'' if peft is None or eager is None else f'{peft / eager:.1f}':>6}"
    wrong = [
        f"FAILED, {what}"
        for what, at in (("not timed", cell), ("another mix", cell.get("reroute", {})))
        if "failed" in at
    ]
    return " ".join([line, *wrong]).rstrip()


def _bare_ms(result: Mapping[str, Any], work: Work, when: str, kind: str) -> float | None:
    ms: float | None = result["bare"].get(when, {}).get(work.shape, {}).get(kind, {}).get("ms")
    return ms


def _floor(result: Mapping[str, Any], work: Work) -> str:
    unit = _bare_ms(result, work, "before", "graph") or _bare_ms(result, work, "before", "eager")
    if unit is None:
        return ""
    return f", floor {1 + work.distinct * result['adapter_bytes'] / result['copy_bytes_per_ms'] / unit:.3f}"
