"""Shards outside Ray Train: with prefetchers where Ray runs, in this process where it does not."""

from __future__ import annotations

import dataclasses
from typing import Any

import ray
from ray import cloudpickle

from ray_lance_stream.agreement import agreement_of
from ray_lance_stream.cluster.parcel import Parcel
from ray_lance_stream.cluster.session import RayLink, start_session
from ray_lance_stream.config import StreamConfig
from ray_lance_stream.plan import require_int
from ray_lance_stream.shard import StreamShard
from ray_lance_stream.topology import Replica, Seat


def open_shard(
    config: StreamConfig, recipe: bytes, *, rank: int, world_size: int, name: str, coordinator: Any
) -> StreamShard:
    """Returns one replica's shard; see ``LanceStream.open``.

    Args:
        config: The stream.
        recipe: A pickled ``block.BlockRecipe``.
        rank: The replica's index.
        world_size: Number of replicas.
        name: The stream's name.
        coordinator: How replicas end an epoch at the same step where rows may be skipped.

    Raises:
        ConfigError: More replicas than splits, a rank out of range.
        PlacementError: No prefetcher could be placed.
    """
    require_int("world_size", world_size, minimum=1, remedy="pass the number of replicas")
    require_int("rank", rank, minimum=0, maximum=world_size - 1, remedy="pass this replica's index")
    seat = Seat(name=name, replica=Replica(dp_rank=rank, dp_size=world_size), world_rank=rank, world_size=world_size)
    agreement = agreement_of(coordinator, world_size)
    if not ray.is_initialized():
        from ray_lance_stream.local import LocalLink  # loads Lance, which actors do for others

        return StreamShard(config, seat, LocalLink(cloudpickle.loads(recipe), agreement=agreement))
    seat.replica.owned_splits(config.order.num_splits)
    session = start_session(config, Parcel.of(recipe))
    try:
        incarnation = session.begin()
    except BaseException:
        session.kill()
        raise
    link = RayLink(session, owned=True, agreement=agreement)
    link.hold()
    return StreamShard(config, dataclasses.replace(seat, incarnation=incarnation), link)
