"""What happens to the run: processes killed, nodes lost, taken with notice, and added, in an order that a seed says."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any, Final

import psutil

from soak.cluster import Nodes, Process
from soak.steplog import Following
from soak.training import MOST_WORKERS

# Faults are dealt from a deck, so that a short run sees every kind. True: the training workers start again.
RESTARTS: Final = {
    "worker killed": True,
    "trainer node lost": True,
    "trainer node preempted": True,
    "trainer node added": True,
    "prefetcher killed": False,
    "coordinator killed": False,
    "manager killed": False,
    "coordinator and manager killed": False,
    "loader node lost": False,
    "loader node preempted": False,
    "loader node added": False,
}
# What only training workers feel.
_OF_TRAINING: Final = ("worker", "trainer")
_DECK: Final = [kind for kind in RESTARTS if not kind.endswith("added")] + ["worker killed", "prefetcher killed"]
_LEAST = {"train": 1, "data": 1}
_MOST = {"train": MOST_WORKERS, "data": 2}

_NOTICE_S: Final = 12.0
_MEANWHILE: Final = 0.3  # how often something else happens during a notice, and while the run recovers
_ADD: Final = 0.5  # how often a node comes, instead of a fault, where one is missing
_STEPS: Final = (5, 40)  # between the recovery and the next fault
_RESTART_WITHIN_S: Final = 40.0  # else the node that was lost had no worker, or the new one was taken in before
_PATIENCE_S: Final = 120.0  # for a recovery; then the next fault comes all the same
_POLL_S: Final = 0.25


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that was done to the run.

    Attributes:
        time_s: Seconds since 1970; of a preemption, when the node was taken.
        kind: One of ``RESTARTS``.
        detail: Which process or node.
        noticed_s: When it was announced; None for all that come without notice.
    """

    time_s: float
    kind: str
    detail: str
    noticed_s: float | None = None

    @property
    def is_fault(self) -> bool:
        """Whether something was lost."""
        return not self.kind.endswith("added")

    @property
    def restarts(self) -> bool:
        """Whether it is meant to restart the training workers."""
        return RESTARTS[self.kind]


class Faults:
    """Does harm to a run.

    Args:
        nodes: The cluster.
        following: How far the run is.
        rng: Says what happens, and when.
        say: Told of everything that happens.
    """

    def __init__(self, nodes: Nodes, following: Following, rng: Random, say: Callable[[str], None]) -> None:
        self.events: list[Event] = []
        self._nodes = nodes
        self._following = following
        self._rng = rng
        self._say = say
        self._deck: list[str] = []
        self._spares = False

    def go_on(self, until_s: float, spare_from_s: float, is_running: Callable[[], bool]) -> None:
        """Does harm until a time, or until the run has ended.

        Args:
            until_s: Seconds since 1970.
            spare_from_s: From when on only training workers and their nodes are harmed: what feeds them then lives
                for long enough that its growth can be seen.
            is_running: Whether the run goes on.
        """

        def over() -> bool:
            return time.time() >= until_s or not is_running()

        while not over():
            before = self._following.newest()[0]
            self._spares = time.time() >= spare_from_s
            event = self._do(self._next())
            if event is None:
                continue
            if self._rng.random() < _MEANWHILE:
                self._pause(self._rng.uniform(0.5, 4.0), over)  # the next one comes while the run recovers
            else:
                self._await_recovery(event, before, over)

    def give_back(self) -> None:
        """Adds the trainer nodes that are missing.

        Ray Train waits without end for a node that it lost while it started workers there, even where it could go on
        with fewer: a run cannot be told to stop then.
        """
        while self._count("train") < _MOST["train"]:
            self._do("trainer node added")

    def _next(self) -> str:
        """Deals the next event that is possible now."""
        missing = [pool for pool in ("train", "data") if self._count(pool) < _MOST[pool]]
        if missing and self._rng.random() < _ADD:
            return "trainer node added" if self._rng.choice(missing) == "train" else "loader node added"
        skipped: list[str] = []
        while True:
            if not self._deck:
                self._deck = self._rng.sample(_DECK, len(_DECK))
            kind = self._deck.pop()
            pool = "train" if kind.startswith("trainer") else "data"
            if self._may(kind) and ("node" not in kind or self._count(pool) > _LEAST[pool]):
                self._deck += skipped  # they come when a node is there that can be lost
                return kind
            skipped.append(kind)

    def _may(self, kind: str) -> bool:
        return not self._spares or kind.startswith(_OF_TRAINING)

    def _do(self, kind: str) -> Event | None:
        """Does it; None if there is nothing to be killed at the moment."""
        noticed_s = None
        if kind.endswith("killed"):
            roles = kind.removesuffix(" killed").split(" and ")
            victims = [victim for role in roles if (victim := self._one(role)) is not None]
            with contextlib.suppress(psutil.NoSuchProcess):
                for victim in victims:
                    victim.process.kill()
            if not victims:
                time.sleep(_POLL_S)
                return None
            detail = " and ".join(f"pid {victim.process.pid}" for victim in victims)
        else:
            pool: Any = "train" if kind.startswith("trainer") else "data"
            node = self._nodes.add(pool) if kind.endswith("added") else self._rng.choice(self._nodes.of(pool))
            if kind.endswith("preempted"):
                noticed_s = time.time()
                self._nodes.announce_end(node, _NOTICE_S)
                self._say(f"{kind.removesuffix('preempted')}to be taken in {_NOTICE_S:.0f} s: {node.node_id[:8]}")
                if self._rng.random() < _MEANWHILE:
                    time.sleep(self._rng.uniform(0.0, _NOTICE_S - 2))
                    self._do(self._rng.choice([k for k in RESTARTS if k.endswith("killed") and self._may(k)]))
                time.sleep(max(0.0, noticed_s + _NOTICE_S - time.time()))
            detail = f"node {node.node_id[:8]}"
            if not kind.endswith("added"):
                roles = sorted({found.role for found in self._nodes.processes_on(node)})
                detail += f" with {', '.join(roles)}" if roles else ""
                self._nodes.lose(node)
        event = Event(time_s=time.time(), kind=kind, detail=detail, noticed_s=noticed_s)
        self.events.append(event)
        self._say(f"{kind}: {detail}")
        return event

    def _await_recovery(self, event: Event, before: int, over: Callable[[], bool]) -> None:
        """Waits until the run has done some steps after an event, in a new worker group if it makes one start."""
        steps, first = self._rng.randint(*_STEPS), self._following.newest()
        began = time.monotonic()
        while not over():
            group, done = self._following.newest()
            if group == first[0]:
                done -= first[1]
            restarts = event.restarts and time.monotonic() - began < _RESTART_WITHIN_S
            if done >= steps and not (restarts and group == before):
                return
            if time.monotonic() - began > _PATIENCE_S:
                self._say(f"no recovery within {_PATIENCE_S:.0f} s of: {event.kind}")
                return
            time.sleep(_POLL_S)

    def _pause(self, seconds: float, over: Callable[[], bool]) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end and not over():
            time.sleep(_POLL_S)

    def _one(self, role: str) -> Process | None:
        found = [process for process in self._nodes.processes() if process.role == role]
        return self._rng.choice(sorted(found, key=lambda p: p.process.pid)) if found else None

    def _count(self, pool: Any) -> int:
        return len(self._nodes.of(pool))
