"""Steps that are left out of a run, such as those at which its loss spiked. Numbers in, numbers out.

They are kept as cycles: which rows these are does not depend on the size of the global batch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

from ray_lance_stream.counts import malformed, read_count
from ray_lance_stream.errors import ConfigError, explain, shown
from ray_lance_stream.topology import StepPlan

StepRange = tuple[int, int, int]  # epoch, first step, last step
CycleRange = tuple[int, int, int]  # epoch, first cycle, cycle behind the last one
_MOST: Final = 2**40  # of epochs and steps; a larger number is a mistake


@dataclass(frozen=True, kw_only=True)
class Skips:
    """The cycles that are left out.

    Attributes:
        ranges: (epoch, first cycle, cycle behind the last one), ascending, no two of them overlapping or adjoining.
    """

    ranges: tuple[CycleRange, ...] = ()

    @classmethod
    def of(cls, ranges: Iterable[CycleRange]) -> Skips:
        """Returns the cycles of ranges in any order; empty ones count for nothing, adjoining ones become one."""
        found: list[CycleRange] = []
        for epoch, start, stop in sorted(entry for entry in ranges if entry[1] < entry[2]):
            if found and found[-1][0] == epoch and start <= found[-1][2]:
                found[-1] = (epoch, found[-1][1], max(stop, found[-1][2]))
            else:
                found.append((epoch, start, stop))
        return cls(ranges=tuple(found))

    @classmethod
    def of_steps(cls, steps: Iterable[StepRange], cycles_per_step: int) -> Skips:
        """Returns the cycles of ranges of steps, as :func:`read_skip_steps` returns them."""
        return cls.of((epoch, (first - 1) * cycles_per_step, last * cycles_per_step) for epoch, first, last in steps)

    @classmethod
    def from_json(cls, name: str, saved: object) -> Skips:
        """Reads what :meth:`to_json` returned.

        Raises:
            StateError: It is damaged.
        """
        if not isinstance(saved, (list, tuple)) or not all(isinstance(e, (list, tuple)) and len(e) == 3 for e in saved):
            raise malformed(name, saved)
        ranges = [(read_count(name, e), read_count(name, start), read_count(name, stop)) for e, start, stop in saved]
        skips = cls.of(ranges)
        if list(skips.ranges) != ranges:
            raise malformed(name, saved)
        return skips

    def to_json(self) -> list[list[int]]:
        """Returns plain JSON types."""
        return [list(entry) for entry in self.ranges]

    def __bool__(self) -> bool:
        return bool(self.ranges)

    def __or__(self, other: Skips) -> Skips:
        return Skips.of(self.ranges + other.ranges)

    def before(self, epoch: int, cycle: int) -> Skips:
        """Returns those that lie before a cycle of an epoch."""
        return Skips.of((e, a, b if e < epoch else min(b, cycle)) for e, a, b in self.ranges if e <= epoch)

    def since(self, epoch: int, cycle: int) -> Skips:
        """Returns the others."""
        return Skips.of((e, a if e > epoch else max(a, cycle), b) for e, a, b in self.ranges if e >= epoch)

    def in_epoch(self, epoch: int) -> tuple[range, ...]:
        """Returns the cycles of an epoch that are left out, as ranges."""
        return tuple(range(a, b) for e, a, b in self.ranges if e == epoch)

    def check(self, steps: StepPlan, *, given: bool) -> None:
        """Raises ConfigError unless they are whole steps of an epoch.

        Args:
            steps: The steps.
            given: Whether the stream names them, in steps of this size; if not, a state does.
        """
        q, end = steps.cycles_per_step, steps.end_cycle
        for epoch, start, stop in self.ranges:
            if given and stop > steps.num_steps * q:
                raise _invalid(
                    f"steps {start // q + 1} to {stop // q} of epoch {epoch}",
                    f"steps 1 to {steps.num_steps}, as an epoch has",
                    "pass what shard.step said at the end of the steps: the first one of an epoch is 1",
                )
            if start % q or (stop % q and stop < end):
                raise _invalid(
                    f"cycles {start} to {stop - 1} of epoch {epoch} in the state, which are no whole steps of "
                    f"{steps.global_batch_size} rows",
                    f"whole steps of {q} cycles",
                    "pass skip_steps in steps of this global_batch_size, or skip_steps=[] to leave none out from here",
                )


NO_SKIPS: Final = Skips()


def read_skip_steps(value: Any) -> tuple[StepRange, ...] | None:
    """Returns what ``skip_steps`` says, ascending: (epoch, first step, last step); None if it says nothing.

    Raises:
        ConfigError: It is malformed, or ranges overlap.
    """
    if value is None:
        return None
    form = "a list of (epoch, first step, last step), epochs counted from 0, steps from 1, both ends included"
    remedy = "pass e.g. skip_steps=[(3, 4100, 4110)]"
    try:
        entries = [tuple(entry) for entry in value]
    except TypeError:
        raise _invalid(shown(value), form, remedy) from None
    for entry in entries:
        whole = len(entry) == 3 and all(isinstance(item, int) and not isinstance(item, bool) for item in entry)
        if not whole or not (0 <= entry[0] <= _MOST and 1 <= entry[1] <= entry[2] <= _MOST):
            raise _invalid(shown(entry), form, remedy)
    ordered: list[StepRange] = sorted(entries)
    for a, b in pairwise(ordered):
        if a[0] == b[0] and b[1] <= a[2]:
            raise _invalid(f"{a} and {b}", "ranges that do not overlap", "name every step once")
    return tuple(ordered)


def _invalid(found: str, expected: str, remedy: str) -> ConfigError:
    return ConfigError(explain("skip_steps is not valid", found=found, expected=expected, remedy=remedy))
