"""Rows that kill the processes that read them, on streams that skip, replace or ask; on real actors of one node."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Tables
from deadly import Deadly, DeadlyObjects
from runs import opened

from ray_lance_stream import DeadlyRowError, LanceStream, PrefetchConfig, ReplaceRow, StreamingDataset

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.fault,
    pytest.mark.timeout(900),  # some thirty processes die, one after the other, and others are started
    pytest.mark.usefixtures("one_node"),
]
ROWS, SPLITS = 400, 4
# Without shuffling split s holds rows 100 * s and on. Two in one block, two cycles apart, and one much later.
VICTIMS = frozenset({130, 232, 60})
SMALL_BLOCKS = PrefetchConfig(block_bytes=130, max_buffer_bytes=500)  # of 16 rows of 8 bytes


def stream_of(tables: Tables, log: Path | None, **options: Any) -> LanceStream:
    settings: dict[str, Any] = {
        "shuffle": False,
        "transform": Deadly(VICTIMS, log),
        "on_transform_error": "skip",
        "prefetch": SMALL_BLOCKS,
    }
    return tables.stream(ROWS, **settings | options)


def in_process(stream: LanceStream) -> list[list[int]]:
    """The steps as a single process gets them."""
    from ray_lance_stream.local import LocalLink
    from ray_lance_stream.shard import StreamShard
    from ray_lance_stream.topology import Seat

    with StreamShard(stream.config, Seat(), LocalLink(stream.recipe)) as shard:
        return [batch["id"].tolist() for batch in shard.iter_batches()]


def test_rows_that_kill_are_skipped_and_listed(tables: Tables, tmp_path: Path) -> None:
    """As rows that raise are: the same steps, also after a resume by two ranks whose blocks are cut elsewhere."""
    expected = in_process(stream_of(tables, None))
    assert not VICTIMS & {row for step in expected for row in step}
    log = tmp_path / "deaths"
    seen: list[list[int]] = []
    with opened(stream_of(tables, log)) as shard:
        for batch in shard.iter_batches(prefetch_batches=0):
            seen.append(batch["id"].tolist())
            if shard.step == 20:
                state = shard.state_dict()
        assert shard.stats().rows_skipped == len(VICTIMS)
        assert {(row.row_number, row.split, row.position) for row in shard.skipped} == {
            (victim, victim // 100, victim % 100) for victim in VICTIMS
        }
        assert all("kills the process" in row.reason for row in shard.skipped)
    assert seen == expected
    assert state["positions_consumed_per_split"] == [40, 41, 41, 40]

    larger = PrefetchConfig(block_bytes=260, max_buffer_bytes=1000)
    with stream_of(tables, log, prefetch=larger, resume_from=state).open(rank=0, world_size=2) as shard:
        mine = [batch["id"].tolist() for batch in shard.iter_batches()]
        assert [row.row_number for row in shard.skipped] == [60]
    shares = [np.array(step).reshape(-1, SPLITS)[:, :2].ravel().tolist() for step in expected[20:]]
    assert mine[: len(shares)] == shares


def test_rows_that_kill_are_replaced(tables: Tables, tmp_path: Path) -> None:
    policy = ReplaceRow({"id": -1})
    expected = in_process(stream_of(tables, None, on_transform_error=policy))
    seen: list[list[int]] = []
    with opened(stream_of(tables, tmp_path / "deaths", on_transform_error=policy)) as shard:
        for batch in shard.iter_batches(prefetch_batches=0):
            seen.append(batch["id"].tolist())
        assert sorted(row.row_number for row in shard.skipped if row.replaced) == sorted(VICTIMS)
        assert shard.stats().rows_skipped == 0
    assert seen == expected
    assert sum(row == -1 for step in seen for row in step) == len(VICTIMS)


def test_a_function_is_asked(tables: Tables, tmp_path: Path) -> None:
    def all_but_60(error: Exception) -> bool:
        return isinstance(error, DeadlyRowError) and "row 60 " not in str(error)

    seen: list[list[int]] = []
    with opened(stream_of(tables, tmp_path / "deaths", on_transform_error=all_but_60)) as shard:
        with pytest.raises(DeadlyRowError, match="row 60 of the table"):
            for batch in shard.iter_batches(prefetch_batches=0):
                seen.append(batch["id"].tolist())
        assert sorted(row.row_number for row in shard.skipped) == [130, 232]
    assert seen == in_process(stream_of(tables, None))[: len(seen)]
    assert len(seen) > 16


def test_first_rows_that_kill_are_skipped(tables: Tables, tmp_path: Path) -> None:
    """The rows that fix the schema are built when the plan is opened, by whichever prefetcher."""
    first = frozenset({0, 101})
    expected = in_process(stream_of(tables, None, transform=Deadly(first, None)))
    with opened(stream_of(tables, None, transform=Deadly(first, tmp_path / "deaths"))) as shard:
        batches = iter(shard.iter_batches(prefetch_batches=0))
        assert [next(batches)["id"].tolist() for _ in range(3)] == expected[:3]
        assert sorted(row.row_number for row in shard.skipped) == sorted(first)


def test_a_row_that_kills_who_reads_it_is_skipped(tables: Tables, tmp_path: Path) -> None:
    """Also who reads it before it is asked for anything: every prefetcher that starts reads the table's first row."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, signal, lance\n"
        "take = lance.LanceDataset.take\n"
        "def deadly(self, indices, *args, **options):\n"
        "    if 0 in indices:\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return take(self, indices, *args, **options)\n"
        "lance.LanceDataset.take = deadly\n"
    )
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    prefetch = dataclasses.replace(SMALL_BLOCKS, runtime_env={"env_vars": {"PYTHONPATH": path}})
    expected = in_process(stream_of(tables, None, transform=Deadly(frozenset({0}), None)))
    with opened(stream_of(tables, None, transform=None, columns=["id"], prefetch=prefetch)) as shard:
        assert [batch["id"].tolist() for batch in shard.iter_batches()] == expected
        (found,) = shard.skipped
        assert found.row_number == 0 and "kills the process" in found.reason


def test_a_dataset_skips_rows_that_kill(tables: Tables, tmp_path: Path) -> None:
    import lancedb

    table = lancedb.connect(tables.uri(ROWS)).open_table("t")

    def dataset_of(log: Path | None) -> StreamingDataset:
        transform = DeadlyObjects(frozenset({130}), log)
        return StreamingDataset(
            table,
            num_splits=SPLITS,
            shuffle=False,
            transform=transform,
            on_transform_error="skip",
            prefetch=SMALL_BLOCKS,
        )

    expected = list(dataset_of(None))
    dataset = dataset_of(tmp_path / "deaths")
    dataset.use_prefetchers(2)
    assert list(dataset) == expected
    assert [row.row_number for row in dataset.skipped] == [130]
    dataset.close()
