"""What a shard shows to those who look on: nothing here opens, waits for, or changes anything. For any thread."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ray_lance_stream.request import Ranges
from ray_lance_stream.stats import ShardStats
from ray_lance_stream.topology import Seat
from ray_lance_stream.verdict import rank_verdict

if TYPE_CHECKING:
    from ray_lance_stream.core import ShardCore


@dataclass(frozen=True, kw_only=True)
class Sight:
    """One training worker, as its shard shows it.

    Attributes:
        seat: Its place in the run.
        epoch: The epoch it reads.
        step: Steps of the epoch it was handed.
        num_steps: Steps of the epoch, the most there can be where rows are skipped; 0 before the plan is open.
        stats: What it measured.
        waits_for: The block that the wait under way is for; None without one, or if it is for something else.
    """

    seat: Seat
    epoch: int
    step: int
    num_steps: int
    stats: ShardStats
    waits_for: Ranges | None = None


def sight_of(shard: ShardCore) -> Sight:
    """Returns where a shard stands and what it measured."""
    stats, position, handle, reader = stats_of(shard), shard._position, shard._handle, shard._reader
    step = num_steps = 0
    if handle is not None and handle.spec.epoch == position.epoch:  # else it is just going to the next epoch
        steps = shard._steps_of(handle)
        step, num_steps = steps.steps_done(position.cycle, ended=position.ended), steps.num_steps
    flight = None if reader is None else reader.dispatcher.waits_for
    return Sight(
        seat=shard._seat,
        epoch=position.epoch,
        step=step,
        num_steps=num_steps,
        stats=stats,
        waits_for=None if flight is None or not stats.waiting_s else flight.ranges,
    )


def stats_of(shard: ShardCore) -> ShardStats:
    """Returns what a shard measured since it was opened."""
    reader, source, clock = shard._reader, shard._source, shard._clock
    waiting_s = clock.waiting_s(time.perf_counter())
    wait_s = clock.wait_s + waiting_s
    p50_s, p99_s = clock.histogram.percentiles((0.5, 0.99))
    buffered, budget = (0, 0) if reader is None else (reader.buffered_bytes, reader.max_bytes)
    skips = getattr(reader, "skips", None)
    return ShardStats(
        rows=shard._rows,
        batches=shard._batches,
        wait_s=wait_s,
        train_s=clock.train_s,
        wait_p50_s=p50_s,
        wait_p99_s=p99_s,
        waiting_s=waiting_s,
        buffered_bytes=buffered,
        budget_bytes=budget,
        open_requests=getattr(source, "open_requests", 0),
        retries=shard._retries + (0 if reader is None else reader.retries),
        rows_skipped=shard._skips.count + (0 if skips is None else skips.count),
        prefetchers=getattr(source, "prefetchers", 0),
        padded_tokens=shard._padded_tokens,
        documents_left=shard._documents_left,
        verdict=rank_verdict(
            batches=shard._batches, wait_s=wait_s, train_s=clock.train_s, buffered_bytes=buffered, budget_bytes=budget
        ),
    )
