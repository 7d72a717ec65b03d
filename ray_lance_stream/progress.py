"""Where a run stands, on the driver: one line that is written again on a terminal, a line now and then in a log."""

from __future__ import annotations

import logging
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable
from typing import Final, TextIO

from ray_lance_stream.stats import StreamStats

logger = logging.getLogger("ray_lance_stream")
SWITCH: Final = "RAY_LANCE_STREAM_PROGRESS"  # environment: 0 shows none, whatever the program says
_LOOK_EVERY_S: Final = 0.5
_LOG_EVERY_S: Final = 10.0
_BAR: Final = 24  # characters
_LEAST_COLUMNS: Final = 60  # narrower, and a line that is written again tells nothing
_CLEAR: Final = "\r\x1b[K"


class Progress:
    """Shows a run while it is within the ``with`` block; see ``LanceStream.progress``.

    Args:
        stats_of: Returns what the run does.
        epochs: How many epochs it has, if that is known.
        out: Where to write.
        log_every_s: Where ``out`` is no terminal: seconds between two lines.
    """

    def __init__(
        self,
        stats_of: Callable[[], StreamStats],
        *,
        epochs: int | None = None,
        out: TextIO | None = None,
        log_every_s: float = _LOG_EVERY_S,
    ) -> None:
        self._stats_of = stats_of
        self._epochs = epochs
        self._out = sys.stderr if out is None else out
        self._log_every_s = log_every_s
        self._done = threading.Event()
        self._thread: threading.Thread | None = None
        self._last: StreamStats | None = None  # with workers in it
        self._num_steps = 0  # of an epoch

    def __enter__(self) -> Progress:
        if os.environ.get(SWITCH, "1") != "0":
            self._done.clear()
            self._thread = threading.Thread(target=self._show, name="lance-stream-progress", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        thread, self._thread = self._thread, None
        if thread is not None:
            self._done.set()
            thread.join()

    def _show(self) -> None:
        is_terminal = self._out.isatty() and _columns() >= _LEAST_COLUMNS
        written_at, began = float("-inf"), time.monotonic()
        try:
            while not self._done.wait(_LOOK_EVERY_S):
                now = time.monotonic()
                if is_terminal:
                    self._write(f"{_CLEAR}{self.line(self._stats_of(), with_bar=True)[: _columns() - 1]}")
                elif now - written_at >= self._log_every_s:
                    written_at = now
                    self._write(f"{now - began:5.0f} s  {self.line(self._stats_of())}\n")
            last = self._stats_of()  # the steps since it was asked last
            if not last.ranks:
                last = self._last or last  # its actors have ended
            if last.ranks:
                line = self.line(last, with_bar=is_terminal)
                self._write(f"{_CLEAR}{line}\n" if is_terminal else f"{time.monotonic() - began:5.0f} s  {line}\n")
            elif is_terminal:
                self._write(_CLEAR)
        except Exception:  # whatever it is, the run goes on without being shown
            logger.warning("progress is not shown any longer", exc_info=True)

    def _write(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()

    def line(self, stats: StreamStats, *, with_bar: bool = False) -> str:
        """Returns what is shown of a run; one without workers stands where it was seen last.

        Args:
            stats: The run.
            with_bar: Whether to draw how much is done.
        """
        seen = stats if stats.ranks else self._last
        if seen is None:
            return "starting workers"
        if stats.ranks:
            self._last = stats
        epoch, step = seen.epoch_and_step
        num_steps = self._num_steps = max(rank.num_steps for rank in seen.ranks) or self._num_steps
        parts = [f"epoch {epoch}{_of(self._epochs)}, step {step}{_of(num_steps)}"]
        if with_bar and num_steps:
            parts.insert(0, self._bar(epoch, step, num_steps))
        if not stats.ranks:
            return "  ".join([*parts, "restarting workers"])
        parts += [
            f"{seen.rows_per_s:,.0f} rows/s",
            f"{seen.wait_share:.0%} waiting",
            f"{_plural(seen.world_size, 'worker')}",
            f"{_plural(seen.working, 'prefetcher')}",
        ]
        if seen.restarts:
            parts.append(_plural(seen.restarts, "restart"))
        return "  ".join(parts)

    def _bar(self, epoch: int, step: int, num_steps: int) -> str:
        done, whole = (
            (step, num_steps) if self._epochs is None else (epoch * num_steps + step, self._epochs * num_steps)
        )
        share = min(1.0, done / max(1, whole))
        filled = int(share * _BAR)
        return f"{share:4.0%} [{'#' * filled}{'.' * (_BAR - filled)}]"


def _columns() -> int:
    return shutil.get_terminal_size((80, 24)).columns


def _of(whole: int | None) -> str:
    return f"/{whole}" if whole else ""


def _plural(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"
