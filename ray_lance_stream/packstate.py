"""Where the splits of a packed stream stand, in our form and in LanceDB's; plain JSON types.

Our form names a document and an offset in it, and is as small as a row state. LanceDB's holds the tokens that
were read and not given out. Theirs is read as it is: its tokens stay in our cursors until they are given out.
Ours becomes theirs through a :class:`PackPlace`, which has the tokens that theirs wants.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from ray_lance_stream.counts import SplitCounts, malformed
from ray_lance_stream.errors import StateError, explain
from ray_lance_stream.permutation import IntArray

_SAMPLES, _EMITTED, _PACK_BUFFERS = "samples_consumed_per_split", "blocks_emitted_per_split", "pack_buffers"
# Ours alone. Without pack_buffers LanceDB refuses a state, and does not go on at the wrong token.
PACK_OFFSETS: Final = "pack_offsets"
_PACK_TOKENS = "pack_tokens"
_TOKENS, _STARTS = "tokens", "starts"


class PackBuffer(NamedTuple):
    """Tokens that stand before a cursor's document, and where documents start among them."""

    tokens: tuple[int, ...] = ()
    starts: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class SplitCursor:
    """Where the next block of a split begins.

    A cursor depends on the blocks taken only, not on how documents were fed. Continuing from it reads the
    split from ``documents`` on.

    Attributes:
        documents: Position of the document the next block begins in, or follows on from: when the last block
            ended with a document, the position after that one.
        offset: Tokens of that document, its separator among them, that are in earlier blocks.
        blocks: Blocks given so far in this epoch.
        buffer: Tokens that come before that document; ``offset`` is 0 then. Only a state of LanceDB has them,
            because it does not say how much of its last document was given. They go as they are given out.
    """

    documents: int = 0
    offset: int = 0
    blocks: int = 0
    buffer: PackBuffer = field(default_factory=PackBuffer)

    @property
    def begun(self) -> int:
        """Position behind the last document begun."""
        return self.documents + bool(self.offset)


class PackPlace(NamedTuple):
    """A cursor, with what it takes to write it in either form.

    Attributes:
        cursor: The place.
        rest: What is left of the document that ``cursor.offset`` points into, its separator included: a view; None
            where that document has not been read yet.
    """

    cursor: SplitCursor = SplitCursor()
    rest: IntArray | None = None

    def buffered(self) -> SplitCursor:
        """Returns the same place as LanceDB holds it: the rest of the document begun is in the buffer.

        Where that is not known, the cursor as it is.
        """
        if self.rest is None:
            return self.cursor
        buffer = PackBuffer(tuple(self.rest.tolist()))
        return SplitCursor(documents=self.cursor.begun, blocks=self.cursor.blocks, buffer=buffer)


def cursors_to_json(cursors: Sequence[SplitCursor]) -> dict[str, Any]:
    """Returns our form of the entries of a state that say how far it is."""
    return {
        _SAMPLES: [cursor.documents for cursor in cursors],
        _EMITTED: [cursor.blocks for cursor in cursors],
        PACK_OFFSETS: [cursor.offset for cursor in cursors],
        _PACK_TOKENS: {str(split): _plain(at.buffer) for split, at in enumerate(cursors) if at.buffer.tokens},
    }


def cursors_from_json(state: object, num_splits: int) -> list[SplitCursor]:
    """Reads what :func:`cursors_to_json` returned.

    Raises:
        StateError: It is damaged, or of another number of splits.
    """
    if not isinstance(state, Mapping):
        raise malformed("packing", state)
    documents, offsets, blocks = (_counts(state, key, num_splits) for key in (_SAMPLES, PACK_OFFSETS, _EMITTED))
    buffers = _read_buffers(_PACK_TOKENS, state.get(_PACK_TOKENS), num_splits)
    for split in range(num_splits):
        # No block ends in a document before the first block, nor in one whose rest is in the buffer.
        if offsets[split] and (not blocks[split] or buffers.get(split, PackBuffer()).tokens):
            raise malformed(PACK_OFFSETS, offsets[split])
    return [
        SplitCursor(documents=documents[i], offset=offsets[i], blocks=blocks[i], buffer=buffers.get(i, PackBuffer()))
        for i in range(num_splits)
    ]


def cursors_to_lancedb(cursors: Sequence[SplitCursor]) -> dict[str, Any]:
    """Returns the entries of LanceDB's state that say how far it is.

    Args:
        cursors: What :meth:`PackPlace.buffered` of each split returned.
    """
    if any(cursor.offset for cursor in cursors):
        raise ValueError("LanceDB's state knows no offsets: take buffered() of the places")
    return {
        _SAMPLES: [cursor.documents for cursor in cursors],
        _EMITTED: [cursor.blocks for cursor in cursors],
        _PACK_BUFFERS: {split: _plain(cursor.buffer) for split, cursor in enumerate(cursors)},
    }


def cursors_from_lancedb(state: object, num_splits: int) -> list[SplitCursor]:
    """Reads a packed state of LanceDB, as it was or back from JSON, where the keys of buffers are strings.

    Whether it belongs to this packing, seed and epoch is for the caller to check.

    Raises:
        StateError: It is damaged, or of another number of splits.
    """
    if not isinstance(state, Mapping):
        raise malformed("packing", state)
    documents, blocks = (_counts(state, key, num_splits) for key in (_SAMPLES, _EMITTED))
    buffers = _read_buffers(_PACK_BUFFERS, state.get(_PACK_BUFFERS), num_splits)
    return [
        SplitCursor(documents=documents[i], blocks=blocks[i], buffer=buffers.get(i, PackBuffer()))
        for i in range(num_splits)
    ]


def merge_cursors(parts: Sequence[Sequence[SplitCursor]]) -> list[SplitCursor]:
    """Returns the place of all splits from several replicas', each of which knows its own splits' place.

    Args:
        parts: One cursor per split from each replica, those of splits it does not own being older.

    Raises:
        StateError: The replicas stand at different steps, or a replica's part is missing.
    """
    merged = [max(split, key=lambda at: (at.blocks, at.documents, at.offset)) for split in zip(*parts, strict=True)]
    blocks = sorted({cursor.blocks for cursor in merged})
    if len(blocks) > 1:
        raise StateError(
            explain(
                "the splits have given different numbers of blocks",
                found=", ".join(str(count) for count in blocks[:8]),
                expected="the same number",
                remedy="merge the states that all replicas took after the same step",
            )
        )
    return merged


def common_blocks(cursors: Sequence[SplitCursor]) -> int:
    """Returns how many blocks every split has given.

    Raises:
        StateError: They are not equally many: the state is that of one of several replicas.
    """
    blocks = sorted({cursor.blocks for cursor in cursors})
    if len(blocks) > 1:
        raise StateError(
            explain(
                "the packed state does not stand at the end of a cycle in all splits",
                found=f"splits that have given {' and '.join(map(str, blocks[:8]))} blocks",
                expected="the same number for every split",
                remedy="merge the states that all ranks took after the same step with merge_state_dicts",
            )
        )
    return blocks[0]


def _plain(buffer: PackBuffer) -> dict[str, list[int]]:
    return {_TOKENS: list(buffer.tokens), _STARTS: list(buffer.starts)}


def _counts(state: Mapping[str, Any], key: str, num_splits: int) -> list[int]:
    return SplitCounts.from_json(key, state.get(key), num_splits).to_list()


def _read_buffers(name: str, value: object, num_splits: int) -> dict[int, PackBuffer]:
    if not isinstance(value, Mapping):
        raise malformed(name, value)
    splits = [split for split in range(num_splits) if split in value or str(split) in value]
    if len(splits) != len(value):
        raise malformed(name, value)
    return {split: _read_buffer(name, value.get(split, value.get(str(split)))) for split in splits}


def _read_buffer(name: str, value: object) -> PackBuffer:
    if not isinstance(value, Mapping):
        raise malformed(name, value)
    tokens, starts = _int64s(name, value.get(_TOKENS)), _int64s(name, value.get(_STARTS))
    if not all(a < b for a, b in zip((-1, *starts), (*starts, len(tokens)), strict=True)):
        raise malformed(name, value)
    return PackBuffer(tokens, starts)


def _int64s(name: str, value: object) -> tuple[int, ...]:
    if isinstance(value, list) and all(type(number) is int and -(2**63) <= number < 2**63 for number in value):
        return tuple(value)
    raise malformed(name, value)
