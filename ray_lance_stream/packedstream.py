"""Packed blocks one by one: reads documents, packs each split by itself, and knows after each block where it stands."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import pyarrow as pa
import torch

from ray_lance_stream.config import StreamConfig
from ray_lance_stream.packedcursor import PackedCursor
from ray_lance_stream.packing import SplitPacker
from ray_lance_stream.packspec import Packing
from ray_lance_stream.permutation import IntArray
from ray_lance_stream.source import BlockSource
from ray_lance_stream.state import StreamState
from ray_lance_stream.streambase import StreamBase, Totals
from ray_lance_stream.survivors import SurvivorReader

_TOKENS_AT_ONCE: Final = 8192  # packed together, or a block if that is more: they are copied, beside the read-ahead
_DOCUMENTS_AT_ONCE: Final = 1024
_TOKEN_BYTES: Final = 8


class PackedStream(StreamBase[PackedCursor]):
    """One rank's blocks of a stream.

    Args:
        config: The stream.
        owned: The splits to read.
        epoch: The epoch to begin with.
        packing: How documents become blocks; their number is known.
        blocks_given: False if the number of blocks is an estimate; then a state brings its own.
    """

    def __init__(
        self, config: StreamConfig, owned: range, epoch: int, packing: Packing, *, blocks_given: bool = True
    ) -> None:
        super().__init__(config, owned, PackedCursor.start(epoch, packing.num_splits, owned), packing)
        self._blocks_given = blocks_given
        self._fed: list[int] = []  # documents the packers were given, by owned split, since the reader began
        self._tokens_seen = self._documents_seen = 0.0

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"cursor": self.cursor.copy(), "_fed": []}

    @property
    def packing(self) -> Packing:
        """How documents become blocks."""
        assert self.provenance.packing is not None
        return self.provenance.packing

    def drop_reader(self) -> None:
        """Gives up what was read ahead, but for the rest of the documents begun."""
        super().drop_reader()
        self.cursor, self._fed = self.cursor.copy(), []

    def only(self, owned: range) -> PackedStream:
        """Returns a stream of a part of the splits, from where this one stands."""
        part = PackedStream(self.config, owned, self.cursor.epoch, self.packing, blocks_given=self._blocks_given)
        part.provenance = self.provenance
        part.cursor = dataclasses.replace(self.cursor.copy(), owned=owned)
        return part

    def _start(self, epoch: int) -> PackedCursor:
        return PackedCursor.start(epoch, self.packing.num_splits, self.owned, self.cursor.padded_tokens)

    def _at(self, state: StreamState) -> PackedCursor:
        cursor = PackedCursor.at(state, self.owned, self.cursor.padded_tokens)
        cursor.copy().begin(state.provenance.packing or self.packing)  # checks it
        return cursor

    def _packing(self, state: StreamState) -> Packing:
        saved = state.provenance.packing
        if saved is None or self._blocks_given:
            return self.packing
        return dataclasses.replace(self.packing, blocks_per_epoch=saved.blocks_per_epoch)

    # ------------------------------------------------------------------ what it measured

    def measured(self) -> Totals:
        """Returns what was read, padded and left behind so far."""
        return dataclasses.replace(super().measured(), padded_tokens=self.cursor.padded_tokens)

    @property
    def rows_ready(self) -> int:
        """Documents that are here and not packed."""
        return 0 if self.reader is None else sum(self.reader.count(i) - n for i, n in enumerate(self._fed))

    # ------------------------------------------------------------------ blocks

    def rows(self, source: BlockSource) -> Iterator[dict[str, torch.Tensor]]:
        """Yields the rest of the epoch, block by block; the cursor has moved when a block comes out."""
        if self.cursor.has_moved and self._is_over:
            self._next_epoch()
        if not self._is_over:
            reader = self._reading(source)
            reader.interrupted.clear()
            yield from self._blocks(reader)
            cursor, length = self.cursor, self._rows_per_split(source)
            self.totals.left_behind += sum(length - cursor.place(split).documents for split in self.owned)
            self.totals.dropped_tokens += sum(packer.dropped_tokens for packer in cursor.packers.values())
        self.cursor.has_moved = True  # the remainder, empty or not, has been iterated

    @property
    def _is_over(self) -> bool:
        return all(self.cursor.given(split) == self.packing.blocks_per_split for split in self.owned)

    def _reading(self, source: BlockSource) -> SurvivorReader:
        if self.reader is None:
            reader = self._new_reader(source, [0] * len(self.owned), in_step=False)
            self.cursor.begin(self.packing)
            self.reader, self._fed = reader, [0] * len(self.owned)
            self._tokens_seen, self._documents_seen = self._opened(source).bytes_per_row / _TOKEN_BYTES, 1.0
        return self.reader

    def _blocks(self, reader: SurvivorReader) -> Iterator[dict[str, torch.Tensor]]:
        cursor = self.cursor
        while True:
            # Splits differ by a block where an iteration was left within a cycle.
            turn = min(cursor.given(split) for split in self.owned)
            if turn == self.packing.blocks_per_split:
                return
            due = [split for split in self.owned if cursor.given(split) == turn]
            self._fill(reader, due)
            for split in due:
                input_ids, doc_ids = cursor.packers[split].pop(1)
                cursor.has_moved = True
                yield {"input_ids": torch.from_numpy(input_ids[0]), "doc_ids": torch.from_numpy(doc_ids[0])}

    def _fill(self, reader: SurvivorReader, due: list[int]) -> None:
        """Reads until each of some splits can give a block; all of them at the same time."""
        packers, first = self.cursor.packers, self.owned.start
        while hungry := [split - first for split in due if not packers[split].blocks_ready]:
            wanted = [0] * len(self._fed)
            for lane in hungry:
                wanted[lane] = self._fed[lane] + 1
            reader.ensure(wanted)
            for lane in hungry:
                if reader.count(lane) > self._fed[lane]:
                    self._feed(reader, lane, packers[first + lane])
                else:
                    packers[first + lane].pad_out()
            reader.release_to(self._fed)

    def _feed(self, reader: SurvivorReader, lane: int, packer: SplitPacker) -> None:
        """Gives a packer documents that are here: a few blocks' worth, and none that this epoch cannot use."""
        start = self._fed[lane]
        tokens_wanted = max(_TOKENS_AT_ONCE, self.packing.pack_sequences)
        likely = int(tokens_wanted * self._documents_seen / self._tokens_seen) + 1
        count = min(reader.count(lane) - start, likely, _DOCUMENTS_AT_ONCE)
        tokens, lengths = _flat_lists(reader.survivors(lane, start, start + count).column(0))  # type: ignore[union-attr]
        ends = np.cumsum(lengths + 1)
        used = min(count, int(ends.searchsorted(packer.tokens_wanted)) + 1)
        positions = reader.positions_of(lane, start, start + used)
        packer.feed(tokens[: int(ends[used - 1]) - used], lengths[:used], positions)
        self._fed[lane] += count
        self._tokens_seen += float(ends[-1])
        self._documents_seen += count


def _flat_lists(lists: pa.ChunkedArray[Any]) -> tuple[IntArray, IntArray]:
    """Returns the tokens of ``large_list<int64>`` documents one after another, and each one's number of tokens."""
    array: Any = lists.combine_chunks()
    offsets = array.offsets.to_numpy()
    tokens: IntArray = array.values.to_numpy()[offsets[0] : offsets[-1]]
    return tokens, np.diff(offsets)
