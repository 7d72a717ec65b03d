"""The stream's file in a checkpoint directory: plain JSON, read without executing anything."""

from __future__ import annotations

import json
import os
import re
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
from pyarrow import fs as pafs

from ray_lance_stream.errors import ConfigError, StateError, explain, shown
from ray_lance_stream.redacting import hidden, in_uri, shown_uri
from ray_lance_stream.state import StreamState, merge_states
from ray_lance_stream.topology import Replica

FILE_NAME: Final = "lance_stream.json"
_RANK_FILE: Final = "lance_stream.rank-{rank:05d}.json"
_RANK_PREFIX: Final = "lance_stream.rank-"
_KIND: Final = "ray_lance_stream.checkpoint"
_VERSION: Final = 1
_LIST_OF_NUMBERS: Final = re.compile(r"\[\n[\s\d,-]*\]")
_MAX_BYTES: Final = 256 * 1024 * 1024  # larger than any state; a foreign file is not read into memory
_SHOWN_RANKS: Final = 16
_EARLIER: Final = "resume from an earlier checkpoint of the run (the directories beside it)"

Streams = dict[str, StreamState]


def locate(path: str | Path) -> tuple[pafs.FileSystem, str]:
    """Returns the file system and the path on it, for a local path or a URI (``s3://...``)."""
    text = str(path)
    if "://" in text:
        try:
            filesystem, inner = pafs.FileSystem.from_uri(text)
        except pa.ArrowInvalid as error:
            raise ConfigError(
                explain(
                    "this is no URI of a checkpoint",
                    found=f"{shown_uri(text)} ({hidden(str(error), in_uri(text))})",
                    expected="a path, or a URI such as s3://bucket/runs/name/checkpoint",
                    remedy="correct it; a ray.train.Checkpoint carries its file system with it",
                )
            ) from (None if in_uri(text) else error)
        return filesystem, inner
    try:
        text.encode()  # what Arrow takes
        local = Path(text).expanduser().resolve()
        with suppress(FileNotFoundError, NotADirectoryError, PermissionError):  # whoever reads it says what it found
            local.lstat()
        return pafs.LocalFileSystem(), str(local)
    except (OSError, RuntimeError, ValueError) as error:
        raise ConfigError(
            explain(
                "this is no path of a checkpoint",
                found=f"{shown(text)} ({error})",
                expected="a path, or a URI such as s3://bucket/runs/name/checkpoint",
                remedy="correct it",
            )
        ) from error


@dataclass(frozen=True, kw_only=True)
class Saved:
    """What a checkpoint says of a run's streams.

    Attributes:
        streams: Their states by name.
        stamp: (incarnation, progress): of the files in a directory that was used before, only those with the
            largest stamp count.
        run: Name of the run that wrote it; None if it is not known.
        parts: Only in a rank's own file, of streams in which the ranks' states may differ: the replica for whose
            splits this one is exact. Replicas consume their splits unevenly where rows may be skipped; one that
            is the only replica reads the whole stream by itself.
    """

    streams: Streams
    stamp: tuple[int, int] = (0, 0)
    run: str | None = None
    parts: Mapping[str, Replica] = field(default_factory=dict)


def write_streams(
    filesystem: pafs.FileSystem,
    directory: str,
    streams: Mapping[str, StreamState],
    rank: int | None = None,
    stamp: tuple[int, int] = (0, 0),
) -> None:
    """Writes the states of a run's streams, by name; see :func:`write_saved`."""
    write_saved(filesystem, directory, Saved(streams=dict(streams), stamp=stamp), rank)


def write_saved(filesystem: pafs.FileSystem, directory: str, saved: Saved, rank: int | None = None) -> None:
    """Writes the states of a run's streams into a checkpoint directory.

    Args:
        filesystem: Where the directory is.
        directory: The checkpoint directory; must exist on a local file system.
        saved: What to write.
        rank: None for the merged state of all replicas; a world rank for one replica's own.
    """
    content: dict[str, Any] = {
        "kind": _KIND,
        "version": _VERSION,
        "stamp": list(saved.stamp),
        "streams": {name: state.to_dict(compact=True) for name, state in saved.streams.items()},
    }
    if saved.run is not None:
        content["run"] = saved.run
    if saved.parts:
        content["parts"] = {name: [replica.dp_rank, replica.dp_size] for name, replica in saved.parts.items()}
    name = FILE_NAME if rank is None else _RANK_FILE.format(rank=rank)
    text = json.dumps(content, indent=1, sort_keys=True)
    # Lists of counts in one line each: 8,192 lines would be read by nobody. No text in JSON holds a line break.
    data = _LIST_OF_NUMBERS.sub(lambda found: "".join(found[0].split()), text).encode()
    part = f"{directory}/{name}.{uuid.uuid4().hex[:8]}.part"  # ranks may write into one shared directory
    with filesystem.open_output_stream(part) as out:
        out.write(data)
    filesystem.move(part, f"{directory}/{name}")


def is_our_file(path: str) -> bool:
    """Whether a file is, by its name, one that :func:`write_streams` writes."""
    name = path.rsplit("/", 1)[-1]
    return name == FILE_NAME or (name.startswith(_RANK_PREFIX) and name.endswith(".json"))


def read_streams(filesystem: pafs.FileSystem, directory: str) -> Streams | None:
    """Reads the states in a checkpoint directory (or in one of our files), by stream name; see :func:`read_saved`."""
    saved = read_saved(filesystem, directory)
    return None if saved is None else saved.streams


def read_saved(filesystem: pafs.FileSystem, directory: str) -> Saved | None:
    """Reads what a checkpoint directory (or one of our files) says of a run's streams.

    Returns:
        What it says, or None if there is no file of ours.

    Raises:
        StateError: A file is damaged, truncated or foreign, or the ranks' files do not fit together.
    """
    info = filesystem.get_file_info(directory)
    if info.type == pafs.FileType.File:
        saved = _read_file(filesystem, directory)
        return _merged(directory, [saved]) if saved.parts else saved
    if info.type != pafs.FileType.Directory:
        return None
    names = sorted(f.base_name for f in filesystem.get_file_info(pafs.FileSelector(directory)))
    if isinstance(filesystem, pafs.LocalFileSystem):
        names = sorted(os.listdir(directory))  # with links that lead nowhere, which Arrow leaves out
    ours = [name for name in names if is_our_file(name)]
    found = {name: _read_file(filesystem, f"{directory}/{name}") for name in ours}
    if not found:
        return None
    newest = max(saved.stamp for saved in found.values())
    latest = {name: saved for name, saved in found.items() if saved.stamp == newest}
    merged = latest.get(FILE_NAME)
    return merged if merged is not None else _merged(directory, list(latest.values()))


def _merged(directory: str, ranks: list[Saved]) -> Saved:
    """Puts together what the ranks wrote by themselves at one step."""
    streams: Streams = {}
    for name in sorted({name for saved in ranks for name in saved.streams}):
        by_itself = [saved.streams[name] for saved in ranks if saved.parts.get(name) == Replica()]
        if by_itself:
            streams[name] = by_itself[0]  # of the lowest rank, as where there is a state manager
            continue
        parts = {saved.parts[name] for saved in ranks if name in saved.parts}
        size = max((part.dp_size for part in parts), default=0)
        there = {part.dp_rank for part in parts}
        if len(there) < size:  # a file may claim any size: nothing of that length is made
            missing = list(islice((rank for rank in range(size) if rank not in there), _SHOWN_RANKS))
            raise StateError(
                explain(
                    f"the state of stream {name!r} in {directory} is not complete: its replicas consume their splits "
                    "unevenly, and some of their states are not there",
                    found=f"none of the replicas {missing}"
                    + (f" and {size - len(there) - len(missing)} more" if size - len(there) > len(missing) else ""),
                    expected="a file of every replica, as they were written",
                    remedy=_EARLIER,
                )
            )
        states = [saved.streams[name] for saved in ranks if name in saved.streams]
        # A single one is handed on as it is: the files of save_rank_state have a name each, and are merged later.
        streams[name] = states[0] if len(states) == 1 else merge_states(states)
    return Saved(streams=streams, stamp=ranks[0].stamp, run=ranks[0].run)


def _read_file(filesystem: pafs.FileSystem, path: str) -> Saved:
    if filesystem.get_file_info(path).type != pafs.FileType.File:
        raise _damaged(path, "a directory, or a link that leads nowhere")
    try:
        content = read_json(filesystem, path)
    except ValueError as error:
        raise _damaged(path, str(error)) from error
    if not isinstance(content, dict) or content.get("kind") != _KIND or not isinstance(content.get("streams"), dict):
        raise _damaged(path, "JSON that this package did not write")
    version = content.get("version")
    if version != _VERSION:
        newer = type(version) is int and version > _VERSION
        also = "use the version of ray_lance_stream that wrote it, or " if newer else ""
        found = f"format version {shown(version)}, this package reads {_VERSION}"
        raise _damaged(path, found, remedy=f"{also}{_EARLIER}")
    stamp = content.get("stamp")
    if not isinstance(stamp, list) or len(stamp) != 2 or not all(type(part) is int for part in stamp):
        raise _damaged(path, "no stamp that says when it was written")
    try:
        streams = {str(name): StreamState.from_dict(state) for name, state in content["streams"].items()}
        parts = {
            str(name): Replica(dp_rank=dp_rank, dp_size=dp_size)
            for name, (dp_rank, dp_size) in content.get("parts", {}).items()
        }
    except StateError as error:
        raise StateError(f"{path}: {error}") from error
    except (AttributeError, TypeError, ValueError) as error:  # a ConfigError is a ValueError
        raise _damaged(path, f"no list of the replicas whose states these are: {shown(content['parts'])}") from error
    for name, part in parts.items():
        if name not in streams or part.dp_size > streams[name].provenance.order.num_splits:
            raise _damaged(path, f"no list of the replicas whose states these are: {shown(content['parts'])}")
    run = content.get("run")
    return Saved(streams=streams, stamp=(stamp[0], stamp[1]), run=run if isinstance(run, str) else None, parts=parts)


def read_json(filesystem: pafs.FileSystem, path: str) -> Any:
    """Returns what a file says that may hold a state; see :func:`strict_json`.

    Raises:
        ValueError: It holds no JSON, or is too large for a state and was not read; says what it is.
    """
    info = filesystem.get_file_info(path)
    if info.size is not None and info.size > _MAX_BYTES:
        raise ValueError(f"{info.size} bytes, far more than a state has")
    with filesystem.open_input_stream(path) as source:
        data = source.read()
    try:
        return strict_json(data)
    except ValueError as error:
        raise ValueError(f"{len(data)} bytes that are not JSON ({type(error).__name__})") from error


def strict_json(data: bytes) -> Any:
    """Returns what JSON says, without what only Python reads: NaN, infinity, and keys that stand there twice.

    Raises:
        ValueError: It is not JSON, or is nested deeper than anything that was saved.
    """
    try:
        return json.loads(data, object_pairs_hook=_each_once, parse_constant=_no_number)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key stands there twice")
    return found


def _no_number(text: str) -> Any:
    raise ValueError(f"{text} is no number of JSON")


def _damaged(path: str, found: str, remedy: str | None = None) -> StateError:
    return StateError(
        explain(
            f"the stream state in {path} cannot be read",
            found=found,
            expected="the file as it was written",
            remedy=_EARLIER if remedy is None else remedy,
        )
    )
