"""The loader with Ray prefetchers: the same batches and states, whoever reads and whoever dies."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import ray
from runs import wait_until

from ray_lance_stream import PrefetchConfig
from streaming.sides import LANCEDB, OpenTable, Side, batch_ids, canonical, counts, flat, ids, merged, saved

pytestmark = pytest.mark.cluster
SMALL_BLOCKS = PrefetchConfig(block_bytes=500, max_buffer_bytes=5000)
PLAIN: dict[str, Any] = {"shuffle": False}


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture
def expected(table_of: OpenTable) -> list[list[int]]:
    """The batches of a standard loader in process."""
    return batch_ids(LANCEDB.loader(LANCEDB.one(table_of(211)), batch_size=8))


def with_pids(batch: Any) -> list[dict[str, int]]:
    """A transform that says which process it ran in."""
    return [{"id": i, "pid": os.getpid()} for i in batch["id"].to_pylist()]


@pytest.mark.parametrize("num_workers", [1, 3])
def test_batches_do_not_depend_on_the_number_of_prefetchers(
    ours: Side, table_of: OpenTable, expected: list[list[int]], num_workers: int
) -> None:
    dataset = ours.one(table_of(211), prefetch=SMALL_BLOCKS, transform=with_pids)
    loader = ours.loader(dataset, batch_size=8, num_workers=num_workers)
    found, pids = [], set()
    for batch in loader:
        found.append(batch["id"].tolist())
        pids |= set(batch["pid"].tolist())
        assert sum(counts(dataset.state_dict())) == len(flat(found))  # what is read ahead does not count
    assert found == expected
    assert os.getpid() not in pids
    assert batch_ids(loader, 1)[0] == ids(LANCEDB.one(table_of(211), epoch=1), 8)
    dataset.close()


@pytest.mark.parametrize(("before", "after"), [(2, 0), (0, 2), (2, 1)])
def test_a_state_moves_between_numbers_of_prefetchers(
    ours: Side, table_of: OpenTable, expected: list[list[int]], before: int, after: int
) -> None:
    """Saved after two batches, and again after two more."""
    found: list[list[int]] = []
    state: Any = None
    for workers, count in ((before, 2), (after, 2), (before, None)):
        dataset = ours.one(table_of(211), state)
        found += batch_ids(ours.loader(dataset, batch_size=8, num_workers=workers), count)
        state = saved(dataset.state_dict())
        dataset.close()
    assert found == expected


def test_the_trainer_dies_after_one_batch(ours: Side, table_of: OpenTable) -> None:
    """Two prefetchers have read everything; the state covers one batch, and LanceDB's class continues with the rest."""
    dataset = ours.one(table_of(24), **PLAIN)
    assert batch_ids(ours.loader(dataset, batch_size=4, num_workers=2), 1) == [[0, 6, 12, 18]]
    state = saved(dataset.state_dict())
    assert counts(state) == [1, 1, 1, 1]
    dataset.close()
    assert ids(LANCEDB.one(table_of(24), state, **PLAIN)) == ids(LANCEDB.one(table_of(24), **PLAIN))[4:]


def test_a_prefetcher_dies_with_rows_nobody_has_seen(
    ours: Side, table_of: OpenTable, expected: list[list[int]]
) -> None:
    dataset = ours.one(table_of(211), prefetch=SMALL_BLOCKS, transform=with_pids)
    found, killed = [], None
    for batch in ours.loader(dataset, batch_size=8, num_workers=2):
        found.append(batch["id"].tolist())
        if killed is None:
            killed = int(batch["pid"][0])
            os.kill(killed, signal.SIGKILL)
    assert found == expected
    dataset.close()


def test_two_ranks_share_a_cluster(ours: Side, table_of: OpenTable) -> None:
    datasets = ours.open(table_of(211), 2)
    loaders = [ours.loader(dataset, batch_size=4, num_workers=1) for dataset in datasets]
    iterators = [iter(loader) for loader in loaders]
    shares = [flat(batch_ids(iterator, 10)) for iterator in iterators]
    assert canonical(shares) == ids(LANCEDB.one(table_of(211)), 80)
    assert counts(merged(ours, datasets)) == [20, 20, 20, 20]
    for dataset in datasets:
        dataset.close()


def fails_at_ninety(batch: Any) -> Any:
    if 90 in batch["id"].to_pylist():
        raise ArithmeticError("row 90 is bad")
    return batch.to_pylist()


def test_a_failing_transform_is_the_users_own_error(ours: Side, table_of: OpenTable) -> None:
    dataset = ours.one(table_of(211), transform=fails_at_ninety, prefetch=SMALL_BLOCKS)
    found: list[int] = []
    with pytest.raises(ArithmeticError, match="row 90 is bad"):
        for batch in ours.loader(dataset, batch_size=8, num_workers=2):
            found += batch["id"].tolist()
    assert sum(counts(dataset.state_dict())) == len(found)
    assert found == ids(LANCEDB.one(table_of(211)))[: len(found)]
    dataset.close()


def test_rows_that_fail_in_a_prefetcher_are_skipped_and_counted(ours: Side, table_of: OpenTable) -> None:
    options: dict[str, Any] = {"transform": fails_at_ninety, "on_transform_error": "skip"}
    dataset = ours.one(table_of(211), **options)
    found = flat(batch_ids(ours.loader(dataset, batch_size=8, num_workers=2)))
    assert found == ids(LANCEDB.one(table_of(211), **options))
    assert dataset.rows_skipped == 1
    dataset.close()


def actors() -> int:
    return len(ray.util.list_named_actors(all_namespaces=True))


def test_no_actor_outlives_its_dataset(ours: Side, table_of: OpenTable) -> None:
    wait_until(lambda: actors() == 0, 60, "earlier tests' actors are gone")
    dataset = ours.one(table_of(211))
    loader = ours.loader(dataset, batch_size=8, num_workers=2)
    assert actors() == 0  # started when they are needed
    batch_ids(loader, 1)
    assert actors() > 0
    dataset.close()
    wait_until(lambda: actors() == 0, 60, "closed")
    batch_ids(loader, 1)
    assert actors() > 0
    del dataset, loader
    wait_until(lambda: actors() == 0, 60, "collected")


def test_arguments_of_processes_are_named(ours: Side, table_of: OpenTable, caplog: pytest.LogCaptureFixture) -> None:
    useless: dict[str, Any] = {"worker_init_fn": print, "multiprocessing_context": "spawn", "prefetch_factor": 4}
    with caplog.at_level("WARNING", logger="ray_lance_stream"):
        ours.loader(ours.one(table_of(24)), num_workers=2, **useless)
    (record,) = caplog.records
    for name in useless:
        assert name in record.getMessage()
