"""One count per split, small where the splits agree; and the checks that read counts from a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from ray_lance_stream.errors import StateError, explain, shown

_MAX_COUNT: Final = 2**63 - 1


@dataclass(frozen=True, kw_only=True)
class SplitCounts:
    """One non-negative count per split, as a common value plus the splits that differ from it.

    At a step boundary all counts are equal, so the state of 8,192 splits is one number.
    """

    num_splits: int
    base: int
    exceptions: Mapping[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, counts: Sequence[int]) -> SplitCounts:
        """Returns the counts of a list, with its most frequent value as the base."""
        values, frequency = np.unique(np.asarray(counts, dtype=np.int64), return_counts=True)
        base = int(values[frequency.argmax()])
        return cls(
            num_splits=len(counts),
            base=base,
            exceptions={split: count for split, count in enumerate(counts) if count != base},
        )

    def to_list(self) -> list[int]:
        """Returns one count per split."""
        counts = [self.base] * self.num_splits
        for split, count in self.exceptions.items():
            counts[split] = count
        return counts

    @property
    def uniform(self) -> bool:
        """Whether all counts are equal."""
        return not self.exceptions

    @property
    def least(self) -> int:
        """The smallest count."""
        if len(self.exceptions) == self.num_splits:
            return min(self.exceptions.values())
        return min(self.base, *self.exceptions.values()) if self.exceptions else self.base

    def maximum(self, other: SplitCounts) -> SplitCounts:
        """Returns the larger count of each split."""
        if self == other:
            return self
        return SplitCounts.of([max(pair) for pair in zip(self.to_list(), other.to_list(), strict=True)])

    def to_json(self) -> int | dict[str, Any]:
        """Returns the compact form: a number, or a number and the exceptions."""
        if self.uniform:
            return self.base
        return {"base": self.base, "exceptions": {str(split): count for split, count in self.exceptions.items()}}

    @classmethod
    def from_json(cls, name: str, value: object, num_splits: int) -> SplitCounts:
        """Reads a list of counts, one number for all splits, or the compact form."""
        if isinstance(value, list):
            if len(value) != num_splits:
                raise StateError(
                    explain(
                        f"the state's {name} does not have one count per split",
                        found=f"{len(value)} counts",
                        expected=f"{num_splits}",
                        remedy="load the state as it was saved",
                    )
                )
            return cls.of([read_count(name, count) for count in value])
        if isinstance(value, Mapping):
            base, exceptions = value.get("base"), value.get("exceptions")
            if not isinstance(exceptions, Mapping):
                raise malformed(name, value)
            return cls(
                num_splits=num_splits,
                base=read_count(name, base),
                exceptions={
                    _split(name, key, num_splits): read_count(name, count) for key, count in exceptions.items()
                },
            )
        return cls(num_splits=num_splits, base=read_count(name, value))


def read_count(name: str, value: object) -> int:
    """Returns a count found in a state; raises StateError if it is none."""
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
