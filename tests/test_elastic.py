"""The elastic pool on real actors: it grows and shrinks, and the rows do not notice."""

from __future__ import annotations

import itertools
import os
import signal

import pytest
import ray
from conftest import Tables
from consumers import Consumer, Slow, pool
from runs import is_running, named_actors, opened, wait_until

from ray_lance_stream import PrefetchConfig

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.usefixtures("one_node")]
ROWS = 4000
MOST = 3
# Blocks of a step each, and many of them at a time.
ELASTIC = PrefetchConfig(num_actors=(1, MOST), block_bytes=400, max_buffer_bytes=8000, shrink_after_s=3)


def test_it_grows_for_a_fast_consumer_and_shrinks_for_a_slow_one(tables: Tables) -> None:
    stream = tables.stream(ROWS, transform=Slow(), prefetch=ELASTIC)
    with opened(stream) as shard:
        consumer = Consumer(shard)
        consumer.read()
        assert len(pool(shard)) == 1
        consumer.read_until(lambda: len(pool(shard)) == MOST, "the pool is as large as it may be")
        consumer.read_until(lambda: shard.stats().prefetchers == MOST, "the consumer has heard of it")
        pids = [pid for _, pid in pool(shard)]
        consumer.read_until(lambda: sum(map(is_running, pids)) == 1, "two of three are gone", pause_s=0.5)
        assert len(pool(shard)) == 1
        # Those that went had answered all they were asked for.
        assert shard.stats().retries == 0
        (run,) = stream.where()
        wanted = [size.wanted for size in run.prefetchers]
        assert (wanted[0], max(wanted), wanted[-1]) == (1, MOST, 1)
        assert run.prefetchers[-1].running == 1
        assert [size.at for size in run.prefetchers] == sorted(size.at for size in run.prefetchers)
        consumer.check(tables.stream(ROWS))
    wait_until(lambda: not any(map(is_running, pids)), 10, "no prefetcher")


@pytest.mark.fault
def test_deaths_while_it_grows_are_harmless(tables: Tables) -> None:
    """A prefetcher, and then the coordinator, which begins with as many as there were."""
    stream = tables.stream(ROWS, transform=Slow(), prefetch=ELASTIC)
    with opened(stream) as shard:
        consumer = Consumer(shard)
        consumer.read_until(lambda: len(pool(shard)) == 2, "a second prefetcher")
        os.kill(pool(shard)[0][1], signal.SIGKILL)
        consumer.read_until(lambda: len(pool(shard)) == MOST, "all prefetchers, the dead one again")
        consumer.read_until(lambda: shard.stats().prefetchers == MOST, "the consumer has heard of it")
        before = {pid for _, pid in pool(shard)}
        os.kill(ray.get(shard.link.session.coordinator.pid.remote()), signal.SIGKILL)
        consumer.read_until(lambda: len({pid for _, pid in pool(shard)} - before) == MOST, "as many new ones")
        sizes = [size.wanted for size in ray.get(shard.link.session.coordinator.sizes.remote())]
        assert [size for size, _ in itertools.groupby(sizes)] in ([MOST], [1, MOST])
        consumer.check(tables.stream(ROWS))
    wait_until(lambda: not named_actors(stream), 10, "no named actor")
    wait_until(lambda: not any(map(is_running, before)), 10, "no prefetcher")
