"""Which tables are read through LanceDB's API, and what a way to open them offers."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ray_lance_stream.apitable import ApiTable, is_in_memory, is_remote
from ray_lance_stream.memorysource import MemorySource
from ray_lance_stream.readable import Source
from ray_lance_stream.remotesource import RemoteSource


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
