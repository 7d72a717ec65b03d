"""What a worker told the state manager lately, to be told again to a manager that has been restarted."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import ray

from ray_lance_stream.state import StreamState
from ray_lance_stream.topology import Seat

K = TypeVar("K")
V = TypeVar("V")
logger = logging.getLogger("ray_lance_stream")
_SAID_KEPT: Final = 4
_REPORTS_KEPT: Final = 2  # one answered here and not yet elsewhere, and the next
_STANDINGS_KEPT: Final = 4
STANDINGS_OF_INTEREST: Final = 32  # steps a fast worker may be ahead of a slow one when a state is collected
_RENEWAL_S: Final = 4.0  # at most: others may wait, in a report, for what this worker told a manager that died


@dataclass(frozen=True)
class Standing:
    """A state a worker has, or will have after the step it was handed."""

    epoch: int
    step: int
    state: StreamState
    partial: bool = False  # exact for the splits of this worker's replica only: rows may be skipped

    @property
    def at(self) -> tuple[int, int]:
        """(epoch, step)."""
        return self.epoch, self.step


@dataclass(frozen=True)
class Told:
    """What one worker told its manager, the last few of each kind, oldest first."""

    seat: Seat
    servable: dict[tuple[int, int], int] = field(default_factory=dict)  # by (epoch, cycle): see StateManager.agree
    reports: dict[int, Standing | None] = field(default_factory=dict)  # by number: see StateManager.commit
    standings: tuple[Standing, ...] = ()


class Memory:
    """Holds what a worker told; one thread tells, another one tells it again."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seat: Seat | None = None
        self._servable: dict[tuple[int, int], int] = {}
        self._reports: dict[int, Standing | None] = {}
        self._standings: dict[tuple[int, int], Standing] = {}  # by their places

    @property
    def told(self) -> Told | None:
        """What was told lately; None if nothing was."""
        with self._lock:
            if self._seat is None:
                return None
            standings = tuple(self._standings.values())
            return Told(self._seat, dict(self._servable), dict(self._reports), standings)

    def say(self, seat: Seat, place: tuple[int, int], servable: int) -> dict[tuple[int, int], int]:
        """Notes up to which cycle this replica can serve; returns it with what was said before."""
        with self._lock:
            self._sit(seat)
            keep_latest(self._servable, place, servable, _SAID_KEPT)
            return dict(self._servable)

    def report(self, seat: Seat, number: int, standing: Standing | None) -> None:
        """Notes a report of this worker."""
        with self._lock:
            self._sit(seat)
            keep_latest(self._reports, number, standing, _REPORTS_KEPT)

    def stand(self, seat: Seat, standing: Standing) -> None:
        """Notes where this worker stands, or will stand; called for every batch, before the loop gets it."""
        with self._lock:
            self._sit(seat)
            keep_latest(self._standings, standing.at, standing, _STANDINGS_KEPT)

    def _sit(self, seat: Seat) -> None:
        if seat is not self._seat and seat != self._seat:
            self._servable, self._reports, self._standings = {}, {}, {}
        self._seat = seat


def keep_latest(known: dict[K, V], key: K, value: V, most: int) -> None:
    """Puts a value at the end, in place of an older one of its key, and drops the first if there are too many."""
    known.pop(key, None)
    known[key] = value
    if len(known) > most:
        del known[next(iter(known))]


def keep_alive(session: Any, holder: str, stop: threading.Event, memory: Memory) -> None:
    """Renews a session's leases until ``stop`` is set, on a thread that refers to nothing else of the shard.

    A manager that answers under another start than before has forgotten: it is told again.
    """

    every_s = min(session.prefetch.idle_timeout_s / 4, _RENEWAL_S)

    def renew() -> None:
        failed, start = False, None
        while not stop.is_set() and ray.is_initialized():
            try:
                _, answer = session.renew(holder)
                if ray.wait([answer], timeout=every_s)[0]:  # a slow manager must not cost the coordinator its lease
                    before, start = start, ray.get(answer)
                    if before != start and memory.told is not None:
                        session.manager.remember.options(max_task_retries=0).remote(memory.told)
                    failed = False
            except Exception:  # whatever it is, the next renewal may work, and without any the stream ends
                if not failed and not stop.is_set():  # the actors of a shard that was closed may end at once
                    logger.warning("could not renew the stream's lease; trying again", exc_info=True)
                failed = True
            stop.wait(every_s)

    threading.Thread(target=renew, name="lance-stream-lease", daemon=True).start()
