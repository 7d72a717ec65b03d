"""Measures: what one consumer sees of the pool, and how busy a prefetcher is. No Ray call in here."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

from ray_lance_stream.cluster.sizing import Load


class Meter:
    """Adds up over time; any thread may use it.

    Args:
        now: The time, on the clock of whoever calls :meth:`opened` and :meth:`read`.
    """

    def __init__(self, now: float) -> None:
        self._lock = threading.Lock()
        self._open = 0
        self._open_s = 0.0  # requests, times the seconds that each was open
        self._counted_at = self._read_at = now
        self._waited_s = 0.0

    def opened(self, change: int, now: float) -> None:
        """Notes requests that are sent (``change`` > 0) or settled."""
        with self._lock:
            self._count(now)
            self._open += change

    def waited(self, seconds: float) -> None:
        """Notes a wait for a block."""
        with self._lock:
            self._waited_s += seconds

    def read(self, now: float) -> Load:
        """Returns what was seen since the last call, or since the start."""
        with self._lock:
            self._count(now)
            span_s = now - self._read_at
            if span_s <= 0:
                return Load(waited=0.0, requests=float(self._open))
            load = Load(waited=min(1.0, self._waited_s / span_s), requests=self._open_s / span_s)
            self._read_at, self._open_s, self._waited_s = now, 0.0, 0.0
        return load

    def _count(self, now: float) -> None:
        self._open_s += self._open * max(0.0, now - self._counted_at)
        self._counted_at = now


class Answer(Future[Any]):
    """The future of a block; says how long a reader stood still for it."""

    def __init__(self, meter: Meter) -> None:
        super().__init__()
        self._meter = meter

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Waits, as ``Future.exception``; readers wait in short turns, so that long waits are seen while they last."""
        if self.done():
            return super().exception()
        began = time.monotonic()
        try:
            return super().exception(timeout)
        finally:
            self._meter.waited(time.monotonic() - began)


class BusyTime:
    """The time in which at least one block was being built; any thread may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._total_s = 0.0
        self._since = 0.0
        self.blocks = 0  # being built

    @contextlib.contextmanager
    def block(self) -> Iterator[None]:
        """Counts the time within."""
        with self._lock:
            self._since = time.monotonic() if not self.blocks else self._since
            self.blocks += 1
        try:
            yield
        finally:
            with self._lock:
                self.blocks -= 1
                if not self.blocks:
                    self._total_s += time.monotonic() - self._since

    def total_s(self, now: float) -> float:
        """Returns the seconds so far, on ``time.monotonic``'s clock."""
        with self._lock:
            return self._total_s + (now - self._since if self.blocks else 0.0)
