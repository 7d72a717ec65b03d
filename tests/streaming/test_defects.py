"""What goes wrong with ``lancedb.streaming`` 0.40, shown on it first, and what happens here instead."""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import lancedb
import numpy as np
import pyarrow as pa
import pytest
from conftest import Tables, rows_from

from streaming.sides import LANCEDB, OpenTable, Side, counts, flat, ids, merged, saved, take_cycles

pytestmark = pytest.mark.thorough

PLAIN: dict[str, Any] = {"shuffle": False}
IN_ORDER = [first + step for step in range(6) for first in (0, 6, 12, 18)]


def test_ranks_at_different_steps_lose_rows_when_merged(ours: Side, table_of: OpenTable) -> None:
    def stop_apart(side: Side) -> tuple[list[Any], list[int]]:
        datasets = side.open(table_of(24), 2, **PLAIN)
        return datasets, ids(datasets[0], 6) + ids(datasets[1], 2)

    datasets, taken = stop_apart(LANCEDB)
    state = merged(LANCEDB, datasets)
    rest = [i for dataset in LANCEDB.open(table_of(24), 2, state, **PLAIN) for i in ids(dataset)]
    assert set(range(24)) - set(taken) - set(rest) == {13, 14, 19, 20}

    datasets, _ = stop_apart(ours)
    with pytest.raises(ValueError, match="different numbers of cycles"):
        merged(ours, datasets)


def test_a_state_inside_a_cycle_puts_ranks_out_of_step(ours: Side, table_of: OpenTable) -> None:
    def six_rows(side: Side) -> Any:
        dataset = side.one(table_of(24), **PLAIN)
        ids(dataset, 10)
        return saved(dataset.state_dict())

    lengths = [len(ids(dataset)) for dataset in LANCEDB.open(table_of(24), 2, six_rows(LANCEDB), **PLAIN)]
    assert lengths == [6, 8]

    state = six_rows(ours)
    with pytest.raises(ValueError, match="cycle"):
        ours.open(table_of(24), 2, state, **PLAIN)
    assert ids(ours.one(table_of(24), state, **PLAIN)) == IN_ORDER[10:]


CHANGES: dict[str, Callable[[Any], Any]] = {
    "append": lambda table: table.add(rows_from(24, 8)),
    "delete": lambda table: table.delete("id IN (0, 7, 13, 19)"),
    "delete and compact": lambda table: (table.delete("id < 3"), table.optimize()),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_table_changes_the_rest_of_the_epoch(ours: Side, tables: Tables, change: str) -> None:
    def interrupted(side: Side) -> tuple[list[int], list[int]]:
        """What comes before and after the change, and what would have come."""
        uri, table = tables.own(24)
        expected = ids(side.one(table))
        dataset = side.one(table)
        taken = ids(dataset, 8)
        state = saved(dataset.state_dict())
        CHANGES[change](table)
        return taken + ids(side.one(lancedb.connect(uri).open_table("t"), state)), expected

    found, expected = interrupted(LANCEDB)
    assert found != expected
    found, expected = interrupted(ours)
    assert found == expected


def test_a_rank_that_starts_late_reads_another_table(ours: Side, tables: Tables) -> None:
    """Rows are appended between the starts of two ranks."""

    def both_ranks(side: Side) -> tuple[list[int], list[int], Any]:
        uri, table = tables.own(24)
        first = side.dataset(table, num_splits=4, rank=0, world_size=2)
        state = first.state_dict()
        table.add(rows_from(24, 8))
        return ids(first), ids(side.dataset(table, num_splits=4, rank=1, world_size=2)), (uri, state)

    first, second, _ = both_ranks(LANCEDB)
    assert len(first) < len(second)
    assert set(first) & set(second)

    first, _, (uri, state) = both_ranks(ours)
    late = ours.dataset(lancedb.connect(uri).open_table("t"), num_splits=4, rank=1, world_size=2)
    with pytest.raises(ValueError, match="table"):
        ours.dataset.merge_state_dicts([state, late.state_dict()])
    late.load_state_dict(state)  # the same state on every rank, also at the start, and all read the same
    assert sorted(first + ids(late)) == list(range(24))


def test_a_plan_of_millions_of_rows_does_not_fit(ours: Side, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sort of its plan has 100 MB by default."""
    monkeypatch.delenv("LANCEDB_PERM_BUILDER_MEMORY_LIMIT", raising=False)
    table = lancedb.connect(str(tmp_path)).create_table("t", pa.table({"id": np.arange(3_300_000, dtype=np.int32)}))
    with pytest.raises(RuntimeError, match="Not enough memory"):
        LANCEDB.one(table)
    dataset = ours.one(table, read_batch_size=256)
    found = ids(dataset, 4)
    assert len(set(found)) == 4


def test_a_slow_consumer_gets_the_whole_table_in_memory(ours: Side, tmp_path: Any) -> None:
    rows, width = 20_000, 4096
    table = lancedb.connect(str(tmp_path)).create_table("t", pa.table({"id": range(rows), "x": [b"x" * width] * rows}))

    def mebibytes_loaded(dataset: Any, taken: int, enough: float) -> float:
        """After so many rows, or before that when it is enough."""
        iterator, loaded = iter(dataset), 0.0
        for _ in range(taken):
            next(iterator)
            time.sleep(0.001)  # the consumer's own work
            loaded = dataset.bytes_loaded / 2**20
            if loaded > enough:
                break
        iterator.close()
        return loaded

    # 78 MiB; of which the rows taken make 8.
    assert mebibytes_loaded(LANCEDB.one(table, io_queue_depth=1, transform_queue_depth=1), 2000, enough=40) > 40
    assert mebibytes_loaded(ours.one(table, max_buffer_bytes=4 * 2**20), 1000, enough=40) < 4 + 8


def test_a_batch_depends_on_the_number_of_workers(table_of: OpenTable) -> None:
    """Two workers make a batch each from half of the splits. Here a loader has no workers: see test_prefetchers.py."""
    workers = [SimpleNamespace(id=index, num_workers=2) for index in range(2)]
    datasets = [LANCEDB.one(table_of(24), worker_info_override=worker, **PLAIN) for worker in workers]
    assert [ids(dataset, 4) for dataset in datasets] == [[0, 6, 1, 7], [12, 18, 13, 19]]


def test_a_dataset_cannot_be_sent_to_a_ray_task(ours: Side, table_of: OpenTable) -> None:
    from ray import cloudpickle

    for pickler in (pickle, cloudpickle):
        with pytest.raises((TypeError, pickle.PicklingError, RuntimeError)):
            pickler.dumps(LANCEDB.one(table_of(24)))
        dataset = ours.one(table_of(24))
        taken = ids(dataset, 5)
        copy = pickle.loads(pickler.dumps(dataset))
        assert taken + ids(copy) == ids(LANCEDB.one(table_of(24)))


def test_each_rank_draws_a_seed_of_its_own(ours: Side, table_of: OpenTable) -> None:
    datasets = LANCEDB.open(table_of(211), 2, shuffle_seed=None)
    taken = flat(ids(dataset) for dataset in datasets)
    assert len(set(taken)) < len(taken)

    with pytest.raises(ValueError, match="shuffle_seed"):
        ours.open(table_of(211), 2, shuffle_seed=None)
    seeds = {ours.one(table_of(24), shuffle_seed=None).state_dict()["shuffle_seed"] for _ in range(3)}
    assert len(seeds) == 3


def test_a_read_batch_of_no_rows_hangs(ours: Side, table_of: OpenTable) -> None:
    enough, ended = threading.Event(), threading.Event()

    def transform(batch: Any) -> Any:
        if enough.is_set():
            raise ArithmeticError("enough")
        return batch.to_pylist()

    def read() -> None:
        with pytest.raises(ArithmeticError):
            ids(LANCEDB.one(table_of(24), read_batch_size=0, transform=transform))
        ended.set()

    reader = threading.Thread(target=read)
    reader.start()
    assert not ended.wait(0.5)
    enough.set()
    reader.join()
    assert ended.is_set()  # by the error alone
    for size in (0, -1):
        with pytest.raises(ValueError, match="read_batch_size"):
            ours.one(table_of(24), read_batch_size=size)


@pytest.mark.parametrize(
    ("options", "where"),
    [
        ({"rank": 9, "world_size": 2}, "iteration"),
        ({"rank": -1, "world_size": 2}, "iteration"),
        ({"num_splits": 0}, "panic"),
        ({"num_splits": -4}, "panic"),
        ({"shuffle_clump_size": 0}, "panic"),
    ],
    ids=str,
)
def test_numbers_out_of_range_fail_late_or_panic(
    ours: Side, table_of: OpenTable, options: dict[str, Any], where: str
) -> None:
    settings: dict[str, Any] = {"num_splits": 4} | options
    if where == "iteration":
        dataset = LANCEDB.dataset(table_of(24), **settings)
        with pytest.raises((ValueError, OverflowError)):
            next(iter(dataset))
    else:
        with pytest.raises(BaseException) as raised:  # its panics are no exceptions
            LANCEDB.dataset(table_of(24), **settings)
        assert not isinstance(raised.value, ValueError)
    name = next(iter(options))
    with pytest.raises(ValueError, match=name):
        ours.dataset(table_of(24), **settings)


def test_a_second_pass_yields_nothing(ours: Side, table_of: OpenTable) -> None:
    dataset = LANCEDB.one(table_of(24))
    assert [len(ids(dataset)) for _ in range(3)] == [24, 0, 0]
    dataset = ours.one(table_of(24))
    passes = [ids(dataset) for _ in range(3)]
    assert passes == [ids(LANCEDB.one(table_of(24), epoch=epoch)) for epoch in range(3)]


def test_workers_that_stay_are_recommended_and_refused(ours: Side, table_of: OpenTable) -> None:
    """Its pages recommend persistent_workers=True with the dataset, which its loader forbids; ours says why."""
    for side, said in ((LANCEDB, "persistent_workers"), (ours, "outlive an epoch")):
        with pytest.raises(ValueError, match=said):
            side.loader(side.one(table_of(24)), num_workers=2, persistent_workers=True)


def test_the_number_of_ranks_must_divide_that_of_splits(ours: Side, table_of: OpenTable) -> None:
    with pytest.raises(ValueError, match="divisible"):
        LANCEDB.open(table_of(211), 3)
    assert take_cycles(ours.open(table_of(211), 3)) == ids(LANCEDB.one(table_of(211)))


def test_a_batch_that_fails_ends_checkpointing_for_good(ours: Side, table_of: OpenTable) -> None:
    def fails_once(side: Side) -> tuple[Any, list[list[int]]]:
        failures = [ArithmeticError("bad")]

        def collate(rows: list[Any]) -> list[int]:
            if rows[0]["id"] == 1 and failures:
                raise failures.pop()
            return [row["id"] for row in rows]

        dataset = side.one(table_of(24), **PLAIN)
        loader = side.loader(dataset, batch_size=4, collate_fn=collate)
        taken = []
        with pytest.raises(ArithmeticError):
            for batch in loader:
                taken.append(batch)  # the loop is left by the error
        return dataset, taken + list(loader)

    dataset, taken = fails_once(LANCEDB)
    assert [1, 7, 13, 19] not in taken
    with pytest.raises(RuntimeError, match="invalid"):
        dataset.state_dict()

    dataset, taken = fails_once(ours)
    assert flat(taken) == IN_ORDER
    assert counts(dataset.state_dict()) == [6, 6, 6, 6]
