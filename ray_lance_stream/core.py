"""What a shard is between batches: where it stands, its state, and its life from opening to closing."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from ray_lance_stream.config import StreamConfig
from ray_lance_stream.delivery import Ahead
from ray_lance_stream.errors import StreamClosedError
from ray_lance_stream.handedout import HandedOut
from ray_lance_stream.link import Link
from ray_lance_stream.observing import stats_of
from ray_lance_stream.packspec import Packing
from ray_lance_stream.plan import SplitLayout
from ray_lance_stream.position import Position
from ray_lance_stream.reader import BlockReader
from ray_lance_stream.readers import Reader
from ray_lance_stream.request import PlanHandle
from ray_lance_stream.sifting import SkipLog, SkippedRow
from ray_lance_stream.source import BlockSource
from ray_lance_stream.state import StreamState
from ray_lance_stream.stats import ShardStats
from ray_lance_stream.topology import Replica, Seat, StepPlan
from ray_lance_stream.waits import LoopClock

if TYPE_CHECKING:
    from ray_lance_stream.batches import BatchIterator

S = TypeVar("S", bound="ShardCore")


class ShardCore(HandedOut):
    """The part of :class:`~ray_lance_stream.shard.StreamShard` that hands out nothing."""

    def __init__(self, config: StreamConfig, seat: Seat, link: Link) -> None:
        seat.replica.owned_splits(config.order.num_splits)  # more replicas than splits fails here, on the driver
        self._config = config
        self._seat = seat
        self._link = link
        self._lock = threading.RLock()
        self._source: BlockSource | None = None
        self._closed = self._warned_of_budget = False
        self._iterating: weakref.ref[BatchIterator[Any]] | None = None
        self._ahead: Ahead[Any] | None = None  # what the newest iteration takes its batches from
        self.speaker: weakref.ref[ShardCore] | None = None  # tells where the loop is, if that is behind this shard
        self._position = Position.start(config)
        self._handle: PlanHandle | None = None
        self._reader: Reader | None = None
        self._skips = SkipLog()
        self._reads_rows = False  # whether the reader's blocks say which rows they hold
        self.loss_scale = 1.0
        self.is_step_end = True
        self._rows = self._batches = self._retries = self._padded_tokens = self._documents_left = 0
        self._clock = LoopClock()

    # ------------------------------------------------------------------ where it stands

    @property
    def name(self) -> str:
        """The stream's name in the run."""
        return self._seat.name

    @property
    def seat(self) -> Seat:
        """This worker's place in the run."""
        return self._seat

    @property
    def link(self) -> Link:
        """What connects the shard to its run."""
        return self._link

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._closed

    @property
    def replica(self) -> Replica:
        """The data-parallel group member this shard feeds."""
        return self._seat.replica

    @property
    def epoch(self) -> int:
        """The epoch that iterating yields next, or is yielding; counted from 0."""
        return self._here().epoch

    @property
    def step(self) -> int:
        """Steps of this epoch that are finished, the one that ends with the last batch included."""
        position = self._here()
        steps = self._steps_of(self._handle) if self._closed and self._handle else self._steps()
        return steps.steps_done(position.cycle, ended=position.ended)

    @property
    def num_rows(self) -> int:
        """Rows, or packed blocks, of an epoch on all replicas; where rows may be skipped, the most there can be.

        Those of steps that ``skip_steps`` leaves out are not counted.
        """
        steps = self._steps()
        return (steps.end_cycle - steps.cycles_left_out) * steps.num_splits

    @property
    def dropped_rows(self) -> int:
        """Rows of the table (after the filter) that this epoch leaves out: N mod S, ``drop_last``, ``skip_steps``.

        Where rows are packed, N mod S alone: how many more the blocks have no room for is known at the epoch's end
        (``stats().documents_left``).
        """
        handle = self._open_plan()
        if self._config.packing is not None:
            return handle.surplus_rows + handle.num_rows % self._config.order.num_splits
        return handle.num_rows + handle.surplus_rows - self.num_rows

    @property
    def packing(self) -> Packing | None:
        """How documents become blocks, and how many an epoch has; None for rows that are not packed."""
        return self._here().provenance.packing

    def __len__(self) -> int:
        """Returns the number of steps in an epoch; where rows may be skipped, the most there can be.

        Steps that ``skip_steps`` leaves out are counted, as ``step`` does; not in ``len(shard.iter_batches())``.
        """
        return self._steps().num_steps

    def __repr__(self) -> str:
        seat = self._seat
        return f"StreamShard({seat.name!r}, replica {seat.replica.dp_rank} of {seat.replica.dp_size})"

    def stats(self) -> ShardStats:
        """Returns what this shard measured since it was opened."""
        return stats_of(self)

    @property
    def skipped(self) -> list[SkippedRow]:
        """The last rows that this shard skipped or replaced because the transform failed, with their reasons."""
        return self._skip_log().rows

    def _skip_log(self) -> SkipLog:
        log, reader = self._skips.copy(), self._reader
        if reader is not None and not isinstance(reader, BlockReader):
            log.merge(reader.skips)
        return log

    # ------------------------------------------------------------------ state

    def state(self) -> StreamState:
        """Returns how far the trainer got; see :meth:`state_dict`. A shard that was used and closed still knows."""
        return self._here().state()

    def _here(self) -> Position:
        if not (self._closed and self._handle is not None):
            self._open()
        return self._position

    @property
    def is_partial(self) -> bool:
        """Whether the state is exact for the splits of this replica only: rows may be skipped, or are packed."""
        return self._config.is_uneven and self._seat.shared and self._seat.replica.dp_size > 1

    def state_dict(self) -> dict[str, Any]:
        """Returns the state after the last batch handed out: plain JSON types.

        Equal on all replicas, unless rows may be skipped or are packed: then merge those of all
        (``merge_state_dicts``). Batches that were prefetched do not count. Continues at any number of replicas.

        Raises:
            StateError: In the middle of a step that was cut into micro-batches.
        """
        return self.state().to_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Moves the shard to a state: the next row is the one after it.

        Raises:
            StateError: It is damaged or was not taken at the end of a cycle.
            StateMismatchError: It belongs to other data; the message names the field and the remedy.
        """
        loaded = StreamState.from_dict(state, of=self._config.provenance)
        self._end_iteration("load_state_dict moved the shard; iterate anew")
        self._open(at=loaded)

    # ------------------------------------------------------------------ opening and closing

    def _open(self, *, at: StreamState | None = None) -> BlockSource:
        """Opens the source at first use, and moves: to ``at``, or to where the run is to go on."""
        with self._lock:
            if self._closed:
                raise StreamClosedError(f"{self!r} is closed; open the stream again")
            if self._source is None:
                source = self._link.open_source(self._config, self._seat)
                try:
                    state = self._stored_state() if at is None else at
                    self._source = source
                    if state is None:
                        self._open_plan()
                        self._check_skips()
                    else:
                        self._move_to(state)
                except BaseException:
                    self._source = None
                    source.close()
                    raise
                self._link.opened(self)
            elif at is not None:
                self._drop_reader()
                self._move_to(at)
            return self._source

    def _stored_state(self) -> StreamState | None:
        config, seat = self._config, self._seat
        state = self._link.restored_state(config, seat)
        if state is None and config.resume_states is not None:
            state = config.state_for(seat.name, config.resume_states, "passed as resume_from")
        return state

    def _move_to(self, state: StreamState) -> None:
        before = self._position, self._handle
        self._position, self._handle = Position.resume(self._config, state), None
        try:
            steps = self._steps()
            self._position.check_within(steps, self._open_plan().num_rows // steps.num_splits)
            self._check_skips()
        except BaseException:
            self._position, self._handle = before
            raise

    def _open_plan(self) -> PlanHandle:
        """The plan of the epoch under way, opened once per epoch."""
        source, spec = self._open(), self._position.plan_spec
        if self._handle is None or self._handle.spec != spec:
            self._handle = source.plan(spec)
        return self._handle

    def _check_skips(self) -> None:
        """Raises ConfigError if steps to leave out do not exist."""
        position = self._position
        ahead = position.provenance.skips.since(position.epoch, position.cycle)
        if ahead:
            ahead.check(self._steps(), given=self._config.skip_steps is not None)

    def _steps_of(self, handle: PlanHandle, epoch: int | None = None) -> StepPlan:
        """The steps of the epoch under way, or of another one: these differ in the steps left out."""
        layout = SplitLayout(num_rows=handle.num_rows, num_splits=handle.spec.order.num_splits)
        packing = self._position.provenance.packing
        return StepPlan(
            num_splits=layout.num_splits,
            rows_per_split=layout.rows_per_split if packing is None else packing.blocks_per_split,
            global_batch_size=self._config.global_batch_size,
            drop_last=self._config.drop_last,
            left_out=self._position.provenance.skips.in_epoch(self._position.epoch if epoch is None else epoch),
        )

    def _steps(self) -> StepPlan:
        return self._steps_of(self._open_plan())

    def close(self) -> None:
        """Ends the iteration under way, if any, and gives up everything the shard holds. May be repeated."""
        self._end_iteration(f"{self!r} is closed; open the stream again")
        if self._closed:
            return
        self._closed = True
        try:
            self._give_up()  # not under the lock: ends the waiting of a thread that opens a plan under it
            with self._lock:
                self._give_up()  # what that thread made until then
        finally:
            self._link.close()

    def _give_up(self) -> None:
        self._drop_reader()
        if self._source is not None:
            self._source.close()

    def __enter__(self: S) -> S:
        try:
            self._open()
        except BaseException:
            self.close()  # __exit__ will not be called
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        if self._source is not None:
            raise TypeError("a StreamShard that is in use cannot be pickled; send the LanceStream instead")
        return type(self), (self._config, self._seat, self._link)

    def _end_iteration(self, why: str) -> None:
        # Not under the lock: it joins the thread that makes batches, and a collate_fn may ask the shard something.
        current = self._iterating() if self._iterating is not None else None
        if current is not None:
            current.close(why)
        self._end_ahead()  # of an iteration that was dropped

    def _end_ahead(self) -> None:
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            ahead.end()

    def _drop_reader(self) -> None:
        reader, self._reader = self._reader, None
        if reader is not None:
            self._retries += reader.retries
            if not isinstance(reader, BlockReader):
                self._skips.merge(reader.skips)
            reader.interrupted.set()
            reader.close()
