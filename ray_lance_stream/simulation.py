"""A run of many workers and prefetchers in simulated time, to see where it would wait; no Ray, no table, no rows.

Readers, their requests and budgets, steps and shares are the real ones. Modelled are: a prefetcher, which takes two
blocks at a time and transforms one after the other (see ``demand``); the choice among prefetchers, by each worker the
one of which it awaits fewest blocks, by chance among equals; and the trainer, whose workers begin a step when each has
its batch. Sending blocks from node to node takes no time here, nothing fails, and no late request is sent twice.
"""

from __future__ import annotations

import functools
import math
import random
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np

from ray_lance_stream.config import StreamConfig
from ray_lance_stream.demand import BLOCKS_AT_ONCE, Speeds
from ray_lance_stream.plan import SplitLayout
from ray_lance_stream.position import Position
from ray_lance_stream.reader import BlockReader
from ray_lance_stream.readers import Room, new_reader
from ray_lance_stream.request import PlanHandle, Ranges
from ray_lance_stream.simulatedpool import Clock, Prefetcher, Source, Store
from ray_lance_stream.topology import Replica, Seat, StepPlan


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What was seen. Times are simulated; those of waiting are told of the steps after the warm-up.

    Attributes:
        steps: Steps after the warm-up.
        first_batch_s: When the first step began.
        waiting_share: The part of the time in which the trainer stood still for data.
        wait_p50_s: How long a worker waits for a batch, in the middle.
        wait_p99_s: And in the worst of a hundred.
        requests: Blocks asked for, by all workers.
        blocks: Blocks that were built.
        most_blocks: Most blocks in the object store at one time.
        most_bytes: Their size.
        used: The part of the prefetchers' time in which they worked on two blocks, or half of it on one.
    """

    steps: int
    first_batch_s: float
    waiting_share: float
    wait_p50_s: float
    wait_p99_s: float
    requests: int
    blocks: int
    most_blocks: int
    most_bytes: int
    used: float


def simulate(
    config: StreamConfig,
    handle: PlanHandle,
    speeds: Speeds,
    *,
    world_size: int,
    prefetchers: int,
    num_steps: int,
    warmup_steps: int = 1,
    prefetch_batches: int = 1,
    seed: int = 0,
    asked: Callable[[int, Ranges], object] | None = None,
) -> Outcome:
    """Runs the first steps of an epoch, each worker being a replica.

    Args:
        config: The stream; its rows are neither skipped nor packed.
        handle: Its plan, of which only counts and sizes are used.
        speeds: What takes how long.
        world_size: Number of workers.
        prefetchers: Number of prefetchers.
        num_steps: Steps to run, no more than the epoch has.
        warmup_steps: Steps at the beginning, while buffers fill, that do not count; 1 or more.
        prefetch_batches: Batches each worker makes ahead, as for ``iter_batches``.
        seed: Of the choice among prefetchers.
        asked: Called with the rank and the ranges of every request.
    """
    if config.is_uneven or prefetchers < 1:
        raise ValueError("a simulation takes a stream without packing or skips, and at least one prefetcher")
    layout = SplitLayout(num_rows=handle.num_rows, num_splits=config.order.num_splits)
    steps = StepPlan.of(layout, global_batch_size=config.global_batch_size, drop_last=config.drop_last)
    if not 1 <= warmup_steps < num_steps <= steps.num_steps:
        raise ValueError(f"{num_steps} steps with {warmup_steps} to warm up, of an epoch of {steps.num_steps}")
    clock = Clock()
    store = Store()
    pool = [Prefetcher(clock, speeds, handle.bytes_per_row) for _ in range(prefetchers)]
    draw = random.Random(seed)
    trainer = _Trainer(clock, speeds.step_time_s, num_steps, warmup_steps)
    for rank in range(world_size):
        seat = Seat(
            replica=Replica(dp_rank=rank, dp_size=world_size), world_rank=rank, world_size=world_size, name="train"
        )
        source = Source(pool, store, draw, None if asked is None else functools.partial(asked, rank))
        room = Room.of(config, seat, steps, handle, prefetch_batches)
        reader = new_reader(source, handle, config, Position.start(config), seat, steps, room)
        assert isinstance(reader, BlockReader)
        trainer.workers.append(_Worker(trainer, reader, source, steps, seat.replica, prefetch_batches))
    trainer.begin()
    while not trainer.ended:
        clock.next()
        trainer.go_on()
    waits = np.array(trainer.waits)
    span_s, counted = clock.now - trainer.warm_at, num_steps - warmup_steps
    return Outcome(
        steps=counted,
        first_batch_s=trainer.first_at,
        waiting_share=max(0.0, 1 - counted * speeds.step_time_s / span_s),
        wait_p50_s=float(np.percentile(waits, 50)),
        wait_p99_s=float(np.percentile(waits, 99)),
        requests=store.requests,
        blocks=store.built,
        most_blocks=store.most_blocks,
        most_bytes=store.most_bytes,
        used=sum(prefetcher.busy_s for prefetcher in pool) / (BLOCKS_AT_ONCE * prefetchers * clock.now),
    )


class _Worker:
    """Makes batches ahead, as the thread of ``delivery`` does, and is handed them."""

    def __init__(
        self,
        trainer: _Trainer,
        reader: BlockReader,
        source: Source,
        steps: StepPlan,
        replica: Replica,
        prefetch_batches: int,
    ) -> None:
        self._trainer, self._reader, self._source, self._steps = trainer, reader, source, steps
        self._width = len(replica.owned_splits(steps.num_splits))
        self._most_made = max(1, prefetch_batches)
        self._made: deque[int] = deque()  # the cycles at which batches end that are made and not handed over
        self._cycle = self._handed = self._released = 0
        self._awaited = 0  # blocks
        self._wanted_at: float | None = None

    def want(self, now: float) -> None:
        """The trainer asks for the next batch."""
        self._wanted_at = now
        if self._made:
            self._hand(now)
        self.make(now)

    def make(self, now: float) -> None:
        """Makes what it may, unless it waits for blocks."""
        while not self._awaited and len(self._made) < self._most_made and self._cycle < self._steps.end_cycle:
            if self._released < self._handed:
                self._released = self._handed
                self._reader.release(self._handed)
                self._source.released(self._handed)
            cycles = self._steps.rest_of_step(self._cycle)
            rows = range(cycles.start * self._width, cycles.stop * self._width)
            missing = [flight for flight in self._reader.ask(rows) if not flight.future.done()]
            self._awaited = len(missing)
            for flight in missing:
                flight.future.add_done_callback(self._arrived)
            if missing:
                return
            self._reader.read(rows)
            self._cycle = cycles.stop
            self._made.append(cycles.stop)
            if self._wanted_at is not None:
                self._hand(now)

    def _arrived(self, _: Future[Any]) -> None:
        self._awaited -= 1
        if not self._awaited:
            self._trainer.ready.append(self)

    def _hand(self, now: float) -> None:
        assert self._wanted_at is not None
        self._handed = self._made.popleft()
        self._trainer.handed(now - self._wanted_at)
        self._wanted_at = None


class _Trainer:
    """Begins a step when every worker has its batch."""

    def __init__(self, clock: Clock, step_time_s: float, num_steps: int, warmup_steps: int) -> None:
        self._clock, self._step_time_s = clock, step_time_s
        self._num_steps, self._warmup_steps = num_steps, warmup_steps
        self.workers: list[_Worker] = []
        self.ready: list[_Worker] = []  # whose blocks have all arrived
        self.waits: list[float] = []
        self.first_at = self.warm_at = math.nan
        self._steps_done = 0
        self.ended = False
        self._missing = 0

    def begin(self) -> None:
        """Every worker asks for its batch."""
        self._missing = len(self.workers)
        for worker in self.workers:
            worker.want(self._clock.now)

    def go_on(self) -> None:
        """Lets those go on for whom something has changed; called after each event, never within one."""
        while self.ready:
            self.ready.pop().make(self._clock.now)

    def handed(self, waited_s: float) -> None:
        """A worker has its batch."""
        if self._steps_done >= self._warmup_steps:
            self.waits.append(waited_s)
        self._missing -= 1
        if not self._missing:
            if not self._steps_done:
                self.first_at = self._clock.now
            self._clock.after(self._step_time_s, self._step_ended)

    def _step_ended(self) -> None:
        self._steps_done += 1
        if self._steps_done == self._warmup_steps:
            self.warm_at = self._clock.now
        if self._steps_done == self._num_steps:
            self.ended = True
        else:
            self.begin()
