"""The versions of a table that a process has open, and what becomes of the credentials they were opened with."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

import numpy as np

from ray_lance_stream.cachedtable import cached
from ray_lance_stream.diskcache import CacheSpec
from ray_lance_stream.location import TableRef
from ray_lance_stream.plan import PlanSpec
from ray_lance_stream.readable import ReadableTable, check_identity
from ray_lance_stream.recent import Recent
from ray_lance_stream.storage import CannotOpenError, RefusedError
from ray_lance_stream.unreadable import without_secrets

T = TypeVar("T")
_OPEN_VERSIONS: Final = 2  # a run that resumes may move to another version; none needs more at a time
_WARM_UP_ROWS: Final = 16


class OpenTables:
    """Opens versions of a table, and keeps the last few. Safe to use from several threads.

    Args:
        ref: The table.
        cache: Where the node keeps files of it; None for nowhere.

    Attributes:
        ref: The table, without an open connection whose credentials have been refused.
        rows_kept: Rows that were read from the node's disk.
    """

    def __init__(self, ref: TableRef, cache: CacheSpec | None) -> None:
        self.ref = ref
        self._cache = cache
        self._versions: Recent[int, ReadableTable] = Recent(_OPEN_VERSIONS)
        self.rows_kept = 0
        self._count_lock = threading.Lock()

    def version(self, version: int) -> ReadableTable:
        """Opens a version, or finds it open.

        Raises:
            OSError: It could not be opened because of the storage: the driver has opened it, so this may pass.
        """
        try:
            return self._versions.get(version, lambda: self._opened(version))
        except CannotOpenError as error:
            if error.may_pass:
                raise OSError(str(error)) from error.__cause__
            raise

    def of(self, spec: PlanSpec) -> ReadableTable:
        """Opens the version of a plan, and checks that it holds the plan's data."""
        table = self.version(spec.table.version)
        check_identity(table, spec.table, self.ref)
        return table

    def warm_up(self, version: int, columns: Sequence[str] | None) -> None:
        """Opens a version and reads a few rows all over it, so that its files' footers are loaded."""
        table = self.version(version)
        rows = np.unique(np.linspace(0, max(0, table.num_rows - 1), _WARM_UP_ROWS, dtype=np.int64))
        table.take(rows[rows < table.num_rows], columns)

    def reading(self, read: Callable[[], T]) -> T:
        """Does something that reads; once more, with the table opened anew, if ``connection_factory`` can renew it."""
        renewable = self.ref.connection_factory is not None
        try:
            with without_secrets(self.ref, renewable=renewable):
                return read()
        except RefusedError:
            if not renewable:
                raise
            self._versions.forget()
            if self.ref.live is not None:  # it has the credentials that are refused
                self.ref = dataclasses.replace(self.ref, live=None)
        with without_secrets(self.ref, renewable=renewable):
            return read()

    def _opened(self, version: int) -> ReadableTable:
        table = self.ref.open(version)
        return table if self._cache is None else cached(table, self.ref, self._cache, self._count_kept)

    def _count_kept(self, rows: int) -> None:
        with self._count_lock:
            self.rows_kept += rows
