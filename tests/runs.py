"""Training loops and helpers shared by the tests that start Ray. Importable in workers."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import ray
import ray.train
from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

from ray_lance_stream import LanceStream, StreamDataConfig

Batches = dict[tuple[int, int], list[int]]


def fit(
    loop: Callable[[dict[str, Any]], None],
    datasets: dict[str, Any],
    workers: int | tuple[int, int],
    storage: Path,
    *,
    name: str = "run",
    max_failures: int = 0,
    dataset_config: Any = None,
    scaling: dict[str, Any] | None = None,
    failure: dict[str, Any] | None = None,
    bucket: tuple[Any, str] | None = None,
    keep: int | None = 2,
    validation: Any = None,
    **config: Any,
) -> ray.train.Result:
    """Fits a loop that needs no process group; ``config["log"]`` is where it logs.

    Args:
        loop: The training loop.
        datasets: By name.
        workers: How many, or from how many to how many.
        storage: Where the loop logs, and where the run is stored unless there is a bucket.
        name: The run's name.
        max_failures: How often the worker group may start again; -1 for any number of times.
        dataset_config: Instead of the plain ``StreamDataConfig``.
        scaling: More for ``ScalingConfig``.
        failure: More for ``FailureConfig``.
        bucket: A file system, and the path on it where the run is stored.
        keep: How many checkpoints are kept.
        validation: A ``ValidationConfig``.
        **config: What the loop is called with.
    """
    (storage / "log").mkdir(parents=True, exist_ok=True)
    trainer = DataParallelTrainer(
        loop,
        train_loop_config={"log": str(storage / "log"), "name": name} | config,
        datasets=datasets,
        dataset_config=dataset_config if dataset_config is not None else StreamDataConfig(),
        scaling_config=ScalingConfig(**({"num_workers": workers} | (scaling or {}))),  # its hints know no range
        run_config=RunConfig(
            name=name,
            storage_path=str(storage / "runs") if bucket is None else bucket[1],
            storage_filesystem=None if bucket is None else bucket[0],
            failure_config=FailureConfig(max_failures=max_failures, **(failure or {})),
            checkpoint_config=CheckpointConfig(num_to_keep=keep),
        ),
        validation_config=validation,
    )
    return trainer.fit()


def read_log(storage: Path, name: str = "run") -> list[dict[str, Any]]:
    """Returns the entries of all workers of a run, oldest worker first."""
    paths = sorted((storage / "log").glob(f"{name}-*.jsonl"))
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


def delivered(entries: list[dict[str, Any]]) -> Batches:
    """Puts the workers' logs together: {(epoch, step): ids in canonical order}.

    Steps that only a part of a killed group logged are left out; a step delivered twice must be the same.
    """
    groups: dict[tuple[int, int, int], dict[int, dict[str, Any]]] = {}
    for entry in entries:
        if "at" in entry:
            groups.setdefault((*entry["at"], entry["world"]), {})[entry["rank"]] = entry
    found: Batches = {}
    for (epoch, step, world), ranks in sorted(groups.items()):
        if len(ranks) == world:
            parts = [np.array(ranks[rank]["ids"]).reshape(-1, ranks[rank]["splits"]) for rank in range(world)]
            ids = np.concatenate(parts, axis=1).ravel().tolist()
            assert found.setdefault((epoch, step), ids) == ids, f"epoch {epoch}, step {step} was delivered differently"
    return found


def opened_here(stream: LanceStream, name: str = "train") -> Any:
    """Opens a stream in this process, whether or not Ray runs: without actors."""
    from ray_lance_stream.local import LocalLink
    from ray_lance_stream.shard import StreamShard
    from ray_lance_stream.topology import Seat

    return StreamShard(stream.config, Seat(name=name), LocalLink(stream.recipe))


def reference(stream: LanceStream, epochs: int) -> Batches:
    """What one uninterrupted reader in this process gets."""
    with opened_here(stream) as shard:
        return {(e, shard.step): b["id"].tolist() for e in range(epochs) for b in shard.iter_batches()}


def opened(stream: LanceStream) -> Any:
    """Opens a stream; typed so that tests may look behind a shard's interface."""
    return stream.open()


def wait_until(condition: Callable[[], bool], timeout_s: float, what: str) -> None:
    """Polls a condition; fails the test if it does not come true."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(0.05)


def named_actors(stream: LanceStream) -> list[str]:
    """Names of the stream's living actors."""
    entries = ray.util.list_named_actors(all_namespaces=True)
    return [entry["name"] for entry in entries if entry["name"].startswith(stream.config.stream_id)]


def is_running(pid: int) -> bool:
    """Whether a process of this machine runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
