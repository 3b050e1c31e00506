"""Tables for terminals and notebooks: plain text wrapped to a width, and HTML without scripts or style sheets.

HTML cells take their colours from the page (transparent greys), so that tables read well in light and dark themes.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

GAP = "  "
NARROWEST = 12  # columns of a terminal below which a table's column is no longer worth reading
LINE = "1px solid rgba(128,128,128,0.4)"
TABLE = "border-collapse:collapse;table-layout:auto;"  # notebooks' own style sheets say fixed
CELL = f"text-align:left;vertical-align:top;padding:0.3em 0.8em;border-bottom:{LINE};"


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> str:
    """Cells side by side, wrapped so that no line is wider than `width`; where that is too narrow for the columns, each
    row as a paragraph: its first cell, then the others indented under their headers.
    """
    header, rows = [clean(cell) for cell in header], [[clean(cell) for cell in row] for row in rows]
    by_column = zip(header, *rows, strict=True)
    natural = [max(columns(line) for cell in cells for line in cell.split("\n")) for cells in by_column]
    room = width - len(GAP) * (len(header) - 1)
    widths = fit(natural, room)
    if any(given < min(need, NARROWEST) for given, need in zip(widths, natural, strict=True)):
        return "\n\n".join(_paragraph(header, row, width) for row in rows)
    rules = ["-" * given for given in widths]
    lines = _side_by_side(header, widths) + _side_by_side(rules, widths)
    spaced = any(need > given for need, given in zip(natural, widths, strict=True)) or any(
        "\n" in c for r in rows for c in r
    )
    for i, row in enumerate(rows):
        lines += [""] * (spaced and i > 0) + _side_by_side(row, widths)
    return "\n".join(lines)


def fit(natural: Sequence[int], room: int) -> list[int]:
    """Widths of columns: their natural ones where they fit, else the widest are cut to one common width."""
    cap = max(natural, default=0)
    while cap > 1 and sum(min(need, cap) for need in natural) > room:
        cap -= 1
    return [min(need, cap) for need in natural]


def wrap(text: str, width: int) -> list[str]:
    """Lines of at most `width` columns, broken between words where that is possible."""
    lines = []
    for line in text.split("\n"):
        current = ""
        for word in re.findall(r"\s+|\S+", line):
            if columns(current + word) <= width:
                current += word
                continue
            if word.isspace():
                continue
            if current.strip():
                lines.append(current.rstrip())
            current = word
            while columns(current) > width:
                cut = next(n for n in range(len(current), 0, -1) if n == 1 or columns(current[:n]) <= width)
                lines.append(current[:cut])
                current = current[cut:]
        lines.append(current.rstrip())
    return lines


def columns(text: str) -> int:
    """Columns that a terminal needs for a line: two for wide characters, none for combining ones."""
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def clean(text: str) -> str:
    """Without characters that move a terminal's cursor or change its colours; tabs and line ends are kept as such."""
    text = text.replace("\r\n", "\n").replace("\t", "    ")
    return "".join(c if c == "\n" or c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def _side_by_side(cells: Sequence[str], widths: Sequence[int]) -> list[str]:
    wrapped = [wrap(cell, width) for cell, width in zip(cells, widths, strict=True)]
    height = max(len(lines) for lines in wrapped)
    lines = []
    for i in range(height):
        parts = [cell[i] if i < len(cell) else "" for cell in wrapped]
        padded = [part + " " * (width - columns(part)) for part, width in zip(parts, widths, strict=True)]
        lines.append(GAP.join(padded).rstrip())
    return lines


def _paragraph(header: Sequence[str], row: Sequence[str], width: int) -> str:
    lines = wrap(row[0], width)
    for name, cell in zip(header[1:], row[1:], strict=True):
        first, *others = wrap(f"{name}: {cell}", max(width - 2 * len(GAP), 1))
        lines += [GAP + first, *(2 * GAP + line for line in others)]
    return "\n".join(lines)


def html_table(header: Sequence[str], rows: Sequence[Sequence[str]], caption: str = "") -> str:
    """The first column is a header too. All texts are escaped, line breaks kept."""
    head = "".join(_cell("th", name, "font-weight:bold;") for name in header)
    body = "".join(
        f"<tr>{_cell('th', row[0], 'font-weight:normal;')}{''.join(_cell('td', cell) for cell in row[1:])}</tr>"
        for row in rows
    )
    below = f'<div style="opacity:0.7;padding:0.3em 0.8em">{escape(caption)}</div>' if caption else ""
    return (
        f'<div style="overflow-x:auto"><table style="{TABLE}text-align:left">'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{below}</div>"
    )


def _cell(tag: str, text: str, style: str = "") -> str:
    return f'<{tag} style="{CELL}{style}white-space:pre-wrap;max-width:28em">{escape(text)}</{tag}>'


@dataclass(frozen=True)
class Tenant:
    """Who has a slot: its name, what the legend says of it, and a number that gives its colour."""

    name: str
    legend: str
    number: int


@dataclass(frozen=True)
class Bar:
    """A bar of a picture: used: slot -> its share of `total`; amount and size stand beside it."""

    label: str
    used: Mapping[int, int]
    total: int
    amount: str
    size: str


def bar_picture(title: str, tenants: Mapping[int, Tenant], bars: Sequence[Bar], footer: str) -> str:
    """HTML: a bar of full width per row, its parts coloured by the slots' tenants, what is left of it free. Where
    styles are taken out, the names in the bars remain.
    """
    swatch = "display:inline-block;width:0.9em;height:0.9em;vertical-align:-0.1em;margin-right:0.3em;"
    keys = " ".join(
        f'<span style="margin-right:1.2em;white-space:nowrap"><span style="{swatch}background:{_colour(tenant)}">'
        f"</span>{escape(tenant.legend)}</span>"
        for tenant in tenants.values()
    )
    rows = "".join(_bar_row(bar, tenants) for bar in bars)
    table = f'<table style="{TABLE}width:100%"><tbody>{rows}</tbody></table>' if bars else ""
    line = "padding:0.2em 0"
    return (
        f'<div style="max-width:56em"><div style="{line}">{escape(title)}</div><div style="{line}">{keys}</div>'
        f'{table}<div style="{line}">{escape(footer)}</div></div>'
    )


def _bar_row(bar: Bar, tenants: Mapping[int, Tenant]) -> str:
    parts = [(bar.used[slot], tenants[slot].name, _colour(tenants[slot])) for slot in sorted(bar.used)]
    parts.append((bar.total - sum(bar.used.values()), "free", "transparent"))
    spans = "".join(
        f'<span title="{escape(name)}: {amount} of {bar.total}" style="width:{100 * amount / bar.total:.2f}%;'
        f"background:{colour};overflow:hidden;text-overflow:ellipsis;white-space:nowrap;box-sizing:border-box;"
        f'padding:0 0.3em;{"opacity:0.6;" if colour == "transparent" else ""}">{escape(name)}</span> '
        for amount, name, colour in parts
        if amount
    )
    cell = "text-align:left;white-space:nowrap;padding:0.15em 0.6em 0.15em 0;background:transparent;"
    inside = f"display:flex;border:{LINE};border-radius:3px;overflow:hidden;line-height:1.5;min-height:1.5em"
    return (
        f'<tr style="background:transparent"><th style="{cell}font-weight:normal">{escape(bar.label)}</th>'
        f'<td style="{cell}width:70%;max-width:0"><div style="{inside}">{spans}</div></td>'
        f'<td style="{cell}text-align:right">{escape(bar.amount)}</td>'
        f'<td style="{cell}text-align:right">{escape(bar.size)}</td></tr>'
    )


def _colour(tenant: Tenant) -> str:
    """Hues far apart for neighbouring numbers; half transparent, so that text reads on light and dark pages."""
    return f"hsla({(72.5 + tenant.number * 137.5) % 360:.0f},65%,50%,0.5)"
