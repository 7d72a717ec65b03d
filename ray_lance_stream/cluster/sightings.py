"""What a coordinator has seen of consumers and prefetchers lately, made into statistics. No Ray, no clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Generic, Protocol, TypeVar

from ray_lance_stream.observing import Sight
from ray_lance_stream.stats import PrefetcherState, PrefetcherStats, RankStats

# What "lately" is: long enough for some blocks and steps, short enough to show what has just changed.
_SPAN_S: Final = 30.0


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What a prefetcher has done since its process started. Times in seconds.

    Attributes:
        node: Id of the node it runs on.
        pid: Its process there.
        blocks: Blocks built.
        rows: Rows of them.
        num_bytes: Bytes of them.
        take_s: Reading, of all blocks.
        transform_s: Transforming, of all blocks.
        busy_s: Time in which it had at least one block to build.
        building: Blocks it is building.
        rows_kept: Rows it read from its node's disk.
    """

    node: str
    pid: int
    blocks: int = 0
    rows: int = 0
    num_bytes: int = 0
    take_s: float = 0.0
    transform_s: float = 0.0
    busy_s: float = 0.0
    building: int = 0
    rows_kept: int = 0


class ConsumerSeen(Protocol):
    """The part of a report that statistics are made of."""

    @property
    def node(self) -> str:
        """Id of the consumer's node."""

    @property
    def run(self) -> str:
        """Name of the Ray Train run it works for."""

    @property
    def sight(self) -> Sight | None:
        """What its shard shows; None before there is one."""

    @property
    def asked_of(self) -> frozenset[str]:
        """Ids of the prefetchers asked for the block it waits for."""


S = TypeVar("S")


class _Recent(Generic[S]):
    """The values of the last half minute, and the one before them."""

    def __init__(self) -> None:
        self._values: deque[tuple[float, S]] = deque()

    def add(self, now: float, value: S) -> None:
        self._values.append((now, value))
        while len(self._values) > 2 and self._values[1][0] <= now - _SPAN_S:
            self._values.popleft()

    def forget_all_but_last(self) -> None:
        while len(self._values) > 1:
            self._values.popleft()

    @property
    def first(self) -> tuple[float, S]:
        return self._values[0]

    @property
    def last(self) -> tuple[float, S]:
        return self._values[-1]


class Sightings:
    """Remembers what was seen. Lives on one event loop, so it needs no lock."""

    def __init__(self) -> None:
        self._consumers: dict[str, _Recent[ConsumerSeen]] = {}
        self._workloads: dict[str, _Recent[Workload]] = {}
        self.run = self.stream = ""
        self.world_size = self.restarts = 0

    def consumer(self, holder: str, seen: ConsumerSeen, now: float) -> None:
        """Notes what a consumer reports."""
        if seen.sight is None:
            return
        seat = seen.sight.seat
        self.run, self.stream = seen.run, seat.name
        self.world_size, self.restarts = seat.world_size, seat.restarts
        if not self._consumers:  # until now there was nothing to do, which says nothing of how busy the pool is
            for recent in self._workloads.values():
                recent.forget_all_but_last()
        self._consumers.setdefault(holder, _Recent()).add(now, seen)

    def prefetcher(self, name: str, workload: Workload, now: float) -> None:
        """Notes what a prefetcher has done."""
        recent = self._workloads.setdefault(name, _Recent())
        recent.add(now, workload)
        if (recent.first[1].node, recent.first[1].pid) != (workload.node, workload.pid):
            recent.forget_all_but_last()  # a new process counts anew

    def keep(self, holders: Sequence[str], prefetchers: Sequence[str]) -> None:
        """Forgets all others."""
        self._consumers = {name: seen for name, seen in self._consumers.items() if name in holders}
        self._workloads = {name: seen for name, seen in self._workloads.items() if name in prefetchers}

    def begin(self) -> None:
        """Forgets the consumers of earlier worker groups."""
        self._consumers.clear()
        self.world_size = 0

    def ranks(self, now: float, indices: Mapping[str, int]) -> tuple[RankStats, ...]:
        """Returns the workers by rank.

        Args:
            now: The time.
            indices: Of the prefetchers, by id.
        """
        found = [_rank(recent, now, indices) for recent in self._consumers.values()]
        return tuple(sorted(found, key=lambda rank: rank.rank))

    def stats_of(self, name: str, index: int, state: PrefetcherState) -> PrefetcherStats:
        """Returns what is known of a prefetcher, the states "building" and "idle" told apart."""
        recent = self._workloads.get(name)
        if recent is None:
            return PrefetcherStats(index=index, state=state)
        (began, before), (at, now) = recent.first, recent.last
        span_s, rows = at - began, now.rows - before.rows
        busy_s, take_s = now.busy_s - before.busy_s, now.take_s - before.take_s
        built_s = take_s + now.transform_s - before.transform_s
        return PrefetcherStats(
            index=index,
            state="building" if state == "idle" and now.building else state,
            node=now.node,
            blocks=now.blocks,
            rows=now.rows,
            num_bytes=now.num_bytes,
            take_s=now.take_s,
            transform_s=now.transform_s,
            building=now.building,
            rows_kept=now.rows_kept,
            busy_share=min(1.0, busy_s / span_s) if span_s > 0 else 0.0,
            busy_s_per_row=busy_s / rows if rows else 0.0,
            take_share=take_s / built_s if built_s > 0 else 0.0,
        )


def _rank(recent: _Recent[ConsumerSeen], now: float, indices: Mapping[str, int]) -> RankStats:
    (began, before), (at, last) = recent.first, recent.last
    assert before.sight is not None and last.sight is not None  # others are not noted
    sight, stats, old, span_s = last.sight, last.sight.stats, before.sight.stats, at - began
    return RankStats(
        rank=sight.seat.world_rank,
        dp_rank=sight.seat.replica.dp_rank,
        node=last.node,
        epoch=sight.epoch,
        step=sight.step,
        num_steps=sight.num_steps,
        rows=stats.rows,
        rows_per_s=(stats.rows - old.rows) / span_s if span_s > 0 else 0.0,
        wait_share=min(1.0, max(0.0, stats.wait_s - old.wait_s) / span_s) if span_s > 0 else 0.0,
        wait_p50_s=stats.wait_p50_s,
        wait_p99_s=stats.wait_p99_s,
        # It goes on since it was told of, as far as is known.
        waiting_s=stats.waiting_s + now - at if stats.waiting_s else 0.0,
        waiting_for="" if sight.waits_for is None else str(sight.waits_for),
        asked_of=tuple(sorted(indices[name] for name in last.asked_of if name in indices)),
        open_requests=stats.open_requests,
        buffered_bytes=stats.buffered_bytes,
        budget_bytes=stats.budget_bytes,
        retries=stats.retries,
        rows_skipped=stats.rows_skipped,
        silent_s=max(0.0, now - at),
    )
