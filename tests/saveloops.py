"""Training loops that save in every way there is, and that read several streams. Training workers import this."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray.train
from loops import Log, wait_until_committed
from pyarrow import fs as pafs
from ray.train import Checkpoint, CheckpointUploadMode

from ray_lance_stream import report, save_state
from ray_lance_stream.checkpoint import read_streams

Way = Callable[[dict[str, Any], int, int], None]  # (metrics, step, rank)


def fail_once(config: dict[str, Any], name: str) -> None:
    """Fails in the first worker group that gets here. All ranks do, each as it gets there."""
    mark = Path(config["log"], f"failed-{name}-{ray.train.get_context().get_world_rank()}")
    if not mark.exists():
        mark.touch()
        raise RuntimeError(f"a failure made by the test: {name}")


# --- ways of saving --------------------------------------------------------------------------------------


def weights(rank: int) -> str:
    """Makes a directory with this rank's part of the model, which nobody deletes."""
    directory = tempfile.mkdtemp()
    Path(directory, f"weights-{rank}.json").write_text(f'{{"rank": {rank}}}')
    return directory


def of_ranks(*ranks: int, **options: Any) -> Way:
    """Reports checkpoints from some ranks, each a directory of its own."""

    def save(metrics: dict[str, Any], step: int, rank: int) -> None:
        checkpoint = Checkpoint.from_directory(weights(rank)) if rank in ranks else None
        more = {"validation": False} if checkpoint is None and "validation" in options else {}
        report(metrics, checkpoint, checkpoint_dir_name=f"step-{step}", **(options | more))

    return save


def under_a_name_of_rays(metrics: dict[str, Any], step: int, rank: int) -> None:
    """The directory's name is Ray's; the options are given by place."""
    del step
    report(metrics, Checkpoint.from_directory(weights(rank)), None, CheckpointUploadMode.SYNC)


def with_a_name_by_place(metrics: dict[str, Any], step: int, rank: int) -> None:
    report(metrics, Checkpoint.from_directory(weights(rank)) if rank == 0 else None, f"step-{step}")


def written_in_place(metrics: dict[str, Any], step: int, rank: int) -> None:
    """All ranks write into the one directory in the run's storage, and nothing is uploaded."""
    storage = ray.train.get_context().get_storage()
    path = f"{storage.experiment_fs_path}/step-{step}"
    storage.storage_filesystem.create_dir(path)
    with storage.storage_filesystem.open_output_stream(f"{path}/weights-{rank}.json") as out:
        out.write(b"{}")
    checkpoint = Checkpoint(path, filesystem=storage.storage_filesystem)
    report(metrics, checkpoint, checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD)


def upload(checkpoint: Checkpoint, name: str) -> Checkpoint:
    """An upload function of the user's own."""
    storage = ray.train.get_context().get_storage()
    path = f"{storage.experiment_fs_path}/{name}"
    storage.storage_filesystem.create_dir(path)
    pafs.copy_files(checkpoint.path, path, destination_filesystem=storage.storage_filesystem, use_threads=False)
    return Checkpoint(path, filesystem=storage.storage_filesystem)


def by_a_callback_of_rank_0(metrics: dict[str, Any], step: int, rank: int) -> None:
    checkpoint = None
    if rank == 0:
        directory = weights(rank)
        save_state(directory)
        checkpoint = Checkpoint.from_directory(directory)
    ray.train.report(metrics, checkpoint, checkpoint_dir_name=f"step-{step}")


def by_a_callback_of_every_rank(metrics: dict[str, Any], step: int, rank: int) -> None:
    directory = weights(rank)
    save_state(directory)
    ray.train.report(
        metrics,
        Checkpoint.from_directory(directory),
        checkpoint_dir_name=f"step-{step}",
        checkpoint_upload_mode=CheckpointUploadMode.ASYNC,
    )


def deleted_when_uploaded(metrics: dict[str, Any], step: int, rank: int) -> None:
    directory = weights(rank)
    checkpoint = Checkpoint.from_directory(directory) if rank == 1 else None
    report(metrics, checkpoint, checkpoint_dir_name=f"step-{step}", delete_local_checkpoint_after_upload=True)
    assert rank == 0 or not os.path.exists(directory)
    shutil.rmtree(directory, ignore_errors=True)


ASYNC = {"checkpoint_upload_mode": CheckpointUploadMode.ASYNC}
WAYS: dict[str, Way] = {
    "rank 0": of_ranks(0),
    "rank 1": of_ranks(1),
    "every rank": of_ranks(0, 1),
    "a name of Ray's": under_a_name_of_rays,
    "a name by place": with_a_name_by_place,
    "asynchronous, rank 0": of_ranks(0, **ASYNC),
    "asynchronous, kept": of_ranks(1, delete_local_checkpoint_after_upload=False, **ASYNC),
    "in place": written_in_place,
    "own function": of_ranks(0, 1, checkpoint_upload_fn=upload),
    "own function, asynchronous": of_ranks(0, checkpoint_upload_fn=upload, **ASYNC),
    "callback of rank 0": by_a_callback_of_rank_0,
    "callback of every rank": by_a_callback_of_every_rank,
    "deleted when uploaded": deleted_when_uploaded,
    "validated": of_ranks(0, validation=True),
    "asynchronous, every rank": of_ranks(0, 1, **ASYNC),
}


def save_in_every_way(config: dict[str, Any]) -> None:
    """Saves after every step in the next of the ways, and fails after the last. Then goes on to the end."""
    shard = ray.train.get_dataset_shard("train")
    log = Log(config, shard)
    log.event(start=[shard.epoch, shard.step])
    for batch in shard.iter_batches():
        log.batch(0, batch["id"])
        if shard.step <= len(WAYS):
            way = list(WAYS)[shard.step - 1]
            WAYS[way]({"way": way, "step": shard.step}, shard.step, log.rank)
        if shard.step == len(WAYS) + 1:
            wait_until_committed()
            fail_once(config, "saved")


def cycles_of(checkpoint: Checkpoint, **_: Any) -> dict[str, Any]:
    """A validation function: says what it finds in the checkpoint."""
    filesystem: Any = checkpoint.filesystem
    states = read_streams(filesystem, checkpoint.path) or {}
    return {"cycles": states["train"].completed_cycles}


# --- several streams -------------------------------------------------------------------------------------


class Stream:
    """A stream of the run, fetched and opened when it is first asked for."""

    def __init__(self, config: dict[str, Any], name: str) -> None:
        self.shard = ray.train.get_dataset_shard(name)
        self._log = Log(config | {"name": f"{config['name']}.{name}"}, self.shard)
        self._log.event(start=[self.shard.epoch, self.shard.step], rank=self._log.rank)

    def read(self, steps: int | None = None) -> None:
        """Reads some steps, or the rest of the epoch."""
        epoch = self.shard.epoch
        for batch in self.shard.iter_batches(batch_format="pyarrow"):
            self._log.batch(epoch, batch["id"].to_pylist())
            if steps is not None:
                steps -= 1
                if not steps:
                    break


def save_on_rank_1() -> None:
    """A checkpoint of the rank that has not opened everything."""
    rank = ray.train.get_context().get_world_rank()
    with tempfile.TemporaryDirectory() as directory:
        report({"rank": rank}, Checkpoint.from_directory(directory) if rank == 1 else None)


def train_and_validate(config: dict[str, Any]) -> None:
    """Trains for two epochs; validates in between, breaks off in the middle of it, and fails twice."""
    train = ray.train.get_dataset_shard("train")
    log = Log(config, train)
    log.event(start=[train.epoch, train.step])
    others: dict[str, Stream] = {}

    def other(name: str) -> Stream:
        if name not in others:
            others[name] = Stream(config, name)
        return others[name]

    for epoch in range(train.epoch, 2):
        for batch in train.iter_batches():
            log.batch(epoch, batch["id"])
            at = (epoch, train.step)
            if at == (0, 2):  # a whole epoch of validation, and two steps on rank 0 of what every rank reads whole
                other("validation").read()
                if log.rank == 0:
                    other("probe").read(2)
            elif at == (0, 3):  # the next epoch of it, broken off
                other("validation").read(3)
                save_on_rank_1()
            elif at == (0, 4):
                fail_once(config, "first")
                save_on_rank_1()  # nothing but the first stream was opened since
            elif at == (0, 5):
                fail_once(config, "second")
                other("validation").read()
                other("probe").read()
    # One has come to its end, the others go on.
    other("validation").read(2)
    other("probe").read(1)
    save_on_rank_1()
