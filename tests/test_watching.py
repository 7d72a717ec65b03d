"""A run of Ray Train that is looked at while it goes on: what it says of itself, to its driver and to others."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import ray
from conftest import Tables
from runs import fit, opened, wait_until
from watchloops import Sleepy, watched

from ray_lance_stream import LanceStream, PrefetchConfig

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("cluster")]
ROWS, RUN, TRAIN_S = 400, "watched-run", 0.02
# 8 rows take 0.16 s of a prefetcher, while a trainer would take them in 0.02 s.
ROW_S = 0.02
SMALL = PrefetchConfig(num_actors=2, block_bytes=300, max_buffer_bytes=8000, placement_timeout_s=120, idle_timeout_s=20)


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    ray.init(
        address="local",
        num_cpus=4,
        include_dashboard=False,
        log_to_driver=False,
        _system_config={"metrics_report_interval_ms": 500},
    )
    yield
    ray.shutdown()


@dataclass(kw_only=True)
class Run:
    """The run that is looked at."""

    stream: LanceStream
    directory: Path


@pytest.fixture(scope="module")
def run(cluster: None, tables: Tables, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Two workers that wait for a slow transform, in their second group."""
    del cluster
    directory = tmp_path_factory.mktemp("watched")
    stream = tables.stream(ROWS, transform=Sleepy(ROW_S, directory / "frozen"), prefetch=SMALL)
    failed: list[BaseException] = []

    def train() -> None:
        options: dict[str, Any] = {"dir": str(directory), "train_s": TRAIN_S}
        try:
            fit(watched, {"train": stream}, 2, directory, **options, name=RUN, max_failures=1, keep=None)
        except BaseException as error:  # shown by the fixture's end
            failed.append(error)

    thread = threading.Thread(target=train)
    thread.start()
    try:
        wait_until(lambda: bool(failed) or stream.stats().restarts == 1, 90, "the second worker group")
        yield Run(stream=stream, directory=directory)
    finally:
        (directory / "stop").touch()
        thread.join(60)
        stream.close()
    assert not failed and not thread.is_alive()


def test_what_the_driver_sees(run: Run) -> None:
    wait_until(lambda: sum(p.rows for p in run.stream.stats().prefetchers) > 100, 60, "a hundred rows")
    wait_until(lambda: all(rank.wait_p50_s for rank in run.stream.stats().ranks), 60, "batches that were waited for")
    stats = run.stream.stats()
    assert (stats.run, stats.stream, stats.world_size, stats.restarts) == (RUN, "train", 2, 1)
    assert stats.session.startswith(run.stream.config.stream_id)
    nodes = {node["NodeID"] for node in ray.nodes()}
    for number, rank in enumerate(stats.ranks):
        assert (rank.rank, rank.dp_rank, rank.num_steps) == (number, number, ROWS // 8)
        assert rank.node in nodes and 0 <= rank.step <= rank.num_steps
        assert 0.001 < rank.wait_p50_s <= rank.wait_p99_s < 30
        assert 0.3 < rank.wait_share <= 1
        assert rank.buffered_bytes > 0 and 0 < rank.budget_bytes <= 4000
        assert rank.silent_s < 5
    assert [p.index for p in stats.prefetchers] == [0, 1] and stats.working == stats.wanted == 2
    for prefetcher in stats.prefetchers:
        assert prefetcher.node in nodes
        assert prefetcher.transform_s == pytest.approx(prefetcher.rows * ROW_S, rel=0.5)
        assert prefetcher.take_s > 0 and 0.3 < prefetcher.busy_share <= 1 and prefetcher.take_share < 0.5
    assert stats.slowest is not None and stats.wait_share == stats.slowest.wait_share
    assert 0 < stats.rows_per_s < 4 / ROW_S and stats.epoch_and_step > (0, 0)
    assert "trainers wait" in stats.verdict and "the transform is the limit" in stats.verdict, stats.verdict
    assert "more prefetchers would hide it" in stats.verdict


def test_a_wait_names_its_block_and_who_was_asked(run: Run) -> None:
    (run.directory / "frozen").touch()
    try:
        wait_until(lambda: min((rank.waiting_s for rank in run.stream.stats().ranks), default=0) > 2, 30, "both wait")
        for rank in run.stream.stats().ranks:
            assert rank.waiting_for.startswith("positions ") and rank.waiting_for.endswith(
                f"of splits {2 * rank.rank} to {2 * rank.rank + 2}"
            )
            assert set(rank.asked_of) and set(rank.asked_of) <= {0, 1}
            assert rank.open_requests > 0
    finally:
        (run.directory / "frozen").unlink()


def test_a_shard_tells_of_itself(tables: Tables) -> None:
    stream = tables.stream(40, transform=Sleepy(0.01, Path("/nonexistent")), prefetch=SMALL)
    with opened(stream) as shard:
        assert "nothing is known yet" in shard.stats().verdict
        for _ in shard.iter_batches(prefetch_batches=0):
            stats = shard.stats()
            assert stats.buffered_bytes <= stats.budget_bytes == SMALL.max_buffer_bytes
        stats = shard.stats()
        assert 0.01 < stats.wait_p50_s <= stats.wait_p99_s <= stats.wait_s
        assert stats.wait_share > 0.5 and "this worker waits" in stats.verdict
        assert stats.waiting_s == 0 and stats.prefetchers == 2
