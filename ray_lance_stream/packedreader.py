"""Documents to blocks where they are consumed: feeds the packers of some splits, and serves blocks by number."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa

from ray_lance_stream.errors import BlockError
from ray_lance_stream.flight import Dispatcher
from ray_lance_stream.packing import SplitPacker
from ray_lance_stream.packstate import PackPlace
from ray_lance_stream.permutation import IntArray
from ray_lance_stream.sifting import SkipLog
from ray_lance_stream.survivors import SurvivorReader

TOKEN_BYTES: Final = 8
COLUMNS: Final = ("input_ids", "doc_ids")  # of a block, LanceDB's
_DOCUMENTS_AT_ONCE: Final = 1024


class DocumentFeed:
    """Gives each packer the documents of its split, as they are needed.

    Args:
        reader: Serves the documents, counted from 0 where it begins.
        packers: One for each split of the reader.
        bytes_per_document: First guess of a document's size.
        tokens_at_once: How many tokens a packer gets together even if it needs fewer. They are copied, beside what is
            read ahead.
    """

    def __init__(
        self,
        reader: SurvivorReader,
        packers: Sequence[SplitPacker],
        bytes_per_document: float,
        *,
        tokens_at_once: int = 0,
    ) -> None:
        self.reader = reader
        self._tokens_at_once = tokens_at_once
        self._packers = list(packers)
        self._fed = [0] * len(self._packers)
        self._tokens_seen, self._documents_seen = bytes_per_document / TOKEN_BYTES, 1.0

    @property
    def documents_ready(self) -> int:
        """Documents that are here, and that no block has begun; of those packers were given, only what blocks need."""
        unread = sum(self.reader.count(lane) - fed for lane, fed in enumerate(self._fed))
        return unread + sum(packer.documents_ready for packer in self._packers)

    def documents_left(self, documents_per_split: int) -> int:
        """Returns how many documents of the splits no block has begun."""
        return sum(documents_per_split - packer.cursor().begun for packer in self._packers)

    @property
    def dropped_tokens(self) -> int:
        """Tokens beyond the epoch's last blocks, of the documents these cut."""
        return sum(packer.dropped_tokens for packer in self._packers)

    def fill(self, wanted: Sequence[int]) -> None:
        """Reads until each packer has so many blocks ready, or all that are left; for all at the same time."""
        counts = [min(count, packer.blocks_left) for count, packer in zip(wanted, self._packers, strict=True)]
        while hungry := [i for i, packer in enumerate(self._packers) if packer.blocks_ready < counts[i]]:
            numbers = [0] * len(self._fed)
            for lane in hungry:
                numbers[lane] = self._fed[lane] + 1
            self.reader.ensure(numbers)
            for lane in hungry:
                if self.reader.count(lane) > self._fed[lane]:
                    self._feed(lane, counts[lane] - self._packers[lane].blocks_ready)
                else:
                    self._packers[lane].pad_out()
            self.reader.release_to(self._fed)

    def _feed(self, lane: int, blocks_missing: int) -> None:
        """Gives a packer documents that are here: about as many as it needs, and none that this epoch cannot use."""
        packer, start = self._packers[lane], self._fed[lane]
        tokens_wanted = max(self._tokens_at_once, blocks_missing * packer.packing.pack_sequences)
        likely = int(tokens_wanted * self._documents_seen / self._tokens_seen) + 1
        count = min(self.reader.count(lane) - start, likely, _DOCUMENTS_AT_ONCE)
        documents: Any = self.reader.survivors(lane, start, start + count)
        tokens, lengths = _flat_lists(documents.column(0))
        ends = np.cumsum(lengths + 1)
        used = min(count, int(ends.searchsorted(packer.tokens_wanted)) + 1)
        positions = self.reader.positions_of(lane, start, start + used)
        packer.feed(tokens[: int(ends[used - 1]) - used], lengths[:used], positions)
        self._fed[lane] += count
        self._tokens_seen += float(ends[-1])
        self._documents_seen += count


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedCycles:
    """The blocks of some cycles.

    Attributes:
        cycles: Which.
        table: The blocks in canonical order; ``input_ids`` and ``doc_ids`` of type fixed_size_list<int64>.
        places: Of each owned split, where its next block begins.
        padded_tokens: Padding in the blocks.
    """

    cycles: range
    table: pa.Table
    places: tuple[PackPlace, ...]
    padded_tokens: int

    @property
    def nbytes(self) -> int:
        """Size in memory."""
        return self.table.nbytes


class PackedReader:
    """Serves packed blocks by number; see ``reader.BlockReader``, whose calls it answers too.

    Not thread-safe: one thread reads at a time. Blocks stay until they are released.

    Args:
        documents: Serves the documents from where the packers stand.
        packers: One for each owned split, all of them having given as many blocks.
        bytes_per_document: First guess of a document's size.
    """

    def __init__(self, documents: SurvivorReader, packers: Sequence[SplitPacker], bytes_per_document: float) -> None:
        self._documents = documents
        self._packers = list(packers)
        self._feed = DocumentFeed(documents, packers, bytes_per_document)
        self._made: deque[PackedCycles] = deque()
        self.interrupted = documents.interrupted

    @property
    def dispatcher(self) -> Dispatcher:
        """What sends its requests."""
        return self._documents.dispatcher

    @property
    def max_bytes(self) -> int:
        """Its budget of bytes."""
        return self._documents.max_bytes

    @property
    def retries(self) -> int:
        """Requests sent again."""
        return self._documents.retries

    @property
    def skips(self) -> SkipLog:
        """The documents that were skipped."""
        return self._documents.skips

    @property
    def buffered_bytes(self) -> int:
        """Bytes of documents that are here or asked for, of their tokens being packed, and of blocks made of them."""
        tokens = sum(packer.buffered_tokens for packer in self._packers)
        # A copy: another thread may ask for this while one appends.
        return self._documents.buffered_bytes + TOKEN_BYTES * tokens + sum(part.nbytes for part in list(self._made))

    def documents_left(self, documents_per_split: int) -> int:
        """Returns how many documents of the owned splits no block has begun."""
        return self._feed.documents_left(documents_per_split)

    def read(self, rows: range) -> list[pa.Table]:
        """Returns blocks of this replica, in canonical order, as consecutive zero-copy parts.

        Block i is the one of cycle ``i // w`` and of the ``i % w``-th owned split, w = number of owned splits.
        """
        width = len(self._packers)
        self.made_to(-(-rows.stop // width))
        parts = []
        for part in self._made:
            begin, end = part.cycles.start * width, part.cycles.stop * width
            first, last = max(begin, rows.start), min(end, rows.stop)
            if first < last:
                parts.append(part.table.slice(first - begin, last - first))
        if sum(part.num_rows for part in parts) != len(rows):
            raise BlockError(f"blocks {rows.start} to {rows.stop} were released, or are beyond the epoch")
        return parts

    def made_to(self, cycle: int) -> PackedCycles:
        """Packs the cycles up to one, together; returns the cycles that end there.

        Raises:
            BlockError: ``cycle`` lies within cycles that were packed together, or was released.
        """
        begin = self._packers[0].blocks_given
        if begin < cycle:
            self._made.append(self._pack(range(begin, cycle)))
        for part in self._made:
            if part.cycles.start < cycle <= part.cycles.stop:
                return part
        raise BlockError(f"the blocks of cycle {cycle - 1} were released")

    def release(self, cycle: int) -> None:
        """Drops the blocks of the first ``cycle`` cycles."""
        while self._made and self._made[0].cycles.stop <= cycle:
            self._made.popleft()

    def close(self) -> None:
        """Gives up what is on its way. May be called from another thread; the reader is of no use afterwards."""
        self._documents.close()

    def _pack(self, cycles: range) -> PackedCycles:
        self._feed.fill([len(cycles)] * len(self._packers))
        padded = sum(packer.padded_tokens for packer in self._packers)
        popped = [packer.pop(len(cycles)) for packer in self._packers]
        size = self._packers[0].packing.pack_sequences
        arrays = [
            pa.FixedSizeListArray.from_arrays(
                pa.array(np.stack(blocks, axis=1).reshape(-1)), size
            )  # (cycle, split, token)
            for blocks in zip(*popped, strict=True)
        ]
        return PackedCycles(
            cycles=cycles,
            table=pa.Table.from_arrays(arrays, names=list(COLUMNS)),
            places=tuple(packer.place() for packer in self._packers),
            padded_tokens=sum(packer.padded_tokens for packer in self._packers) - padded,
        )


def _flat_lists(lists: pa.ChunkedArray[Any]) -> tuple[IntArray, IntArray]:
    """Returns the tokens of ``large_list<int64>`` documents one after another, and each one's number of tokens."""
    array: Any = lists.combine_chunks()
    offsets = array.offsets.to_numpy()
    tokens: IntArray = array.values.to_numpy()[offsets[0] : offsets[-1]]
    return tokens, np.diff(offsets)
