"""A run of many workers and prefetchers in simulated time, to see where it would wait; no Ray, no table, no rows.

Readers, their requests and budgets, steps and shares are the real ones. Modelled are: a prefetcher, which takes two
blocks at a time and transforms one after the other (see ``demand``); the choice among prefetchers, by each worker the
one of which it awaits fewest blocks, by chance among equals; and the trainer, whose workers begin a step when each has
its batch. Sending blocks from node to node takes no time here, nothing fails, and no late request is sent twice.
"""

from __future__ import annotations

import functools
import heapq
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
from ray_lance_stream.plan import PlanSpec, SplitLayout
from ray_lance_stream.position import Position
from ray_lance_stream.reader import BlockReader
from ray_lance_stream.readers import Room, new_reader
from ray_lance_stream.request import PlanHandle, Ranges
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
    clock = _Clock()
    store = _Store()
    pool = [_Prefetcher(clock, speeds, handle.bytes_per_row) for _ in range(prefetchers)]
    draw = random.Random(seed)
    trainer = _Trainer(clock, speeds.step_time_s, num_steps, warmup_steps)
    for rank in range(world_size):
        seat = Seat(
            replica=Replica(dp_rank=rank, dp_size=world_size), world_rank=rank, world_size=world_size, name="train"
        )
        source = _Source(pool, store, draw, None if asked is None else functools.partial(asked, rank))
        room = Room.of(config, seat, steps, handle, prefetch_batches)
        reader = new_reader(source, handle, config, Position.start(config), seat, steps, room)
        assert isinstance(reader, BlockReader)
        trainer.workers.append(_Worker(trainer, reader, source, steps, seat.replica, prefetch_batches))
    trainer.begin()
    clock.run(trainer)
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


class _Clock:
    """Simulated time, and what is to happen when."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def after(self, seconds: float, what: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._due, (self.now + seconds, self._count, what))

    def run(self, trainer: _Trainer) -> None:
        while not trainer.ended:
            self.now, _, what = heapq.heappop(self._due)  # an empty heap would be a worker that waits for nothing
            what()
            trainer.go_on()


class _Promise(Future[Any]):
    """A future without locks: there is one thread."""

    def __init__(self) -> None:
        self._block: _Block | None = None
        self._callbacks: list[Callable[[Future[Any]], object]] = []

    def cancel(self) -> bool:
        return False

    def cancelled(self) -> bool:
        return False

    def done(self) -> bool:
        return self._block is not None

    def exception(self, timeout: float | None = None) -> None:
        del timeout
        assert self._block is not None, "readers are called when their blocks are there"

    def result(self, timeout: float | None = None) -> Any:
        del timeout
        return self._block

    def add_done_callback(self, fn: Callable[[Future[Any]], object]) -> None:
        self._callbacks.append(fn)

    def set_result(self, result: Any) -> None:
        self._block = result
        for callback in self._callbacks:
            callback(self)


class _Block:
    """What stands for a block: its size."""

    __slots__ = ("nbytes", "num_rows")

    def __init__(self, rows: int, num_bytes: int) -> None:
        self.num_rows, self.nbytes = rows, num_bytes

    def slice(self, offset: int, length: int) -> _Block:
        del offset
        return _Block(length, 0)


class _Store:
    """Counts blocks from being built to being released."""

    def __init__(self) -> None:
        self.requests = self.built = self.most_blocks = self.most_bytes = 0
        self._blocks = self._bytes = 0

    def put(self, num_bytes: int) -> None:
        self.built += 1
        self._blocks += 1
        self._bytes += num_bytes
        self.most_blocks = max(self.most_blocks, self._blocks)
        self.most_bytes = max(self.most_bytes, self._bytes)

    def free(self, num_bytes: int) -> None:
        self._blocks -= 1
        self._bytes -= num_bytes


class _Prefetcher:
    """Takes blocks in the order in which they are asked for."""

    def __init__(self, clock: _Clock, speeds: Speeds, bytes_per_row: float) -> None:
        self._clock, self._speeds, self._bytes_per_row = clock, speeds, bytes_per_row
        self._queue: deque[tuple[int, Callable[[], None]]] = deque()
        self._active = 0
        self._transforms_until = 0.0
        self.busy_s = 0.0

    def build(self, rows: int, done: Callable[[], None]) -> None:
        self._queue.append((rows, done))
        self._begin()

    def _begin(self) -> None:
        while self._queue and self._active < BLOCKS_AT_ONCE:
            rows, done = self._queue.popleft()
            self._active += 1
            began = self._clock.now
            read_s = self._speeds.read_s(rows * self._bytes_per_row)
            self._clock.after(read_s, functools.partial(self._transform, rows, done, began))

    def _transform(self, rows: int, done: Callable[[], None], began: float) -> None:
        self._transforms_until = max(self._clock.now, self._transforms_until) + self._speeds.transform_s(rows)
        self._clock.after(self._transforms_until - self._clock.now, functools.partial(self._end, done, began))

    def _end(self, done: Callable[[], None], began: float) -> None:
        self._active -= 1
        self.busy_s += self._clock.now - began
        self._begin()
        done()


class _Source:
    """A worker's view of the pool; see ``source.BlockSource``."""

    def __init__(
        self,
        pool: list[_Prefetcher],
        store: _Store,
        draw: random.Random,
        asked: Callable[[Ranges], object] | None,
    ) -> None:
        self._pool, self._store, self._draw, self._tell = pool, store, draw, asked
        self._open: dict[int, int] = {}  # blocks awaited of a prefetcher, by its index
        self._held: deque[tuple[int, int]] = deque()  # (end, bytes) of blocks not yet released

    def request(self, handle: PlanHandle, ranges: Ranges) -> Future[Any]:
        chosen = self._best()
        self._open[chosen] = self._open.get(chosen, 0) + 1
        rows = ranges.num_rows
        num_bytes = int(rows * handle.bytes_per_row)
        self._held.append((ranges.stop, num_bytes))
        self._store.requests += 1
        if self._tell is not None:
            self._tell(ranges)
        future = _Promise()

        def done() -> None:
            self._open[chosen] -= 1
            if not self._open[chosen]:
                del self._open[chosen]
            self._store.put(num_bytes)
            future.set_result(_Block(rows, num_bytes))

        self._pool[chosen].build(rows, done)
        return future

    def _best(self) -> int:
        if len(self._open) < len(self._pool):
            while (chosen := self._draw.randrange(len(self._pool))) in self._open:
                pass
            return chosen
        fewest = min(self._open.values())
        return self._draw.choice([index for index, count in self._open.items() if count == fewest])

    def released(self, cycle: int) -> None:
        """Notes that the blocks up to a cycle are gone."""
        while self._held and self._held[0][0] <= cycle:
            self._store.free(self._held.popleft()[1])

    def plan(self, spec: PlanSpec) -> PlanHandle:
        raise NotImplementedError(f"the handle of {spec} is known")

    def retry_delay_s(self, error: BaseException, attempt: int, elapsed_s: float) -> float | None:
        del error, attempt, elapsed_s
        return None

    def advice(self, error: BaseException) -> str:
        return f"none: no simulated block fails, but {error!r}"

    def close(self) -> None:
        """Nothing to give up."""


class _Worker:
    """Makes batches ahead, as the thread of ``delivery`` does, and is handed them."""

    def __init__(
        self,
        trainer: _Trainer,
        reader: BlockReader,
        source: _Source,
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

    def __init__(self, clock: _Clock, step_time_s: float, num_steps: int, warmup_steps: int) -> None:
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
