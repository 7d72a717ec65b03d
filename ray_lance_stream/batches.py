"""Cuts the rows of one replica into the batches of its steps."""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

import pyarrow as pa

from ray_lance_stream.errors import ConfigError, StreamClosedError, explain
from ray_lance_stream.origins import Origin
from ray_lance_stream.packedreader import PackedReader
from ray_lance_stream.packstate import PackPlace
from ray_lance_stream.plan import require_int
from ray_lance_stream.position import Position
from ray_lance_stream.reader import BlockReader
from ray_lance_stream.request import PlanHandle
from ray_lance_stream.survivors import SurvivorReader
from ray_lance_stream.topology import Replica, StepPlan, StepShare

if TYPE_CHECKING:
    from ray_lance_stream.shard import StreamShard

T = TypeVar("T")
Parts = Sequence[pa.Table]
Convert = Callable[[Parts], T]


@dataclass(frozen=True, kw_only=True)
class Delivery(Generic[T]):
    """A batch on its way to the trainer, with what changes when it is handed over."""

    batch: T
    rows: int
    loss_scale: float
    micro_index: int
    is_step_end: bool
    end_cycle: int  # of the step the batch belongs to
    positions: tuple[int, ...] | None = None  # of every split behind the step, where rows may be skipped
    is_last: bool = False  # the epoch ends with this step, earlier than without skipped rows
    places: tuple[PackPlace, ...] | None = None  # of every split behind the step, where documents are packed
    padded_tokens: int = 0  # in the blocks of the step
    origin: Origin | None = None  # None where documents are packed


def deliveries(
    reader: BlockReader | PackedReader,
    handle: PlanHandle,
    steps: StepPlan,
    replica: Replica,
    position: Position,
    convert: Convert[T],
    micro_batch_size: int | None,
) -> Generator[Delivery[T], None, None]:
    """Makes the batches from a position to the end of its epoch. Reads the position, never moves it."""
    cycle, skip = steps.next_cycle(position.cycle), position.micro_done
    owned = replica.owned_splits(steps.num_splits)
    width = len(owned)
    share = _share(steps, replica, steps.cycles_per_step, micro_batch_size)  # of all steps but a short one
    while cycle < steps.end_cycle:
        cycles = steps.rest_of_step(cycle)
        if len(cycles) != share.num_cycles:
            share = _share(steps, replica, len(cycles), micro_batch_size)
        first = cycles.start * width
        # Whole steps at once: with the first micro-batch the run is told where the step ends.
        packed = reader.made_to(cycles.stop) if isinstance(reader, PackedReader) else None
        for index in range(skip, share.num_micro_batches):
            part = share.micro_batch(index)
            rows = range(first + part.start, first + part.stop)
            parts = reader.read(rows)
            origin = Origin.of(handle, steps, owned, rows, parts) if packed is None else None
            yield Delivery(
                batch=convert(parts if origin is None else origin.marked(parts)),
                origin=origin,
                rows=len(part),
                loss_scale=share.loss_scale(len(part)),
                micro_index=index,
                is_step_end=index == share.num_micro_batches - 1,
                end_cycle=cycles.stop,
                places=None if packed is None else position.places_with(owned, packed.places),
                padded_tokens=0 if packed is None else packed.padded_tokens,
            )
        cycle, skip = steps.next_cycle(cycles.stop), 0
        reader.release(position.cycle)  # what the trainer has been handed, not what was made ahead


def sifted_deliveries(
    reader: SurvivorReader,
    handle: PlanHandle,
    steps: StepPlan,
    replica: Replica,
    position: Position,
    convert: Convert[T],
    micro_batch_size: int | None,
    agree: Callable[[int, int, int, threading.Event], int],
) -> Generator[Delivery[T], None, None]:
    """As :func:`deliveries`, where rows may be skipped: up to the cycle that every replica can serve.

    Args:
        agree: Called with (epoch, cycle, cycles this replica can serve, stop event) before every step; returns how
            many all of them can.
    """
    cycle, skip, epoch = position.cycle, position.micro_done, position.epoch
    owned = replica.owned_splits(steps.num_splits)
    width, q = len(owned), steps.cycles_per_step
    while True:
        stop = cycle - cycle % q + q
        end = agree(epoch, cycle, reader.servable(stop), reader.interrupted)
        if end <= cycle or (end < stop and steps.drop_last):
            return
        share = _share(steps, replica, end - cycle, micro_batch_size)
        positions = position.positions_with(owned, end, reader.positions_after(end))
        for index in range(skip, share.num_micro_batches):
            part = share.micro_batch(index)
            rows = range(cycle * width + part.start, cycle * width + part.stop)
            parts = reader.read(rows)
            origin = Origin.of(handle, steps, owned, rows, parts)
            yield Delivery(
                batch=convert(origin.marked(parts)),
                origin=origin,
                rows=len(part),
                loss_scale=share.loss_scale(len(part)),
                micro_index=index,
                is_step_end=index == share.num_micro_batches - 1,
                end_cycle=end,
                positions=positions,
                is_last=end < stop,
            )
        if end < stop:
            return
        cycle, skip = end, 0
        reader.release(position.cycle)


@dataclass(frozen=True, kw_only=True)
class BatchOptions:
    """How an epoch is iterated, checked before the first batch."""

    batch_size: int | None
    micro_batch_size: int | None
    prefetch_batches: int
    drop_last: bool
    local_shuffle_buffer_size: int | None
    with_rows: bool = False

    def check(self, steps: StepPlan, replica: Replica, position: Position, *, drop_last: bool) -> None:
        """Raises ConfigError if an option cannot work for this stream and replica."""
        require_int("prefetch_batches", self.prefetch_batches, minimum=0, remedy="pass 0 to make each when asked for")
        if self.local_shuffle_buffer_size is not None:
            raise ConfigError(
                explain(
                    "local_shuffle_buffer_size is not supported",
                    found=self.local_shuffle_buffer_size,
                    expected="None",
                    remedy="rows are shuffled over the whole table already; see shuffle and shuffle_clump_size",
                )
            )
        if self.drop_last and not drop_last:
            raise ConfigError(
                explain(
                    "drop_last belongs to the stream, so that all replicas agree",
                    found="drop_last=True here, False on the stream",
                    expected="the same on both",
                    remedy="pass drop_last=True to LanceStream",
                )
            )
        if position.micro_done and self.micro_batch_size != position.micro_batch_size:
            raise ConfigError(
                explain(
                    "micro_batch_size cannot change in the middle of a step",
                    found=self.micro_batch_size,
                    expected=f"{position.micro_batch_size}, as the step began",
                    remedy="finish the step first",
                )
            )
        self._check_sizes(steps, replica, position)

    def _check_sizes(self, steps: StepPlan, replica: Replica, position: Position) -> None:
        lengths = {len(steps.cycles(step)) for step in (0, steps.num_steps - 1)}
        if position.cycle < steps.end_cycle:
            lengths.add(len(steps.rest_of_step(position.cycle)))
        for num_cycles in lengths:
            _share(steps, replica, num_cycles, self.micro_batch_size)  # raises if a micro-batch would be empty
        share = _share(steps, replica, steps.cycles_per_step, None)
        if self.batch_size is not None and self.batch_size != share.rows:
            raise ConfigError(
                explain(
                    "batch_size is not this replica's part of a step",
                    found=f"batch_size={self.batch_size}",
                    expected=f"{share.rows}: replica {replica.dp_rank} of {replica.dp_size} gets so many rows of a "
                    f"global batch of {steps.global_batch_size}",
                    remedy="leave batch_size out, change global_batch_size, or pass micro_batch_size to cut steps",
                )
            )


def _share(steps: StepPlan, replica: Replica, num_cycles: int, micro_batch_size: int | None) -> StepShare:
    return StepShare(
        replica=replica, num_splits=steps.num_splits, num_cycles=num_cycles, micro_batch_size=micro_batch_size
    )


def batches_left(steps: StepPlan, replica: Replica, position: Position, micro_batch_size: int | None) -> int:
    """Returns how many batches, micro-batches counted, lie between a position and the end of its epoch."""
    cycle = steps.next_cycle(position.cycle)
    if cycle >= steps.end_cycle:
        return 0

    def batches(cycles: range) -> int:
        return _share(steps, replica, len(cycles), micro_batch_size).num_micro_batches

    current, last = steps.rest_of_step(cycle), steps.num_steps - 1
    left = batches(current) - position.micro_done
    if current.stop < steps.end_cycle:
        left += batches(steps.cycles(0)) * (last - steps.step_of(current.stop)) + batches(steps.cycles(last))
    for gap in steps.left_out:  # whole steps
        if current.stop <= gap.start < steps.end_cycle:
            has_last = gap.stop >= steps.end_cycle
            others = (last if has_last else steps.step_of(gap.stop)) - steps.step_of(gap.start)
            left -= others * batches(steps.cycles(0)) + (batches(steps.cycles(last)) if has_last else 0)
    return left


class Batches(Generic[T]):
    """The rest of a shard's current epoch; each ``iter()`` continues where the shard stands.

    ``len()`` is the number of batches, micro-batches counted, that the next ``iter()`` yields.
    """

    def __init__(self, shard: StreamShard, convert: Convert[T], options: BatchOptions) -> None:
        self._shard = shard
        self._convert = convert
        self._options = options

    def __iter__(self) -> Iterator[T]:
        return BatchIterator(self._shard, self._shard._run(self._convert, self._options))

    def __len__(self) -> int:
        return self._shard._num_batches_left(self._options.micro_batch_size)


class BatchIterator(Iterator[T]):
    """Measures the waiting, and makes sure that one iteration at a time moves the shard."""

    def __init__(self, shard: StreamShard, batches: Generator[T, None, None]) -> None:
        self._shard = shard
        self._batches = batches
        self._ended: str | None = None  # why
        self._returned_at: float | None = None
        shard._end_iteration("a newer iteration of this shard has taken over; use that one")
        # Weak: when the loop is left, nothing else must keep the iterator and its thread.
        shard._iterating = weakref.ref(self)

    def __next__(self) -> T:
        if self._ended is not None:
            raise StreamClosedError(self._ended)
        shard, began = self._shard, time.perf_counter()
        shard._clock.asked(began, self._returned_at)
        try:
            return next(self._batches)
        except StopIteration:
            raise
        except BaseException as error:
            # The generator is over now; its StopIteration would look like the end of the epoch.
            self._ended = self._ended or f"this iteration ended with {type(error).__name__}; iterate anew to go on"
            raise
        finally:
            self._returned_at = time.perf_counter()
            shard._clock.handed(self._returned_at)

    def close(self, why: str = "this iteration was given up; iterate anew") -> None:
        """Ends this iteration and its thread; the shard stays where it is."""
        if self._ended is not None:
            return  # and the shard may serve a newer one
        self._ended = why
        with contextlib.suppress(ValueError):  # another thread is in it, and finds it ended
            self._batches.close()
        self._shard._end_ahead()
