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

from ray_lance_stream.stats import SILENT_S, StreamStats

logger = logging.getLogger("ray_lance_stream")
SWITCH: Final = "RAY_LANCE_STREAM_PROGRESS"  # environment: 0 shows none, whatever the program says
_LOOK_EVERY_S: Final = 0.5
_LOG_EVERY_S: Final = 10.0
_ASK_AFTER_S: Final = 5.0  # without workers, why there are none
_BAR, _LEAST_BAR = 24, 6  # characters
_LEAST_COLUMNS: Final = 60  # narrower, and a line that is written again tells nothing
_CLEAR: Final = "\r\x1b[K"


class Progress:
    """Shows a run while it is within the ``with`` block; see ``LanceStream.progress``.

    Args:
        stats_of: Returns what the run does.
        lacking: Returns what there is no room for, where workers are not started; None where that is not known.
        epochs: How many epochs it has, if that is known.
        out: Where to write.
        log_every_s: Where ``out`` is no terminal: seconds between two lines.
    """

    def __init__(
        self,
        stats_of: Callable[[], StreamStats],
        lacking: Callable[[], str | None] = lambda: None,
        *,
        epochs: int | None = None,
        out: TextIO | None = None,
        log_every_s: float = _LOG_EVERY_S,
    ) -> None:
        self._stats_of = stats_of
        self._lacking = lacking
        self._epochs = epochs
        self._out = sys.stderr if out is None else out
        self._log_every_s = log_every_s
        self._done = threading.Event()
        self._thread: threading.Thread | None = None
        self._last: StreamStats | None = None  # with workers in it
        self._without_since: float | None = None  # when there were no workers first
        self._asked_at = float("-inf")  # what they wait for
        self._reason: str | None = None
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
                    columns = _columns() - 1
                    self._write(f"{_CLEAR}{self.line(self._stats_of(), columns=columns)[:columns]}")
                elif now - written_at >= self._log_every_s:
                    written_at = now
                    self._write(f"{now - began:5.0f} s  {self.line(self._stats_of())}\n")
            last = self._stats_of()  # the steps since it was asked last
            if not last.ranks:
                last = self._last or last  # its actors have ended
            if last.ranks:
                line = self.line(last, columns=_columns() - 1 if is_terminal else None)
                self._write(f"{_CLEAR}{line}\n" if is_terminal else f"{time.monotonic() - began:5.0f} s  {line}\n")
            elif is_terminal:
                self._write(_CLEAR)
        except Exception:  # whatever it is, the run goes on without being shown
            logger.warning("progress is not shown any longer", exc_info=True)

    def _write(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()

    def line(self, stats: StreamStats, *, columns: int | None = None) -> str:
        """Returns what is shown of a run; one without workers stands where it was seen last.

        Args:
            stats: The run.
            columns: Of a terminal, where a bar is drawn in what else would stay empty.
        """
        seen = stats if stats.ranks else self._last
        if seen is None:
            # Groups that ended before their first batch, as by an error in the loop.
            again = f" (try {stats.restarts + 1})" if stats.restarts else ""
            return self._without_workers(f"starting workers{again}")
        if stats.ranks:
            self._last = stats
            if stats.silent_s <= SILENT_S:
                self._without_since = None
        epoch, step = seen.epoch_and_step
        num_steps = self._num_steps = max(rank.num_steps for rank in seen.ranks) or self._num_steps
        over = epoch == self._epochs
        parts = [f"all {_plural(epoch, 'epoch')}" if over else f"epoch {epoch}, step {step}{_of(num_steps)}"]
        if not stats.ranks or stats.silent_s > SILENT_S:
            parts.append(self._without_workers("restarting workers" if not stats.ranks else "no word from the workers"))
            return "  ".join(self._share(epoch, step, num_steps, parts, columns))
        parts += [
            f"{seen.rows_per_s:,.0f} rows/s",
            f"{seen.wait_share:.0%} waiting",
            f"{_plural(seen.world_size, 'worker')}",
            f"{_plural(seen.working, 'prefetcher')}",
        ]
        if seen.restarts:
            parts.append(_plural(seen.restarts, "restart"))
        return "  ".join(self._share(epoch, step, num_steps, parts, columns))

    def _without_workers(self, doing: str) -> str:
        """Says for how long, and after some time why."""
        now = time.monotonic()
        if self._without_since is None:
            self._without_since, self._reason = now, None
        waited_s = now - self._without_since
        if waited_s > _ASK_AFTER_S and now - self._asked_at > _ASK_AFTER_S:
            self._asked_at, self._reason = now, self._lacking()
        return f"{doing}, {waited_s:.0f} s" + (f": {self._reason}" if self._reason else "")

    def _share(self, epoch: int, step: int, num_steps: int, parts: list[str], columns: int | None) -> list[str]:
        """Puts in front how much is done: of the run, or of the epoch if the run's length is not known."""
        if not num_steps or (columns is None and self._epochs is None):
            return parts
        done, whole = (
            (step, num_steps) if self._epochs is None else (epoch * num_steps + step, self._epochs * num_steps)
        )
        share = min(1.0, done / max(1, whole))
        text = f"{share:4.0%}"
        room = 0 if columns is None else min(_BAR, columns - len("  ".join([text, *parts])) - len(" []"))
        if room >= _LEAST_BAR:
            filled = int(share * room)
            text += f" [{'#' * filled}{'.' * (room - filled)}]"
        return [text, *parts]


def _columns() -> int:
    return shutil.get_terminal_size((80, 24)).columns


def _of(whole: int | None) -> str:
    return f"/{whole}" if whole else ""


def _plural(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"
