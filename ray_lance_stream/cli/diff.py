"""``ray-lance-stream diff``: what differs between two checkpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import click

from ray_lance_stream.cli import options, text

if TYPE_CHECKING:
    from ray_lance_stream.state import StreamState

_DIFFERENT: Final = 1  # exit code
_NAMES: Final = {"rows_skipped_per_split": "rows_skipped"}
_UNSHUFFLED: Final = ("shuffle_seed", "shuffle_clump_size")  # neither matters to an unshuffled order


@click.command(short_help="Compare two checkpoints.")
@click.argument("first", metavar="CHECKPOINT", callback=options.uri_given)
@click.argument("second", metavar="CHECKPOINT", callback=options.uri_given)
@options.json_output
@options.debug
@click.pass_context
def diff(context: click.Context, first: str, second: str, json_output: bool) -> None:
    """Compare the streams of two checkpoints: what they were consumed from, and how far.

    Each CHECKPOINT is a directory, a lance_stream.json or a JSON file with a state dict, as a path or a URI. Exit
    code: 0 if nothing differs, 1 if something does, 2 on an error.

    \b
    Example:
      ray-lance-stream diff /runs/a/checkpoint_000012 /runs/b/checkpoint_000012
    """
    from ray_lance_stream.cli.loading import load

    left, right = load(first), load(second)
    a, b = left.streams, right.streams
    if left.is_state_dict != right.is_state_dict and len(a) == len(b) == 1:
        # A state dict has no name: it is compared with the one stream there is.
        name = next(iter(b if left.is_state_dict else a))
        a, b = ({name: state} for streams in (a, b) for state in streams.values())
    found = {name: _compare(a.get(name), b.get(name)) for name in sorted({*a, *b})}
    if json_output:
        click.echo(text.as_json({"first": left.path, "second": right.path, "streams": found}))
    else:
        _print(found)
    if any(found.values()):
        context.exit(_DIFFERENT)


def _compare(a: StreamState | None, b: StreamState | None) -> dict[str, list[Any]]:
    """Returns {field: [first, second]} for what differs."""
    from ray_lance_stream.cli.describe import progress_of, provenance_of

    if a is None or b is None:
        return {"present": [a is not None, b is not None]}
    was, now = provenance_of(a), provenance_of(b)
    if not was["shuffle"] and not now["shuffle"]:
        for name in _UNSHUFFLED:
            del was[name], now[name]
    was |= progress_of(a)
    now |= progress_of(b)
    return {name: [was.get(name), now.get(name)] for name in {**was, **now} if was.get(name) != now.get(name)}


def _print(found: dict[str, dict[str, list[Any]]]) -> None:
    for name, fields in found.items():
        if not fields:
            click.echo(f"{text.printable(name)}: no difference")
            continue
        click.echo(f"{text.printable(name)}:")
        if "present" in fields:
            click.echo(f"  only in the {'first' if fields['present'][0] else 'second'} checkpoint")
            continue
        rows = [
            [_NAMES.get(field, field), _shown(field, was), _shown(field, now)] for field, (was, now) in fields.items()
        ]
        click.echo(_side_by_side(rows))


def _side_by_side(rows: list[list[str]]) -> str:
    """Returns both values in one line, or one below the other where that is too long: nothing may be cut here."""
    header = ["", "first", "second"]
    if text.table_width(header, rows) <= text.width():
        return text.table(header, rows, left=range(len(header)))
    lines = []
    for field, was, now in rows:
        lines += [f"  {field}", text.facts([("  first", was), ("  second", now)])]
    return "\n".join(lines)


def _shown(field: str, value: Any) -> str:
    if value is None:  # of a field that only packed states have, or only states of rows
        return "none"
    if field == "rows_per_split":
        if not value["different"]:
            return f"{value['most']:,} of each"
        return f"{value['min']:,} to {value['max']:,}, {len(value['different']):,} differ"
    if field == "rows_skipped_per_split":
        return f"{sum(value.values()):,} in {len(value):,} splits" if value else "none"
    return text.cell(value)
