"""The stream under Ray Train: real worker groups, failures, checkpoints, resumes."""

from __future__ import annotations

import json
import tempfile
import threading
from pathlib import Path
from random import Random
from typing import Any

import lancedb
import numpy as np
import pyarrow as pa
import pytest
import ray
import ray.train
from loops import FailOn, loop, lose_the_manager, report_apart, report_without_us, two_streams
from ray.train import Checkpoint
from runs import delivered, fit, is_running, named_actors, read_log, reference, wait_until

from ray_lance_stream import (
    ConfigError,
    LanceStream,
    PrefetchConfig,
    StreamDataConfig,
    StreamShard,
    report,
)
from ray_lance_stream.cluster.parcel import Parcel
from ray_lance_stream.cluster.session import start_session
from ray_lance_stream.local import LocalLink
from ray_lance_stream.topology import Seat
from ray_lance_stream.train import RunStream

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("one_node")]
NUM_CPUS = 8
slow = pytest.mark.slow  # left out by default; the continuous integration runs them as well
ROWS = 299  # 24 cycles of 12 splits and 11 rows left out; steps of 5 cycles, the last one of 4
STEPS = 5


@pytest.fixture(scope="module")
def uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("db"))
    x = pa.FixedSizeListArray.from_arrays(pa.array(np.arange(ROWS * 4, dtype=np.float32)), 4)
    lancedb.connect(path).create_table("t", pa.table({"id": np.arange(ROWS), "x": x}))
    return path


def make_stream(uri: str, **options: Any) -> LanceStream:
    # One prefetcher and, as these tests start many processes, a long wait for it.
    prefetch = PrefetchConfig(num_actors=1, placement_timeout_s=120)
    settings: dict[str, Any] = {"num_splits": 12, "global_batch_size": 60, "shuffle_seed": 3, "prefetch": prefetch}
    settings |= options
    return LanceStream(uri, "t", **settings)


@pytest.mark.parametrize(
    "workers",
    [*(pytest.param(n, marks=pytest.mark.fault) for n in (1, 2, 5)), pytest.param(3, marks=slow)],
)
def test_ordered_global_batches_are_equal_at_any_world_size(uri: str, tmp_path: Path, workers: int) -> None:
    stream = make_stream(uri, prefetch=PrefetchConfig(idle_timeout_s=5, placement_timeout_s=120))
    # Ray's own DataConfig does as well.
    dataset_config = ray.train.DataConfig() if workers == 5 else StreamDataConfig()
    fit(loop, {"train": stream}, workers, tmp_path, micro_batch_size=7, dataset_config=dataset_config)
    entries = read_log(tmp_path)
    batches = delivered(entries)
    assert batches == reference(stream, 2)
    for epoch in range(2):
        rows = [i for (e, _), ids in batches.items() for i in ids if e == epoch]
        assert len(rows) == len(set(rows)) == ROWS - ROWS % 12
    # Nobody closes anything: the run has ended, so its actors do.
    pids = next(entry["prefetchers"] for entry in entries if "start" in entry)
    wait_until(lambda: not named_actors(stream) and not any(map(is_running, pids)), 30, "everything has ended")


@pytest.mark.fault
def test_all_ranks_end_alike_where_rows_are_skipped_and_the_manager_dies(uri: str, tmp_path: Path, rng: Random) -> None:
    bad = [*range(170, 230, 3), *range(270, 285)]  # unshuffled: most of the last splits, which the last rank owns
    stream = make_stream(uri, shuffle=False, on_transform_error="skip", transform=FailOn(bad))
    faults = [[0, 2, 0, "prefetcher"], [1, 2, 1, "worker"]]
    before = [[0, 1, rng.randrange(3), "manager"], [1, 1, rng.randrange(3), "manager"]]  # others wait in a report
    options: dict[str, Any] = {"report_at": [[0, 1], [0, 2], [1, 1]], "faults": faults, "faults_before": before}
    fit(loop, {"train": stream}, 3, tmp_path, max_failures=1, **options)
    entries = read_log(tmp_path)
    expected = reference(stream, 2)
    assert delivered(entries) == expected
    assert [at for at in expected if at[0] == 0] == [(0, 1), (0, 2)], "split 11 has 24 - 15 rows left: two steps"
    last = [entry["at"] for entry in entries if "at" in entry and entry["at"][0] == 1]
    assert max(last) == [1, 2], "no rank was handed a step beyond the common end"
    starts = [entry["start"] for entry in entries if "start" in entry]
    # The worker dies while another rank may still wait for its answer, so the last report need not have been made.
    assert starts[-1] in ([0, 1], [0, 2], [1, 1])


def test_a_failed_worker_restarts_and_the_stream_goes_on(uri: str, tmp_path: Path) -> None:
    stream = make_stream(uri)
    fit(loop, {"train": stream}, 2, tmp_path, max_failures=1, report_at=[[0, 2], [1, 1]], fail_at=[0, 4])
    entries = read_log(tmp_path)
    assert delivered(entries) == reference(stream, 2)
    starts = [entry for entry in entries if "start" in entry]
    assert [entry["start"] for entry in starts] == [[0, 0], [0, 0], [0, 2], [0, 2]]
    # The pool survived the worker group: the same processes, so nothing was opened again.
    assert len({tuple(entry["prefetchers"]) for entry in starts}) == 1
    stream.close()
    pids = starts[0]["prefetchers"]
    wait_until(lambda: not any(map(is_running, pids)) and not named_actors(stream), 10, "everything has ended")


@slow
def test_a_second_fit_of_the_run_continues_at_another_world_size(uri: str, tmp_path: Path) -> None:
    stream = make_stream(uri)
    with pytest.raises(ray.train.TrainingFailedError):
        fit(loop, {"train": stream}, 2, tmp_path, report_at=[[0, 3]], fail_at=[0, 5])
    lancedb.connect(uri).open_table("t").add(
        pa.table({"id": [-1], "x": pa.array([[0.0] * 4], pa.list_(pa.float32(), 4))})
    )
    later = make_stream(uri)  # would read the newer version, but the state names the older one
    fit(loop, {"train": later}, 5, tmp_path)
    stream.close()
    later.close()
    entries = read_log(tmp_path)
    assert [entry["start"] for entry in entries if "start" in entry and entry["pid"] != entries[0]["pid"]][-1] == [0, 3]
    assert delivered(entries) == reference(stream, 2)


@slow
def test_ranks_that_report_at_different_steps_all_get_the_same_error(uri: str, tmp_path: Path) -> None:
    stream = make_stream(uri)
    with pytest.raises(ray.train.TrainingFailedError, match="different steps"):
        fit(report_apart, {"train": stream}, 3, tmp_path)
    stream.close()
    errors = {path.read_text() for path in (tmp_path / "log").glob("error-*")}
    assert len(list((tmp_path / "log").glob("error-*"))) == 3 and len(errors) == 1
    (error,) = errors
    assert (
        error.startswith("LockstepError") and "rank 0: epoch 0, step 2" in error and "rank 2: epoch 0, step 4" in error
    )


@slow
@pytest.mark.parametrize("how", ["gone", pytest.param("killed", marks=pytest.mark.fault)])
def test_a_checkpoint_is_complete_without_the_state_manager(uri: str, tmp_path: Path, how: str) -> None:
    stream = make_stream(uri)
    fit(lose_the_manager, {"train": stream}, 2, tmp_path, max_failures=1, how=how)
    stream.close()
    entries = read_log(tmp_path)
    assert [entry["start"] for entry in entries if "start" in entry] == [[0, 0], [0, 0], [0, 3], [0, 3]]
    assert delivered(entries) == reference(stream, 1)


@pytest.mark.long
@slow
def test_two_runs_of_one_stream_do_not_disturb_each_other(uri: str, tmp_path: Path) -> None:
    stream = make_stream(uri)
    errors: list[BaseException] = []

    def run(name: str, workers: int) -> None:
        try:
            fit(loop, {"train": stream}, workers, tmp_path, name=name, report_at=[[0, 2]])
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=args) for args in (("one", 2), ("two", 3))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stream.close()
    assert not errors
    for name in ("one", "two"):
        assert delivered(read_log(tmp_path, name)) == reference(stream, 2)


@slow
def test_nothing_is_left_once_the_run_has_failed(uri: str, tmp_path: Path) -> None:
    stream = make_stream(uri, prefetch=PrefetchConfig(idle_timeout_s=5, placement_timeout_s=120))
    with pytest.raises(ray.train.TrainingFailedError):
        fit(loop, {"train": stream}, 1, tmp_path, fail_at=[0, 2])
    pids = next(entry["prefetchers"] for entry in read_log(tmp_path) if "start" in entry)
    wait_until(lambda: not named_actors(stream) and not any(map(is_running, pids)), 30, "everything has ended")


@slow
def test_a_checkpoint_without_our_file_is_an_error(uri: str, tmp_path: Path) -> None:
    stream = make_stream(uri)
    with pytest.raises(ray.train.TrainingFailedError, match=r"no lance_stream.json.*on_missing_state='restart'"):
        fit(report_without_us, {"train": stream}, 1, tmp_path, max_failures=1)
    stream.close()


@pytest.mark.long
@slow
def test_ray_datasets_stand_beside_a_stream_and_resume_from_continues(uri: str, tmp_path: Path) -> None:
    stream = make_stream(uri)
    extra = ray.data.range(6)
    result = fit(two_streams, {"train": stream, "extra": extra}, 2, tmp_path, ordinary=True)
    stream.close()
    want = reference(stream, 1)
    assert delivered(read_log(tmp_path)) == {at: ids for at, ids in want.items() if at[1] <= 2}
    assert result.checkpoint is not None
    for source in (result.checkpoint, result.checkpoint.path):
        resumed = make_stream(uri, resume_from=source)
        with StreamShard(resumed.config, Seat(), LocalLink(resumed.recipe)) as shard:
            rest = {}
            for batch in shard.iter_batches():
                rest[shard.epoch, shard.step] = batch["id"].tolist()
        assert rest == {at: ids for at, ids in want.items() if at[1] > 2}


@slow
def test_ranks_of_one_replica_see_the_same_batches(uri: str, tmp_path: Path) -> None:
    stream = make_stream(uri)
    fit(loop, {"train": stream}, 4, tmp_path, dataset_config=StreamDataConfig(ranks_per_replica=2), epochs=1)
    steps = [entry for entry in read_log(tmp_path) if "at" in entry]
    by_rank = {rank: [entry["ids"] for entry in steps if entry["rank"] == rank] for rank in range(4)}
    assert by_rank[0] == by_rank[1] != by_rank[2] == by_rank[3] and len(by_rank[0]) == STEPS
    stream.close()


def test_sizes_that_cannot_work_fail_before_the_first_step(uri: str) -> None:
    stream = make_stream(uri, num_splits=2)
    run = RunStream(stream.config, start_session(stream.config, Parcel.of(stream._recipe)))
    config = StreamDataConfig(ranks_per_replica=2)
    with pytest.raises(ConfigError, match="more replicas than splits"):
        StreamDataConfig().configure({"train": run}, 3, None, None)
    with pytest.raises(ConfigError, match=r"not a multiple of ranks_per_replica.*2, 4, 6, 8"):
        config.configure({"train": run}, 3, None, None)
    with pytest.raises(ConfigError, match="ranks_per_replica is not valid"):
        StreamDataConfig(ranks_per_replica=0)
    stream.close()


@pytest.mark.slow
def test_a_run_that_is_set_up_wrongly_ends_however_many_failures_it_may_have(uri: str, tmp_path: Path) -> None:
    stream = make_stream(uri)
    with pytest.raises(ray.train.TrainingFailedError, match="not a multiple of ranks_per_replica"):
        fit(
            loop,
            {"train": stream},
            3,
            tmp_path,
            dataset_config=StreamDataConfig(ranks_per_replica=2),
            max_failures=-1,
            epochs=1,
        )
    stream.close()


def _local(config: dict[str, Any]) -> None:
    shard = ray.train.get_dataset_shard("train")
    for batch in shard.iter_batches():
        config["seen"].append(batch["id"].tolist())
        if shard.step == 3:
            with tempfile.TemporaryDirectory() as directory:
                report({"step": 3}, Checkpoint.from_directory(directory))
                config["state"].append(json.loads(Path(directory, "lance_stream.json").read_text()))
    shard.close()


def test_local_mode_starts_no_actor(uri: str) -> None:
    stream = make_stream(uri)
    seen: list[list[int]] = []
    states: list[dict[str, Any]] = []
    from ray.train import ScalingConfig
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

    config = {"seen": seen, "state": states}
    DataParallelTrainer(
        lambda: _local(config), datasets={"train": stream}, scaling_config=ScalingConfig(num_workers=0)
    ).fit()
    assert seen == list(reference(stream, 1).values())
    assert states[0]["streams"]["train"]["samples_consumed_per_split"] == 15
    assert not named_actors(stream)
