"""Where a table is, and how to open it in any process."""

from __future__ import annotations

import difflib
import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import lance
import numpy as np
from numpy.typing import NDArray

from ray_lance_stream.apisource import ApiSource, source_of
from ray_lance_stream.apitable import is_remote
from ray_lance_stream.errors import ConfigError, TableVersionError, explain
from ray_lance_stream.readable import ReadableTable, listed, version_gone
from ray_lance_stream.redacting import hidden, in_environment, in_function, in_uri, named, shown_uri
from ray_lance_stream.storage import CannotOpenError, is_trouble
from ray_lance_stream.table import PinnedTable, present_versions
from ray_lance_stream.unreadable import check_arguments, not_local, remote

if TYPE_CHECKING:
    import lancedb


@dataclass(frozen=True, kw_only=True)
class TableRef:
    """How to open a table again, in any process; picklable.

    Attributes:
        uri: The database, as for ``lancedb.connect``. A relative local path is made absolute here, since
            other processes have other working directories.
        name: The table's name.
        storage_options: Options of the object store; their values are never shown, as they hold secrets.
        connection_factory: Called with the name, returns the open table; instead of ``uri``.
        namespace: The namespace the table is in.
        live: The open table, in the process that has it.
        dataset_uri: Where LanceDB keeps the table, once known (see :meth:`located`): other processes then open
            it without LanceDB, which takes seconds to load.
        api: How to read it where it has no Lance files to open: a table in memory, which travels whole, or a remote
            one, which travels with its credentials.

    Raises:
        ConfigError: Not exactly one of uri and connection_factory, or a database that cannot be read.
    """

    uri: str | None = None
    name: str
    storage_options: Mapping[str, str] | None = field(default=None, hash=False)
    connection_factory: Callable[[str], lancedb.table.Table] | None = None
    dataset_uri: str | None = None
    namespace: tuple[str, ...] = ()
    live: Any = field(default=None, compare=False, repr=False)
    api: ApiSource | None = field(default=None, compare=False, repr=False)
    # Of servers, as their tables tell.
    _secrets: set[str] = field(default_factory=set, compare=False, repr=False)

    @classmethod
    def of(cls, table: Any, connection_factory: Callable[[str], Any] | None = None) -> TableRef:
        """Returns the reference to an open LanceDB table; later versions of it do not matter.

        Args:
            table: As ``open_table`` and ``create_table`` return it.
            connection_factory: How other processes open it; else they do so by its URI and storage options.
        """
        name, connection = getattr(table, "name", None), getattr(table, "_conn", None)
        if not isinstance(name, str) or inspect.iscoroutinefunction(getattr(table, "count_rows", None)):
            raise ConfigError(
                explain(
                    "this is no LanceDB table",
                    found=f"an object of type {type(table).__name__}",
                    expected="a table as lancedb.connect(uri).open_table(name) returns it",
                    remedy="open it with the synchronous API",
                )
            )
        api = source_of(table)
        if connection_factory is not None:
            own = None if is_remote(table) else api  # the factory's connection serves here, too
            return cls(name=name, connection_factory=connection_factory, live=None if api else table, api=own)
        if api is not None:
            return cls(uri=api.uri, name=name, namespace=tuple(table._namespace_path or ()), api=api)
        return cls(
            uri=str(getattr(connection, "uri", "")),
            name=name,
            storage_options=getattr(connection, "storage_options", None) or None,
            namespace=tuple(getattr(table, "_namespace_path", None) or ()),
            live=table,
        )

    def __getstate__(self) -> dict[str, Any]:
        # An open table cannot travel; whoever gets the reference opens its own.
        return self.__dict__ | {"live": None, "api": None if self.connection_factory else self.api, "_secrets": set()}

    def __post_init__(self) -> None:
        check_arguments(self.name, self.storage_options, self.connection_factory)
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
        uri, factory = None if self.uri is None else shown_uri(self.uri), self.connection_factory
        return (
            f"TableRef(uri={uri!r}, name={self.name!r}, storage_options={options}, "
            f"connection_factory={None if factory is None else named(factory)})"
        )

    def open(self, version: int | None = None) -> ReadableTable:
        """Opens one version for reading: the latest at this moment if ``version`` is None.

        Where the factory returns a table checked out at a version, that one counts as the latest.

        Raises:
            ConfigError: The database or the table is missing, or cannot be opened.
            TableVersionError: The version was cleaned up, or never existed.
        """
        if self.api is not None:
            return self._open_api(self.api, version)
        dataset = self._open_latest(version)
        if not isinstance(dataset, lance.LanceDataset):
            return self._open_api(dataset, version)
        if version is not None and version != dataset.version:
            try:
                dataset = dataset.checkout_version(int(version))
            except Exception as error:
                present = present_versions(dataset)
                if present is None or version in present:  # the trouble is another one
                    raise self._cannot_open(error) from self.shown(error)
                raise version_gone(self.name, version, present) from self.shown(error)
        return PinnedTable(dataset, self)

    def located(self, opened: ReadableTable) -> TableRef:
        """Returns this reference with what is known once the table has been opened."""
        if self.api is not None:
            return replace(self, api=self.api.at(opened.version))
        return self if self.uri is None else replace(self, dataset_uri=opened.uri)

    def open_lancedb(self, version: int) -> lancedb.table.Table:
        """Opens one version with LanceDB, for what only LanceDB can do; see :meth:`original_ids`."""
        if self.api is not None:
            return self.api.handle(version)
        if self.connection_factory is not None:
            try:
                table = self.connection_factory(self.name)
            except Exception as error:
                raise self._cannot_open(error) from self.shown(error)
            api = source_of(table, fresh=True)
            if api is not None:
                self._secrets.update(api.secrets())
                return api.handle(version)
            if not hasattr(table, "checkout"):
                raise not_local(self.name)
        else:
            table = self._connect().open_table(self.name, namespace_path=list(self.namespace) or None)
        table.checkout(version)
        return table

    def original_ids(self, row_ids: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Returns by what ids the rows are known that have these in tables of :meth:`open_lancedb`."""
        return row_ids if self.api is None else self.api.original_ids(row_ids)

    def _open_api(self, api: ApiSource, version: int | None) -> ReadableTable:
        self._secrets.update(api.secrets())
        try:
            return api.open(version, self)
        except (ConfigError, TableVersionError):
            raise
        except Exception as error:
            raise self._cannot_open(error) from self.shown(error)

    def _open_latest(self, version: int | None) -> lance.LanceDataset | ApiSource:
        database = None
        try:
            if self.live is not None and version in (None, self.live.version):
                dataset: lance.LanceDataset = self.live.to_lance()
                return dataset
            if self.dataset_uri is not None:
                return lance.dataset(self.dataset_uri, storage_options=self._options())
            if self.connection_factory is not None:
                table = self.connection_factory(self.name)
                options = getattr(getattr(table, "_conn", None), "storage_options", None)
                self._secrets.update(map(str, (options or {}).values()))
            else:
                database = self._connect()
                table = database.open_table(self.name, namespace_path=list(self.namespace) or None)
            api = source_of(table, fresh=True)
            if api is not None:
                return api
            to_lance = getattr(table, "to_lance", None)
            if to_lance is None or inspect.iscoroutinefunction(to_lance):
                raise NotImplementedError
            dataset = to_lance()
            return dataset
        except ConfigError:
            raise
        except NotImplementedError:
            raise not_local(self.name) from None
        except Exception as error:
            missing = None if database is None else self._missing(database)
            raise missing or self._cannot_open(error) from self.shown(error)

    def _connect(self) -> lancedb.DBConnection:
        uri = str(self.uri)
        if uri.startswith("db://"):
            raise remote(self.name)
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
        import lancedb

        return lancedb.connect(uri, storage_options=self._options())

    def _options(self) -> dict[str, str] | None:
        return None if self.storage_options is None else dict(self.storage_options)

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
                found=f"these tables in {shown_uri(str(self.uri))}: {listed(names)}",
                expected="the name of one of them",
                remedy=f"did you mean {' or '.join(map(repr, near))}" if near else "check uri and the table's name",
            )
        )

    def _cannot_open(self, error: Exception) -> CannotOpenError:
        made = CannotOpenError(
            explain(
                f"table {self.name!r} cannot be opened",
                found=self.without_secrets(f"{type(error).__name__}: {error}"),
                expected="a LanceDB table",
                remedy="check connection_factory" if self.uri is None else "check uri and storage_options",
            )
        )
        made.may_pass = is_trouble(error)
        return made

    def without_secrets(self, text: str) -> str:
        """Returns ``text`` with ``***`` for credentials.

        Those are the values of ``storage_options``, a server's API key, user and password of a URI, what
        ``connection_factory`` carries under names of secrets, and what the environment does.
        """
        values = {str(value) for value in (self.storage_options or {}).values()} | self._secrets
        for uri in (self.uri, self.dataset_uri):
            values |= in_uri(uri or "")
        if self.connection_factory is not None:
            values |= in_function(self.connection_factory)
        return hidden(text, values | in_environment())

    def shown(self, error: Exception) -> Exception | None:
        """Returns the error to chain; None if a traceback with its text, or its causes', would show a secret."""
        link: BaseException | None = error
        while link is not None:
            if self.without_secrets(str(link)) != str(link):
                return None
            link = link.__cause__ or link.__context__
        return error
