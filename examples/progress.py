"""Shows on the driver where a run stands: a bar on a terminal, a line every few seconds in a job's log."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from tqdm import tqdm

from ray_lance_stream import LanceStream

_POLL_S = 0.5
_LINE_EVERY_S = 5.0
_LEAST_COLUMNS = 60  # narrower, or of unknown width (0), and a bar tells nothing


class Progress:
    """The steps of a run that may take several calls of ``fit()``.

    Args:
        stream: Asked where it stands, which its state manager knows; the workers are not disturbed.
        steps_per_epoch: Steps of an epoch.
        epochs: Epochs of the run.
    """

    def __init__(self, stream: LanceStream, steps_per_epoch: int, epochs: int) -> None:
        self._stream = stream
        self._steps_per_epoch = steps_per_epoch
        self.total = steps_per_epoch * epochs

    def step_of_run(self, epoch: int, step: int) -> int:
        """Counts a step of an epoch from the start of the run."""
        return min(epoch * self._steps_per_epoch + step, self.total)

    @contextmanager
    def part(self, starting: str, start: int = 0) -> Iterator[None]:
        """Shows one call of ``fit()``.

        Args:
            starting: What happens until its first step.
            start: The step it goes on from.
        """
        done = threading.Event()
        thread = threading.Thread(target=self._show, args=(starting, start, done))
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def _show(self, starting: str, start: int, done: threading.Event) -> None:
        began = told = first_at = time.monotonic()
        first: int | None = None  # the first step seen: rates count from there, not from the start of the workers
        has_bar = _has_bar()
        with tqdm(total=self.total, initial=start, desc=starting, unit="step", smoothing=0, disable=not has_bar) as bar:
            if not has_bar:
                say(f"{starting} ...")
            ended = False
            while not ended:
                ended = done.wait(_POLL_S)
                now, n, description = time.monotonic(), start, starting
                for run in self._stream.where():
                    if run.world_size:
                        n = self.step_of_run(*run.epoch_and_step)
                        description = f"training, {run.world_size} workers"
                if n > start and first is None:
                    first_at, first = now, n
                    bar.start_t, bar.initial = time.time(), n
                if has_bar:
                    bar.n = n
                    bar.set_description(description)
                elif ended or now - told >= _LINE_EVERY_S:
                    told = now
                    rate = f", {(n - first) / (now - first_at):.1f} steps/s" if first is not None and n > first else ""
                    say(f"{now - began:4.0f} s  {description}: step {n} of {self.total}{rate}")


def _has_bar() -> bool:
    if not sys.stderr.isatty():
        return False
    return os.get_terminal_size(sys.stderr.fileno()).columns >= _LEAST_COLUMNS


def say(line: str) -> None:
    """Prints a line of what goes on, apart from the results."""
    print(line, file=sys.stderr, flush=True)
