"""``ray-lance-stream bench``: what a table and a transform deliver on this machine, beside the bare reader."""

from __future__ import annotations

import importlib
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Final

import click

from ray_lance_stream.cli import options, text
from ray_lance_stream.errors import ConfigError
from ray_lance_stream.errors import explain as explained

_ROWS_AT_ONCE: Final = 16 * 1024  # of the bare reader: as many as pay for a request


@dataclass(frozen=True, kw_only=True)
class Rate:
    """What was measured.

    Attributes:
        what: Of what.
        rows: Rows read.
        num_bytes: Bytes of them, as they were delivered.
        seconds: How long that took.
        first_s: Until the first rows were there.
    """

    what: str
    rows: int
    num_bytes: int
    seconds: float
    first_s: float


def _transform(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    del context, parameter
    if value is not None and not all(value.partition(":")):
        raise click.BadParameter("expected MODULE:FUNCTION, such as decoding:decode")
    return value


def _seconds(context: click.Context, parameter: click.Parameter, value: float) -> float:
    del context, parameter
    if not 0.1 <= value < math.inf:  # nan neither
        raise click.BadParameter("expected a number of seconds, 0.1 or more")
    return value


@click.command(short_help="Measure what a table delivers here.")
@options.uri
@options.table
@click.option("--transform", metavar="MODULE:FUNCTION", callback=_transform, help="Run this transform, too.")
@click.option("--num-splits", type=int, default=48, show_default=True, metavar="S", help="Splits of the stream.")
@click.option("--global-batch-size", type=int, default=480, show_default=True, metavar="B", help="Rows of a step.")
@click.option("--seconds", type=float, default=5.0, callback=_seconds, show_default=True, help="Time for each rate.")
@options.columns
@options.filter_sql
@options.shuffle_clump_size
@options.version
@options.storage_option
@options.json_output
@options.debug
def bench(
    uri: str,
    table: str,
    transform: str | None,
    num_splits: int,
    global_batch_size: int,
    seconds: float,
    columns: tuple[str, ...],
    filter_sql: str | None,
    shuffle_clump_size: int | None,
    version: int | None,
    storage_options: dict[str, str],
    json_output: bool,
) -> None:
    """Measure what a table delivers in this process, as a stream and, beside it, read in order by the bare reader.

    Each rate takes some seconds, or an epoch if that is shorter; the first one reads from cold storage what the others
    may find in the system's cache. Rates are those of this process: each prefetcher adds about as much on cores of its
    own. The transform is imported from the current directory or the installed packages, and run.

    \b
    Example:
      ray-lance-stream bench /data/db images --transform decoding:decode
    """
    from ray_lance_stream.stream import LanceStream

    function = None if transform is None else _imported(transform)

    def stream(of: Callable[..., Any] | None) -> LanceStream:
        return LanceStream(
            uri,
            table,
            num_splits=num_splits,
            global_batch_size=global_batch_size,
            shuffle_clump_size=shuffle_clump_size,
            filter=filter_sql,
            columns=columns or None,
            transform=of,
            version=version,
            storage_options=storage_options or None,
        )

    plain = stream(None)
    rates = [
        _measured("bare reader, in order", _read_in_order(plain, columns), seconds),
        _measured("stream, shuffled", _batches(plain), seconds),
    ]
    if function is not None:
        rates.append(_measured("stream, with the transform", _batches(stream(function)), seconds))
    if json_output:
        click.echo(text.as_json({"rates": [asdict(rate) | {"rows_per_s": rate.rows / rate.seconds} for rate in rates]}))
        return
    click.echo(f"{text.printable(table)}, version {plain.config.identity.version}\n")
    rows = [
        (
            rate.what,
            text.number(rate.rows / rate.seconds),
            text.size(rate.num_bytes / rate.seconds),
            f"{rate.first_s:.3f} s",
            text.number(rate.rows),
        )
        for rate in rates
    ]
    click.echo(text.table(("", "rows/s", "bytes/s", "first after", "rows read"), rows, left=(0,)))


def _imported(name: str) -> Callable[..., Any]:
    module, _, attribute = name.partition(":")
    sys.path.insert(0, os.getcwd())
    try:
        found: Any = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            explained(
                "the transform cannot be imported",
                found=f"{type(error).__name__}: {error}",
                expected=f"a function or callable {attribute!r} in a module {module!r}",
                remedy="run the command where the module is, or install it",
            )
        ) from error
    finally:
        sys.path.pop(0)
    return found  # type: ignore[no-any-return]


def _measured(what: str, parts: Iterator[tuple[int, int]], seconds: float) -> Rate:
    """Adds up (rows, bytes) until the time is over."""
    began = time.perf_counter()
    first_s, rows, num_bytes = 0.0, 0, 0
    for part_rows, part_bytes in parts:
        first_s = first_s or time.perf_counter() - began
        rows, num_bytes = rows + part_rows, num_bytes + part_bytes
        if time.perf_counter() - began >= seconds:
            break
    return Rate(what=what, rows=rows, num_bytes=num_bytes, seconds=time.perf_counter() - began, first_s=first_s)


def _read_in_order(stream: Any, columns: tuple[str, ...]) -> Iterator[tuple[int, int]]:
    import numpy as np

    table = stream.recipe.table.open(stream.config.identity.version)
    for start in range(0, table.num_rows, _ROWS_AT_ONCE):
        stop = min(table.num_rows, start + _ROWS_AT_ONCE)
        rows = table.take(np.arange(start, stop, dtype=np.int64), columns or None)
        yield rows.num_rows, rows.nbytes


def _batches(stream: Any) -> Iterator[tuple[int, int]]:
    with stream.open() as shard:
        for batch in shard.iter_batches(batch_format="pyarrow"):
            yield batch.num_rows, batch.nbytes
