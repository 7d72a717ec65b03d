"""One version of a LanceDB table, opened for reading rows by number.

A *row number* is an offset in the version's scan order with deletions applied, 0 to num_rows - 1: fragment
after fragment in manifest order, live rows only. An *address* is Lance's own (fragment id << 32) | offset in
the fragment, deleted rows counted.
"""

from __future__ import annotations

import difflib
import hashlib
import inspect
import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import lance
import lancedb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from lance.dataset import serialize_row_addrs
from numpy.typing import NDArray

from ray_lance_stream.errors import ConfigError, LanceStreamError, TableVersionError, explain
from ray_lance_stream.plan import TableIdentity

_FINGERPRINT_FORMAT: Final = 1
_FRAGMENT_READERS: Final = 16
_SHOWN: Final = 20  # names or version ranges listed in a message


@dataclass(frozen=True, kw_only=True)
class TableRef:
    """How to open a table again, in any process; picklable.

    Attributes:
        uri: The database, as for ``lancedb.connect``. A relative local path is made absolute here, since
            other processes have other working directories.
        name: The table's name.
        storage_options: Options of the object store; their values are never shown, as they hold secrets.
        connection_factory: Called with the name, returns the open table; instead of ``uri``.

    Raises:
        ConfigError: Not exactly one of uri and connection_factory, or a database that cannot be read.
    """

    uri: str | None = None
    name: str
    storage_options: Mapping[str, str] | None = field(default=None, hash=False)
    connection_factory: Callable[[str], lancedb.table.Table] | None = None

    def __post_init__(self) -> None:
        if (self.uri is None) == (self.connection_factory is None):
            raise ConfigError(
                explain(
                    f"table {self.name!r} needs one way to open it",
                    found="neither" if self.uri is None else "both",
                    expected="one of uri and connection_factory",
                    remedy="pass one of them",
                )
            )
        if self.storage_options is not None:
            if self.connection_factory is not None:
                raise ConfigError(
                    explain(
                        "storage_options have no effect beside connection_factory",
                        found="both",
                        expected="storage_options with uri only",
                        remedy="give the options to lancedb.connect inside the factory",
                    )
                )
            # A plain dict of our own: it pickles, and later changes by the caller do not reach it.
            object.__setattr__(self, "storage_options", dict(self.storage_options))
        if self.uri is not None and "://" not in self.uri:
            object.__setattr__(self, "uri", os.path.abspath(os.path.expanduser(self.uri)))

    def __repr__(self) -> str:
        options = None if self.storage_options is None else dict.fromkeys(self.storage_options, "***")
        return (
            f"TableRef(uri={self.uri!r}, name={self.name!r}, storage_options={options}, "
            f"connection_factory={self.connection_factory!r})"
        )

    def open(self, version: int | None = None) -> PinnedTable:
        """Opens one version for reading: the latest at this moment if ``version`` is None.

        Where the factory returns a table checked out at a version, that one counts as the latest.

        Raises:
            ConfigError: The database or the table is missing, or cannot be opened.
            TableVersionError: The version was cleaned up, or never existed.
        """
        dataset = self._open_latest()
        if version is not None and version != dataset.version:
            try:
                dataset = dataset.checkout_version(int(version))
            except Exception as error:
                present = _present_versions(dataset)
                if present is None or version in present:  # the trouble is another one
                    raise self._cannot_open(error) from self.shown(error)
                raise _version_gone(self.name, version, present) from self.shown(error)
        return PinnedTable(dataset, self)

    def _open_latest(self) -> lance.LanceDataset:
        database = None
        try:
            if self.connection_factory is not None:
                table = self.connection_factory(self.name)
            else:
                database = self._connect()
                table = database.open_table(self.name)
            to_lance = getattr(table, "to_lance", None)
            if to_lance is None or inspect.iscoroutinefunction(to_lance):
                raise NotImplementedError
            dataset: lance.LanceDataset = to_lance()
            return dataset
        except ConfigError:
            raise
        except NotImplementedError:
            raise _not_local(self.name) from None
        except Exception as error:
            missing = None if database is None else self._missing(database)
            raise missing or self._cannot_open(error) from self.shown(error)

    def _connect(self) -> lancedb.DBConnection:
        uri = str(self.uri)
        if uri.startswith("db://"):
            raise _not_local(self.name)
        if "://" not in uri and not os.path.isdir(uri):
            # lancedb.connect would create the directory: a typing error must not leave a database behind.
            raise ConfigError(
                explain(
                    f"the database of table {self.name!r} does not exist",
                    found=uri,
                    expected="a directory that LanceDB has written",
                    remedy="check uri",
                )
            )
        options = None if self.storage_options is None else dict(self.storage_options)
        return lancedb.connect(uri, storage_options=options)

    def _missing(self, database: lancedb.DBConnection) -> ConfigError | None:
        """Returns the error to raise if the database has no such table, or None."""
        try:
            names = sorted(database.list_tables().tables)
        except Exception:
            return None  # what went wrong before says more than this
        if self.name in names:
            return None
        near = difflib.get_close_matches(self.name, names)
        return ConfigError(
            explain(
                f"table {self.name!r} does not exist",
                found=f"these tables in {self.uri}: {_listed(names)}",
                expected="the name of one of them",
                remedy=f"did you mean {' or '.join(near)}?" if near else "check uri and the table's name",
            )
        )

    def _cannot_open(self, error: Exception) -> ConfigError:
        return ConfigError(
            explain(
                f"table {self.name!r} cannot be opened",
                found=self.without_secrets(f"{type(error).__name__}: {error}"),
                expected="a LanceDB table",
                remedy="check connection_factory" if self.uri is None else "check uri and storage_options",
            )
        )

    def without_secrets(self, text: str) -> str:
        """Returns ``text`` with every value of ``storage_options`` replaced by ``***``."""
        values = {str(value) for value in (self.storage_options or {}).values()} - {"true", "false"}
        for value in sorted(values, key=len, reverse=True):
            if len(value) > 3:  # "1" and the like are no secrets, and would eat the message
                text = text.replace(value, "***")
        return text

    def shown(self, error: Exception) -> Exception | None:
        """Returns the error to chain; None if a traceback with its text would show a secret."""
        return error if self.without_secrets(str(error)) == str(error) else None


class PinnedTable:
    """One version of a table, open for reading; nothing written later changes what it reads.

    ``take`` and ``matching_rows`` may be called by several threads at once.

    Attributes:
        version: The version's number.
        identity: What the version is, wherever it lies.
        num_rows: Live rows.
        schema: Of all columns as ``take`` gives them: blob columns are ``large_binary``.
    """

    def __init__(self, dataset: lance.LanceDataset, ref: TableRef) -> None:
        """Takes an open dataset; costs O(fragments), all from the manifest that is in memory already."""
        self._dataset = dataset
        self._ref = ref
        fragments = [fragment.metadata for fragment in dataset.get_fragments()]
        self._fragment_ids = np.array([fragment.id for fragment in fragments], np.int64)
        self._physical_rows = np.array([fragment.physical_rows for fragment in fragments], np.int64)
        self._deletions = np.array([fragment.num_deletions for fragment in fragments], np.int64)
        self._numbers: _RowNumbers | None = None
        self._lock = threading.Lock()
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

    def matching_rows(self, filter: str) -> NDArray[np.int64]:
        """Returns the row numbers of the rows that satisfy a SQL condition, ascending; maybe none.

        Raises:
            ConfigError: The filter is not valid, or fails on a row; carries Lance's message.
            TableVersionError: The version vanished in the meantime.
        """
        with self._reading():
            numbers = self._row_numbers()
            found = [np.empty(0, np.int64)]
            try:
                scanner = self._dataset.scanner(
                    columns=[], filter=filter, with_row_address=True, scan_in_order=True
                )
                for batch in scanner.to_batches():
                    found.append(numbers.from_addresses(batch.column("_rowaddr").to_numpy()))
            except ValueError as error:
                raise ConfigError(
                    explain(
                        f"filter {filter!r} does not work on table {self._ref.name!r}",
                        found=self._ref.without_secrets(str(error)),
                        expected=f"a SQL condition on the columns {_listed(self.schema.names)}",
                        remedy="correct the filter",
                    )
                ) from self._ref.shown(error)
        rows = np.concatenate(found)
        return rows if _ascending(rows) else np.sort(rows)  # an index may answer in an order of its own

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
                empty: pa.Table = self._scanner(columns=paths).projected_schema.empty_table()
                return empty
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
            raise LanceStreamError(
                f"Lance did not read the {len(rows)} rows asked for, in order, from {self!r}"
            )
        return table.drop_columns("_rowaddr").combine_chunks()

    def _take_by_fragment(self, rows: NDArray[np.int64], paths: list[str]) -> pa.Table:
        """Reads each fragment's share: where row ids are stable Lance takes no addresses."""
        starts = np.cumsum([0, *(self._physical_rows - self._deletions)])
        cuts = np.searchsorted(rows, starts)
        shares = [
            (fragment, (rows[begin:end] - start).tolist())
            for fragment, start, begin, end in zip(
                self._dataset.get_fragments(), starts, cuts, cuts[1:], strict=False
            )
            if end > begin
        ]
        with ThreadPoolExecutor(min(len(shares), _FRAGMENT_READERS)) as pool:
            parts = list(pool.map(lambda share: share[0].take(share[1], columns=paths), shares))
        return pa.concat_tables(parts).combine_chunks()

    def _scanner(self, **options: Any) -> lance.LanceScanner:
        return self._dataset.scanner(scan_in_order=True, blob_handling="all_binary", **options)

    def _row_numbers(self) -> _RowNumbers:
        with self._lock:
            if self._numbers is None:
                self._numbers = _RowNumbers(
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
            scanner = self._scanner(
                columns=[], with_row_id=True, include_deleted_rows=True, fragments=fragments
            )
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
                    f"columns do not exist in {self!r}" if unknown else "columns are empty or named twice",
                    found=_listed([repr(column) for column in unknown or columns]),
                    expected=f"some of {_listed(self._paths)}, each once",
                    remedy=f"did you mean {' or '.join(dict.fromkeys(near))}?" if near else "correct columns",
                )
            )
        return list(columns)

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Turns a failed read into a TableVersionError if the version's files are gone."""
        try:
            yield
        except OSError as error:
            present = _present_versions(self._dataset)
            missing = present is not None and self.version not in present
            if missing or "not found" in str(error).lower():
                raise _version_gone(self._ref.name, self.version, present or []) from self._ref.shown(error)
            raise


class _RowNumbers:
    """Converts between row numbers and addresses of one version; O(fragments + deleted rows) memory.

    Both go through the *physical* number: the offset in scan order with deleted rows counted.
    """

    def __init__(
        self,
        ids: NDArray[np.int64],
        sizes: NDArray[np.int64],
        counts: NDArray[np.int64],
        deleted: NDArray[np.int64],
    ) -> None:
        """Takes what is known of each fragment, in manifest order, and where deleted rows are.

        Args:
            ids: Fragment ids.
            sizes: Physical rows of each fragment.
            counts: Deleted rows of each fragment.
            deleted: Ascending offsets in the concatenation of the fragments that have deletions.
        """
        self._ids = ids
        self._by_id = np.argsort(ids)  # compaction may leave ids that do not ascend
        self._starts = np.cumsum(sizes) - sizes
        touched = counts > 0
        ends = np.cumsum(sizes[touched])
        place = np.searchsorted(ends, deleted, side="right")
        if not np.array_equal(np.bincount(place, minlength=len(ends)), counts[touched]):
            raise LanceStreamError("the deleted rows that Lance scans are not those that the manifest counts")
        self._deleted = deleted + (self._starts[touched] - (ends - sizes[touched]))[place]
        # Number of live rows before each deleted row; ascending, as each counts the same or more.
        self._live_before = self._deleted - np.arange(len(self._deleted))

    def to_addresses(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the addresses of row numbers; int64, same shape."""
        physical = rows + np.searchsorted(self._live_before, rows, side="right")
        place = np.searchsorted(self._starts, physical, side="right") - 1
        addresses: NDArray[np.int64] = (self._ids[place] << 32) + physical - self._starts[place]
        return addresses

    def from_addresses(self, addresses: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Returns the row numbers of live rows' addresses; int64, same shape."""
        fragment = (addresses >> np.uint64(32)).astype(np.int64)
        offset = (addresses & np.uint64(0xFFFFFFFF)).astype(np.int64)
        place = self._by_id[np.searchsorted(self._ids, fragment, sorter=self._by_id)]
        physical = self._starts[place] + offset
        return physical - np.searchsorted(self._deleted, physical)


def fingerprint(fragments: Sequence[lance.FragmentMetadata], fields: Sequence[Any]) -> str:
    """Returns a digest of what a version's rows and columns are read from, 32 hex characters.

    Data and deletion files have random names, so equal digests mean the same files. Where they lie (URI,
    base paths of a clone) does not count. Field ids and names count, since renaming a column, or adding
    one without data, changes no file. Types do not: a changed type comes with a new field id.

    Args:
        fragments: The fragments in manifest order.
        fields: The top-level fields of the version's Lance schema.
    """

    def named(field: Any) -> list[Any]:
        return [field.id(), field.name(), [named(child) for child in field.children()]]

    def stored(file: Any) -> list[Any]:
        return [file.path, list(file.fields), list(file.column_indices)]

    def summary(fragment: lance.FragmentMetadata) -> list[Any]:
        gone = fragment.deletion_file
        return [
            fragment.id,
            fragment.physical_rows,
            [stored(file) for file in fragment.files],
            None if gone is None else [gone.read_version, gone.id, gone.num_deleted_rows],
            [[stored(overlay.data_file), overlay.committed_version] for overlay in fragment.overlays],
        ]

    parts = [_FINGERPRINT_FORMAT, [named(f) for f in fields], [summary(f) for f in fragments]]
    return hashlib.sha256(json.dumps(parts, separators=(",", ":")).encode()).hexdigest()[:32]


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


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return (", ".join(names[:_SHOWN]) or "(none)") + more


def _present_versions(dataset: lance.LanceDataset) -> list[int] | None:
    """Returns the versions that still exist, ascending; None if even that cannot be read."""
    try:
        return sorted(entry["version"] for entry in dataset.version_refs())
    except Exception:
        return None


def _version_gone(name: str, version: int, present: Sequence[int]) -> TableVersionError:
    edges = [v for i, v in enumerate(present) if i == 0 or v != present[i - 1] + 1]
    ends = [v for i, v in enumerate(present) if i == len(present) - 1 or v != present[i + 1] - 1]
    ranges = [str(a) if a == b else f"{a}-{b}" for a, b in zip(edges, ends, strict=True)]
    return TableVersionError(
        explain(
            f"version {version} of table {name!r} cannot be read: it was cleaned up, or the table was "
            "dropped and created anew, or there never was such a version",
            found=f"versions {_listed(ranges[::-1])}",
            expected=f"version {version}",
            remedy="restore the table from a copy that has this version, or start afresh on a version that "
            "exists; to keep versions alive, tag them or clean up later than the run ends",
        )
    )


def _not_local(name: str) -> ConfigError:
    return ConfigError(
        explain(
            f"table {name!r} does not give access to its Lance files",
            found="a remote (db://) or asynchronous table",
            expected="a table on a file system or object store, opened with lancedb.connect",
            remedy="pass the uri of the storage itself, e.g. s3://bucket/path",
        )
    )
