"""States of several ranks brought together outside Ray Train: over ``torch.distributed``, or one file per rank."""

from __future__ import annotations

import pickle
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol, TypeAlias

from ray_lance_stream.checkpoint import locate, read_streams, write_streams
from ray_lance_stream.errors import ConfigError, LockstepError, MissingStateError, StateError, explain, shown
from ray_lance_stream.plan import require_int, whole
from ray_lance_stream.state import StreamState, merge_state_dicts, merge_states

_MAX_SHOWN: Final = 400  # characters of names in a message
_NAME: Final = re.compile(r"rank ([0-9]{1,9})(?: of ([0-9]{1,9}))?")


class HasState(Protocol):
    """What a state can be asked of: a dataset, a loader, a shard."""

    def state_dict(self) -> dict[str, Any]:
        """Returns the state."""


StateSource: TypeAlias = "HasState | Mapping[str, Any]"


@dataclass(frozen=True)
class _Report:
    """What one process contributes: a state or the error there was, and the dataset's seat if it has one."""

    seat: tuple[int, int] | None
    state: StreamState | None = None  # not the dict: that of 8,192 splits is a thousand times as large
    error: BaseException | None = None


def gather_state_dict(source: StateSource, group: Any = None) -> dict[str, Any]:
    """Returns the merged state of all ranks, the same on each of them. Every process of the group calls it.

    Call it after the same step on every rank. Processes that read the same rows, such as those of one model
    replica, may all take part.

    Args:
        source: This rank's dataset (or loader), or its ``state_dict()``.
        group: The process group; by default all processes. Its backend must carry Python objects: with NCCL
            each process needs its CUDA device set.

    Raises:
        ConfigError: ``torch.distributed`` is not initialised, and the dataset has more than one rank; or this
            process is not in the group.
        LockstepError: Some process ended, or did not call it within the group's timeout.
        StateError: The states do not fit together, or some rank had none; every rank gets the same error.
        StateMismatchError: They belong to different data; likewise.
    """
    from torch import distributed

    if not (distributed.is_available() and distributed.is_initialized()):
        return _alone(source)
    size = distributed.get_world_size(group)
    if size < 1:
        raise ConfigError(
            explain(
                "this process is not in the group",
                found=f"process {distributed.get_rank()}",
                expected="a process group that it is a member of",
                remedy="call gather_state_dict in the group's processes only",
            )
        )
    reports: list[Any] = [None] * size
    report = _report(source)
    try:
        distributed.all_gather_object(reports, report, group=group)
    except RuntimeError as error:  # torch's errors of communication
        raise LockstepError(
            explain(
                "not every process took part in gathering the state",
                found=str(error).strip().split("\n")[0],
                expected="every process of the group to call gather_state_dict after the same step",
                remedy="look at the other ranks' own errors; start all of them again from the last checkpoint",
            )
        ) from error
    _check_reports(reports)
    return merge_states([report.state for report in reports]).to_dict()


def save_rank_state(
    source: StateSource, directory: str | Path, rank: int | None = None, *, world_size: int | None = None
) -> None:
    """Writes this rank's state to a file of its own, atomically. Take a new directory for every step.

    Args:
        source: This rank's dataset (or loader), or its ``state_dict()``.
        directory: A directory all ranks reach, or a URI of one; made if it is local and does not exist.
        rank: This rank; by default the dataset's.
        world_size: Number of ranks; by default the dataset's. Without it, missing files are found only where
            they leave a gap.

    Raises:
        ConfigError: ``rank`` is neither given nor known, or is out of range.
        StateError: The dataset has no state to save now.
    """
    known_rank, known_size = _seat(source) or (None, None)
    rank = whole(known_rank if rank is None else rank)
    world_size = whole(known_size if world_size is None else world_size)
    highest = None if world_size is None else world_size - 1
    require_int("rank", rank, minimum=0, maximum=highest, remedy="pass the rank of this process")
    assert rank is not None  # or it would not have passed
    state = StreamState.from_dict(_state_of(source))
    filesystem, path = locate(_named(directory))
    filesystem.create_dir(path, recursive=True)
    name = f"rank {rank}" if world_size is None else f"rank {rank} of {world_size}"
    write_streams(filesystem, path, {name: state}, rank=rank)


def load_rank_states(directory: str | Path) -> dict[str, Any]:
    """Reads what every rank saved with :func:`save_rank_state` and returns the merged state.

    Pass it to ``load_state_dict`` on every rank of the next run, however many there are.

    Raises:
        MissingStateError: There is no file.
        StateError: Files are missing, left over from a run of another size, damaged, or from different steps.
        StateMismatchError: They belong to different data.
    """
    filesystem, path = locate(_named(directory))
    streams = read_streams(filesystem, path)
    if not streams:
        raise MissingStateError(
            explain(
                "there are no states of ranks",
                found=f"no file of save_rank_state in {directory}",
                expected="one file per rank",
                remedy="pass the directory that save_rank_state was given",
            )
        )
    seats = {name: match.groups() for name in streams if (match := _NAME.fullmatch(name))}
    sizes = {size for _, size in seats.values()}
    ranks = {int(rank) for rank, _ in seats.values()}
    size = next(iter(sizes), None)
    count = max(ranks, default=0) + 1 if size is None else int(size)  # a file may claim any: no set is made of it
    if len(seats) < len(streams) or len(sizes) > 1 or len(ranks) != count or max(ranks) >= count:
        raise StateError(
            explain(
                f"the files in {directory} are not those of one save",
                found=", ".join(sorted(streams))[:_MAX_SHOWN],
                expected="one file of every rank of one run",
                remedy="save every step to a directory of its own, and resume from one that is complete",
            )
        )
    return merge_states([streams[name] for name in sorted(seats, key=lambda name: int(seats[name][0]))]).to_dict()


def _alone(source: StateSource) -> dict[str, Any]:
    if _seat(source) == (0, 1):
        return merge_state_dicts([_state_of(source)])
    raise ConfigError(
        explain(
            "there is no process group to gather states in",
            found="torch.distributed is not initialised",
            expected="torch.distributed.init_process_group(...) before it, on every rank",
            remedy="initialise it, or write one file per rank with save_rank_state",
        )
    )


def _report(source: StateSource) -> _Report:
    """Never fails: a rank that left the others waiting would stop them all."""
    try:
        seat = _seat(source)
    except Exception as error:
        return _Report(None, error=_portable(error))
    try:
        return _Report(seat, state=StreamState.from_dict(_state_of(source)))
    except Exception as error:
        return _Report(seat, error=_portable(error))


def _portable(error: Exception) -> BaseException:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return StateError(f"{type(error).__name__}: {error}")
    return error


def _check_reports(reports: Sequence[_Report]) -> None:
    errors = {process: report.error for process, report in enumerate(reports) if report.error is not None}
    if errors:
        raise StateError(
            explain(
                "not every rank has a state to give",
                found="; ".join(f"process {process}: {error}" for process, error in errors.items()),
                expected="a state of every rank, taken after the same step",
                remedy="call it where no rank is inside a failed or unfinished step",
            )
        ) from next(iter(errors.values()))
    seats = [report.seat for report in reports if report.seat is not None]
    if len(seats) < len(reports):
        return  # bare states do not say whose they are
    sizes, ranks = {size for _, size in seats}, {rank for rank, _ in seats}
    if len(sizes) > 1 or ranks != set(range(max(sizes))):
        raise StateError(
            explain(
                "the processes of the group are not the ranks of one run",
                found=", ".join(f"rank {rank} of {size}" for rank, size in seats),
                expected="every rank of one run",
                remedy="pass the group of all data-parallel ranks, and each dataset its rank and world_size",
            )
        )


def _state_of(source: StateSource) -> Mapping[str, Any]:
    if isinstance(source, Mapping):
        return source
    if not callable(getattr(source, "state_dict", None)):
        raise StateError(
            explain(
                "this has no state",
                found=f"an object of type {type(source).__name__}",
                expected="a dataset, a loader or a shard, or its state_dict()",
                remedy="pass one",
            )
        )
    return source.state_dict()


def _named(directory: object) -> str | Path:
    if isinstance(directory, Path) or (isinstance(directory, str) and directory.strip()):
        return directory
    raise ConfigError(
        explain(
            "directory is not valid",
            found=shown(directory),
            expected="the path or URI of a directory",
            remedy="pass the one that all ranks of this step write to",
        )
    )


def _seat(source: StateSource) -> tuple[int, int] | None:
    """Returns (rank, world size) of a dataset or of a loader's; None for a bare state."""
    if isinstance(source, Mapping):
        return None
    dataset = getattr(source, "dataset", source)
    rank, size = getattr(dataset, "rank", None), getattr(dataset, "world_size", None)
    return (rank, size) if isinstance(rank, int) and isinstance(size, int) else None
