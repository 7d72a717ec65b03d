"""What all streams that are consumed row by row share: their place, their reader, and what was measured."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Generic, Protocol, Self, TypeVar

from ray_lance_stream.config import StreamConfig
from ray_lance_stream.errors import StateError, StateMismatchError, explain
from ray_lance_stream.plan import PlanSpec
from ray_lance_stream.provenance import Provenance
from ray_lance_stream.reader import ReadAhead
from ray_lance_stream.request import PlanHandle
from ray_lance_stream.sifting import SkipLog
from ray_lance_stream.source import BlockSource
from ray_lance_stream.state import StreamState
from ray_lance_stream.survivors import SurvivorReader


class Cursor(Protocol):
    """Where a stream stands. Moves with what is handed out, and only then."""

    epoch: int
    owned: range
    has_moved: bool

    @property
    def samples(self) -> list[int]:
        """Rows consumed, by split."""

    @property
    def positions(self) -> list[int]:
        """Position reached, by split."""

    def state(self, provenance: Provenance) -> StreamState:
        """Returns the state after what was handed out last."""

    def copy(self) -> Self:
        """Returns a cursor that stays where this one is."""


C = TypeVar("C", bound=Cursor)


@dataclass(kw_only=True)
class Totals:
    """What was read and skipped since the beginning, over all iterations."""

    read_bytes: int = 0
    take_s: float = 0.0
    transform_s: float = 0.0
    left_behind: int = 0  # rows of which nothing was handed out before the epoch ended
    padded_tokens: int = 0
    dropped_tokens: int = 0


class StreamBase(ABC, Generic[C]):
    """One rank's part of a stream.

    Args:
        config: The stream.
        owned: The splits to read.
        cursor: Where to begin.
    """

    def __init__(self, config: StreamConfig, owned: range, cursor: C) -> None:
        self.config = config
        self.owned = owned
        self.provenance = config.provenance
        self.cursor = cursor
        self.reader: SurvivorReader | None = None
        self.skips = SkipLog()
        self.totals = Totals()
        self._handle: PlanHandle | None = None

    def __getstate__(self) -> dict[str, Any]:
        # Blocks that were read ahead belong to the process that asked for them.
        return self.__dict__ | {"reader": None, "_handle": None}

    # ------------------------------------------------------------------ state

    def state(self) -> StreamState:
        """Returns the state after the last row handed out."""
        return self.cursor.state(self.provenance)

    def load(
        self,
        state: StreamState,
        *,
        epoch_given: int = 0,
        check: Callable[[StreamState], None] | None = None,
    ) -> None:
        """Moves to the row after a state, and to the table version it was taken from.

        Args:
            state: The state.
            epoch_given: The epoch the user asked for, 0 if none; a state of another one is refused.
            check: Raises if this rank cannot go on from the state's place, once it is known to be of the same data.

        Raises:
            StateMismatchError: The state belongs to other data; the message names the field.
            StateError: It cannot be gone on from.
        """
        provenance = replace(self.config.continued(state.provenance), skips=state.provenance.skips)
        if state.provenance.skips.since(state.epoch, state.completed_cycles):
            raise StateError(
                explain(
                    "the state leaves out steps that lie ahead of it, and a dataset knows no steps",
                    found=f"cycles {state.provenance.skips.to_json()}",
                    expected="a state behind them",
                    remedy="go on with the LanceStream that wrote it",
                )
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
        if check is not None:
            check(state)
        cursor = self._at(state)
        self.drop_reader()
        self.provenance = provenance
        self.cursor = cursor
        self._handle = None

    def mark(self) -> C:
        """Returns where the stream stands, for :meth:`rewind`."""
        return self.cursor.copy()

    def rewind(self, mark: C) -> None:
        """Goes back to a mark."""
        if mark != self.cursor:
            self.drop_reader()
            self.cursor = mark.copy()

    def drop_reader(self) -> None:
        """Gives up what was read ahead."""
        reader, self.reader = self.reader, None
        if reader is not None:
            _add(self.totals, reader)
            self.skips.merge(reader.skips)
            reader.close()

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

    # ------------------------------------------------------------------ rows

    @abstractmethod
    def rows(self, source: BlockSource) -> Iterator[Any]:
        """Yields the rest of the epoch, row by row; the cursor has moved when a row comes out."""

    @property
    @abstractmethod
    def rows_ready(self) -> int:
        """Rows that are here and not handed out."""

    @abstractmethod
    def only(self, owned: range) -> Self:
        """Returns a stream of a part of the splits, from where this one stands."""

    @abstractmethod
    def _start(self, epoch: int) -> C:
        """Returns the cursor at the beginning of an epoch."""

    @abstractmethod
    def _at(self, state: StreamState) -> C:
        """Returns the cursor at a state that belongs to this stream's data."""

    def _next_epoch(self) -> None:
        self.drop_reader()
        self.cursor = self._start(self.cursor.epoch + 1)
        self._handle = None

    def _rows_per_split(self, source: BlockSource) -> int:
        return self._opened(source).num_rows // self.config.order.num_splits

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

    def _new_reader(
        self, source: BlockSource, samples: list[int], positions: list[int], *, in_step: bool = True
    ) -> SurvivorReader:
        """Returns a reader from the cursor on.

        Args:
            source: Where blocks come from.
            samples: The number of each owned split's next survivor.
            positions: The first position to read of each.
            in_step: Whether all splits are consumed alike.
        """
        handle, prefetch = self._opened(source), self.config.prefetch
        return SurvivorReader(
            source,
            handle,
            self.owned,
            samples=samples,
            positions=positions,
            rows_per_split=self._rows_per_split(source),
            read_ahead=ReadAhead(max_bytes=prefetch.max_buffer_bytes, block_bytes=prefetch.block_bytes),
            in_step=in_step,
        )


def _add(totals: Totals, reader: SurvivorReader) -> None:
    totals.read_bytes += reader.read_bytes
    totals.take_s += reader.take_s
    totals.transform_s += reader.transform_s
