"""What is said where a table cannot be opened at all, or not as it is asked, or is refused by the storage."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from ray_lance_stream.errors import ConfigError, explain, shown
from ray_lance_stream.readable import Source
from ray_lance_stream.storage import RefusedError, is_refusal


def check_arguments(name: object, storage_options: object, connection_factory: object) -> None:
    """Raises ConfigError if what says where a table is and how to open it is not of the right kinds."""
    if not isinstance(name, str) or not name:
        raise ConfigError(
            explain(
                "the table's name is not valid",
                found=shown(name),
                expected="a string",
                remedy="pass table, the name as for open_table",
            )
        )
    if connection_factory is not None and not callable(connection_factory):
        raise ConfigError(
            explain(
                "connection_factory is not valid",
                found=f"an object of type {type(connection_factory).__name__}",
                expected="a function that is called with the table's name and returns the open table",
                remedy="pass one, or leave it out",
            )
        )
    options = {} if storage_options is None else storage_options
    if isinstance(options, Mapping) and all(isinstance(text, str) for pair in options.items() for text in pair):
        return
    raise ConfigError(
        explain(
            "storage_options are not valid",
            found="keys or values that are no strings"  # which is not said: they are secrets
            if isinstance(options, Mapping)
            else f"an object of type {type(options).__name__}",
            expected="a dict of strings, as for lancedb.connect",
            remedy="pass one, numbers and switches as text",
        )
    )


@contextmanager
def without_secrets(ref: Source, *, renewable: bool) -> Iterator[None]:
    """Takes credentials out of the errors of storage: object stores quote URLs and headers, and errors travel to logs.

    Args:
        ref: The table.
        renewable: Whether a ``connection_factory`` brings new credentials.

    Raises:
        RefusedError: The storage did not accept the credentials.
        OSError: Any other error of the storage.
    """
    try:
        yield
    except OSError as error:
        if is_refusal(error):
            raise RefusedError(_refused_text(ref, renewable, ref.without_secrets(str(error)))) from ref.shown(error)
        if ref.shown(error) is not None:
            raise
        raise OSError(ref.without_secrets(str(error))) from None


def _refused_text(ref: Source, renewable: bool, found: str) -> str:
    remedy = "let connection_factory fetch new credentials whenever it is called: it was called again, in vain"
    if not renewable:
        remedy = (
            "pass connection_factory, a function that connects with credentials it fetches; it is called again when "
            "they are refused. Those in storage_options or in a URI stay what they were"
        )
    return explain(
        f"the storage refused the credentials for table {ref.name!r}; they may have expired",
        found=found,
        expected="credentials that are valid",
        remedy=remedy,
    )


def not_local(name: str) -> ConfigError:
    """Returns the error for a table that is neither in files nor one of LanceDB's synchronous API."""
    return ConfigError(
        explain(
            f"table {name!r} does not give access to its Lance files",
            found="neither files nor a table of LanceDB's synchronous API",
            expected="a table opened with lancedb.connect",
            remedy="pass the uri of the storage itself, e.g. s3://bucket/path",
        )
    )


def remote(name: str) -> ConfigError:
    """Returns the error for a server that is named by a URI alone."""
    return ConfigError(
        explain(
            f"the uri of table {name!r} does not give access to its server",
            found="a remote (db://) database, without an API key",
            expected="a function that connects",
            remedy="pass connection_factory=, e.g. lambda name: "
            "lancedb.connect('db://...', api_key=os.environ['LANCEDB_API_KEY']).open_table(name), instead of uri; "
            "or the uri of the storage itself, e.g. s3://bucket/path",
        )
    )
