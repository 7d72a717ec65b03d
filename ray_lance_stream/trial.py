"""Runs a transform on rows of which some may fail: on ever smaller parts, until it is known which."""

from __future__ import annotations

import logging
import pickle
from typing import Any, Final

import numpy as np
import pyarrow as pa

from ray_lance_stream.columns import cast_to, to_table
from ray_lance_stream.sifting import ErrorPolicy, Sifted, SkippedRow
from ray_lance_stream.transform import RowTransform, Transform, TransformContext, UserError

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
        if not policy.tolerates(error.user_error):
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
        rows = to_table([policy.replacement.value] * len(trial.replaced), len(trial.replaced))
        both = rows if table is None else pa.concat_tables([table, cast_to(rows, table.schema)])
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
        if not self._policy.tolerates(error.user_error):
            raise error
        replacement = self._policy.replacement
        self.skipped.append(
            SkippedRow(
                row_number=int(self._context.row_numbers[row]),
                split=int(self._context.splits[row]),
                position=int(self._context.positions[row]),
                reason=f"{type(error.user_error).__name__}: {error.user_error}",
                replaced=replacement is not None,
            )
        )
        if replacement is not None:
            self.kept[row] = replacement.value
            self.replaced.add(row)


def sifted(rows: Any, context: TransformContext, skipped: tuple[SkippedRow, ...] = ()) -> Sifted:
    """Returns a block of the rows of a context, in its order."""
    return Sifted(
        rows=rows,
        splits=context.splits,
        positions=context.positions,
        nbytes=_weight(rows) if isinstance(rows, list) else rows.nbytes,
        skipped=skipped,
    )


def _weight(rows: list[Any]) -> int:
    """Estimates the bytes of a list of objects from a few of them, as pickle would write them."""
    if not rows:
        return 0
    sample = rows[:: max(1, len(rows) // _SAMPLE)][:_SAMPLE]
    try:
        return len(pickle.dumps(sample)) * len(rows) // len(sample)
    except Exception:  # what cannot be pickled can be handed out all the same, in this process
        return 1024 * len(rows)
