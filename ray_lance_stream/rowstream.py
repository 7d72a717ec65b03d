"""Rows one by one: reads survivors, hands them out in canonical order, and knows after each where it stands."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

import pyarrow as pa

from ray_lance_stream.agreement import Agreement
from ray_lance_stream.config import StreamConfig
from ray_lance_stream.errors import StateError, StateMismatchError, explain
from ray_lance_stream.plan import PlanSpec
from ray_lance_stream.provenance import Provenance, reconcile
from ray_lance_stream.reader import ReadAhead
from ray_lance_stream.request import PlanHandle
from ray_lance_stream.rowcursor import RowCursor
from ray_lance_stream.sifting import SkipLog
from ray_lance_stream.source import BlockSource
from ray_lance_stream.state import StreamState
from ray_lance_stream.survivors import SurvivorReader

_ROWS_AT_ONCE: Final = 1024  # rows made into objects together
_CYCLES_AGREED: Final = 64  # how far ahead the ranks agree that all of them can go on


@dataclass(kw_only=True)
class Totals:
    """What was read and skipped since the beginning, over all iterations."""

    read_bytes: int = 0
    take_s: float = 0.0
    transform_s: float = 0.0
    left_behind: int = 0  # rows read that the common end of an epoch left undelivered


class RowStream:
    """One rank's rows of a stream.

    Args:
        config: The stream.
        owned: The splits to read.
        epoch: The epoch to begin with.
        agreement: How the ranks find the common end of an epoch, if rows may be skipped; None: this rank alone.
    """

    def __init__(self, config: StreamConfig, owned: range, epoch: int, agreement: Agreement | None) -> None:
        self.config = config
        self.owned = owned
        self.provenance = Provenance(table=config.identity, order=config.order)
        self.cursor = RowCursor.start(epoch, config.order.num_splits, owned)
        self.reader: SurvivorReader | None = None
        self.skips = SkipLog()
        self.totals = Totals()
        self._agreement = agreement
        self._handle: PlanHandle | None = None
        self._agreed = 0  # cycles of this epoch that every rank can serve

    def __getstate__(self) -> dict[str, Any]:
        # Blocks that were read ahead belong to the process that asked for them.
        return self.__dict__ | {"reader": None, "_handle": None, "_agreed": 0}

    # ------------------------------------------------------------------ state

    def state(self) -> StreamState:
        """Returns the state after the last row handed out."""
        return self.cursor.state(self.provenance)

    def load(self, state: StreamState, *, epoch_given: int = 0) -> None:
        """Moves to the row after a state, and to the table version it was taken from.

        Args:
            state: The state.
            epoch_given: The epoch the user asked for, 0 if none; a state of another one is refused.

        Raises:
            StateMismatchError: The state belongs to other data; the message names the field.
            StateError: It was taken within a cycle, and this is one of several ranks.
        """
        config = self.config
        order = reconcile(
            state.provenance, config.order, seed_given=config.seed_given, allow_changes=config.allow_changes
        )
        if epoch_given and state.epoch != epoch_given:
            raise StateMismatchError(
                explain(
                    "epoch differs: the state belongs to another epoch",
                    found=epoch_given,
                    expected=str(state.epoch),
                    remedy=f"pass epoch={state.epoch}, or leave it out",
                ),
                "epoch",
                state.epoch,
                epoch_given,
            )
        cursor = RowCursor.at(state, self.owned)
        self.drop_reader()
        self.provenance = replace(state.provenance, order=order)
        self.cursor = cursor
        self._handle = None

    def mark(self) -> RowCursor:
        """Returns where the stream stands, for :meth:`rewind`."""
        return self.cursor.copy()

    def rewind(self, mark: RowCursor) -> None:
        """Goes back to a mark."""
        if mark != self.cursor:
            self.drop_reader()
            self.cursor = mark.copy()

    def drop_reader(self) -> None:
        """Gives up what was read ahead."""
        reader, self.reader = self.reader, None
        self._agreed = 0
        if reader is not None:
            _add(self.totals, reader)
            self.skips.merge(reader.skips)
            reader.close()

    def only(self, owned: range) -> RowStream:
        """Returns a stream of a part of the splits, from where this one stands."""
        part = RowStream(self.config, owned, self.cursor.epoch, self._agreement)
        part.provenance = self.provenance
        part.cursor = replace(self.cursor.copy(), owned=owned)
        return part

    # ------------------------------------------------------------------ what it measured

    def measured(self) -> Totals:
        """Returns what was read and left behind so far."""
        totals = replace(self.totals)
        if self.reader is not None:
            _add(totals, self.reader)
        return totals

    def skip_log(self) -> SkipLog:
        """Returns the rows that were skipped so far."""
        log = self.skips.copy()
        if self.reader is not None:
            log.merge(self.reader.skips)
        return log

    @property
    def rows_ready(self) -> int:
        """Rows that are here and not handed out."""
        if self.reader is None:
            return 0
        consumed = sum(self.cursor.samples[split] for split in self.owned)
        return sum(self.reader.count(lane) for lane in range(len(self.owned))) - consumed

    # ------------------------------------------------------------------ rows

    def rows(self, source: BlockSource) -> Iterator[Any]:
        """Yields the rest of the epoch, row by row; the cursor has moved when a row comes out."""
        if self.cursor.has_moved and self._at_end(source):
            self._next_epoch()
        reader = self.reader = self.reader or self._new_reader(source)
        reader.interrupted.clear()
        yield from self._catch_up(reader)
        yield from self._cycles(reader)
        self.cursor.has_moved = True  # the remainder, empty or not, has been iterated
        self.totals.left_behind += self.rows_ready

    def _at_end(self, source: BlockSource) -> bool:
        cursor, handle = self.cursor, self._opened(source)
        if cursor.completed_cycles >= handle.num_rows // self.config.order.num_splits:
            return True
        reader = self.reader = self.reader or self._new_reader(source)
        return any(cursor.samples[s] >= reader.count(i) and reader.is_complete(i) for i, s in enumerate(self.owned))

    def _next_epoch(self) -> None:
        self.drop_reader()
        self.cursor = RowCursor.start(self.cursor.epoch + 1, self.config.order.num_splits, self.owned)
        self._handle = None

    def _opened(self, source: BlockSource) -> PlanHandle:
        if self._handle is None:
            spec = PlanSpec(table=self.provenance.table, order=self.provenance.order, epoch=self.cursor.epoch)
            handle = source.plan(spec)
            length, order = handle.num_rows // spec.order.num_splits, self.provenance.order
            if max(self.cursor.positions) > length:
                raise StateError(
                    explain(
                        "the state lies beyond the end of the epoch",
                        found=f"position {max(self.cursor.positions)} of a split",
                        expected=f"at most {length}, the rows of a split of {order.num_splits}",
                        remedy="load the state as it was saved, on the table it was taken from",
                    )
                )
            self._handle = handle
        return self._handle

    def _new_reader(self, source: BlockSource) -> SurvivorReader:
        handle, prefetch = self._opened(source), self.config.prefetch
        return SurvivorReader(
            source,
            handle,
            self.owned,
            samples=self.cursor.samples[self.owned.start : self.owned.stop],
            positions=self.cursor.positions[self.owned.start : self.owned.stop],
            rows_per_split=handle.num_rows // self.config.order.num_splits,
            read_ahead=ReadAhead(max_bytes=prefetch.max_buffer_bytes, block_bytes=prefetch.block_bytes),
        )

    def _catch_up(self, reader: SurvivorReader) -> Iterator[Any]:
        """After a state within a cycle: the least advanced splits first, until all have given as many rows."""
        cursor = self.cursor
        last = max(cursor.samples[s] for s in self.owned)
        for cycle in range(cursor.completed_cycles, last):
            for lane, split in enumerate(self.owned):
                if cursor.samples[split] > cycle:
                    continue
                reader.ensure([cycle + 1 if i == lane else 0 for i in range(len(self.owned))])
                if reader.count(lane) <= cycle:
                    return  # the split ends here, and the epoch with it
                position = int(reader.positions_of(lane, cycle, cycle + 1)[0]) + 1
                row = self._objects(reader, reader.survivors(lane, cycle, cycle + 1))[0]
                cursor.advance(split, position)
                yield row

    def _cycles(self, reader: SurvivorReader) -> Iterator[Any]:
        cursor, width = self.cursor, len(self.owned)
        cycle = cursor.completed_cycles
        if any(cursor.samples[s] != cycle for s in self.owned):
            return  # a split ended while it was catching up
        while True:
            reader.release(cycle)
            stop = self._servable(reader, cycle)
            if stop <= cycle:
                return
            rows = self._objects(reader, reader.read(range(cycle * width, stop * width))[0])
            positions = [reader.positions_of(lane, cycle, stop).tolist() for lane in range(width)]
            place = 0
            for turn in range(stop - cycle):
                for lane, split in enumerate(self.owned):
                    cursor.advance(split, positions[lane][turn] + 1)
                    yield rows[place]
                    place += 1
            cycle = stop

    def _servable(self, reader: SurvivorReader, cycle: int) -> int:
        """Returns up to which cycle rows may be handed out now: a few of them, those that are here if there are any."""
        few = max(1, _ROWS_AT_ONCE // len(self.owned))
        if self._agreement is None:
            ready = min(reader.count(lane) for lane in range(len(self.owned)))
            return min(ready, cycle + few) if ready > cycle else reader.servable(cycle + 1)
        if self._agreed <= cycle:
            mine = reader.servable(cycle + _CYCLES_AGREED)
            self._agreed = self._agreement.least(self.cursor.epoch, cycle, mine, reader.interrupted)
        return min(self._agreed, cycle + few)

    def _objects(self, reader: SurvivorReader, rows: Any) -> list[Any]:
        if not isinstance(rows, pa.Table):
            return list(rows)
        began = time.perf_counter()
        objects = rows.to_pylist()
        reader.transform_s += time.perf_counter() - began
        return objects


def _add(totals: Totals, reader: SurvivorReader) -> None:
    totals.read_bytes += reader.read_bytes
    totals.take_s += reader.take_s
    totals.transform_s += reader.transform_s
