"""A shard's place in its run, and what connects it to the rest."""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Protocol

from ray_lance_stream.config import StreamConfig
from ray_lance_stream.source import BlockSource
from ray_lance_stream.state import StreamState
from ray_lance_stream.topology import Seat

if TYPE_CHECKING:
    from ray_lance_stream.core import ShardCore


# The shards opened by this process for the Train run it works for, by stream name.
open_shards: weakref.WeakValueDictionary[str, ShardCore] = weakref.WeakValueDictionary()


def speaking() -> dict[str, ShardCore]:
    """Returns, by stream name, the open shards, or who speaks for them where the loop is behind what they gave."""
    found: dict[str, ShardCore] = {}
    for name, shard in list(open_shards.items()):
        speaker = shard.speaker() if shard.speaker is not None else None
        found[name] = shard if speaker is None else speaker
    return found


class Link(Protocol):
    """What connects a shard to the rest of its run."""

    def open_source(self, config: StreamConfig, seat: Seat) -> BlockSource:
        """Returns where blocks come from; called once, when the shard is first used."""

    def restored_state(self, config: StreamConfig, seat: Seat) -> StreamState | None:
        """Returns the state in the run's own checkpoint, None if the run has none yet."""

    def opened(self, shard: ShardCore) -> None:
        """Called once the shard knows where it stands."""

    def announce(self, seat: Seat, step: int, state: StreamState) -> None:
        """Tells the run which state the shard will have after the step it is about to hand out."""

    def agree(self, seat: Seat, epoch: int, cycle: int, servable: int, stop: threading.Event) -> int:
        """Returns up to which cycle every replica can serve; see ``agreement.Agreement``."""

    def close(self) -> None:
        """Ends what belongs to this shard only."""
