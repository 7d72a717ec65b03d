"""What connects a shard to the Ray Train run it belongs to."""

from __future__ import annotations

import logging
from typing import Any

import ray.train

from ray_lance_stream.checkpoint import Streams, read_streams
from ray_lance_stream.cluster.session import RayLink, Session
from ray_lance_stream.config import StreamConfig
from ray_lance_stream.core import ShardCore
from ray_lance_stream.errors import MissingStateError, explain
from ray_lance_stream.link import open_shards
from ray_lance_stream.state import Provenance, StreamState
from ray_lance_stream.topology import Seat

logger = logging.getLogger("ray_lance_stream")


class TrainLink(RayLink):
    """Connects a training worker's shard to its run; see ``link.Link``."""

    def __init__(self, session: Session, *, owned: bool) -> None:
        super().__init__(session, owned=owned)
        self.reports = 0

    def restored_state(self, config: StreamConfig, seat: Seat) -> StreamState | None:
        """See ``Link``: the run's own checkpoint, as it was when this worker started."""
        states, where = start_checkpoint()
        if where is None:
            return None
        if states and seat.name not in states:
            _check_not_renamed(config, seat.name, states, where)
            logger.warning(
                "%s holds no state of stream %r, only of %s: it starts anew", where, seat.name, sorted(states)
            )
            return None
        return config.state_for(seat.name, states, where)

    def opened(self, shard: ShardCore) -> None:
        """See ``Link``."""
        open_shards[shard.name] = shard

    def device(self) -> Any:
        """The device Ray Train gave this worker."""
        from ray.train.torch import get_device

        return get_device()


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


def start_checkpoint() -> tuple[Streams | None, str | None]:
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
