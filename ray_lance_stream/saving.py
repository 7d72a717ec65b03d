"""The streams' state in Ray Train's checkpoints."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import ray
import ray.train
from ray.exceptions import RayActorError
from ray.train import Checkpoint

from ray_lance_stream.checkpoint import Streams, locate, write_streams
from ray_lance_stream.cluster.told import Standing
from ray_lance_stream.core import ShardCore
from ray_lance_stream.errors import ConfigError, StateError, explain
from ray_lance_stream.link import open_shards
from ray_lance_stream.state import StreamState
from ray_lance_stream.trainlink import TrainLink, links, start_checkpoint

logger = logging.getLogger("ray_lance_stream")
_COLLECT_TIMEOUT_S: Final = 30.0


def save_state(directory: str | Path) -> None:
    """Writes the state of this run's streams into a checkpoint directory, before it is reported.

    For loops whose own callbacks call ``ray.train.report``; others use :func:`report`. Call it at the end of
    a step on every rank that passes a checkpoint. The file is the same on all of them.

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


def report(metrics: Mapping[str, Any], checkpoint: Checkpoint | None = None, **kwargs: Any) -> None:
    """``ray.train.report`` that puts the streams' state into the checkpoint; same arguments.

    Call it on every rank after the same step, as ``ray.train.report``. Ranks may pass a checkpoint or not.

    Args:
        metrics: As for ``ray.train.report``.
        checkpoint: As for ``ray.train.report``; ``lance_stream.json`` is written into its directory first.
        **kwargs: Everything else ``ray.train.report`` takes.

    Raises:
        StateError: In the middle of a step.
        LockstepError: The ranks reported at different steps; each of them gets this error.
    """
    gathered = _gather(barrier=True)
    if checkpoint is not None:
        _write(checkpoint.filesystem, checkpoint.path, gathered)
    ray.train.report(dict(metrics), checkpoint, **kwargs)


@dataclass(frozen=True)
class _Gathered:
    streams: Streams
    alone: int | None  # this rank, if the states are its own and not merged
    stamp: tuple[int, int]


def _gather(*, barrier: bool) -> _Gathered:
    """Returns the states of all streams of the run, those never opened included."""
    counts = _counts()
    streams: Streams = dict((start_checkpoint()[0] or {}) if _in_train_worker() else {})
    alone: int | None = None
    for name in sorted({*links, *open_shards}):
        # A closed shard counts, too: its last state belongs to the run.
        shard, link = open_shards.get(name), links.get(name)
        standing = None if shard is None else _standing(shard)
        if link is None or not link.seat.shared:
            merged = None if standing is None else standing.state
        else:
            try:
                merged = _ask(link, standing, counts.reports if barrier else None)
            except RayActorError as error:
                logger.warning("the state manager is gone (%s); this rank saves its own state", type(error).__name__)
                merged, alone = None if standing is None else standing.state, link.seat.world_rank
        if merged is not None:
            streams[name] = merged
    counts.saves += 1
    counts.reports += barrier
    incarnation = max((link.seat.incarnation for link in links.values()), default=counts.started)
    return _Gathered(streams, alone, (incarnation, counts.saves))


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


@dataclass
class _Counts:
    """What this process has reported and saved; all ranks count alike."""

    started: int = field(default_factory=time.time_ns)
    reports: int = 0
    saves: int = 0


@functools.lru_cache(maxsize=1)
def _counts() -> _Counts:
    return _Counts()


def _in_train_worker() -> bool:
    return ray.is_initialized() and ray.get_runtime_context().get_actor_id() is not None


def _write(filesystem: Any, directory: str, gathered: _Gathered) -> None:
    write_streams(filesystem, directory, gathered.streams, rank=gathered.alone, stamp=gathered.stamp)
