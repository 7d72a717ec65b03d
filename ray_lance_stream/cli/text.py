"""Lines and tables as people read them, and JSON as programs do."""

from __future__ import annotations

import base64
import json
import math
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final

import click

_UNITS: Final = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB")
_LIST_ITEMS: Final = 4  # of a list in a cell
_LEAST_WIDTH: Final = 8  # of a column that is cut
_GAP: Final = "  "


def width() -> int:
    """Returns the terminal's width in characters; 80 where there is none."""
    return max(40, shutil.get_terminal_size((80, 24)).columns)


def facts(pairs: Sequence[tuple[str, str]]) -> str:
    """Returns names and what is said of them in two columns, wrapped to the terminal."""
    formatter = click.HelpFormatter(width=width())
    formatter.indent()
    formatter.write_dl(list(pairs))
    return formatter.getvalue().rstrip("\n")


def table(header: Sequence[str], rows: Sequence[Sequence[str]], *, left: Sequence[int] = ()) -> str:
    """Returns a table; columns are aligned to the right except those whose indices are in ``left``.

    Those give way where the table is wider than the terminal: they are cut, the widest first.
    """
    widths = _widths(header, rows)
    # What a program reads, or a file keeps, has no width.
    known = sys.stdout.isatty() or "COLUMNS" in os.environ
    for _ in range(max(0, table_width(header, rows) - width()) if known else 0):
        widest = max(left, key=lambda i: widths[i], default=None)
        if widest is None or widths[widest] <= _LEAST_WIDTH:
            break
        widths[widest] -= 1
    lines = []
    for row in (header, *rows):
        cells = [
            shortened(cell, size).ljust(size) if i in left else cell.rjust(size)
            for i, (cell, size) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append((_GAP + _GAP.join(cells)).rstrip())
    return "\n".join(lines)


def table_width(header: Sequence[str], rows: Sequence[Sequence[str]]) -> int:
    """Returns how many characters wide a table is if nothing is cut."""
    return sum(_widths(header, rows)) + len(_GAP) * len(header)


def _widths(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[int]:
    return [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]


def shortened(text: str, size: int) -> str:
    """Returns a text of at most ``size`` characters."""
    return text if len(text) <= size else text[: size - 3] + "..."


def printable(text: object) -> str:
    """Returns a text that came from a file without what would move a terminal's cursor or change its colours."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(text))


def plural(number: int, noun: str, many: str | None = None) -> str:
    """Returns "1 row", "2 rows"."""
    return f"{number:,} {noun if number == 1 else many or noun + 's'}"


def span(noun: str, first: int, last: int) -> str:
    """Returns "step 3", "steps 3 to 5"."""
    return f"{noun} {first:,}" if first == last else f"{noun}s {first:,} to {last:,}"


def number(value: float) -> str:
    """Returns a count with thousands separated."""
    return f"{value:,.0f}"


def size(num_bytes: float) -> str:
    """Returns a size in the largest unit that leaves at least 1."""
    unit = 0
    while num_bytes >= 1024 and unit < len(_UNITS) - 1:
        num_bytes, unit = num_bytes / 1024, unit + 1
    return f"{num_bytes:,.0f} {_UNITS[unit]}" if unit == 0 or num_bytes >= 100 else f"{num_bytes:,.1f} {_UNITS[unit]}"


def cell(value: object) -> str:
    """Returns a table's value in a few characters."""
    if isinstance(value, (bytes, bytearray)):
        return f"<{plural(len(value), 'byte')}>"
    if isinstance(value, list):
        shown = ", ".join(cell(item) for item in value[:_LIST_ITEMS])
        # The number first: the end of a cell is what is cut.
        return f"[{shown}]" if len(value) <= _LIST_ITEMS else f"[{len(value):,} values: {shown}, ...]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{printable(name)}: {cell(item)}" for name, item in value.items()) + "}"
    if isinstance(value, float):
        return f"{value:.6g}"
    return "null" if value is None else printable(value)


def as_json(value: object) -> str:
    """Returns strict JSON: bytes in base64, dates and decimals as text, what is no number (NaN) as null."""
    return json.dumps(_plain(value), indent=2, allow_nan=False)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, (bytes, bytearray)):
        return base64.b64encode(value).decode()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, (bool, int, str)) else str(value)
