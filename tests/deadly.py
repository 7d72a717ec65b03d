"""Transforms that kill the process they run in.

A module of its own that imports little: each process that dies of them has imported it first.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pyarrow as pa


class Deadly:
    """Kills the process that transforms certain rows, or, where it is told to, only raises."""

    def __init__(self, rows: frozenset[int], log: Path | None) -> None:
        self.rows, self.log = rows, log

    def __call__(self, batch: pa.RecordBatch) -> Any:
        found = self.rows & set(batch["id"].to_pylist())
        if found and self.log is None:
            raise ValueError(f"rows {sorted(found)}")
        if found and self.log is not None:
            with self.log.open("a") as file:
                file.write(f"{time.time():.1f} {os.getpid()} {sorted(found)} of {batch.num_rows}\n")
            os.kill(os.getpid(), signal.SIGKILL)
        return {"id": batch["id"]}


class DeadlyObjects(Deadly):
    """The same, for rows that are Python objects."""

    def __call__(self, batch: pa.RecordBatch) -> Any:
        return super().__call__(batch)["id"].to_pylist()
