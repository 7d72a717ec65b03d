"""The Ray Train face: shards for training workers, and the stream's state in Train's checkpoints."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ray
import ray.train
from ray.exceptions import RayActorError, RayTaskError
from ray.train import Checkpoint, DataConfig

from ray_lance_stream.checkpoint import Streams, locate, read_streams, write_streams
from ray_lance_stream.cluster.session import RayLink, Session, start_session
from ray_lance_stream.config import StreamConfig
from ray_lance_stream.errors import ConfigError, LanceStreamError, MissingStateError, explain
from ray_lance_stream.link import LocalLink
from ray_lance_stream.shard import StreamShard
from ray_lance_stream.state import Provenance, StreamState
from ray_lance_stream.topology import Replica, Seat

logger = logging.getLogger("ray_lance_stream")
_ALIVE_TIMEOUT_S = 2.0  # runs in Train's controller, whose loop must not wait for long
_COLLECT_TIMEOUT_S = 30.0

Replicas = Callable[[int, int], tuple[int, int]]

# The shards opened by this process for the Train run it works for, by stream name.
_shards: weakref.WeakValueDictionary[str, StreamShard] = weakref.WeakValueDictionary()


class StreamDataConfig(DataConfig):
    """Ray Train's ``DataConfig`` for runs with a ``LanceStream``; ordinary Ray Datasets may stand beside it.

    Args:
        ranks_per_replica: How many consecutive ranks make one replica and see the same batches, for tensor
            or pipeline parallelism; or a function (rank, world_size) -> (dp_rank, dp_size).
        **kwargs: Passed on to ``DataConfig``.

    Example:
        >>> TorchTrainer(train_loop, datasets={"train": stream}, dataset_config=StreamDataConfig(), ...)
    """

    def __init__(self, *, ranks_per_replica: int | Replicas = 1, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if not callable(ranks_per_replica) and (not isinstance(ranks_per_replica, int) or ranks_per_replica < 1):
            raise ConfigError(
                explain(
                    "ranks_per_replica is not valid",
                    found=repr(ranks_per_replica),
                    expected="an integer >= 1, or a function (rank, world_size) -> (dp_rank, dp_size)",
                    remedy="pass the number of ranks that must see the same batches",
                )
            )
        self._ranks_per_replica = ranks_per_replica

    def configure(
        self,
        datasets: dict[str, Any],
        world_size: int,
        worker_handles: list[Any] | None,
        worker_node_ids: list[Any] | None,
        **kwargs: Any,
    ) -> list[dict[str, Any]]:
        """Called by Ray Train once per dataset and start of the worker group."""
        ordinary = {name: dataset for name, dataset in datasets.items() if not isinstance(dataset, RunStream)}
        output: list[dict[str, Any]] = [{} for _ in range(world_size)]
        if ordinary:
            output = super().configure(ordinary, world_size, worker_handles, worker_node_ids, **kwargs)
        replicas = self._replicas(world_size)
        for name, dataset in datasets.items():
            if isinstance(dataset, RunStream):
                for worker, shard in zip(output, dataset.shards(name, replicas), strict=True):
                    worker[name] = shard
        return output

    def _replicas(self, world_size: int) -> list[Replica]:
        if callable(self._ranks_per_replica):
            pairs = [self._ranks_per_replica(rank, world_size) for rank in range(world_size)]
            return [Replica(dp_rank=dp_rank, dp_size=dp_size) for dp_rank, dp_size in pairs]
        size = self._ranks_per_replica
        if world_size % size:
            raise ConfigError(
                explain(
                    "the number of workers is not a multiple of ranks_per_replica",
                    found=f"{world_size} workers, ranks_per_replica={size}",
                    expected="whole replicas",
                    remedy=f"run on {', '.join(str(size * n) for n in range(1, 5))} ... workers",
                )
            )
        return [Replica(dp_rank=rank // size, dp_size=world_size // size) for rank in range(world_size)]


class RunStream:
    """A stream within a run: what the controller hands to ``DataConfig.configure``.

    It answers the calls of Ray's own ``DataConfig`` as well, so that a run without
    :class:`StreamDataConfig` gets shards too, one replica per worker.
    """

    def __init__(self, config: StreamConfig, session: Session) -> None:
        self.config = config
        self.session = session
        self.name: str | None = None
        self.context = SimpleNamespace(execution_options=None)

    def shards(self, name: str, replicas: list[Replica]) -> list[StreamShard]:
        """Returns one shard per world rank, of a new incarnation; waits for a prefetcher to be there."""
        for replica in replicas:
            replica.owned_splits(self.config.order.num_splits)  # more replicas than splits fails before the first step
        if not self.session.is_alive(self.config.prefetch.placement_timeout_s):
            logger.warning("the stream's actors ended while the run was waiting to start; starting new ones")
            self.session = start_session(self.config)
        incarnation = self.session.begin()
        return [
            StreamShard(
                self.config,
                Seat(
                    name=name,
                    replica=replica,
                    world_rank=rank,
                    world_size=len(replicas),
                    incarnation=incarnation,
                ),
                TrainLink(self.session, owned=False),
            )
            for rank, replica in enumerate(replicas)
        ]

    def set_name(self, name: str) -> None:
        """As ``ray.data.Dataset.set_name``."""
        self.name = name

    def copy(self, other: RunStream) -> RunStream:
        """As ``ray.data.Dataset.copy``."""
        return other

    def streaming_split(self, n: int, *, equal: bool, locality_hints: list[Any] | None) -> list[StreamShard]:
        """As ``ray.data.Dataset.streaming_split``."""
        del equal, locality_hints
        return self.shards(self.name or "train", [Replica(dp_rank=rank, dp_size=n) for rank in range(n)])


def run_stream(config: StreamConfig, previous: RunStream | None) -> RunStream | StreamShard:
    """Finds or starts what a stream needs in the process that calls it; see ``LanceStream.__call__``."""
    if not ray.is_initialized() or ray.get_runtime_context().get_actor_id() is None:
        return StreamShard(config, Seat(), LocalTrainLink())
    if previous is not None and previous.session.is_alive(_ALIVE_TIMEOUT_S):
        return previous
    return RunStream(config, start_session(config))


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


class TrainLink(RayLink):
    """Connects a training worker's shard to its run; see ``link.Link``."""

    def __init__(self, session: Session, *, owned: bool) -> None:
        super().__init__(session, owned=owned)
        self.reports = 0

    def restored_state(self, config: StreamConfig, seat: Seat) -> StreamState | None:
        """See ``Link``: the run's own checkpoint, as it was when this worker started."""
        states, where = _start_checkpoint()
        if where is None:
            return None
        if states and seat.name not in states:
            _check_not_renamed(config, seat.name, states, where)
            logger.warning(
                "%s holds no state of stream %r, only of %s: it starts anew", where, seat.name, sorted(states)
            )
            return None
        return config.state_for(seat.name, states, where)

    def opened(self, shard: StreamShard) -> None:
        """See ``Link``."""
        _shards[shard.name] = shard

    def device(self) -> Any:
        """The device Ray Train gave this worker."""
        from ray.train.torch import get_device

        return get_device()


class LocalTrainLink(LocalLink):
    """Connects the shard of a run in local mode; see ``link.Link``."""

    def opened(self, shard: StreamShard) -> None:
        """See ``Link``."""
        _shards[shard.name] = shard


def _check_not_renamed(config: StreamConfig, name: str, states: Streams, where: str) -> None:
    current = Provenance(table=config.identity, order=config.order)
    twins = [other for other, state in states.items() if state.provenance == current]
    if twins and config.on_missing_state == "error":
        raise MissingStateError(
            explain(
                f"the checkpoint {where} holds no state of the stream {name!r}, but one of the same data",
                found=f"stream {twins[0]!r}",
                expected=f"stream {name!r}",
                remedy=f"keep the key {twins[0]!r} in datasets, or pass on_missing_state='restart'",
            )
        )


_start: tuple[Streams | None, str | None] | None = None


def _start_checkpoint() -> tuple[Streams | None, str | None]:
    """The streams in the checkpoint this worker started from, and its path; (None, None) without one.

    Read once: ``ray.train.get_checkpoint()`` answers with newer ones as the run reports them.
    """
    global _start
    if _start is None:
        checkpoint = ray.train.get_checkpoint()
        if checkpoint is None:
            _start = (None, None)
        else:
            _start = (read_streams(checkpoint.filesystem, checkpoint.path), checkpoint.path)
    return _start


def _gather(*, barrier: bool) -> tuple[Streams, int | None]:
    """Returns the states of all streams, and this rank if they are its own and not merged."""
    opened = {name: shard for name, shard in _shards.items() if not shard.closed}
    in_worker = any(isinstance(shard.link, TrainLink) for shard in opened.values()) or _in_train_worker()
    carried = (_start_checkpoint()[0] or {}) if in_worker else {}
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


def _merged_state(shard: StreamShard, *, barrier: bool) -> StreamState | None:
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
