"""One version of a table that has no Lance files to open, read through LanceDB's own API: in memory, or remote."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ray_lance_stream.errors import ConfigError, LanceStreamError, explain
from ray_lance_stream.plan import TableIdentity
from ray_lance_stream.readable import (
    Source,
    bad_filter,
    check_all_there,
    check_numbers,
    empty_table,
    known_columns,
    listed,
    said,
    version_gone,
)
from ray_lance_stream.sqltext import as_lance_reads, check_stable

T = TypeVar("T")
_ID = "_rowid"
# Answers of a server that speak of the request itself: a filter that it cannot read, or that fails on a row.
_REFUSED = (400, 422)


class ApiTable:
    """One version of a table, read by queries; the same interface as ``table.PinnedTable``.

    A row number is an index into the version's row ids. They are fetched when the first row is read, once for each
    open version of a process, and kept: 8 bytes a row.

    Attributes:
        uri: Where the table is, for messages.
        version: The version's number.
        identity: What the version is, in any process.
        num_rows: Live rows.
        schema: Of all columns.
    """

    def __init__(
        self, handle: Any, ref: Source, *, uri: str, identity: TableIdentity, row_ids: NDArray[np.uint64] | None = None
    ) -> None:
        """Takes an open LanceDB table that nobody else uses, checked out at the version.

        Args:
            handle: The table.
            ref: What messages say of where it came from.
            uri: Where it is, for messages.
            identity: What the version is.
            row_ids: By what row ids the version's rows are known, in order of row numbers, if not by the handle's.

        Raises:
            ConfigError: The table has blob columns.
        """
        self._handle = handle
        self._ref = ref
        self._known_ids = row_ids
        self._own_ids: NDArray[np.uint64] | None = None
        self._lock = threading.Lock()
        self.uri = uri
        self.version = identity.version
        self.identity = identity
        with self._reading():
            self.num_rows: int = handle.count_rows()
            self.schema: pa.Schema = handle.schema
            blobs: list[str] = handle.blob_columns()
        if blobs:
            raise _no_blobs(ref.name, blobs)

    def __str__(self) -> str:
        return f"table {self._ref.name!r}, version {self.version}"

    def __repr__(self) -> str:
        return f"ApiTable({self._ref.name!r}, version={self.version}, num_rows={self.num_rows})"

    @property
    def tags(self) -> Any:
        """LanceDB's tags of the table; see :mod:`ray_lance_stream.tags`."""
        return self._handle.tags

    def check_filter(self, filter: str) -> None:
        """Raises ConfigError if a SQL condition cannot work on this version; reads no row."""
        check_stable(filter)
        try:
            self._filtered(filter, lambda text: self._query([_ID]).where(text).explain_plan())
        except OSError:
            # Of a plan that cannot be explained LanceDB does not say whether the server refused it.
            self.count_rows(filter)
            raise

    def check_columns(self, columns: Sequence[str] | None) -> None:
        """Raises ConfigError if a column does not exist."""
        known_columns(columns, self.schema, self)

    def count_rows(self, filter: str) -> int:
        """Returns how many rows satisfy a SQL condition; raises as :meth:`matching_rows`."""
        return int(self._filtered(filter, self._handle.count_rows))

    def matching_rows(self, filter: str) -> NDArray[np.int64]:
        """Returns the row numbers of the rows that satisfy a SQL condition, ascending; maybe none.

        Raises:
            ConfigError: The filter is not valid, or fails on a row; carries LanceDB's message.
            TableVersionError: The version vanished in the meantime.
        """
        found = self._filtered(filter, lambda text: self._query([_ID]).where(text).to_arrow())
        numbers, there = _places(self._row_ids(), found.column(_ID).to_numpy())
        if not there.all():
            raise LanceStreamError(f"a filter found rows in {self!r} that a query without it does not")
        return np.sort(numbers)

    def numbers_of(self, row_ids: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Returns the row numbers of row ids (``_rowid``); int64, same shape.

        Raises:
            ConfigError: An id is not that of a row of this version.
        """
        known = self._row_ids() if self._known_ids is None else self._known_ids
        numbers, there = _places(known, np.asarray(row_ids, np.uint64))
        check_all_there(row_ids, there, self)
        return numbers

    def take(self, rows: NDArray[np.int64], columns: Sequence[str] | None) -> pa.Table:
        """Reads rows by number, in the order given; repeats are allowed.

        Args:
            rows: Row numbers, int64, shape (n,); n may be 0.
            columns: Columns in the wanted order, None for all. ``"a.b"`` reads field b of struct a, as a
                column of that name; null where the struct is.

        Returns:
            A table of n rows, each column in one chunk.

        Raises:
            ConfigError: An unknown column, or a row number out of range.
            TableVersionError: The version vanished in the meantime.
            OSError: The server did not answer; without credentials.
        """
        paths = known_columns(columns, self.schema, self)
        rows = np.asarray(rows)
        check_numbers(rows, self.num_rows, self)
        schema = pa.schema([_field(self.schema, path) for path in paths]).with_metadata(self.schema.metadata)
        if len(rows) == 0:
            return empty_table(schema)
        distinct, places = np.unique(rows, return_inverse=True)
        ids = self._row_ids()[distinct]
        with self._reading():
            # One query for all: it gives every row once, in an order of its own.
            found = self._handle.take_row_ids(ids.tolist()).select([*paths, _ID]).to_arrow()
        order, there = _places(found.column(_ID).to_numpy(), ids)
        if found.num_rows != len(ids) or not there.all():
            raise LanceStreamError(
                explain(
                    f"LanceDB did not give the rows asked for from {self!r}",
                    found=f"{found.num_rows} rows, {int(there.sum())} of them asked for",
                    expected=f"{len(ids)} rows",
                    remedy="check that the table was not dropped and created anew",
                )
            )
        table = found.select(paths).take(pa.array(order[places])).combine_chunks()
        return pa.Table.from_arrays(table.columns, schema=schema)

    def _query(self, columns: list[str]) -> Any:
        return self._handle.search().select(columns)

    def _row_ids(self) -> NDArray[np.uint64]:
        """Returns the handle's row ids in order of row numbers."""
        with self._lock:
            if self._own_ids is None:
                with self._reading():
                    self._own_ids = ordered_ids(self._handle)
                if len(self._own_ids) != self.num_rows:
                    raise LanceStreamError(f"a query of {self!r} gave {len(self._own_ids)} row ids")
            return self._own_ids

    def _filtered(self, filter: str, ask: Callable[[str], T]) -> T:
        """Asks what a filter finds, given as LanceDB and servers alike read it."""
        text = as_lance_reads(filter)
        with self._reading():
            try:
                return ask(text)
            except Exception as error:  # also that LanceDB's planner broke off, which has a type of its own
                if is_remote(self._handle) and getattr(error, "status_code", None) not in _REFUSED:
                    raise
                raise bad_filter(filter, error, self._ref, self.schema) from self._ref.shown(error)

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Turns a failed read into a TableVersionError if the version is gone, else into an OSError."""
        try:
            yield
        except LanceStreamError:
            raise
        except Exception as error:
            present = present_versions(self._handle)
            if present is not None and self.version not in present:
                raise version_gone(self._ref.name, self.version, present) from self._ref.shown(error)
            text = self._ref.without_secrets(f"{type(error).__name__}: {said(error)}")
            raise OSError(f"reading {self._ref.name!r} version {self.version} failed: {text}") from self._ref.shown(
                error
            )


def is_remote(table: Any) -> bool:
    """Whether an object is a table of ``lancedb.connect("db://...")``."""
    return any(kind.__module__ == "lancedb.remote.table" for kind in type(table).__mro__)


def is_in_memory(table: Any) -> bool:
    """Whether an object is a table of ``lancedb.connect("memory://")``."""
    kinds = {f"{kind.__module__}.{kind.__name__}" for kind in type(table).__mro__}
    return "lancedb.table.LanceTable" in kinds and str(table._conn.uri).startswith("memory://")


def ordered_ids(handle: Any) -> NDArray[np.uint64]:
    """Returns the row ids of an open table in order of row numbers.

    In memory that is scan order, as with tables that lie in files. A server promises no order, so of remote tables
    it is ascending; LanceDB's permutations hold to the same.
    """
    ids = handle.search().select([_ID]).to_arrow().column(_ID).to_numpy()
    return np.sort(ids) if is_remote(handle) else ids


def present_versions(handle: Any) -> list[int] | None:
    """Returns the versions that still exist, ascending; None if even that cannot be read."""
    try:
        return sorted(entry["version"] for entry in handle.list_versions())
    except Exception:
        return None


def check_out(handle: Any, version: int) -> None:
    """Moves a handle to a version; raises TableVersionError if there is no such version."""
    try:
        handle.checkout(int(version))
    except Exception as error:
        present = present_versions(handle)
        if present is None or version in present:  # the trouble is another one
            raise
        raise version_gone(handle.name, version, present) from error


def _places(ids: NDArray[np.uint64], wanted: NDArray[np.uint64]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Returns where wanted ids stand among ids, in any order, and which of them do; same shape as ``wanted``."""
    if len(ids) == 0:
        return np.zeros(len(wanted), np.int64), np.zeros(len(wanted), np.bool_)
    if np.all(ids[1:] >= ids[:-1]):
        places = np.minimum(np.searchsorted(ids, wanted), len(ids) - 1)
    else:
        order = np.argsort(ids)
        places = order[np.minimum(np.searchsorted(ids, wanted, sorter=order), len(ids) - 1)]
    return places, ids[places] == wanted


def _field(schema: pa.Schema, path: str) -> pa.Field[Any]:
    """Returns the field that a query gives for a path; "a.b" may be null where a or b may."""
    name, *inner = path.split(".") if path not in schema.names else [path]
    field = schema.field(name)
    nullable = field.nullable
    for part in inner:
        field = field.type.field(part)
        nullable |= field.nullable
    return field.with_name(path).with_nullable(nullable)


def _no_blobs(name: str, blobs: Sequence[str]) -> ConfigError:
    return ConfigError(
        explain(
            f"table {name!r} has blob columns, which cannot be read in blocks through LanceDB's API",
            found=listed(list(blobs)),
            expected="other columns, or a table whose Lance files can be opened",
            remedy="pass the uri of the storage itself, e.g. s3://bucket/path",
        )
    )
