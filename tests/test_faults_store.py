"""A node whose object store is full."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import ray
from conftest import Tables
from runs import opened, reference

from ray_lance_stream import BlockError, PrefetchConfig

pytestmark = [pytest.mark.cluster, pytest.mark.fault]
STORE_BYTES = 100 * 2**20
ROWS, ROW_BYTES = 400, 100_000
PREFETCH: dict[str, Any] = {
    "num_actors": 1,
    "block_bytes": 4_000_000,
    "max_buffer_bytes": 16_000_000,
    "placement_timeout_s": 120.0,
}


def grow(batch: pa.RecordBatch) -> dict[str, Any]:
    """Large rows, so that the blocks lie in the object store."""
    ids = batch["id"].to_numpy()
    return {"id": ids, "payload": np.repeat(ids.astype(np.uint8)[:, None], ROW_BYTES, axis=1)}


@pytest.fixture
def store(request: pytest.FixtureRequest) -> Iterator[None]:
    """Ray with a small object store; ``full_disk``: the disk does not help out."""
    config = {"local_fs_capacity_threshold": 0.0001} if request.param == "full disk" else {}
    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=STORE_BYTES,
        _system_config=config,
    )
    yield
    ray.shutdown()


def fill(share: float) -> list[Any]:
    """Takes a share of the object store, for as long as the result is held."""
    piece = 2**20
    return [ray.put(np.ones(piece, np.uint8)) for _ in range(int(STORE_BYTES * share) // piece)]


@pytest.mark.parametrize("store", ["spills"], indirect=True)
@pytest.mark.usefixtures("store")
def test_blocks_go_to_disk_where_the_store_is_full(tables: Tables) -> None:
    stream = tables.stream(ROWS, transform=grow, prefetch=PrefetchConfig(**PREFETCH))
    held = fill(0.9)
    values = [ray.get(ref) for ref in held]  # in use, so that they cannot be moved out
    with opened(stream) as shard:
        seen = [batch["id"].tolist() for batch in shard.iter_batches()]
    assert seen == list(reference(stream, 1).values())
    assert len(values) == len(held)


@pytest.mark.parametrize("store", ["full disk"], indirect=True)
@pytest.mark.usefixtures("store")
def test_a_store_that_is_full_for_a_while_is_waited_for(tables: Tables) -> None:
    stream = tables.stream(ROWS, transform=grow, prefetch=PrefetchConfig(**PREFETCH))
    seen: list[list[int]] = []
    with opened(stream) as shard:
        batches = iter(shard.iter_batches(prefetch_batches=0))
        seen.append(next(batches)["id"].tolist())
        held = [ray.get(ref) for ref in fill(0.97)]
        freed = threading.Timer(8.0, held.clear)
        freed.start()
        for batch in batches:
            seen.append(batch["id"].tolist())
        freed.join()
        assert shard.stats().retries > 0
    assert seen == list(reference(stream, 1).values())


@pytest.mark.parametrize("store", ["full disk"], indirect=True)
@pytest.mark.usefixtures("store")
def test_a_store_that_stays_full_is_named(tables: Tables) -> None:
    prefetch = PrefetchConfig(**PREFETCH, retry_window_s=6.0)
    stream = tables.stream(ROWS, transform=grow, prefetch=prefetch)
    held = [ray.get(ref) for ref in fill(0.97)]
    with opened(stream) as shard, pytest.raises(BlockError, match="object store") as caught:
        for _ in shard.iter_batches(prefetch_batches=0):
            pass
    assert "Remedy: look at `ray memory`" in str(caught.value) and held
