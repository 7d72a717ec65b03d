"""Sequence packing: the documents of a split, joined by a separator and cut into blocks of equal length.

Each document is followed by ``eos_id``, an empty one is that token alone. What is joined so is cut into blocks
of ``pack_sequences`` tokens, each split by itself. All splits give the same number of blocks per epoch: one
that runs dry is padded with ``pad_id``, tokens beyond its share are left out; both are counted.

Where a split stands is a :class:`SplitCursor`: a document's position and an offset in it, not its tokens.
LanceDB's packed states hold the tokens that were read and not yet given out; both forms convert exactly.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ray_lance_stream.errors import StateError, explain
from ray_lance_stream.packspec import Packing
from ray_lance_stream.packstate import PackBuffer, PackPlace, SplitCursor
from ray_lance_stream.permutation import IntArray

_MAX_TOKEN: Final = int(np.iinfo(np.int64).max)


class _Chunk(NamedTuple):
    """Whole documents that were fed together; places count from where the packer began."""

    begin: int
    tokens: IntArray
    starts: IntArray
    positions: IntArray | None  # None: a buffer of LanceDB's, which does not tell

    @property
    def end(self) -> int:
        return self.begin + len(self.tokens)


class SplitPacker:
    """The tokens of one split, from documents to blocks. Not thread-safe.

    Args:
        packing: What to make, with its number of blocks known.
        start: Where to begin; by default at the split's first document.

    Attributes:
        padded_tokens: Padding in the blocks this packer gave.

    Example:
        >>> packing = Packing(pack_sequences=4, eos_id=0, pad_id=-1, num_splits=1, blocks_per_epoch=2)
        >>> packer = SplitPacker(packing)
        >>> packer.feed(np.array([7, 8, 9]), lengths=np.array([2, 1]))
        >>> packer.pad_out()
        >>> packer.pop(2)[0].tolist()
        [[7, 8, 0, 9], [0, -1, -1, -1]]
    """

    def __init__(self, packing: Packing, start: SplitCursor | None = None) -> None:
        start = start or SplitCursor()
        self.packing = packing
        self.padded_tokens = 0
        self._blocks = start.blocks
        if self.blocks_left < 0:
            raise StateError(
                explain(
                    "the state has more blocks than the epoch",
                    found=f"{start.blocks} blocks of a split",
                    expected=f"at most {packing.blocks_per_split}",
                    remedy="build the stream with the blocks_per_epoch of the run that saved it",
                )
            )
        self._chunks: deque[_Chunk] = deque()
        if start.buffer.tokens:
            tokens, starts = (np.array(values, dtype=np.int64) for values in start.buffer)
            self._chunks.append(_Chunk(0, tokens, starts, None))
        self._head = start.offset  # where the next block begins
        self._fed = len(start.buffer.tokens)  # where the next document will
        self._budget_end = self._head + self.blocks_left * packing.pack_sequences
        self._cut = start.offset  # what to skip of the first document, until that has come
        self._behind = start.documents  # the position after the last document given out entirely
        self._next_position = start.documents  # the least one the next document may have
        self._padding = False
        self._dropped = 0

    @property
    def blocks_given(self) -> int:
        """Blocks this split has given in this epoch."""
        return self._blocks

    @property
    def blocks_left(self) -> int:
        """Blocks this split has still to give in this epoch."""
        return self.packing.blocks_per_split - self._blocks

    @property
    def blocks_ready(self) -> int:
        """Blocks that can be taken now."""
        full = max(0, self._fed - self._head) // self.packing.pack_sequences
        return self.blocks_left if self._padding else min(full, self.blocks_left)

    @property
    def buffered_tokens(self) -> int:
        """Tokens held, 8 bytes each: what one ``feed`` brought is held until its last token is given out."""
        return sum(len(chunk.tokens) for chunk in list(self._chunks))  # a copy: other threads may ask

    @property
    def documents_ready(self) -> int:
        """Documents that were fed, and that no block has begun."""
        head, chunks = self._head, list(self._chunks)  # a copy: other threads may ask
        return sum(int((c.starts >= head).sum()) for c in chunks if c.positions is not None)

    @property
    def tokens_wanted(self) -> int:
        """Tokens, separators among them, that this epoch can use beyond those fed. At 0, stop reading.

        Until the first document has come, those of it that are in earlier blocks count, too.
        """
        return 0 if self._padding or not self.blocks_left else max(0, self._budget_end - self._fed)

    @property
    def dropped_tokens(self) -> int:
        """Tokens fed, separators among them, that lie beyond the split's last block of the epoch."""
        return self._dropped + max(0, self._fed - self._budget_end)

    def feed(self, tokens: NDArray[Any], lengths: NDArray[Any], positions: IntArray | None = None) -> None:
        """Adds documents, copying them.

        Args:
            tokens: The documents' tokens one after another, any integer type; ``(sum(lengths),)``.
            lengths: Tokens of each document, ``(documents,)``; 0 is a document without tokens.
            positions: Each document's position in the split, ascending, ``(documents,)``. Gaps are documents
                that were skipped. By default they follow on the last one fed.

        Raises:
            StateError: These are not the documents that the state was taken among.
        """
        tokens, lengths = _as_int64(tokens), _as_int64(lengths)
        if positions is None:
            positions = self._next_position + np.arange(len(lengths))
        positions = _as_int64(positions)
        if self._padding:
            raise ValueError("no document can follow pad_out()")
        if len(positions) != len(lengths) or int(lengths.sum()) != len(tokens) or (lengths < 0).any():
            raise ValueError(f"{len(tokens)} tokens, {len(lengths)} lengths, {len(positions)} positions do not agree")
        if not len(lengths):
            return
        if positions[0] < self._next_position or (positions[1:] <= positions[:-1]).any():
            raise ValueError(f"positions must ascend from {self._next_position}")
        if self._cut:
            self._check_first(int(positions[0]), int(lengths[0]))
        self._next_position = int(positions[-1]) + 1
        ends = np.cumsum(lengths + 1)
        starts, total = ends - lengths - 1, int(ends[-1])
        if self._fed + total > self._budget_end:  # keep the document that the last block cuts: its rest is state
            kept = int(starts.searchsorted(self._budget_end - self._fed))
            starts, ends, positions = starts[:kept], ends[:kept], positions[:kept]
            kept_total = int(ends[-1]) if kept else 0
            self._dropped += total - kept_total
            tokens, total = tokens[: kept_total - kept], kept_total
        if not total:
            return
        joined = np.full(total, self.packing.eos_id, dtype=np.int64)
        is_token = np.ones(total, dtype=bool)
        is_token[ends - 1] = False
        joined[is_token] = tokens
        self._chunks.append(_Chunk(self._fed, joined, starts + self._fed, positions.copy()))
        self._fed += total

    def pad_out(self) -> None:
        """Says that the split has no further documents: all blocks that are left can be taken, padded."""
        if self._cut and self.blocks_left:
            raise self._wrong_documents("the split's end")
        self._padding = True

    def pop(self, count: int) -> tuple[IntArray, IntArray]:
        """Takes the next blocks.

        Args:
            count: How many, 0 to ``blocks_ready``.

        Returns:
            ``input_ids`` and ``doc_ids``, both int64 ``(count, T)`` and the caller's own. ``doc_ids`` numbers the
            documents of a block from 0, which is also what continues from the block before.
        """
        if not 0 <= count <= self.blocks_ready:
            raise ValueError(f"{count} blocks were asked for, {self.blocks_ready} are ready")
        shape = (count, self.packing.pack_sequences)
        begin, total = self._head, count * self.packing.pack_sequences
        input_ids, doc_ids = np.empty(total, dtype=np.int64), np.zeros(total, dtype=np.int64)
        at, end = begin, min(begin + total, self._fed)
        while at < end:
            chunk = self._chunks[0]
            stop = min(end, chunk.end)
            input_ids[at - begin : stop - begin] = chunk.tokens[at - chunk.begin : stop - chunk.begin]
            starts = chunk.starts[chunk.starts.searchsorted(at) : chunk.starts.searchsorted(stop)]
            doc_ids[starts - begin] = 1
            if stop == chunk.end:
                self._chunks.popleft()
                self._behind = self._behind if chunk.positions is None else int(chunk.positions[-1]) + 1
            at = stop
        input_ids[at - begin :] = self.packing.pad_id
        self.padded_tokens += total - (at - begin)
        self._head += total
        self._blocks += count
        by_block = doc_ids.reshape(shape)
        by_block[:, 0] = 0  # a document that starts with the block is its number 0
        np.cumsum(by_block, axis=1, out=by_block)
        return input_ids.reshape(shape), by_block

    def cursor(self) -> SplitCursor:
        """Returns where the next block begins, in positions; with tokens only if they came from LanceDB."""
        if not self._chunks:
            return SplitCursor(documents=self._behind, offset=self._cut, blocks=self._blocks)
        chunk, head = self._chunks[0], self._head
        if chunk.positions is None:
            starts = chunk.starts[chunk.starts >= head] - head
            buffer = PackBuffer(tuple(chunk.tokens[head - chunk.begin :].tolist()), tuple(starts.tolist()))
            return SplitCursor(documents=self._behind, blocks=self._blocks, buffer=buffer)
        begun = int(chunk.starts.searchsorted(head))  # documents of the chunk that earlier blocks began
        if begun == 0:
            return SplitCursor(documents=self._behind, blocks=self._blocks)
        position = int(chunk.positions[begun - 1])
        if begun < len(chunk.starts) and chunk.starts[begun] == head:
            return SplitCursor(documents=position + 1, blocks=self._blocks)
        return SplitCursor(documents=position, offset=head - int(chunk.starts[begun - 1]), blocks=self._blocks)

    def place(self) -> PackPlace:
        """Returns where the next block begins, with what is left of the document it begins in, if that was fed."""
        cursor = self.cursor()
        if not cursor.offset or self._cut:
            return PackPlace(cursor)
        chunk = self._chunks[0]
        after = int(chunk.starts.searchsorted(self._head))
        end = int(chunk.starts[after]) if after < len(chunk.starts) else chunk.end
        return PackPlace(cursor, chunk.tokens[self._head - chunk.begin : end - chunk.begin])

    def _check_first(self, position: int, length: int) -> None:
        """Raises unless this is the document that the state was taken in."""
        if position != self._behind or length + 1 <= self._cut:
            raise self._wrong_documents(f"a document of {length} tokens at position {position}")
        self._cut = 0

    def _wrong_documents(self, found: str) -> StateError:
        return StateError(
            explain(
                "the document that the state was taken in is not there",
                found=found,
                expected=f"the document at position {self._behind}, of {self._cut} or more tokens",
                remedy="resume on the table version and filter of the state, and read the split from that position",
            )
        )


def _as_int64(values: NDArray[Any]) -> IntArray:
    """Returns a flat integer array as int64; the same array if it is that already."""
    array = np.asarray(values)
    if array.ndim != 1 or (array.dtype.kind not in "iu" and array.size):
        raise ValueError(f"expected a flat array of integers, got {array.dtype} of shape {array.shape}")
    if array.dtype == np.uint64 and array.size and int(array.max()) > _MAX_TOKEN:
        raise ValueError(f"tokens must fit into 64 bits with a sign, got {int(array.max())}")
    return array.astype(np.int64, copy=False)
