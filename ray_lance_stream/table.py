"""One version of a LanceDB table, opened for reading rows by number (see ``rownumbers``)."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Final

import lance
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from lance.dataset import serialize_row_addrs
from numpy.typing import NDArray

from ray_lance_stream.errors import ConfigError, LanceStreamError, explain
from ray_lance_stream.plan import TableIdentity
from ray_lance_stream.readable import (
    Source,
    ascending,
    bad_filter,
    check_all_there,
    check_numbers,
    empty_table,
    known_columns,
    listed,
    version_gone,
)
from ray_lance_stream.rownumbers import RowNumbers, fingerprint, gathered
from ray_lance_stream.sqltext import as_lance_reads, check_stable
from ray_lance_stream.storage import is_trouble

_FRAGMENT_READERS: Final = 16


class PinnedTable:
    """One version of a table, open for reading; nothing written later changes what it reads.

    ``take`` and ``matching_rows`` may be called by several threads at once.

    Attributes:
        uri: Where the table's files are.
        version: The version's number.
        identity: What the version is, wherever it lies.
        num_rows: Live rows.
        schema: Of all columns as ``take`` gives them: blob columns are ``large_binary``.
        has_blobs: Whether a column is, or holds, blobs.
    """

    def __init__(self, dataset: lance.LanceDataset, ref: Source) -> None:
        """Takes an open dataset; costs O(fragments), all from the manifest that is in memory already."""
        self._dataset = dataset
        self._ref = ref
        if ticked := [name for name in dataset.schema.names if "`" in name]:
            raise ConfigError(
                explain(
                    f"table {ref.name!r} has columns that Lance can write and cannot read",
                    found=listed([repr(name) for name in ticked]),
                    expected="names without backticks",
                    remedy="rename the columns in a copy of the table",
                )
            )
        fragments = [fragment.metadata for fragment in dataset.get_fragments()]
        self._fragment_ids = np.array([fragment.id for fragment in fragments], np.int64)
        self._physical_rows = np.array([fragment.physical_rows for fragment in fragments], np.int64)
        self._deletions = np.array([fragment.num_deletions for fragment in fragments], np.int64)
        self._numbers: RowNumbers | None = None
        self._lock = threading.Lock()
        self.uri: str = dataset.uri
        self.version: int = dataset.version
        self.num_rows = int(self._physical_rows.sum() - self._deletions.sum())
        self.schema: pa.Schema = dataset.scanner(blob_handling="all_binary").projected_schema
        # Columns that are, or hold, blobs: there a plain take gives descriptors instead of bytes.
        plain = dataset.scanner().projected_schema
        self._blobs = {f.name for f in self.schema if f.type != plain.field(f.name).type}
        self.has_blobs = bool(self._blobs)
        self.identity = TableIdentity(
            version=self.version, fingerprint=fingerprint(fragments, dataset.lance_schema.fields())
        )

    def __str__(self) -> str:
        return f"table {self._ref.name!r}, version {self.version}"

    def __repr__(self) -> str:
        return f"PinnedTable({self._ref.name!r}, version={self.version}, num_rows={self.num_rows})"

    @property
    def dataset(self) -> lance.LanceDataset:
        """The version, open."""
        return self._dataset

    @property
    def fragment_rows(self) -> NDArray[np.int64]:
        """Live rows of each fragment, in the order of row numbers."""
        return self._physical_rows - self._deletions

    @property
    def tags(self) -> Any:
        """Lance's tags of the table; see :mod:`ray_lance_stream.tags`."""
        return self._dataset.tags

    def check_filter(self, filter: str) -> None:
        """Raises ConfigError if a SQL condition cannot work on this version; reads no row."""
        self._checked(filter)

    def _checked(self, filter: str) -> str:
        """Returns a filter as Lance reads it; raises ConfigError if it cannot work."""
        check_stable(filter)
        text = as_lance_reads(filter)
        # In parentheses too: Lance ignores what stands behind the first whole expression.
        for tried in (text, f"({text}\n)"):
            with self._filtering(filter):
                self._dataset.scanner(columns=[], filter=tried, with_row_address=True).explain_plan()
        return text

    def check_columns(self, columns: Sequence[str] | None) -> None:
        """Raises ConfigError if a column does not exist."""
        known_columns(columns, self.schema, self)

    def count_rows(self, filter: str) -> int:
        """Returns how many rows satisfy a SQL condition; raises as :meth:`matching_rows`."""
        text = self._checked(filter)
        with self._filtering(filter):
            # Not the dataset's own count: that says of a filter that fails on a row what it says of storage.
            return int(self._dataset.scanner(columns=[], filter=text, with_row_id=True).count_rows())

    def matching_rows(self, filter: str) -> NDArray[np.int64]:
        """Returns the row numbers of the rows that satisfy a SQL condition, ascending; maybe none.

        Raises:
            ConfigError: The filter is not valid, or fails on a row; carries Lance's message.
            TableVersionError: The version vanished in the meantime.
        """
        text = self._checked(filter)
        with self._reading():
            numbers = self._row_numbers()
        with self._filtering(filter):
            scanner = self._dataset.scanner(columns=[], filter=text, with_row_address=True, scan_in_order=True)
            batches = scanner.to_batches()
            rows = gathered(numbers.from_addresses(batch.column("_rowaddr").to_numpy()) for batch in batches)
        if not ascending(rows):
            rows.sort()  # an index may answer in an order of its own
        return rows

    def numbers_of(self, row_ids: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Returns the row numbers of row ids (``_rowid``); int64, same shape.

        Raises:
            ConfigError: An id is not that of a row of this version.
        """
        with self._reading():
            if self._dataset.has_stable_row_ids:
                known = self._scanner(columns=[], with_row_id=True).to_table().column("_rowid").to_numpy()
                order = np.argsort(known)
                place = np.minimum(np.searchsorted(known, row_ids, sorter=order), max(0, len(known) - 1))
                numbers = order[place]
                there = known[numbers] == row_ids
            else:
                there = self._row_numbers().has(row_ids)
                numbers = self._row_numbers().from_addresses(np.where(there, row_ids, self._first_address()))
        check_all_there(row_ids, there, self)
        return numbers

    def _first_address(self) -> np.uint64:
        return np.uint64(self._row_numbers().to_addresses(np.zeros(1, np.int64))[0])

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
        """
        paths = known_columns(columns, self.schema, self)
        rows = np.asarray(rows)
        check_numbers(rows, self.num_rows, self)
        with self._reading():
            if len(rows) == 0:
                return empty_table(self._scanner(columns=paths).projected_schema)
            if ascending(rows):
                return self._take_ascending(rows, paths)
            distinct, places = np.unique(rows, return_inverse=True)
            table: pa.Table = self._take_ascending(distinct, paths).take(places)
            return table

    def _take_ascending(self, rows: NDArray[np.int64], paths: list[str]) -> pa.Table:
        """Reads ascending, distinct rows. Lists go to Lance: it converts pa.Array one scalar at a time."""
        if not self._blobs.isdisjoint(path.split(".")[0] for path in paths):
            return self._take_with_blobs(rows, paths)
        table: pa.Table
        if not self._deletions.any():
            table = self._dataset.take(rows.tolist(), columns=paths)
        elif self._dataset.has_stable_row_ids:
            table = self._take_by_fragment(rows, paths)
        else:
            # Public `take` counts deleted rows anew for every row number: measured 50 to 500 times slower.
            table = self._dataset._take_rows(self._row_numbers().to_addresses(rows).tolist(), columns=paths)
        if not any("." in path for path in paths):
            return table
        # Takes give the structs, pruned to the wanted fields, where scans give the fields.
        arrays = []
        for path in paths:
            name, *inner = path.split(".")
            arrays.append(pc.struct_field(table.column(name), inner) if inner else table.column(name))
        return pa.Table.from_arrays(arrays, schema=self._scanner(columns=paths).projected_schema)

    def _take_with_blobs(self, rows: NDArray[np.int64], paths: list[str]) -> pa.Table:
        """Reads all columns in one scan of just these rows: the one way that gives blobs as Arrow data."""
        ids = self._row_numbers().to_addresses(rows)
        if self._dataset.has_stable_row_ids:  # the public way, slow if rows were deleted
            ids = self._dataset.take(rows.tolist(), columns=["_rowid"]).column(0).to_numpy()
        allowed = serialize_row_addrs(ids.tolist())
        scanner = self._scanner(columns=paths, row_addr_allowlist=allowed, with_row_address=True)
        table: pa.Table = scanner.to_table()
        found = self._row_numbers().from_addresses(table.column("_rowaddr").to_numpy())
        if not np.array_equal(found, rows):
            raise LanceStreamError(f"Lance did not read the {len(rows)} rows asked for, in order, from {self!r}")
        return table.drop_columns("_rowaddr").combine_chunks()

    def _take_by_fragment(self, rows: NDArray[np.int64], paths: list[str]) -> pa.Table:
        """Reads each fragment's share: where row ids are stable Lance takes no addresses."""
        starts = np.cumsum([0, *self.fragment_rows])
        cuts = np.searchsorted(rows, starts)
        shares = [
            (fragment, (rows[begin:end] - start).tolist())
            for fragment, start, begin, end in zip(self._dataset.get_fragments(), starts, cuts, cuts[1:], strict=False)
            if end > begin
        ]
        with ThreadPoolExecutor(min(len(shares), _FRAGMENT_READERS)) as pool:
            parts = list(pool.map(lambda share: share[0].take(share[1], columns=paths), shares))
        return pa.concat_tables(parts).combine_chunks()

    def _scanner(self, **options: Any) -> lance.LanceScanner:
        return self._dataset.scanner(scan_in_order=True, blob_handling="all_binary", **options)

    def _row_numbers(self) -> RowNumbers:
        with self._lock:
            if self._numbers is None:
                self._numbers = RowNumbers(
                    self._fragment_ids, self._physical_rows, self._deletions, self._deleted_rows()
                )
            return self._numbers

    def _deleted_rows(self) -> NDArray[np.int64]:
        """Returns the deleted rows as offsets in the concatenation of the fragments that have any."""
        fragments = [f for f in self._dataset.get_fragments() if f.num_deletions]
        position, found = 0, [np.empty(0, np.int64)]
        if fragments:
            # A scan with deleted rows gives them a null row id. It reads no column, so it costs about 20 ns a
            # row, and does not depend on how Lance stores deletions.
            scanner = self._scanner(columns=[], with_row_id=True, include_deleted_rows=True, fragments=fragments)
            for batch in scanner.to_batches():
                found.append(np.flatnonzero(batch.column("_rowid").is_null()).astype(np.int64) + position)
                position += batch.num_rows
        return np.concatenate(found)

    @contextmanager
    def _filtering(self, filter: str) -> Iterator[None]:
        """Turns what a filter does wrong into a ConfigError, and what the storage does as ``_reading``."""
        with self._reading():
            try:
                yield
            except (ValueError, RuntimeError) as error:  # the latter where Lance's planner breaks off
                if is_trouble(error) or isinstance(error, LanceStreamError):
                    raise
                raise bad_filter(filter, error, self._ref, self.schema) from self._ref.shown(error)

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Turns a failed read into a TableVersionError if the version is gone; all else may pass by itself.

        Errors of the storage, whatever their type, become OSErrors without credentials.
        """
        try:
            yield
        except LanceStreamError:
            raise
        except (OSError, ValueError, RuntimeError) as error:
            if not isinstance(error, OSError) and not is_trouble(error):
                raise
            present = present_versions(self._dataset)
            missing = present is not None and self.version not in present
            if missing or ("not found" in str(error).lower() and self._was_replaced()):
                raise version_gone(self._ref.name, self.version, present or []) from self._ref.shown(error)
            if isinstance(error, OSError) and self._ref.shown(error) is not None:
                raise
            raise OSError(self._ref.without_secrets(str(error))) from self._ref.shown(error)

    def _was_replaced(self) -> bool:
        """Whether the version's number now belongs to other data: the table was dropped and created anew."""
        try:
            return self._ref.open(self.version).identity != self.identity
        except Exception:
            return False


def present_versions(dataset: lance.LanceDataset) -> list[int] | None:
    """Returns the versions that still exist, ascending; None if even that cannot be read."""
    try:
        return sorted(entry["version"] for entry in dataset.version_refs())
    except Exception:
        return None
