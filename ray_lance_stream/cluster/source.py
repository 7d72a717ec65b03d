"""A block source that asks the pool of prefetchers."""

from __future__ import annotations

import contextlib
import logging
import random
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Final

import ray
from ray.exceptions import ActorDiedError, ObjectLostError, RayError, RayTaskError, TaskCancelledError

from ray_lance_stream.errors import LanceStreamError, StreamClosedError
from ray_lance_stream.plan import PlanSpec
from ray_lance_stream.request import PlanHandle, Ranges

logger = logging.getLogger("ray_lance_stream")
_FEW_ATTEMPTS: Final = 4  # the same answer four times is final, unless time may heal it
_FIRST_DELAY_S: Final = 0.05
_LONGEST_DELAY_S: Final = 2.0
_WARN_EVERY_S: Final = 5.0
_REFRESH_EVERY_S: Final = 1.0
_SUSPECT_S: Final = 2.0  # how long a prefetcher that failed is passed over if there is another one; doubles
_LONGEST_SUSPECT_S: Final = 60.0
_POLL_S: Final = 0.5  # how soon a call that waits for the coordinator learns that the source was closed
_PLANS: Final = 4  # the epoch that ends, the one that begins, and a few to go back to


@dataclass
class _Member:
    """A prefetcher of the pool as this consumer sees it."""

    actor: Any
    waiting: set[ray.ObjectRef[Any]] = field(default_factory=set)
    failures: int = 0  # one after the other
    suspect_until: float = 0.0

    def failed(self, now: float) -> None:
        """Makes others preferred for a while. Requests that fail together, with the process, count once."""
        if now >= self.suspect_until:
            pause_s = min(_LONGEST_SUSPECT_S, _SUSPECT_S * 2 ** min(self.failures, 10))
            self.failures += 1
            self.suspect_until = now + pause_s


class RaySource:
    """Sends each request to the prefetcher with the fewest open ones; see ``source.BlockSource``."""

    def __init__(self, coordinator: Any, incarnation: int, *, retry_window_s: float) -> None:
        self._coordinator = coordinator
        self._incarnation = incarnation
        self._retry_window_s = retry_window_s
        self._lock = threading.Lock()  # futures complete on a thread of Ray's
        self._members: list[_Member] = []
        self._plans: dict[str, PlanHandle] = {}  # as the coordinator gave them last, the newest at the end
        self._rows_lost: dict[str, PlanHandle] = {}  # handles whose list of matching rows is gone
        self._closed = threading.Event()
        self._random = random.Random()  # not the module's: its numbers are the user's
        self._warned_at = float("-inf")
        self._refreshed_at = time.monotonic()
        self._refresh()

    def plan(self, spec: PlanSpec) -> PlanHandle:
        """See ``BlockSource``. Waits for the coordinator."""
        return self._ensure(spec)

    def request(self, handle: PlanHandle, ranges: Ranges) -> Future[Any]:
        """See ``BlockSource``."""
        now = time.monotonic()
        self._refresh_now_and_then(now)
        with self._lock:
            # By chance among equals: consumers that all begin with the same prefetcher would queue there.
            member = min(self._members, key=lambda m: (m.suspect_until > now, len(m.waiting), self._random.random()))
            handle = self._plans.get(handle.spec.plan_id, handle)
        ref = member.actor.build.remote(handle, ranges, self._incarnation)
        with self._lock:
            member.waiting.add(ref)
        answer: Future[Any] = Future()
        ref.future().add_done_callback(lambda done: self._settle(member, ref, handle, done, answer))
        answer.add_done_callback(lambda done: self._abandon(ref) if done.cancelled() else None)
        return answer

    def retry_delay_s(self, error: BaseException, attempt: int, elapsed_s: float) -> float | None:
        """See ``BlockSource``: losses and the storage's errors within the window, errors of the user's never."""
        cause = _cause_of(error)
        if isinstance(cause, (LanceStreamError, TaskCancelledError)):
            return None
        lost = isinstance(cause, RayError) and not isinstance(cause, RayTaskError)
        heals = (lost or isinstance(cause, OSError)) and elapsed_s <= self._retry_window_s
        if attempt >= _FEW_ATTEMPTS and not heals:
            return None
        self._warn(attempt, cause)
        if lost:
            self._recover()
        return float(min(_LONGEST_DELAY_S, _FIRST_DELAY_S * 2 ** min(attempt, 10)))

    def close(self) -> None:
        """See ``BlockSource``. Requests that no prefetcher has begun are withdrawn."""
        self._closed.set()
        with self._lock:
            refs = [ref for member in self._members for ref in member.waiting]
        for ref in refs:
            self._abandon(ref)

    def _settle(
        self,
        member: _Member,
        ref: ray.ObjectRef[Any],
        handle: PlanHandle,
        done: Future[Any],
        answer: Future[Any],
    ) -> None:
        error = done.exception()
        with self._lock:
            member.waiting.discard(ref)
            if error is None:
                member.failures, member.suspect_until = 0, 0.0
            elif isinstance(error, RayTaskError):
                # Lost on the prefetcher: the list of rows. Lost here: only the block, which is just built again.
                if handle.spec.order.filter is not None and isinstance(_cause_of(error), ObjectLostError):
                    self._rows_lost[handle.spec.plan_id] = handle
            elif isinstance(error, RayError) and not isinstance(error, TaskCancelledError):
                member.failed(time.monotonic())
        if answer.set_running_or_notify_cancel():
            if error is not None:
                answer.set_exception(error)
            else:
                answer.set_result(done.result())

    def _warn(self, attempt: int, cause: BaseException) -> None:
        """Says why blocks are asked for again; one line for all that fail at the same time."""
        now = time.monotonic()
        if now - self._warned_at > _WARN_EVERY_S:
            self._warned_at = now
            logger.warning("asking again for a block (attempt %d): %s", attempt + 1, _first_line(cause))

    def _abandon(self, ref: ray.ObjectRef[Any]) -> None:
        if not ray.is_initialized():  # after ray.shutdown() a call of Ray's would start it anew
            return
        # A request that has begun cannot be stopped, and one that is done needs no stopping.
        with contextlib.suppress(Exception):
            ray.cancel(ref)

    def _recover(self) -> None:
        """Opens plans whose rows were lost again, and looks who is there now."""
        with self._lock:
            lost, self._rows_lost = self._rows_lost, {}
            now = [(self._plans.get(key, handle), handle) for key, handle in lost.items()]
        for current, handle in now:
            if current.matching_rows == handle.matching_rows:  # else they were found again in the meantime
                self._ensure(handle.spec, [handle.matching_rows])  # in a list, else Ray would look for the rows
        self._refresh()

    def _refresh(self) -> None:
        """Waits to learn who is in the pool."""
        self._take_pool(_call(self._coordinator.pool.remote(), self._closed))

    def _refresh_now_and_then(self, now: float) -> None:
        """Asks, without waiting, whether prefetchers have joined the pool."""
        if now - self._refreshed_at > _REFRESH_EVERY_S:
            self._refreshed_at = now
            asked = self._coordinator.pool.options(max_task_retries=0).remote().future()
            # A coordinator that does not answer is looked for when a request fails.
            asked.add_done_callback(lambda done: None if done.exception() else self._take_pool(done.result()))

    def _take_pool(self, actors: list[Any]) -> None:
        with self._lock:
            known = {member.actor._actor_id: member for member in self._members}
            self._members = [known.get(actor._actor_id) or _Member(actor) for actor in actors]

    def _ensure(self, spec: PlanSpec, lost: list[Any] | None = None) -> PlanHandle:
        handle: PlanHandle = _call(self._coordinator.ensure.remote(spec, lost), self._closed)
        with self._lock:
            self._plans.pop(spec.plan_id, None)
            self._plans[spec.plan_id] = handle
            for old in list(self._plans)[:-_PLANS]:
                del self._plans[old]
        return handle


def _call(ref: ray.ObjectRef[Any], stop: threading.Event | None = None) -> Any:
    """Waits for an actor's answer; an error of ours arrives as it was raised there.

    Raises:
        StreamClosedError: The actor has ended, or ``stop`` was set.
    """
    while stop is not None and not ray.wait([ref], timeout=_POLL_S)[0]:
        if stop.is_set():
            raise StreamClosedError("the shard was closed while it waited for the stream's actors")
    try:
        return ray.get(ref)
    except ActorDiedError as error:
        if error.actor_init_failed:
            raise
        raise StreamClosedError(
            "the stream's actors have ended: the stream was closed, its driver ended, or nothing renewed their "
            "leases for idle_timeout_s; open the stream again"
        ) from error
    except RayTaskError as error:
        cause = getattr(error, "cause", None)
        if isinstance(cause, LanceStreamError):
            raise cause from None
        raise


def _cause_of(error: BaseException) -> BaseException:
    cause = getattr(error, "cause", None) if isinstance(error, RayTaskError) else None
    return cause if isinstance(cause, BaseException) else error


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
