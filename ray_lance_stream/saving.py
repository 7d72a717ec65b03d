"""The streams' state in Ray Train's checkpoints."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import ray
import ray.train
from ray.exceptions import RayActorError, RayTaskError
from ray.train import Checkpoint

from ray_lance_stream.checkpoint import Streams, locate, write_streams
from ray_lance_stream.core import ShardCore
from ray_lance_stream.errors import LanceStreamError
from ray_lance_stream.link import open_shards
from ray_lance_stream.state import StreamState
from ray_lance_stream.trainlink import TrainLink, start_checkpoint

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


def _gather(*, barrier: bool) -> tuple[Streams, int | None]:
    """Returns the states of all streams, and this rank if they are its own and not merged."""
    opened = dict(open_shards)  # those already closed, too: their last state belongs to the run
    in_worker = any(isinstance(shard.link, TrainLink) for shard in opened.values()) or _in_train_worker()
    carried = (start_checkpoint()[0] or {}) if in_worker else {}
    streams: Streams = dict(carried)
    alone: int | None = None
    for name, shard in sorted(opened.items()):
        merged = _merged_state(shard, barrier=barrier)
        if merged is None:
            alone = shard.seat.world_rank
        streams[name] = shard.state() if merged is None else merged
    return streams, alone


def _in_train_worker() -> bool:
    return ray.is_initialized() and ray.get_runtime_context().get_actor_id() is not None


def _merged_state(shard: ShardCore, *, barrier: bool) -> StreamState | None:
    """The state all ranks agree on, or None if the manager is gone."""
    state, link = shard.state(), shard.link
    if not isinstance(link, TrainLink):
        return state
    manager = link.session.manager
    try:
        if barrier:
            number = link.reports
            link.reports += 1
            merged = ray.get(manager.commit.remote(shard.seat, number, state.epoch, shard.step, state))
        else:
            merged = ray.get(manager.collect.remote(shard.seat, state.epoch, shard.step, state, _COLLECT_TIMEOUT_S))
    except RayTaskError as error:
        cause = getattr(error, "cause", None)
        raise (cause if isinstance(cause, LanceStreamError) else error) from None
    except RayActorError as error:
        logger.warning("the state manager is gone (%s); this rank saves its own state", type(error).__name__)
        return None
    return merged  # type: ignore[no-any-return]


def _write(filesystem: Any, directory: str, gathered: tuple[Streams, int | None]) -> None:
    streams, alone = gathered
    if streams:
        write_streams(filesystem, directory, streams, rank=alone)
