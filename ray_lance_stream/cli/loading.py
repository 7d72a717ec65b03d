"""Reads what the commands look at: a checkpoint, or a state dict in a JSON file. Executes nothing."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from pyarrow import fs as pafs

from ray_lance_stream.checkpoint import FILE_NAME, Streams, is_our_file, locate, read_streams, strict_json
from ray_lance_stream.errors import ConfigError, MissingStateError, explain, shown
from ray_lance_stream.provenance import Provenance
from ray_lance_stream.resuming import SNAPSHOT, read_state_dict, reported_in
from ray_lance_stream.state import StreamState

DEFAULT_NAME: Final = "train"
_MAX_SHOWN: Final = 400  # characters of the names of streams
_MAX_LOOK: Final = 100  # directories looked into for a hint

Stamp = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """Streams that were read, and where from.

    Attributes:
        filesystem: The file system.
        path: The path on it, of a directory or a file.
        files: The stream's files in the directory, by name; or the file's name.
        streams: The states; a state dict's stream is called "train".
        is_state_dict: Whether it was a state dict rather than a checkpoint.
    """

    filesystem: pafs.FileSystem
    path: str
    files: tuple[str, ...]
    streams: Streams
    is_state_dict: bool


def load(text: str, of: Callable[[], Provenance] | None = None) -> Loaded:
    """Reads a checkpoint directory, one of its files, a JSON file with a state dict, or a run's newest checkpoint.

    Args:
        text: Its path or URI; or that of a run's directory, in which checkpoints lie.
        of: Returns what a state dict of ``lancedb.streaming``, which does not say it, belongs to.

    Raises:
        MissingStateError: There is nothing of the kind.
        StateError: It is damaged or foreign.
        ConfigError: The text is no path and no URI.
    """
    return load_from(*locate(text), of)


def load_from(filesystem: pafs.FileSystem, path: str, of: Callable[[], Provenance] | None = None) -> Loaded:
    """As :func:`load`, for a path on a file system."""
    if path.endswith(f"/{SNAPSHOT}"):  # it lies among the checkpoints, and has a name like theirs
        path = path.rpartition("/")[0]
    info = filesystem.get_file_info(path)
    if info.type == pafs.FileType.File:
        name = path.rsplit("/", 1)[-1]
        state = read_state_dict(filesystem, path, of)
        if state is not None:
            return Loaded(
                filesystem=filesystem, path=path, files=(name,), streams={DEFAULT_NAME: state}, is_state_dict=True
            )
    streams = read_streams(filesystem, path)
    if streams is None and (newest := _newest_below(filesystem, path, info)) is not None:
        path, info = newest, filesystem.get_file_info(newest)
        streams = read_streams(filesystem, path)
    if streams is None:
        raise MissingStateError(_nothing_there(path, info))
    files = (path.rsplit("/", 1)[-1],) if info.is_file else our_files(filesystem, path)
    return Loaded(filesystem=filesystem, path=path, files=files, streams=streams, is_state_dict=False)


def one_stream(loaded: Loaded, name: str | None) -> tuple[str, StreamState]:
    """Returns the stream of a name, or the only one. A state dict is the stream of any name.

    Raises:
        ConfigError: There is none of that name, or several and no name.
    """
    streams = loaded.streams
    if loaded.is_state_dict:
        return name or DEFAULT_NAME, streams[DEFAULT_NAME]
    if name is None and len(streams) == 1:
        return next(iter(streams.items()))
    if name is None or name not in streams:
        raise ConfigError(
            explain(
                "which stream is meant is not clear" if name is None else f"there is no stream {name!r}",
                found=f"{shown(sorted(streams), _MAX_SHOWN)} in {loaded.path}",
                expected="the name of one of them",
                remedy="pass --name",
            )
        )
    return name, streams[name]


def versions_in(text: str) -> set[int]:
    """Returns the table versions that a checkpoint refers to, or all the checkpoints that lie in a run's directory.

    Raises:
        MissingStateError: There is no checkpoint.
        StateError: One cannot be read: which version it refers to is not known.
    """
    filesystem, path = locate(text)
    streams = read_streams(filesystem, path)
    found = [] if streams is None else [streams]
    if streams is None and filesystem.get_file_info(path).type == pafs.FileType.Directory:
        below = filesystem.get_file_info(pafs.FileSelector(path))
        inner = [read_streams(filesystem, info.path) for info in below if info.type == pafs.FileType.Directory]
        found = [one for one in inner if one is not None]
    if not found:
        raise MissingStateError(_nothing_there(path, filesystem.get_file_info(path)))
    return {state.provenance.table.version for one in found for state in one.values()}


def our_files(filesystem: pafs.FileSystem, directory: str) -> tuple[str, ...]:
    """Returns the names of the stream's files in a directory, the merged one first; none if there is no directory."""
    found = filesystem.get_file_info(pafs.FileSelector(directory, allow_not_found=True))
    return tuple(sorted(f.base_name for f in found if f.is_file and is_our_file(f.base_name)))


def newest_stamp(filesystem: pafs.FileSystem, directory: str, files: tuple[str, ...]) -> Stamp:
    """Returns the newest stamp of files that can be read; (0, 0) if there is none."""
    stamps: list[Stamp] = [(0, 0)]
    for name in files:
        with filesystem.open_input_stream(f"{directory}/{name}") as source, suppress(ValueError, TypeError, KeyError):
            first, second = strict_json(source.read())["stamp"]
            if type(first) is int and type(second) is int:
                stamps.append((first, second))
    return max(stamps)


def _newest_below(filesystem: pafs.FileSystem, path: str, info: pafs.FileInfo) -> str | None:
    """Returns the checkpoint of a run's directory that the run would go on from; None if there is none.

    That is the last one of those that Ray Train knows of: one that was being reported when the run broke off is there
    as well, and is not taken. Where it does not tell, the stamps in the files tell which was written last.
    """
    if info.type != pafs.FileType.Directory:
        return None
    found = filesystem.get_file_info(pafs.FileSelector(path))
    directories = sorted((f.path for f in found if f.type == pafs.FileType.Directory), reverse=True)[:_MAX_LOOK]
    files = {directory: our_files(filesystem, directory) for directory in directories}
    with_ours = [directory for directory in directories if files[directory]]
    reported = reported_in(filesystem, path)
    known = [directory for directory in with_ours if directory.rpartition("/")[2] in reported]
    if known:
        return max(known, key=lambda place: reported[place.rpartition("/")[2]])
    return max(with_ours, key=lambda place: newest_stamp(filesystem, place, files[place]), default=None)


def _nothing_there(path: str, info: pafs.FileInfo) -> str:
    if info.type == pafs.FileType.NotFound:
        return explain(
            f"{path} does not exist",
            found="nothing",
            expected="a checkpoint directory or file",
            remedy="check the path",
        )
    return explain(
        f"there is no stream state in {path}",
        found=f"no {FILE_NAME}, there or in a directory below it",
        expected="a checkpoint written by ray_lance_stream.report() or with save_state(), or a run's directory of them",
        remedy="pass one",
    )
