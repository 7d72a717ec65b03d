"""A stream in one process: blocks built on threads, a shard connected to nothing else."""

from __future__ import annotations

import dataclasses
import logging
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from ray_lance_stream.agreement import Agreement
from ray_lance_stream.block import BlockBuilder, BlockRecipe
from ray_lance_stream.config import StreamConfig
from ray_lance_stream.core import ShardCore
from ray_lance_stream.link import open_shards
from ray_lance_stream.plan import PlanSpec
from ray_lance_stream.request import PlanHandle, Ranges
from ray_lance_stream.source import BlockSource
from ray_lance_stream.state import StreamState
from ray_lance_stream.topology import Seat

logger = logging.getLogger("ray_lance_stream")


class LocalSource:
    """Builds blocks in this process, on threads: reading and gathering release Python's lock."""

    def __init__(self, recipe: BlockRecipe, *, num_threads: int = 2) -> None:
        self._builder = BlockBuilder(recipe)
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="lance-stream-block")

    def plan(self, spec: PlanSpec) -> PlanHandle:
        """See ``BlockSource``."""
        handle, matching = self._builder.open_plan(spec)
        return dataclasses.replace(handle, matching_rows=matching)

    def request(self, handle: PlanHandle, ranges: Ranges) -> Future[Any]:
        """See ``BlockSource``."""
        return self._pool.submit(self._build, handle, ranges)

    def retry_delay_s(self, error: BaseException, attempt: int, elapsed_s: float) -> float | None:
        """See ``BlockSource``; storage is worth two more attempts, the rest is final."""
        del elapsed_s
        return None if not isinstance(error, OSError) or attempt >= 3 else 0.5 * attempt

    def advice(self, error: BaseException) -> str:
        """See ``BlockSource``."""
        return "look at the storage, and iterate again" if isinstance(error, OSError) else "see the error it comes from"

    @property
    def rows_in_transform(self) -> int:
        """Rows that are read, and being transformed or waiting for it."""
        return self._builder.rows_in_transform

    def close(self) -> None:
        """See ``BlockSource``. Waits for the blocks that are being built."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _build(self, handle: PlanHandle, ranges: Ranges) -> Any:
        return self._builder.build(handle, ranges, lambda rows: rows)[0]


class LocalLink:
    """Connects a shard to nothing but this process; see ``link.Link``.

    Args:
        recipe: What blocks are made of.
        in_run: Whether the shard belongs to a Train run in local mode, whose checkpoints hold its state.
        agreement: How replicas find the common end of an epoch, if rows may be skipped.
    """

    def __init__(self, recipe: BlockRecipe, *, in_run: bool = False, agreement: Agreement | None = None) -> None:
        self._recipe = recipe
        self._agreement = agreement
        self._in_run = in_run

    def open_source(self, config: StreamConfig, seat: Seat) -> BlockSource:
        """See ``Link``."""
        del config, seat
        return LocalSource(self._recipe)

    def restored_state(self, config: StreamConfig, seat: Seat) -> StreamState | None:
        """See ``Link``."""
        del config, seat
        return None

    def opened(self, shard: ShardCore) -> None:
        """See ``Link``."""
        if not self._in_run:
            return
        other = open_shards.get(shard.name)
        if other is not None and not other.closed and other.link is not self:
            logger.warning("a run in local mode keeps the state of one stream; that of %r is not saved", shard)
        else:
            open_shards[shard.name] = shard

    def announce(self, seat: Seat, step: int, state: StreamState) -> None:
        """See ``Link``."""

    def agree(self, seat: Seat, epoch: int, cycle: int, servable: int, stop: threading.Event) -> int:
        """See ``Link``; without an agreement every replica ends with its own splits."""
        del seat
        return servable if self._agreement is None else self._agreement.least(epoch, cycle, servable, stop)

    def close(self) -> None:
        """See ``Link``."""
        if self._agreement is not None:
            self._agreement.close()
