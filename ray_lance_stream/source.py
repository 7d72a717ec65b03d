"""Where blocks come from: one small protocol, and the source that builds them in this process."""

from __future__ import annotations

import dataclasses
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import pyarrow as pa

from ray_lance_stream.block import BlockBuilder, BlockRecipe
from ray_lance_stream.plan import PlanSpec
from ray_lance_stream.request import PlanHandle, Ranges


class BlockSource(Protocol):
    """Builds blocks on request. Requests are idempotent and may be answered in any order."""

    def plan(self, spec: PlanSpec) -> PlanHandle:
        """Opens a plan, or finds it open; safe to repeat. Raises what the plan's making raised."""

    def request(self, handle: PlanHandle, ranges: Ranges) -> Future[pa.Table]:
        """Asks for a block; does not wait. The future raises what the building raised."""

    def retry_delay_s(self, error: BaseException, attempt: int, elapsed_s: float) -> float | None:
        """Returns after how long a failed request should be sent again, or None to give up.

        Args:
            error: What the future raised.
            attempt: How many times this block has been asked for, 1 or more.
            elapsed_s: Seconds since it was first asked for.
        """

    def close(self) -> None:
        """Gives up all requests and everything that belongs to this source."""


class LocalSource:
    """Builds blocks in this process, on threads: reading and gathering release Python's lock."""

    def __init__(self, recipe: BlockRecipe, *, num_threads: int = 2) -> None:
        self._builder = BlockBuilder(recipe)
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="lance-stream-block")

    def plan(self, spec: PlanSpec) -> PlanHandle:
        """See :class:`BlockSource`."""
        handle, matching = self._builder.open_plan(spec)
        return dataclasses.replace(handle, matching_rows=matching)

    def request(self, handle: PlanHandle, ranges: Ranges) -> Future[pa.Table]:
        """See :class:`BlockSource`."""
        return self._pool.submit(self._build, handle, ranges)

    def retry_delay_s(self, error: BaseException, attempt: int, elapsed_s: float) -> float | None:
        """See :class:`BlockSource`; storage is worth two more attempts, the rest is final."""
        del elapsed_s
        return None if not isinstance(error, OSError) or attempt >= 3 else 0.5 * attempt

    def close(self) -> None:
        """See :class:`BlockSource`. Waits for the blocks that are being built."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _build(self, handle: PlanHandle, ranges: Ranges) -> pa.Table:
        return self._builder.build(handle, ranges, lambda rows: rows)[0]
