"""Runs a transform on rows of which some may fail: on ever smaller parts, until it is known which."""

from __future__ import annotations

import dataclasses
import logging
import pickle
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa

from ray_lance_stream.columns import OutputError, cast_to, to_table
from ray_lance_stream.errors import TransformError, explain, shown
from ray_lance_stream.request import Ranges
from ray_lance_stream.rowcontext import TransformContext
from ray_lance_stream.sifting import ErrorPolicy, ReplaceRow, Sifted, SkippedRow
from ray_lance_stream.transform import RowTransform, Transform, UserError

logger = logging.getLogger("ray_lance_stream")
_SAMPLE: Final = 8  # objects weighed to estimate what a list of them takes


def try_rows(transform: Transform, policy: ErrorPolicy, batch: pa.RecordBatch, context: TransformContext) -> Sifted:
    """Returns what came through of a batch, and which rows did not.

    Raises:
        TransformError: The policy does not tolerate the error, or the output is none for these rows.
    """
    try:
        return sifted(transform(batch, context), context)
    except UserError as error:
        numbers = shown(context.row_numbers.tolist())
        if not policy.tolerates(error.user_error, f"a batch of the table's rows {numbers}"):
            raise
    trial = _Trial(transform, policy, batch, context)
    trial.run(0, batch.num_rows)
    if policy.warns and trial.skipped:
        reason = trial.skipped[0].reason
        logger.warning("skipped %d of %d rows; the first: %s", len(trial.skipped), batch.num_rows, reason)
    kept = np.array(sorted(trial.kept), np.int64)
    if isinstance(transform, RowTransform):
        return sifted([trial.kept[row] for row in kept.tolist()], context.take(kept), tuple(trial.skipped))
    # Once more, together: alone, a row may have got narrower types than its neighbours give it.
    good = np.array([row for row in kept.tolist() if row not in trial.replaced], np.int64)
    table = transform(batch.take(good), context.take(good)) if len(good) else None
    if trial.replaced and policy.replacement is not None:
        rows = replacements(policy.replacement, len(trial.replaced), None if table is None else table.schema)
        both = rows if table is None else pa.concat_tables([table, rows])
        places = np.concatenate([good, np.array(sorted(trial.replaced), np.int64)])
        table = both.take(np.argsort(places))
    return sifted(pa.table({}) if table is None else table, context.take(kept), tuple(trial.skipped))


class _Trial:
    def __init__(
        self, transform: Transform, policy: ErrorPolicy, batch: pa.RecordBatch, context: TransformContext
    ) -> None:
        self._transform = transform
        self._policy = policy
        self._batch = batch
        self._context = context
        self.kept: dict[int, Any] = {}  # row -> its object, if the transform makes objects
        self.replaced: set[int] = set()
        self.skipped: list[SkippedRow] = []

    def run(self, start: int, stop: int) -> None:
        """Tries the rows of a part that has failed as a whole, by halves."""
        if stop - start == 1:
            self._attempt(start, stop)
            return
        middle = (start + stop) // 2
        for low, high in ((start, middle), (middle, stop)):
            if not self._attempt(low, high):
                self.run(low, high)

    def _attempt(self, start: int, stop: int) -> bool:
        """Whether nothing is left to be done for these rows."""
        count = stop - start
        try:
            output = self._transform(self._batch.slice(start, count), self._context.slice(start, count))
        except UserError as error:
            if count > 1:
                return False
            self._left_out(start, error)
            return True
        objects = output if isinstance(output, list) else [None] * count
        self.kept.update(zip(range(start, stop), objects, strict=True))
        return True

    def _left_out(self, row: int, error: UserError) -> None:
        context = self._context
        place = int(context.row_numbers[row]), int(context.splits[row]), int(context.positions[row])
        skipped = self._policy.left_out(error.user_error, *place)
        if skipped is None:
            raise error
        self.skipped.append(skipped)
        if self._policy.replacement is not None:
            self.kept[row] = self._policy.replacement.value
            self.replaced.add(row)


def with_left_out(block: Sifted, policy: ErrorPolicy, ranges: Ranges, rows: Sequence[SkippedRow]) -> Sifted:
    """Returns a block with rows that were left out of it beforehand: skipped, or replaced in their places."""
    splits, positions = ranges.places()
    turn = {place: number for number, place in enumerate(zip(splits.tolist(), positions.tolist(), strict=True))}
    skipped = tuple(sorted((*block.skipped, *rows), key=lambda row: turn[row.split, row.position]))
    replacement = policy.replacement
    if replacement is None:
        return dataclasses.replace(block, skipped=skipped)
    places = [*zip(block.splits.tolist(), block.positions.tolist(), strict=True)]
    places += [(row.split, row.position) for row in rows]
    order = np.argsort([turn[place] for place in places])
    if isinstance(block.rows, list):
        objects = [*block.rows, *[replacement.value] * len(rows)]
        both: Any = [objects[index] for index in order.tolist()]
    else:
        both = replacements(replacement, len(rows), block.rows.schema if len(block) else None)
        if len(block):
            both = pa.concat_tables([block.rows, both])
        both = both.take(order)
    where = np.array(places, np.int64)[order]
    splits, positions = where[:, 0].copy(), where[:, 1].copy()
    weight = _objects_bytes(both)
    return dataclasses.replace(
        block, rows=both, splits=splits, positions=positions, skipped=skipped, objects_bytes=weight
    )


def replacements(replacement: ReplaceRow, count: int, schema: pa.Schema | None) -> pa.Table:
    """Returns so many rows that stand in for others, with the schema of these if it is known.

    Raises:
        TransformError: The value is no row of the stream.
    """
    try:
        table = to_table([replacement.value] * count, count)
        return table if schema is None else cast_to(table, schema)
    except (OutputError, TransformError) as error:
        columns = "" if schema is None else ": " + ", ".join(f"{field.name} ({field.type})" for field in schema)
        raise TransformError(
            explain(
                f"on_transform_error=ReplaceRow({shown(replacement.value)}) does not hold a row of the stream",
                found=_what_differs(str(error)),
                expected=f"a dict with a value for each column of the batches{columns}",
                remedy="pass ReplaceRow such a dict",
            )
        ) from error.__cause__


def _what_differs(text: str) -> str:
    """Returns what a message about a block's columns says of a single row: that alone, without its remedy."""
    said = text.split(" Expected:")[0].rstrip(".")
    return said.replace("A block ", "It ").replace(" of a block does", " does")


def sifted(rows: Any, context: TransformContext, skipped: tuple[SkippedRow, ...] = ()) -> Sifted:
    """Returns a block of the rows of a context, in its order."""
    return Sifted(
        rows=rows,
        splits=context.splits,
        positions=context.positions,
        objects_bytes=_objects_bytes(rows),
        skipped=skipped,
    )


def _objects_bytes(rows: Any) -> int:
    """Estimates the bytes of a list of objects from a few of them, as pickle would write them; 0 for a table."""
    if not isinstance(rows, list) or not rows:
        return 0
    sample = rows[:: max(1, len(rows) // _SAMPLE)][:_SAMPLE]
    try:
        return len(pickle.dumps(sample)) * len(rows) // len(sample)
    except Exception:  # what cannot be pickled can be handed out all the same, in this process
        return 1024 * len(rows)
