"""Tables on a server of LanceDB: how their versions are opened, and what other processes need for it."""

from __future__ import annotations

import copy
import hashlib
import json
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ray_lance_stream.apitable import ApiTable, check_out
from ray_lance_stream.errors import ConfigError, explain
from ray_lance_stream.plan import TableIdentity
from ray_lance_stream.readable import Source

_FORMAT: Final = 1  # of fingerprints


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
        check_out(handle, version)
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
