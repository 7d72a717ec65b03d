"""Reads splits that drift apart: because rows are skipped, or because splits are consumed unevenly.

The n-th row of a split is its n-th *survivor*. Requests carry one range per split, and go to the splits that are
furthest behind, so that one bad split neither stops the others' reading for good nor fills memory with theirs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa

from ray_lance_stream.errors import BlockError
from ray_lance_stream.flight import Dispatcher, Flight, withdraw_latest
from ray_lance_stream.permutation import IntArray
from ray_lance_stream.reader import FALL, FIRST_BLOCK_BYTES, GROWTH, MOST_OPEN, Pace, ReadAhead, first_block_bytes
from ray_lance_stream.request import PlanHandle, Ranges
from ray_lance_stream.sifting import Sifted, SkipLog, gather
from ray_lance_stream.source import BlockSource

_LEAST_SURVIVAL: Final = 1 / 16  # a split is not asked for more than so many times the rows it should yield


class _Lane:
    """One split: the survivors that are here, by number, and how far it was asked for."""

    def __init__(self, samples: int, position: int, end: int) -> None:
        self.base = self.known = samples  # numbers of the first survivor kept, and of the next one to come
        self.consumed_position = position  # behind the last survivor that was released
        self.asked = position  # first position not yet asked for
        self.end = end
        self.pending = 0  # positions asked for and not here
        self.seen = 0  # positions that are here, since the start
        self.came_through = 0
        self.chunks: deque[tuple[int, Flight, IntArray, IntArray]] = deque()  # first number, block, rows, positions

    @property
    def survival(self) -> float:
        """The part of the rows that came through so far."""
        return (self.came_through + 1) / (self.seen + 1)

    @property
    def lead(self) -> float:
        """Survivors here or expected, beyond those released."""
        return self.known - self.base + self.pending * self.survival

    @property
    def is_complete(self) -> bool:
        """Whether every survivor is known."""
        return self.asked >= self.end and not self.pending

    def add(self, flight: Flight, rows: IntArray, positions: IntArray, asked: int) -> None:
        """Takes in what came of ``asked`` positions."""
        self.pending -= asked
        self.seen += asked
        self.came_through += len(rows)
        if len(rows):
            self.chunks.append((self.known, flight, rows, positions))
            self.known += len(rows)

    def find(self, start: int, stop: int) -> list[tuple[Flight, IntArray]]:
        """Returns the blocks, and rows in them, of survivors start to stop."""
        found = []
        for first, flight, rows, _ in self.chunks:
            low, high = max(start, first), min(stop, first + len(rows))
            if low < high:
                found.append((flight, rows[low - first : high - first]))
        return found

    def position_after(self, number: int) -> int:
        """Returns the position behind the survivor before ``number``."""
        for first, _, rows, positions in self.chunks:
            if first < number <= first + len(rows):
                return int(positions[number - first - 1]) + 1
        return self.consumed_position


class SurvivorReader:
    """Serves survivors by number; see ``reader.BlockReader``, whose calls it answers too.

    Not thread-safe: one thread reads at a time. Rows stay until they are released.

    Args:
        samples: Survivors of each owned split that were consumed before.
        positions: Position behind the last of them.
        rows_per_split: Where every split ends.
        in_step: Whether all splits are consumed alike, so that none is of use beyond the end of another.
    """

    def __init__(
        self,
        source: BlockSource,
        handle: PlanHandle,
        owned_splits: range,
        *,
        samples: Sequence[int],
        positions: Sequence[int],
        rows_per_split: int,
        read_ahead: ReadAhead,
        in_step: bool = True,
    ) -> None:
        self._dispatcher = Dispatcher(source, handle, self._give_up_excess)
        self._owned = owned_splits
        self._lanes = [_Lane(s, p, rows_per_split) for s, p in zip(samples, positions, strict=True)]
        self._read_ahead = read_ahead
        self._in_step = in_step
        self._flights: deque[Flight] = deque()  # asked for and not yet taken in, in this order
        self._unreleased: dict[int, tuple[Flight, int]] = {}  # blocks here, with the survivors kept of each
        self._bytes_per_row = handle.bytes_per_row
        self._next_bytes = min(first_block_bytes(handle), float(read_ahead.block_bytes))
        self.interrupted = self._dispatcher.interrupted
        self._pace = Pace(handle.transform_s_per_row)
        self.skips = SkipLog()
        self.read_bytes = 0
        self.take_s = self.transform_s = 0.0

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
        if self._dispatcher.closed:
            return 0
        here = sum(flight.num_bytes for flight, _ in list(self._unreleased.values()))
        return int(here + sum(flight.num_bytes for flight in list(self._flights)))

    @property
    def rows_in_transform(self) -> int:
        """Of the rows under way elsewhere: those in the transform, by the part of the time it takes."""
        total_s = self.take_s + self.transform_s
        share = self.transform_s / total_s if total_s else 0.0
        return round(share * sum(lane.pending for lane in self._lanes))

    @property
    def rows_unasked(self) -> int:
        """Positions that were not yet asked for."""
        return sum(lane.end - lane.asked for lane in self._lanes)

    def close(self) -> None:
        """Gives up the blocks in flight. May be called from another thread; the reader is of no use afterwards."""
        self._dispatcher.close(list(self._flights))

    # ------------------------------------------------------------------ by number

    def ensure(self, numbers: Sequence[int]) -> None:
        """Waits until each owned split has as many survivors (counted from the split's start), or has no more."""
        while True:
            short = [lane for lane, n in zip(self._lanes, numbers, strict=True) if lane.known < n]
            short = [lane for lane in short if not lane.is_complete]
            self._ask_ahead(short)
            if not short:
                return
            self._dispatcher.wait(self._flights[0], self._flights)
            while self._flights and self._flights[0].block is not None:
                self._take_in(self._flights.popleft())

    def count(self, lane: int) -> int:
        """Returns how many survivors of an owned split, counted from its start, are known."""
        return self._lanes[lane].known

    def is_complete(self, lane: int) -> bool:
        """Whether no more survivors of an owned split will come."""
        return self._lanes[lane].is_complete

    def survivors(self, lane: int, start: int, stop: int) -> pa.Table | list[Any]:
        """Returns survivors of one owned split by number; they must be known and not released."""
        parts, place = [], 0
        for flight, rows in self._lanes[lane].find(start, stop):
            parts.append((flight, rows, np.arange(place, place + len(rows))))
            place += len(rows)
        rows_found: pa.Table | list[Any] = self._gathered(parts, stop - start)
        return rows_found

    def positions_of(self, lane: int, start: int, stop: int) -> IntArray:
        """Returns the positions in the split of survivors by number."""
        found = [
            positions[max(start, first) - first : stop - first]
            for first, _, rows, positions in self._lanes[lane].chunks
            if max(start, first) < min(stop, first + len(rows))
        ]
        return np.concatenate(found) if found else np.empty(0, np.int64)

    def release_to(self, numbers: Sequence[int]) -> None:
        """Drops the survivors of each owned split before a number, and asks for new ones."""
        for lane, number in zip(self._lanes, numbers, strict=True):
            if number <= lane.base:
                continue
            lane.consumed_position = lane.position_after(number)
            while lane.chunks and lane.chunks[0][0] < number:
                first, flight, rows, positions = lane.chunks.popleft()
                gone = min(number - first, len(rows))
                self._forget(flight, gone)
                if gone < len(rows):
                    lane.chunks.appendleft((number, flight, rows[gone:], positions[gone:]))
            lane.base = number
        self._ask_ahead([])

    # ------------------------------------------------------------------ by cycle

    def servable(self, cycle: int) -> int:
        """Waits until it is known whether cycles up to ``cycle`` can be served; returns how many can."""
        self.ensure([cycle] * len(self._lanes))
        return min(cycle, *(lane.known for lane in self._lanes))

    def read(self, rows: range) -> list[Any]:
        """Returns rows of this replica, in canonical order, as one part; as ``BlockReader.read``."""
        width = len(self._owned)
        bounds = [(-(-(rows.start - i) // width), -(-(rows.stop - i) // width)) for i in range(width)]
        self.ensure([stop if stop > start else 0 for start, stop in bounds])
        parts: list[tuple[Flight, IntArray, IntArray]] = []
        for i, (lane, (start, stop)) in enumerate(zip(self._lanes, bounds, strict=True)):
            number = start
            for flight, index in lane.find(start, stop):
                places = np.arange(number, number + len(index), dtype=np.int64) * width + i - rows.start
                parts.append((flight, index, places))
                number += len(index)
        return [self._gathered(parts, len(rows))]

    def release(self, cycle: int) -> None:
        """Drops the survivors of the first ``cycle`` cycles, and asks for new ones."""
        self.release_to([cycle] * len(self._lanes))

    def positions_after(self, cycle: int) -> list[int]:
        """Returns each owned split's position once the first ``cycle`` cycles have been consumed."""
        return [lane.position_after(cycle) for lane in self._lanes]

    # ------------------------------------------------------------------ asking and taking in

    def _ask_ahead(self, short: list[_Lane]) -> None:
        """Asks for blocks up to the budget, and in any case for the lanes that are waited for."""
        self._dispatcher.check_open()
        while self._flights and self._flights[-1].withdrawn:
            for lane, count in zip(self._lanes, _asked(self._flights.pop().ranges), strict=True):
                lane.asked -= count
                lane.pending -= count
        while True:
            open_lanes = [lane for lane in self._lanes if lane.asked < lane.end]
            needed = [lane for lane in short if not lane.pending and lane.asked < lane.end]
            if not open_lanes or (self._flights and not self._unreleased and not needed):
                return  # what is wanted first does not share the prefetchers with what comes later
            # Never further than the lane that is furthest behind allows: others wait for it.
            least = min(lane.lead for lane in self._lanes if not lane.is_complete)  # which holds for those needed
            rows = min(self._next_bytes / self._bytes_per_row, self._pace.most_rows)
            step = max(1, int(rows / len(self._lanes)))
            # The split that ends first ends the epoch, in step; looked up once, or a wide stream pays splits squared.
            complete = (lane.known for lane in self._lanes if lane.is_complete) if self._in_step else ()
            last = min(complete, default=None)
            asked_first = set(map(id, needed))
            wanted = [self._positions_to_ask(lane, least + step, last, id(lane) in asked_first) for lane in self._lanes]
            held = self.buffered_bytes
            room = self._read_ahead.max_bytes - held
            if len(self._flights) >= MOST_OPEN and not needed:
                return
            if held and sum(wanted) * self._bytes_per_row > room:
                if not needed:
                    return
                wanted = self._only_needed(wanted, asked_first, room)
            num_bytes = sum(wanted) * self._bytes_per_row
            if not num_bytes:
                return
            self._flights.append(self._dispatcher.send(self._ranges(wanted), num_bytes))
            for lane, count in zip(self._lanes, wanted, strict=True):
                lane.asked += count
                lane.pending += count
            self._next_bytes = min(self._next_bytes * GROWTH, self._largest_bytes())

    def _give_up_excess(self, bytes_per_row: float) -> None:
        """Called on any thread, when a block is heavier than expected."""
        withdraw_latest(list(self._flights), bytes_per_row, lambda: self.buffered_bytes - self._read_ahead.max_bytes)

    def _largest_bytes(self) -> float:
        return float(min(self._read_ahead.block_bytes, max(FIRST_BLOCK_BYTES, self._read_ahead.max_bytes / 4)))

    def _positions_to_ask(self, lane: _Lane, target: float, last: int | None, is_needed: bool) -> int:
        missing = target - lane.lead
        if last is not None:
            missing = min(missing, last - lane.base - lane.lead)
        missing = max(missing, 1.0 if is_needed else 0.0)
        return min(int(np.ceil(missing / max(lane.survival, _LEAST_SURVIVAL))), lane.end - lane.asked)

    def _only_needed(self, wanted: list[int], needed: set[int], room: float) -> list[int]:
        """What is waited for comes in any case; where the others' rows fill the budget, a small block of it."""
        most = max(room, FIRST_BLOCK_BYTES) / (self._bytes_per_row * len(needed))
        return [
            min(count, max(1, int(most))) if id(lane) in needed else 0
            for lane, count in zip(self._lanes, wanted, strict=True)
        ]

    def _ranges(self, wanted: list[int]) -> Ranges:
        starts = [lane.asked for lane in self._lanes]
        uniform = len(set(starts)) == 1 and len(set(wanted)) == 1
        first = self._owned.start
        return Ranges(
            first_split=first,
            num_splits=len(self._owned),
            start=starts[0],
            stop=starts[0] + wanted[0],
            overrides=()
            if uniform
            else tuple((first + i, s, s + n) for i, (s, n) in enumerate(zip(starts, wanted, strict=True))),
        )

    def _take_in(self, flight: Flight) -> None:
        block: Sifted = flight.block
        asked = _asked(flight.ranges)
        order = np.argsort(block.splits, kind="stable")
        cuts = np.searchsorted(block.splits[order], np.arange(self._owned.start, self._owned.stop + 1))
        for i, lane in enumerate(self._lanes):
            rows = order[cuts[i] : cuts[i + 1]]
            lane.add(flight, rows, block.positions[rows], asked[i])
        if len(block):
            self._unreleased[id(flight)] = (flight, len(block))
            # Falls slowly: where heavy rows have come, more of them may.
            self._bytes_per_row = max(1.0, block.nbytes / len(block), self._bytes_per_row * FALL)
        self._pace.note(sum(asked), block.transform_s)
        self.skips.add(block.skipped)
        self.read_bytes += block.read_bytes
        self.take_s += block.take_s
        self.transform_s += block.transform_s

    def _forget(self, flight: Flight, rows: int) -> None:
        left = self._unreleased[id(flight)][1] - rows
        if left:
            self._unreleased[id(flight)] = (flight, left)
        else:
            del self._unreleased[id(flight)]

    def _gathered(self, parts: list[tuple[Flight, IntArray, IntArray]], count: int) -> Any:
        which, index = np.empty(count, np.int64), np.empty(count, np.int64)
        numbers: dict[int, int] = {}
        blocks: list[Sifted] = []
        found = 0
        for flight, rows, places in parts:
            number = numbers.setdefault(id(flight), len(blocks))
            if number == len(blocks):
                blocks.append(flight.block)
            which[places], index[places] = number, rows
            found += len(rows)
        if found != count:
            raise BlockError(f"{count - found} of {count} rows are not in the blocks that were read")
        return gather(blocks, which, index)


def _asked(ranges: Ranges) -> list[int]:
    if not ranges.overrides:
        return [ranges.stop - ranges.start] * ranges.num_splits
    return [stop - start for _, start, stop in ranges.overrides]
