"""What a run does as metrics of Ray, which every node's Prometheus endpoint serves with ``ray_`` before their names.

Tags are the run, the stream in it, and where it applies the rank: never a row, step or path. Counters count from the
start of a process, so a restarted one begins at 0 again, which Prometheus' ``rate`` takes into account.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Final

from ray.util import metrics as ray_metrics

from ray_lance_stream.cluster.sightings import Workload
from ray_lance_stream.core import ShardCore
from ray_lance_stream.observing import Sight, sight_of
from ray_lance_stream.stats import StreamStats

_TELL_EVERY_S: Final = 1.0
_OUTSIDE: Final = "-"  # in the place of a run's name, outside Ray Train

_RANK: Final = ("run", "stream", "rank")
_POOL: Final = ("run", "stream")
RANK_COUNTERS: Final[Mapping[str, tuple[str, Callable[[Sight], float]]]] = {
    "rows": ("Rows handed to the trainer.", lambda s: s.stats.rows),
    "batches": ("Batches handed to the trainer.", lambda s: s.stats.batches),
    "wait_seconds": ("Seconds the trainer waited for data.", lambda s: s.stats.wait_s),
    "train_seconds": ("Seconds the trainer worked between two batches.", lambda s: s.stats.train_s),
    "retries": ("Requests sent again after a loss.", lambda s: s.stats.retries),
    "rows_skipped": ("Rows left out because the transform failed on them.", lambda s: s.stats.rows_skipped),
}
RANK_GAUGES: Final[Mapping[str, tuple[str, Callable[[Sight], float]]]] = {
    "epoch": ("The epoch being read, counted from 0.", lambda s: s.epoch),
    "step": ("Steps of the epoch that were handed out.", lambda s: s.step),
    "wait_p50_seconds": ("Half of the waits were no longer.", lambda s: s.stats.wait_p50_s),
    "wait_p99_seconds": ("99 of 100 waits were no longer.", lambda s: s.stats.wait_p99_s),
    "waiting_seconds": ("How long the wait under way has lasted.", lambda s: s.stats.waiting_s),
    "buffered_bytes": ("Bytes of blocks held or asked for.", lambda s: s.stats.buffered_bytes),
    "budget_bytes": ("How many there may be.", lambda s: s.stats.budget_bytes),
    "open_requests": ("Blocks asked for that are not here.", lambda s: s.stats.open_requests),
}
PREFETCHER_COUNTERS: Final[Mapping[str, tuple[str, Callable[[Workload], float]]]] = {
    "built_blocks": ("Blocks that prefetchers built.", lambda w: w.blocks),
    "built_rows": ("Rows of them.", lambda w: w.rows),
    "built_bytes": ("Bytes of them.", lambda w: w.num_bytes),
    "kept_rows": (
        "Rows read from the node's disk: PrefetchConfig.cache_bytes.",
        lambda w: w.rows_kept,
    ),
    "take_seconds": ("Seconds of reading; a prefetcher builds two blocks at a time.", lambda w: w.take_s),
    "transform_seconds": ("Seconds of the transform, likewise.", lambda w: w.transform_s),
    "busy_seconds": ("Seconds in which a prefetcher had a block to build.", lambda w: w.busy_s),
}
POOL_GAUGES: Final[Mapping[str, tuple[str, Callable[[StreamStats], float]]]] = {
    "prefetchers_working": ("Prefetchers that work.", lambda s: s.working),
    "prefetchers_wanted": ("Prefetchers there should be.", lambda s: s.wanted),
    "world_size": ("Training workers.", lambda s: s.world_size),
    "restarts": ("How often the worker group was started again.", lambda s: s.restarts),
}


class _Told:
    """Metrics of one kind of thing, from one process, with the same tags each time."""

    def __init__(self, keys: tuple[str, ...], counters: Mapping[str, Any], gauges: Mapping[str, Any]) -> None:
        self._counters = [
            (ray_metrics.Counter(f"lance_stream_{name}", description=text, tag_keys=keys), of)
            for name, (text, of) in counters.items()
        ]
        self._gauges = [
            (ray_metrics.Gauge(f"lance_stream_{name}", description=text, tag_keys=keys), of)
            for name, (text, of) in gauges.items()
        ]
        self._totals = [0.0] * len(self._counters)
        self._lock = threading.Lock()  # whoever closes a shard tells what its reports have not

    def tell(self, of: Any, tags: dict[str, str]) -> None:
        """Records what a thing shows now."""
        with self._lock:
            for index, (counter, total_of) in enumerate(self._counters):
                total = float(total_of(of))
                if total > self._totals[index]:
                    counter.inc(total - self._totals[index], tags=tags)
                    self._totals[index] = total
            for gauge, value_of in self._gauges:
                gauge.set(float(value_of(of)), tags=tags)


class Watch:
    """Looks at one training worker's shard, in its process, and records what it shows. Does not keep it alive."""

    def __init__(self, shard: ShardCore, run: str) -> None:
        self.run = run
        self._shard = weakref.ref(shard)
        self._told = _Told(_RANK, RANK_COUNTERS, RANK_GAUGES)

    def look(self) -> Sight | None:
        """Returns and records what the shard shows now; None if it is gone."""
        shard = self._shard()
        if shard is None:
            return None
        sight = sight_of(shard)
        tags = {"run": self.run or _OUTSIDE, "stream": sight.seat.name, "rank": str(sight.seat.world_rank)}
        self._told.tell(sight, tags)
        return sight


class PrefetcherMetrics:
    """Of one prefetcher, in its process; those on one node are added up."""

    def __init__(self) -> None:
        self._told = _Told(_POOL, PREFETCHER_COUNTERS, {})

    def tell(self, workload: Workload, run: str, stream: str) -> None:
        """Records what it has done, once it is known for whom."""
        if stream:
            self._told.tell(workload, {"run": run or _OUTSIDE, "stream": stream})


class PoolMetrics:
    """Of the pool and the worker group, in the coordinator."""

    def __init__(self) -> None:
        self._told = _Told(_POOL, {}, POOL_GAUGES)
        self._told_at = float("-inf")

    def tell(self, stats_of: Callable[[], StreamStats]) -> None:
        """Records what is known now, at most once a second."""
        now = time.monotonic()
        if now - self._told_at < _TELL_EVERY_S:
            return
        self._told_at = now
        stats = stats_of()
        if stats.stream:
            self._told.tell(stats, {"run": stats.run or _OUTSIDE, "stream": stats.stream})
