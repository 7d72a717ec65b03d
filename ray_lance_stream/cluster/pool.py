"""The pool of prefetchers as one consumer sees it: whom to ask, and who is late. No Ray call in here."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from ray_lance_stream.cluster.meter import Meter
from ray_lance_stream.cluster.prefetcher import CONCURRENCY_GROUPS

_AT_ONCE: Final = CONCURRENCY_GROUPS["build"]
_SUSPECT_S: Final = 2.0  # how long a prefetcher that failed is passed over if there is another one; doubles
_LONGEST_SUSPECT_S: Final = 60.0
_PAST_KEPT: Final = 64
_RECENT: Final = 32  # answers that say what is usual: some rounds of a pool, so that it follows a change of load
# Four times the usual: what blocks of one stream differ by, garbage collections and short queues stay below.
_LATE_FACTOR: Final = 4.0
# Below a second a wait is a matter of network retries and busy cores; a second copy would not be faster.
_LATE_FLOOR_S: Final = 1.0
# Where nothing is known yet, or not of blocks of such a size: by then a trainer has long stood still.
_LATE_CAP_S: Final = 30.0


@dataclass(eq=False)
class Member:
    """A prefetcher of the pool.

    Attributes:
        actor: Its handle.
        calls: What it was asked for and has not answered, oldest first.
        failures: How often it failed, one after the other.
        suspect_until: Others are preferred until then.
        near: Whether it is preferred among equals, being on this node.
        silent: Whether it does not answer the coordinator, either.
    """

    actor: Any
    calls: list[Call] = field(default_factory=list, repr=False)
    failures: int = 0
    suspect_until: float = 0.0
    near: bool = False
    silent: bool = False

    @property
    def id(self) -> str:
        """Names the prefetcher; the same after a restart."""
        return actor_id(self.actor)

    def is_doubtful(self, now: float) -> bool:
        """Whether others are preferred."""
        return self.silent or self.suspect_until > now

    def failed(self, now: float) -> None:
        """Makes others preferred for a while. Requests that fail together, with the process, count once."""
        if now >= self.suspect_until:
            pause_s = min(_LONGEST_SUSPECT_S, _SUSPECT_S * 2 ** min(self.failures, 10))
            self.failures += 1
            self.suspect_until = now + pause_s

    def worked(self) -> None:
        """Makes it as good as any other."""
        self.failures, self.suspect_until = 0, 0.0


@dataclass(eq=False)
class Call:
    """A block asked of one prefetcher.

    Attributes:
        member: The prefetcher.
        rows: Rows of the block.
        ref: The answer to come.
        begun_at: When its building began, as far as this consumer knows: others' requests are not seen.
    """

    member: Member
    rows: int
    ref: Any = None
    begun_at: float | None = None


class Pool:
    """Members, what was asked of each, and how long answers usually take. Not thread-safe.

    Args:
        meter: Is told of every call.
    """

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._members: list[Member] = []
        self._leaving: list[Member] = []  # not asked any more, but not all has been answered
        self._past: list[Member] = []  # not asked any more, and had failed: some come again
        self._recent: deque[tuple[float, int]] = deque(maxlen=_RECENT)  # (seconds, rows) of blocks
        self._random = random.Random()  # not the module's: its numbers are the user's

    def replace(
        self, actors: list[Any], near: frozenset[str] = frozenset(), silent: frozenset[str] = frozenset()
    ) -> None:
        """Takes over who is in the pool now; what is known of those that stay is kept.

        Args:
            actors: The prefetchers; those that are not among them are not asked any more, and answer what they were.
            near: Ids of those to prefer among equals.
            silent: Ids of those to ask only where there are no others.
        """
        known = {member.actor._actor_id: member for member in self._past + self._leaving + self._members}
        self._members = [known.get(actor._actor_id) or Member(actor) for actor in actors]
        gone = [member for member in known.values() if member not in self._members]
        self._leaving = [member for member in gone if member.calls]
        self._past = [member for member in gone if member.failures][-_PAST_KEPT:]
        for member in self._members:
            member.near = bool(near) and member.id in near
            member.silent = bool(silent) and member.id in silent

    def may_ask(self) -> frozenset[str]:
        """Returns the ids of the members, and of those that have left and not answered all."""
        return frozenset(m.id for m in self._members + self._leaving if m in self._members or m.calls)

    @property
    def size(self) -> int:
        """The number of members."""
        return len(self._members)

    def calls(self) -> list[Call]:
        """Returns every call that was not answered."""
        return [call for member in self._members + self._leaving for call in member.calls]

    def best(self, now: float) -> Member:
        """Returns whom to ask: the one with the fewest open calls that has not just failed."""
        # By chance among equals: consumers that all begin with the same prefetcher would queue there.
        return min(self._members, key=lambda m: (m.is_doubtful(now), len(m.calls), not m.near, self._random.random()))

    def idle(self, now: float, besides: Sequence[Member]) -> Member | None:
        """Returns another member that could begin a block at once, None without one.

        A copy sent to a busy one would only take its turn behind what is waited for as well.
        """
        free = [m for m in self._members if m not in besides and len(m.calls) < _AT_ONCE and not m.is_doubtful(now)]
        return min(free, key=lambda m: (len(m.calls), self._random.random()), default=None)

    def add(self, call: Call, now: float) -> None:
        """Notes a call that is being sent."""
        self._meter.opened(1, now)
        call.member.calls.append(call)
        self._mark_begun(call.member, now)

    def remove(self, call: Call, now: float, *, answered: bool, lost: bool) -> None:
        """Notes the end of a call.

        Args:
            call: The call.
            now: The time.
            answered: Whether its block is the one that was handed on: those tell what is usual.
            lost: Whether its process is gone. Then so are the calls behind it, which never began.
        """
        self._meter.opened(-1, now)
        call.member.calls.remove(call)
        if answered and call.begun_at is not None:
            self._recent.append((now - call.begun_at, call.rows))
        if not lost:
            self._mark_begun(call.member, now)

    def is_late(self, call: Call, now: float, times: float = 1.0) -> bool:
        """Whether a call has waited much longer than is usual, or stands behind calls that all have.

        Args:
            call: The call.
            now: The time.
            times: How many times as long it must have waited.
        """
        if call.begun_at is not None:
            return now - call.begun_at > times * self._patience_s(call.rows)
        ahead = call.member.calls[:_AT_ONCE]
        # One at the front that has not begun is about to be lost with its process, as those before it were.
        return call not in ahead and all(self.is_late(other, now, times) for other in ahead)

    def _patience_s(self, rows: int) -> float:
        if not self._recent:
            return _LATE_CAP_S
        usual_s = sum(seconds for seconds, _ in self._recent) / len(self._recent)
        # Blocks grow from the first ones on, so a larger one is given its due.
        scaled_s = sum(seconds * max(1.0, rows / of) for seconds, of in self._recent) / len(self._recent)
        return max(_LATE_FLOOR_S, _LATE_FACTOR * usual_s, min(_LATE_CAP_S, _LATE_FACTOR * scaled_s))

    @staticmethod
    def _mark_begun(member: Member, now: float) -> None:
        for call in member.calls[:_AT_ONCE]:
            if call.begun_at is None:
                call.begun_at = now


def actor_id(actor: Any) -> str:
    """Returns what names an actor in reports."""
    return str(actor._actor_id.hex())
