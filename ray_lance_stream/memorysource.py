"""Tables in memory: how their versions are opened, and how they travel to other processes, whole."""

from __future__ import annotations

import hashlib
import io
import threading
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ray_lance_stream.apitable import ApiTable, check_out, ordered_ids
from ray_lance_stream.errors import TableVersionError, explain
from ray_lance_stream.plan import TableIdentity
from ray_lance_stream.readable import Source

_ROWS_PER_DIGEST: Final = 1 << 16  # a multiple of 8, so that bitmaps are cut at whole bytes


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
        other = MemorySource(self._table, version)
        other._fingerprints = self._fingerprints
        return other

    def handle(self, version: int | None) -> Any:
        """Opens the table at a version."""
        table = self._table
        version = table.version if version is None else version
        handle = table._conn.open_table(
            table.name, namespace_path=list(table._namespace_path or []) or None, branch=table.current_branch()
        )
        check_out(handle, version)
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
