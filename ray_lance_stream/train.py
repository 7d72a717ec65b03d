"""The Ray Train face: turns a stream in ``datasets`` into the shards of the training workers."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Literal

import ray
import ray.train
from ray.exceptions import GetTimeoutError, RayError
from ray.train import DataConfig

from ray_lance_stream.cluster.answers import answer_of
from ray_lance_stream.cluster.parcel import Parcel
from ray_lance_stream.cluster.session import Session, start_session
from ray_lance_stream.config import StreamConfig
from ray_lance_stream.errors import ConfigError, explain
from ray_lance_stream.shard import StreamShard
from ray_lance_stream.topology import Replica, Seat
from ray_lance_stream.trainlink import TrainLink

logger = logging.getLogger("ray_lance_stream")
_ALIVE_TIMEOUT_S = 2.0  # runs in Train's controller, whose loop must not wait for long

Replicas = Callable[[int, int], tuple[int, int]]


class StreamDataConfig(DataConfig):
    """Ray Train's ``DataConfig`` for runs with a ``LanceStream``; ordinary Ray Datasets may stand beside it.

    Args:
        ranks_per_replica: How many consecutive ranks make one replica and see the same batches, for tensor
            or pipeline parallelism; or a function (rank, world_size) -> (dp_rank, dp_size).
        datasets_to_split: As for ``DataConfig``: streams not named here are read whole by every worker. Workers
            need not stand at the same place in such a stream, nor open it; a checkpoint holds the state of the
            lowest rank that has opened it. Its prefetchers read and transform it for each worker anew: where that is
            slow, let the workers divide it, and add up what they find.
        **kwargs: Passed on to ``DataConfig``.

    Example:
        >>> TorchTrainer(train_loop, datasets={"train": stream}, dataset_config=StreamDataConfig(), ...)
    """

    def __init__(
        self,
        *,
        ranks_per_replica: int | Replicas = 1,
        datasets_to_split: Literal["all"] | list[str] = "all",
        **kwargs: Any,
    ) -> None:
        super().__init__(datasets_to_split=datasets_to_split, **kwargs)
        self._split = datasets_to_split
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
        for name, dataset in datasets.items():
            if isinstance(dataset, RunStream):
                shared = self._split == "all" or name in self._split
                try:
                    replicas = self._replicas(world_size) if shared else [Replica()] * world_size
                    shards = dataset.shards(name, replicas, shared=shared)
                except ConfigError as error:
                    dataset.refuse(error)
                    raise
                for worker, shard in zip(output, shards, strict=True):
                    worker[name] = shard
        return output

    def _replicas(self, world_size: int) -> list[Replica]:
        if callable(self._ranks_per_replica):
            pairs = [self._ranks_per_replica(rank, world_size) for rank in range(world_size)]
            sizes = {dp_size for _, dp_size in pairs}
            if len(sizes) != 1 or {dp_rank for dp_rank, _ in pairs} != set(range(*sizes)):
                raise ConfigError(
                    explain(
                        "ranks_per_replica does not place the ranks in whole replicas; some rows would not be read",
                        found=f"(dp_rank, dp_size) by rank: {pairs}",
                        expected="one dp_size, and every dp_rank from 0 to dp_size - 1",
                        remedy="correct the function",
                    )
                )
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
        self._begun_as: str | None = None
        self.context = SimpleNamespace(execution_options=None)

    def shards(self, name: str, replicas: list[Replica], *, shared: bool = True) -> list[StreamShard]:
        """Returns one shard per world rank, of a new incarnation; waits for a prefetcher to be there.

        Args:
            name: The stream's key in ``datasets``.
            replicas: What each rank is.
            shared: Whether the ranks divide the stream among them.
        """
        if self._begun_as not in (None, name):
            raise ConfigError(
                explain(
                    "one stream stands under two names in datasets",
                    found=f"{self._begun_as!r} and {name!r}",
                    expected="one LanceStream for each name",
                    remedy="build the stream twice",
                )
            )
        for replica in replicas:
            replica.owned_splits(self.config.order.num_splits)  # more replicas than splits fails before the first step
        if not self.session.is_alive(self.config.prefetch.placement_timeout_s):
            logger.warning("the stream's actors ended while the run was waiting to start; starting new ones")
            self.session.kill()
            self.session = start_session(self.config, self.session.recipe)
        self._begun_as = name
        (incarnation, restarts), world_size = self.session.begin_group(), len(replicas)
        seats = [
            Seat(
                name=name,
                replica=replica,
                world_rank=rank,
                world_size=world_size,
                incarnation=incarnation,
                shared=shared,
                restarts=restarts,
            )
            for rank, replica in enumerate(replicas)
        ]
        resume = self.config.resume_states
        return [StreamShard(self.config, seat, TrainLink(self.session, seat, resume)) for seat in seats]

    def refuse(self, error: ConfigError) -> None:
        """Has the next start of the worker group end the run, if there has been none: the run is set up wrongly."""
        with contextlib.suppress(RayError):  # the next start finds the same
            answer_of(self.session.manager.refuse_first.remote(error))

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

    def iterator(self) -> StreamShard:
        """As ``ray.data.Dataset.iterator``, for streams that Ray's own ``DataConfig`` is told not to split."""
        raise ConfigError(
            explain(
                "Ray's own DataConfig cannot leave a stream whole",
                found="datasets_to_split without this stream",
                expected="StreamDataConfig",
                remedy="pass dataset_config=StreamDataConfig(datasets_to_split=[...])",
            )
        )


def run_stream(config: StreamConfig, recipe: bytes, previous: RunStream | None) -> RunStream | StreamShard:
    """Finds or starts what a stream needs in the process that calls it; see ``LanceStream.__call__``.

    Args:
        config: The stream.
        recipe: A pickled ``block.BlockRecipe``.
        previous: What an earlier call of this process returned.

    Raises:
        LanceStreamError: The run's checkpoint cannot be resumed from, as a worker has found, or its first worker group
            could not be. Raised here, in the controller, it ends the run, however many failures it may have.
    """
    if not ray.is_initialized() or ray.get_runtime_context().get_actor_id() is None:
        from ray_lance_stream.local import LocalLink  # local mode only: it loads Lance

        return StreamShard(config, Seat(), LocalLink(Parcel.of(recipe).unpack(), in_run=True))
    if previous is not None:
        if previous.session.is_alive(_ALIVE_TIMEOUT_S):
            _raise_refusal(previous.session)
            return previous
        previous.session.kill()  # whatever is left of it must not stand in the way of the new one
    return RunStream(config, start_session(config, Parcel.of(recipe)))


def _raise_refusal(session: Session) -> None:
    try:
        refusal = ray.get(session.manager.refusal.options(max_task_retries=0).remote(), timeout=_ALIVE_TIMEOUT_S)
    except (GetTimeoutError, RayError):
        return  # one that has just been restarted, or is slow: the next start of the workers finds the same
    if refusal is not None:
        raise refusal
