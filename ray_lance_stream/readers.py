"""What a shard reads its splits with, and how far that may read ahead."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Final, TypeAlias

from ray_lance_stream.config import StreamConfig
from ray_lance_stream.packedreader import TOKEN_BYTES, PackedReader
from ray_lance_stream.packing import SplitPacker
from ray_lance_stream.packstate import PackPlace
from ray_lance_stream.position import Position
from ray_lance_stream.reader import BlockReader, ReadAhead
from ray_lance_stream.request import PlanHandle
from ray_lance_stream.source import BlockSource
from ray_lance_stream.survivors import SurvivorReader
from ray_lance_stream.topology import Seat, StepPlan

logger = logging.getLogger("ray_lance_stream")
_MIB: Final = 1024 * 1024

Reader: TypeAlias = BlockReader | SurvivorReader | PackedReader


@dataclass(frozen=True, kw_only=True)
class Room:
    """What one worker may hold, and what it needs for the steps it has or makes ahead.

    Attributes:
        budget: Its part of ``max_buffer_bytes``.
        step_bytes: Its part of a step; of a packed one twice, as blocks and as the batch made of them.
        prefetch_batches: Steps made ahead.
    """

    budget: int
    step_bytes: float
    prefetch_batches: int

    @classmethod
    def of(cls, config: StreamConfig, seat: Seat, steps: StepPlan, handle: PlanHandle, prefetch_batches: int) -> Room:
        """Returns the room of a worker."""
        rows = steps.cycles_per_step * len(seat.replica.owned_splits(steps.num_splits))
        packing = config.packing
        row_bytes = handle.bytes_per_row if packing is None else 2 * 2 * TOKEN_BYTES * packing.pack_sequences
        return cls(
            budget=config.prefetch.max_buffer_bytes // seat.world_size,
            step_bytes=rows * row_bytes,
            prefetch_batches=prefetch_batches,
        )

    @property
    def made_ahead_bytes(self) -> int:
        """Bytes of the batches made ahead."""
        return int(self.prefetch_batches * self.step_bytes)

    @property
    def is_too_small(self) -> bool:
        """Whether nothing can be read ahead."""
        return self.made_ahead_bytes + self.step_bytes > self.budget

    def warn(self, seat: Seat) -> None:
        """Says that nothing can be read ahead."""
        logger.warning(
            "stream %r: there is no room to read ahead. This worker may hold %.1f MiB (max_buffer_bytes over %d "
            "workers), its part of a step takes about %.1f MiB, and %d more are made ahead (prefetch_batches). Set "
            "PrefetchConfig(max_buffer_bytes=...) to %.0f MiB or more, or lower prefetch_batches",
            seat.name,
            self.budget / _MIB,
            seat.world_size,
            self.step_bytes / _MIB,
            self.prefetch_batches,
            -(-self.step_bytes * (self.prefetch_batches + 2) * seat.world_size // _MIB),
        )


def new_reader(
    source: BlockSource,
    handle: PlanHandle,
    config: StreamConfig,
    position: Position,
    seat: Seat,
    steps: StepPlan,
    room: Room,
) -> Reader:
    """Returns what reads a replica's splits from a position on."""
    owned, cycle = seat.replica.owned_splits(steps.num_splits), position.cycle
    max_bytes = room.budget - room.made_ahead_bytes
    packing = position.provenance.packing
    if packing is None and not config.sifts:
        return BlockReader(
            source,
            handle,
            owned,
            start_cycle=cycle,
            end_cycle=steps.end_cycle,
            cycles_per_step=steps.cycles_per_step,
            read_ahead=ReadAhead(max_bytes=max(1, max_bytes), block_bytes=config.prefetch.block_bytes),
            left_out=steps.left_out,
        )
    own = slice(owned.start, owned.stop)
    if packing is None:
        samples, positions = [cycle] * len(owned), list((position.positions or (cycle,) * steps.num_splits)[own])
    else:
        cursors = [place.cursor for place in (position.places or (PackPlace(),) * steps.num_splits)[own]]
        samples, positions = [0] * len(owned), [cursor.documents for cursor in cursors]
        max_bytes -= int(room.step_bytes)
    reader = SurvivorReader(
        source,
        handle,
        owned,
        samples=samples,
        positions=positions,
        rows_per_split=handle.num_rows // steps.num_splits,
        read_ahead=ReadAhead(max_bytes=max(1, max_bytes), block_bytes=config.prefetch.block_bytes),
        in_step=packing is None,
    )
    if packing is None:
        return reader
    return PackedReader(reader, [SplitPacker(packing, cursor) for cursor in cursors], handle.bytes_per_row)
