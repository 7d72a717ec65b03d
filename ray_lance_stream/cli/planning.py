"""What a setup comes to, before anything is started: steps, shares, micro-batches, bytes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa

from ray_lance_stream.config import PrefetchConfig
from ray_lance_stream.errors import ConfigError
from ray_lance_stream.plan import OrderSpec, PlanSpec, SplitLayout
from ray_lance_stream.reader import BlockReader, ReadAhead
from ray_lance_stream.request import PlanHandle, Ranges
from ray_lance_stream.topology import Replica, StepPlan, StepShare

if TYPE_CHECKING:
    from ray_lance_stream.location import TableRef

_PREFETCHED_BATCHES: Final = 1  # the default of iter_batches
_ALIKE: Final = 16  # blocks double: after so many of one size they grow no more
_NEAR: Final = 2  # global batches listed on each side
_ALL_SIZES: Final = 8  # world sizes all listed up to here


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What a stream and its training loop are told; checked as they check it.

    Attributes:
        order: The order.
        global_batch_size: Rows of a step on all replicas.
        drop_last: Whether a short last step is left out.
        world_size: Number of replicas.
        micro_batch_size: Most rows of a micro-batch; None for whole shares.
        prefetch: The budget.

    Raises:
        ConfigError: A value, or a combination of values, that cannot work.
    """

    order: OrderSpec
    global_batch_size: int
    drop_last: bool
    world_size: int
    micro_batch_size: int | None
    prefetch: PrefetchConfig

    def __post_init__(self) -> None:
        # Before any table is opened: what is wrong whatever its length.
        StepPlan(num_splits=self.order.num_splits, rows_per_split=1, global_batch_size=self.global_batch_size)
        Replica(dp_size=self.world_size).owned_splits(self.order.num_splits)

    def facts(self, ref: TableRef, version: int | None, columns: Sequence[str]) -> dict[str, Any]:
        """Returns what the setup comes to for a table, as plain values. Reads a few rows.

        Args:
            ref: The table.
            version: Its version; None for the latest.
            columns: Columns to read; none for all.

        Raises:
            ConfigError: The setup cannot work for this table.
        """
        from ray_lance_stream.block import BlockBuilder, BlockRecipe

        table = ref.open(version)
        builder = BlockBuilder(BlockRecipe(table=ref.located(table), columns=tuple(columns) or None))
        handle, _ = builder.open_plan(PlanSpec(table=table.identity, order=self.order, epoch=0))
        layout = SplitLayout(num_rows=handle.num_rows, num_splits=self.order.num_splits)
        steps = StepPlan(
            num_splits=layout.num_splits,
            rows_per_split=layout.rows_per_split,
            global_batch_size=self.global_batch_size,
            drop_last=self.drop_last,
        )
        check_micro_batches(steps, self.world_size, self.micro_batch_size)
        shares = [
            share_of(steps, world_size, self.micro_batch_size, handle.bytes_per_row, self.prefetch)
            for world_size in other_world_sizes(self.world_size, layout.num_splits)
        ]
        return {
            "table": {"version": table.version, "fingerprint": table.identity.fingerprint, "rows": table.num_rows},
            "filter": self.order.filter,
            "rows": handle.num_rows,
            "dropped_rows": handle.num_rows - steps.end_cycle * steps.num_splits,
            "num_splits": steps.num_splits,
            "rows_per_split": steps.rows_per_split,
            "steps": steps_facts(steps),
            "near": [steps_facts(near) for near in near_steps(steps)],
            "world_size": self.world_size,
            "micro_batch_size": self.micro_batch_size,
            "world_sizes": [dataclasses.asdict(share) for share in shares],
            "bytes_per_row": handle.bytes_per_row,
            "bytes_per_step": handle.bytes_per_row * self.global_batch_size,
            "max_buffer_bytes": self.prefetch.max_buffer_bytes,
            "in_flight_per_worker": dataclasses.asdict(in_flight(handle, steps, self.world_size, self.prefetch)),
        }


@dataclass(frozen=True, kw_only=True)
class Share:
    """What a world size means for its replicas. Where S is no multiple of it, some own one split more.

    Attributes:
        world_size: Number of replicas.
        splits: Fewest and most splits of a replica.
        rows: Fewest and most rows of a full step.
        balance: Mean over most rows: the part of the largest replica's time in which the others work, too.
        micro_batches: Micro-batches of a full step; None if the micro-batch size cannot work here.
        micro_batch_rows: Rows of the largest micro-batch.
        problem: Why it cannot work.
        share_bytes: The largest share of a step.
        budget_bytes: What each worker may buffer.
    """

    world_size: int
    splits: tuple[int, int]
    rows: tuple[int, int]
    balance: float
    micro_batches: int | None
    micro_batch_rows: int | None
    problem: str | None
    share_bytes: float
    budget_bytes: int


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


def share_of(
    steps: StepPlan, world_size: int, micro_batch_size: int | None, bytes_per_row: float, prefetch: PrefetchConfig
) -> Share:
    """Returns what a world size means.

    Raises:
        ConfigError: More replicas than splits.
    """
    # The last replica owns the most splits, the first one the fewest.
    largest = StepShare(
        replica=Replica(dp_rank=world_size - 1, dp_size=world_size),
        num_splits=steps.num_splits,
        num_cycles=steps.cycles_per_step,
    )
    fewest = len(Replica(dp_size=world_size).owned_splits(steps.num_splits))
    micro_batches = micro_batch_rows = problem = None
    try:
        check_micro_batches(steps, world_size, micro_batch_size)
    except ConfigError as error:
        problem = str(error)
    else:
        cut = StepShare(
            replica=largest.replica,
            num_splits=steps.num_splits,
            num_cycles=steps.cycles_per_step,
            micro_batch_size=micro_batch_size,
        )
        micro_batches = cut.num_micro_batches
        micro_batch_rows = max(len(cut.micro_batch(index)) for index in range(micro_batches))
    return Share(
        world_size=world_size,
        splits=(fewest, largest.rows // steps.cycles_per_step),
        rows=(largest.smallest_share, largest.largest_share),
        balance=largest.step_rows / world_size / largest.largest_share,
        micro_batches=micro_batches,
        micro_batch_rows=micro_batch_rows,
        problem=problem,
        share_bytes=largest.largest_share * bytes_per_row,
        budget_bytes=prefetch.max_buffer_bytes // world_size,
    )


def check_micro_batches(steps: StepPlan, world_size: int, micro_batch_size: int | None) -> None:
    """Raises ConfigError as a shard does: if a micro-batch, be it of a short last step, had no row for a replica."""
    for step in (0, steps.num_steps - 1):
        StepShare(
            replica=Replica(dp_size=world_size),
            num_splits=steps.num_splits,
            num_cycles=len(steps.cycles(step)),
            micro_batch_size=micro_batch_size,
        )


def other_world_sizes(world_size: int, num_splits: int) -> list[int]:
    """Returns the world sizes worth a look beside one: small ones, neighbours, half and double."""
    if num_splits <= _ALL_SIZES:
        return list(range(1, num_splits + 1))
    wanted = {1, 2, 3, 4, 6, 8, world_size // 2, world_size - 1, world_size, world_size + 1, 2 * world_size}
    return sorted(size for size in wanted if 1 <= size <= num_splits)


def steps_facts(steps: StepPlan) -> dict[str, int | bool]:
    """Returns what the steps of an epoch come to."""
    return {
        "global_batch_size": steps.global_batch_size,
        "cycles_per_step": steps.cycles_per_step,
        "num_steps": steps.num_steps,
        "rows": steps.end_cycle * steps.num_splits,
        "last_step_rows": len(steps.cycles(steps.num_steps - 1)) * steps.num_splits,
        "drops_last": steps.drop_last,
    }


def near_steps(steps: StepPlan) -> list[StepPlan]:
    """Returns the steps of the nearest global batches that work, and of the nearest without a short last step."""
    q, cycles = steps.cycles_per_step, steps.rows_per_split
    whole = [n for n in range(1, min(2 * q, cycles) + 1) if cycles % n == 0]
    below, above = [n for n in whole if n < q][-1:], [n for n in whole if n > q][:1]
    wanted = {*range(max(1, q - _NEAR), q + _NEAR + 1), *below, *above}
    found = []
    for near in sorted(wanted):
        if steps.drop_last and near > cycles:
            continue  # no step would be left
        found.append(
            StepPlan(
                num_splits=steps.num_splits,
                rows_per_split=cycles,
                global_batch_size=near * steps.num_splits,
                drop_last=steps.drop_last,
            )
        )
    return found


def in_flight(handle: PlanHandle, steps: StepPlan, world_size: int, prefetch: PrefetchConfig) -> InFlight:
    """Returns what the busiest worker's reader asks for, by running one over rows that are all there at once."""
    replica = Replica(dp_rank=world_size - 1, dp_size=world_size)
    owned = replica.owned_splits(steps.num_splits)
    source = _Blank(handle.bytes_per_row)
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
        # To the end of the step, then of the step in which the oldest block ends: between them nothing is asked for.
        block_end = steps.rest_of_step(source.first_end_after(cycle) - 1).stop
        for place in (step.stop, block_end):
            reader.release(place)
            most_bytes = max(most_bytes, reader.buffered_bytes)
            most_blocks = max(most_blocks, source.blocks_after(place))
        cycle = block_end
    rows = max(len(owned) * (asked.stop - asked.start) for asked in source.asked)
    return InFlight(block_rows=rows, block_bytes=int(rows * handle.bytes_per_row), blocks=most_blocks, bytes=most_bytes)


class _Blank:
    """A block source whose blocks are there at once, of the right size and with nothing in them."""

    def __init__(self, bytes_per_row: float) -> None:
        self._row_bytes = max(1, round(bytes_per_row))
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

    def request(self, handle: PlanHandle, ranges: Ranges) -> Future[pa.Table]:
        """See ``BlockSource``."""
        del handle
        self.asked.append(ranges)
        rows = ranges.num_splits * (ranges.stop - ranges.start)
        if len(self._zeros) < rows * self._row_bytes:
            self._zeros = np.zeros(rows * self._row_bytes, np.uint8)  # the system lends such memory when it is touched
        column = pa.FixedSizeBinaryArray.from_buffers(
            pa.binary(self._row_bytes), rows, [None, pa.py_buffer(self._zeros)]
        )
        future: Future[pa.Table] = Future()
        future.set_result(pa.table({"row": column}))
        return future

    def retry_delay_s(self, error: BaseException, attempt: int, elapsed_s: float) -> float | None:
        """See ``BlockSource``."""
        del error, attempt, elapsed_s
        return None

    def close(self) -> None:
        """See ``BlockSource``."""
