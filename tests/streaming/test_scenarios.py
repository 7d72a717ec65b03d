"""Stories that users of streaming loaders tell: what should have happened, on both implementations or on ours."""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import lancedb
import pyarrow as pa
import pytest
from conftest import Tables, rows_from

from ray_lance_stream.agreement import ThreadAgreement
from streaming.sides import LANCEDB, OpenTable, Side, batch_ids, flat, ids, merged, saved, take_cycles

pytestmark = pytest.mark.thorough

PLAIN: dict[str, Any] = {"shuffle": False}


def test_the_trainer_dies_after_one_batch(side: Side, tmp_path: Any) -> None:
    table = lancedb.connect(str(tmp_path)).create_table("t", pa.table({"id": [1, 2, 10, 20]}))
    dataset = side.one(table, num_splits=2, **PLAIN)
    first = batch_ids(side.loader(dataset, batch_size=2), 1)
    assert first == [[1, 10]]
    resumed = side.one(table, saved(dataset.state_dict()), num_splits=2, **PLAIN)
    assert batch_ids(side.loader(resumed, batch_size=2)) == [[2, 20]]


SETTINGS: dict[str, Any] = {"shuffle_seed": 3, "filter": "id < 200", "shuffle_clump_size": 4, "epoch": 1}


@pytest.mark.parametrize(
    ("field", "value"),
    [("filter", "id < 190"), ("filter", None), ("shuffle", False), ("shuffle_clump_size", None), ("epoch", 2)],
)
def test_a_checkpoint_loaded_with_another_setting(ours: Side, table_of: OpenTable, field: str, value: object) -> None:
    dataset = LANCEDB.one(table_of(211), **SETTINGS)
    ids(dataset, 40)
    LANCEDB.one(table_of(211), saved(dataset.state_dict()), **SETTINGS | {field: value})  # no word

    dataset = ours.one(table_of(211), **SETTINGS)
    taken = ids(dataset, 40)
    state = saved(dataset.state_dict())
    with pytest.raises(ValueError, match=field) as raised:
        ours.one(table_of(211), state, **SETTINGS | {field: value})
    assert str(SETTINGS.get(field, True)) in str(raised.value)  # both values are named
    assert str(value) in str(raised.value) or value is None
    # What changes no order may change.
    resumed = ours.one(table_of(211), state, columns=["id"], read_batch_size=7, **SETTINGS)
    assert taken + ids(resumed) == ids(LANCEDB.one(table_of(211), **SETTINGS))


def test_the_table_is_compacted_before_a_new_reader_starts(ours: Side, tables: Tables) -> None:
    uri, table = tables.own(211)
    expected = ids(ours.one(table))
    dataset = ours.one(table)
    taken = ids(dataset, 80)
    table.delete("id % 2 = 0")
    table.optimize()
    taken += ids(dataset, 40)  # of the version it was built for
    state = saved(dataset.state_dict())
    resumed = ours.one(lancedb.connect(uri).open_table("t"), state)
    assert taken + ids(resumed) == expected


def test_the_version_of_a_checkpoint_is_cleaned_up(ours: Side, tables: Tables) -> None:
    """An error that says so, before the first row."""
    uri, table = tables.own(24)
    dataset = ours.one(table)
    ids(dataset, 8)
    state = saved(dataset.state_dict())
    table.delete("id = 3")
    table.optimize(cleanup_older_than=timedelta(0), delete_unverified=True)
    fresh = ours.one(lancedb.connect(uri).open_table("t"))
    with pytest.raises(Exception, match="version") as raised:
        fresh.load_state_dict(state)
        next(iter(fresh))
    assert "lance_stream" in type(raised.value).__module__


def test_a_checkpoint_at_the_end_of_an_epoch(ours: Side, table_of: OpenTable) -> None:
    """The rest of its epoch is empty, so that what ends an epoch runs; then comes a whole one."""
    epochs = [ids(LANCEDB.one(table_of(24), epoch=epoch)) for epoch in range(3)]
    for world_size in (1, 2):
        datasets = ours.open(table_of(24), world_size)
        assert take_cycles(datasets) == epochs[0]
        resumed = ours.open(table_of(24), world_size, merged(ours, datasets))
        assert [take_cycles(resumed) for _ in range(3)] == [[], epochs[1], epochs[2]]
        assert [take_cycles(datasets) for _ in range(2)] == epochs[1:]  # the run that went on


def test_the_loop_is_left_with_the_last_batch(ours: Side, table_of: OpenTable) -> None:
    """Whether the loop asked for one more or not, the state is the same and the next epoch follows."""
    dataset = ours.one(table_of(24))
    assert ids(dataset, 24) == ids(LANCEDB.one(table_of(24)))
    at_end = saved(dataset.state_dict())
    other = ours.one(table_of(24))
    ids(other)
    assert saved(other.state_dict()) == at_end
    loaded = ours.one(table_of(24), at_end)
    assert [len(ids(d)) for d in (dataset, other, loaded, loaded)] == [24, 24, 0, 24]
    assert [d.state_dict()["epoch"] for d in (dataset, other, loaded)] == [1, 1, 1]
    short = ours.one(table_of(24))
    loader = ours.loader(short, batch_size=7)
    assert [len(batch) for batch in batch_ids(loader)] == [7, 7, 7, 3]
    assert saved(short.state_dict()) == at_end


@pytest.mark.parametrize("batch_size", [4, 3])
def test_saved_and_resumed_twice_in_one_epoch(side: Side, table_of: OpenTable, batch_size: int) -> None:
    """30 batches, save; 10 more, save; the third run begins with batch 40."""
    expected = batch_ids(side.loader(side.one(table_of(211)), batch_size=batch_size))
    state: Any = None
    found: list[list[int]] = []
    for count in (30, 10, None):
        dataset = side.one(table_of(211), state)
        found += batch_ids(side.loader(dataset, batch_size=batch_size), count)
        state = saved(dataset.state_dict())
    assert found == expected
    assert sum(state["samples_consumed_per_split"]) == 208


def test_epochs_after_a_resumed_one_are_whole(ours: Side, table_of: OpenTable) -> None:
    dataset = ours.one(table_of(211), epoch=1)
    ids(dataset, 150)
    resumed = ours.one(table_of(211), saved(dataset.state_dict()), epoch=1)
    loader = ours.loader(resumed, batch_size=4)
    lengths = [len(flat(batch_ids(loader))) for _ in range(3)]
    assert lengths == [58, 208, 208]
    assert resumed.state_dict()["epoch"] == 3


def test_a_state_of_a_later_epoch_that_the_run_reached_by_itself(ours: Side, table_of: OpenTable) -> None:
    """A dataset built for epoch 0 that ran into epoch 2 is resumed by one built with the state's epoch."""
    dataset = ours.one(table_of(24))
    taken = [ids(dataset), ids(dataset), ids(dataset, 10)]
    state = saved(dataset.state_dict())
    assert state["epoch"] == 2
    resumed = ours.one(table_of(24), state, epoch=state["epoch"], shuffle_seed=state["shuffle_seed"])
    assert taken[2] + ids(resumed) == ids(LANCEDB.one(table_of(24), epoch=2))


def test_bad_rows_on_one_rank_only(ours: Side, table_of: OpenTable) -> None:
    """Its ranks end apart, and a collective of the longer one waits for ever; a coordinator finds the common end."""

    def transform(batch: Any) -> Any:
        if {1, 2, 3} & set(batch["id"].to_pylist()):
            raise ArithmeticError("bad")
        return batch.to_pylist()

    settings: dict[str, Any] = {"transform": transform, "on_transform_error": "skip"} | PLAIN
    assert [len(ids(dataset)) for dataset in LANCEDB.open(table_of(24), 2, **settings)] == [6, 12]
    both = ThreadAgreement(2)  # as "world" is for processes
    settings |= {"num_splits": 4, "world_size": 2}
    datasets = [ours.dataset(table_of(24), rank=rank, coordinator=both.member(rank), **settings) for rank in range(2)]
    with ThreadPoolExecutor(2) as pool:
        shares = list(pool.map(ids, datasets))
    assert shares == [[0, 6, 4, 7, 5, 8], [12, 18, 13, 19, 14, 20]]
    assert [dataset.left_behind for dataset in datasets] == [3, 6]


def test_timing_changes_nothing(side: Side, table_of: OpenTable) -> None:
    def slow_at_times(batch: Any) -> Any:
        time.sleep(random.random() / 100)
        return batch.to_pylist()

    options: dict[str, Any] = {"transform": slow_at_times, "read_batch_size": 16, "transform_parallelism": 3}
    assert ids(side.one(table_of(211), **options)) == ids(LANCEDB.one(table_of(211)))


def test_what_a_copy_carries_does_not_grow_with_the_table(ours: Side, table_of: OpenTable, tmp_path: Any) -> None:
    import pickle

    many = lancedb.connect(str(tmp_path)).create_table("t", rows_from(0, 100_000))
    shipped = LANCEDB.one(many).__getstate__()["_perm_table"][1].nbytes
    assert shipped >= 16 * 100_000
    small, large = (len(pickle.dumps(ours.one(table))) for table in (table_of(24), many))
    assert large < small + 1000
