"""The state manager: knows where every training worker stands, and merges their states."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from ray_lance_stream.cluster.leases import Leases
from ray_lance_stream.cluster.notes import Notes
from ray_lance_stream.cluster.told import STANDINGS_OF_INTEREST, Standing, Told, keep_latest
from ray_lance_stream.errors import LanceStreamError, LockstepError, StaleIncarnationError
from ray_lance_stream.state import StreamState, merge_states
from ray_lance_stream.stats import RunProgress
from ray_lance_stream.topology import Seat

logger = logging.getLogger("ray_lance_stream")
_GRACE_S = 10.0  # how long a report waits for workers that may be dead, or busy saving
_ROUNDS_KEPT = 4


@dataclass
class _Round:
    """The n-th report of every worker of one incarnation."""

    world_size: int
    arrived: dict[int, Standing | None] = field(default_factory=dict)  # None: has not opened the stream
    done: asyncio.Event = field(default_factory=asyncio.Event)
    merged: StreamState | None = None
    error: str | None = None
    replaced: bool = False


class StateManager(Notes):
    """One per run and stream. An async actor; restoring a run never depends on what it remembers."""

    def __init__(self, session_id: str, idle_timeout_s: float) -> None:
        super().__init__()
        self._session_id = session_id
        self._started = time.time_ns()
        self._leases = Leases(idle_timeout_s)
        self._incarnation = 0
        self._seats: dict[int, Seat] = {}
        self._history: dict[int, deque[Standing]] = {}
        self._rounds: dict[int, _Round] = {}
        self._changed = asyncio.Condition()
        self._servable: dict[tuple[int, int], dict[int, int]] = {}

    def __repr__(self) -> str:
        return f"StateManager({self._session_id})"

    async def renew(self, holder: str) -> int:
        """Takes or renews a lease; returns when the manager started, which tells whether it has been restarted."""
        self._leases.renew(holder)
        return self._started

    async def release(self, holder: str) -> None:
        """Gives a lease back."""
        self._leases.release(holder)

    async def pid(self) -> int:
        """Returns the process id on the manager's node."""
        return os.getpid()

    async def begin(self, incarnation: int) -> None:
        """Starts a new incarnation: states of older ones are refused from now on."""
        self._admit(incarnation)
        await self._tell_changed()

    async def refuse_first(self, refusal: LanceStreamError) -> None:
        """As :meth:`refuse`, unless there has been a worker group: the next may have a size that fits."""
        if not self._incarnation:
            await self.refuse(refusal)

    async def push(self, told: list[tuple[Seat, Standing]]) -> None:
        """Notes where a worker will stand after steps it is about to be handed, in their order."""
        for seat, standing in told:
            if self._admit(seat.incarnation):
                self._note(seat, standing)
        await self._tell_changed()

    async def where(self) -> RunProgress:
        """Returns where the run stands."""
        ranks = {rank: history[-1].at for rank, history in sorted(self._history.items())}
        names = {seat.name for seat in self._seats.values()}
        world_size = max((seat.world_size for seat in self._seats.values()), default=0)
        return RunProgress(name=min(names, default=""), world_size=world_size, ranks=ranks)

    async def commit(self, seat: Seat, number: int, standing: Standing | None) -> StreamState | None:
        """Waits for every worker's report of the same number, and returns the merged state.

        A worker that never comes does not hold up the others for long: any worker's state at the end of a step
        is complete. One that comes late is compared with those that have gone.

        Args:
            seat: Who reports.
            number: Which report of this worker group it is.
            standing: Where it stands; None if it has not opened the stream.

        Returns:
            The merged state; None if nobody has opened the stream.

        Raises:
            LockstepError: The workers do not stand at the same step; every one of them gets this error.
            StaleIncarnationError: The worker belongs to a group that has been replaced.
        """
        self._require(seat)
        if standing is not None:
            self._note(seat, standing)
            await self._tell_changed()
        current = self._rounds.setdefault(number, _Round(seat.world_size))
        if current.done.is_set() and current.error is None and standing is not None:
            self._compare_late(current, seat, standing)
        self._arrive(current, seat, standing)
        if not current.done.is_set():
            await self._wait(current, number)
        for old in [n for n in self._rounds if n <= number - _ROUNDS_KEPT]:
            del self._rounds[old]
        if current.replaced:
            self._require(seat)
        if current.error is not None:
            raise LockstepError(current.error)
        return current.merged

    async def remember(self, told: Told) -> None:
        """Notes what a worker told a manager that has died: others may be waiting for it."""
        seat = told.seat
        if not self._admit(seat.incarnation):
            return
        self._seats[seat.world_rank] = seat
        newer = self._history.get(seat.world_rank, ())
        older = {standing.at: standing for standing in told.standings}
        merged = sorted((older | {s.at: s for s in newer}).values(), key=lambda standing: standing.at)
        self._history[seat.world_rank] = deque(merged, maxlen=STANDINGS_OF_INTEREST)
        for number, standing in told.reports.items():
            self._arrive(self._rounds.setdefault(number, _Round(seat.world_size)), seat, standing)
        await self._note_said(seat, told.servable)

    async def _note_said(self, seat: Seat, said: dict[tuple[int, int], int]) -> None:
        for place, servable in said.items():
            # By when it was said, not by where: replicas may have gone back to an earlier place together.
            by_rank = self._servable.get(place, {}) | {seat.replica.dp_rank: servable}
            keep_latest(self._servable, place, by_rank, STANDINGS_OF_INTEREST)
        await self._tell_changed()

    async def agree(self, seat: Seat, said: dict[tuple[int, int], int], at: tuple[int, int]) -> int:
        """Waits until every replica has said up to which cycle it can serve, and returns the least.

        Args:
            seat: Who asks.
            said: By (epoch, cycle) where it stood: what it said, now and the last few times. A manager that has
                been restarted learns so what others are still waiting for.
            at: Which of them is to be answered.

        Raises:
            StaleIncarnationError: The worker belongs to a group that has been replaced.
        """
        self._require(seat)
        await self._note_said(seat, said)
        async with self._changed:
            while len(found := self._servable.get(at, {})) < seat.replica.dp_size:
                await self._changed.wait()
                self._require(seat)
        return min(found.values())

    async def collect(self, seat: Seat, standing: Standing, timeout_s: float) -> StreamState:
        """Returns the merged state of all workers after one step, from what they announced.

        Raises:
            LockstepError: Some worker has not been handed that step within ``timeout_s``.
            StaleIncarnationError: The worker belongs to a group that has been replaced.
        """
        self._require(seat)
        self._note(seat, standing)
        await self._tell_changed()
        deadline = time.monotonic() + timeout_s
        async with self._changed:
            while len(found := self._at(standing.at)) < seat.world_size:
                left = deadline - time.monotonic()
                if left <= 0:
                    break
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), left)
                self._require(seat)
        if apart := set(self._history) - set(found):
            raise LockstepError(
                f"ranks {sorted(apart)} did not reach epoch {standing.epoch}, step {standing.step}, within "
                f"{timeout_s:.0f} s. Found: {self._describe(seat.world_size)}. Expected: all at the same step. "
                "Remedy: save on every rank after the same step."
            )
        self._require_whole(found)
        if len(found) < seat.world_size:
            # Those never heard of announced themselves to a manager that has died; this state is complete.
            logger.warning(
                "the state of %s was saved without word of %d ranks", seat.name, seat.world_size - len(found)
            )
        return merge_states([found[rank].state for rank in sorted(found)])

    def _require(self, seat: Seat) -> None:
        if not self._admit(seat.incarnation):
            raise StaleIncarnationError(f"worker group {seat.incarnation} has been replaced by {self._incarnation}")

    def _admit(self, incarnation: int) -> bool:
        """Whether an incarnation is the newest; a newer one replaces what is known."""
        if incarnation > self._incarnation:
            self._incarnation = incarnation
            self._seats.clear()
            self._history.clear()
            self._servable.clear()
            for current in self._rounds.values():
                current.replaced = True
                current.done.set()
            self._rounds.clear()
        return incarnation == self._incarnation

    def _note(self, seat: Seat, standing: Standing) -> None:
        self._seats[seat.world_rank] = seat
        history = self._history.setdefault(seat.world_rank, deque(maxlen=STANDINGS_OF_INTEREST))
        if history and history[-1].at == standing.at:
            history[-1] = standing
        else:
            history.append(standing)

    async def _tell_changed(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    def _at(self, at: tuple[int, int]) -> dict[int, Standing]:
        return {rank: s for rank, history in self._history.items() for s in history if s.at == at}

    def _arrive(self, current: _Round, seat: Seat, standing: Standing | None) -> None:
        current.arrived[seat.world_rank] = standing
        if len(current.arrived) == current.world_size:
            self._close(current)

    def _close(self, current: _Round) -> None:
        """Ends a round with those that have arrived, and what the others announced for the same step."""
        if current.done.is_set():
            return
        standings = {rank: standing for rank, standing in sorted(current.arrived.items()) if standing is not None}
        places = {standing.at for standing in standings.values()}
        if len(places) > 1:
            current.error = _apart(standings)
        elif places:
            announced = {rank: s for rank, s in self._at(places.pop()).items() if rank not in current.arrived}
            try:
                self._require_whole(standings | announced)
                current.merged = merge_states([s.state for s in (standings | announced).values()])
            except LockstepError as error:
                current.error = str(error)
            except ValueError as error:
                current.error = f"the workers' states do not fit together: {error}"
        current.done.set()

    def _require_whole(self, standings: dict[int, Standing]) -> None:
        """Raises LockstepError if the states of a stream that skips rows are not those of all replicas."""
        seats = [self._seats[rank] for rank in standings if rank in self._seats]
        missing = set(range(max((seat.replica.dp_size for seat in seats), default=0)))
        missing -= {seat.replica.dp_rank for seat in seats}
        if missing and any(standing.partial for standing in standings.values()):
            raise LockstepError(
                f"the state of a stream that skips rows needs every replica's. Found: none of {sorted(missing)}. "
                "Expected: what each of them was handed last. Remedy: resume from the last checkpoint."
            )

    def _compare_late(self, current: _Round, seat: Seat, standing: Standing) -> None:
        earlier = {rank: s for rank, s in sorted(current.arrived.items()) if s is not None and rank != seat.world_rank}
        if any(other.at != standing.at for other in earlier.values()):
            raise LockstepError(_apart(earlier | {seat.world_rank: standing}))

    async def _wait(self, current: _Round, number: int) -> None:
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(current.done.wait(), _GRACE_S)
        if not current.done.is_set():
            missing = sorted(set(range(current.world_size)) - set(current.arrived))
            known = self._describe(current.world_size)
            logger.warning("report %d goes on without ranks %s after %.0f s; %s", number, missing, _GRACE_S, known)
            self._close(current)

    def _describe(self, world_size: int) -> str:
        last: dict[int, Any] = {rank: history[-1] for rank, history in self._history.items()}
        return ", ".join(
            f"rank {rank}: epoch {last[rank].epoch}, step {last[rank].step}"
            if rank in last
            else f"rank {rank}: unknown"
            for rank in range(world_size)
        )


def _apart(standings: dict[int, Standing]) -> str:
    places = ", ".join(f"rank {rank}: epoch {s.epoch}, step {s.step}" for rank, s in sorted(standings.items()))
    return (
        f"the workers reported at different steps. Found: {places}. Expected: the same step on every rank. "
        "Remedy: call report() on every rank after the same shard.step."
    )
