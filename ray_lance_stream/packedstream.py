"""Packed blocks one by one: reads documents, packs each split by itself, and knows after each block where it stands."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, Final

import torch

from ray_lance_stream.config import StreamConfig
from ray_lance_stream.packedcursor import PackedCursor
from ray_lance_stream.packedreader import COLUMNS, DocumentFeed
from ray_lance_stream.packspec import Packing
from ray_lance_stream.source import BlockSource
from ray_lance_stream.state import StreamState
from ray_lance_stream.streambase import StreamBase, Totals

_TOKENS_AT_ONCE: Final = 8192  # blocks are taken one by one


class PackedStream(StreamBase[PackedCursor]):
    """One rank's blocks of a stream.

    Args:
        config: The stream, with its packing.
        owned: The splits to read.
        epoch: The epoch to begin with.
    """

    def __init__(self, config: StreamConfig, owned: range, epoch: int) -> None:
        super().__init__(config, owned, PackedCursor.start(epoch, config.order.num_splits, owned))
        self._feed: DocumentFeed | None = None  # of the reader

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"cursor": self.cursor.copy(), "_feed": None}

    @property
    def packing(self) -> Packing:
        """How documents become blocks."""
        assert self.provenance.packing is not None
        return self.provenance.packing

    def drop_reader(self) -> None:
        """Gives up what was read ahead, but for the rest of the documents begun."""
        super().drop_reader()
        self.cursor, self._feed = self.cursor.copy(), None

    def only(self, owned: range) -> PackedStream:
        """Returns a stream of a part of the splits, from where this one stands."""
        part = PackedStream(self.config, owned, self.cursor.epoch)
        part.provenance = self.provenance
        part.cursor = dataclasses.replace(self.cursor.copy(), owned=owned)
        return part

    def _start(self, epoch: int) -> PackedCursor:
        return PackedCursor.start(epoch, self.packing.num_splits, self.owned, self.cursor.padded_tokens)

    def _at(self, state: StreamState) -> PackedCursor:
        cursor = PackedCursor.at(state, self.owned, self.cursor.padded_tokens)
        cursor.copy().begin(state.provenance.packing or self.packing)  # checks it
        return cursor

    # ------------------------------------------------------------------ what it measured

    def measured(self) -> Totals:
        """Returns what was read, padded and left behind so far."""
        return dataclasses.replace(super().measured(), padded_tokens=self.cursor.padded_tokens)

    @property
    def rows_ready(self) -> int:
        """Documents that are here, and that no block has begun."""
        return 0 if self._feed is None else self._feed.documents_ready

    # ------------------------------------------------------------------ blocks

    def rows(self, source: BlockSource) -> Iterator[dict[str, torch.Tensor]]:
        """Yields the rest of the epoch, block by block; the cursor has moved when a block comes out."""
        if self.cursor.has_moved and self._is_over:
            self._next_epoch()
        if not self._is_over:
            feed = self._feeding(source)
            feed.reader.interrupted.clear()
            yield from self._blocks(feed)
            self.totals.left_behind += feed.documents_left(self._rows_per_split(source))
            self.totals.dropped_tokens += feed.dropped_tokens
        self.cursor.has_moved = True  # the remainder, empty or not, has been iterated

    @property
    def _is_over(self) -> bool:
        return all(self.cursor.given(split) == self.packing.blocks_per_split for split in self.owned)

    def _feeding(self, source: BlockSource) -> DocumentFeed:
        if self._feed is None:
            positions = [self.cursor.place(split).documents for split in self.owned]
            self.reader = self._new_reader(source, [0] * len(self.owned), positions, in_step=False)
            self.cursor.begin(self.packing)
            packers = [self.cursor.packers[split] for split in self.owned]
            size = self._opened(source).bytes_per_row
            self._feed = DocumentFeed(self.reader, packers, size, tokens_at_once=_TOKENS_AT_ONCE)
        return self._feed

    def _blocks(self, feed: DocumentFeed) -> Iterator[dict[str, torch.Tensor]]:
        cursor = self.cursor
        while True:
            # Splits differ by a block where an iteration was left within a cycle.
            turn = min(cursor.given(split) for split in self.owned)
            if turn == self.packing.blocks_per_split:
                return
            due = [split for split in self.owned if cursor.given(split) == turn]
            feed.fill([int(split in due) for split in self.owned])
            for split in due:
                block = cursor.packers[split].pop(1)
                cursor.has_moved = True
                yield {name: torch.from_numpy(values[0]) for name, values in zip(COLUMNS, block, strict=True)}
