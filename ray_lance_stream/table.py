"""One version of a LanceDB table, opened for reading rows by number (see ``rownumbers``)."""

from __future__ import annotations

import difflib
import re
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Final, Protocol

import lance
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from lance.dataset import serialize_row_addrs
from numpy.typing import NDArray

from ray_lance_stream.errors import ConfigError, LanceStreamError, TableVersionError, explain
from ray_lance_stream.plan import TableIdentity
from ray_lance_stream.rownumbers import RowNumbers, fingerprint

_FRAGMENT_READERS: Final = 16
_VOLATILE: Final = re.compile(
    r"\b(random|rand|uuid|now|current_date|current_time|current_timestamp|today)\s*\(", re.IGNORECASE
)
_RUST_PLACE: Final = re.compile(r",? /[\w./@-]+\.rs:\d+:\d+")  # where Lance's own source raised
_SHOWN: Final = 20  # names or version ranges listed in a message


class Source(Protocol):
    """What messages say of where a table came from; a ``location.TableRef``."""

    @property
    def name(self) -> str:
        """The table's name."""

    def open(self, version: int | None) -> PinnedTable:
        """Opens a version anew."""

    def without_secrets(self, text: str) -> str:
        """Returns a text without credentials."""

    def shown(self, error: Exception) -> Exception | None:
        """Returns an error that may be chained."""


class PinnedTable:
    """One version of a table, open for reading; nothing written later changes what it reads.

    ``take`` and ``matching_rows`` may be called by several threads at once.

    Attributes:
        uri: Where the table's files are.
        version: The version's number.
        identity: What the version is, wherever it lies.
        num_rows: Live rows.
        schema: Of all columns as ``take`` gives them: blob columns are ``large_binary``.
    """

    def __init__(self, dataset: lance.LanceDataset, ref: Source) -> None:
        """Takes an open dataset; costs O(fragments), all from the manifest that is in memory already."""
        self._dataset = dataset
        self._ref = ref
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
        self._paths = [path for f in self.schema for path in _paths(f)]
        self.identity = TableIdentity(
            version=self.version, fingerprint=fingerprint(fragments, dataset.lance_schema.fields())
        )

    def __repr__(self) -> str:
        return f"PinnedTable({self._ref.name!r}, version={self.version}, num_rows={self.num_rows})"

    def check_filter(self, filter: str) -> None:
        """Raises ConfigError if a SQL condition cannot work on this version; reads no row."""
        if volatile := _VOLATILE.search(filter):
            raise ConfigError(
                explain(
                    f"filter {filter!r} does not mean the same rows every time",
                    found=f"{volatile.group(1)}()",
                    expected="a condition that depends on the row alone",
                    remedy="write the value itself, or store it in a column",
                )
            )
        with self._reading():
            # In parentheses too: Lance ignores what stands behind the first whole expression.
            for text in (filter, f"({filter}\n)"):
                try:
                    self._dataset.scanner(columns=[], filter=text, with_row_address=True).explain_plan()
                except ValueError as error:
                    raise self._bad_filter(filter, error) from self._ref.shown(error)

    def check_columns(self, columns: Sequence[str] | None) -> None:
        """Raises ConfigError if a column does not exist."""
        self._known(columns)

    def count_rows(self, filter: str) -> int:
        """Returns how many rows satisfy a SQL condition; raises as :meth:`matching_rows`."""
        self.check_filter(filter)
        with self._reading():
            try:
                return int(self._dataset.count_rows(filter=filter))
            except ValueError as error:
                raise self._bad_filter(filter, error) from self._ref.shown(error)

    def matching_rows(self, filter: str) -> NDArray[np.int64]:
        """Returns the row numbers of the rows that satisfy a SQL condition, ascending; maybe none.

        Raises:
            ConfigError: The filter is not valid, or fails on a row; carries Lance's message.
            TableVersionError: The version vanished in the meantime.
        """
        self.check_filter(filter)
        with self._reading():
            numbers = self._row_numbers()
            found = [np.empty(0, np.int64)]
            try:
                scanner = self._dataset.scanner(columns=[], filter=filter, with_row_address=True, scan_in_order=True)
                for batch in scanner.to_batches():
                    found.append(numbers.from_addresses(batch.column("_rowaddr").to_numpy()))
            except ValueError as error:
                raise self._bad_filter(filter, error) from self._ref.shown(error)
        rows = np.concatenate(found)
        return rows if _ascending(rows) else np.sort(rows)  # an index may answer in an order of its own

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
        if not there.all():
            missing = row_ids[~there]
            raise ConfigError(
                explain(
                    f"the plan names rows that are not in {self!r}",
                    found=f"{len(missing)} of {len(row_ids)} row ids, e.g. {missing[0]}",
                    expected="ids of its live rows",
                    remedy="pin the version the plan was made for with version=, or make the plan anew",
                )
            )
        return numbers

    def _first_address(self) -> np.uint64:
        return np.uint64(self._row_numbers().to_addresses(np.zeros(1, np.int64))[0])

    def _bad_filter(self, filter: str, error: Exception) -> ConfigError:
        return ConfigError(
            explain(
                f"filter {filter!r} does not work on table {self._ref.name!r}",
                found=_RUST_PLACE.sub("", self._ref.without_secrets(str(error))),
                expected=f"a SQL condition on the columns {listed(self.schema.names)}",
                remedy="correct the filter",
            )
        )

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
        paths = self._known(columns)
        rows = np.asarray(rows)
        if len(rows) and (rows.dtype.kind not in "iu" or rows.min() < 0 or rows.max() >= self.num_rows):
            raise ConfigError(
                explain(
                    f"row numbers are out of range in {self!r}",
                    found=f"{rows.min()} to {rows.max()} ({rows.dtype})",
                    expected=f"integers from 0 to {self.num_rows - 1}",
                    remedy="take the rows of a plan that was made for this version",
                )
            )
        with self._reading():
            if len(rows) == 0:
                return _empty(self._scanner(columns=paths).projected_schema)
            if _ascending(rows):
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
        starts = np.cumsum([0, *(self._physical_rows - self._deletions)])
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

    def _known(self, columns: Sequence[str] | None) -> list[str]:
        if columns is None:
            return list(self.schema.names)
        unknown = [column for column in columns if column not in self._paths]
        if unknown or not columns or len(set(columns)) < len(columns):
            near = [n for c in unknown for n in difflib.get_close_matches(c, self._paths)]
            raise ConfigError(
                explain(
                    f"columns do not exist in table {self._ref.name!r}, version {self.version}"
                    if unknown
                    else "columns are empty or named twice",
                    found=listed([repr(column) for column in unknown or columns]),
                    expected=f"some of {listed(self._paths)}, each once",
                    remedy=f"did you mean {' or '.join(map(repr, dict.fromkeys(near)))}" if near else "correct columns",
                )
            )
        return list(columns)

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Turns a failed read into a TableVersionError if the version is gone; all else may pass by itself."""
        try:
            yield
        except OSError as error:
            present = present_versions(self._dataset)
            missing = present is not None and self.version not in present
            if missing or ("not found" in str(error).lower() and self._was_replaced()):
                raise version_gone(self._ref.name, self.version, present or []) from self._ref.shown(error)
            raise

    def _was_replaced(self) -> bool:
        """Whether the version's number now belongs to other data: the table was dropped and created anew."""
        try:
            return self._ref.open(self.version).identity != self.identity
        except Exception:
            return False


def _empty(schema: pa.Schema) -> pa.Table:
    """Returns no rows, each column in one chunk. (``Schema.empty_table()`` fails for some tensor types.)"""

    def column(kind: Any) -> Any:
        if isinstance(kind, pa.BaseExtensionType):
            return pa.ExtensionArray.from_storage(kind, pa.array([], kind.storage_type))
        return pa.array([], kind)

    return pa.Table.from_arrays([column(field.type) for field in schema], schema=schema)


def _paths(field: pa.Field[Any], parent: str = "") -> Iterator[str]:
    """Yields the dotted names of a field and of the fields of its structs."""
    path = f"{parent}{field.name}"
    yield path
    if pa.types.is_struct(field.type):
        for child in field.type:
            yield from _paths(child, f"{path}.")


def _ascending(rows: NDArray[np.int64]) -> bool:
    """Whether the rows ascend without repeats."""
    return bool(np.all(rows[1:] > rows[:-1]))


def listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return (", ".join(names[:_SHOWN]) or "(none)") + more


def present_versions(dataset: lance.LanceDataset) -> list[int] | None:
    """Returns the versions that still exist, ascending; None if even that cannot be read."""
    try:
        return sorted(entry["version"] for entry in dataset.version_refs())
    except Exception:
        return None


def version_gone(name: str, version: int, present: Sequence[int]) -> TableVersionError:
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
            "exists; to keep versions alive, tag them or clean up later than the run ends",
        )
    )
