"""A table whose data files are kept on the node's disk as they are read, for storage that is far away.

What was read from a fragment once is likely to be read again: with the next block, or in the next epoch. So its files
are fetched whole, beside the reading, into a local copy of the table's version that has all of its manifest and, of its
data files, those that fit. A read goes where its rows are. Nothing depends on what is there, and nothing fails because
of it: what cannot be kept, or read back, is read from the storage.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import lance
import numpy as np
import pyarrow as pa
from lance.file import LanceFileSession
from numpy.typing import NDArray

from ray_lance_stream.diskcache import CacheSpec, DiskCache, NoRoomError
from ray_lance_stream.gone import when_gone
from ray_lance_stream.plan import TableIdentity
from ray_lance_stream.readable import ReadableTable, Source, check_numbers
from ray_lance_stream.table import PinnedTable

logger = logging.getLogger("ray_lance_stream")
_LOOK_EVERY_S: Final = 0.1
_LAST_VERSION: Final = 2**64 - 1  # newer manifests are named after what is left to it


def cached(table: ReadableTable, ref: Source, spec: CacheSpec, count: Callable[[int], None]) -> ReadableTable:
    """Returns a table that reads what it can from the node's disk; the same one where that cannot work, and says so.

    Args:
        table: An open table.
        ref: What messages say of it.
        spec: The cache.
        count: Called with the number of rows that a read found there; by any thread.
    """
    why = "it has no Lance files to open"
    if isinstance(table, PinnedTable):
        try:
            return CachedTable(table, _Copy(table, ref, spec), count)
        except (OSError, _NotKept) as error:
            why = ref.without_secrets(str(error))
    logger.warning("%s is not kept on the node's disk (cache_bytes): %s", table, why)
    return table


class CachedTable:
    """See ``readable.ReadableTable``."""

    def __init__(self, table: PinnedTable, copy: _Copy, count: Callable[[int], None]) -> None:
        self._table = table
        self._copy = copy
        self._count = count
        self.uri: str = table.uri
        self.version: int = table.version
        self.identity: TableIdentity = table.identity
        self.num_rows = table.num_rows
        self.schema: pa.Schema = table.schema
        when_gone(self, copy.close)

    def __str__(self) -> str:
        return str(self._table)

    def check_filter(self, filter: str) -> None:
        """See ``ReadableTable``."""
        self._table.check_filter(filter)

    def check_columns(self, columns: Sequence[str] | None) -> None:
        """See ``ReadableTable``."""
        self._table.check_columns(columns)

    def count_rows(self, filter: str) -> int:
        """See ``ReadableTable``."""
        return self._table.count_rows(filter)

    def matching_rows(self, filter: str) -> NDArray[np.int64]:
        """See ``ReadableTable``."""
        return self._table.matching_rows(filter)

    def numbers_of(self, row_ids: NDArray[np.uint64]) -> NDArray[np.int64]:
        """See ``ReadableTable``."""
        return self._table.numbers_of(row_ids)

    def take(self, rows: NDArray[np.int64], columns: Sequence[str] | None) -> pa.Table:
        """See ``ReadableTable``."""
        rows = np.asarray(rows)
        check_numbers(rows, self.num_rows, self)
        here = self._copy.look_for(rows)
        if not here.any():
            return self._table.take(rows, columns)
        kept = self._copy.take(rows[here], columns)
        if kept is None:
            return self._table.take(rows, columns)
        self._count(kept.num_rows)
        if here.all():
            return kept
        both = pa.concat_tables([kept, self._table.take(rows[~here], columns)])
        order = np.argsort(np.concatenate([np.flatnonzero(here), np.flatnonzero(~here)]))
        return both.take(order).combine_chunks()


class _NotKept(Exception):
    """A table whose files cannot be kept; says why."""


class _Copy:
    """A local copy of a table version, which has some of its data files; a thread fetches those that are read."""

    def __init__(self, table: PinnedTable, ref: Source, spec: CacheSpec) -> None:
        dataset = table.dataset
        if table.has_blobs:
            raise _NotKept("it has blob columns, whose bytes may lie in files of their own")
        fragments = dataset.get_fragments()
        files = [fragment.data_files() for fragment in fragments]
        if any(file.base_id is not None for each in files for file in each):
            raise _NotKept("some of its files lie in other tables")
        if any(fragment.metadata.overlays for fragment in fragments):
            raise _NotKept("it has overlays, whose files are not those of its fragments")
        self._files = [[(file.path, file.file_size_bytes) for file in each] for each in files]
        deletions = (fragment.deletion_file() for fragment in fragments)
        self._deletions = [str(name) for name in deletions if name is not None]
        self._identity, self._ref, self._version = table.identity, ref, table.version
        self._ends = np.cumsum(table.fragment_rows)
        # Files have random names, which the fingerprint knows: another table cannot be taken for this one.
        self._disk = DiskCache(spec, f"{table.identity.fingerprint}-{table.version}")
        self._session = LanceFileSession(table.uri, dataset.latest_storage_options())
        self._here = np.zeros(len(fragments), np.bool_)
        self._asked = np.zeros(len(fragments), np.bool_)
        self._table: PinnedTable | None = None
        self._closed = self._failed = False
        self._wanted: queue.SimpleQueue[int] = queue.SimpleQueue()
        threading.Thread(target=self._work, name="lance-stream-cache", daemon=True).start()

    def look_for(self, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Returns which rows are here, and has the files of the others fetched."""
        fragments = np.searchsorted(self._ends, rows, side="right")
        here = self._here[fragments]
        for fragment in np.unique(fragments[~here]).tolist():
            if not self._asked[fragment]:
                self._asked[fragment] = True
                self._wanted.put(fragment)
        return here

    def take(self, rows: NDArray[np.int64], columns: Sequence[str] | None) -> pa.Table | None:
        """Reads rows that are here; None if they are not any more."""
        table = self._table
        try:
            return None if table is None else table.take(rows, columns)
        except Exception as error:  # whatever it is: if it is not of the disk, the storage will say so, too
            self._give_up(error)
            return None

    def close(self) -> None:
        """Lets the files go and ends the thread."""
        self._closed = True
        self._wanted.put(-1)

    def _give_up(self, error: Exception) -> None:
        if not self._closed:
            text = self._ref.without_secrets(f"{type(error).__name__}: {error}")
            name, path = self._ref.name, self._disk.path
            logger.warning("table %r is read from its storage, and not from %s: %s", name, path, text)
        self._here[:] = False
        self.close()

    def _work(self) -> None:
        try:
            self._open()
            while (fragment := self._wanted.get()) >= 0 and not self._closed:
                self._fetch(fragment)
        except NoRoomError:
            logger.info("the node's cache is full: %d of %d fragments of %r", *self._progress(), self._ref.name)
        except Exception as error:
            self._give_up(error)
        while not self._closed:
            self._closed = self._wanted.get() < 0
        self._disk.close()

    def _progress(self) -> tuple[int, int]:
        return int(self._here.sum()), len(self._here)

    def _open(self) -> None:
        """Fetches what belongs to no fragment, and opens the copy."""
        names = (f"_versions/{_LAST_VERSION - self._version}.manifest", f"_versions/{self._version}.manifest")
        manifest = next((name for name in names if self._session.contains(name)), None)
        if manifest is None:
            raise _NotKept(f"it has no manifest of version {self._version} where those of tables are")
        for name in (*self._deletions, manifest):
            while not self._download(name, 0):
                if self._closed:
                    return
                time.sleep(_LOOK_EVERY_S)  # another process is fetching it
        table = PinnedTable(lance.dataset(str(self._disk.path), version=self._version), self._ref)
        if table.identity != self._identity:
            raise _NotKept("its copy is not the same version of it")
        self._table = table

    def _fetch(self, fragment: int) -> None:
        """Fetches the data files of a fragment."""
        try:
            done = all(self._download(f"data/{path}", size or 0) for path, size in self._files[fragment])
        except OSError as error:  # of the storage, or the disk; not tried again
            if not self._failed:
                text = self._ref.without_secrets(str(error))
                logger.warning("files of table %r could not be kept in %s: %s", self._ref.name, self._disk.path, text)
            self._failed = True
            return
        self._here[fragment] = done
        self._asked[fragment] = done  # what another process is fetching is looked for again

    def _download(self, name: str, num_bytes: int) -> bool:
        def download(path: Path) -> None:
            self._session.download_file(name, str(path))

        return self._disk.fetch(name, num_bytes, download)
