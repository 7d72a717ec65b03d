"""The stream's file in a checkpoint directory: plain JSON, read without executing anything."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from pyarrow import fs as pafs

from ray_lance_stream.errors import StateError, explain, shown
from ray_lance_stream.state import StreamState, merge_states

FILE_NAME: Final = "lance_stream.json"
_RANK_FILE: Final = "lance_stream.rank-{rank:05d}.json"
_RANK_PREFIX: Final = "lance_stream.rank-"
_KIND: Final = "ray_lance_stream.checkpoint"
_VERSION: Final = 1
_MAX_BYTES: Final = 256 * 1024 * 1024  # larger than any state; a foreign file is not read into memory

Streams = dict[str, StreamState]


def locate(path: str | Path) -> tuple[pafs.FileSystem, str]:
    """Returns the file system and the path on it, for a local path or a URI (``s3://...``)."""
    text = str(path)
    if "://" in text:
        filesystem, inner = pafs.FileSystem.from_uri(text)
        return filesystem, inner
    return pafs.LocalFileSystem(), str(Path(text).expanduser().resolve())


def write_streams(
    filesystem: pafs.FileSystem, directory: str, streams: Mapping[str, StreamState], rank: int | None = None
) -> None:
    """Writes the states of a run's streams, by name, into a checkpoint directory.

    Args:
        filesystem: Where the directory is.
        directory: The checkpoint directory; must exist on a local file system.
        streams: One state per stream.
        rank: None for the merged state of all replicas; a world rank for one replica's own.
    """
    content = {
        "kind": _KIND,
        "version": _VERSION,
        "streams": {name: state.to_dict(compact=True) for name, state in streams.items()},
    }
    name = FILE_NAME if rank is None else _RANK_FILE.format(rank=rank)
    data = json.dumps(content, indent=1, sort_keys=True).encode()
    with filesystem.open_output_stream(f"{directory}/{name}.part") as out:
        out.write(data)
    filesystem.move(f"{directory}/{name}.part", f"{directory}/{name}")


def read_streams(filesystem: pafs.FileSystem, directory: str) -> Streams | None:
    """Reads the states in a checkpoint directory (or in one of our files), by stream name.

    Returns:
        The states, or None if there is no file of ours.

    Raises:
        StateError: A file is damaged, truncated or foreign, or the ranks' files do not fit together.
    """
    info = filesystem.get_file_info(directory)
    if info.type == pafs.FileType.File:
        return _read_file(filesystem, directory)
    if info.type != pafs.FileType.Directory:
        return None
    merged = f"{directory}/{FILE_NAME}"
    if filesystem.get_file_info(merged).type == pafs.FileType.File:
        return _read_file(filesystem, merged)
    files = filesystem.get_file_info(pafs.FileSelector(directory))
    ranks = sorted(f.path for f in files if f.base_name.startswith(_RANK_PREFIX) and f.base_name.endswith(".json"))
    if not ranks:
        return None
    parts = [_read_file(filesystem, path) for path in ranks]
    names = sorted({name for part in parts for name in part})
    return {name: merge_states([part[name] for part in parts if name in part]) for name in names}


def _read_file(filesystem: pafs.FileSystem, path: str) -> Streams:
    size = filesystem.get_file_info(path).size
    if size is not None and size > _MAX_BYTES:
        raise _damaged(path, f"{size} bytes, far more than a state has")
    with filesystem.open_input_stream(path) as source:
        data = source.read()
    try:
        content: Any = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise _damaged(path, f"{len(data)} bytes that are not JSON ({type(error).__name__})") from error
    if not isinstance(content, dict) or content.get("kind") != _KIND or not isinstance(content.get("streams"), dict):
        raise _damaged(path, "JSON that this package did not write")
    if content.get("version") != _VERSION:
        raise _damaged(path, f"format version {shown(content.get('version'))}, this package reads {_VERSION}")
    try:
        return {str(name): StreamState.from_dict(state) for name, state in content["streams"].items()}
    except StateError as error:
        raise StateError(f"{path}: {error}") from error


def _damaged(path: str, found: str) -> StateError:
    return StateError(
        explain(
            f"the stream state in {path} cannot be read",
            found=found,
            expected="the file as it was written",
            remedy="resume from an earlier checkpoint of the run (the directories beside it)",
        )
    )
