"""A consumer of a stream whose pool changes, for the tests of the elastic pool."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import ray
from runs import reference

from ray_lance_stream import LanceStream


class Slow:
    """A transform that takes a tenth of a second."""

    def __call__(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        time.sleep(0.1)  # stands for work
        return batch


def pool(shard: Any) -> list[tuple[str, int]]:
    """(node, process id) of the prefetchers that consumers may ask."""
    found: list[tuple[str, int]] = ray.get(shard.link.session.coordinator.prefetchers.remote())
    return found


def train(stream: LanceStream) -> tuple[str, set[str], list[list[int]], set[str]]:
    """One epoch of one worker, in a process that loads this module and no test.

    Returns:
        The node it was on, the nodes that rows were decoded on, the ids, and what of Lance it has loaded.
    """
    decoded_on, ids = set(), []
    with stream.open() as shard:
        for batch in shard.iter_batches():
            decoded_on |= set(batch["node"].tolist())
            ids.append(batch["id"].tolist())
    return ray.get_runtime_context().get_node_id(), decoded_on, ids, {"lance", "lancedb"} & set(sys.modules)


class Consumer:
    """Takes batch after batch, epoch after epoch."""

    def __init__(self, shard: Any) -> None:
        self.shard = shard
        self.seen: list[list[int]] = []
        self._batches = iter(shard.iter_batches())

    def read(self, pause_s: float = 0.0) -> None:
        """Takes a batch, and trains with it for a time."""
        try:
            batch = next(self._batches)
        except StopIteration:
            self._batches = iter(self.shard.iter_batches())
            batch = next(self._batches)
        self.seen.append(batch["id"].tolist())
        time.sleep(pause_s)

    def read_until(self, condition: Callable[[], bool], what: str, pause_s: float = 0.0) -> None:
        """Reads until a condition holds, which is looked at now and then."""
        looked_at, deadline = 0.0, time.monotonic() + 120
        while True:
            self.read(pause_s)
            if time.monotonic() - looked_at > 0.5:
                if condition():
                    return
                looked_at = time.monotonic()
                assert looked_at < deadline, f"not within two minutes: {what}"

    def check(self, plain: LanceStream) -> None:
        """Compares what was read with what one reader in this process gets."""
        want = reference(plain, self.shard.epoch + 1)
        assert self.seen == list(want.values())[: len(self.seen)]
