"""Finds the row that kills the process that reads it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from ray_lance_stream.cluster.cuts import halves, rows_of
from ray_lance_stream.errors import BlockError, explain
from ray_lance_stream.request import PlanHandle, Ranges

logger = logging.getLogger("ray_lance_stream")
_TRIALS: Final = 2  # processes that must die of a single row, after those that died of more, before it is blamed
# Finding one row among 2**40 takes 40 deaths and the trials. More means that it is not a row.
_MOST_DEATHS: Final = 48


class ExaminerUnavailableError(Exception):
    """There is no process to examine a block in."""


@dataclass
class _Findings:
    deaths: int = 0
    sound: list[Ranges] = field(default_factory=list)


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

    async def sound_parts(self, handle: PlanHandle, ranges: Ranges) -> list[Ranges]:
        """Returns what a block must be cut into to be built: often just itself.

        A block that can be built in parts only was too much for its process as a whole.

        Raises:
            BlockError: One of its rows kills every process that reads it; the message names it.
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

    async def _examine(self, handle: PlanHandle, ranges: Ranges) -> list[Ranges]:
        logger.warning("a block of %d rows was lost with its process again and again: examining it", rows_of(ranges))
        findings = _Findings()
        try:
            await self._search(handle, ranges, findings)
        except ExaminerUnavailableError as error:
            logger.warning("could not examine the block: %s", error)
            return [ranges]
        return findings.sound

    async def _search(self, handle: PlanHandle, part: Ranges, findings: _Findings) -> None:
        death = await self._death_of(handle, part, findings)
        if death is None:
            findings.sound.append(part)
            return
        pair = halves(part)
        if pair is not None:
            for half in pair:
                await self._search(handle, half, findings)
            return
        for _ in range(_TRIALS - 1):
            if await self._death_of(handle, part, findings) is None:
                findings.sound.append(part)
                return
        raise await self._blame(handle, part, death)

    async def _death_of(self, handle: PlanHandle, part: Ranges, findings: _Findings) -> RayActorError | None:
        """Builds a part; returns what its process died of, None if it lives."""
        actor = await self._living()
        try:
            await actor.try_build.remote(handle, part)
        except RayActorError as error:
            self._actor = None
            findings.deaths += 1
            if findings.deaths >= _MOST_DEATHS:
                raise BlockError(
                    explain(
                        f"building a block of {rows_of(part)} rows kills its process, and no single row is the cause",
                        found=f"{findings.deaths} processes that died, the last one so: {_in_short(error)}",
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

    async def _blame(self, handle: PlanHandle, row: Ranges, death: RayActorError) -> BlockError:
        actor = await self._living()
        ((number, split, position),) = await actor.rows_of.remote(handle, row)
        return BlockError(
            explain(
                f"row {number} of the table (split {split}, position {position}, epoch {handle.spec.epoch}) kills "
                "the process that reads or transforms it",
                found=f"{_TRIALS} of {_TRIALS} processes that had nothing else to do died of it: {_in_short(death)}",
                expected="a row that can be read and transformed, or fails with an error",
                remedy="mend or delete the row, leave it out with filter=..., or change the transform",
            )
        )


def _in_short(error: BaseException) -> str:
    """What Ray says of a process's end, without the actor's particulars."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return next((line for line in lines if "exit" in line.lower()), lines[0] if lines else type(error).__name__)[:300]
