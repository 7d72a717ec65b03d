"""Where the rows of a batch come from: which rows of the table they are, and which places of the plan they fill."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import pyarrow as pa

from ray_lance_stream.errors import ConfigError, explain
from ray_lance_stream.permutation import IntArray
from ray_lance_stream.plan import Plan
from ray_lance_stream.request import PlanHandle
from ray_lance_stream.topology import StepPlan, shares

PREFIX: Final = "_stream_"  # of the columns that a batch is given; the stream's own may not begin so
ROW, POSITION = f"{PREFIX}row", f"{PREFIX}position"  # a prefetcher adds these, which it knows
# int64 columns, in this order behind the batch's own.
COLUMNS: Final = (ROW, f"{PREFIX}split", POSITION, f"{PREFIX}epoch", f"{PREFIX}step", f"{PREFIX}index")
_ROW_BYTES: Final = 16


def saying_rows(handle: PlanHandle) -> PlanHandle:
    """Returns the plan as one whose blocks say which rows of the table theirs are.

    Raises:
        ConfigError: A column of the stream has a reserved name.
    """
    taken = [name for name in handle.schema.names if name.startswith(PREFIX)]
    if taken:
        raise ConfigError(
            explain(
                f"with_rows adds columns whose names begin with {PREFIX!r}, and the stream has such a column",
                found=taken,
                expected=f"no column that begins with {PREFIX!r}",
                remedy="leave it out with columns=, or give it another name in the transform",
            )
        )
    return replace(handle, with_rows=True, bytes_per_row=handle.bytes_per_row + _ROW_BYTES)


def numbered(block: pa.Table, rows: IntArray, positions: IntArray) -> pa.Table:
    """Returns a block with the row numbers and positions of its rows; int64, shape (rows,)."""
    return block.append_column(ROW, pa.array(rows)).append_column(POSITION, pa.array(positions))


@dataclass(frozen=True, kw_only=True, eq=False)
class Origin:
    """Where a batch comes from.

    Attributes:
        handle: The plan of its epoch.
        steps: The steps of the epoch.
        owned: The splits of the replica it was made for.
        rows: Its rows, counted within the replica's rows of the epoch: row i is the one of cycle ``i // w`` and of
            the ``i % w``-th owned split, w = number of owned splits.
        numbers: Their row numbers, int64, shape (rows,); None where the blocks did not say.
        positions: Their positions in their splits; likewise.
    """

    handle: PlanHandle
    steps: StepPlan
    owned: range
    rows: range
    numbers: IntArray | None = None
    positions: IntArray | None = None

    @classmethod
    def of(cls, handle: PlanHandle, steps: StepPlan, owned: range, rows: range, parts: Sequence[pa.Table]) -> Origin:
        """Returns the origin of consecutive parts of blocks. What it keeps of them it copies."""
        if not handle.with_rows:
            return cls(handle=handle, steps=steps, owned=owned, rows=rows)
        numbers, positions = (
            np.concatenate([chunk.to_numpy() for part in parts for chunk in part.column(name).chunks])
            for name in (ROW, POSITION)
        )
        return cls(handle=handle, steps=steps, owned=owned, rows=rows, numbers=numbers, positions=positions)

    @property
    def epoch(self) -> int:
        """The epoch."""
        return self.handle.spec.epoch

    @property
    def step(self) -> int:
        """The step, counted from 1: what ``shard.step`` says at its end."""
        return self.steps.step_of(self.rows.start // len(self.owned)) + 1

    def splits(self) -> IntArray:
        """Returns the split of every row."""
        return self.owned.start + np.arange(self.rows.start, self.rows.stop, dtype=np.int64) % len(self.owned)

    def indexes(self) -> IntArray:
        """Returns the index of every row in the global batch."""
        cycles = np.arange(self.rows.start, self.rows.stop, dtype=np.int64) // len(self.owned)
        return (cycles - (self.step - 1) * self.steps.cycles_per_step) * self.steps.num_splits + self.splits()

    def marked(self, parts: Sequence[pa.Table]) -> Sequence[pa.Table]:
        """Returns the parts with all of ``COLUMNS``, if their blocks say which rows they hold."""
        if not self.handle.with_rows:
            return parts
        _, split, _, epoch, step, index = COLUMNS
        columns = {split: self.splits(), index: self.indexes()}
        columns |= {name: np.full(len(self.rows), value) for name, value in ((epoch, self.epoch), (step, self.step))}
        marked, start = [], 0
        for part in parts:
            own = [name for name in part.column_names if name not in COLUMNS]
            for name, values in columns.items():
                part = part.append_column(name, pa.array(values[start : start + part.num_rows]))
            marked.append(part.select([*own, *COLUMNS]))
            start += part.num_rows
        return marked

    def table(self, world_size: int) -> pa.Table:
        """Returns what :func:`explained` does, for this batch.

        Raises:
            ConfigError: Its blocks did not say which rows they hold, and that is no closed form.
        """
        numbers, positions = self.numbers, self.positions
        if numbers is None or positions is None:
            positions = np.arange(self.rows.start, self.rows.stop, dtype=np.int64) // len(self.owned)
            numbers = self._plan().rows(self.splits(), positions)
        columns = (numbers, self.splits(), positions, np.int64(self.epoch), np.int64(self.step), self.indexes())
        return _explained(*columns, num_splits=self.steps.num_splits, world_size=world_size)

    def _plan(self) -> Plan:
        matching = self.handle.matching_rows
        if matching is None or isinstance(matching, np.ndarray):
            return Plan(self.handle.spec, self.handle.num_rows, matching)
        raise unknown_rows("an order that is a list of rows, which only the prefetchers hold")


def unknown_rows(why: str) -> ConfigError:
    """Returns the error for a batch that does not say which rows it holds."""
    return ConfigError(
        explain(
            "which rows the batch holds is not known here",
            found=why,
            expected=f"a batch with the columns {list(COLUMNS)}",
            remedy="iterate with with_rows=True",
        )
    )


def explained(batch: Any, *, num_splits: int, world_size: int) -> pa.Table:
    """Returns where the rows of a batch come from, as ``ray-lance-stream explain`` says it.

    Args:
        batch: A batch that was made with ``with_rows=True``, in any format: columns by name.
        num_splits: Splits of the stream.
        world_size: Number of replicas.

    Returns:
        int64 columns, one row per row: ``epoch``; ``step``, counted from 1; ``index`` in the global batch; ``split``;
        ``position`` in the split; ``row`` number in the table version; ``rank`` of the replica that gets it; and
        ``rank_index`` in that replica's part of the step.

    Raises:
        ConfigError: The batch does not say it.
    """
    names = getattr(batch, "column_names", None)
    names = list(batch) if names is None and isinstance(batch, Iterable) else names
    if names is None or any(name not in names for name in COLUMNS):
        found = f"a {type(batch).__name__}" + ("" if names is None else f" of {[str(name) for name in names][:20]}")
        raise unknown_rows(found)
    columns = [_int64(batch[name]) for name in COLUMNS]
    return _explained(*columns, num_splits=num_splits, world_size=world_size)


def _explained(
    rows: IntArray,
    splits: IntArray,
    positions: IntArray,
    epochs: IntArray | np.int64,
    steps: IntArray | np.int64,
    indexes: IntArray,
    *,
    num_splits: int,
    world_size: int,
) -> pa.Table:
    ranks, rank_indexes = shares(splits, indexes // num_splits, num_splits, world_size)
    return pa.table(
        {
            "epoch": np.broadcast_to(epochs, rows.shape),
            "step": np.broadcast_to(steps, rows.shape),
            "index": indexes,
            "split": splits,
            "position": positions,
            "row": rows,
            "rank": ranks,
            "rank_index": rank_indexes,
        }
    )


def _int64(values: Any) -> IntArray:
    if hasattr(values, "detach"):  # a tensor, wherever it lies
        values = values.detach().cpu()
    elif isinstance(values, (pa.ChunkedArray, pa.Array)):
        values = values.to_numpy()
    return np.asarray(values, dtype=np.int64)
