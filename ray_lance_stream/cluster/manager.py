"""The state manager: knows where every training worker stands, and merges their states."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from ray_lance_stream.cluster.leases import Leases
from ray_lance_stream.errors import LockstepError, StaleIncarnationError
from ray_lance_stream.state import StreamState, merge_states
from ray_lance_stream.stats import RunProgress
from ray_lance_stream.topology import Seat

logger = logging.getLogger("ray_lance_stream")
_HISTORY = 32  # steps a fast worker may be ahead of a slow one when a state is collected
_WARN_EVERY_S = 30.0
_ROUNDS_KEPT = 4


@dataclass(frozen=True)
class Standing:
    """A state a worker has, or will have after the step it was handed."""

    epoch: int
    step: int
    state: StreamState

    @property
    def at(self) -> tuple[int, int]:
        """(epoch, step)."""
        return self.epoch, self.step


@dataclass
class _Round:
    """The n-th report of every worker of one incarnation."""

    world_size: int
    arrived: dict[int, tuple[Seat, Standing]] = field(default_factory=dict)
    done: asyncio.Event = field(default_factory=asyncio.Event)
    merged: StreamState | None = None
    error: str | None = None


class StateManager:
    """One per run and stream. An async actor; restoring a run never depends on what it remembers."""

    def __init__(self, session_id: str, idle_timeout_s: float) -> None:
        self._session_id = session_id
        self._leases = Leases(idle_timeout_s)
        self._incarnation = 0
        self._seats: dict[int, Seat] = {}
        self._history: dict[int, deque[Standing]] = {}
        self._rounds: dict[int, _Round] = {}
        self._changed = asyncio.Condition()

    def __repr__(self) -> str:
        return f"StateManager({self._session_id})"

    async def renew(self, holder: str) -> None:
        """Takes or renews a lease."""
        self._leases.renew(holder)

    async def release(self, holder: str) -> None:
        """Gives a lease back."""
        self._leases.release(holder)

    async def pid(self) -> int:
        """Returns the process id on the manager's node."""
        return os.getpid()

    async def begin(self, incarnation: int) -> None:
        """Starts a new incarnation: states of older ones are refused from now on."""
        self._admit(incarnation)

    async def push(self, seat: Seat, epoch: int, step: int, state: StreamState) -> None:
        """Notes the state a worker will have after the step it is about to be handed."""
        if self._admit(seat.incarnation):
            await self._note(seat, Standing(epoch, step, state))

    async def where(self) -> RunProgress:
        """Returns where the run stands."""
        ranks = {rank: history[-1].at for rank, history in sorted(self._history.items())}
        names = {seat.name for seat in self._seats.values()}
        world_size = max((seat.world_size for seat in self._seats.values()), default=0)
        return RunProgress(name=min(names, default=""), world_size=world_size, ranks=ranks)

    async def commit(self, seat: Seat, number: int, epoch: int, step: int, state: StreamState) -> StreamState:
        """Waits for every worker's report of the same number, and returns the merged state.

        Args:
            seat: Who reports.
            number: How many times this worker has reported before in this incarnation.
            epoch: The epoch it stands in.
            step: Steps of that epoch it has finished.
            state: Its state.

        Raises:
            LockstepError: The workers do not stand at the same step; every one of them gets this error.
            StaleIncarnationError: The worker belongs to a group that has been replaced.
        """
        if not self._admit(seat.incarnation):
            raise StaleIncarnationError(f"worker group {seat.incarnation} has been replaced by {self._incarnation}")
        standing = Standing(epoch, step, state)
        await self._note(seat, standing)
        current = self._rounds.setdefault(number, _Round(seat.world_size))
        current.arrived[seat.world_rank] = (seat, standing)
        if len(current.arrived) == current.world_size:
            self._close(current)
            for old in [n for n in self._rounds if n <= number - _ROUNDS_KEPT]:
                del self._rounds[old]
        await self._wait(current, number)
        if current.error is not None:
            raise LockstepError(current.error)
        assert current.merged is not None
        return current.merged

    async def collect(self, seat: Seat, epoch: int, step: int, state: StreamState, timeout_s: float) -> StreamState:
        """Returns the merged state of all workers after one step, from what they announced.

        Raises:
            LockstepError: Some worker has not been handed that step within ``timeout_s``.
        """
        if not self._admit(seat.incarnation):
            raise StaleIncarnationError(f"worker group {seat.incarnation} has been replaced by {self._incarnation}")
        await self._note(seat, Standing(epoch, step, state))
        deadline = time.monotonic() + timeout_s
        async with self._changed:
            while True:
                found = self._at(epoch, step)
                if len(found) == seat.world_size:
                    return merge_states([standing.state for _, standing in sorted(found.items())])
                left = deadline - time.monotonic()
                if left <= 0:
                    raise LockstepError(
                        f"not every worker reached epoch {epoch}, step {step}, within {timeout_s:.0f} s. "
                        f"Found: {self._describe(seat.world_size)}. Expected: all at the same step. "
                        "Remedy: save on every rank after the same step."
                    )
                try:
                    await asyncio.wait_for(self._changed.wait(), left)
                except asyncio.TimeoutError:
                    continue

    def _admit(self, incarnation: int) -> bool:
        """Whether an incarnation is the newest; a newer one replaces what is known."""
        if incarnation > self._incarnation:
            self._incarnation = incarnation
            self._seats.clear()
            self._history.clear()
            self._rounds.clear()
        return incarnation == self._incarnation

    async def _note(self, seat: Seat, standing: Standing) -> None:
        self._seats[seat.world_rank] = seat
        history = self._history.setdefault(seat.world_rank, deque(maxlen=_HISTORY))
        if not history or history[-1].at != standing.at:
            history.append(standing)
        async with self._changed:
            self._changed.notify_all()

    def _at(self, epoch: int, step: int) -> dict[int, Standing]:
        return {
            rank: standing
            for rank, history in self._history.items()
            for standing in history
            if standing.at == (epoch, step)
        }

    def _close(self, current: _Round) -> None:
        standings = {rank: standing for rank, (_, standing) in sorted(current.arrived.items())}
        if len({standing.at for standing in standings.values()}) > 1:
            places = ", ".join(f"rank {rank}: epoch {s.epoch}, step {s.step}" for rank, s in standings.items())
            current.error = (
                f"the workers reported at different steps. Found: {places}. Expected: the same step on every rank. "
                "Remedy: call report() on every rank after the same shard.step."
            )
        else:
            try:
                current.merged = merge_states([standing.state for standing in standings.values()])
            except ValueError as error:
                current.error = f"the workers' states do not fit together: {error}"
        current.done.set()

    async def _wait(self, current: _Round, number: int) -> None:
        waited = 0.0
        while not current.done.is_set():
            try:
                await asyncio.wait_for(asyncio.shield(current.done.wait()), _WARN_EVERY_S)
            except asyncio.TimeoutError:
                waited += _WARN_EVERY_S
                missing = sorted(set(range(current.world_size)) - set(current.arrived))
                logger.warning(
                    "report %d has waited %.0f s for ranks %s; last seen: %s",
                    number,
                    waited,
                    missing,
                    self._describe(current.world_size),
                )

    def _describe(self, world_size: int) -> str:
        last: dict[int, Any] = {rank: history[-1] for rank, history in self._history.items()}
        return ", ".join(
            f"rank {rank}: epoch {last[rank].epoch}, step {last[rank].step}"
            if rank in last
            else f"rank {rank}: unknown"
            for rank in range(world_size)
        )
