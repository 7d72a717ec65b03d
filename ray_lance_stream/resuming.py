"""What to resume from: ``resume_from``, and the way back where a checkpoint's state cannot be used."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, TypeVar

from pyarrow import fs as pafs

from ray_lance_stream.checkpoint import Streams, is_our_file, locate, read_json, read_saved, read_streams, strict_json
from ray_lance_stream.errors import LanceStreamError, MissingStateError, StateError, StateMismatchError, explain
from ray_lance_stream.provenance import Provenance
from ray_lance_stream.state import StreamState

logger = logging.getLogger("ray_lance_stream")

# What Ray Train writes into a run's directory about the run's checkpoints.
SNAPSHOT: Final = "checkpoint_manager_snapshot.json"
_EARLIER: Final = "earlier checkpoint of the run"
_MAX_LOOK: Final = 64  # checkpoints looked into for an earlier one
_SCHEMES: Final = {"s3": "s3", "gcs": "gs", "abfs": "abfs"}

E = TypeVar("E", bound=LanceStreamError)


def resume_states(resume_from: object, on_missing_state: str, *, of: Callable[[], Provenance]) -> Streams | None:
    """Reads a stream's ``resume_from`` on the driver, so that a bad one fails there and workers need no access to it.

    Args:
        resume_from: A checkpoint's path or URI, a ``ray.train.Checkpoint``, a state dict, a JSON file of one, or None.
        on_missing_state: "error", or "restart": None for a checkpoint without our file.
        of: Returns what a state of ``lancedb.streaming``, which does not say it, is taken to belong to.

    Raises:
        StateError: It is damaged. The message names the newest earlier checkpoint that is not, if there is one.
        MissingStateError: There is none; likewise.
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
    state = read_state_dict(filesystem, path, of)
    if state is not None:
        return _AnyName({"": state})
    try:
        states = read_streams(filesystem, path)
        if states is None and on_missing_state != "restart":
            raise _missing(filesystem, path)
    except (StateError, MissingStateError) as error:
        raise with_way_back(error, filesystem, path, bool) from error
    if states is None:
        logger.warning("%s holds no stream state; starting from the beginning", path)
    return states


def read_state_dict(filesystem: pafs.FileSystem, path: str, of: Callable[[], Provenance] | None) -> StreamState | None:
    """Reads a JSON file that holds a state dict; None for what may be a checkpoint, or one of its files.

    Args:
        filesystem: Where it is.
        path: The file.
        of: Returns what a state of ``lancedb.streaming`` is taken to belong to.

    Raises:
        StateError: It holds anything else, or a damaged state.
    """
    if filesystem.get_file_info(path).type != pafs.FileType.File or is_our_file(path):
        return None
    content = None
    try:
        content = read_json(filesystem, path)
        found = f"a {type(content).__name__}"
    except ValueError as error:
        found = str(error)
    if isinstance(content, dict) and "kind" in content:
        return None  # a file of a checkpoint, under another name
    if not isinstance(content, dict):
        raise StateError(
            explain(
                f"{path} holds no stream state",
                found=found,
                expected="a checkpoint's directory, or a JSON file with what state_dict() returned",
                remedy="of a file that torch.save wrote pass the state in it: resume_from=torch.load(...)[...]",
            )
        )
    return StreamState.from_dict(content, of=None if of is None or "provenance" in content else of())


def with_way_back(error: E, filesystem: pafs.FileSystem, path: str, fits: Callable[[Streams], bool]) -> E:
    """Returns an error about a checkpoint's state, with the newest earlier checkpoint that can be resumed from.

    Args:
        error: What is wrong with the state.
        filesystem: Where the checkpoint is.
        path: The checkpoint's directory, or one of our files in it.
        fits: Whether the states of a checkpoint would do.
    """
    found = None
    with suppress(OSError):  # the storage may refuse to be listed; what is wrong matters more than where to go on
        found = intact_beside(filesystem, path, fits)
    if found is not None:
        which, place = found
        same_run = "" if which == _EARLIER else "if that is one of the same run, "
        hint = (
            f"The newest {which} whose state is intact is {place}: {same_run}to go on from there, fit under another "
            f"RunConfig(name=...) with resume_from={place!r}, and load the weights from it as well."
        )
    elif isinstance(error, (StateMismatchError, MissingStateError)):
        return error
    else:
        hint = (
            "No other checkpoint beside it has a state that can be used. To begin the stream anew with the weights of "
            "this one, remove its stream state (lance_stream*.json) and pass on_missing_state='restart'."
        )
    text = f"{error} {hint}"
    if isinstance(error, StateMismatchError):
        return type(error)(text, error.field, error.saved, error.current)
    return type(error)(text)


def intact_beside(filesystem: pafs.FileSystem, path: str, fits: Callable[[Streams], bool]) -> tuple[str, str] | None:
    """Finds the newest checkpoint before another of the same run whose states are intact and fit.

    What counts as the same run is the directory: Ray Train keeps a run's checkpoints side by side. Their order is
    that in which they were reported, where Ray Train's snapshot tells it. Where it does not, our own stamps tell
    which is the newest of the others.

    Args:
        filesystem: Where the checkpoint is.
        path: The checkpoint's directory, or one of our files in it.
        fits: Whether the states of a checkpoint would do.

    Returns:
        What it is, and its path, or its URI where the file system has one; None if there is none.
    """
    path = path.rstrip("/")
    if filesystem.get_file_info(path).type == pafs.FileType.File:
        path = path.rpartition("/")[0]
    run, _, name = path.rpartition("/")
    if not run or not name:
        return None
    reported = reported_in(filesystem, run)
    if name in reported:
        earlier = [other for other, number in reported.items() if number < reported[name]]
        for other in sorted(earlier, key=lambda other: reported[other], reverse=True)[:_MAX_LOOK]:
            if _stamp_if_intact(filesystem, f"{run}/{other}", fits) is not None:
                return _EARLIER, shown_place(filesystem, f"{run}/{other}")
        return None
    beside = filesystem.get_file_info(pafs.FileSelector(run, allow_not_found=True))
    names = sorted(info.base_name for info in beside if info.type == pafs.FileType.Directory and info.base_name != name)
    stamps = {other: _stamp_if_intact(filesystem, f"{run}/{other}", fits) for other in names[-_MAX_LOOK:]}
    intact = [(stamp, other) for other, stamp in stamps.items() if stamp is not None]
    return ("checkpoint beside it", shown_place(filesystem, f"{run}/{max(intact)[1]}")) if intact else None


def shown_place(filesystem: pafs.FileSystem, path: str) -> str:
    """Returns a path as a user would write it: with the scheme of an object store."""
    scheme = _SCHEMES.get(filesystem.type_name)
    return path if scheme is None else f"{scheme}://{path}"


def reported_in(filesystem: pafs.FileSystem, run: str) -> dict[str, int]:
    """Returns the run's checkpoints by name, with the number of the report; none if Ray Train does not tell."""
    try:
        with filesystem.open_input_stream(f"{run}/{SNAPSHOT}") as source:
            snapshot: Any = strict_json(source.read())
        names = [result["checkpoint_dir_name"] for result in snapshot["checkpoint_results"]]
        return dict(zip(names, map(int, snapshot["checkpoint_report_indices"]), strict=True))
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        OverflowError,
    ):  # no run of Ray Train, or of a version that writes otherwise
        return {}


def _stamp_if_intact(filesystem: pafs.FileSystem, path: str, fits: Callable[[Streams], bool]) -> tuple[int, int] | None:
    with suppress(StateError, OSError):
        saved = read_saved(filesystem, path)
        if saved is not None and fits(saved.streams):
            return saved.stamp
    return None


def _missing(filesystem: pafs.FileSystem, path: str) -> MissingStateError:
    gone = filesystem.get_file_info(path).type == pafs.FileType.NotFound
    return MissingStateError(
        explain(
            f"there is no stream state in {path}",
            found="no such directory" if gone else "no lance_stream.json",
            expected="a checkpoint written by ray_lance_stream.report() or with save_state()",
            remedy="pass such a checkpoint" + ("" if gone else ", or on_missing_state='restart'"),
        )
    )


class _AnyName(dict[str, StreamState]):
    """A single state that fits a stream of any name."""

    def __contains__(self, name: object) -> bool:
        return True

    def __getitem__(self, name: str) -> StreamState:
        return super().__getitem__("")
