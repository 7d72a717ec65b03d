"""``ray-lance-stream plan``: what a setup comes to, before anything is started."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from ray_lance_stream.cli import options, text

if TYPE_CHECKING:
    from ray_lance_stream.demand import Speeds


@click.command(short_help="Show steps, shares and memory of a setup.")
@options.uri
@options.table
@click.option("--num-splits", type=int, required=True, metavar="S", help="Splits of the stream.")
@click.option("--global-batch-size", type=int, required=True, metavar="B", help="Rows of a step on all replicas.")
@click.option("--world-size", type=int, default=1, show_default=True, metavar="R", help="Number of replicas.")
@click.option("--micro-batch-size", type=int, metavar="M", help="Most rows of a micro-batch; whole shares by default.")
@options.filter_sql
@options.shuffle_clump_size
@options.drop_last
@options.columns
@options.version
@click.option("--max-buffer-bytes", type=int, metavar="N", help="As in PrefetchConfig, whose default it has.")
@click.option("--block-bytes", type=int, metavar="N", help="As in PrefetchConfig, whose default it has.")
@click.option(
    "--step-time-s", type=float, metavar="T", help="Seconds of a step without waiting: tells how many prefetchers."
)
@click.option("--transform-time-ms-per-row", type=float, metavar="T", help="Of the transform; 0 by default.")
@click.option("--read-latency-ms", type=float, metavar="T", help="Of a block, whatever its size; 0 by default.")
@click.option("--read-mib-per-s", type=float, metavar="V", help="Of one block beyond that; no bound by default.")
@options.storage_option
@options.json_output
@options.debug
def plan(
    uri: str,
    table: str,
    num_splits: int,
    global_batch_size: int,
    world_size: int,
    micro_batch_size: int | None,
    filter_sql: str | None,
    shuffle_clump_size: int | None,
    drop_last: bool,
    columns: tuple[str, ...],
    version: int | None,
    max_buffer_bytes: int | None,
    block_bytes: int | None,
    step_time_s: float | None,
    transform_time_ms_per_row: float | None,
    read_latency_ms: float | None,
    read_mib_per_s: float | None,
    storage_options: Mapping[str, str],
    json_output: bool,
) -> None:
    """Show what a stream of TABLE in the database URI comes to: steps, shares, memory, other world sizes.

    A step is one global batch, of which every replica (as a rule a training worker) gets its share. The options are
    those of LanceStream, PrefetchConfig and iter_batches. Sizes are those of a few rows that are read for it, before
    any transform. It counts rows; of a stream with pack_sequences an epoch is its blocks_per_epoch, whatever the table
    holds, and inspect shows a checkpoint of it.

    With --step-time-s it tells how many prefetchers keep up with the trainer, and with which blocks and buffers: each
    reads one block while it transforms another one. Measure the transform on some hundred rows, and a read where the
    prefetchers will run. Sending blocks to the trainers is taken to cost nothing.

    \b
    Example:
      ray-lance-stream plan /data/db digits --num-splits 12 \\
          --global-batch-size 120 --world-size 4 --micro-batch-size 16
    """
    from ray_lance_stream.cli import demand
    from ray_lance_stream.cli.planning import Setup
    from ray_lance_stream.config import PrefetchConfig

    given: dict[str, Any] = {"max_buffer_bytes": max_buffer_bytes, "block_bytes": block_bytes}
    speeds = _speeds(step_time_s, transform_time_ms_per_row, read_latency_ms, read_mib_per_s)
    setup = Setup(
        order=options.order_of(num_splits, shuffle_clump_size=shuffle_clump_size, filter_sql=filter_sql),
        global_batch_size=global_batch_size,
        drop_last=drop_last,
        world_size=world_size,
        micro_batch_size=micro_batch_size,
        prefetch=PrefetchConfig(**{name: value for name, value in given.items() if value is not None}),
        speeds=speeds,
        block_bytes=block_bytes,
    )
    found = setup.facts(options.table_ref(uri, table, storage_options), version, columns)
    if json_output:
        click.echo(text.as_json(found))
        return
    pinned = found["table"]
    click.echo(f"{text.printable(table)}, version {pinned['version']}: {text.plural(pinned['rows'], 'row')}\n")
    click.echo(text.facts(_facts(found)))
    if speeds is not None:
        click.echo(f"\nFor steps of {speeds.step_time_s:g} s without waiting:\n")
        click.echo(text.facts(demand.lines(found["demand"])))
    click.echo(f"\nGlobal batches near {global_batch_size:,}, and the nearest without a short last step:\n")
    click.echo(_near_table(found["near"], global_batch_size, found["rows"]))
    click.echo("\nOther world sizes (the order of rows and the steps stay the same):\n")
    click.echo(_sizes_table(found["world_sizes"], world_size))
    problems = [share["problem"] for share in found["world_sizes"] if share["problem"]]
    if problems:
        click.echo(f"\nToo small: {problems[0]}")


def _speeds(
    step_time_s: float | None,
    transform_time_ms_per_row: float | None,
    read_latency_ms: float | None,
    read_mib_per_s: float | None,
) -> Speeds | None:
    from ray_lance_stream.config import MIB
    from ray_lance_stream.demand import Speeds
    from ray_lance_stream.errors import ConfigError, explain

    given: dict[str, float] = {}
    if transform_time_ms_per_row is not None:
        given["transform_s_per_row"] = transform_time_ms_per_row / 1000
    if read_latency_ms is not None:
        given["read_latency_s"] = read_latency_ms / 1000
    if read_mib_per_s is not None:
        given["read_bytes_per_s"] = read_mib_per_s * MIB
    if step_time_s is not None:
        return Speeds(step_time_s=step_time_s, **given)
    if given:
        raise ConfigError(
            explain(
                "--step-time-s is missing",
                found="what reading and transforming take",
                expected="the seconds of a step as well, without which the trainer's demand is not known",
                remedy="pass --step-time-s",
            )
        )
    return None


def _facts(found: dict[str, Any]) -> list[tuple[str, str]]:
    steps, share = found["steps"], next(s for s in found["world_sizes"] if s["world_size"] == found["world_size"])
    flight, row_bytes = found["in_flight_per_worker"], found["bytes_per_row"]
    splits, dropped = found["num_splits"], found["dropped_rows"]
    rows = f"{text.plural(steps['rows'], 'row')}: {found['rows_per_split']:,} in each of {text.plural(splits, 'split')}"
    pairs = []
    if found["filter"] is not None:
        pairs.append(("filter", f"{text.plural(found['rows'], 'row')} satisfy {text.printable(found['filter'])}"))
    pairs.append(("epoch", rows if not steps["drops_last"] else f"{text.plural(steps['rows'], 'row')} in whole steps"))
    pairs.append(("left out", f"{text.plural(dropped, 'row')} of every epoch" if dropped else "nothing"))
    last = f"; the last one is short: {text.plural(steps['last_step_rows'], 'row')}"
    is_short = steps["last_step_rows"] < steps["global_batch_size"]
    cycles = f"{text.plural(steps['global_batch_size'], 'row')} ({text.plural(steps['cycles_per_step'], 'cycle')})"
    pairs.append(("steps", f"{steps['num_steps']:,} of {cycles}{last if is_short else ''}"))
    own = f"{text.plural(found['world_size'], 'replica')} with {_span(share['splits'])} splits each: "
    pairs.append(("shares", f"{own}{_span(share['rows'])} rows of a step"))
    micro = f"{share['micro_batches']:,} a step, of at most {text.plural(share['micro_batch_rows'], 'row')}"
    pairs.append(("micro-batches", micro))
    sizes = f"{text.size(row_bytes)} a row, {text.size(found['bytes_per_step'])} a step"
    pairs.append(("size", f"{sizes}, {text.size(share['share_bytes'])} a replica's share"))
    block = f"{text.size(flight['block_bytes'])} or {text.plural(flight['block_rows'], 'row')}"
    pairs.append(("blocks", f"up to {block}; {text.plural(flight['blocks'], 'block')} at a time for each worker"))
    budget = f"{text.size(share['budget_bytes'])} allowed ({text.size(found['max_buffer_bytes'])} for all workers)"
    pairs.append(("in flight", f"up to {text.size(flight['bytes'])} for each worker, {budget}"))
    return pairs


def _near_table(near: list[dict[str, Any]], chosen: int, num_rows: int) -> str:
    header = ["", "rows", "cycles", "steps", "rows of the last step", "left out"]
    rows = [
        [
            "*" if steps["global_batch_size"] == chosen else "",
            text.number(steps["global_batch_size"]),
            text.number(steps["cycles_per_step"]),
            text.number(steps["num_steps"]),
            text.number(steps["last_step_rows"]),
            text.number(num_rows - steps["rows"]),
        ]
        for steps in near
    ]
    return text.table(header, rows)


def _sizes_table(shares: list[dict[str, Any]], chosen: int) -> str:
    header = ["", "replicas", "splits", "rows", "balance", "micro-batches", "share", "may buffer"]
    rows = []
    for share in shares:
        micro = "too small" if share["problem"] else f"{share['micro_batches']:,} x {share['micro_batch_rows']:,}"
        rows.append(
            [
                "*" if share["world_size"] == chosen else "",
                text.number(share["world_size"]),
                _span(share["splits"]),
                _span(share["rows"]),
                f"{share['balance']:.0%}",
                micro,
                text.size(share["share_bytes"]),
                text.size(share["budget_bytes"]),
            ]
        )
    return text.table(header, rows)


def _span(edges: tuple[int, int]) -> str:
    return f"{edges[0]:,}" if edges[0] == edges[1] else f"{edges[0]:,}-{edges[1]:,}"
