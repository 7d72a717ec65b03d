"""What every open table version offers, whatever it is read with; and the checks and messages they share."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from typing import Any, Final, Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ray_lance_stream.errors import ConfigError, StateMismatchError, TableVersionError, explain
from ray_lance_stream.plan import TableIdentity
from ray_lance_stream.sqltext import has_double_quotes

_RUST_PLACE: Final = re.compile(r",? /[\w./@-]+\.rs:\d+:\d+")  # where Lance's own source raised
_SHOWN: Final = 20  # names or version ranges listed in a message


class ReadableTable(Protocol):
    """One version of a table, open for reading; nothing written later changes what it reads.

    Rows are known by row number, 0 to ``num_rows - 1``. ``take`` and ``matching_rows`` may be called by several
    threads at once.

    Attributes:
        uri: Where the table is.
        version: The version's number.
        identity: What the version is, in any process.
        num_rows: Live rows.
        schema: Of all columns as ``take`` gives them.
    """

    uri: str
    version: int
    identity: TableIdentity
    num_rows: int
    schema: pa.Schema

    def check_filter(self, filter: str) -> None:
        """Raises ConfigError if a SQL condition cannot work on this version; reads no row."""

    def check_columns(self, columns: Sequence[str] | None) -> None:
        """Raises ConfigError if a column does not exist."""

    def count_rows(self, filter: str) -> int:
        """Returns how many rows satisfy a SQL condition."""

    def matching_rows(self, filter: str) -> NDArray[np.int64]:
        """Returns the row numbers of the rows that satisfy a SQL condition, ascending; maybe none."""

    def numbers_of(self, row_ids: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Returns the row numbers of row ids (``_rowid``); int64, same shape."""

    def take(self, rows: NDArray[np.int64], columns: Sequence[str] | None) -> pa.Table:
        """Reads rows by number, in the order given; repeats are allowed."""


class Source(Protocol):
    """What messages say of where a table came from; a ``location.TableRef``."""

    @property
    def name(self) -> str:
        """The table's name."""

    def open(self, version: int | None) -> ReadableTable:
        """Opens a version anew."""

    def without_secrets(self, text: str) -> str:
        """Returns a text without credentials."""

    def shown(self, error: Exception) -> Exception | None:
        """Returns an error that may be chained."""


def known_columns(columns: Sequence[str] | None, schema: pa.Schema, table: object) -> list[str]:
    """Returns the columns to read, all for None.

    Args:
        columns: Names; ``"a.b"`` is field b of struct a.
        schema: The table's.
        table: What messages call it.

    Raises:
        ConfigError: A column does not exist or is named twice, or there is none.
    """
    if columns is None:
        return list(schema.names)
    paths = [path for field in schema for path in _paths(field)]
    unknown = [column for column in columns if column not in paths]
    if unknown or not columns or len(set(columns)) < len(columns):
        near = [n for c in unknown for n in difflib.get_close_matches(c, paths)]
        raise ConfigError(
            explain(
                f"columns do not exist in {table}" if unknown else "columns are empty or named twice",
                found=listed([repr(column) for column in unknown or columns]),
                expected=f"some of {listed(paths)}, each once",
                remedy=f"did you mean {' or '.join(map(repr, dict.fromkeys(near)))}" if near else "correct columns",
            )
        )
    return list(columns)


def check_numbers(rows: NDArray[np.int64], num_rows: int, table: object) -> None:
    """Raises ConfigError if row numbers are out of range.

    Args:
        rows: Row numbers, shape (n,).
        num_rows: Rows of the table.
        table: What messages call it.
    """
    if len(rows) and (rows.dtype.kind not in "iu" or rows.min() < 0 or rows.max() >= num_rows):
        raise ConfigError(
            explain(
                f"row numbers are out of range in {table}",
                found=f"{rows.min()} to {rows.max()} ({rows.dtype})",
                expected=f"integers from 0 to {num_rows - 1}",
                remedy="take the rows of a plan that was made for this version",
            )
        )


def check_all_there(row_ids: NDArray[np.uint64], there: NDArray[np.bool_], table: object) -> None:
    """Raises ConfigError if not every row id is that of a row of the version.

    Args:
        row_ids: Row ids, shape (n,).
        there: Which of them are; shape (n,).
        table: What messages call the version.
    """
    if not there.all():
        missing = row_ids[~there]
        raise ConfigError(
            explain(
                f"the plan names rows that are not in {table}",
                found=f"{len(missing)} of {len(row_ids)} row ids, e.g. {missing[0]}",
                expected="ids of its live rows",
                remedy="pin the version the plan was made for with version=, or make the plan anew",
            )
        )


def check_identity(table: ReadableTable, expected: TableIdentity, source: Source) -> None:
    """Raises StateMismatchError if a version that was opened is not the one that is meant."""
    if table.identity != expected:
        raise StateMismatchError(
            explain(
                "table differs: the version of that number holds other data",
                found=f"table {source.name!r}, version {table.version}, with fingerprint {table.identity.fingerprint}",
                expected=f"fingerprint {expected.fingerprint}, as when the stream or its state was made",
                remedy="point the stream to the original table (a copied or moved one will do); "
                "if it was dropped and created anew, start a new run",
            ),
            "table",
            expected,
            table.identity,
        )


def empty_table(schema: pa.Schema) -> pa.Table:
    """Returns no rows, each column in one chunk. (``Schema.empty_table()`` fails for some tensor types.)"""

    def column(kind: Any) -> Any:
        if isinstance(kind, pa.BaseExtensionType):
            return pa.ExtensionArray.from_storage(kind, pa.array([], kind.storage_type))
        return pa.array([], kind)

    return pa.Table.from_arrays([column(field.type) for field in schema], schema=schema)


def bad_filter(filter: str, error: Exception, source: Source, schema: pa.Schema) -> ConfigError:
    """Returns the error that says a filter does not work, with the reader's message."""
    strings = "; strings stand in single quotes, and what is in double quotes is a column"
    return ConfigError(
        explain(
            f"filter {filter!r} does not work on table {source.name!r}",
            found=_RUST_PLACE.sub("", source.without_secrets(str(error))).rstrip(". "),
            expected=f"a SQL condition on the columns {listed(schema.names)}",
            remedy="correct the filter" + (strings if has_double_quotes(filter) else ""),
        )
    )


def said(error: Exception) -> str:
    """Returns what an error says, and its cause: where a client gave up trying, that is what the server answered."""
    return str(error) if error.__cause__ is None else f"{error} ({error.__cause__})"


def ascending(rows: NDArray[np.int64]) -> bool:
    """Whether the rows ascend without repeats."""
    return bool(np.all(rows[1:] > rows[:-1]))


def listed(names: Sequence[str]) -> str:
    """Returns the names with commas, the first ones if there are many."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return (", ".join(names[:_SHOWN]) or "(none)") + more


def version_gone(name: str, version: int, present: Sequence[int]) -> TableVersionError:
    """Returns the error that says a version cannot be read.

    Args:
        name: The table's name.
        version: The version.
        present: Those that exist, ascending.
    """
    edges = [v for i, v in enumerate(present) if i == 0 or v != present[i - 1] + 1]
    ends = [v for i, v in enumerate(present) if i == len(present) - 1 or v != present[i + 1] - 1]
    ranges = [str(a) if a == b else f"{a}-{b}" for a, b in zip(edges, ends, strict=True)]
    return TableVersionError(
        explain(
            f"version {version} of table {name!r} cannot be read: it was cleaned up, or the table was "
            "dropped and created anew, or there never was such a version",
            found=f"versions {listed(ranges[::-1])}",
            expected=f"version {version}",
            remedy="restore the table from a copy that has this version, or start afresh on a version that "
            "exists; LanceStream(protect_version='the run') keeps the version of the next run alive",
        )
    )


def _paths(field: pa.Field[Any], parent: str = "") -> Iterator[str]:
    """Yields the dotted names of a field and of the fields of its structs."""
    path = f"{parent}{field.name}"
    yield path
    if pa.types.is_struct(field.type):
        for child in field.type:
            yield from _paths(child, f"{path}.")
