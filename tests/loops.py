"""Training loops of the tests. Training workers import this module, so it imports little."""

from __future__ import annotations

import itertools
import json
import os
import signal
import tempfile
import threading
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
import ray.train
from ray.train import Checkpoint

from ray_lance_stream import report, save_state


class Log:
    """One file per worker process: what it was handed, step by step."""

    def __init__(self, config: dict[str, Any], shard: Any) -> None:
        self.context = ray.train.get_context()
        self.rank, self.world = self.context.get_world_rank(), self.context.get_world_size()
        self._shard = shard
        self._file = open(f"{config['log']}/{config['name']}-{time.time_ns()}-{self.rank}.jsonl", "w")  # noqa: SIM115
        self._ids: list[int] = []

    def batch(self, epoch: int, ids: Any) -> None:
        """Notes a batch; at a step's end writes the step."""
        self._ids += [int(i) for i in ids]
        if self._shard.is_step_end:
            splits = len(self._shard.replica.owned_splits(self._shard._config.order.num_splits))
            self.event(at=[epoch, self._shard.step], rank=self.rank, world=self.world, splits=splits, ids=self._ids)
            self._ids = []

    def context_node(self) -> str:
        """The node this worker runs on."""
        node_id: str = ray.get_runtime_context().get_node_id()
        return node_id

    def event(self, **entry: Any) -> None:
        """Writes anything else a test wants to know."""
        self._file.write(json.dumps(entry | {"pid": os.getpid()}) + "\n")
        self._file.flush()


def ids_of(batch: Any) -> list[int]:
    """The ids of a batch's rows; of packed blocks a checksum of each."""
    if "input_ids" not in batch:
        return [int(i) for i in batch["id"]]
    pairs = zip(batch["input_ids"], batch["doc_ids"], strict=True)
    return [zlib.crc32(ids.tobytes() + docs.tobytes()) for ids, docs in pairs]


def checkpoint_of(content: dict[str, Any]) -> tuple[tempfile.TemporaryDirectory[str], Checkpoint]:
    directory = tempfile.TemporaryDirectory()
    Path(directory.name, "weights.json").write_text(json.dumps(content))
    return directory, Checkpoint.from_directory(directory.name)


def loop(config: dict[str, Any]) -> None:
    """Logs what it is handed; reports after every step of ``report_at``; fails once where told.

    Faults come after a step, when its report has become a checkpoint; those of ``faults_before``, just before the
    report.
    """
    shard = ray.train.get_dataset_shard("train")
    log = Log(config, shard)
    log.event(start=[shard.epoch, shard.step], prefetchers=prefetchers_of(shard))
    for epoch in range(shard.epoch, config.get("epochs", 2)):
        for batch in shard.iter_batches(micro_batch_size=config.get("micro_batch_size")):
            log.batch(epoch, ids_of(batch))
            if not shard.is_step_end:
                continue
            for fault in config.get("faults_before", []):
                if fault[:3] == [epoch, shard.step, log.rank]:
                    break_down_once(config, shard, fault)
            if [epoch, shard.step] in config.get("report_at", []):
                if log.rank == 0:
                    directory, checkpoint = checkpoint_of({"epoch": epoch, "step": shard.step})
                    with directory:
                        report({"step": shard.step}, checkpoint)
                else:
                    report({"step": shard.step})
            for fault in config.get("faults", []):
                if fault[:3] == [epoch, shard.step, log.rank]:
                    break_down_once(config, shard, fault)
            if config.get("fail_at") == [epoch, shard.step] and not os.path.exists(f"{config['log']}/failed"):
                Path(config["log"], "failed").touch()
                wait_until_committed()
                raise RuntimeError("a failure made by the test")


def wait_until_committed() -> None:
    """Waits until Ray Train knows what was reported: it forgets a report of a worker that fails before it looks."""
    ray.train.get_all_reported_checkpoints(ray.train.CheckpointConsistencyMode.COMMITTED)


def break_down_once(config: dict[str, Any], shard: Any, fault: list[Any]) -> None:
    """Does what a fault of (epoch, step, rank, what) says, in the first worker group that gets there only."""
    mark = Path(config["log"], "fault-" + "-".join(map(str, fault)))
    if not mark.exists():
        mark.touch()
        wait_until_committed()
        break_down(shard, fault[3])


def break_down(shard: Any, what: str) -> None:
    """Kills parts of the run: "worker" (this process), "manager", "coordinator", "prefetcher"; several with "+"."""
    session = shard.link.session
    pids: dict[str, Callable[[], int]] = {
        "worker": os.getpid,
        "manager": lambda: ray.get(session.manager.pid.remote()),
        "coordinator": lambda: ray.get(session.coordinator.pid.remote()),
        "prefetcher": lambda: prefetchers_of(shard)[0],
    }
    for pid in [pids[part]() for part in what.split("+")]:
        os.kill(pid, signal.SIGKILL)


def until_told(config: dict[str, Any]) -> None:
    """Logs what it is handed and reports now and then, until the epoch that the file ``last`` names is over."""
    shard = ray.train.get_dataset_shard("train")
    log = Log(config, shard)
    log.event(start=[shard.epoch, shard.step], world=log.world)
    last = Path(config["log"], "last")
    for epoch in itertools.count(shard.epoch):
        if last.exists() and epoch > int(last.read_text()):
            return
        for batch in shard.iter_batches(prefetch_batches=2):
            log.batch(epoch, batch["id"])
            time.sleep(config["step_s"])  # stands for the training; nodes come and go meanwhile
            if shard.step % config["report_every"] == 0:
                directory, checkpoint = checkpoint_of({"epoch": epoch, "step": shard.step})
                with directory:
                    report({"step": shard.step}, checkpoint if log.rank == 0 else None)


def until_preempted(config: dict[str, Any]) -> None:
    """Trains on without checkpoints. Told that its node goes, saves once, and waits for the end.

    With ``config["relaxed"]`` the ranks on that node do not get to report, and the others report without them.
    """
    shard = ray.train.get_dataset_shard("train")
    log = Log(config, shard)
    log.event(start=[shard.epoch, shard.step], world=log.world, rank=log.rank, node=log.context_node())
    for epoch in itertools.count(shard.epoch):
        for batch in shard.iter_batches(prefetch_batches=2):
            log.batch(epoch, batch["id"])
            time.sleep(config["step_s"])
            if Path(config["log"], "enough").exists():
                return
            info = ray.train.get_preemption_info()
            if info is None:
                continue
            if config["relaxed"] and log.rank in info.preempted_ranks:
                threading.Event().wait()  # busy with something else until its node goes
            directory, checkpoint = checkpoint_of({"epoch": epoch, "step": shard.step})
            with directory:
                report({"step": shard.step}, checkpoint if log.rank == 0 else None)
            log.event(saved=[epoch, shard.step])
            threading.Event().wait()


def prefetchers_of(shard: Any) -> list[int]:
    return sorted(pid for _, pid in ray.get(shard.link.session.coordinator.prefetchers.remote()))


def report_apart(config: dict[str, Any]) -> None:
    shard = ray.train.get_dataset_shard("train")
    rank = ray.train.get_context().get_world_rank()
    for _ in shard.iter_batches():
        if shard.step == 2 + rank:
            try:
                report({"step": shard.step})
            except Exception as error:
                Path(config["log"], f"error-{rank}").write_text(f"{type(error).__name__}: {error}")
                raise


def lose_the_manager(config: dict[str, Any]) -> None:
    shard = ray.train.get_dataset_shard("train")
    log = Log(config, shard)
    log.event(start=[shard.epoch, shard.step])
    first = shard.step == 0
    manager = shard.link.session.manager
    for batch in shard.iter_batches():
        log.batch(0, batch["id"])
        if shard.step == 3 and first:
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
            wait_until_committed()
            raise RuntimeError("a failure made by the test")


def report_without_us(_: dict[str, Any]) -> None:
    shard = ray.train.get_dataset_shard("train")
    next(iter(shard.iter_batches()))
    directory, checkpoint = checkpoint_of({})
    with directory:
        ray.train.report({"x": 1}, checkpoint)
    raise RuntimeError("a failure made by the test")


def two_streams(config: dict[str, Any]) -> None:
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


class FailOn:
    """A transform that fails on batches with certain ids, so that only smaller parts tell which."""

    def __init__(self, bad: list[int]) -> None:
        self.bad = frozenset(bad)

    def __call__(self, batch: Any) -> Any:
        if found := self.bad & set(batch["id"].to_pylist()):
            raise ValueError(f"bad rows {sorted(found)}")
        return {"id": batch["id"]}
