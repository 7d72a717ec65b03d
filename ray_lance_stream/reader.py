"""Reads one replica's splits of one epoch, block by block, ahead of the consumer and within a budget."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import pyarrow as pa

from ray_lance_stream.errors import BlockError
from ray_lance_stream.flight import Dispatcher, Flight, withdraw_latest
from ray_lance_stream.request import PlanHandle, Ranges
from ray_lance_stream.source import BlockSource

FIRST_BLOCK_BYTES: Final = 128 * 1024  # or one step, if that is no more than a small block
_FIRST_BLOCK_ROWS: Final = 512  # likewise: rows at random places cost about as much each, however narrow they are
_SMALL_BLOCK_BYTES: Final = 512 * 1024  # a tight budget makes blocks no smaller than this
FALL: Final = 0.5  # how fast the expected size of rows falls, from block to block
MOST_OPEN: Final = 256  # blocks asked for and not here: two for each of a hundred prefetchers
LONGEST_TRANSFORM_S: Final = 2.0  # a block is no larger than the transform can do in about this time
# Each block may be this many times the size of the one before. Where a block's rows lie close together in the files,
# Lance reads all that is between them: a small block costs about as much as a large one, so few of them are built.
GROWTH: Final = 4


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


def first_block_bytes(handle: PlanHandle) -> float:
    """Size of an epoch's first block, which the consumer waits for."""
    return min(float(FIRST_BLOCK_BYTES), _FIRST_BLOCK_ROWS * handle.bytes_per_row)


class Pace:
    """How many rows a block may have so that the transform is done with it soon.

    Of rows that take long and little room, a block as large as others would take minutes: as long would whoever waits
    for its first row, and as much would be done again after a prefetcher died.
    """

    def __init__(self, row_s: float) -> None:
        self._row_s = row_s

    @property
    def most_rows(self) -> float:
        """Rows of a block."""
        return LONGEST_TRANSFORM_S / self._row_s if self._row_s else math.inf

    def note(self, rows: int, transform_s: float) -> None:
        """Notes how long the transform took for the rows of a block."""
        self._row_s = max(transform_s / max(1, rows), self._row_s * FALL)


class BlockReader:
    """Serves the rows of consecutive cycles, waiting for blocks as needed.

    Not thread-safe: one thread reads at a time. Blocks stay until :meth:`release`, so a reader can go
    back to the last released cycle without asking for anything again. The cycles of ``left_out`` are not read.
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
        left_out: Sequence[range] = (),
    ) -> None:
        self._dispatcher = Dispatcher(source, handle, self._give_up_excess)
        self._owned = owned_splits
        self._end_cycle = end_cycle
        self._left_out = left_out
        self._cycles_per_step = cycles_per_step
        self._read_ahead = read_ahead
        self._blocks: deque[Flight] = deque()
        self._next_cycle = start_cycle  # first cycle not yet asked for
        self._bytes_per_cycle = handle.bytes_per_row * len(owned_splits)
        step_bytes = self._bytes_per_cycle * cycles_per_step
        smallest = max(_SMALL_BLOCK_BYTES, step_bytes / 4)
        self._largest_bytes = min(float(read_ahead.block_bytes), max(smallest, read_ahead.max_bytes / 3))
        first = max(first_block_bytes(handle), min(step_bytes, _SMALL_BLOCK_BYTES))
        self._next_bytes = min(float(first), self._largest_bytes)
        self._pace = Pace(handle.transform_s_per_row)
        self._until = start_cycle  # first cycle that nobody waits for
        self._any_arrived = False
        self.interrupted = self._dispatcher.interrupted

    @property
    def dispatcher(self) -> Dispatcher:
        """What sends its requests."""
        return self._dispatcher

    @property
    def max_bytes(self) -> int:
        """Its budget of bytes."""
        return self._read_ahead.max_bytes

    @property
    def retries(self) -> int:
        """Requests sent again."""
        return self._dispatcher.retries

    @property
    def buffered_bytes(self) -> int:
        """Bytes of blocks that are here or asked for (those at their estimated size)."""
        # A copy, here and below: other threads may ask for this, or close, while one appends.
        return 0 if self._dispatcher.closed else int(sum(block.num_bytes for block in list(self._blocks)))

    def read(self, rows: range) -> list[pa.Table]:
        """Returns rows of this replica, in canonical order, as consecutive zero-copy parts.

        Row i is the one of cycle ``i // w`` and of the ``i % w``-th owned split, w = number of owned
        splits. Waits until the rows are there. ``rows`` must not begin before what was released.
        """
        width = len(self._owned)
        parts = []
        for block in self.ask(rows):
            begin = block.ranges.start * width
            first, last = max(begin, rows.start), min(block.ranges.stop * width, rows.stop)
            parts.append(self._wait(block).slice(first - begin, last - first))
        if sum(part.num_rows for part in parts) != len(rows):
            raise BlockError(f"rows {rows.start} to {rows.stop} are not in the blocks that were read")
        return parts

    def ask(self, rows: range) -> list[Flight]:
        """Asks for rows as :meth:`read` does, without waiting for them; returns the blocks that hold them."""
        width = len(self._owned)
        self._until = -(-rows.stop // width)
        self._ask_ahead(until=self._until)
        return [b for b in self._blocks if b.ranges.start * width < rows.stop and rows.start < b.ranges.stop * width]

    def release(self, cycle: int) -> None:
        """Drops the blocks that end at or before ``cycle`` and asks for new ones."""
        while self._blocks and self._blocks[0].ranges.stop <= cycle:
            self._blocks.popleft()
        self._ask_ahead(until=0)

    def close(self) -> None:
        """Gives up the blocks in flight. May be called from another thread; the reader is of no use afterwards."""
        self._dispatcher.close(list(self._blocks))

    def _ask_ahead(self, *, until: int) -> None:
        """Asks for blocks up to the budget, and in any case up to cycle ``until``."""
        self._dispatcher.check_open()
        while self._blocks and self._blocks[-1].withdrawn:
            self._next_cycle = self._blocks.pop().ranges.start
        while self._skip_left_out() < self._end_cycle:
            size = self._block_cycles()
            estimate = size * self._bytes_per_cycle
            held = self.buffered_bytes
            ahead = self._next_cycle >= until and bool(self._blocks)
            if ahead and (not self._any_arrived or held + estimate > self._read_ahead.max_bytes):
                return  # what is wanted first does not share the prefetchers with what comes later
            if ahead and len(self._blocks) >= MOST_OPEN and sum(b.block is None for b in self._blocks) >= MOST_OPEN:
                return
            ends = (gap.start for gap in self._left_out if gap.start > self._next_cycle)
            start, stop = self._next_cycle, min(self._next_cycle + size, self._end_cycle, *ends)
            ranges = Ranges(first_split=self._owned.start, num_splits=len(self._owned), start=start, stop=stop)
            self._blocks.append(self._dispatcher.send(ranges, (stop - start) * self._bytes_per_cycle))
            self._next_cycle = stop
            self._next_bytes = min(self._next_bytes * GROWTH, self._largest_bytes)

    def _skip_left_out(self) -> int:
        self._next_cycle = next((gap.stop for gap in self._left_out if self._next_cycle in gap), self._next_cycle)
        return self._next_cycle

    def _give_up_excess(self, bytes_per_row: float) -> None:
        """Called on any thread, when a block is heavier than expected."""
        withdraw_latest(list(self._blocks), bytes_per_row, lambda: self.buffered_bytes - self._read_ahead.max_bytes)

    def _block_cycles(self) -> int:
        """Cycles of the next block: growing, and whole steps where a step is smaller than a block."""
        most = min(self._next_bytes / self._bytes_per_cycle, self._pace.most_rows / len(self._owned))
        cycles = max(1, int(most))
        q = self._cycles_per_step
        if cycles >= q:
            # End where a step ends, so that no batch straddles two blocks.
            end = (self._next_cycle + cycles) // q * q
            return max(1, end - self._next_cycle)
        return cycles

    def _wait(self, wanted: Flight) -> pa.Table:
        for block in self._dispatcher.wait(wanted, self._blocks):
            self._any_arrived = True
            self._weigh(block)
        table: pa.Table = wanted.block.rows
        return table

    def _weigh(self, block: Flight) -> None:
        """Lets estimates follow what rows really weigh; what then turns out to be too much is given up again."""
        self._pace.note(block.ranges.num_rows, block.block.transform_s)
        weight = block.num_bytes / (block.ranges.stop - block.ranges.start)
        grown = weight > self._bytes_per_cycle
        # Falls slowly: where heavy rows have come, more of them may.
        self._bytes_per_cycle = max(1.0, weight, self._bytes_per_cycle * FALL)
        if not grown:
            return
        for other in self._blocks:
            if not other.settled:
                other.num_bytes = (other.ranges.stop - other.ranges.start) * self._bytes_per_cycle
        while self._blocks and not (last := self._blocks[-1]).settled:
            if last.ranges.start < self._until or self.buffered_bytes <= self._read_ahead.max_bytes:
                return
            last.future.cancel()
            self._next_cycle = self._blocks.pop().ranges.start
