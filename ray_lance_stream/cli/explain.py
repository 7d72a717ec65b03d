"""``ray-lance-stream explain``: which rows make up a global batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import click

from ray_lance_stream.cli import options, text

if TYPE_CHECKING:
    from ray_lance_stream.explaining import OfflinePlan, StepRows

_ROWS_SHOWN: Final = 40  # without --limit, and not for JSON
_OF_THE_CHECKPOINT: Final = ("num_splits", "shuffle_seed", "filter_sql", "shuffle_clump_size", "no_shuffle", "version")


@click.command(short_help="Show which rows make up a step.")
@options.uri
@options.table
@click.option("--step", type=int, required=True, metavar="K", help="Counted from 1, as shard.step counts.")
@click.option("--epoch", type=int, metavar="E", help="Counted from 0; by default the checkpoint's, or 0.")
@click.option("--global-batch-size", type=int, required=True, metavar="B", help="Rows of a step on all replicas.")
@options.checkpoint_option
@options.stream_name
@click.option("--num-splits", type=int, metavar="S", help="Splits of the stream.")
@click.option("--shuffle-seed", type=int, metavar="SEED", help="Seed of the order; 0 by default.")
@click.option("--no-shuffle", is_flag=True, help="The stream is not shuffled.")
@options.shuffle_clump_size
@options.filter_sql
@options.version
@options.drop_last
@click.option("--world-size", type=int, metavar="W", help="Number of replicas: shows who gets which row.")
@click.option("--rank", type=int, metavar="R", help="Only this replica's rows; needs --world-size.")
@options.columns
@click.option("--limit", type=int, metavar="N", help="Rows to show; by default 40, or all with --json.")
@options.storage_option
@options.json_output
@options.debug
def explain(
    uri: str,
    table: str,
    step: int,
    epoch: int | None,
    global_batch_size: int,
    checkpoint: str | None,
    name: str | None,
    num_splits: int | None,
    drop_last: bool,
    world_size: int | None,
    rank: int | None,
    columns: tuple[str, ...],
    limit: int | None,
    storage_options: Mapping[str, str],
    json_output: bool,
    **order_options: Any,
) -> None:
    """Show the rows of a step (one global batch) of a stream of TABLE in the database URI, in their order.

    K is what shard.step said at the end of the step, where shard.is_step_end was true: 1 for the first one of an
    epoch. Table version, order and splits come from a --checkpoint of the run, or from the options that LanceStream
    was given. A row's number is its offset in that table version. Transforms are not run: --columns shows the table's
    own columns.

    \b
    Examples:
      ray-lance-stream explain /data/db digits --step 812 \\
          --checkpoint /runs/digits/checkpoint_000012 --global-batch-size 480
      ray-lance-stream explain /data/db digits --step 812 --epoch 1 \\
          --num-splits 48 --global-batch-size 480 --shuffle-seed 42 \\
          --world-size 8 --rank 3 --columns label
    """
    given = {"num_splits": num_splits, **order_options}
    if (checkpoint is None) == (num_splits is None):
        raise click.UsageError("pass one of --checkpoint and --num-splits")
    if rank is not None and world_size is None:
        raise click.UsageError("--rank needs --world-size")
    if checkpoint is not None and any(
        given[option] is not None and given[option] is not False for option in _OF_THE_CHECKPOINT
    ):
        raise click.UsageError("splits, order, filter and version come from the checkpoint: leave their options out")
    ref = options.table_ref(uri, table, storage_options)
    plan: OfflinePlan
    if checkpoint is not None:
        plan, saved_epoch = _plan_of_checkpoint(ref, checkpoint, name)
    else:
        plan, saved_epoch = _plan_of_options(ref, **given), 0
    steps = plan.steps(global_batch_size, drop_last=drop_last)
    found = plan.rows_of_step(
        steps,
        step,
        epoch=saved_epoch if epoch is None else epoch,
        world_size=world_size,
        rank=rank,
        columns=columns,
        limit=limit if limit is not None or json_output else _ROWS_SHOWN,
    )
    if json_output:
        click.echo(text.as_json(_as_dict(found, plan)))
        return
    click.echo(_head(found, plan, table, rank))
    click.echo(_rows(found))
    hidden = found.num_rows - found.places.num_rows
    if hidden:
        click.echo(f"  ... {text.plural(hidden, 'more row')} (--limit {found.num_rows} shows all)")


def _plan_of_checkpoint(ref: Any, checkpoint: str, name: str | None) -> tuple[OfflinePlan, int]:
    from ray_lance_stream.cli.loading import load, one_stream
    from ray_lance_stream.explaining import OfflinePlan, rows_were_skipped

    _, state = one_stream(load(checkpoint), name)
    if state.positions != state.samples:
        raise rows_were_skipped()
    return OfflinePlan.of_provenance(ref, state.provenance), state.epoch


def _plan_of_options(ref: Any, *, num_splits: Any, version: int | None, **order_options: Any) -> OfflinePlan:
    from ray_lance_stream.explaining import OfflinePlan

    order = options.order_of(num_splits, **order_options)
    return OfflinePlan(ref.open(version), order, ref)


def _as_dict(found: StepRows, plan: OfflinePlan) -> dict[str, Any]:
    rows = found.places.to_pylist()
    if found.columns is not None:
        rows = [row | {"columns": values} for row, values in zip(rows, found.columns.to_pylist(), strict=True)]
    return {
        "table_version": plan.table.version,
        "table_fingerprint": plan.table.identity.fingerprint,
        "epoch": found.epoch,
        "step": found.step,
        "num_steps": found.num_steps,
        "cycles": [found.cycles.start, found.cycles.stop],
        "num_rows": found.num_rows,
        "skipped": found.skipped,
        "rows": rows,
    }


def _head(found: StepRows, plan: OfflinePlan, table: str, rank: int | None) -> str:
    whose = "" if rank is None else f" for rank {rank}"
    cycles = text.span("cycle", found.cycles.start, found.cycles.stop - 1)
    skipped = "; left out by skip_steps, not delivered" if found.skipped else ""
    return (
        f"{text.printable(table)}, version {plan.table.version}, epoch {found.epoch}\n"
        f"step {found.step:,} of {found.num_steps:,}: {text.plural(found.num_rows, 'row')}{whose} ({cycles}){skipped}\n"
    )


def _rows(found: StepRows) -> str:
    names = {"rank_index": "in its batch"}
    header = [names.get(name, name) for name in found.places.column_names]
    rows = [[str(value) for value in row.values()] for row in found.places.to_pylist()]
    left: list[str] = []
    if found.columns is not None:
        left = [text.printable(name) for name in found.columns.column_names]
        values = ([text.cell(value) for value in row.values()] for row in found.columns.to_pylist())
        rows = [places + cells for places, cells in zip(rows, values, strict=True)]
    return text.table(header + left, rows, left=range(len(header), len(header) + len(left)))
