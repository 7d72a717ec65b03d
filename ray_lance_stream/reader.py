"""Reads one replica's splits of one epoch, block by block, ahead of the consumer and within a budget."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field
from typing import Final

import pyarrow as pa

from ray_lance_stream.errors import BlockError, LanceStreamError, StreamClosedError
from ray_lance_stream.request import PlanHandle, Ranges
from ray_lance_stream.source import BlockSource

logger = logging.getLogger("ray_lance_stream")
_POLL_S: Final = 0.2  # how often a wait looks after the other blocks in flight
_SAY_EVERY_S: Final = 30.0  # how often a wait that goes on is told of
_FIRST_BLOCK_BYTES: Final = 128 * 1024  # or one step, if that is no more than a small block
_SMALL_BLOCK_BYTES: Final = 512 * 1024  # a tight budget makes blocks no smaller than this
_GROWTH: Final = 2  # each block may be this many times the size of the one before


@dataclass(frozen=True, kw_only=True)
class ReadAhead:
    """How far a reader looks ahead. Changes speed and memory, never order.

    Attributes:
        max_bytes: Most bytes of blocks requested and not yet handed to the consumer. One block is
            always allowed, whatever its size.
        block_bytes: Size blocks grow to. Larger blocks read neighbouring rows together more often. Where
            the budget is small they stay smaller, but not below 512 KiB or a quarter of a step: a step
            must be there in any case, and in tiny blocks it would cost many requests.
    """

    max_bytes: int
    block_bytes: int


@dataclass(kw_only=True)
class _Block:
    start: int  # first cycle
    stop: int
    future: Future[pa.Table]
    num_bytes: float  # an estimate, until the block is here
    attempt: int = 1
    retry_at: float | None = None
    failed_at: float | None = None  # since when it fails
    error: BaseException | None = None  # final; raised when the block is wanted
    table: pa.Table | None = field(default=None, repr=False)


class BlockReader:
    """Serves the rows of consecutive cycles, waiting for blocks as needed.

    Not thread-safe: one thread reads at a time. Blocks stay until :meth:`release`, so a reader can go
    back to the last released cycle without asking for anything again.
    """

    def __init__(
        self,
        source: BlockSource,
        handle: PlanHandle,
        owned_splits: range,
        *,
        start_cycle: int,
        end_cycle: int,
        cycles_per_step: int,
        read_ahead: ReadAhead,
    ) -> None:
        self._source = source
        self._handle = handle
        self._owned = owned_splits
        self._end_cycle = end_cycle
        self._cycles_per_step = cycles_per_step
        self._read_ahead = read_ahead
        self._blocks: deque[_Block] = deque()
        self._next_cycle = start_cycle  # first cycle not yet asked for
        self._bytes_per_cycle = handle.bytes_per_row * len(owned_splits)
        step_bytes = self._bytes_per_cycle * cycles_per_step
        smallest = max(_SMALL_BLOCK_BYTES, step_bytes / 4)
        self._largest_bytes = min(float(read_ahead.block_bytes), max(smallest, read_ahead.max_bytes / 3))
        first = max(_FIRST_BLOCK_BYTES, min(step_bytes, _SMALL_BLOCK_BYTES))
        self._next_bytes = min(float(first), self._largest_bytes)
        self._closed = False
        self._any_arrived = False
        self.interrupted = threading.Event()  # set: the read under way raises StreamClosedError
        self.retries = 0

    @property
    def buffered_bytes(self) -> int:
        """Bytes of blocks that are here or asked for (those at their estimated size)."""
        # A copy, here and below: other threads may ask for this, or close, while one appends.
        return 0 if self._closed else int(sum(block.num_bytes for block in list(self._blocks)))

    def read(self, rows: range) -> list[pa.Table]:
        """Returns rows of this replica, in canonical order, as consecutive zero-copy parts.

        Row i is the one of cycle ``i // w`` and of the ``i % w``-th owned split, w = number of owned
        splits. Waits until the rows are there. ``rows`` must not begin before what was released.
        """
        width = len(self._owned)
        self._ask_ahead(until=-(-rows.stop // width))
        parts = []
        for block in list(self._blocks):
            first, last = max(block.start * width, rows.start), min(block.stop * width, rows.stop)
            if first < last:
                parts.append(self._wait(block).slice(first - block.start * width, last - first))
        if sum(part.num_rows for part in parts) != len(rows):
            raise BlockError(f"rows {rows.start} to {rows.stop} are not in the blocks that were read")
        return parts

    def release(self, cycle: int) -> None:
        """Drops the blocks that end at or before ``cycle`` and asks for new ones."""
        while self._blocks and self._blocks[0].stop <= cycle:
            self._blocks.popleft()
        self._ask_ahead(until=0)

    def close(self) -> None:
        """Gives up the blocks in flight. May be called from another thread; the reader is of no use afterwards."""
        self._closed = True
        for block in list(self._blocks):
            block.future.cancel()

    def _ask_ahead(self, *, until: int) -> None:
        """Asks for blocks up to the budget, and in any case up to cycle ``until``."""
        self._check_open()
        while self._next_cycle < self._end_cycle:
            size = self._block_cycles()
            estimate = size * self._bytes_per_cycle
            held = self.buffered_bytes
            ahead = self._next_cycle >= until and bool(self._blocks)
            if ahead and (not self._any_arrived or held + estimate > self._read_ahead.max_bytes):
                return  # what is wanted first does not share the prefetchers with what comes later
            start, stop = self._next_cycle, min(self._next_cycle + size, self._end_cycle)
            self._blocks.append(
                _Block(
                    start=start,
                    stop=stop,
                    future=self._request(start, stop),
                    num_bytes=(stop - start) * self._bytes_per_cycle,
                )
            )
            self._next_cycle = stop
            self._next_bytes = min(self._next_bytes * _GROWTH, self._largest_bytes)

    def _check_open(self) -> None:
        if self._closed:  # by another thread
            raise StreamClosedError("the shard was closed while it was being read")

    def _block_cycles(self) -> int:
        """Cycles of the next block: growing, and whole steps where a step is smaller than a block."""
        cycles = max(1, int(self._next_bytes / self._bytes_per_cycle))
        q = self._cycles_per_step
        if cycles >= q:
            # End where a step ends, so that no batch straddles two blocks.
            end = (self._next_cycle + cycles) // q * q
            return max(1, end - self._next_cycle)
        return cycles

    def _request(self, start: int, stop: int) -> Future[pa.Table]:
        ranges = Ranges(first_split=self._owned.start, num_splits=len(self._owned), start=start, stop=stop)
        self._check_open()
        try:
            return self._source.request(self._handle, ranges)
        except Exception:
            self._check_open()  # closed in this very moment, and the source with it
            raise

    def _wait(self, wanted: _Block) -> pa.Table:
        began, said = time.perf_counter(), 0
        while not self._arrived(wanted):
            if wanted.error is not None:
                error, wanted.error = wanted.error, None
                wanted.retry_at = time.monotonic()  # should it be wanted again
                wanted.failed_at, wanted.attempt = None, 0
                raise error
            self._pause(wanted)
            waited = time.perf_counter() - began
            if waited >= (said + 1) * _SAY_EVERY_S:
                said += 1
                logger.warning("waited %.0f s for %s; attempt %d", waited, self._named(wanted), wanted.attempt)
            self._check_open()
            if self.interrupted.is_set():
                raise StreamClosedError("this iteration of the shard has ended")
        assert wanted.table is not None
        return wanted.table

    def _arrived(self, wanted: _Block) -> bool:
        self._look_after()
        return wanted.table is not None

    def _pause(self, wanted: _Block) -> None:
        """Waits until the block may be there, but no longer than one poll."""
        if wanted.retry_at is not None:
            self.interrupted.wait(max(0.0, min(_POLL_S, wanted.retry_at - time.monotonic())))
            return
        with contextlib.suppress(FutureTimeoutError, CancelledError):
            wanted.future.exception(timeout=_POLL_S)

    def _look_after(self) -> None:
        """Takes in the blocks that arrived and sends failed requests again."""
        now = time.monotonic()
        for block in list(self._blocks):
            if block.table is not None or block.error is not None:
                continue
            if block.retry_at is not None:
                if now >= block.retry_at:
                    block.retry_at = None
                    block.attempt += 1
                    self.retries += 1
                    block.future = self._request(block.start, block.stop)
            elif block.future.done() and not self._closed:
                self._take_in(block, now)

    def _take_in(self, block: _Block, now: float) -> None:
        error = block.future.exception()
        if error is None:
            block.table = block.future.result()
            self._any_arrived = True
            block.num_bytes = block.table.nbytes
            # Later estimates follow what rows really weigh, so that the budget holds for skewed data.
            self._bytes_per_cycle = max(1.0, block.num_bytes / (block.stop - block.start))
            return
        if block.failed_at is None:
            block.failed_at = now
        delay_s = self._source.retry_delay_s(error, block.attempt, now - block.failed_at)
        if delay_s is None:
            block.error = self._final_error(block, error)
        else:
            block.retry_at = now + delay_s

    def _final_error(self, block: _Block, error: BaseException) -> BaseException:
        cause = getattr(error, "cause", None)
        if isinstance(error, LanceStreamError):
            return error
        if isinstance(cause, LanceStreamError):
            return cause
        failure = BlockError(
            f"the block of {self._named(block)} could not be built in {block.attempt} attempt(s): {error}"
        )
        failure.__cause__ = error
        return failure

    def _named(self, block: _Block) -> str:
        return f"positions {block.start} to {block.stop} of splits {self._owned.start} to {self._owned.stop}"
