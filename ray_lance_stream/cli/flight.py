"""What a worker's reader asks for ahead, found by running one over blocks with nothing in them."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa

from ray_lance_stream.config import PrefetchConfig
from ray_lance_stream.plan import PlanSpec
from ray_lance_stream.reader import BlockReader, ReadAhead
from ray_lance_stream.request import PlanHandle, Ranges
from ray_lance_stream.sifting import Whole
from ray_lance_stream.topology import Replica, StepPlan

_PREFETCHED_BATCHES: Final = 1  # the default of iter_batches
_ALIKE: Final = 16  # blocks grow: after so many of one size they grow no more


@dataclass(frozen=True, kw_only=True)
class InFlight:
    """What one worker has asked for once all is under way.

    Attributes:
        block_rows: Rows of the largest block.
        block_bytes: Its size.
        blocks: Most blocks here or asked for at one time.
        bytes: Their size.
    """

    block_rows: int
    block_bytes: int
    blocks: int
    bytes: int


def in_flight(
    handle: PlanHandle,
    steps: StepPlan,
    world_size: int,
    prefetch: PrefetchConfig,
    transform_s_per_row: float = 0.0,
) -> InFlight:
    """Returns what the busiest worker's reader asks for, by running one over rows that are all there at once."""
    replica = Replica(dp_rank=world_size - 1, dp_size=world_size)
    owned = replica.owned_splits(steps.num_splits)
    source = _Blank(handle.bytes_per_row, transform_s_per_row)
    made_ahead = int(_PREFETCHED_BATCHES * steps.cycles_per_step * len(owned) * handle.bytes_per_row)
    reader = BlockReader(
        source,
        handle,
        owned,
        start_cycle=0,
        end_cycle=steps.end_cycle,
        cycles_per_step=steps.cycles_per_step,
        read_ahead=ReadAhead(
            max_bytes=max(1, prefetch.max_buffer_bytes // world_size - made_ahead), block_bytes=prefetch.block_bytes
        ),
    )
    cycle, most_bytes, most_blocks = 0, 0, 0
    while cycle < steps.end_cycle and not source.is_steady():
        step = steps.rest_of_step(cycle)
        reader.read(range(step.start * len(owned), step.stop * len(owned)))
        most_bytes, most_blocks = max(most_bytes, reader.buffered_bytes), max(most_blocks, source.blocks_after(cycle))
        # To the end of the step, then of the step in which the oldest block ends: between them nothing is asked for.
        block_end = steps.rest_of_step(source.first_end_after(cycle) - 1).stop
        for place in (step.stop, block_end):
            reader.release(place)
            most_bytes = max(most_bytes, reader.buffered_bytes)
            most_blocks = max(most_blocks, source.blocks_after(place))
        cycle = block_end
    # The first may be larger than the others: how long its transform takes shows when it is there.
    rows = max(len(owned) * (asked.stop - asked.start) for asked in source.asked[1:] or source.asked)
    return InFlight(block_rows=rows, block_bytes=int(rows * handle.bytes_per_row), blocks=most_blocks, bytes=most_bytes)


class _Blank:
    """A block source whose blocks are there at once, of the right size and with nothing in them."""

    def __init__(self, bytes_per_row: float, transform_s_per_row: float) -> None:
        self._row_bytes = max(1, round(bytes_per_row))
        self._row_s = transform_s_per_row
        self._zeros: Any = np.zeros(0, np.uint8)
        self.asked: list[Ranges] = []

    def is_steady(self) -> bool:
        """Whether blocks have stopped growing."""
        last = [asked.stop - asked.start for asked in self.asked[-_ALIKE:]]
        return len(last) == _ALIKE and len(set(last)) == 1

    def first_end_after(self, cycle: int) -> int:
        """Returns where the oldest block ends that ends after a cycle."""
        return min(asked.stop for asked in self.asked if asked.stop > cycle)

    def blocks_after(self, cycle: int) -> int:
        """Returns how many blocks were asked for that end after a cycle."""
        return sum(ranges.stop > cycle for ranges in self.asked)

    def plan(self, spec: PlanSpec) -> PlanHandle:
        """See ``BlockSource``; never called, as the handle is known."""
        raise NotImplementedError

    def request(self, handle: PlanHandle, ranges: Ranges) -> Future[Whole]:
        """See ``BlockSource``."""
        del handle
        self.asked.append(ranges)
        rows = ranges.num_splits * (ranges.stop - ranges.start)
        if len(self._zeros) < rows * self._row_bytes:
            self._zeros = np.zeros(rows * self._row_bytes, np.uint8)  # the system lends such memory when it is touched
        column = pa.FixedSizeBinaryArray.from_buffers(
            pa.binary(self._row_bytes), rows, [None, pa.py_buffer(self._zeros)]
        )
        future: Future[Whole] = Future()
        future.set_result(Whole(pa.table({"row": column}), rows * self._row_s))
        return future

    def retry_delay_s(self, error: BaseException, attempt: int, elapsed_s: float) -> float | None:
        """See ``BlockSource``."""
        del error, attempt, elapsed_s
        return None

    def advice(self, error: BaseException) -> str:
        """See ``BlockSource``."""
        del error
        return "none: blocks of zeros always come"

    def close(self) -> None:
        """See ``BlockSource``."""
