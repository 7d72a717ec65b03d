"""The training loop of the tests that look on. Training workers import this module, so it imports little."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import ray.train


class Sleepy:
    """A transform of some milliseconds a row, which stands still while a file is there."""

    def __init__(self, row_s: float, frozen: Path) -> None:
        self._row_s, self._frozen = row_s, frozen

    def __call__(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        deadline = time.monotonic() + 120  # should a test not take the file away
        while self._frozen.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(self._row_s * batch.num_rows)  # stands for work
        return batch


def watched(config: dict[str, Any]) -> None:
    """Trains until a file is there; the first worker group dies after a few steps."""
    shard = ray.train.get_dataset_shard("train")
    died, stop = Path(config["dir"], "died"), Path(config["dir"], "stop")
    while not stop.exists():
        for _ in shard.iter_batches():
            time.sleep(config["train_s"])  # stands for a step of training
            if stop.exists():
                break
            if shard.step == 3 and not died.exists() and ray.train.get_context().get_world_rank() == 0:
                died.touch()
                os.kill(os.getpid(), signal.SIGKILL)
    ray.train.report(dict(vars(shard.stats())))
