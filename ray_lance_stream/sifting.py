"""Rows that fail: what happens to them, and blocks that say which of their rows came through.

Light to import: trainers know these types, and have no use for Lance.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from ray_lance_stream.errors import ConfigError, TransformError, explain, shown
from ray_lance_stream.permutation import IntArray


@dataclass(frozen=True)
class ReplaceRow:
    """``on_transform_error=ReplaceRow(value)``: a row that fails becomes ``value``, so that none is missing.

    Attributes:
        value: The row: a dict of values by column for a stream, one of the token column where rows are packed, and
            whatever the transform makes of a row for a ``StreamingDataset``.
    """

    value: Any


OnTransformError = Literal["raise", "skip", "warn"] | Callable[[Exception], bool] | ReplaceRow


@dataclass(frozen=True)
class SkippedRow:
    """A row that was left out.

    Attributes:
        row_number: Its number in the table version.
        split: The split it belongs to.
        position: Its position in the split.
        reason: The exception of the transform, as text.
        replaced: Whether another row stands in its place.
    """

    row_number: int
    split: int
    position: int
    reason: str
    replaced: bool = False


class ErrorPolicy:
    """What ``on_transform_error`` says.

    Args:
        on_transform_error: "raise" ends the iteration with the error; "skip" leaves the row out; "warn" does so
            and says it; a function of the exception returns whether to leave the row out; a :class:`ReplaceRow`
            puts another row in its place. With prefetchers it holds as well for a row that kills every process that
            reads it, by running out of memory say; the error is then a ``DeadlyRowError``.

    Raises:
        ConfigError: It is none of these.
    """

    def __init__(self, on_transform_error: OnTransformError) -> None:
        known = on_transform_error in ("raise", "skip", "warn") if isinstance(on_transform_error, str) else False
        if not known and not callable(on_transform_error) and not isinstance(on_transform_error, ReplaceRow):
            raise _unknown_policy(on_transform_error, "pass 'skip' to leave failing rows out")
        if isinstance(on_transform_error, type):  # called with an error it makes an object, which says nothing
            remedy = "pass a function of the exception that returns whether to leave the row out"
            if issubclass(on_transform_error, ReplaceRow):
                remedy = "pass ReplaceRow(value), with the row that stands in for one that fails"
            elif issubclass(on_transform_error, BaseException):
                remedy = f"pass lambda error: isinstance(error, {on_transform_error.__name__})"
            raise _unknown_policy(on_transform_error, remedy)
        self._choice = on_transform_error

    @property
    def raises(self) -> bool:
        """Whether every error ends the iteration."""
        return self._choice == "raise"

    @property
    def warns(self) -> bool:
        """Whether skipped rows are told of."""
        return self._choice == "warn"

    @property
    def replacement(self) -> ReplaceRow | None:
        """What stands in for failing rows."""
        return self._choice if isinstance(self._choice, ReplaceRow) else None

    def tolerates(self, error: Exception, where: str) -> bool:
        """Whether the iteration goes on after an error of the transform.

        Args:
            error: The error.
            where: Which rows it is about, for messages.

        Raises:
            TransformError: ``on_transform_error`` is a function, and has failed itself.
        """
        if callable(self._choice):
            try:
                return bool(self._choice(error))
            except Exception as raised:
                raise TransformError(
                    explain(
                        f"on_transform_error failed when it was asked about {where}",
                        found=f"{_named(raised)}; it was asked about {_named(error)}",
                        expected="a function of the exception that returns whether to leave the row out",
                        remedy="correct the function",
                    )
                ) from raised
        return not self.raises

    def left_out(self, error: Exception, row_number: int, split: int, position: int) -> SkippedRow | None:
        """Returns how a row with this error is left out or replaced; None if it ends the iteration."""
        if not self.tolerates(error, f"row {row_number} of the table (split {split}, position {position})"):
            return None
        return SkippedRow(
            row_number=row_number,
            split=split,
            position=position,
            reason=_named(error),
            replaced=self.replacement is not None,
        )


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


@dataclass(kw_only=True)
class Sifted:
    """A block of which rows may be missing, or whose rows are Python objects.

    Attributes:
        rows: The rows that came through, in canonical order: a table, or a list of objects.
        splits: Split of each row; int64, shape (rows,).
        positions: Position of each row in its split; int64, shape (rows,).
        skipped: The rows that did not.
        objects_bytes: Size of the rows if they are objects, estimated.
        read_bytes: Bytes that were read for it.
        take_s: Seconds of reading.
        transform_s: Seconds of transforming.
    """

    rows: pa.Table | list[Any]
    splits: IntArray
    positions: IntArray
    objects_bytes: int = 0
    skipped: tuple[SkippedRow, ...] = ()
    read_bytes: int = 0
    take_s: float = 0.0
    transform_s: float = 0.0

    def __len__(self) -> int:
        return len(self.splits)

    @property
    def nbytes(self) -> int:
        """Size in memory."""
        rows = self.objects_bytes if isinstance(self.rows, list) else int(self.rows.nbytes)
        return rows + self.splits.nbytes + self.positions.nbytes


@dataclass(frozen=True)
class Whole:
    """A block that has every row it was asked for.

    Attributes:
        rows: The rows, in canonical order.
        transform_s: Seconds of transforming.
    """

    rows: pa.Table
    transform_s: float = 0.0

    @property
    def nbytes(self) -> int:
        """Size in memory."""
        return int(self.rows.nbytes)


@dataclass
class SkipLog:
    """The rows a consumer has seen skipped: how many, and the last ones by name.

    Attributes:
        count: All of them.
        rows: The last ``limit``.
    """

    limit: int = 10_000
    count: int = 0
    rows: list[SkippedRow] = field(default_factory=list)

    def add(self, skipped: tuple[SkippedRow, ...]) -> None:
        """Notes rows that were skipped."""
        self.count += sum(not row.replaced for row in skipped)
        self.rows.extend(skipped)
        del self.rows[: -self.limit]

    def copy(self) -> SkipLog:
        """Returns a log of its own with the same rows."""
        return SkipLog(self.limit, self.count, list(self.rows))

    def merge(self, other: SkipLog) -> None:
        """Notes what another log has."""
        self.count += other.count
        self.rows.extend(other.rows)
        del self.rows[: -self.limit]


def gather(blocks: list[Sifted], which: IntArray, index: IntArray) -> pa.Table | list[Any]:
    """Returns rows of several blocks in one order: row ``index[k]`` of block ``which[k]`` for every k."""
    if isinstance(blocks[0].rows, list):
        objects: list[list[Any]] = [block.rows for block in blocks]  # type: ignore[misc]
        return [objects[b][i] for b, i in zip(which.tolist(), index.tolist(), strict=True)]
    starts = np.cumsum([0, *(len(block) for block in blocks)])
    flat = starts[which] + index
    tables: list[pa.Table] = [block.rows for block in blocks]  # type: ignore[misc]
    table = tables[0] if len(tables) == 1 else pa.concat_tables(tables)
    if len(flat) and flat[-1] - flat[0] == len(flat) - 1 and bool(np.all(np.diff(flat) == 1)):
        return table.slice(int(flat[0]), len(flat))
    return table.take(flat)


def joined(blocks: list[Any]) -> Whole | Sifted:
    """Returns consecutive parts of a block (``Whole``, or ``Sifted`` ones) as one."""
    if isinstance(blocks[0], Whole):
        table = pa.concat_tables([block.rows for block in blocks]).combine_chunks()
        return Whole(table, sum(block.transform_s for block in blocks))
    parts: list[Sifted] = blocks
    rows: list[Any] = [part.rows for part in parts]
    return Sifted(
        rows=[row for part in rows for row in part] if isinstance(rows[0], list) else pa.concat_tables(rows),
        splits=np.concatenate([part.splits for part in parts]),
        positions=np.concatenate([part.positions for part in parts]),
        objects_bytes=sum(part.objects_bytes for part in parts),
        skipped=tuple(row for part in parts for row in part.skipped),
        read_bytes=sum(part.read_bytes for part in parts),
        take_s=sum(part.take_s for part in parts),
        transform_s=sum(part.transform_s for part in parts),
    )


def _unknown_policy(found: object, remedy: str) -> ConfigError:
    return ConfigError(
        explain(
            "on_transform_error must be 'raise', 'skip', 'warn', a callable or a ReplaceRow",
            found=shown(found),
            expected="one of these" + (", not a class" if isinstance(found, type) else ""),
            remedy=remedy,
        )
    )
