"""The training loop of the test of credentials. Training workers import this module."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path
from typing import Any

import ray.train
from loops import Log, checkpoint_of

from ray_lance_stream import report


def train_until_refused(config: dict[str, Any]) -> None:
    """Reports once, has the store refuse from then on, and says what it is told, wherever a user might."""
    shards = {name: ray.train.get_dataset_shard(name) for name in ("train", "other")}
    log = Log(config, shards["train"])
    failures: list[Exception] = []
    iterators = {name: iter(shard.iter_batches()) for name, shard in shards.items()}
    for iterator in iterators.values():
        next(iterator)
    directory, checkpoint = checkpoint_of({})
    with directory:
        report({"step": 1}, checkpoint)
    Path(config["log"], "refuse").touch()
    for name, shard in shards.items():
        try:
            list(iterators[name])
        except Exception as error:
            failures.append(error)
            log.event(stream=name, error="".join(traceback.format_exception(error)))
            print(f"{shard!r} {shard.stats()} {error!r}", file=sys.stderr)  # noqa: T201
    raise failures[0]
