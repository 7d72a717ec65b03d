"""Finds the row that kills the process that reads it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import ray
from ray.exceptions import OutOfMemoryError, RayActorError, RayError, RayTaskError

from ray_lance_stream.cluster.cuts import halves, rows_of
from ray_lance_stream.errors import BlockError, DeadlyRowError, explain
from ray_lance_stream.request import PlanHandle, Ranges
from ray_lance_stream.sifting import SkippedRow

logger = logging.getLogger("ray_lance_stream")
_TRIALS: Final = 2  # processes that must die of a single row, after those that died of more, before it is blamed
_TRIALS_TO_SKIP: Final = 3  # a row that is left out is no error that somebody looks at
# Finding one row among 2**40 takes 40 deaths and the trials. More, for each row found, means that it is not a row.
_MOST_DEATHS: Final = 48


class ExaminerUnavailableError(Exception):
    """There is no process to examine a block in."""


@dataclass
class Findings:
    """What is wrong with a block.

    Attributes:
        parts: What it must be cut into to be built, its rows in canonical order: often just itself.
        deadly: Rows of it that kill every process that reads them, and that the stream leaves out or replaces.
    """

    parts: list[Ranges] = field(default_factory=list)
    deadly: list[SkippedRow] = field(default_factory=list)


class Examiner:
    """Builds suspected blocks, one at a time, each in a prefetcher that does nothing else.

    In the pool a process that dies takes every block with it that it was building or was asked for. Here it
    is sure which one it died of, and the pool is left in peace.

    Args:
        start: Starts a prefetcher outside the pool, which is not restarted when it dies.
        start_timeout_s: How long one may take to be there.
    """

    def __init__(self, start: Callable[[], Any], start_timeout_s: float) -> None:
        self._start = start
        self._start_timeout_s = start_timeout_s
        self._turn = asyncio.Lock()
        self._waiting = 0  # examinations under way and waiting: they share the process, unless one kills it
        self._actor: Any = None
        self._deaths = 0  # in this examination, since the last row was found

    async def examine(self, handle: PlanHandle, ranges: Ranges) -> Findings:
        """Returns how a block can be built.

        One that can be built in parts only was too much for its process as a whole.

        Raises:
            DeadlyRowError: One of its rows kills every process that reads it, and the stream skips no such row.
            BlockError: Its processes die, and no single row is the cause.
        """
        self._waiting += 1
        try:
            async with self._turn:
                return await self._examine(handle, ranges)
        finally:
            self._waiting -= 1
            if self._waiting == 0 and self._actor is not None:
                ray.kill(self._actor, no_restart=True)
                self._actor = None

    async def _examine(self, handle: PlanHandle, ranges: Ranges) -> Findings:
        logger.warning("a block of %d rows was lost with its process again and again: examining it", rows_of(ranges))
        findings = Findings()
        self._deaths = 0
        try:
            await self._search(handle, ranges, findings)
        except ExaminerUnavailableError as error:
            logger.warning("could not examine the block: %s", error)
            return Findings(parts=[ranges])
        if findings.deadly:
            logger.warning("%d of %d rows kill their readers and are left out", len(findings.deadly), rows_of(ranges))
        return findings

    async def _search(self, handle: PlanHandle, part: Ranges, findings: Findings) -> None:
        death = await self._death_of(handle, part)
        if death is None:
            findings.parts.append(part)
            return
        pair = halves(part)
        if pair is not None:
            for half in pair:
                await self._search(handle, half, findings)
            return
        if not await self._dies_again(handle, part, _TRIALS - 1):
            findings.parts.append(part)
            return
        error = await self._blamed(handle, part, death)
        row = await self._left_out(handle, part, error)
        if row is None:
            raise error
        findings.parts.append(part)
        if await self._dies_again(handle, part, _TRIALS_TO_SKIP - _TRIALS):
            findings.deadly.append(row)
            self._deaths = 0

    async def _dies_again(self, handle: PlanHandle, part: Ranges, times: int) -> bool:
        for _ in range(times):
            if await self._death_of(handle, part) is None:
                return False
        return True

    async def _death_of(self, handle: PlanHandle, part: Ranges) -> RayError | None:
        """Builds a part; returns what its process died of, None if it lives."""
        actor = await self._living()
        try:
            await actor.try_build.remote(handle, part)
        except (RayActorError, OutOfMemoryError) as error:  # the latter from Ray's memory monitor
            self._actor = None
            self._deaths += 1
            if self._deaths >= _MOST_DEATHS:
                raise BlockError(
                    explain(
                        f"building a block of {rows_of(part)} rows kills its process, and no single row is the cause",
                        found=f"{self._deaths} processes that died, the last one so: {_in_short(error)}",
                        expected="blocks that can be built, however they are cut",
                        remedy="look at the nodes' memory and at the transform",
                    )
                ) from None
            return error
        except RayTaskError:
            pass  # an error, and no death: whoever asks for the block gets it
        return None

    async def _living(self) -> Any:
        if self._actor is None:
            actor = self._start()
            try:
                await asyncio.wait_for(actor.ready.remote(), self._start_timeout_s)
            except (RayError, asyncio.TimeoutError) as error:
                ray.kill(actor, no_restart=True)
                raise ExaminerUnavailableError(f"no prefetcher started for it: {type(error).__name__}") from error
            self._actor = actor
        return self._actor

    async def _blamed(self, handle: PlanHandle, row: Ranges, death: RayError) -> DeadlyRowError:
        actor = await self._living()
        ((number, split, position),) = await actor.rows_of.remote(handle, row)
        return DeadlyRowError(
            explain(
                f"row {number} of the table (split {split}, position {position}, epoch {handle.spec.epoch}) kills "
                "the process that reads or transforms it",
                found=f"{_TRIALS} of {_TRIALS} processes that had nothing else to do died of it: {_in_short(death)}",
                expected="a row that can be read and transformed, or fails with an error",
                remedy="mend or delete the row, leave it out with filter=... or on_transform_error='skip', or change "
                "the transform",
            )
        )

    async def _left_out(self, handle: PlanHandle, row: Ranges, error: DeadlyRowError) -> SkippedRow | None:
        """Asks what ``on_transform_error`` says of it; None if it is to be an error."""
        actor = await self._living()
        skipped: SkippedRow | None = await actor.left_out.remote(handle, row, error)
        return skipped


def _in_short(error: BaseException) -> str:
    """What Ray says of a process's end, without the actor's particulars."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return next((line for line in lines if "exit" in line.lower()), lines[0] if lines else type(error).__name__)[:300]
