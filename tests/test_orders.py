"""LanceDB's order and the user's own plan on streams: their rows, resumes, states of lancedb.streaming, and errors."""

from __future__ import annotations

import json
from typing import Any

import lancedb
import numpy as np
import pyarrow as pa
import pytest
from conftest import Tables
from lancedb.permutation import permutation_builder
from lancedb.streaming import StreamingDataset as LanceDBDataset

from ray_lance_stream import ConfigError, LanceStream, StateError, StateMismatchError
from ray_lance_stream.explaining import rows_of_step
from ray_lance_stream.testing import check_resume_at_every_step, global_batches

pytestmark = pytest.mark.thorough

ROWS = 50


def lancedb_rows(uri: str, epoch: int = 0, **options: Any) -> list[int]:
    """The ids that one rank of LanceDB's class yields."""
    table = lancedb.connect(uri).open_table("t")
    settings = {"num_splits": 4, "shuffle_seed": 7} | options
    return [row["id"] for row in LanceDBDataset(table, epoch=epoch, **settings)]


def ids(stream: LanceStream, world_size: int = 1, **options: Any) -> list[int]:
    return [i for batch in global_batches(stream, world_size, **options) for i in batch.columns["id"].tolist()]


@pytest.mark.parametrize("options", [{}, {"filter": "id % 3 > 0"}, {"shuffle_clump_size": 4}, {"shuffle": False}])
def test_lancedbs_order_is_that_of_its_class_in_every_epoch(tables: Tables, options: dict[str, Any]) -> None:
    stream = tables.stream(ROWS, order="lancedb", **options)
    both = ids(stream, 3, epoch_count=2)
    assert both == lancedb_rows(tables.uri(ROWS), **options) + lancedb_rows(tables.uri(ROWS), 1, **options)
    with stream.open() as shard:
        rows = 33 if "filter" in options else ROWS
        assert (shard.num_rows, shard.dropped_rows) == (rows // 4 * 4, rows % 4)


def test_lancedbs_order_resumes_exactly(tables: Tables) -> None:
    check_resume_at_every_step(tables.stream(ROWS, order="lancedb"), (1, 3))


def test_a_state_of_lancedb_goes_on_in_a_stream(tables: Tables, caplog: pytest.LogCaptureFixture) -> None:
    theirs = LanceDBDataset(lancedb.connect(tables.uri(ROWS)).open_table("t"), num_splits=4, shuffle_seed=7)
    rows = iter(theirs)
    taken = [next(rows)["id"] for _ in range(8)]
    state = json.loads(json.dumps(theirs.state_dict()))
    stream = tables.stream(ROWS, order="lancedb", resume_from=state)
    assert taken + ids(stream, 2) == lancedb_rows(tables.uri(ROWS))
    assert "does not say what it was taken from" in caplog.text
    with pytest.raises(StateError, match="order='lancedb'"):
        tables.stream(ROWS, resume_from=state)
    with pytest.raises(StateMismatchError, match="shuffle_seed differs"):
        ids(tables.stream(ROWS, order="lancedb", shuffle_seed=8, resume_from=state))


def plan_of(uri: str, splits: list[list[int]]) -> pa.Table:
    """A plan of rows by id, in splits."""
    table = lancedb.connect(uri).open_table("t")
    found = table.search().select(["id"]).with_row_id(True).to_arrow()
    row_id = dict(zip(found["id"].to_pylist(), found["_rowid"].to_pylist(), strict=True))
    pairs = [(row_id[i], split) for split, rows in enumerate(splits) for i in rows]
    ids_, splits_ = zip(*pairs, strict=True)
    return pa.table({"row_id": pa.array(ids_, pa.uint64()), "split_id": pa.array(splits_, pa.uint64())})


def test_a_plan_gives_its_rows_in_its_order_with_repeats(tables: Tables) -> None:
    uri = tables.uri(ROWS)
    plan = plan_of(uri, [[5, 5, 7, 49], [0, 30, 5, 1], [9, 8, 7, 6, 3]])
    stream = LanceStream(uri, "t", num_splits=3, global_batch_size=6, plan=plan)
    expected = [5, 0, 9, 5, 30, 8, 7, 5, 7, 49, 1, 6]
    assert ids(stream, 2, epoch_count=2) == expected * 2, "every epoch goes through the plan"
    with stream.open() as shard:
        assert shard.dropped_rows == 1
    check_resume_at_every_step(stream, (1, 3))
    found = rows_of_step(stream, 2, columns=["id"])
    assert found.columns is not None
    assert found.columns["id"].to_pylist() == expected[6:]


def test_a_persisted_permutation_keeps_its_version(tables: Tables) -> None:
    uri, table = tables.own(ROWS)
    built = permutation_builder(table).split_random(fixed=4, seed=3).execute()
    before = built.to_arrow()["row_id"].to_pylist()
    table.delete("id < 10")
    table.optimize()
    stream = LanceStream(uri, "t", num_splits=4, global_batch_size=8, plan=built)
    assert sorted(ids(stream)) == sorted(row["id"] for row in LanceDBDataset(_at(uri, 2), num_splits=4, shuffle_seed=3))
    assert len(before) == 48


def _at(uri: str, version: int) -> Any:
    table = lancedb.connect(uri).open_table("t")
    table.checkout(version)
    return table


def test_states_of_other_plans_are_refused(tables: Tables) -> None:
    uri = tables.uri(ROWS)
    one, two = ([[0, 1], [2, 3]], [[0, 1], [2, 4]])
    options: dict[str, Any] = {"num_splits": 2, "global_batch_size": 2}
    first = LanceStream(uri, "t", plan=plan_of(uri, one), **options)
    state = global_batches(first, stop_after=1)[-1].state
    assert ids(first, state=state) == [1, 3]
    with pytest.raises(StateMismatchError, match="plan_digest differs"):
        ids(LanceStream(uri, "t", plan=plan_of(uri, two), **options), state=state)
    with pytest.raises(StateMismatchError, match="order differs"):
        ids(LanceStream(uri, "t", shuffle=False, **options), state=state)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ("no table", "plan is not valid"),
        (pa.table({"row_id": [1]}), "plan is not valid"),
        (pa.table({"row_id": [1, 2], "split_id": [0, 2]}), "some of which have none"),
        (pa.table({"row_id": [1.5, 2], "split_id": [0, 1]}), "row_id of type double"),
        (pa.table({"row_id": pa.array([], pa.uint64()), "split_id": pa.array([], pa.uint64())}), "0 rows"),
        (pa.table({"row_id": [1, 2, 3], "split_id": [0, 1, 2]}), "num_splits is not"),
    ],
)
def test_plans_that_are_none(tables: Tables, plan: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tables.stream(ROWS, num_splits=2, plan=plan)


def test_a_plan_of_rows_that_are_not_there_is_refused_before_the_first_step(tables: Tables) -> None:
    plan = pa.table({"row_id": np.array([0, 1 << 40], np.uint64), "split_id": [0, 1]})
    with pytest.raises(ConfigError, match="names rows"), tables.stream(ROWS, num_splits=2, plan=plan).open():
        pass
