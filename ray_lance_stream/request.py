"""What consumers and prefetchers say to each other. Light to import: every actor of a stream does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from ray_lance_stream.permutation import IntArray
from ray_lance_stream.plan import PlanSpec


@dataclass(frozen=True, kw_only=True)
class Ranges:
    """Positions [start, stop) of the consecutive splits [first_split, first_split + num_splits).

    ``overrides`` holds (start, stop) for the splits, by number, that have drifted from the others.
    """

    first_split: int
    num_splits: int
    start: int
    stop: int
    overrides: tuple[tuple[int, int, int], ...] = ()

    def __str__(self) -> str:
        last = self.first_split + self.num_splits
        others = f", others of {len(self.overrides)} splits" if self.overrides else ""
        return f"positions {self.start} to {self.stop} of splits {self.first_split} to {last}{others}"

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        own = (self.num_splits - len(self.overrides)) * max(0, self.stop - self.start)
        return own + sum(max(0, stop - start) for _, start, stop in self.overrides)

    def holds(self, split: int, position: int) -> bool:
        """Whether a row is one of them."""
        if not self.first_split <= split < self.first_split + self.num_splits:
            return False
        own = ((start, stop) for number, start, stop in self.overrides if number == split)
        start, stop = next(own, (self.start, self.stop))
        return start <= position < stop

    def places(self) -> tuple[IntArray, IntArray]:
        """Returns (splits, positions) of every row in canonical order; int64, one entry per row."""
        own = np.arange(self.first_split, self.first_split + self.num_splits, dtype=np.int64)
        if not self.overrides:
            cycles = np.arange(self.start, self.stop, dtype=np.int64)
            return np.tile(own, len(cycles)), np.repeat(cycles, self.num_splits)
        starts = np.full(self.num_splits, self.start, dtype=np.int64)
        stops = np.full(self.num_splits, self.stop, dtype=np.int64)
        for split, start, stop in self.overrides:
            starts[split - self.first_split], stops[split - self.first_split] = start, stop
        turn = np.arange(max(0, int((stops - starts).max())), dtype=np.int64)
        grid = starts[None, :] + turn[:, None]  # (turn, split): the n-th row of each split
        present = grid < stops[None, :]
        return np.broadcast_to(own, grid.shape)[present], grid[present]


@dataclass(frozen=True, kw_only=True)
class PlanHandle:
    """A plan that some process has opened and counted, small enough to travel in every request.

    Attributes:
        spec: The plan.
        num_rows: Rows of the table version that satisfy the filter, or of the user's plan.
        matching_rows: Their row numbers where ``spec.order.is_listed``, or whatever the block source can turn
            into them; else None.
        schema: Schema of every block, fixed by the first rows of epoch 0.
        bytes_per_row: First guess of a transformed row's size.
        transform_s_per_row: First guess of how long the transform takes for a row; 0 if nothing is known.
        surplus_rows: Rows left out that ``num_rows`` does not count: what a list leaves out of itself.
        with_rows: Whether blocks say which rows of the table theirs are; see ``origins``.
    """

    spec: PlanSpec
    num_rows: int
    matching_rows: Any
    schema: pa.Schema
    bytes_per_row: float
    transform_s_per_row: float = 0.0
    surplus_rows: int = 0
    with_rows: bool = False
