"""What a stream tells about itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias


@dataclass(frozen=True, kw_only=True)
class ShardStats:
    """What one training worker saw since its shard was opened. Times in seconds.

    Attributes:
        rows: Rows handed to the trainer.
        batches: Batches (micro-batches, if cut) handed to the trainer.
        wait_s: The trainer's waiting in ``next()``, that under way included. Near zero: data is never the limit.
        train_s: Time between two ``next()``, the trainer's own work.
        wait_p50_s: Half of the waits were no longer. More than a millisecond: most batches come late, see ``verdict``.
        wait_p99_s: 99 of 100 were no longer. Alone large: single blocks come late, those of an epoch's start for
            instance; a larger ``PrefetchConfig(max_buffer_bytes=...)`` lasts longer.
        waiting_s: How long the wait under way has lasted; 0 without one. Many seconds: ``ray-lance-stream status`` says
            what it is for.
        buffered_bytes: Bytes of blocks held or asked for right now. At the budget: the pool keeps up.
        budget_bytes: How many there may be: this worker's part of ``max_buffer_bytes``, less the batches made ahead.
        open_requests: Blocks asked for and not here yet. Always 0 or 1 while the trainer waits: the budget holds
            too few blocks; raise ``max_buffer_bytes`` or lower ``block_bytes``.
        retries: Requests sent again after a prefetcher, a node or an object was lost. Keeps growing: look at the nodes.
        rows_skipped: Rows left out because the transform failed on them; of blocks that have arrived.
        prefetchers: Prefetchers this worker may ask, as it last heard; 0 where it reads in its own process.
        padded_tokens: Where rows are packed: padding in the blocks of the steps finished.
        documents_left: Where rows are packed: documents of this replica's splits that no block of the epochs finished
            had room for.
        verdict: What that comes to, in words, as far as one worker can say. ``LanceStream.stats()`` says more.
    """

    rows: int
    batches: int
    wait_s: float
    train_s: float
    buffered_bytes: int
    retries: int
    wait_p50_s: float = 0.0
    wait_p99_s: float = 0.0
    waiting_s: float = 0.0
    budget_bytes: int = 0
    open_requests: int = 0
    rows_skipped: int = 0
    prefetchers: int = 0
    padded_tokens: int = 0
    documents_left: int = 0
    verdict: str = ""

    @property
    def wait_share(self) -> float:
        """Part of the loop's time spent waiting for data, 0 to 1. Above a few percent: add prefetchers."""
        total = self.wait_s + self.train_s
        return self.wait_s / total if total else 0.0


@dataclass(frozen=True, kw_only=True)
class RankStats:
    """One training worker, as the run's coordinator last heard of it. "Lately" is the last half minute at most.

    Attributes:
        rank: Its rank in the run.
        dp_rank: The replica it is, or is a part of: ranks of the same one see the same rows.
        node: Id of the Ray node it runs on.
        epoch: The epoch it reads, counted from 0.
        step: Steps of the epoch it was handed.
        num_steps: Steps of the epoch; 0 where not known yet.
        rows: Rows handed to it since it started.
        rows_per_s: Rows handed to it lately, in a second.
        wait_share: The part of the time it waited for data lately, 0 to 1. Above a few percent: see the verdict.
        wait_p50_s: See :class:`ShardStats`.
        wait_p99_s: See :class:`ShardStats`.
        waiting_s: How long the wait under way has lasted; 0 without one.
        waiting_for: The block that it waits for; empty without one, or if it waits for something else: its own
            converting, or other ranks where rows are skipped.
        asked_of: Indices of the prefetchers that have been asked for that block. Two: the first is late.
        open_requests: See :class:`ShardStats`.
        buffered_bytes: See :class:`ShardStats`.
        budget_bytes: See :class:`ShardStats`.
        retries: See :class:`ShardStats`.
        rows_skipped: See :class:`ShardStats`.
        silent_s: Seconds since it was last heard of, usually once a second. Many: its process hangs or is gone.
            Infinite: only its place is known.
    """

    rank: int
    dp_rank: int = 0
    node: str = ""
    epoch: int = 0
    step: int = 0
    num_steps: int = 0
    rows: int = 0
    rows_per_s: float = 0.0
    wait_share: float = 0.0
    wait_p50_s: float = 0.0
    wait_p99_s: float = 0.0
    waiting_s: float = 0.0
    waiting_for: str = ""
    asked_of: tuple[int, ...] = ()
    open_requests: int = 0
    buffered_bytes: int = 0
    budget_bytes: int = 0
    retries: int = 0
    rows_skipped: int = 0
    silent_s: float = 0.0


SILENT_S: Final = 5.0  # workers are heard of once a second; after so long they are gone, or hang
PrefetcherState: TypeAlias = Literal["starting", "building", "idle", "not answering", "leaving", "cannot start"]


@dataclass(frozen=True, kw_only=True)
class PrefetcherStats:
    """One prefetcher, as the run's coordinator last heard of it. Totals count from the start of its process.

    Attributes:
        index: Its number in the pool.
        node: Id of the Ray node it runs on; empty while it waits for one.
        state: "starting" (minutes: no node has room, or a runtime environment is being made), "building", "idle",
            "not answering" (its process is gone and Ray starts it again, or it hangs), "leaving" (the pool shrinks) or
            "cannot start" (the coordinator's log says why).
        blocks: Blocks it built.
        rows: Rows of them.
        num_bytes: Bytes of them.
        take_s: Seconds of reading, of all blocks; it builds two at a time.
        transform_s: Seconds of the transform, likewise.
        building: Blocks it is building now.
        rows_kept: Rows it read from its node's disk instead of the storage (``PrefetchConfig.cache_bytes``). Far fewer
            than ``rows`` in a second epoch: the cache is smaller than the table.
        busy_share: The part of the time it had a block to build lately, 0 to 1. All near 1 while trainers wait: more
            prefetchers help, if there are cores for them.
        busy_s_per_row: Seconds it needs for a row lately, building as many blocks at a time as it does; 0 where it
            built none.
        take_share: The part of its building that was reading lately, 0 to 1.
    """

    index: int
    state: PrefetcherState
    node: str = ""
    blocks: int = 0
    rows: int = 0
    num_bytes: int = 0
    take_s: float = 0.0
    transform_s: float = 0.0
    building: int = 0
    rows_kept: int = 0
    busy_share: float = 0.0
    busy_s_per_row: float = 0.0
    take_share: float = 0.0


@dataclass(frozen=True, kw_only=True)
class StreamStats:
    """One run of a stream, as its coordinator sees it.

    Attributes:
        run: Name of the Ray Train run; empty outside of one, and until a worker has opened the stream.
        stream: The stream's name in the run.
        session: Names the run's actors of this stream, also in logs.
        started_at: When the present worker group started, in seconds since 1970; 0 before the first.
        world_size: Training workers of the present group; 0 until one of them has opened the stream.
        restarts: How often the worker group was started again, after a failure or to resize. More than you know
            reasons for: look for dead workers in Ray's dashboard.
        ranks: The workers that were heard of lately, by rank.
        prefetchers: The pool, by index.
        wanted: Prefetchers there should be. More than work for minutes: no node has room for them.
        verdict: What all that comes to, in words: whether data is the limit, what of it, and what would help.
    """

    run: str = ""
    stream: str = ""
    session: str = ""
    started_at: float = 0.0
    world_size: int = 0
    restarts: int = 0
    ranks: tuple[RankStats, ...] = ()
    prefetchers: tuple[PrefetcherStats, ...] = ()
    wanted: int = 0
    verdict: str = ""

    @property
    def slowest(self) -> RankStats | None:
        """The worker that waits most; the others wait for it in every step, where they call it communication."""
        return max(self.ranks, key=lambda rank: (rank.wait_share, rank.waiting_s), default=None)

    @property
    def wait_share(self) -> float:
        """The part of the time that worker waited for data lately, 0 to 1: by so much data slows the run down."""
        return self.slowest.wait_share if self.slowest is not None else 0.0

    @property
    def silent_s(self) -> float:
        """Seconds since any worker was last heard of, usually at most one; 0 without workers.

        More than some seconds: the worker group is being started again, or all of it hangs.
        """
        return min((rank.silent_s for rank in self.ranks), default=0.0)

    @property
    def epoch_and_step(self) -> tuple[int, int]:
        """Where the last worker stands; (0, 0) before the first batch."""
        return min(((rank.epoch, rank.step) for rank in self.ranks), default=(0, 0))

    @property
    def rows_per_s(self) -> float:
        """Rows that all replicas together were handed lately, in a second."""
        return sum({rank.dp_rank: rank.rows_per_s for rank in self.ranks}.values())

    @property
    def open_requests(self) -> int:
        """Blocks asked for and not delivered. Fewer than prefetchers while trainers wait: see ``max_buffer_bytes``."""
        return sum(rank.open_requests for rank in self.ranks)

    @property
    def buffered_bytes(self) -> int:
        """Bytes of blocks that all workers hold or have asked for; bounded by ``max_buffer_bytes``."""
        return sum(rank.buffered_bytes for rank in self.ranks)

    @property
    def retries(self) -> int:
        """Requests the present workers sent again after losses."""
        return sum(rank.retries for rank in self.ranks)

    @property
    def rows_skipped(self) -> int:
        """Rows that the present replicas left out because the transform failed on them."""
        return sum({rank.dp_rank: rank.rows_skipped for rank in self.ranks}.values())

    @property
    def take_s(self) -> float:
        """Seconds the prefetchers read."""
        return sum(prefetcher.take_s for prefetcher in self.prefetchers)

    @property
    def transform_s(self) -> float:
        """Seconds the prefetchers transformed. Many times ``take_s``: the transform is the limit, if anything is."""
        return sum(prefetcher.transform_s for prefetcher in self.prefetchers)

    @property
    def working(self) -> int:
        """Prefetchers that work."""
        return sum(prefetcher.state in ("building", "idle") for prefetcher in self.prefetchers)


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
