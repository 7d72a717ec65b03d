"""The stream's file in a checkpoint directory: plain JSON, read without executing anything."""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
from pyarrow import fs as pafs

from ray_lance_stream.errors import ConfigError, MissingStateError, StateError, explain, shown
from ray_lance_stream.provenance import Provenance
from ray_lance_stream.state import StreamState, merge_states

logger = logging.getLogger("ray_lance_stream")

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
        try:
            filesystem, inner = pafs.FileSystem.from_uri(text)
        except pa.ArrowInvalid as error:
            raise ConfigError(
                explain(
                    "this is no URI of a checkpoint",
                    found=f"{text} ({error})",
                    expected="a path, or a URI such as s3://bucket/runs/name/checkpoint",
                    remedy="correct it; a ray.train.Checkpoint carries its file system with it",
                )
            ) from error
        return filesystem, inner
    return pafs.LocalFileSystem(), str(Path(text).expanduser().resolve())


def write_streams(
    filesystem: pafs.FileSystem,
    directory: str,
    streams: Mapping[str, StreamState],
    rank: int | None = None,
    stamp: tuple[int, int] = (0, 0),
) -> None:
    """Writes the states of a run's streams, by name, into a checkpoint directory.

    Args:
        filesystem: Where the directory is.
        directory: The checkpoint directory; must exist on a local file system.
        streams: One state per stream.
        rank: None for the merged state of all replicas; a world rank for one replica's own.
        stamp: (incarnation, number of the save): of the files in a directory that was used before, only those
            with the largest stamp count.
    """
    content = {
        "kind": _KIND,
        "version": _VERSION,
        "stamp": list(stamp),
        "streams": {name: state.to_dict(compact=True) for name, state in streams.items()},
    }
    name = FILE_NAME if rank is None else _RANK_FILE.format(rank=rank)
    data = json.dumps(content, indent=1, sort_keys=True).encode()
    part = f"{directory}/{name}.{uuid.uuid4().hex[:8]}.part"  # ranks may write into one shared directory
    with filesystem.open_output_stream(part) as out:
        out.write(data)
    filesystem.move(part, f"{directory}/{name}")


def read_streams(filesystem: pafs.FileSystem, directory: str) -> Streams | None:
    """Reads the states in a checkpoint directory (or in one of our files), by stream name.

    Returns:
        The states, or None if there is no file of ours.

    Raises:
        StateError: A file is damaged, truncated or foreign, or the ranks' files do not fit together.
    """
    info = filesystem.get_file_info(directory)
    if info.type == pafs.FileType.File:
        return _read_file(filesystem, directory).streams
    if info.type != pafs.FileType.Directory:
        return None
    names = sorted(f.base_name for f in filesystem.get_file_info(pafs.FileSelector(directory)))
    ours = [n for n in names if n == FILE_NAME or (n.startswith(_RANK_PREFIX) and n.endswith(".json"))]
    found = [_read_file(filesystem, f"{directory}/{name}") for name in ours]
    if not found:
        return None
    newest = max(content.stamp for content in found)
    latest = [content for content in found if content.stamp == newest]
    if latest[0].merged:  # sorts first
        return latest[0].streams
    streams = sorted({name for content in latest for name in content.streams})
    parts = {name: [content.streams[name] for content in latest if name in content.streams] for name in streams}
    # A single part is handed on as it is: the files of save_rank_state have a name each, and are merged later.
    return {name: states[0] if len(states) == 1 else merge_states(states) for name, states in parts.items()}


@dataclass(frozen=True)
class _Content:
    """What one of our files says."""

    stamp: tuple[int, int]
    merged: bool
    streams: Streams


def _read_file(filesystem: pafs.FileSystem, path: str) -> _Content:
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
    stamp = content.get("stamp")
    if not isinstance(stamp, list) or len(stamp) != 2 or not all(type(part) is int for part in stamp):
        raise _damaged(path, "no stamp that says when it was written")
    try:
        streams = {str(name): StreamState.from_dict(state) for name, state in content["streams"].items()}
    except StateError as error:
        raise StateError(f"{path}: {error}") from error
    return _Content((stamp[0], stamp[1]), not path.rsplit("/", 1)[-1].startswith(_RANK_PREFIX), streams)


def _damaged(path: str, found: str) -> StateError:
    return StateError(
        explain(
            f"the stream state in {path} cannot be read",
            found=found,
            expected="the file as it was written",
            remedy="resume from an earlier checkpoint of the run (the directories beside it)",
        )
    )


def resume_states(resume_from: object, on_missing_state: str, *, of: Callable[[], Provenance]) -> Streams | None:
    """Reads a stream's ``resume_from`` on the driver, so that a bad one fails there and workers need no access to it.

    Args:
        resume_from: A checkpoint's path or URI, a ``ray.train.Checkpoint``, a state dict, or None.
        on_missing_state: "error", or "restart": None for a checkpoint without our file.
        of: Returns what a state of ``lancedb.streaming``, which does not say it, is taken to belong to.
    """
    if resume_from is None:
        return None
    if isinstance(resume_from, Mapping):
        is_foreign = "provenance" not in resume_from
        return _AnyName({"": StreamState.from_dict(resume_from, of=of() if is_foreign else None)})
    if isinstance(resume_from, (str, Path)):
        filesystem, path = locate(resume_from)
    elif hasattr(resume_from, "filesystem") and hasattr(resume_from, "path"):
        filesystem, path = resume_from.filesystem, str(resume_from.path)
    else:
        raise StateError(
            explain(
                "resume_from is not a state",
                found=f"an object of type {type(resume_from).__name__}",
                expected="a checkpoint's path or URI, a ray.train.Checkpoint, or a state dict",
                remedy="pass one of these",
            )
        )
    states = read_streams(filesystem, path)
    if states is None:
        if on_missing_state == "restart":
            logger.warning("%s holds no stream state; starting from the beginning", path)
            return None
        raise MissingStateError(
            explain(
                f"there is no stream state in {path}",
                found="no lance_stream.json",
                expected="a checkpoint written by ray_lance_stream.report() or with save_state()",
                remedy="pass such a checkpoint, or on_missing_state='restart'",
            )
        )
    return states


class _AnyName(dict[str, StreamState]):
    """A single state that fits a stream of any name."""

    def __contains__(self, name: object) -> bool:
        return True

    def __getitem__(self, name: str) -> StreamState:
        return super().__getitem__("")
