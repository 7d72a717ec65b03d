"""The simulated run asks for what a real one does, and the formula for prefetchers holds in it."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pyarrow as pa
import pytest
from conftest import Tables
from recording import RecordingLink

from ray_lance_stream import PrefetchConfig
from ray_lance_stream.cli.demand import facts, need_of
from ray_lance_stream.cluster.prefetcher import CONCURRENCY_GROUPS
from ray_lance_stream.config import MIB, StreamConfig
from ray_lance_stream.demand import BLOCKS_AT_ONCE, Need, Speeds
from ray_lance_stream.plan import OrderSpec, PlanSpec, SplitLayout, TableIdentity
from ray_lance_stream.request import PlanHandle, Ranges
from ray_lance_stream.shard import StreamShard
from ray_lance_stream.simulation import Outcome, simulate
from ray_lance_stream.topology import Replica, Seat, StepPlan

pytestmark = pytest.mark.thorough

ROWS = 10**8
TABLE = TableIdentity(version=1, fingerprint="any")


def described(
    num_splits: int, global_batch_size: int, bytes_per_row: float, **prefetch: Any
) -> tuple[StreamConfig, PlanHandle, StepPlan]:
    """A stream of a table that nobody needs."""
    order = OrderSpec(num_splits=num_splits)
    config = StreamConfig(
        stream_id="simulated",
        identity=TABLE,
        order=order,
        global_batch_size=global_batch_size,
        prefetch=PrefetchConfig(**prefetch),
    )
    spec = PlanSpec(table=TABLE, order=order, epoch=0)
    handle = PlanHandle(spec=spec, num_rows=ROWS, matching_rows=None, schema=pa.schema([]), bytes_per_row=bytes_per_row)
    layout = SplitLayout(num_rows=ROWS, num_splits=num_splits)
    return config, handle, StepPlan.of(layout, global_batch_size=global_batch_size, drop_last=False)


def test_a_prefetcher_takes_as_many_blocks_as_the_real_one() -> None:
    assert CONCURRENCY_GROUPS["build"] == BLOCKS_AT_ONCE


@pytest.mark.parametrize(("max_buffer", "block"), [(1 << 20, 1 << 18), (1 << 18, 1 << 14)])
def test_requests_are_those_of_real_shards(tables: Tables, max_buffer: int, block: int) -> None:
    """A whole epoch of three replicas, read from a table in this process: what each asks for, block by block."""
    stream = tables.stream(
        60_000,
        columns=["id", "x"],
        num_splits=7,
        global_batch_size=700,
        prefetch=PrefetchConfig(max_buffer_bytes=max_buffer, block_bytes=block),
    )
    real: dict[int, list[Ranges]] = {}
    batches = 0
    for rank in range(3):
        link = RecordingLink(stream.recipe)
        seat = Seat(replica=Replica(dp_rank=rank, dp_size=3), world_rank=rank, world_size=3)
        with StreamShard(stream.config, seat, link) as shard:
            batches = sum(1 for _ in shard.iter_batches())
            handle = shard._open_plan()
        real[rank] = link.source.asked
    simulated: dict[int, list[Ranges]] = defaultdict(list)
    outcome = simulate(
        stream.config,
        handle,
        Speeds(step_time_s=0.01, read_latency_s=0.001, transform_s_per_row=1e-6),
        world_size=3,
        prefetchers=2,
        num_steps=batches,
        asked=lambda rank, ranges: simulated[rank].append(ranges),
    )
    assert dict(simulated) == real
    assert outcome.requests == outcome.blocks == sum(map(len, real.values()))


_SPEEDS = Speeds(step_time_s=0.2, read_latency_s=0.05, read_bytes_per_s=2e8, transform_s_per_row=2e-3)
SETUPS: dict[str, tuple[int, int, int, float, Speeds]] = {
    # Replicas, splits, global batch, bytes a row, speeds.
    "both": (8, 64, 512, 4e4, _SPEEDS),
    "reading": (8, 48, 480, 6e5, Speeds(step_time_s=0.3, read_latency_s=0.1, read_bytes_per_s=5e7)),
    "transform": (1, 4, 256, 1e5, Speeds(step_time_s=0.5, transform_s_per_row=0.01)),
    "uneven": (3, 16, 64, 272, Speeds(step_time_s=0.05, read_latency_s=0.03, transform_s_per_row=1e-3)),
    "many": (64, 1024, 4096, 4e4, _SPEEDS),
}


def run(setup: tuple[int, int, int, float, Speeds], part: float) -> tuple[Need, int, Outcome]:
    """Runs a part of the prefetchers that the formula asks for, with its blocks and buffers."""
    world_size, num_splits, batch, bytes_per_row, speeds = setup
    _, handle, steps = described(num_splits, batch, bytes_per_row)
    size, need = need_of(speeds, handle, steps, world_size, None)
    settings = facts(size, need, bytes_per_row)["prefetch"]
    config, handle, _ = described(num_splits, batch, bytes_per_row, **settings)
    prefetchers = max(1, int(need.prefetchers * part))
    # Long enough that every worker takes a dozen blocks; buffers fill in the first third.
    num_steps = max(60, 12 * need.block_rows * world_size // batch)
    outcome = simulate(
        config,
        handle,
        speeds,
        world_size=world_size,
        prefetchers=prefetchers,
        num_steps=num_steps,
        warmup_steps=num_steps // 3,
    )
    return need, prefetchers, outcome


@pytest.mark.parametrize("name", SETUPS)
def test_as_many_prefetchers_as_the_formula_says_keep_up(name: str) -> None:
    need, _, outcome = run(SETUPS[name], 1)
    assert outcome.waiting_share < 0.05  # the least that makes a pool grow
    assert outcome.most_bytes <= need.store_bytes + MIB  # to which buffers are rounded


@pytest.mark.parametrize("name", SETUPS)
def test_half_of_them_do_not(name: str) -> None:
    """What is taken was built meanwhile, or lay in the buffers before: so long the trainer waits at least."""
    need, prefetchers, outcome = run(SETUPS[name], 0.5)
    _, _, batch, bytes_per_row, speeds = SETUPS[name]
    took_s = outcome.steps * speeds.step_time_s / (1 - outcome.waiting_share)
    built = prefetchers * need.prefetcher_rows_per_s * took_s
    assert outcome.steps * batch <= 1.001 * (built + need.store_bytes / bytes_per_row)
    assert outcome.used > 0.9  # they have no time to spare


def test_ten_thousand_splits_on_a_thousand_ranks() -> None:
    """As many waits as there are ranks and steps, within the budget; repeatable."""
    config, handle, _ = described(10_240, 10_240, 4e4, block_bytes=1 << 20, max_buffer_bytes=6 << 30)
    outcome = simulate(config, handle, _SPEEDS, world_size=1024, prefetchers=140, num_steps=8)
    assert outcome.steps == 7
    assert outcome.requests >= outcome.blocks >= 8 * 1024 / 2  # blocks of two steps
    assert 0 < outcome.most_bytes <= 6 << 30
    assert outcome.first_batch_s > _SPEEDS.block_s(10, 4e4)


def test_a_simulation_repeats_itself() -> None:
    assert run(SETUPS["uneven"], 1) == run(SETUPS["uneven"], 1)
