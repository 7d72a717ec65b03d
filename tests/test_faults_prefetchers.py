"""Prefetchers that die, hang, or are killed by what they read, on real actors of one node."""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import ray
from conftest import Tables
from runs import opened, reference, wait_until

from ray_lance_stream import BlockError, PrefetchConfig
from ray_lance_stream.cluster.source import RaySource
from ray_lance_stream.plan import Plan
from ray_lance_stream.request import Ranges

pytestmark = [pytest.mark.cluster, pytest.mark.fault, pytest.mark.usefixtures("one_node")]
ROWS = 400
STEPS = 50
SMALL_BLOCKS = PrefetchConfig(block_bytes=600, max_buffer_bytes=3000)


def prefetchers(shard: Any) -> list[int]:
    """Process ids of the prefetchers that answer."""
    return [pid for _, pid in ray.get(shard.link.session.coordinator.prefetchers.remote())]


def blocks_of(shard: Any) -> list[int]:
    """Blocks that each prefetcher of the pool has built; (0,) stands for one that is not there yet."""
    pool = ray.get(shard.link.session.coordinator.pool.remote())
    found = [int(ray.get(prefetcher.stats.remote())["blocks"]) for prefetcher in pool]
    return found if len(found) == shard.link.session.prefetch.min_actors else [0]


def read_on(shard: Any, seen: list[list[int]]) -> None:
    """Reads the rest of the epoch."""
    for batch in shard.iter_batches(prefetch_batches=0):
        seen.append(batch["id"].tolist())


@pytest.mark.parametrize("hanging", [1, 2])
def test_prefetchers_that_hang_are_overtaken_by_the_one_that_does_not(
    tables: Tables, rng: Random, hanging: int
) -> None:
    stream = tables.stream(ROWS, prefetch=dataclasses.replace(SMALL_BLOCKS, num_actors=hanging + 1))
    seen: list[list[int]] = []
    fault_at = rng.randrange(2, 25)
    with opened(stream) as shard:
        while not all(blocks_of(shard)):  # the second one is a little late
            read_on(shard, seen)
        epochs = shard.epoch
        *stopped, _ = pids = prefetchers(shard)
        try:
            for batch in shard.iter_batches(prefetch_batches=0):
                seen.append(batch["id"].tolist())
                if shard.step == fault_at:
                    for pid in stopped:
                        os.kill(pid, signal.SIGSTOP)
            assert shard._source.copies > 0  # else nothing was asked of it, and this test says nothing
            # A new worker group begins while it hangs, too.
            session, handle = shard.link.session, shard._handle
            new = RaySource(session.coordinator, session.begin(), retry_window_s=30)
            block = new.request(new.plan(handle.spec), Ranges(first_split=0, num_splits=4, start=0, stop=2))
            assert block.result(60).rows["id"].to_pylist() == seen[epochs * STEPS]
            # And other plans are opened, though each of them has its turn.
            for seed in range(101, 103 + hanging):
                order = dataclasses.replace(handle.spec.order, shuffle_seed=seed)
                assert new.plan(dataclasses.replace(handle.spec, order=order)).num_rows == ROWS
            new.close()
        finally:
            for pid in stopped:
                os.kill(pid, signal.SIGCONT)
        wait_until(lambda: sorted(prefetchers(shard)) == sorted(pids), 30, "it answers again")
    assert seen == list(reference(stream, epochs + 1).values())


class _Killer:
    """Ends the process that transforms the row of one id; notes every process that does."""

    def __init__(self, log: str, killer: int | None) -> None:
        self.log, self.killer = log, killer

    def __call__(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        ids = batch["id"].to_numpy()
        if self.killer in ids:
            with open(self.log, "a") as file:
                file.write(f"{os.getpid()}\n")
            os._exit(3)
        return batch


@pytest.mark.timeout(900)  # nine processes die, one after the other, and others are started
def test_a_row_that_kills_its_reader_is_named(tables: Tables, tmp_path: Any) -> None:
    log = tmp_path / "deaths"
    plain = tables.stream(ROWS)
    want = reference(plain, 1)
    victim = want[0, 30][3]  # its id is its row number; far behind the rows that are read to begin with
    prefetch = PrefetchConfig(block_bytes=250, max_buffer_bytes=2000)  # blocks of 8 rows
    stream = tables.stream(ROWS, transform=_Killer(str(log), victim), prefetch=prefetch)
    seen: list[list[int]] = []
    with opened(stream) as shard:
        with pytest.raises(BlockError) as caught:
            read_on(shard, seen)
        handle = shard._open_plan()
        plan = Plan(handle.spec, handle.num_rows)
        places = [(s, p) for s in range(4) for p in range(ROWS // 4) if plan.rows(np.array(s), np.array(p)) == victim]
    ((split, position),) = places
    assert f"row {victim} of the table (split {split}, position {position}, epoch 0) kills" in str(caught.value)
    assert "Remedy" in str(caught.value)
    # Every row before its block was delivered, in order.
    assert seen == list(want.values())[: len(seen)] and len(seen) == 29
    died = log.read_text().split()
    assert len(set(died)) == len(died)  # each of them once
    # Three or, where one was not seen, four in the pool; the block of 8, 4 and 2 rows; the single row twice.
    assert len(died) <= 4 + 3 + 2


def test_prefetchers_killed_from_outside_never_make_a_row_guilty(tables: Tables) -> None:
    stream = tables.stream(ROWS, transform=_Slow(), prefetch=PrefetchConfig(num_actors=1, block_bytes=3000))
    seen: list[list[int]] = []
    with opened(stream) as shard:
        batches = iter(shard.iter_batches(prefetch_batches=0))
        seen.append(next(batches)["id"].tolist())
        killed: set[int] = set()
        while len(killed) < 4:
            pid = _new_one(shard, killed)
            os.kill(pid, signal.SIGKILL)
            killed.add(pid)
        for batch in batches:
            seen.append(batch["id"].tolist())
        assert shard.stats().retries > 0
    assert seen == list(reference(stream, 1).values())


class _Slow:
    def __call__(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        time.sleep(0.3)  # so that a kill finds blocks under way; nothing is asserted of time
        return batch


def _new_one(shard: Any, killed: set[int]) -> int:
    found: list[int] = []

    def look() -> bool:
        found[:] = [pid for pid in prefetchers(shard) if pid not in killed]
        return bool(found)

    wait_until(look, 60, "a prefetcher is back")
    return found[0]
