"""Where tables without Lance files are, and how they get to other processes: in memory, or on a server."""

from __future__ import annotations

import copy
import hashlib
import io
import json
import threading
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ray_lance_stream.apitable import ApiTable, is_in_memory, is_remote, ordered_ids, present_versions
from ray_lance_stream.errors import ConfigError, TableVersionError, explain
from ray_lance_stream.plan import TableIdentity
from ray_lance_stream.readable import Source, version_gone

_ROWS_PER_DIGEST: Final = 1 << 16  # a multiple of 8, so that bitmaps are cut at whole bytes
_FORMAT: Final = 1  # of fingerprints


class ApiSource(Protocol):
    """A way to open versions of one table, each by a handle of its own; picklable."""

    @property
    def uri(self) -> str:
        """Where the table is, for messages."""

    def at(self, version: int, /) -> ApiSource:
        """Returns a source that has at least this version when it gets to another process."""

    def handle(self, version: int | None) -> Any:
        """Opens a LanceDB table at a version, the latest for None; the user's own table stays where it is."""

    def open(self, version: int | None, ref: Source) -> ApiTable:
        """Opens a version for reading."""

    def original_ids(self, row_ids: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Returns by what ids rows are known that have these in tables of :meth:`handle`."""

    def secrets(self) -> set[str]:
        """Returns texts that no message may show."""


def source_of(table: Any, *, fresh: bool = False) -> ApiSource | None:
    """Returns the source of a table in memory or on a server; None for all other objects.

    Args:
        table: An open LanceDB table.
        fresh: Nobody else uses it.
    """
    if is_remote(table):
        return RemoteSource(table, fresh=fresh)
    return MemorySource(table) if is_in_memory(table) else None


class MemorySource:
    """A table of this process's memory. Pickled, it becomes a :class:`MemoryCopy`."""

    def __init__(self, table: Any, version: int | None = None) -> None:
        """Takes the open table, and the version that goes along to other processes (None: where the table is then)."""
        self._table = table
        self._version = version
        self._fingerprints: dict[int, str] = {}  # by version; each costs a pass over the data

    @property
    def uri(self) -> str:
        """Where the table is, for messages."""
        return f"memory://{self._table.name}"

    def at(self, version: int, /) -> MemorySource:
        """Returns a source that has this version when it gets to another process."""
        other = copy.copy(self)
        other._version = version
        return other

    def handle(self, version: int | None) -> Any:
        """Opens the table at a version."""
        table = self._table
        version = table.version if version is None else version
        handle = table._conn.open_table(table.name, namespace_path=list(table._namespace_path or []) or None)
        _check_out(handle, version)
        return handle

    def open(self, version: int | None, ref: Source) -> ApiTable:
        """Opens a version for reading; reads it once, to know what it holds."""
        handle = self.handle(version)
        identity = TableIdentity(version=handle.version, fingerprint=self._fingerprint(handle))
        return ApiTable(handle, ref, uri=self.uri, identity=identity)

    def original_ids(self, row_ids: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Returns the ids as they are."""
        return row_ids

    def secrets(self) -> set[str]:
        """Returns none: there are no credentials."""
        return set()

    def _fingerprint(self, handle: Any) -> str:
        version = handle.version
        if version not in self._fingerprints:
            self._fingerprints[version] = _digest_of_rows(handle.to_arrow())
        return self._fingerprints[version]

    def __reduce__(self) -> tuple[Any, ...]:
        handle = self.handle(self._version)
        return (
            MemoryCopy,
            (self._table.name, handle.version, self._fingerprint(handle), handle.to_arrow(), ordered_ids(handle)),
        )


@dataclass(eq=False)
class MemoryCopy:
    """One version of a table of another process's memory, whole.

    Attributes:
        name: The table's name.
        version: The version's number where it came from.
        fingerprint: That of the original.
        data: The rows in order of row numbers.
        row_ids: The original's row ids; uint64, shape (rows,).
    """

    name: str
    version: int
    fingerprint: str
    data: pa.Table | None = field(repr=False)
    row_ids: NDArray[np.uint64] = field(repr=False)

    def __post_init__(self) -> None:
        self._table: Any = None  # holds the rows instead of ``data``, once it is made
        self._lock = threading.Lock()

    @property
    def uri(self) -> str:
        """Where the table is, for messages."""
        return f"memory://{self.name}"

    def at(self, _: int, /) -> MemoryCopy:
        """Returns itself."""
        return self

    def handle(self, version: int | None) -> Any:
        """Opens the copy, which has a version number of its own.

        Raises:
            TableVersionError: Another version than the one that was sent.
        """
        if version not in (None, self.version):
            raise TableVersionError(
                explain(
                    f"version {version} of table {self.name!r} is not in this process's memory",
                    found=f"version {self.version}, which was sent here",
                    expected=f"version {version}",
                    remedy=f"check the table out at version {version} before the stream is made, "
                    "or keep it in a database on disk",
                )
            )
        with self._lock:
            if self._table is None:
                import lancedb

                self._table = lancedb.connect("memory://").create_table(self.name, self.data)
                self.data = None
        return MemorySource(self._table).handle(None)

    def open(self, version: int | None, ref: Source) -> ApiTable:
        """Opens the version for reading."""
        identity = TableIdentity(version=self.version, fingerprint=self.fingerprint)
        return ApiTable(self.handle(version), ref, uri=self.uri, identity=identity, row_ids=self.row_ids)

    def original_ids(self, row_ids: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Returns the original's ids of rows that have these here."""
        own = ordered_ids(self.handle(None))
        order = np.argsort(own)
        return self.row_ids[order[np.searchsorted(own, row_ids, sorter=order)]]

    def secrets(self) -> set[str]:
        """Returns none: there are no credentials."""
        return set()

    def __reduce__(self) -> tuple[Any, ...]:
        with self._lock:
            data = self.data if self._table is None else self._table.to_arrow()
        return MemoryCopy, (self.name, self.version, self.fingerprint, data, self.row_ids)


class RemoteSource:
    """A table on a server. Pickled, it carries what LanceDB needs to connect again: the API key, too."""

    def __init__(self, table: Any, *, fresh: bool = False) -> None:
        """Takes the open table; ``fresh`` if nobody else uses it, so that it may be moved to a version."""
        self._table = table
        self._fresh = fresh

    @property
    def uri(self) -> str:
        """Where the table is, for messages."""
        return f"db://{self._table.db_name}/{self._table.name}"

    def at(self, _: int, /) -> RemoteSource:
        """Returns itself: a server has all versions."""
        return self

    def handle(self, version: int | None) -> Any:
        """Opens the table at a version, over a connection of its own.

        Raises:
            ConfigError: The table's connection cannot be opened again.
            TableVersionError: The version was cleaned up, or never existed.
        """
        version = self._table.version if version is None else version
        try:
            self._connection()
            handle = copy.copy(self._table)  # LanceDB reopens it as after pickling
        except ConfigError:
            if not self._fresh:
                raise
            handle = self._table
        _check_out(handle, version)
        return handle

    def open(self, version: int | None, ref: Source) -> ApiTable:
        """Opens a version for reading."""
        handle = self.handle(version)
        version = int(handle.version)
        identity = TableIdentity(version=version, fingerprint=self._fingerprint(handle, version))
        return ApiTable(handle, ref, uri=self.uri, identity=identity)

    def original_ids(self, row_ids: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Returns the ids as they are."""
        return row_ids

    def secrets(self) -> set[str]:
        """Returns the API key, and the values of headers and storage options."""
        try:
            connection = self._connection()
        except ConfigError:
            return set()  # headers that a function provides are not known here
        headers = (connection.get("client_config") or {}).get("extra_headers") or {}
        options = connection.get("storage_options") or {}
        return {str(value) for value in (connection.get("api_key"), *headers.values(), *options.values()) if value}

    def _fingerprint(self, handle: Any, version: int) -> str:
        """A server says nothing of a version's files: where the table is, and when the version was written.

        The time tells a table that was dropped and created anew from the one that had its name.
        """
        try:
            connection = self._connection()
        except ConfigError:
            connection = {}
        written = {entry["version"]: entry["timestamp"].isoformat() for entry in handle.list_versions()}
        parts = [
            _FORMAT,
            connection.get("host_override") or connection.get("region"),
            handle.db_name,
            list(handle._namespace_path),
            handle.name,
            handle._branch,
            version,
            written.get(version),
        ]
        return hashlib.sha256(json.dumps(parts, separators=(",", ":")).encode()).hexdigest()[:32]

    def _connection(self) -> dict[str, Any]:
        """Returns how LanceDB connects, its own words.

        Raises:
            ConfigError: It cannot say, as with headers that a function provides.
        """
        try:
            connection: dict[str, Any] = json.loads(self._table._serialized_connection_state())
        except Exception as error:
            raise ConfigError(
                explain(
                    f"table {self._table.name!r} cannot be opened by other processes",
                    found=str(error),
                    expected="a connection that can be made again",
                    remedy="pass connection_factory, a function that connects and opens the table by name",
                )
            ) from error
        return connection

    def __getstate__(self) -> dict[str, Any]:
        self._connection()
        return self.__dict__


def _check_out(handle: Any, version: int) -> None:
    """Moves a handle to a version; raises TableVersionError if there is no such version."""
    try:
        handle.checkout(int(version))
    except Exception as error:
        present = present_versions(handle)
        if present is None or version in present:  # the trouble is another one
            raise
        raise version_gone(handle.name, version, present) from error


class _Digest(io.RawIOBase):
    """A file whose bytes are not kept, only their digest."""

    def __init__(self) -> None:
        super().__init__()
        self.sha256 = hashlib.sha256()

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self.sha256.update(data)
        return memoryview(data).nbytes


def _digest_of_rows(data: pa.Table) -> str:
    """Returns a digest of a table's schema and rows, however they are chunked; 32 hex characters."""
    digest = _Digest()
    with pa.ipc.new_stream(digest, data.schema) as stream:
        for start in range(0, data.num_rows, _ROWS_PER_DIGEST):
            stream.write_table(data.slice(start, _ROWS_PER_DIGEST).combine_chunks())
    return digest.sha256.hexdigest()[:32]
