"""The prefetchers of a run, as its coordinator keeps them: started, watched, made more or fewer, and let go."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import Counter, deque
from collections.abc import Callable
from typing import Any, Final

import ray
from ray.exceptions import RayError, RuntimeEnvSetupError

from ray_lance_stream.cluster.hand import Hand
from ray_lance_stream.cluster.prefetcher import CONCURRENCY_GROUPS
from ray_lance_stream.cluster.reports import REPORT_EVERY_S, PoolView, Report
from ray_lance_stream.cluster.sightings import Sightings
from ray_lance_stream.cluster.sizing import Sizing
from ray_lance_stream.config import PrefetchConfig
from ray_lance_stream.stats import PoolSize, StreamStats
from ray_lance_stream.verdict import stream_verdict

logger = logging.getLogger("ray_lance_stream")
_RETRY_PAUSE_S: Final = 0.5
_PROBE_EVERY_S: Final = 2.0
_ANSWER_WITHIN_S: Final = 5.0  # the call has a thread of its own: who needs longer hangs, or is gone
_DECIDE_EVERY_S: Final = REPORT_EVERY_S
_SILENT_S: Final = 10 * REPORT_EVERY_S  # a consumer that has not reported for so long is not there any more
# A consumer that has just asked who is in the pool reports by then for the first time.
_GRACE_S: Final = 3 * REPORT_EVERY_S
_HISTORY: Final = 256
_REPLACE_AFTER_S: Final = 30.0  # one that cannot start, with another one: its node may be to blame, or have been full


class Roster:
    """Keeps as many prefetchers as the consumers' reports call for. Lives on one event loop, so it needs no lock.

    What is learned from reports can be learned anew: after a restart of the coordinator the pool begins with as many
    as its consumers knew before.

    Args:
        config: The bounds, and how fast the pool shrinks.
        start: Starts the prefetcher of an index.
        id_of: Returns the id of an actor, as consumers report it.
    """

    def __init__(self, config: PrefetchConfig, start: Callable[[int], Any], id_of: Callable[[Any], str]) -> None:
        self._config = config
        self._start = start
        self._id_of = id_of
        self._life = uuid.uuid4().hex
        self._groups = 0  # of workers, that were started
        self._sizing = Sizing(config.min_actors, config.max_actors, config.shrink_after_s)
        self._hands: list[Hand] = []
        self._reports: dict[str, tuple[float, Report]] = {}  # by holder: when it came, and what it says
        self._known_before = 0  # prefetchers that consumers knew before this coordinator was restarted
        self._decide: asyncio.Task[None] | None = None
        self.incarnation = 0
        self._history: deque[PoolSize] = deque(maxlen=_HISTORY)
        self._sightings = Sightings()
        self._resize(config.min_actors)

    # ------------------------------------------------------------------ who is there

    @property
    def ready(self) -> list[Hand]:
        """Those that consumers may ask: they have started, though one may be gone and on its way back."""
        return [hand for hand in self._wanted if hand.node is not None and hand.broken is None]

    @property
    def started(self) -> list[Any]:
        """The handles of all that may have requests to answer, those that are being let go among them."""
        return [hand.actor for hand in self._hands if hand.node is not None]

    @property
    def broken(self) -> list[Exception]:
        """Why some cannot start."""
        return [hand.broken for hand in self._wanted if hand.broken is not None]

    @property
    def size(self) -> int:
        """How many there should be."""
        return len(self._wanted)

    def sizes(self) -> tuple[PoolSize, ...]:
        """Returns how many there were, from when on; the last entry says how many there are."""
        self._note()
        return tuple(self._history)

    def stats(self) -> StreamStats:
        """Returns what is known of consumers and prefetchers; without the session's name."""
        seen, now = self._sightings, time.monotonic()
        seen.keep(list(self._reports), [hand.id for hand in self._hands])
        ranks = seen.ranks(now, {hand.id: hand.index for hand in self._hands})
        hands = sorted(self._hands, key=lambda hand: hand.index)
        prefetchers = tuple(seen.stats_of(hand.id, hand.index, hand.state) for hand in hands)
        return StreamStats(
            run=seen.run,
            stream=seen.stream,
            started_at=self.incarnation / 1e9,  # ids of incarnations are times
            world_size=seen.world_size,
            restarts=max(seen.restarts, self._groups - 1),
            ranks=ranks,
            prefetchers=prefetchers,
            wanted=len(self._wanted),
            verdict=stream_verdict(ranks, prefetchers),
        )

    @property
    def _wanted(self) -> list[Hand]:
        return [hand for hand in self._hands if hand.retired_at is None]

    @property
    def _running(self) -> int:
        return sum(hand.answers for hand in self._wanted)

    # ------------------------------------------------------------------ consumers

    def begin_group(self, incarnation: int) -> int:
        """Starts the incarnation of a worker group; returns how many groups there were before."""
        before, self._groups = self._groups, self._groups + 1
        self.begin(incarnation)
        return before

    def begin(self, incarnation: int) -> None:
        """Starts an incarnation: consumers of older ones count no more."""
        self.incarnation = incarnation
        self._reports.clear()
        self._sightings.begin()

    def hear(self, report: Report) -> PoolView:
        """Takes in a report; returns what the consumer should know."""
        if report.incarnation > self.incarnation:  # after a restart of the coordinator: this is how it learns of it
            self.begin(report.incarnation)
        if report.incarnation == self.incarnation:
            now = time.monotonic()
            self._reports[report.holder] = (now, report)
            self._sightings.consumer(report.holder, report, now)
            if report.sight is not None:  # as with the incarnation
                self._groups = max(self._groups, report.sight.seat.restarts + 1)
            if report.life not in ("", self._life):
                self._known_before = max(self._known_before, len(report.may_ask))
        ready = self.ready
        return PoolView(
            life=self._life,
            members=[hand.actor for hand in ready],
            near=self._near(report.node, ready),
            silent=frozenset(hand.id for hand in ready if not hand.answers),
        )

    def forget(self, holder: str) -> None:
        """Counts a consumer no more."""
        self._reports.pop(holder, None)

    def _near(self, node: str, ready: list[Hand]) -> frozenset[str]:
        """Those on a node, where they can begin a block for each of its consumers at once: else it would cost time."""
        near = frozenset(hand.id for hand in ready if hand.node == node and hand.answers)
        consumers = sum(report.node == node for _, report in self._reports.values())
        return near if consumers <= len(near) * CONCURRENCY_GROUPS["build"] else frozenset()

    # ------------------------------------------------------------------ more and fewer

    def tend(self) -> None:
        """Begins to watch and to decide; called on the event loop, and may be repeated."""
        loop = asyncio.get_running_loop()
        for hand in self._hands:
            if hand.watch is None:
                hand.watch = loop.create_task(self._watch(hand))
        if self._decide is None:
            self._decide = loop.create_task(self._keep_deciding())

    async def _keep_deciding(self) -> None:
        while True:
            await asyncio.sleep(_DECIDE_EVERY_S)
            try:
                self.decide()
                self.tend()
            except Exception:  # whatever it is, the pool is good as it is, and the next look may do better
                logger.exception("could not look after the pool of prefetchers")

    def decide(self) -> None:
        """Looks at the reports, and makes the pool what they call for."""
        now = time.monotonic()
        self._reports = {holder: (at, r) for holder, (at, r) in self._reports.items() if now - at < _SILENT_S}
        running = self._running
        loads = [report.load for _, report in self._reports.values()]
        size = self._sizing.observe(now, loads, running=running, pending=len(self._wanted) - running)
        size = max(size, min(self._config.max_actors, self._known_before))
        self._known_before = 0
        self._replace_broken(now)
        if size != len(self._wanted):
            logger.info("the pool goes from %d to %d prefetchers; %d work", len(self._wanted), size, running)
            self._resize(size)
        self._let_go(now)
        self._note()

    def _replace_broken(self, now: float) -> None:
        for hand in list(self._wanted):
            if hand.broken is not None and now - hand.broken_at > _REPLACE_AFTER_S:
                logger.info("prefetcher %d could not start: starting another one", hand.index)
                # A new index, so that one after the other is placed on every node there is.
                index = max(other.index for other in self._hands) + 1
                self._end(hand)
                self._add(index)

    def _resize(self, size: int) -> None:
        now = time.monotonic()
        while len(self._wanted) > size:
            hand = self._least_useful()
            hand.retired_at = now
            if hand.node is None:
                self._end(hand)  # nobody knows it: there is no work under way
        leaving = [hand for hand in self._hands if hand.retired_at is not None]
        while len(self._wanted) < size:
            if leaving:
                leaving.pop().retired_at = None
                continue
            self._add(next(i for i in range(len(self._hands) + 1) if all(hand.index != i for hand in self._hands)))

    def _add(self, index: int) -> None:
        actor = self._start(index)
        self._hands.append(Hand(actor, index, self._id_of(actor)))

    def _least_useful(self) -> Hand:
        """Returns whom to retire: one that does not work, or else one of the node with the fewest.

        So nodes become empty one after the other, and the autoscaler can remove them.
        """
        nodes = Counter(hand.node for hand in self._wanted)
        return min(self._wanted, key=lambda h: (h.answers, h.node is not None, nodes[h.node], -h.index))

    def _let_go(self, now: float) -> None:
        """Ends those that were retired, once nobody may ask them or waits for them any more."""
        in_use = {name for _, report in self._reports.values() for name in report.may_ask}
        for hand in list(self._hands):
            since = hand.retired_at
            if since is None or now - since < _GRACE_S or hand.opening or hand.id in in_use:
                continue
            if all(at > since for at, _ in self._reports.values()):  # else one of them does not know yet
                self._end(hand)

    def _end(self, hand: Hand) -> None:
        self._hands.remove(hand)
        ray.kill(hand.actor, no_restart=True)

    def _note(self) -> None:
        running, wanted = self._running, len(self._wanted)
        last = self._history[-1] if self._history else None
        if last is None or (last.running, last.wanted) != (running, wanted):
            self._history.append(PoolSize(at=time.time(), running=running, wanted=wanted))

    # ------------------------------------------------------------------ how they are

    async def _watch(self, hand: Hand) -> None:
        while hand.broken is None and hand in self._hands:
            asked = asyncio.ensure_future(hand.actor.workload.remote(self._sightings.run, self._sightings.stream))
            if not (await asyncio.wait({asked}, timeout=_ANSWER_WITHIN_S))[0]:
                hand.answers = False
            try:
                workload = await asked
                self._sightings.prefetcher(hand.id, workload, time.monotonic())
                if not hand.answers:
                    await hand.actor.fence.remote(self.incarnation)
                hand.node, hand.answers = workload.node, True
                await asyncio.sleep(_PROBE_EVERY_S)
            except RayError as error:
                if hand not in self._hands:
                    return
                hand.answers = False
                # Ray does not start an actor again whose constructor or environment failed.
                if isinstance(error, RuntimeEnvSetupError) or getattr(error, "actor_init_failed", False):
                    hand.broken, hand.broken_at = error, time.monotonic()
                    logger.warning("prefetcher %d cannot start: %s", hand.index, error)
                await asyncio.sleep(_RETRY_PAUSE_S)
