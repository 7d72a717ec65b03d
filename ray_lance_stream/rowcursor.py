"""Where a stream that is consumed row by row stands: how many rows of each split, and up to which position."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from ray_lance_stream.counts import SplitCounts
from ray_lance_stream.errors import StateError, explain
from ray_lance_stream.provenance import Provenance
from ray_lance_stream.state import StreamState


@dataclass(kw_only=True)
class RowCursor:
    """Moves with every row that is handed out, and only then.

    Exact for the splits owned. Of the others this process knows that they have given what it was told when it
    began, and one row in every cycle it has completed since; states of all ranks are merged where that matters.

    Attributes:
        epoch: The epoch the counts belong to.
        samples: Rows handed out, by split.
        positions: Position reached, by split: behind the last row handed out and the rows skipped before it.
        owned: The splits of this process.
        has_moved: Whether rows were handed out since the cursor was made or loaded. At the end of an epoch it
            decides what iterating gives: the empty remainder after a resume, else the next epoch.
    """

    epoch: int
    samples: list[int]
    positions: list[int]
    owned: range
    has_moved: bool = False

    @classmethod
    def start(cls, epoch: int, num_splits: int, owned: range) -> RowCursor:
        """The beginning of an epoch."""
        return cls(epoch=epoch, samples=[0] * num_splits, positions=[0] * num_splits, owned=owned)

    @classmethod
    def at(cls, state: StreamState, owned: range) -> RowCursor:
        """The row after a state.

        Raises:
            StateError: The state lies within a cycle, and the splits are those of several ranks: they would be a
                cycle apart for the rest of the epoch.
        """
        if not state.samples.uniform and len(owned) < state.samples.num_splits:
            raise StateError(
                explain(
                    "the state was taken within a cycle; several ranks cannot continue it",
                    found="splits with different numbers of consumed rows",
                    expected="the same number for every split",
                    remedy="take the state when every split has given the same number of rows (a batch size that is a "
                    "multiple of the splits a rank owns), or continue it on one rank",
                )
            )
        return cls(epoch=state.epoch, samples=state.samples.to_list(), positions=state.positions.to_list(), owned=owned)

    @property
    def completed_cycles(self) -> int:
        """Cycles of which every owned split has given its row."""
        return min(self.samples[self.owned.start : self.owned.stop])

    def advance(self, split: int, position: int) -> None:
        """Notes that a row of an owned split is handed out; ``position`` is the one behind it."""
        self.samples[split] += 1
        self.positions[split] = position
        self.has_moved = True

    def state(self, provenance: Provenance) -> StreamState:
        """Returns the state after the last row handed out."""
        cycles = self.completed_cycles
        samples, positions = list(self.samples), list(self.positions)
        for split in (*range(self.owned.start), *range(self.owned.stop, len(samples))):
            ahead = max(0, cycles - samples[split])
            samples[split], positions[split] = samples[split] + ahead, positions[split] + ahead
        return StreamState(
            provenance=provenance,
            epoch=self.epoch,
            samples=SplitCounts.of(samples),
            positions=SplitCounts.of(positions),
        )

    def copy(self) -> RowCursor:
        """Returns a cursor that stays where this one is."""
        return dataclasses.replace(self, samples=list(self.samples), positions=list(self.positions))
