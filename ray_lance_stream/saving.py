"""The streams' state in Ray Train's checkpoints."""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import ray
import ray.train
from ray.exceptions import RayActorError
from ray.train import Checkpoint

from ray_lance_stream.checkpoint import Saved, Streams, locate, write_saved
from ray_lance_stream.cluster.answers import answer_of
from ray_lance_stream.cluster.told import Standing
from ray_lance_stream.core import ShardCore
from ray_lance_stream.errors import ConfigError, LockstepError, StateError, explain
from ray_lance_stream.link import open_shards, speaking
from ray_lance_stream.state import StreamState
from ray_lance_stream.topology import Replica
from ray_lance_stream.trainlink import TrainLink, links, run_name, start_checkpoint

logger = logging.getLogger("ray_lance_stream")
_COLLECT_TIMEOUT_S: Final = 30.0


def save_state(directory: str | Path) -> None:
    """Writes the state of this run's streams into a checkpoint directory, before it is reported.

    For loops whose own callbacks call ``ray.train.report``; others use :func:`report`. Call it at the end of
    a step on every rank that passes a checkpoint. The file is the same on all of them, but for streams that each
    rank reads whole (``datasets_to_split``): of those it holds the place of the rank that calls.

    Args:
        directory: The local directory the checkpoint is made of.

    Raises:
        StateError: In the middle of a step.
        LockstepError: Some rank has not reached this step.
    """
    filesystem, path = locate(directory)
    if not links and not open_shards and not _in_train_worker():
        raise ConfigError(
            explain(
                "there is no stream of a Train run to save",
                found="a process that is no training worker",
                expected="a call inside the training loop",
                remedy="save shard.state_dict() yourself, and pass it as resume_from",
            )
        )
    _write(filesystem, path, _gather(barrier=False))


def report(metrics: Mapping[str, Any], checkpoint: Checkpoint | None = None, *args: Any, **kwargs: Any) -> None:
    """``ray.train.report`` that puts the streams' state into the checkpoint; same arguments.

    Call it on every rank after the same step, as ``ray.train.report``. Ranks may pass a checkpoint or not, and it
    may be uploaded in any way, or not at all: the state is in the checkpoint's directory before.

    Args:
        metrics: As for ``ray.train.report``.
        checkpoint: As for ``ray.train.report``; ``lance_stream.json`` is written into its directory first. With a
            ``checkpoint_upload_fn`` of your own, that file must be uploaded as the others are.
        *args: Everything else ``ray.train.report`` takes.
        **kwargs: Everything else ``ray.train.report`` takes.

    Raises:
        StateError: In the middle of a step.
        LockstepError: The ranks reported at different steps; each of them gets this error.
    """
    gathered = _gather(barrier=True)
    if checkpoint is not None:
        _write(checkpoint.filesystem, checkpoint.path, gathered)
    elif lost := sorted(name for name, replica in gathered.saved.parts.items() if replica.dp_size > 1):
        raise LockstepError(
            explain(
                "the state of this rank would be lost, and with it the checkpoint's",
                found=f"no checkpoint on rank {gathered.alone}, and no state manager to bring together the ranks' "
                f"states of {lost}, which differ",
                expected="a checkpoint from every rank, or a state manager",
                remedy="resume from the last checkpoint",
            )
        )
    ray.train.report(dict(metrics), checkpoint, *args, **kwargs)


@dataclass(frozen=True)
class _Gathered:
    saved: Saved
    alone: int | None  # this rank, if the states are its own and not merged


def _gather(*, barrier: bool) -> _Gathered:
    """Returns the states of all streams of the run, those never opened included."""
    counts = _counts()
    number = counts.reports if barrier else None
    # A closed shard counts, too: its last state belongs to the run.
    standings = {name: _standing(shard) for name, shard in sorted(speaking().items())}
    streams = _carried_over() | {name: standing.state for name, standing in standings.items()}
    shared = [links[name] for name in sorted(links) if links[name].seat.shared]
    whole = {name: streams[name] for name in standings if name in links and not links[name].seat.shared}
    _note_whole(shared, number, whole)
    parts: dict[str, Replica] = {}
    alone: int | None = None
    for link in shared:
        name, standing = link.seat.name, standings.get(link.seat.name)
        try:
            merged = _ask(link, standing, number)
        except RayActorError as error:
            logger.warning("the state manager is gone (%s); this rank saves its own state", type(error).__name__)
            alone = link.seat.world_rank
            if standing is not None and standing.partial:
                parts[name] = link.seat.replica
            continue
        if merged is not None:
            streams[name] = merged
    streams |= _whole(shared, number)
    if alone is not None:
        parts |= dict.fromkeys(whole, Replica())
    stamp = (
        max((link.seat.incarnation for link in links.values()), default=counts.started),
        _progress() + counts.reports,
    )
    counts.reports += barrier
    run = run_name() if _in_train_worker() else None
    return _Gathered(Saved(streams=streams, stamp=stamp, run=run, parts=parts), alone)


def _note_whole(shared: list[TrainLink], number: int | None, states: Streams) -> None:
    """Before a report, tells the others the states of streams that each rank reads whole, and need not have opened."""
    if number is not None and shared and states:
        with contextlib.suppress(RayActorError):  # then there is no answer either
            answer_of(shared[0].session.manager.note_whole.remote(shared[0].seat, number, states))


def _whole(shared: list[TrainLink], number: int | None) -> Streams:
    """After a report, returns those states, the same on each rank."""
    states: Streams = {}
    if number is not None and shared:
        with contextlib.suppress(RayActorError):
            states = answer_of(shared[0].session.manager.whole.remote(shared[0].seat, number))
    return states


def _progress() -> int:
    """A number that grows with the run and is the same on all ranks after the same step.

    Not one of saves: a rank may save more often than others, and all files of one checkpoint have one stamp.
    """
    return sum(
        shard.stats().batches for name, shard in speaking().items() if name not in links or links[name].seat.shared
    )


def _carried_over() -> Streams:
    """The states of streams that may not have been opened since the run began or went on."""
    if not _in_train_worker():
        return {}
    saved, _ = start_checkpoint()
    begun_from = {name: link.resume_states for name, link in links.items()}
    streams = {name: states[name] for name, states in begun_from.items() if states is not None and name in states}
    return streams | ({} if saved is None else saved.streams)


def _standing(shard: ShardCore) -> Standing:
    try:
        state = shard.state()
    except StateError as error:
        raise StateError(f"stream {shard.name!r}: {error}") from None
    return Standing(state.epoch, shard.step, state, shard.is_partial)


def _ask(link: TrainLink, standing: Standing | None, report: int | None) -> StreamState | None:
    """Asks the manager for the state all ranks agree on; waits for their reports if this is one."""
    if report is not None:
        return link.commit(link.seat, report, standing)
    return None if standing is None else link.collect(link.seat, standing, _COLLECT_TIMEOUT_S)


@contextlib.contextmanager
def resumed_part(name: str) -> Iterator[str | None]:
    """Gives the path of a file or directory in the run's last checkpoint; None if the run begins."""
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is None:
        yield None
        return
    with checkpoint.as_directory() as directory:
        yield str(Path(directory, name))


@dataclass
class _Counts:
    """What this process has reported; all ranks count alike."""

    started: int = field(default_factory=time.time_ns)
    reports: int = 0


@functools.lru_cache(maxsize=1)
def _counts() -> _Counts:
    return _Counts()


def _in_train_worker() -> bool:
    return ray.is_initialized() and ray.get_runtime_context().get_actor_id() is not None


def _write(filesystem: Any, directory: str, gathered: _Gathered) -> None:
    write_saved(filesystem, directory, gathered.saved, rank=gathered.alone)
