"""What a stream tells about itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ShardStats:
    """What one training worker saw since its shard was opened.

    Attributes:
        rows: Rows handed to the trainer.
        batches: Batches (micro-batches, if cut) handed to the trainer.
        wait_s: Seconds the trainer waited in ``next()``. Near zero: data is never the limit.
        train_s: Seconds between two ``next()``, the trainer's own work.
        buffered_bytes: Bytes of blocks held or asked for right now. At the budget: the pool keeps up.
        retries: Requests sent again after a prefetcher, a node or an object was lost.
        rows_skipped: Rows left out because the transform failed on them; of blocks that have arrived.
        prefetchers: Prefetchers this worker may ask, as it last heard; 0 where it reads in its own process.
        padded_tokens: Where rows are packed: padding in the blocks of the steps finished.
        documents_left: Where rows are packed: documents of this replica's splits that no block of the epochs finished
            had room for.
    """

    rows: int
    batches: int
    wait_s: float
    train_s: float
    buffered_bytes: int
    retries: int
    rows_skipped: int = 0
    prefetchers: int = 0
    padded_tokens: int = 0
    documents_left: int = 0

    @property
    def wait_share(self) -> float:
        """Part of the loop's time spent waiting for data, 0 to 1. Above a few percent: add prefetchers."""
        total = self.wait_s + self.train_s
        return self.wait_s / total if total else 0.0


@dataclass(frozen=True, kw_only=True)
class PoolSize:
    """How many prefetchers a run had from some time on.

    Attributes:
        at: When that began, in seconds since 1970.
        running: Prefetchers that worked.
        wanted: Prefetchers there should be: the others were starting, waiting for a node, or lost.
    """

    at: float
    running: int
    wanted: int


@dataclass(frozen=True, kw_only=True)
class RunProgress:
    """Where one run of a stream stands, as its state manager was last told.

    Attributes:
        name: The stream's name in the run; empty until a worker has been handed a batch.
        world_size: Training workers of the present worker group; 0 until one has.
        ranks: (epoch, step) by world rank: the step each worker was last handed, counted from 1.
        prefetchers: The size of the pool over time, the present one last; the last 256 changes. Empty if its
            coordinator did not answer.
    """

    name: str
    world_size: int
    ranks: Mapping[int, tuple[int, int]]
    prefetchers: tuple[PoolSize, ...] = ()

    @property
    def epoch_and_step(self) -> tuple[int, int]:
        """Where the slowest worker stands; (0, 0) before the first batch."""
        return min(self.ranks.values(), default=(0, 0))
