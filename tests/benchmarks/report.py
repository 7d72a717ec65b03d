"""What the benchmarks have in common: lines of results, with what each should be at most or at least."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import platform
import statistics
import timeit
from collections.abc import Sequence
from pathlib import Path
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Line:
    """One thing that was measured, once or several times.

    Attributes:
        what: What it is.
        unit: Its unit; empty for a ratio.
        values: What was measured.
        at_most: The most that the median should be; None without such a target.
        at_least: The least, likewise.
    """

    what: str
    unit: str
    values: Sequence[float]
    at_most: float | None = None
    at_least: float | None = None

    @property
    def median(self) -> float:
        """The value that counts."""
        return statistics.median(self.values)

    @property
    def missed(self) -> bool:
        """Whether there is a target, and it was not reached."""
        low = self.at_least is not None and self.median < self.at_least
        return low or (self.at_most is not None and self.median > self.at_most)

    def text(self) -> str:
        """The line of a table."""
        target = "" if self.at_most is None else f"<= {self.at_most:,.6g}"
        target = target if self.at_least is None else f">= {self.at_least:,.6g}"
        spread = f"{_short(self.median)}"
        if len(self.values) > 1:
            spread += f" ({_short(min(self.values))} to {_short(max(self.values))})"
        return f"{self.what:66} {target:>10} {spread:>34} {self.unit}{'  MISSED' if self.missed else ''}".rstrip()


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


@functools.cache
def machine() -> str:
    """Where this was measured, and how fast Python is there: a million additions in a loop, the best of three."""
    took = min(timeit.repeat("for _ in range(10**6): n += 1", "n = 0", number=1, repeat=3))
    where = f"{os.cpu_count()} CPUs, {platform.processor() or platform.machine()}, Python {platform.python_version()}"
    return f"{where}, 10**6 additions in {1e3 * took:.0f} ms"


def show(lines: Sequence[Line]) -> None:
    """Prints a table: medians, with the least and the most."""
    print(f"\n{machine()}\n{'':66} {'target':>10} {'measured':>34}")
    for line in lines:
        print(line.text(), flush=True)


def save(lines: Sequence[Line], path: Path, details: Any = None) -> None:
    """Writes lines as JSON, and whatever else was found."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"machine": machine(), "lines": [dataclasses.asdict(line) for line in lines], "details": details}
    path.write_text(json.dumps(content, indent=1))


def load(path: Path) -> list[Line]:
    """Reads the lines that :func:`save` wrote."""
    return [Line(**line) for line in json.loads(path.read_text())["lines"]]
