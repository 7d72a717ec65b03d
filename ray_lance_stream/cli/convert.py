"""``ray-lance-stream convert``: merges and rewrites the files that hold a stream's state."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import click

from ray_lance_stream.cli import options, text

if TYPE_CHECKING:
    from pyarrow import fs as pafs

    from ray_lance_stream.checkpoint import Streams
    from ray_lance_stream.cli.loading import Loaded

_CHECKPOINT: Final = "checkpoint"
_STATE_DICT: Final = "state-dict"
_FORCE: Final = "pass --force to replace it"


@click.command(short_help="Merge or rewrite the files of a checkpoint.")
@click.argument("source", metavar="IN", callback=options.uri_given)
@click.argument("target", metavar="OUT", callback=options.uri_given)
@click.option("--to", "kind", type=click.Choice([_CHECKPOINT, _STATE_DICT]), required=True, help="What to write.")
@click.option("--name", metavar="NAME", help="The stream: to pick one of several, or to name a state dict's (train).")
@click.option("--force", is_flag=True, help="Replace a state that is there already.")
@options.uri_option
@options.table_option
@options.lancedb_state
@options.storage_option
@options.debug
def convert(
    source: str,
    target: str,
    kind: str,
    name: str | None,
    force: bool,
    uri: str | None,
    table: str | None,
    storage_options: Mapping[str, str],
    **order_options: Any,
) -> None:
    """Write the state in IN to OUT in another form.

    IN is a checkpoint directory, one of its files, or a JSON file with a state dict. --to checkpoint writes
    lance_stream.json into the directory OUT, which may be IN: the files of single ranks, which a run leaves if its
    state manager was lost, are merged into it. --to state-dict writes what shard.state_dict() returns, as JSON, which
    StreamingDataset of lancedb.streaming continues too if it is in LanceDB's order.

    A state dict that lancedb.streaming wrote does not say what it belongs to. Say it with --uri and --table, and
    --version, --filter, --no-shuffle and --shuffle-clump-size if they were not the defaults.

    \b
    Examples:
      ray-lance-stream convert /runs/a/ckpt_12 /runs/a/ckpt_12 --to checkpoint
      ray-lance-stream convert /runs/a/ckpt_12 state.json --to state-dict
      ray-lance-stream convert state.json /runs/b/start --to checkpoint
      ray-lance-stream convert lancedb.json /runs/c/start --to checkpoint \\
          --uri /data/db --table digits --version 7
    """
    said = options.LanceDBState(uri, table, storage_options, **order_options)
    from ray_lance_stream.checkpoint import locate
    from ray_lance_stream.cli.loading import load

    loaded = load(source, said.of)
    said.check_used()
    filesystem, path = locate(target)
    if kind == _STATE_DICT:
        _write_state_dict(loaded, filesystem, path, name, force=force)
    else:
        _write_checkpoint(loaded, filesystem, path, name, force=force)


def _write_checkpoint(loaded: Loaded, filesystem: pafs.FileSystem, path: str, name: str | None, *, force: bool) -> None:
    from ray_lance_stream.checkpoint import FILE_NAME, write_streams
    from ray_lance_stream.cli.loading import load_from, newest_stamp, one_stream, our_files

    directory = path.removesuffix(f"/{FILE_NAME}")
    if directory.endswith(".json") or filesystem.get_file_info(directory).is_file:
        raise _refused("OUT is not a directory", directory, "the directory of a checkpoint", "pass one")
    streams: Streams = loaded.streams
    if name is not None:
        streams = dict([one_stream(loaded, name)])
    there = our_files(filesystem, directory)
    in_place = loaded.filesystem == filesystem and loaded.path == directory
    if there and not force and (FILE_NAME in there or not in_place):
        raise _refused("there is a state in OUT already", f"{', '.join(there)} in {directory}", "none", _FORCE)
    filesystem.create_dir(directory)
    # Of the files in a directory those with the newest stamp count, and the merged one before those of ranks.
    write_streams(filesystem, directory, streams, stamp=newest_stamp(filesystem, directory, there))
    _verify(load_from(filesystem, directory).streams, streams, directory)
    _say(f"{directory}/{FILE_NAME}", streams)


def _write_state_dict(loaded: Loaded, filesystem: pafs.FileSystem, path: str, name: str | None, *, force: bool) -> None:
    from ray_lance_stream.cli.loading import load_from, one_stream

    chosen, state = one_stream(loaded, name)
    info = filesystem.get_file_info(path)
    if path.endswith("/") or info.type.name == "Directory":
        raise _refused("OUT is a directory", path, "the name of a file", "add one, such as state.json")
    if info.is_file and not force:
        raise _refused("OUT exists already", path, "no file of that name", _FORCE)
    part = f"{path}.{uuid.uuid4().hex[:8]}.part"
    with filesystem.open_output_stream(part) as out:
        out.write(json.dumps(state.to_dict(), indent=1).encode())
    filesystem.move(part, path)
    _verify(list(load_from(filesystem, path).streams.values()), [state], path)
    _say(path, {chosen: state})


def _verify(found: object, expected: object, path: str) -> None:
    """Raises StateError unless what was written is what is read."""
    from ray_lance_stream.errors import StateError, explain

    if found != expected:
        raise StateError(
            explain(
                f"what is read from {path} is not what was written",
                found="another state",
                expected="the same",
                remedy="check what else writes there, and convert again",
            )
        )


def _say(path: str, streams: Streams) -> None:
    click.echo(f"wrote {text.printable(path)}")
    for name, state in streams.items():
        unit, counts = "row", state.samples.to_list()
        if state.packed is not None:
            unit, counts = "block", [cursor.blocks for cursor in state.packed]
        consumed = text.plural(sum(counts), unit)
        click.echo(f"  {text.printable(name)}: epoch {state.epoch}, {consumed} consumed")


def _refused(what: str, found: str, expected: str, remedy: str) -> Exception:
    from ray_lance_stream.errors import ConfigError, explain

    return ConfigError(explain(what, found=found, expected=expected, remedy=remedy))
