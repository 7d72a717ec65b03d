"""Where a stream of packed blocks stands: the packers of the splits that are read, and the place of the others."""

from __future__ import annotations

from dataclasses import dataclass, field

from ray_lance_stream.errors import StateError, explain
from ray_lance_stream.packing import SplitPacker
from ray_lance_stream.packspec import Packing
from ray_lance_stream.packstate import SplitCursor, common_blocks
from ray_lance_stream.provenance import Provenance
from ray_lance_stream.state import StreamState


@dataclass(kw_only=True, eq=False)
class PackedCursor:
    """Moves with every block that is handed out, and only then.

    Exact for the splits owned; of the others it knows where they stood when it was made. States of all ranks are
    merged where that matters.

    Attributes:
        epoch: The epoch under way.
        splits: Where each split stands, unless it has a packer.
        owned: The splits of this process.
        has_moved: Whether blocks were handed out since the cursor was made or loaded.
        packers: Those of owned splits by number, while blocks are read.
    """

    epoch: int
    splits: list[SplitCursor]
    owned: range
    has_moved: bool = False
    packers: dict[int, SplitPacker] = field(default_factory=dict)
    padded_before: int = 0  # by packers that are gone

    @classmethod
    def start(cls, epoch: int, num_splits: int, owned: range, padded_tokens: int = 0) -> PackedCursor:
        """The beginning of an epoch."""
        return cls(epoch=epoch, splits=[SplitCursor()] * num_splits, owned=owned, padded_before=padded_tokens)

    @classmethod
    def at(cls, state: StreamState, owned: range, padded_tokens: int = 0) -> PackedCursor:
        """The block after a state.

        Raises:
            StateError: The state is that of one of several ranks.
        """
        cursors = state.packed or ()
        common_blocks(cursors)
        return cls(epoch=state.epoch, splits=list(cursors), owned=owned, padded_before=padded_tokens)

    def begin(self, packing: Packing) -> None:
        """Makes the packers of the owned splits.

        Raises:
            StateError: A split has given more blocks than the epoch has.
        """
        self.packers = {split: SplitPacker(packing, self.splits[split]) for split in self.owned}

    def given(self, split: int) -> int:
        """Returns how many blocks of this epoch a split has given."""
        packer = self.packers.get(split)
        return self.splits[split].blocks if packer is None else packer.blocks_given

    def place(self, split: int) -> SplitCursor:
        """Returns where a split's next block begins, as LanceDB holds it if that is known."""
        packer = self.packers.get(split)
        return self.splits[split] if packer is None else packer.place().buffered()

    @property
    def samples(self) -> list[int]:
        """Documents begun, by split, those that were skipped among them."""
        return self.positions

    @property
    def positions(self) -> list[int]:
        """Position behind the last document begun, by split."""
        return [self.place(split).begun for split in range(len(self.splits))]

    @property
    def padded_tokens(self) -> int:
        """Padding handed out."""
        return self.padded_before + sum(packer.padded_tokens for packer in self.packers.values())

    def state(self, provenance: Provenance) -> StreamState:
        """Returns the state after the last block handed out.

        Raises:
            StateError: Some of the owned splits have given a block more than the others.
        """
        given = {self.given(split) for split in self.owned}
        if len(given) > 1:
            raise StateError(
                explain(
                    "a packed stream has a state at the end of a step only",
                    found=f"owned splits that have given {min(given)} and {max(given)} blocks",
                    expected="the same number for every split",
                    remedy="take the state when every owned split has given its block (a batch size that is a multiple "
                    "of the splits a rank owns)",
                )
            )
        return StreamState.of_packed(provenance, self.epoch, [self.place(split) for split in range(len(self.splits))])

    def copy(self) -> PackedCursor:
        """Returns a cursor that stays where this one is; without packers."""
        return PackedCursor(
            epoch=self.epoch,
            splits=[self.place(split) for split in range(len(self.splits))],
            owned=self.owned,
            has_moved=self.has_moved,
            padded_before=self.padded_tokens,
        )

    def __eq__(self, other: object) -> bool:
        """Whether both stand before the same block."""
        return (
            isinstance(other, PackedCursor)
            and (self.epoch, self.owned) == (other.epoch, other.owned)
            and all(self.given(split) == other.given(split) for split in range(len(self.splits)))
        )

    __hash__ = None  # type: ignore[assignment]  # it moves
