"""One order of rows: for any number of ranks and workers, and the very order of ``lancedb.streaming``."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from streaming.sides import LANCEDB, SPLITS, OpenTable, Side, canonical, ids, take_cycles

pytestmark = pytest.mark.thorough

ORDERS: dict[str, dict[str, Any]] = {
    "shuffled": {},
    "sequential": {"shuffle": False},
    "another seed, third epoch": {"shuffle_seed": 2**40 + 11, "epoch": 3},
    "clumps": {"shuffle_clump_size": 5},
    "filtered": {"filter": "id % 3 != 1", "epoch": 1},
    "filtered, sequential": {"filter": "id >= 5 AND text != 'row 7'", "shuffle": False},
    "filtered clumps": {"filter": "id % 7 != 0", "shuffle_clump_size": 4, "shuffle_seed": 9},
}


@pytest.mark.parametrize(("order", "rows"), [("shuffled", 24), ("sequential", 24), *((order, 211) for order in ORDERS)])
def test_each_rank_gets_the_rows_that_lancedb_gives_it(ours: Side, table_of: OpenTable, order: str, rows: int) -> None:
    """And together the ranks get one order, whatever their number, in which no row comes twice."""
    table, options = table_of(rows), ORDERS[order]
    whole = ids(LANCEDB.one(table, **options))
    kept = table.count_rows(options.get("filter"))
    assert len(whole) == len(set(whole)) == kept - kept % SPLITS
    for size in (1, 2, 4):
        theirs = [ids(dataset) for dataset in LANCEDB.open(table, size, **options)]
        mine = [ids(dataset) for dataset in ours.open(table, size, **options)]
        assert mine == theirs
        assert canonical(mine) == whole
    assert take_cycles(ours.open(table, 3, **options)) == whole  # of which LanceDB has none


def test_the_sequential_order(side: Side, table_of: OpenTable) -> None:
    dataset = side.one(table_of(24), shuffle=False)
    assert ids(dataset) == [0, 6, 12, 18, 1, 7, 13, 19, 2, 8, 14, 20, 3, 9, 15, 21, 4, 10, 16, 22, 5, 11, 17, 23]
    # The tail of the table fills no cycle.
    assert ids(side.one(table_of(11), shuffle=False)) == [0, 2, 4, 6, 1, 3, 5, 7]


def test_epochs_and_seeds_have_orders_of_their_own(side: Side, table_of: OpenTable) -> None:
    options: list[dict[str, Any]] = [{}, {"epoch": 1}, {"shuffle_seed": 1}, {"epoch": 1}]
    orders = [ids(side.one(table_of(211), **given)) for given in options]
    assert orders[1] == orders[3]
    assert len({tuple(order) for order in orders}) == 3
    unshuffled = [ids(side.one(table_of(211), shuffle=False, epoch=epoch, shuffle_seed=epoch)) for epoch in (0, 5)]
    assert unshuffled[0] == unshuffled[1]


def test_the_number_of_splits_is_by_default_that_of_the_ranks(ours: Side, table_of: OpenTable) -> None:
    for size in (1, 3):
        theirs = [ids(dataset) for dataset in LANCEDB.open(table_of(24), size, num_splits=None)]
        mine = ours.open(table_of(24), size, num_splits=None)
        assert [ids(dataset) for dataset in mine] == theirs
        assert [dataset.num_splits for dataset in mine] == [size] * size


@pytest.mark.parametrize(
    "speed",
    [
        {"read_batch_size": 1},
        {"read_batch_size": 1000, "io_queue_depth": 1},
        {"prefetch_batches": 2, "transform_parallelism": 1, "transform_queue_depth": 1},
    ],
    ids=["single rows", "one batch", "short queues"],
)
def test_what_changes_speed_changes_no_row(side: Side, table_of: OpenTable, speed: dict[str, Any]) -> None:
    expected = ids(LANCEDB.one(table_of(211), shuffle_seed=3))
    assert ids(side.one(table_of(211), shuffle_seed=3, **speed)) == expected


def worker(index: int, count: int) -> Any:
    """What torch's get_worker_info() would say."""
    return SimpleNamespace(id=index, num_workers=count)


@pytest.mark.parametrize(("world_size", "workers"), [(1, 2), (1, 4), (2, 2)])
def test_workers_of_a_rank_share_its_splits(ours: Side, table_of: OpenTable, world_size: int, workers: int) -> None:
    def shares(side: Side) -> list[list[int]]:
        return [
            ids(dataset)
            for index in range(workers)
            for dataset in side.open(table_of(24), world_size, worker_info_override=worker(index, workers))
        ]

    theirs = shares(LANCEDB)
    assert shares(ours) == theirs
    assert sorted(i for share in theirs for i in share) == list(range(24))


def test_workers_must_divide_the_splits_of_a_rank(side: Side, table_of: OpenTable) -> None:
    dataset = side.one(table_of(24), worker_info_override=worker(0, 3))
    with pytest.raises(ValueError, match="num_workers"):
        next(iter(dataset))


def test_rows_are_dicts_of_python_values(ours: Side, rich: Any) -> None:
    theirs, mine = list(LANCEDB.one(rich)), list(ours.one(rich))
    assert mine == theirs
    for a, b in zip(mine, theirs, strict=True):
        assert list(a) == list(b)
        assert [type(value) for value in a.values()] == [type(value) for value in b.values()]
    assert list(ours.one(rich, columns=["text", "id"])) == list(LANCEDB.one(rich, columns=["text", "id"]))


def test_a_transform_makes_the_rows(ours: Side, table_of: OpenTable) -> None:
    """Any iterable of as many items as rows will do, and items may be anything."""
    seen: list[int] = []

    def generate(batch: Any) -> Any:
        seen.append(batch.num_rows)
        names = batch["text"].to_pylist()
        return ((i, {"text": name}) for i, name in zip(batch["id"].to_pylist(), names, strict=True))

    for transform in (
        generate,
        lambda batch: batch["id"].to_numpy(),
        lambda batch: [object for _ in range(len(batch))],
    ):
        theirs = list(LANCEDB.one(table_of(24), transform=transform))
        assert list(ours.one(table_of(24), transform=transform)) == theirs
    assert sum(seen) == 48
