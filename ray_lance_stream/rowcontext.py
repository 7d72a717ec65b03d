"""What a transform may know about the rows it gets, their own random numbers among it."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.random.bit_generator import ISpawnableSeedSequence
from numpy.typing import DTypeLike, NDArray

from ray_lance_stream.errors import ConfigError, explain

_PACK_ROW = struct.Struct("<Q3q").pack


class _RowSeed(ISpawnableSeedSequence):
    """A seed sequence that is one 128-bit key.

    It costs a quarter of numpy's own and, unlike ``Philox(key=...)`` whose seed sequence holds entropy
    of the operating system, makes ``generator.spawn()`` repeatable as well.
    """

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._children = 0

    def generate_state(self, n_words: int, dtype: DTypeLike = np.uint32) -> NDArray[Any]:
        """Returns ``n_words`` words of ``dtype``; the two 64-bit words of a Philox are the key itself."""
        size = n_words * np.dtype(dtype).itemsize
        raw = self._key if size == len(self._key) else hashlib.shake_256(self._key).digest(size)
        return np.frombuffer(raw, dtype=dtype)

    def spawn(self, n_children: int) -> list[_RowSeed]:
        """Returns the next ``n_children`` seeds derived from this one; their order is their identity."""
        first, self._children = self._children, self._children + n_children
        packed = (struct.pack("<Q", first + i) for i in range(n_children))
        return [_RowSeed(hashlib.blake2b(p, key=self._key, digest_size=16).digest()) for p in packed]


@dataclass(frozen=True, kw_only=True, eq=False)
class TransformContext:
    """What a transform may know about the rows of its batch.

    Attributes:
        epoch: Epoch these rows belong to.
        row_numbers: (rows,) row number of each row in the table version.
        splits: (rows,) split of each row.
        positions: (rows,) position of each row inside its split.
        seed: The stream's seed; taken modulo 2**64.
    """

    epoch: int
    row_numbers: NDArray[np.int64]
    splits: NDArray[np.int64]
    positions: NDArray[np.int64]
    seed: int

    def __post_init__(self) -> None:
        arrays = (self.row_numbers, self.splits, self.positions)
        if any(a.dtype != np.int64 or a.shape != (len(self.row_numbers),) for a in arrays):
            found = ", ".join(f"{a.dtype}{a.shape}" for a in arrays)
            what = "row_numbers, splits and positions of a TransformContext do not fit together"
            expected = "three int64 arrays of one shape (rows,)"
            raise ConfigError(explain(what, found=found, expected=expected, remedy="pass one entry per row"))

    def __len__(self) -> int:
        return len(self.row_numbers)

    def generator(self, row: int) -> np.random.Generator:
        """Returns the generator of one row: a Philox, the same after a retry, a resume, another block size.

        Its 128-bit key is the 16-byte blake2b digest of seed (unsigned), epoch, split and position (signed),
        each 8 bytes, little endian. Every call starts the stream of the row anew.
        """
        where = (self.epoch, int(self.splits[row]), int(self.positions[row]))
        packed = _PACK_ROW(self.seed & 0xFFFF_FFFF_FFFF_FFFF, *where)
        # Any: numpy takes every ISeedSequence, its type stubs name SeedSequence only.
        seed: Any = _RowSeed(hashlib.blake2b(packed, digest_size=16).digest())
        return np.random.Generator(np.random.Philox(seed))

    def generators(self) -> Iterator[np.random.Generator]:
        """Yields the generator of each row, in row order."""
        return map(self.generator, range(len(self)))

    def slice(self, start: int, length: int = 1) -> TransformContext:
        """Returns the context of rows ``start .. start + length - 1`` alone."""
        return self._part(np.s_[start : start + length])

    def take(self, rows: NDArray[np.int64]) -> TransformContext:
        """Returns the context of some rows, in the order given."""
        return self._part(rows)

    def _part(self, part: Any) -> TransformContext:
        return TransformContext(
            epoch=self.epoch,
            seed=self.seed,
            row_numbers=self.row_numbers[part],
            splits=self.splits[part],
            positions=self.positions[part],
        )
