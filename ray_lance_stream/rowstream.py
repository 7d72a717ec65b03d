"""Rows one by one: reads survivors, hands them out in canonical order, and knows after each where it stands."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Final

import pyarrow as pa

from ray_lance_stream.agreement import Agreement
from ray_lance_stream.config import StreamConfig
from ray_lance_stream.errors import StreamClosedError
from ray_lance_stream.rowcursor import RowCursor
from ray_lance_stream.source import BlockSource
from ray_lance_stream.state import StreamState
from ray_lance_stream.streambase import StreamBase
from ray_lance_stream.survivors import SurvivorReader

_ROWS_AT_ONCE: Final = 1024  # rows made into objects together
_CYCLES_AGREED: Final = 64  # how far ahead the ranks agree that all of them can go on


class RowStream(StreamBase[RowCursor]):
    """One rank's rows of a stream.

    Args:
        config: The stream.
        owned: The splits to read.
        epoch: The epoch to begin with.
        agreement: How the ranks find the common end of an epoch, if rows may be skipped; None: this rank alone.
    """

    def __init__(self, config: StreamConfig, owned: range, epoch: int, agreement: Agreement | None) -> None:
        super().__init__(config, owned, RowCursor.start(epoch, config.order.num_splits, owned))
        self._agreement = agreement
        self._agreed = 0  # cycles of this epoch that every rank can serve

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_agreed": 0}

    def load(
        self,
        state: StreamState,
        *,
        epoch_given: int = 0,
        check: Callable[[StreamState], None] | None = None,
    ) -> None:
        """See ``StreamBase``."""
        super().load(state, epoch_given=epoch_given, check=check)
        self._agreed = 0

    def _next_epoch(self) -> None:
        super()._next_epoch()
        self._agreed = 0

    def only(self, owned: range) -> RowStream:
        """Returns a stream of a part of the splits, from where this one stands."""
        part = RowStream(self.config, owned, self.cursor.epoch, self._agreement)
        part.provenance = self.provenance
        part.cursor = replace(self.cursor.copy(), owned=owned)
        return part

    def _start(self, epoch: int) -> RowCursor:
        return RowCursor.start(epoch, self.config.order.num_splits, self.owned)

    def _at(self, state: StreamState) -> RowCursor:
        return RowCursor.at(state, self.owned)

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
        reader = self._reading(source)
        reader.interrupted.clear()
        yield from self._catch_up(reader)
        yield from self._cycles(reader)
        self.cursor.has_moved = True  # the remainder, empty or not, has been iterated
        self.totals.left_behind += self.rows_ready

    def _at_end(self, source: BlockSource) -> bool:
        cursor = self.cursor
        if cursor.completed_cycles >= self._rows_per_split(source):
            return True
        reader = self._reading(source)
        at_cycle = all(cursor.samples[split] == cursor.completed_cycles for split in self.owned)
        if self._agreement is not None and at_cycle:  # another rank's splits may have ended
            return self._servable(reader, cursor.completed_cycles) <= cursor.completed_cycles
        due = [(i, s) for i, s in enumerate(self.owned) if cursor.samples[s] == cursor.completed_cycles]
        return any(cursor.samples[s] >= reader.count(i) and reader.is_complete(i) for i, s in due)

    def _reading(self, source: BlockSource) -> SurvivorReader:
        if self.reader is None:
            owned = slice(self.owned.start, self.owned.stop)
            self.reader = self._new_reader(source, self.cursor.samples[owned], self.cursor.positions[owned])
        return self.reader

    def _catch_up(self, reader: SurvivorReader) -> Iterator[Any]:
        """After a state within a cycle: the least advanced splits first, until all have given as many rows."""
        cursor = self.cursor
        last = max(cursor.samples[s] for s in self.owned)
        if self._agreement is not None and last > cursor.completed_cycles:
            # Ranks that stand at the cycle's begin agree about it as well, and the next one is agreed on together.
            last = min(last, self._servable(reader, cursor.completed_cycles))
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
            self._agreed = self._agree(self._agreement, reader, cycle)
        # Behind a rewind, or a reader that was dropped, what was agreed has to be read again.
        return min(reader.servable(min(self._agreed, cycle + few)), self._agreed)

    def _agree(self, agreement: Agreement, reader: SurvivorReader, cycle: int) -> int:
        epoch = self.cursor.epoch
        try:
            mine = reader.servable(cycle + _CYCLES_AGREED)
        except StreamClosedError:
            raise
        except Exception as error:
            agreement.failed(epoch, cycle, error)
            raise
        return agreement.least(epoch, cycle, mine, reader.interrupted)

    def _objects(self, reader: SurvivorReader, rows: Any) -> list[Any]:
        if not isinstance(rows, pa.Table):
            return list(rows)
        began = time.perf_counter()
        objects = rows.to_pylist()
        reader.transform_s += time.perf_counter() - began
        return objects
