"""Blocks: an Arrow table with the rows of given position ranges of given splits, in canonical order.

Building a block is a pure function of the table version, the plan and the ranges: any process may do it,
any number of times.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import pyarrow as pa

from ray_lance_stream.columns import cast_to
from ray_lance_stream.diskcache import CacheSpec
from ray_lance_stream.errors import TransformError, explain
from ray_lance_stream.location import TableRef
from ray_lance_stream.opentables import OpenTables
from ray_lance_stream.origins import numbered
from ray_lance_stream.permutation import IntArray
from ray_lance_stream.plan import Plan, PlanSpec
from ray_lance_stream.recent import Recent
from ray_lance_stream.request import PlanHandle, Ranges
from ray_lance_stream.rowcontext import TransformContext
from ray_lance_stream.rowlists import listed_rows
from ray_lance_stream.sifting import ErrorPolicy, Sifted, SkippedRow, Whole
from ray_lance_stream.transform import RowTransform, Transform
from ray_lance_stream.trial import replacements, sifted, try_rows, with_left_out
from ray_lance_stream.userplan import UserPlan

logger = logging.getLogger("ray_lance_stream")
_OPEN_PLANS: Final = 4  # the epoch that ends, the one that begins, and a validation stream's
_PROBE_ROWS: Final = 16
_SLOW_PROBE_S: Final = 0.1  # below it, what a first call costs more says nothing wrong of the pace
_MOST_PROBE_ROWS: Final = 4096  # where the first rows all fail


@dataclass(frozen=True, kw_only=True)
class BlockRecipe:
    """What a block is made of, the same for a whole stream.

    Attributes:
        table: The table.
        columns: Columns to read; None for all.
        transform: What is done to the rows. A ``RowTransform`` makes objects of them.
        policy: What happens to rows that fail; with one, blocks say which rows they hold (``sifting.Sifted``).
        plan: The user's rows in splits, for the order "plan".
        cache: Where the node keeps files of the table; None for nowhere.
    """

    table: TableRef
    columns: tuple[str, ...] | None = None
    transform: Transform | None = None
    policy: ErrorPolicy | None = None
    plan: UserPlan | None = field(default=None, repr=False)
    cache: CacheSpec | None = None


@dataclass(kw_only=True)
class BuildStats:
    """What one block cost. Times in seconds, sizes in bytes."""

    rows: int
    num_bytes: int
    take_s: float
    transform_s: float


class BlockBuilder:
    """Opens the table and builds blocks; one per process, safe to use from several threads.

    Attributes:
        tables: The versions of the table that are open.
    """

    def __init__(self, recipe: BlockRecipe) -> None:
        self._recipe = recipe
        self.tables = OpenTables(recipe.table, recipe.cache)
        self._plans: Recent[str, Plan] = Recent(_OPEN_PLANS)
        self._rows_in_transform = 0
        self._count_lock = threading.Lock()

    def open_plan(self, spec: PlanSpec, deadly: Sequence[SkippedRow] = ()) -> tuple[PlanHandle, IntArray | None]:
        """Opens the table version, counts its rows and builds the first ones, except those that kill who reads them.

        Returns:
            The handle, without matching rows, and the matching rows (None without a filter).

        Raises:
            TableVersionError: The version is gone.
            StateMismatchError: The version holds other data than the spec says.
            ConfigError: Fewer rows than splits, an unknown column, a filter that cannot be read.
            TransformError: The transform fails on the first rows, or the policy's ``ReplaceRow`` does not fit them.
            OSError: The storage; without the values of ``storage_options``.
        """

        def opened() -> tuple[PlanHandle, IntArray | None, pa.Table, float]:
            handle, matching = self._counted(spec)
            plan = self._plans.get(spec.plan_id, lambda: Plan(spec, handle.num_rows, matching))
            return handle, matching, *self._probe(plan, handle.num_rows, matching, deadly)

        handle, matching, probe, row_s = self.tables.reading(opened)
        bytes_per_row = max(1.0, probe.nbytes / max(1, probe.num_rows))
        replacement = None if self._recipe.policy is None else self._recipe.policy.replacement
        if replacement is not None and self._fixes_schema:
            replacements(replacement, 1, probe.schema)  # checks it
        found = dataclasses.replace(handle, schema=probe.schema, bytes_per_row=bytes_per_row, transform_s_per_row=row_s)
        return found, matching

    def count_plan(self, spec: PlanSpec, factor: int) -> tuple[tuple[PlanHandle, Ranges], IntArray | None]:
        """As :meth:`open_plan`, without building a row.

        Returns:
            A handle without a schema, for the rows that are built first, and their ranges, so many times as long; and
            the matching rows.
        """
        handle, matching = self.tables.reading(lambda: self._counted(spec))
        first = self._first_plan(Plan(spec, handle.num_rows, matching), handle.num_rows, matching)
        splits, cycles = _probed(first)
        stop = min(first.layout.rows_per_split, factor * cycles)
        ranges = Ranges(first_split=0, num_splits=splits, start=0, stop=stop)
        return (dataclasses.replace(handle, spec=first.spec), ranges), matching

    def _counted(self, spec: PlanSpec) -> tuple[PlanHandle, IntArray | None]:
        table = self.tables.of(spec)
        listed = (spec, table, self.tables.ref, self._recipe.plan)
        matching, surplus = listed_rows(*listed) if spec.order.is_listed else (None, 0)
        num_rows = table.num_rows if matching is None else len(matching)
        handle = PlanHandle(
            spec=spec,
            num_rows=num_rows,
            matching_rows=None,
            schema=pa.schema([]),
            bytes_per_row=1.0,
            surplus_rows=surplus,
        )
        return handle, matching

    def build(
        self,
        handle: PlanHandle,
        ranges: Ranges,
        resolve_rows: Callable[[Any], IntArray | None],
        deadly: Sequence[SkippedRow] = (),
    ) -> tuple[Whole | Sifted, BuildStats]:
        """Returns the block of the given ranges, and what it cost; a ``Sifted`` one if there is a policy.

        Args:
            handle: The plan.
            ranges: Which rows.
            resolve_rows: Turns ``handle.matching_rows`` into an array; called once per plan.
            deadly: Rows among them that kill who reads them: they are not read, but skipped or replaced. Needs a
                policy.

        Raises:
            OSError: The storage; without the values of ``storage_options``.
        """
        spec = handle.spec
        plan = self._plans.get(spec.plan_id, lambda: Plan(spec, handle.num_rows, resolve_rows(handle.matching_rows)))
        block, stats = self.tables.reading(lambda: self._build(plan, ranges, deadly))
        if isinstance(block, Sifted):
            if isinstance(block.rows, pa.Table) and self._fixes_schema:
                block.rows = cast_to(block.rows, handle.schema)
                if handle.with_rows:
                    numbers = plan.rows(block.splits, block.positions)
                    block.rows = numbered(block.rows, numbers, block.positions)
            return block, stats
        block = cast_to(block, handle.schema)
        if handle.with_rows:
            splits, positions = ranges.places()
            block = numbered(block, plan.rows(splits, positions), positions)
        return Whole(block, stats.transform_s), stats

    def left_out(self, error: Exception, row_number: int, split: int, position: int) -> SkippedRow | None:
        """Returns how a row with an error that is not the transform's is left out; None if it is not to be."""
        policy = self._recipe.policy
        return None if policy is None else policy.left_out(error, row_number, split, position)

    @property
    def recipe(self) -> BlockRecipe:
        """What the blocks are made of."""
        return self._recipe

    @property
    def rows_in_transform(self) -> int:
        """Rows that are read, and being transformed or waiting for it."""
        return self._rows_in_transform

    @property
    def _fixes_schema(self) -> bool:
        return not isinstance(self._recipe.transform, RowTransform)

    def _first_plan(self, plan: Plan, num_rows: int, matching: IntArray | None) -> Plan:
        order = plan.spec.order
        epoch = plan.spec.epoch if order.is_listed_per_epoch else 0  # the list at hand; a table's types do not change
        return Plan(PlanSpec(table=plan.spec.table, order=order, epoch=epoch), num_rows, matching)

    def _probe(
        self, plan: Plan, num_rows: int, matching: IntArray | None, deadly: Sequence[SkippedRow]
    ) -> tuple[pa.Table, float]:
        """The first rows of epoch 0, which fix the schema, the same at any resume and world size; and the pace."""
        first = self._first_plan(plan, num_rows, matching)
        splits, cycles = _probed(first)
        if not self._fixes_schema:
            ranges = Ranges(first_split=0, num_splits=splits, start=0, stop=cycles)
            return self.tables.of(plan.spec).take(first.rows(*ranges.places()), self._recipe.columns), 0.0
        start = 0
        while True:
            ranges = Ranges(first_split=0, num_splits=splits, start=start, stop=start + cycles)
            here = [row for row in deadly if ranges.holds(row.split, row.position)]
            block, stats = self._build(first, ranges, here)
            table = block.rows if isinstance(block, Sifted) else block
            assert isinstance(table, pa.Table)
            start, left = start + cycles, first.layout.rows_per_split - start - cycles
            replaced = sum(row.replaced for row in block.skipped) if isinstance(block, Sifted) else 0
            if table.num_rows > replaced:  # what stands in for rows does not say what these look like
                break
            if left <= 0 or start * splits >= _MOST_PROBE_ROWS:
                assert isinstance(block, Sifted)
                known = self._known_schema(plan)
                if known is not None:
                    table = pa.Table.from_batches([], schema=known)
                    break
                if replaced:
                    break
                raise TransformError(
                    explain(
                        f"the transform failed on each of the first {start * splits} rows",
                        found=block.skipped[-1].reason,
                        expected="some rows that come through: they fix the schema of the batches",
                        remedy="correct the transform, or choose other rows with filter",
                    )
                )
            cycles = min(left, cycles * 4)
        return table, self._row_s(first, ranges, here, stats)

    def _row_s(self, first: Plan, ranges: Ranges, deadly: Sequence[SkippedRow], stats: BuildStats) -> float:
        """Returns how long the transform takes for a row, as far as the rows of these ranges, just built, tell."""
        row_s = stats.transform_s / max(1, stats.rows)
        if stats.transform_s <= _SLOW_PROBE_S:
            return row_s
        # It may have been what only a first call does.
        fewer = Ranges(first_split=0, num_splits=1, start=ranges.start, stop=ranges.start + 1)
        _, again = self._build(first, fewer, [row for row in deadly if fewer.holds(row.split, row.position)])
        return min(row_s, again.transform_s) if again.rows else row_s

    def _known_schema(self, plan: Plan) -> pa.Schema | None:
        transform = self._recipe.transform
        schema = self.tables.of(plan.spec).take(np.empty(0, np.int64), self._recipe.columns).schema
        return schema if transform is None else transform.known_schema(schema)

    def _build(
        self, plan: Plan, ranges: Ranges, deadly: Sequence[SkippedRow] = ()
    ) -> tuple[pa.Table | Sifted, BuildStats]:
        splits, positions = ranges.places()
        if deadly:
            spared = {(row.split, row.position) for row in deadly}
            keep = [place not in spared for place in zip(splits.tolist(), positions.tolist(), strict=True)]
            splits, positions = splits[keep], positions[keep]
        rows = plan.rows(splits, positions)
        began = time.perf_counter()
        table = self.tables.of(plan.spec).take(rows, self._recipe.columns)
        taken = time.perf_counter()
        context = TransformContext(
            epoch=plan.spec.epoch,
            row_numbers=rows,
            splits=splits,
            positions=positions,
            seed=plan.spec.order.shuffle_seed,
        )
        with self._transforming(len(rows)):
            block = self._transformed(table, context)
            if deadly:
                block = self._with_deadly(block, ranges, deadly)
        done = time.perf_counter()
        if isinstance(block, Sifted):
            block.read_bytes, block.take_s, block.transform_s = table.nbytes, taken - began, done - taken
        stats = BuildStats(rows=len(rows), num_bytes=block.nbytes, take_s=taken - began, transform_s=done - taken)
        return block, stats

    def _transformed(self, table: pa.Table, context: TransformContext) -> pa.Table | Sifted:
        transform, policy = self._recipe.transform, self._recipe.policy
        if policy is not None and transform is not None and table.num_rows:
            return try_rows(transform, policy, _one_batch(table), context)
        if policy is not None:
            empty: Any = table if transform is None else [] if isinstance(transform, RowTransform) else pa.table({})
            return sifted(empty, context)
        return table if transform is None else transform(_one_batch(table), context)

    def _with_deadly(self, block: pa.Table | Sifted, ranges: Ranges, deadly: Sequence[SkippedRow]) -> Sifted:
        policy = self._recipe.policy
        assert policy is not None and isinstance(block, Sifted)  # else a deadly row is an error
        if policy.warns:
            logger.warning("skipped %d rows that kill their readers; the first: %s", len(deadly), deadly[0].reason)
        return with_left_out(block, policy, ranges, deadly)

    @contextmanager
    def _transforming(self, rows: int) -> Iterator[None]:
        with self._count_lock:
            self._rows_in_transform += rows
        try:
            yield
        finally:
            with self._count_lock:
                self._rows_in_transform -= rows


def _probed(first: Plan) -> tuple[int, int]:
    """Returns how many splits, and how many rows of each, are built first."""
    splits = min(_PROBE_ROWS, first.layout.num_splits)
    return splits, min(first.layout.rows_per_split, max(1, _PROBE_ROWS // splits))


def _one_batch(table: pa.Table) -> pa.RecordBatch:
    batches = table.combine_chunks().to_batches()
    if len(batches) != 1:
        raise TransformError(f"a block of {table.num_rows} rows does not fit one Arrow batch; use smaller blocks")
    return batches[0]
