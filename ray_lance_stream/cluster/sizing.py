"""How many prefetchers there should be: what consumers saw goes in, a number comes out. No Ray and no clock in here.

A reader always asks for as much as its budget allows. So what is not an open request is in a buffer: while more
requests are open than prefetchers can work on, and somebody waits, more prefetchers help; while so few are open that
a smaller pool would serve them with ease, buffers are full.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

_WAITS: Final = 0.05  # of the time: below it, waiting is no matter of the pool's size
_GROW_AFTER: Final = 3  # observations in a row: every epoch begins with blocks that are waited for
_MOST_PENDING: Final = 4  # prefetchers that may be starting: each may make the autoscaler start a node
# How busy a smaller pool would be at most. The rest is what tells a shrinking from the next growing.
_MOST_USED: Final = 0.7
_LONGEST_HOLD_S: Final = 600.0


@dataclass(frozen=True, kw_only=True)
class Load:
    """What one consumer saw since its last report.

    Attributes:
        waited: The part of the time in which its reader stood still for a block, 0 to 1.
        requests: Requests it had open, on average over the time.
    """

    waited: float
    requests: float


class Sizing:
    """The rule, with what it remembers of the last observations.

    Args:
        least: The fewest prefetchers.
        most: The most.
        hold_s: How long there must have been little to do before the pool shrinks; doubles, up to ten minutes,
            whenever the pool had to grow again after it.
    """

    def __init__(self, least: int, most: int, hold_s: float) -> None:
        self._least, self._most = least, most
        self._hold_s = hold_s
        self._starved = 0  # observations in a row
        self._idle_since: float | None = None
        self._peak = 0.0  # most requests since then
        self._unwanted_since: float | None = None  # prefetchers have been pending and nobody starved
        self._has_shrunk = False

    def observe(self, now: float, loads: Sequence[Load], *, running: int, pending: int) -> int:
        """Returns how many prefetchers there should be.

        Args:
            now: The time in seconds, on any clock that does not go back.
            loads: The last report of every consumer. The one that waits most decides; without any, nothing changes.
            running: Prefetchers that work. Where none does, nothing changes.
            pending: Prefetchers that are wanted and do not work yet, or not at present.
        """
        target = running + pending
        if not loads or not running:  # nobody says anything, or could ask anybody for anything
            self._starved, self._idle_since, self._unwanted_since = 0, None, None
        else:
            requests = sum(load.requests for load in loads)
            waits = max(load.waited for load in loads) >= _WAITS
            if waits and requests > running:
                target = self._grown(requests, running, pending)
            else:
                self._starved = 0
                target = self._shrunk(now, requests, waits, running, pending)
        return max(self._least, min(self._most, target))

    def _grown(self, requests: float, running: int, pending: int) -> int:
        self._idle_since = self._unwanted_since = None
        self._starved += 1
        size = running + pending
        # It may double, within bounds, and one that would find nothing to do is of no use.
        room = min(max(1, running), _MOST_PENDING) - pending
        more = min(room, self._most - size, int(requests) - size)
        if self._starved < _GROW_AFTER or more <= 0:
            return size
        if self._has_shrunk:  # it was too early
            self._has_shrunk, self._hold_s = False, max(self._hold_s, min(_LONGEST_HOLD_S, 2 * self._hold_s))
        self._starved = 0
        return size + more

    def _shrunk(self, now: float, requests: float, waits: bool, running: int, pending: int) -> int:
        size = running + pending
        self._unwanted_since = (now if self._unwanted_since is None else self._unwanted_since) if pending else None
        if waits or requests > _MOST_USED * (size - 1):
            self._idle_since = None
        elif self._idle_since is None:
            self._idle_since, self._peak = now, requests
        self._peak = max(self._peak, requests)
        target = size
        if self._has_held(self._idle_since, now):
            # By half at most, and to what the busiest observation needs.
            target = max(size // 2, math.ceil(self._peak / _MOST_USED))
        elif self._has_held(self._unwanted_since, now):
            target = running
        target = max(self._least, target)
        if target >= size:
            return size
        self._idle_since = self._unwanted_since = None
        self._has_shrunk = True
        return target

    def _has_held(self, since: float | None, now: float) -> bool:
        return since is not None and now - since >= self._hold_s
