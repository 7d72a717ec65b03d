"""How long a loop waits for its batches: totals, percentiles, and the wait under way. Numbers in, numbers out."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Final

_LEAST_S: Final = 1e-4  # a shorter wait is none
_PER_DECADE: Final = 8  # buckets: a percentile is right within a sixth
_DECADES: Final = 7  # up to 1000 s
_BOUNDS: Final = tuple(_LEAST_S * 10 ** (i / _PER_DECADE) for i in range(_DECADES * _PER_DECADE + 1))


class WaitHistogram:
    """Counts waits in buckets of fixed bounds, each a third wider than the one before; its size never changes.

    One thread adds; any may read.
    """

    def __init__(self) -> None:
        self._counts = [0] * (len(_BOUNDS) + 1)
        self._longest_s = 0.0

    def add(self, seconds: float) -> None:
        """Counts a wait."""
        self._counts[bisect_left(_BOUNDS, seconds)] += 1
        self._longest_s = max(self._longest_s, seconds)

    def percentiles(self, shares: Sequence[float]) -> list[float]:
        """Returns what these parts of the waits, 0 to 1, did not exceed, in seconds; 0 where there were none."""
        counts = list(self._counts)
        total = sum(counts)
        return [self._percentile(counts, total * share) for share in shares]

    def _percentile(self, counts: Sequence[int], wanted: float) -> float:
        passed = 0
        for index, count in enumerate(counts):
            if count and passed + count >= wanted:
                low = _BOUNDS[index - 1] if index else 0.0
                high = min(_BOUNDS[index] if index < len(_BOUNDS) else self._longest_s, self._longest_s)
                return low + max(0.0, high - low) * max(0.0, wanted - passed) / count
            passed += count
        return 0.0


class LoopClock:
    """Adds up what one training loop waits and works. The loop's thread writes; any may read.

    All times in seconds on ``time.perf_counter``'s clock.
    """

    def __init__(self) -> None:
        self.wait_s = self.train_s = 0.0
        self.histogram = WaitHistogram()
        self._waits_since: float | None = None

    def asked(self, now: float, works_since: float | None) -> None:
        """Notes that a batch is asked for.

        Args:
            now: The time.
            works_since: Since when the loop has worked on the last one; None if this is its first.
        """
        if works_since is not None:
            self.train_s += now - works_since
        self._waits_since = now

    def handed(self, now: float) -> None:
        """Notes that it is handed over, or will not come."""
        since, self._waits_since = self._waits_since, None
        if since is not None:
            self.wait_s += now - since
            self.histogram.add(now - since)

    def waiting_s(self, now: float) -> float:
        """Returns how long the wait under way has lasted; 0 without one."""
        since = self._waits_since
        return 0.0 if since is None else max(0.0, now - since)


class Patience:
    """Says when a wait is to be told of: after some seconds, and then at intervals that grow with it.

    Args:
        first_s: When it is told of first.
        longest_s: The longest interval.
    """

    def __init__(self, first_s: float = 5.0, longest_s: float = 300.0) -> None:
        self._first_s, self._longest_s = first_s, longest_s
        self._next_s = first_s

    def is_over(self, waited_s: float) -> bool:
        """Whether to say now that the wait under way has lasted so long."""
        if waited_s < self._first_s:
            self._next_s = self._first_s  # another wait
        if waited_s < self._next_s:
            return False
        self._next_s = waited_s + min(waited_s, self._longest_s)
        return True
