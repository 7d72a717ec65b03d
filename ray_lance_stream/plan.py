"""The plan: a pure function (split, position) -> row number, for one epoch of one table version.

A :class:`PlanSpec` says everything the order depends on and nothing else; its ``plan_id`` names the
plan in requests. A :class:`Plan` answers it. No I/O happens here.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import operator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from ray_lance_stream.errors import ConfigError, explain, shown
from ray_lance_stream.permutation import ClumpPermutation, IntArray, derive_keys

PLAN_FORMAT: Final = 1
ORDERS: Final = ("feistel", "lancedb", "plan")
_MAX_SEED: Final = 2**64 - 1
_MAX_SPLITS: Final = 2**20  # a state may hold one count per split: a foreign one must not fill memory
_MAX_CLUMP: Final = 2**62


@dataclass(frozen=True, kw_only=True)
class TableIdentity:
    """What a table version is, wherever it lies.

    Attributes:
        version: The version's number in its table.
        fingerprint: A digest of the version's fragments and data files. A copied or moved table keeps
            it; a table that was dropped and created anew has another one.
    """

    version: int
    fingerprint: str


@dataclass(frozen=True, kw_only=True)
class OrderSpec:
    """What decides the order of rows, apart from the table version and the epoch.

    Attributes:
        num_splits: Number of splits, S >= 1; fixed for the life of a run.
        shuffle: Whether rows are shuffled; if not, split s is rows [s*L, (s+1)*L).
        shuffle_seed: 0 to 2**64 - 1.
        shuffle_clump_size: Neighbouring rows shuffled as one, >= 1.
        filter: SQL condition on rows, or None for all rows.
        order: The algorithm: "feistel", the closed form; "lancedb", the order of LanceDB's own permutation
            builder; "plan", rows in splits that the user chose, the same in every epoch.
        plan_format: Version of the algorithm; a new algorithm is a new number.
        plan_digest: What the user's plan holds, for the order "plan" only.
    """

    num_splits: int
    shuffle: bool = True
    shuffle_seed: int = 0
    shuffle_clump_size: int = 1
    filter: str | None = None
    order: str = "feistel"
    plan_format: int = PLAN_FORMAT
    plan_digest: str | None = None

    @property
    def is_listed(self) -> bool:
        """Whether the plan needs a list of row numbers; if not, it is a closed form."""
        return self.filter is not None or self.order == "plan" or self.is_listed_per_epoch

    @property
    def is_listed_per_epoch(self) -> bool:
        """Whether every epoch has a list of its own."""
        return self.order == "lancedb" and self.shuffle

    def __post_init__(self) -> None:
        remedy = "pass a number with many divisors, e.g. 48"
        require_int("num_splits", self.num_splits, minimum=1, maximum=_MAX_SPLITS, remedy=remedy)
        remedy = "pass 1 to shuffle single rows"
        require_int("shuffle_clump_size", self.shuffle_clump_size, minimum=1, maximum=_MAX_CLUMP, remedy=remedy)
        require_int("shuffle_seed", self.shuffle_seed, minimum=0, maximum=_MAX_SEED, remedy="pass a seed of 64 bits")
        # Strictly: a state that says shuffle=1 would be refused when it is loaded.
        for name, value, kind in (("shuffle", self.shuffle, bool), ("filter", self.filter, str | None)):
            if not isinstance(value, kind):
                raise ConfigError(
                    explain(
                        f"{name} is not valid",
                        found=shown(value),
                        expected="True or False" if kind is bool else "a string, or None for all rows",
                        remedy="pass one",
                    )
                )
        if self.order not in ORDERS:
            raise ConfigError(
                explain("order is unknown", found=shown(self.order), expected=f"one of {ORDERS}", remedy="pass one")
            )
        if (self.order == "plan") != (self.plan_digest is not None):
            raise ConfigError(
                explain(
                    "order='plan' and a plan go together",
                    found=f"order={self.order!r} {'without' if self.plan_digest is None else 'with'} a plan",
                    expected="both or neither",
                    remedy="pass plan=, the table of row ids and split ids, and leave order out",
                )
            )
        if self.plan_format != PLAN_FORMAT:
            raise ConfigError(
                explain(
                    "plan format is unknown to this version of ray_lance_stream",
                    found=shown(self.plan_format),
                    expected=str(PLAN_FORMAT),
                    remedy="use the version of the package that wrote the state",
                )
            )


@dataclass(frozen=True, kw_only=True)
class PlanSpec:
    """Everything the rows of one epoch depend on."""

    table: TableIdentity
    order: OrderSpec
    epoch: int

    def __post_init__(self) -> None:
        # The largest epoch that a state can hold.
        require_int("epoch", self.epoch, minimum=0, maximum=2**63 - 1, remedy="count epochs from 0")

    @functools.cached_property
    def plan_id(self) -> str:
        """A short name that two specs share only if they are equal."""
        fields = dataclasses.asdict(self)
        if self.order.plan_digest is None:
            del fields["order"]["plan_digest"]  # names of orders that have none are older than the field
        text = json.dumps(fields, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:20]


@dataclass(frozen=True, kw_only=True)
class SplitLayout:
    """How N rows fall into S splits of L = N // S rows; N mod S rows are left out, and counted.

    Raises:
        ConfigError: There are fewer rows than splits.
    """

    num_rows: int
    num_splits: int

    def __post_init__(self) -> None:
        if self.num_rows < self.num_splits:
            raise ConfigError(
                explain(
                    "the table has no rows to train on" if self.num_rows == 0 else "fewer rows than splits",
                    found=f"{self.num_rows} rows (after the filter) for num_splits={self.num_splits}",
                    expected="at least one row for every split",
                    remedy="check the table and filter"
                    + (", or pass a smaller num_splits" if self.num_rows else "; see which rows there are"),
                )
            )

    @property
    def rows_per_split(self) -> int:
        """L, the length of every split; also the number of cycles in an epoch."""
        return self.num_rows // self.num_splits

    @property
    def dropped_rows(self) -> int:
        """Rows of this epoch that no split holds: N mod S."""
        return self.num_rows % self.num_splits


class Plan:
    """The rows of one epoch, by split and position.

    Args:
        spec: What the plan is for.
        num_rows: Rows of the table version that satisfy the filter, or of the user's plan.
        matching_rows: The row numbers that places refer to, where ``spec.order.is_listed``: those that satisfy
            the filter, ascending; with the order "lancedb" and shuffling those of the epoch, shuffled; or the
            user's, split by split. Else None, and every row number in [0, num_rows) is meant.

    Memory is constant without a list. Thread-safe: nothing changes after construction.
    """

    def __init__(self, spec: PlanSpec, num_rows: int, matching_rows: IntArray | None = None) -> None:
        if (matching_rows is not None) != spec.order.is_listed:
            raise ValueError("matching_rows goes with a filter, or an order that is a list")
        if matching_rows is not None and len(matching_rows) != num_rows:
            raise ValueError(f"matching_rows has {len(matching_rows)} rows, num_rows says {num_rows}")
        self.spec = spec
        self.layout = SplitLayout(num_rows=num_rows, num_splits=spec.order.num_splits)
        self._matching_rows = matching_rows
        closed_form = spec.order.shuffle and spec.order.order == "feistel"
        self._permutation = _permutation(spec, num_rows) if closed_form else None

    def rows(self, splits: IntArray, positions: IntArray) -> IntArray:
        """Returns the row number at every (split, position); int64, the broadcast shape of both."""
        length = self.layout.rows_per_split
        splits, positions = np.asarray(splits, dtype=np.int64), np.asarray(positions, dtype=np.int64)
        if positions.size and (int(positions.min()) < 0 or int(positions.max()) >= length):
            raise IndexError(f"position out of range for splits of {length} rows")
        if splits.size and (int(splits.min()) < 0 or int(splits.max()) >= self.layout.num_splits):
            raise IndexError(f"split out of range for {self.layout.num_splits} splits")
        place = splits * length + positions
        if self._permutation is not None:
            place = self._permutation(place)
        return place if self._matching_rows is None else self._matching_rows[place]


def _permutation(spec: PlanSpec, num_rows: int) -> ClumpPermutation:
    order = spec.order
    keys = derive_keys(seed=order.shuffle_seed, epoch=spec.epoch, purpose="rows", plan_format=order.plan_format)
    return ClumpPermutation(num_rows, order.shuffle_clump_size, keys)


def whole(value: Any) -> Any:
    """Returns an integer of any type, such as NumPy's, as Python's; and all else, booleans too, as it is."""
    if isinstance(value, (int, str, bytes)):
        return value
    try:
        return operator.index(value)
    except Exception:  # whatever a foreign object raises: it is none
        return value


def require_int(name: str, value: object, *, minimum: int, maximum: int | None = None, remedy: str) -> None:
    """Raises ConfigError unless ``value`` is an integer (no bool) in [minimum, maximum]."""
    is_int = isinstance(value, int) and not isinstance(value, bool)
    if is_int and minimum <= value and (maximum is None or value <= maximum):  # type: ignore[operator]
        return
    expected = f"an integer >= {minimum}" if maximum is None else f"an integer from {minimum} to {maximum}"
    raise ConfigError(explain(f"{name} is not valid", found=shown(value), expected=expected, remedy=remedy))
