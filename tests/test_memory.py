"""What a stream holds while its consumer sleeps, and while it goes on: on a table several times its budget."""

from __future__ import annotations

import functools
import itertools
import pickle
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import lancedb
import numpy as np
import psutil
import pyarrow as pa
import pytest

from ray_lance_stream import LanceStream, PrefetchConfig
from ray_lance_stream.reader import FIRST_BLOCK_BYTES
from ray_lance_stream.rowcontext import TransformContext
from ray_lance_stream.sifting import joined
from ray_lance_stream.trial import sifted

pytestmark = pytest.mark.thorough

MIB = 1024 * 1024
ROWS, WIDTH, PAYLOAD, SPLITS = 200_000, 64, 1024, 8  # 250 MiB
PER_SPLIT = ROWS // SPLITS
BUDGET, BLOCK = 64 * MIB, 8 * MIB
BATCH = 512


@pytest.fixture(scope="module")
def uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A table "t" whose ids are row numbers; deleted afterwards, for its size."""
    path = tmp_path_factory.mktemp("memory")
    count = 20_000
    rng = np.random.default_rng(0)

    def batches() -> Any:
        for start in range(0, ROWS, count):
            x = pa.FixedSizeListArray.from_arrays(pa.array(rng.random(count * WIDTH, dtype=np.float32)), WIDTH)
            offsets = pa.array(np.arange(count + 1, dtype=np.int32) * PAYLOAD).buffers()[1]
            values = pa.py_buffer(rng.bytes(count * PAYLOAD))
            payload = pa.Array.from_buffers(pa.binary(), count, [None, offsets, values])
            yield pa.record_batch({"id": np.arange(start, start + count), "x": x, "payload": payload})

    schema = pa.schema({"id": pa.int64(), "x": pa.list_(pa.float32(), WIDTH), "payload": pa.binary()})
    lancedb.connect(str(path)).create_table("t", batches(), schema=schema)
    return str(path)


def fail_early(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Fails on the first fifth of the rows of split 3, so that it falls behind the others."""
    ids = batch["id"].to_numpy()
    if np.any((ids >= 3 * PER_SPLIT) & (ids < 3 * PER_SPLIT + PER_SPLIT // 5)):
        raise ValueError("a bad row")
    return batch


def grow(since: int, batch: pa.RecordBatch) -> dict[str, Any]:
    """Makes rows from a position on ten times as large."""
    ids = batch["id"].to_numpy()
    times = np.where(ids % PER_SPLIT >= since, 12, 1).tolist()
    payload: list[Any] = batch["payload"].to_pylist()
    return {"id": ids, "payload": [value * n for value, n in zip(payload, times, strict=True)]}


def stream_of(uri: str, **options: Any) -> LanceStream:
    prefetch = PrefetchConfig(max_buffer_bytes=BUDGET, block_bytes=BLOCK)
    return LanceStream(
        uri, "t", num_splits=SPLITS, global_batch_size=BATCH, shuffle=False, prefetch=prefetch, **options
    )


def settle(shard: Any) -> None:
    """Sleeps as a consumer does, until everything that was asked for is there, or was given up."""
    reader = shard._reader
    flights = reader._flights if hasattr(reader, "_flights") else reader._blocks
    _, still_open = wait([flight.future for flight in flights], timeout=100)
    assert not still_open


class Held:
    """Bytes of Arrow's memory over what there was before; and the process's, which is more."""

    def __init__(self) -> None:
        self._arrow, self._process = pa.total_allocated_bytes(), psutil.Process()
        self._rss = self._process.memory_info().rss

    def arrow(self) -> int:
        return pa.total_allocated_bytes() - self._arrow

    def process(self) -> int:
        return int(self._process.memory_info().rss - self._rss)


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "skips": {"transform": fail_early, "on_transform_error": "skip"},
    "grows": {"transform": functools.partial(grow, 0)},
}


@pytest.mark.parametrize("case", CASES)
def test_a_sleeping_and_then_slow_consumer(uri: str, case: str) -> None:
    """Within the budget asleep. Going on, one block more may be under way, and the batches made ahead."""
    with stream_of(uri, **CASES[case]).open() as shard:
        assert len(shard) > 300
        held = Held()
        # Made when they are asked for: nothing more is asked of the source while the consumer sleeps.
        batches = iter(shard.iter_batches(prefetch_batches=0))
        for _ in itertools.islice(batches, 3):
            pass
        settle(shard)
        assert BUDGET / 2 < held.arrow() <= BUDGET + BLOCK
        # Buffers of Lance, of the transform and of the allocators come on top: about two blocks for each of two
        # threads, more where a transform makes Python objects.
        assert held.process() < 8 * BUDGET
        most = most_held = 0
        for _ in itertools.islice(batches, 100):
            most_held = max(most_held, shard.stats().buffered_bytes)
            most = max(most, held.arrow(), most_held)
        del batches
        assert most <= BUDGET + 4 * BLOCK
        if case != "grows":
            assert most_held <= BUDGET + FIRST_BLOCK_BYTES
        if case == "skips":
            assert shard.stats().rows_skipped == PER_SPLIT // 5  # all of them, while the others waited


def test_rows_that_suddenly_grow_overshoot_by_the_blocks_being_built(uri: str) -> None:
    """Not by all that was asked for: what was not begun is given up, while nobody reads."""
    with stream_of(uri, transform=functools.partial(grow, 1500)).open() as shard:
        len(shard)
        held = Held()
        batches = iter(shard.iter_batches(prefetch_batches=0))
        for _ in itertools.islice(batches, 3):
            pass
        settle(shard)
        assert held.arrow() <= BUDGET + 3 * 10 * BLOCK
        for _ in itertools.islice(batches, 90):
            pass
        settle(shard)
        assert held.arrow() <= BUDGET + BLOCK
        del batches


def test_the_table_is_several_times_the_budget(uri: str) -> None:
    assert sum(path.stat().st_size for path in Path(uri).rglob("*.lance")) > 3 * BUDGET


@pytest.mark.parametrize("rows", [pa.table({"id": np.arange(100)}), [b"x" * 1000] * 100], ids=["table", "objects"])
def test_a_block_weighs_what_it_says_of_its_rows_as_well(rows: Any) -> None:
    """What goes through the object store with narrow rows is to no small part which rows they are."""
    places = np.arange(100)
    context = TransformContext(epoch=0, row_numbers=places, splits=places, positions=places, seed=1)
    block = sifted(rows, context)
    assert block.nbytes >= len(pickle.dumps(rows)) * 0.5 + 2 * places.nbytes
    assert joined([block, block]).nbytes == pytest.approx(2 * block.nbytes, rel=0.01)
