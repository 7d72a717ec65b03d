"""``ray-lance-stream inspect``: what a checkpoint says of its streams."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import click

from ray_lance_stream.cli import options, text

if TYPE_CHECKING:
    from ray_lance_stream.state import StreamState

_SHOWN_SPLITS: Final = 8  # of those that differ; the rest is counted
# Fields of the provenance that have a line of their own below.
_TOLD: Final = {
    "num_splits", "shuffle", "shuffle_seed", "shuffle_clump_size", "order", "plan_format", "filter",
    "table_version", "table_fingerprint", "pack_sequences", "skipped_cycles",
}  # fmt: skip


@click.command(short_help="Show how far a checkpoint is, and on what data.")
@options.checkpoint
@options.stream_name
@options.global_batch_size
@options.drop_last
@options.uri_option
@options.table_option
@options.lancedb_state
@options.storage_option
@options.json_output
@options.debug
def inspect(
    checkpoint: str,
    name: str | None,
    global_batch_size: int | None,
    drop_last: bool,
    uri: str | None,
    table: str | None,
    storage_options: Mapping[str, str],
    json_output: bool,
    **order_options: Any,
) -> None:
    """Show how far the streams in CHECKPOINT are, and which data they belong to.

    CHECKPOINT is a checkpoint directory of a run or its lance_stream.json, as a path or a URI, or a JSON file with a
    state dict; of a run's directory it is the checkpoint that the run would go on from. With --global-batch-size, which
    a checkpoint does not hold, the step is shown; with --uri and --table the table is opened at the checkpoint's
    version, and what is left of the epoch is shown.

    A state dict that lancedb.streaming wrote does not say what it belongs to. Say it with --uri and --table, and
    --version, --filter, --no-shuffle and --shuffle-clump-size if they were not the defaults.

    \b
    Examples:
      ray-lance-stream inspect /runs/digits/checkpoint_2026-11-30_14-24-06 \\
          --global-batch-size 480 --uri /data/db --table digits
      ray-lance-stream inspect lancedb.json \\
          --uri /data/db --table digits --version 7
    """
    said = options.LanceDBState(uri, table, storage_options, **order_options)
    from ray_lance_stream.cli import describe
    from ray_lance_stream.cli.loading import load, one_stream

    loaded = load(checkpoint, said.of)
    said.check_used()
    streams = loaded.streams
    if name is not None or uri is not None:  # a table belongs to one stream
        chosen, state = one_stream(loaded, name)
        streams = {chosen: state}
    found = {}
    for stream, state in streams.items():
        entry = {"progress": describe.progress_of(state), "provenance": describe.provenance_of(state)}
        if uri is not None and table is not None:
            entry["table"] = _in_table(state, uri, table, storage_options, global_batch_size, drop_last)
        elif global_batch_size is not None:
            entry["steps"] = describe.step_of(state, global_batch_size, drop_last=drop_last)
        found[stream] = entry
    if json_output:
        click.echo(text.as_json({"path": loaded.path, "files": loaded.files, "streams": found}))
        return
    files = "state dict" if loaded.is_state_dict else _files_text(loaded.files)
    click.echo(f"{text.printable(loaded.path)} ({files})")
    for stream, entry in found.items():
        click.echo(f"\n{text.printable(stream)}")
        click.echo(text.facts(_facts(entry)))


def _in_table(
    state: StreamState,
    uri: str,
    table: str,
    storage_options: Mapping[str, str],
    global_batch_size: int | None,
    drop_last: bool,
) -> dict[str, Any]:
    from ray_lance_stream.cli import describe
    from ray_lance_stream.explaining import OfflinePlan

    ref = options.table_ref(uri, table, storage_options)
    plan = OfflinePlan.of_provenance(ref, state.provenance)
    left = describe.left_of(state, plan, global_batch_size, drop_last=drop_last)
    return {"latest_version": ref.open().version, **left}


def _files_text(files: tuple[str, ...]) -> str:
    return text.printable(files[0]) if len(files) == 1 else f"{text.printable(files[0])} and {len(files) - 1} more"


def _facts(entry: dict[str, Any]) -> list[tuple[str, str]]:
    progress, provenance, table = entry["progress"], entry["provenance"], entry.get("table")
    pairs = [("epoch", f"{progress['epoch']} (counted from 0)"), ("consumed", _consumed_text(progress, provenance))]
    skipped = progress.get("rows_skipped_per_split")
    if skipped:
        pairs.append(("skipped", f"{text.plural(sum(skipped.values()), 'row')} ({_splits_text(skipped)})"))
    steps = table if table is not None and "step" in table else entry.get("steps")
    if steps is not None:
        pairs.append(("step", _step_text(steps, "row" if provenance["pack_sequences"] is None else "block")))
    if table is not None:
        pairs.append(("left", _left_text(table)))
        dropped = table["dropped_rows"]
        if dropped:
            pairs.append(("left out", f"{text.plural(dropped, 'row')} of every epoch, which fill no cycle or step"))
    pairs.append(("table", _table_text(provenance, table)))
    pairs.append(("filter", "none" if provenance["filter"] is None else text.printable(provenance["filter"])))
    pairs.append(("order", _order(provenance)))
    pairs.append(("splits", text.number(provenance["num_splits"])))
    if provenance["pack_sequences"] is not None:
        pairs.append(("packing", _packing_text(provenance["pack_sequences"])))
    if provenance.get("skipped_cycles"):
        pairs.append(("skip_steps", _skips_text(provenance["skipped_cycles"], steps)))
    for field, value in provenance.items():
        if field not in _TOLD and value is not None:
            pairs.append((field, text.cell(value)))
    return pairs


def _order(provenance: dict[str, Any]) -> str:
    from ray_lance_stream.cli.describe import order_text

    return order_text(provenance)


def _consumed_text(progress: dict[str, Any], provenance: dict[str, Any]) -> str:
    splits = provenance["num_splits"]
    if "blocks_per_split" in progress:
        given = " or ".join(map(text.number, progress["blocks_per_split"]))
        return (
            f"{text.plural(progress['blocks_consumed'], 'block')}: {given} of each of {text.plural(splits, 'split')}, "
            f"from {text.plural(progress['documents_begun'], 'document')}"
        )
    counts = progress["rows_per_split"]
    rows = text.plural(progress["rows_consumed"], "row")
    if not counts["different"]:
        return f"{rows}: {text.number(counts['most'])} of each of {text.plural(splits, 'split')}"
    others = f", the others: {counts['most']:,}" if len(counts["different"]) < splits else ""
    return (
        f"{rows}: {counts['min']:,} to {counts['max']:,} of each of {text.plural(splits, 'split')} "
        f"({_splits_text(counts['different'])}{others}); {text.plural(progress['cycles_completed'], 'cycle')} complete"
    )


def _skips_text(cycles: list[list[int]], steps: dict[str, Any] | None) -> str:
    if steps is not None:
        return "; ".join(f"epoch {e}, {text.span('step', first, last)}" for e, first, last in steps["skip_steps"])
    return "; ".join(f"epoch {e}, {text.span('cycle', start, stop - 1)}" for e, start, stop in cycles)


def _splits_text(counts: dict[str, int]) -> str:
    shown = [f"split {split}: {count:,}" for split, count in list(counts.items())[:_SHOWN_SPLITS]]
    more = [f"and {len(counts) - _SHOWN_SPLITS:,} more splits"] if len(counts) > _SHOWN_SPLITS else []
    return ", ".join(shown + more)


def _packing_text(packing: dict[str, int]) -> str:
    return (
        f"blocks of {text.plural(packing['pack_sequences'], 'token')}, {text.number(packing['blocks_per_epoch'])} "
        f"in an epoch; eos_id {packing['eos_id']}, pad_id {packing['pad_id']}"
    )


def _step_text(steps: dict[str, Any], unit: str) -> str:
    of = f" of {steps['num_steps']:,}" if "num_steps" in steps else ""
    done = f"{steps['step']:,}{of} finished, with global batches of {text.plural(steps['global_batch_size'], unit)}"
    inside = steps["cycles_into_next_step"]
    if not inside:
        return done
    why = "" if of else "this is the epoch's short last step, or "
    return f"{done}; {text.plural(inside, 'cycle')} into the next one: {why}the run has another global batch size"


def _left_text(table: dict[str, Any]) -> str:
    steps = f" in {text.plural(table['steps_left'], 'step')}" if "steps_left" in table else ""
    return (
        f"{text.plural(table['rows_left'], 'row')}{steps} of this epoch ({text.plural(table['cycles_left'], 'cycle')})"
    )


def _table_text(provenance: dict[str, Any], table: dict[str, Any] | None) -> str:
    said = f"version {provenance['table_version']}, fingerprint {text.printable(provenance['table_fingerprint'])}"
    if table is None:
        return said
    rows = text.plural(table["table_rows"], "row")
    if provenance["filter"] is not None:
        rows += f", {text.number(table['rows'])} of which satisfy the filter"
    newer = table["latest_version"]
    latest = "the latest" if newer == provenance["table_version"] else f"the latest is {newer}"
    return f"{said}; found there, {rows}; {latest}"
