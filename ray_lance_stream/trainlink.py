"""What connects a shard to the Ray Train run it belongs to."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any, Literal

import ray.train
from ray.train import Checkpoint

from ray_lance_stream.checkpoint import Streams, read_streams
from ray_lance_stream.cluster.session import RayLink, Session
from ray_lance_stream.config import StreamConfig
from ray_lance_stream.core import ShardCore
from ray_lance_stream.errors import MissingStateError, StateMismatchError, explain
from ray_lance_stream.link import open_shards
from ray_lance_stream.provenance import Provenance
from ray_lance_stream.state import StreamState
from ray_lance_stream.topology import Seat

logger = logging.getLogger("ray_lance_stream")


class TrainLink(RayLink):
    """Connects a training worker's shard to its run; see ``link.Link``."""

    def __init__(self, session: Session, seat: Seat) -> None:
        super().__init__(session, owned=False)
        self.seat = seat

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrive, (self._without_recipe(), self.seat)

    def restored_state(self, config: StreamConfig, seat: Seat) -> StreamState | None:
        """See ``Link``: the run's own checkpoint, as it was when this worker started."""
        states, where = start_checkpoint()
        if where is None:
            return None
        if states is not None and seat.name not in states:
            _check_not_renamed(config, seat.name, states, where)
            logger.warning(
                "%s holds no state of stream %r (of others: %s): it was not begun, and begins now",
                where,
                seat.name,
                sorted(states),
            )
            return None
        return config.state_for(seat.name, states, where)

    def opened(self, shard: ShardCore) -> None:
        """See ``Link``."""
        open_shards[shard.name] = shard
        if self.seat.world_rank == 0:
            logger.info(
                "stream %r: epoch %d, step %d; %d %s an epoch, %d rows of the table left out",
                *(shard.name, shard.epoch, shard.step),
                *(shard.num_rows, "rows" if shard.packing is None else "packed blocks", shard.dropped_rows),
            )

    def device(self) -> Any:
        """The device Ray Train gave this worker."""
        from ray.train.torch import get_device

        return get_device()


def _check_not_renamed(config: StreamConfig, name: str, states: Streams, where: str) -> None:
    strict = replace(config, allow_changes=())

    def same_data(saved: Provenance) -> bool:
        try:
            strict.continued(replace(saved, table=config.identity))
        except StateMismatchError:
            return False
        return True

    twins = [other for other, state in states.items() if same_data(state.provenance)]
    if twins and config.on_missing_state == "error":
        raise MissingStateError(
            explain(
                f"the checkpoint {where} holds no state of the stream {name!r}, but one of the same data",
                found=f"stream {twins[0]!r}",
                expected=f"stream {name!r}",
                remedy=f"keep the key {twins[0]!r} in datasets, or pass on_missing_state='restart'",
            )
        )


# The links that this worker was given, by stream name, whether or not their shards were opened.
links: dict[str, TrainLink] = {}

# The checkpoint this worker started from, and what was read from it.
_start: Checkpoint | Literal["unknown"] | None = "unknown"
_found: tuple[Streams | None, str | None] | None = None


def _arrive(session: Session, seat: Seat) -> TrainLink:
    """Makes a link again in the worker that its shard was made for."""
    global _start
    link = TrainLink(session, seat)
    link.hold()  # it may be long before the worker asks for the first batch
    links[seat.name] = link
    if _start == "unknown":
        _start = ray.train.get_checkpoint()
    return link


def start_checkpoint() -> tuple[Streams | None, str | None]:
    """The streams in the checkpoint this worker started from, and its path; (None, None) without one.

    Read once: ``ray.train.get_checkpoint()`` answers with newer ones as the run reports them.
    """
    global _found
    if _found is None:
        checkpoint = ray.train.get_checkpoint() if _start == "unknown" else _start
        if checkpoint is None or checkpoint == "unknown":
            _found = None, None
        else:
            filesystem: Any = checkpoint.filesystem
            _found = read_streams(filesystem, checkpoint.path), checkpoint.path
    return _found
