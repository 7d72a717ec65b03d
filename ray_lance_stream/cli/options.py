"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from ray_lance_stream.cli.masking import remember, remember_uri

if TYPE_CHECKING:
    from ray_lance_stream.location import TableRef
    from ray_lance_stream.plan import OrderSpec
    from ray_lance_stream.provenance import Provenance

DEBUG: Final = "ray_lance_stream.cli.debug"

_LANCEDB_OPTIONS: Final = "--version, --filter, --no-shuffle and --shuffle-clump-size"
F = TypeVar("F", bound=Callable[..., Any])


def _storage_options(context: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> dict[str, str]:
    del parameter
    options = {}
    for text in values:
        key, separator, value = text.partition("=")
        if not key or not separator:
            raise click.BadParameter("expected KEY=VALUE (what was given may be a secret and is not shown)")
        options[key] = value
    remember(context, options.values())
    return options


def _columns(context: click.Context, parameter: click.Parameter, value: str | None) -> tuple[str, ...]:
    del context, parameter
    if value is None:
        return ()
    names = tuple(name.strip() for name in value.split(","))
    if not all(names):
        raise click.BadParameter("expected names separated by commas, such as image,label")
    return names


def uri_given(context: click.Context, parameter: click.Parameter, value: str) -> str:
    """Notes the credentials in a URI, so that no message shows them."""
    del parameter
    remember_uri(context, value or "")
    return value


def _debug(context: click.Context, parameter: click.Parameter, value: bool) -> None:
    del parameter
    context.meta[DEBUG] = context.meta.get(DEBUG, False) or value


uri = click.argument("uri", metavar="URI", callback=uri_given)
table = click.argument("table", metavar="TABLE")
checkpoint = click.argument("checkpoint", metavar="CHECKPOINT", callback=uri_given)
uri_option = click.option("--uri", metavar="URI", callback=uri_given, help="The database, as for lancedb.connect.")
table_option = click.option("--table", metavar="TABLE", help="The table's name.")
checkpoint_option = click.option(
    "--checkpoint", metavar="PATH", callback=uri_given, help="Take table version, order and splits from a checkpoint."
)
storage_option = click.option(
    "--storage-option",
    "storage_options",
    metavar="KEY=VALUE",
    multiple=True,
    callback=_storage_options,
    help="Option of the table's object store, as for lancedb.connect; repeatable. Never printed, but other users of "
    "the machine see command lines: variables such as AWS_SECRET_ACCESS_KEY are better for secrets.",
)
columns = click.option("--columns", metavar="A,B", callback=_columns, help="Columns of the table, separated by commas.")
json_output = click.option("--json", "json_output", is_flag=True, help="Print JSON.")
debug = click.option("--debug", is_flag=True, expose_value=False, callback=_debug, help="Show an error's traceback.")
stream_name = click.option("--name", metavar="NAME", help="Name of the stream, if the checkpoint holds several.")
global_batch_size = click.option(
    "--global-batch-size", type=int, metavar="B", help="Rows of a step on all replicas together."
)
drop_last = click.option("--drop-last", is_flag=True, help="The stream leaves out a short last step.")
filter_sql = click.option("--filter", "filter_sql", metavar="SQL", help="SQL condition; only these rows count.")
shuffle_clump_size = click.option(
    "--shuffle-clump-size", type=int, metavar="N", help="Neighbouring rows shuffled as one; 1 by default."
)
version = click.option("--version", type=int, metavar="V", help="Version of the table; the latest by default.")
no_shuffle = click.option("--no-shuffle", is_flag=True, help="The dataset was not shuffled.")


def lancedb_state(command: F) -> F:
    """Adds the options that say, with --uri and --table, what a state of ``lancedb.streaming`` belongs to."""
    for option in (shuffle_clump_size, no_shuffle, filter_sql, version):
        command = option(command)
    return command


class LanceDBState:
    """What a state of ``lancedb.streaming`` is said to belong to, by --uri, --table and :func:`lancedb_state`.

    Raises:
        UsageError: --uri or --table is missing.
    """

    def __init__(
        self,
        uri: str | None,
        table: str | None,
        storage_options: Mapping[str, str],
        *,
        version: int | None,
        **order_options: Any,
    ) -> None:
        check_table_options(uri, table)
        self._given = any(value not in (None, False) for value in (version, *order_options.values()))
        if uri is None and self._given:
            raise click.UsageError(f"{_LANCEDB_OPTIONS} need --uri and --table")
        self._uri, self._table, self._storage_options = uri, table, storage_options
        self._version, self._order_options = version, order_options

    @property
    def of(self) -> Callable[[], Provenance] | None:
        """Returns it; None without --uri and --table."""
        return None if self._uri is None else self._provenance

    def check_used(self) -> None:
        """Raises UsageError if the options were given for a state that says by itself what it belongs to."""
        if self._given:
            raise click.UsageError(
                f"{_LANCEDB_OPTIONS} are for a state of lancedb.streaming; this one says what it belongs to"
            )

    def _provenance(self) -> Provenance:
        from ray_lance_stream.provenance import Provenance

        assert self._uri is not None and self._table is not None
        self._given = False  # used
        order = order_of(1, order="lancedb", **self._order_options)  # splits and seed are the state's own
        ref = table_ref(self._uri, self._table, self._storage_options)
        return Provenance(table=ref.open(self._version).identity, order=order)


def order_of(
    num_splits: int,
    *,
    shuffle_seed: int | None = None,
    no_shuffle: bool = False,
    shuffle_clump_size: int | None = None,
    filter_sql: str | None = None,
    order: str = "feistel",
) -> OrderSpec:
    """Returns the order that options describe; what was not given has its default."""
    from ray_lance_stream.plan import OrderSpec

    return OrderSpec(
        num_splits=num_splits,
        shuffle=not no_shuffle,
        shuffle_seed=0 if shuffle_seed is None else shuffle_seed,
        shuffle_clump_size=1 if shuffle_clump_size is None else shuffle_clump_size,
        filter=filter_sql,
        order=order,
    )


def check_table_options(uri: str | None, table: str | None) -> None:
    """Raises UsageError if --uri or --table is given alone."""
    if (uri is None) != (table is None):
        raise click.UsageError("--uri and --table go together")


def table_ref(uri: str, name: str, storage_options: Mapping[str, str]) -> TableRef:
    """Returns where a table is; loads Lance."""
    from ray_lance_stream.location import TableRef

    return TableRef(uri=uri, name=name, storage_options=storage_options or None)
