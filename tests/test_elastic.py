"""The elastic pool on real actors: it grows and shrinks, and the rows do not notice."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest
import ray
from conftest import Tables
from runs import is_running, named_actors, opened, reference, wait_until

from ray_lance_stream import PrefetchConfig

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("one_node")]
ROWS = 4000
MOST = 3
# Blocks of a step each, and many of them at a time.
ELASTIC = PrefetchConfig(num_actors=(1, MOST), block_bytes=400, max_buffer_bytes=8000, shrink_after_s=3)


class _Slow:
    def __call__(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        time.sleep(0.1)  # stands for work
        return batch


def pool(shard: Any) -> list[tuple[str, int]]:
    """(node, process id) of the prefetchers that consumers may ask."""
    found: list[tuple[str, int]] = ray.get(shard.link.session.coordinator.prefetchers.remote())
    return found


def read_until(batches: Any, seen: list[list[int]], condition: Callable[[], bool], pause_s: float = 0.0) -> None:
    """Takes batch after batch until the condition holds, which is looked at now and then."""
    looked_at, deadline = 0.0, time.monotonic() + 90
    for batch in batches:
        seen.append(batch["id"].tolist())
        time.sleep(pause_s)
        if time.monotonic() - looked_at > 0.5:
            if condition():
                return
            looked_at = time.monotonic()
            assert looked_at < deadline, "the pool did not change"
    raise AssertionError("the epoch ended before the pool had changed")


def test_it_grows_for_a_fast_consumer_and_shrinks_for_a_slow_one(tables: Tables) -> None:
    stream = tables.stream(ROWS, transform=_Slow(), prefetch=ELASTIC)
    seen: list[list[int]] = []
    with opened(stream) as shard:
        batches = iter(shard.iter_batches())
        seen.append(next(batches)["id"].tolist())
        assert len(pool(shard)) == 1
        read_until(batches, seen, lambda: len(pool(shard)) == MOST)
        read_until(batches, seen, lambda: shard.stats().prefetchers == MOST)
        pids = [pid for _, pid in pool(shard)]
        read_until(batches, seen, lambda: sum(map(is_running, pids)) == 1, pause_s=0.5)
        assert len(pool(shard)) == 1
        # Those that went had answered all they were asked for.
        assert shard.stats().retries == 0
        (run,) = stream.where()
        wanted = [size.wanted for size in run.prefetchers]
        assert (wanted[0], max(wanted), wanted[-1]) == (1, MOST, 1)
        assert run.prefetchers[-1].running == 1
        assert [size.at for size in run.prefetchers] == sorted(size.at for size in run.prefetchers)
    assert seen == list(reference(tables.stream(ROWS), 1).values())[: len(seen)]
    wait_until(lambda: not any(map(is_running, pids)), 10, "no prefetcher")


def test_deaths_while_it_grows_are_harmless(tables: Tables) -> None:
    """A prefetcher, and then the coordinator, which begins with as many as there were."""
    stream = tables.stream(ROWS, transform=_Slow(), prefetch=ELASTIC)
    seen: list[list[int]] = []
    with opened(stream) as shard:
        batches = iter(shard.iter_batches())
        read_until(batches, seen, lambda: len(pool(shard)) == 2)
        os.kill(pool(shard)[0][1], signal.SIGKILL)
        read_until(batches, seen, lambda: len(pool(shard)) == MOST)
        before = {pid for _, pid in pool(shard)}
        os.kill(ray.get(shard.link.session.coordinator.pid.remote()), signal.SIGKILL)
        read_until(batches, seen, lambda: len({pid for _, pid in pool(shard)} - before) == MOST)
        sizes = ray.get(shard.link.session.coordinator.sizes.remote())
        assert [size.wanted for size in sizes[:2]] == [1, MOST]
    assert seen == list(reference(tables.stream(ROWS), 1).values())[: len(seen)]
    wait_until(lambda: not named_actors(stream), 10, "no named actor")
