"""Prefetchers in simulated time, and a worker's view of them; see ``simulation``."""

from __future__ import annotations

import functools
import heapq
import random
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from ray_lance_stream.demand import BLOCKS_AT_ONCE, Speeds
from ray_lance_stream.plan import PlanSpec
from ray_lance_stream.request import PlanHandle, Ranges


class Clock:
    """Simulated time, and what is to happen when."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def after(self, seconds: float, what: Callable[[], None]) -> None:
        """Does something later."""
        self._count += 1
        heapq.heappush(self._due, (self.now + seconds, self._count, what))

    def next(self) -> None:
        """Does what is due next. That there is nothing would be a worker that waits for nothing."""
        self.now, _, what = heapq.heappop(self._due)
        what()


class Promise(Future[Any]):
    """A future without locks: there is one thread."""

    def __init__(self) -> None:
        self._block: Block | None = None
        self._callbacks: list[Callable[[Future[Any]], object]] = []

    def cancel(self) -> bool:
        """Never: what was asked for is built."""
        return False

    def cancelled(self) -> bool:
        """Never."""
        return False

    def done(self) -> bool:
        """Whether the block is there."""
        return self._block is not None

    def exception(self, timeout: float | None = None) -> None:
        """Nothing goes wrong; called for a block that is there."""
        del timeout
        assert self._block is not None, "readers are called when their blocks are there"

    def result(self, timeout: float | None = None) -> Any:
        """Returns the block."""
        del timeout
        return self._block

    def add_done_callback(self, fn: Callable[[Future[Any]], object]) -> None:
        """Calls a function when the block is there, or at once if it is."""
        if self._block is None:
            self._callbacks.append(fn)
        else:
            fn(self)

    def set_result(self, result: Any) -> None:
        """The block is there."""
        self._block = result
        for callback in self._callbacks:
            callback(self)


class Rows:
    """What stands for rows: how many."""

    __slots__ = ("num_rows",)

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows

    def slice(self, offset: int, length: int) -> Rows:
        """Returns so many of them."""
        del offset
        return Rows(length)


class Block:
    """What stands for a block: its size, and what it cost; see ``sifting.Whole``."""

    __slots__ = ("nbytes", "rows", "transform_s")

    def __init__(self, rows: int, num_bytes: int, transform_s: float) -> None:
        self.rows, self.nbytes, self.transform_s = Rows(rows), num_bytes, transform_s


class Store:
    """Counts blocks from being built to being released."""

    def __init__(self) -> None:
        self.requests = self.built = self.most_blocks = self.most_bytes = 0
        self._blocks = self._bytes = 0

    def put(self, num_bytes: int) -> None:
        """A block was built."""
        self.built += 1
        self._blocks += 1
        self._bytes += num_bytes
        self.most_blocks = max(self.most_blocks, self._blocks)
        self.most_bytes = max(self.most_bytes, self._bytes)

    def free(self, num_bytes: int) -> None:
        """A block was released."""
        self._blocks -= 1
        self._bytes -= num_bytes


class Prefetcher:
    """Takes blocks in the order in which they are asked for."""

    def __init__(self, clock: Clock, speeds: Speeds, bytes_per_row: float) -> None:
        self._clock, self._speeds, self._bytes_per_row = clock, speeds, bytes_per_row
        self._queue: deque[tuple[int, Callable[[], None]]] = deque()
        self._active = 0
        self._transforms_until = 0.0
        self.busy_s = 0.0

    def transform_s(self, rows: int) -> float:
        """Returns how long transforming a block takes, once its turn has come."""
        return self._speeds.transform_s(rows)

    def build(self, rows: int, done: Callable[[], None]) -> None:
        """Queues a block; calls ``done`` when it is there."""
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


class Source:
    """A worker's view of the pool; see ``source.BlockSource``."""

    def __init__(
        self,
        pool: list[Prefetcher],
        store: Store,
        draw: random.Random,
        asked: Callable[[Ranges], object] | None,
    ) -> None:
        self._pool, self._store, self._draw, self._tell = pool, store, draw, asked
        self._open: dict[int, int] = {}  # blocks awaited of a prefetcher, by its index
        self._held: deque[tuple[int, int]] = deque()  # (end, bytes) of blocks not yet released

    def request(self, handle: PlanHandle, ranges: Ranges) -> Future[Any]:
        """See ``BlockSource``."""
        chosen = self._best()
        self._open[chosen] = self._open.get(chosen, 0) + 1
        rows = ranges.num_rows
        num_bytes = int(rows * handle.bytes_per_row)
        self._held.append((ranges.stop, num_bytes))
        self._store.requests += 1
        if self._tell is not None:
            self._tell(ranges)
        future = Promise()

        def done() -> None:
            self._open[chosen] -= 1
            if not self._open[chosen]:
                del self._open[chosen]
            self._store.put(num_bytes)
            future.set_result(Block(rows, num_bytes, prefetcher.transform_s(rows)))

        prefetcher = self._pool[chosen]
        prefetcher.build(rows, done)
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
        """See ``BlockSource``; never called, as the handle is known."""
        raise NotImplementedError(f"the handle of {spec} is known")

    def retry_delay_s(self, error: BaseException, attempt: int, elapsed_s: float) -> float | None:
        """See ``BlockSource``."""
        del error, attempt, elapsed_s
        return None

    def advice(self, error: BaseException) -> str:
        """See ``BlockSource``."""
        return f"none: no simulated block fails, but {error!r}"

    def close(self) -> None:
        """Nothing to give up."""
