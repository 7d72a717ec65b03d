"""The loader with Ray prefetchers: the same batches and states, whoever reads and whoever dies."""

from __future__ import annotations

import gc
import os
import signal
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import ray
from runs import wait_until

from ray_lance_stream import ConfigError, PrefetchConfig, TransformError
from streaming.sides import LANCEDB, OpenTable, Side, batch_ids, canonical, counts, flat, ids, merged, saved

pytestmark = [pytest.mark.cluster, pytest.mark.slow]
SMALL_BLOCKS = PrefetchConfig(block_bytes=500, max_buffer_bytes=5000)


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


def test_batches_depend_neither_on_prefetchers_nor_on_their_deaths(
    ours: Side, table_of: OpenTable, expected: list[list[int]]
) -> None:
    """One dies with rows that nobody has seen; the next epoch follows."""
    dataset = ours.one(table_of(211), prefetch=SMALL_BLOCKS, transform=with_pids)
    loader = ours.loader(dataset, batch_size=8, num_workers=2)
    found: list[list[int]] = []
    pids: set[int] = set()
    for batch in loader:
        found.append(batch["id"].tolist())
        pids |= set(batch["pid"].tolist())
        assert sum(counts(dataset.state_dict())) == len(flat(found))  # what is read ahead does not count
        if len(found) == 2:
            os.kill(batch["pid"][0], signal.SIGKILL)
    assert found == expected
    assert len(pids) >= 2
    assert os.getpid() not in pids
    assert flat(batch_ids(loader)) == ids(LANCEDB.one(table_of(211), epoch=1))
    dataset.close()


def test_a_state_moves_between_numbers_of_prefetchers(
    ours: Side, table_of: OpenTable, expected: list[list[int]]
) -> None:
    """Saved after two batches of what two prefetchers have read, and again after two more; then on LanceDB's class."""
    found: list[list[int]] = []
    state: Any = None
    for workers in (2, 0, 1):
        dataset = ours.one(table_of(211), state)
        found += batch_ids(ours.loader(dataset, batch_size=8, num_workers=workers), 2)
        state = saved(dataset.state_dict())
        assert counts(state) == [len(found) * 2] * 4
        dataset.close()
    found += batch_ids(LANCEDB.loader(LANCEDB.one(table_of(211), state), batch_size=8))
    assert found == expected


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
    """A transform."""
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


def ends_the_process(_: Any) -> Any:
    """A transform."""
    raise SystemExit("of a row")


def test_a_transform_that_ends_its_process_is_told_as_an_error_of_ours(ours: Side, table_of: OpenTable) -> None:
    dataset = ours.one(table_of(24), transform=ends_the_process)
    with pytest.raises(TransformError, match=r"SystemExit was raised.*of a row") as caught:
        list(ours.loader(dataset, batch_size=8, num_workers=1))
    assert not isinstance(caught.value, ray.exceptions.RayTaskError)
    dataset.close()


def test_a_transform_that_cannot_travel_is_refused_at_construction(ours: Side, table_of: OpenTable) -> None:
    lock = threading.Lock()

    def transform(batch: Any) -> Any:
        with lock:
            return batch.to_pylist()

    dataset = ours.one(table_of(24), transform=transform)
    with pytest.raises(ConfigError, match="transform cannot be sent to the prefetchers"):
        ours.loader(dataset, batch_size=8, num_workers=1)
    assert len(ids(dataset)) == 24  # in this process it works


def actors() -> int:
    """How many of ours there are."""
    return len(ray.util.list_named_actors(all_namespaces=True))


def test_rows_that_fail_are_skipped_and_no_actor_outlives_its_dataset(ours: Side, table_of: OpenTable) -> None:
    wait_until(lambda: actors() == 0, 60, "earlier tests' actors are gone")
    options: dict[str, Any] = {"transform": fails_at_ninety, "on_transform_error": "skip"}
    dataset = ours.one(table_of(211), **options)
    loader = ours.loader(dataset, batch_size=8, num_workers=1)
    assert actors() == 0  # started when they are needed
    assert flat(batch_ids(loader)) == ids(LANCEDB.one(table_of(211), **options))
    assert dataset.rows_skipped == 1
    assert actors() > 0
    dataset.close()
    wait_until(lambda: actors() == 0, 60, "closed")
    assert len(batch_ids(loader, 1)) == 1  # starts them again
    assert actors() > 0
    del dataset, loader
    wait_until(lambda: actors() == 0, 60, "collected")


def collect_on_a_thread_of_rays() -> None:
    """Has Python look for garbage where Ray completes futures, which must not wait for Ray."""
    collected = threading.Event()
    collecting_on: list[str] = []

    def collect(_: Any) -> None:
        collecting_on.append(threading.current_thread().name)
        gc.collect()
        collected.set()

    @ray.remote
    def answer() -> int:
        return 1

    answer.remote().future().add_done_callback(collect)
    assert collected.wait(60), "the collection of garbage hangs"
    assert collecting_on != [threading.main_thread().name]


@pytest.mark.parametrize("left", [False, True], ids=["ended", "in an epoch"])
def test_actors_end_with_a_dataset_that_is_found_on_a_thread_of_rays(
    ours: Side, table_of: OpenTable, left: bool
) -> None:
    dataset: Any = ours.one(table_of(211), prefetch=SMALL_BLOCKS)
    batches = iter(ours.loader(dataset, batch_size=8, num_workers=1))
    assert len(batch_ids(batches, 2 if left else None)) == (2 if left else 26)
    alive = weakref.ref(dataset)
    gc.disable()  # so that it is not found anywhere else
    try:
        cycle = [dataset, batches]
        cycle.append(cycle)
        del dataset, batches, cycle
        assert alive() is not None
        collect_on_a_thread_of_rays()
    finally:
        gc.enable()
    assert alive() is None
    wait_until(lambda: actors() == 0, 60, "the actors are gone")


def test_arguments_of_processes_are_named(ours: Side, table_of: OpenTable, caplog: pytest.LogCaptureFixture) -> None:
    useless: dict[str, Any] = {"worker_init_fn": print, "multiprocessing_context": "spawn", "prefetch_factor": 4}
    with caplog.at_level("WARNING", logger="ray_lance_stream"):
        ours.loader(ours.one(table_of(24)), num_workers=2, **useless)
    (record,) = caplog.records
    for name in useless:
        assert name in record.getMessage()
