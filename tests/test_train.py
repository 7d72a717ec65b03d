"""The stream under Ray Train: real worker groups, failures, checkpoints, resumes."""

from __future__ import annotations

import json
import os
import signal
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lancedb
import numpy as np
import pyarrow as pa
import pytest
import ray
import ray.train
from ray.train import Checkpoint
from runs import Log, delivered, fit, is_running, named_actors, read_log, reference, wait_until

from ray_lance_stream import LanceStream, PrefetchConfig, StreamDataConfig, report, save_state

pytestmark = [pytest.mark.cluster, pytest.mark.slow]
ROWS = 299  # 24 cycles of 12 splits and 11 rows left out; steps of 5 cycles, the last one of 4
STEPS = 5


@pytest.fixture(scope="module")
def uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("db"))
    x = pa.FixedSizeListArray.from_arrays(pa.array(np.arange(ROWS * 4, dtype=np.float32)), 4)
    lancedb.connect(path).create_table("t", pa.table({"id": np.arange(ROWS), "x": x}))
    return path


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    ray.init(
        address="local",
        num_cpus=8,
        include_dashboard=False,
        log_to_driver=False,
    )
    yield
    ray.shutdown()


def make_stream(uri: str, **options: Any) -> LanceStream:
    settings: dict[str, Any] = {"num_splits": 12, "global_batch_size": 60, "shuffle_seed": 3} | options
    return LanceStream(uri, "t", **settings)


def checkpoint_of(content: dict[str, Any]) -> tuple[tempfile.TemporaryDirectory[str], Checkpoint]:
    directory = tempfile.TemporaryDirectory()
    Path(directory.name, "weights.json").write_text(json.dumps(content))
    return directory, Checkpoint.from_directory(directory.name)


def loop(config: dict[str, Any]) -> None:
    """Logs what it is handed; reports after every step of ``report_at``; fails once where told."""
    shard = ray.train.get_dataset_shard("train")
    log = Log(config, shard)
    log.event(start=[shard.epoch, shard.step], prefetchers=_prefetchers(shard))
    for epoch in range(shard.epoch, config.get("epochs", 2)):
        for batch in shard.iter_batches(micro_batch_size=config.get("micro_batch_size")):
            log.batch(epoch, batch["id"])
            if not shard.is_step_end:
                continue
            if [epoch, shard.step] in config.get("report_at", []):
                if log.rank == 0:
                    directory, checkpoint = checkpoint_of({"epoch": epoch, "step": shard.step})
                    with directory:
                        report({"step": shard.step}, checkpoint)
                else:
                    report({"step": shard.step})
            if config.get("fail_at") == [epoch, shard.step] and not os.path.exists(f"{config['log']}/failed"):
                Path(config["log"], "failed").touch()
                raise RuntimeError("a failure made by the test")


def _prefetchers(shard: Any) -> list[int]:
    return sorted(pid for _, pid in ray.get(shard.link.session.coordinator.prefetchers.remote()))


@pytest.mark.parametrize("workers", [1, 2, 3, 5])
def test_ordered_global_batches_are_equal_at_any_world_size(uri: str, tmp_path: Path, workers: int) -> None:
    stream = make_stream(uri)
    fit(loop, {"train": stream}, workers, tmp_path, micro_batch_size=7)
    stream.close()
    batches = delivered(read_log(tmp_path))
    assert batches == reference(stream, 2)
    for epoch in range(2):
        rows = [i for (e, _), ids in batches.items() for i in ids if e == epoch]
        assert len(rows) == len(set(rows)) == ROWS - ROWS % 12


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


def _report_apart(config: dict[str, Any]) -> None:
    shard = ray.train.get_dataset_shard("train")
    rank = ray.train.get_context().get_world_rank()
    for _ in shard.iter_batches():
        if shard.step == 2 + rank:
            try:
                report({"step": shard.step})
            except Exception as error:
                Path(config["log"], f"error-{rank}").write_text(f"{type(error).__name__}: {error}")
                raise


def test_ranks_that_report_at_different_steps_all_get_the_same_error(uri: str, tmp_path: Path) -> None:
    stream = make_stream(uri)
    with pytest.raises(ray.train.TrainingFailedError, match="different steps"):
        fit(_report_apart, {"train": stream}, 3, tmp_path)
    stream.close()
    errors = {path.read_text() for path in (tmp_path / "log").glob("error-*")}
    assert len(list((tmp_path / "log").glob("error-*"))) == 3 and len(errors) == 1
    (error,) = errors
    assert (
        error.startswith("LockstepError") and "rank 0: epoch 0, step 2" in error and "rank 2: epoch 0, step 4" in error
    )


def _lose_the_manager(config: dict[str, Any]) -> None:
    shard = ray.train.get_dataset_shard("train")
    log = Log(config, shard)
    manager = shard.link.session.manager
    for batch in shard.iter_batches():
        log.batch(0, batch["id"])
        if shard.step == 3:
            if log.rank == 0:
                if config["how"] == "gone":
                    ray.kill(manager, no_restart=True)
                else:
                    os.kill(ray.get(manager.pid.remote()), signal.SIGKILL)
                directory, checkpoint = checkpoint_of({})
                with directory:
                    report({"step": 3}, checkpoint)
            else:
                report({"step": 3})
            raise RuntimeError("a failure made by the test")


@pytest.mark.parametrize("how", ["gone", "killed"])
def test_a_checkpoint_is_complete_without_the_state_manager(uri: str, tmp_path: Path, how: str) -> None:
    stream = make_stream(uri)
    with pytest.raises(ray.train.TrainingFailedError):
        fit(_lose_the_manager, {"train": stream}, 2, tmp_path, how=how)
    fit(loop, {"train": stream}, 3, tmp_path, epochs=1)
    stream.close()
    starts = [entry["start"] for entry in read_log(tmp_path) if "start" in entry]
    assert starts == [[0, 3]] * 3
    assert delivered(read_log(tmp_path)) == reference(stream, 1)


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


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_left_once_the_run_has_ended(uri: str, tmp_path: Path, fails: bool) -> None:
    stream = make_stream(uri, prefetch=PrefetchConfig(idle_timeout_s=2))
    try:
        fit(loop, {"train": stream}, 1, tmp_path, epochs=1, fail_at=[0, 2] if fails else None)
    except ray.train.TrainingFailedError:
        assert fails
    pids = next(entry["prefetchers"] for entry in read_log(tmp_path) if "start" in entry)
    wait_until(lambda: not named_actors(stream) and not any(map(is_running, pids)), 20, "everything has ended")


def _report_without_us(_: dict[str, Any]) -> None:
    shard = ray.train.get_dataset_shard("train")
    next(iter(shard.iter_batches()))
    directory, checkpoint = checkpoint_of({})
    with directory:
        ray.train.report({"x": 1}, checkpoint)


def test_a_checkpoint_without_our_file_is_an_error_unless_told(uri: str, tmp_path: Path) -> None:
    stream = make_stream(uri)
    fit(_report_without_us, {"train": stream}, 1, tmp_path)
    with pytest.raises(ray.train.TrainingFailedError, match=r"no lance_stream.json.*on_missing_state='restart'"):
        fit(loop, {"train": stream}, 1, tmp_path)
    again = make_stream(uri, on_missing_state="restart")
    fit(loop, {"train": again}, 1, tmp_path, epochs=1)
    stream.close()
    again.close()
    assert delivered(read_log(tmp_path)) == reference(stream, 1)


def _two_streams(config: dict[str, Any]) -> None:
    shard = ray.train.get_dataset_shard("train")
    if config["ordinary"]:
        rows = [row["id"] for row in ray.train.get_dataset_shard("extra").iter_rows()]
        assert rows and all(isinstance(row, int) for row in rows)
    log = Log(config, shard)
    for batch in shard.iter_batches():
        log.batch(0, batch["id"])
        if shard.step == 2:
            with tempfile.TemporaryDirectory() as directory:
                save_state(directory)  # for loops whose own callbacks report
                ray.train.report({"x": 1}, Checkpoint.from_directory(directory))
            break


def test_ray_datasets_stand_beside_a_stream_and_resume_from_continues(uri: str, tmp_path: Path) -> None:
    stream = make_stream(uri)
    extra = ray.data.range(6)
    result = fit(_two_streams, {"train": stream, "extra": extra}, 2, tmp_path, name="a", ordinary=True)
    for source in (result.checkpoint, result.checkpoint.path):
        resumed = make_stream(uri, resume_from=source)
        with resumed.open() as shard:
            assert (shard.epoch, shard.step) == (0, 2)
        resumed.close()
    fit(loop, {"train": make_stream(uri, resume_from=result.checkpoint)}, 3, tmp_path, name="b", epochs=1)
    stream.close()
    got = delivered(read_log(tmp_path, "a")) | delivered(read_log(tmp_path, "b"))
    assert got == reference(stream, 1)


def test_a_run_without_stream_data_config(uri: str, tmp_path: Path) -> None:
    stream = make_stream(uri)
    fit(loop, {"train": stream}, 2, tmp_path, dataset_config=ray.train.DataConfig(), epochs=1)
    stream.close()
    assert delivered(read_log(tmp_path)) == reference(stream, 1)


def test_ranks_of_one_replica_see_the_same_batches(uri: str, tmp_path: Path) -> None:
    stream = make_stream(uri)
    fit(loop, {"train": stream}, 4, tmp_path, dataset_config=StreamDataConfig(ranks_per_replica=2), epochs=1)
    steps = [entry for entry in read_log(tmp_path) if "at" in entry]
    by_rank = {rank: [entry["ids"] for entry in steps if entry["rank"] == rank] for rank in range(4)}
    assert by_rank[0] == by_rank[1] != by_rank[2] == by_rank[3] and len(by_rank[0]) == STEPS
    with pytest.raises(ray.train.TrainingFailedError, match="not a multiple of ranks_per_replica"):
        fit(loop, {"train": stream}, 3, tmp_path, name="odd", dataset_config=StreamDataConfig(ranks_per_replica=2))
    stream.close()


def test_more_replicas_than_splits_fails_before_the_first_step(uri: str, tmp_path: Path) -> None:
    stream = make_stream(uri, num_splits=2)
    with pytest.raises(ray.train.TrainingFailedError, match="more replicas than splits"):
        fit(loop, {"train": stream}, 3, tmp_path)
    stream.close()
    assert not delivered(read_log(tmp_path))


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
