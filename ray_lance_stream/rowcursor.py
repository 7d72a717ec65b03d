"""Where a stream that is consumed row by row stands: how many rows of each split, and up to which position."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Final

from ray_lance_stream.counts import SplitCounts
from ray_lance_stream.errors import StateError, explain, shown
from ray_lance_stream.provenance import Provenance
from ray_lance_stream.state import StreamState
from ray_lance_stream.topology import Replica

_OF_RANK: Final = "of_rank"  # in a state within a cycle that knows one rank's splits only: [rank, world_size]


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
        """The row after a state."""
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


def named(state: StreamState, replica: Replica) -> dict[str, Any]:
    """Returns a rank's state as a dict, which says whose it is where no other rank can continue it."""
    alone = replica.dp_size > 1 and state.packed is None and not state.samples.uniform
    return state.to_dict() | ({_OF_RANK: [replica.dp_rank, replica.dp_size]} if alone else {})


def check_place(state: StreamState, saved: Mapping[str, Any], replica: Replica) -> None:
    """Checks that ranks which all begin at a state have as far to go to the end of the epoch.

    After a cycle they have. Within one, each rank goes on with its own splits, those that are behind first: no row is
    missing or comes twice, but ranks whose splits are ahead by unequally many rows would end batches apart.

    Args:
        state: The state.
        saved: What it was read from.
        replica: This rank.

    Raises:
        StateError: They have not, or the state is that of one rank and knows too little of the others.
    """
    counts = state.samples
    if counts.uniform or state.packed is not None:
        return
    samples, here = counts.to_list(), [replica.dp_rank, replica.dp_size]
    of_rank = saved.get(_OF_RANK)
    if of_rank is not None and of_rank != here:
        raise StateError(
            explain(
                "the state is that of one rank, taken within a cycle: it does not say which rows the others gave",
                found=f"[rank, world_size] {shown(of_rank)}",
                expected=f"{here}, or a state of all ranks",
                remedy="merge the states of all ranks, taken after the same batch, with merge_state_dicts",
            )
        )
    if "provenance" not in saved and (whose := _splits_ahead(samples)) is not None:
        _check_own(samples, whose, replica)
        return
    ranks = [Replica(dp_rank=r, dp_size=replica.dp_size).owned_splits(len(samples)) for r in range(replica.dp_size)]
    # As cycles: where ranks own unequally many splits, so do their batches differ in size.
    cycles = [Fraction(sum(samples[split] for split in owned), len(owned)) for owned in ranks]
    mine = ranks[replica.dp_rank]
    others = [count for split, count in enumerate(samples) if split not in mine]
    # LanceDB's states do not say whose they are; a rank's own says of the others which cycles it completed itself.
    of_lancedb = "provenance" not in saved and all(n == min(samples[split] for split in mine) for n in others)
    if len(set(cycles)) > 1 and of_rank is None and not of_lancedb:
        raise StateError(
            explain(
                "the state was taken within a cycle, and would leave these ranks at different distances from the end",
                found="rows given by each rank's splits: "
                + shown([sum(samples[split] for split in owned) for owned in ranks]),
                expected="as many by each, or every split with the same number",
                remedy="continue it at the number of ranks it was taken at, or on one rank; or take states when every "
                "split has given the same number of rows (a batch size that is a multiple of the splits a rank owns)",
            )
        )


def _splits_ahead(samples: Sequence[int]) -> range | None:
    """Returns the splits of which alone a state of ``lancedb.streaming`` knows, None if it knows of all.

    Within a rank splits are never further than a row from each other, whatever is skipped. One rank's own state has its
    splits, which are neighbours, ahead of all others, which stand where they stood when it began.
    """
    low, high = min(samples), max(samples)
    if high - low < 2:
        return None
    ahead = [split for split, count in enumerate(samples) if count > low]
    whose = range(ahead[0], ahead[-1] + 1)
    return whose if len(whose) == len(ahead) and all(samples[split] >= high - 1 for split in whose) else None


def _check_own(samples: Sequence[int], whose: range, replica: Replica) -> None:
    mine = replica.owned_splits(len(samples))
    if mine != whose:
        raise StateError(
            explain(
                "the state is that of one rank: it does not say which rows the others gave",
                found=f"{max(samples)} rows given by each of splits {whose.start} to {whose.stop - 1}, "
                f"{min(samples)} by each of the others",
                expected=f"a state of all ranks, or one of the rank that has splits {mine.start} to {mine.stop - 1}",
                remedy="merge the states of all ranks, taken after the same batch, with merge_state_dicts",
            )
        )
