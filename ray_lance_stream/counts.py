"""One count per split, small where the splits agree; and the checks that read counts from a file."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from ray_lance_stream.errors import StateError, explain, shown
from ray_lance_stream.permutation import IntArray
from ray_lance_stream.plan import whole

_MAX_COUNT: Final = 2**63 - 1
_MOST_BY_NAME: Final = 256  # exceptions that are always written split by split
_SHARE_BY_NAME: Final = 5  # and beyond, if they are one split in so many: each takes the room of five counts in a list


@dataclass(frozen=True, kw_only=True, eq=False)
class SplitCounts:
    """One non-negative count per split, as a common value plus the splits that differ from it.

    At a step boundary all counts are equal, so the state of 8,192 splits is one number.

    Attributes:
        num_splits: S.
        base: The common value.
        apart: The splits that differ, ascending, and their counts; None if there are none.
    """

    num_splits: int
    base: int
    apart: tuple[IntArray, IntArray] | None = None

    @classmethod
    def of(cls, counts: Sequence[int] | IntArray) -> SplitCounts:
        """Returns the counts of a list, with its most frequent value as the base."""
        dense = np.asarray(counts, dtype=np.int64)
        base = int(dense[0])
        if (dense != base).any():
            values, frequency = np.unique(dense, return_counts=True)
            base = int(values[frequency.argmax()])
        splits = np.flatnonzero(dense != base)
        return cls(num_splits=len(dense), base=base, apart=(splits, dense[splits]) if len(splits) else None)

    @classmethod
    def greatest(cls, several: Sequence[SplitCounts]) -> SplitCounts:
        """Returns the largest count of each split; all have as many splits."""
        highest = max((counts for counts in several if counts.uniform), key=lambda counts: counts.base, default=None)
        uneven = [counts for counts in several if not counts.uniform]
        if not uneven:
            assert highest is not None  # or there would be nothing to compare
            return highest
        apart = [counts.apart for counts in uneven if counts.apart is not None]
        splits, values = np.concatenate([a[0] for a in apart]), np.concatenate([a[1] for a in apart])
        bases = np.repeat([counts.base for counts in uneven], [len(a[0]) for a in apart])
        if (values >= bases).all():  # as replicas tell theirs, each of a few splits: no list of all splits for each
            dense = np.full(several[0].num_splits, max(counts.base for counts in several), dtype=np.int64)
            np.maximum.at(dense, splits, values)
            return cls.of(dense)
        dense = uneven[0].dense() if highest is None else highest.dense()
        for counts in uneven:
            np.maximum(dense, counts.dense(), out=dense)
        return cls.of(dense)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles as bytes: a state manager reads those of a thousand replicas at every step's end."""
        apart = None if self.apart is None else b"".join(array.tobytes() for array in self.apart)
        return _counts, (self.num_splits, self.base, apart)

    def __eq__(self, other: object) -> bool:
        """Whether every split has the same count."""
        if not isinstance(other, SplitCounts):
            return NotImplemented
        if self.num_splits != other.num_splits:
            return False
        if self.uniform and other.uniform:
            return self.base == other.base
        return np.array_equal(self.dense(), other.dense())

    def dense(self) -> IntArray:
        """Returns one count per split, int64, shape (S,); a new array."""
        counts = np.full(self.num_splits, self.base, dtype=np.int64)
        if self.apart is not None:
            splits, values = self.apart
            counts[splits] = values
        return counts

    def to_list(self) -> list[int]:
        """Returns one count per split."""
        if self.apart is not None and len(self.apart[0]) * _SHARE_BY_NAME > self.num_splits:
            dense: list[int] = self.dense().tolist()
            return dense
        counts = [self.base] * self.num_splits  # one object for all that are alike
        for split, count in self.exceptions.items():
            counts[split] = count
        return counts

    @property
    def exceptions(self) -> dict[int, int]:
        """The counts that differ from the base, by split."""
        if self.apart is None:
            return {}
        splits, values = self.apart
        return dict(zip(splits.tolist(), values.tolist(), strict=True))

    @property
    def uniform(self) -> bool:
        """Whether all counts are equal."""
        return self.apart is None

    @property
    def least(self) -> int:
        """The smallest count."""
        return self.base if self.apart is None else int(self.dense().min())

    def is_behind(self, other: SplitCounts) -> bool:
        """Whether the count of some split is smaller than another's."""
        if self.uniform and other.uniform:
            return self.base < other.base
        return bool((self.dense() < other.dense()).any())

    def to_json(self) -> int | dict[str, Any]:
        """Returns the compact form: a number, or a number and the exceptions, or and how far ahead of it each is."""
        if self.apart is None:
            return self.base
        if len(self.apart[0]) > max(_MOST_BY_NAME, self.num_splits // _SHARE_BY_NAME):
            dense = self.dense()
            least = int(dense.min())
            return {"base": least, "ahead": (dense - least).tolist()}
        return {"base": self.base, "exceptions": {str(split): count for split, count in self.exceptions.items()}}

    @classmethod
    def from_json(cls, name: str, value: object, num_splits: int) -> SplitCounts:
        """Reads a list of counts, one number for all splits, or the compact form."""
        if isinstance(value, list):
            return cls.of(_read_counts(name, value, num_splits))
        if not isinstance(value, Mapping):
            return cls(num_splits=num_splits, base=read_count(name, value))
        base, ahead, exceptions = read_count(name, value.get("base")), value.get("ahead"), value.get("exceptions")
        if isinstance(ahead, list):
            counts = _read_counts(name, ahead, num_splits)
            if int(counts.max()) > _MAX_COUNT - base:
                raise malformed(name, base)
            return cls.of(counts + base)
        if not isinstance(exceptions, Mapping):
            raise malformed(name, value)
        dense = np.full(num_splits, base, dtype=np.int64)
        for key, count in exceptions.items():
            dense[_split(name, key, num_splits)] = read_count(name, count)
        return cls.of(dense)


def _counts(num_splits: int, base: int, apart: bytes | None) -> SplitCounts:
    """Unpickles."""
    if apart is None:
        return SplitCounts(num_splits=num_splits, base=base)
    splits, values = np.frombuffer(apart, dtype=np.int64).reshape(2, -1)
    return SplitCounts(num_splits=num_splits, base=base, apart=(splits, values))


def _read_counts(name: str, values: list[Any], num_splits: int) -> IntArray:
    """Returns a list's counts, int64, shape (S,); raises StateError if it is not one count per split."""
    if len(values) != num_splits:
        raise StateError(
            explain(
                f"the state's {name} does not have one count per split",
                found=f"{len(values)} counts",
                expected=f"{num_splits}",
                remedy="load the state as it was saved",
            )
        )
    if set(map(type, values)) == {int}:  # all at once: a state of 8,192 splits is read in a millisecond
        with contextlib.suppress(OverflowError):
            counts = np.array(values, dtype=np.int64)
            if int(counts.min()) >= 0:
                return counts
    return np.array([read_count(name, count) for count in values], dtype=np.int64)  # one of them is none


def read_count(name: str, value: object) -> int:
    """Returns a count found in a state, as a plain integer; raises StateError if it is none."""
    value = whole(value)
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MAX_COUNT:
        return value
    raise malformed(name, value)


def _split(name: str, key: object, num_splits: int) -> int:
    if isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 20 and int(key) < num_splits:
        return int(key)
    raise malformed(name, key)


def malformed(name: str, value: object) -> StateError:
    """Returns the error for a value of a state that cannot be what was saved."""
    return StateError(
        explain(
            f"the state's {name} is missing or damaged",
            found=shown(value),
            expected="the value that was saved",
            remedy="load an earlier checkpoint",
        )
    )
