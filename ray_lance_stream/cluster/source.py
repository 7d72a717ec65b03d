"""A block source that asks the pool of prefetchers."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Final

import pyarrow as pa
import ray
from ray.exceptions import ObjectLostError, RayActorError, RayError, RayTaskError, TaskCancelledError

from ray_lance_stream.errors import LanceStreamError
from ray_lance_stream.plan import PlanSpec
from ray_lance_stream.request import PlanHandle, Ranges

logger = logging.getLogger("ray_lance_stream")
_STORAGE_ATTEMPTS: Final = 4  # an error of the storage is worth asking again; the same answer four times is final
_FIRST_DELAY_S: Final = 0.05
_LONGEST_DELAY_S: Final = 2.0
_WARN_EVERY_S: Final = 5.0
_REFRESH_EVERY_S: Final = 1.0
_SUSPECT_S: Final = 2.0  # how long a prefetcher that failed is passed over if there is another one


@dataclass
class _Member:
    """A prefetcher of the pool as this consumer sees it."""

    actor: Any
    waiting: set[ray.ObjectRef[Any]] = field(default_factory=set)
    suspect_until: float = 0.0


class RaySource:
    """Sends each request to the prefetcher with the fewest open ones; see ``source.BlockSource``."""

    def __init__(self, coordinator: Any, incarnation: int, *, retry_window_s: float) -> None:
        self._coordinator = coordinator
        self._incarnation = incarnation
        self._retry_window_s = retry_window_s
        self._lock = threading.Lock()  # futures complete on a thread of Ray's
        self._members: list[_Member] = []
        self._renewed: dict[str, PlanHandle] = {}
        self._warned_at = float("-inf")
        self._refreshed_at = time.monotonic()
        self._refresh()

    def plan(self, spec: PlanSpec) -> PlanHandle:
        """See ``BlockSource``. Waits for the coordinator."""
        return self._ensure(spec, renew=False)

    def request(self, handle: PlanHandle, ranges: Ranges) -> Future[pa.Table]:
        """See ``BlockSource``."""
        now = time.monotonic()
        self._refresh_now_and_then(now)
        with self._lock:
            member = min(self._members, key=lambda m: (m.suspect_until > now, len(m.waiting)))
            handle = self._renewed.get(handle.spec.plan_id, handle)
        ref = member.actor.build.remote(handle, ranges, self._incarnation)
        with self._lock:
            member.waiting.add(ref)
        answer: Future[pa.Table] = Future()
        ref.future().add_done_callback(lambda done: self._settle(member, ref, done, answer))
        answer.add_done_callback(lambda done: self._abandon(ref) if done.cancelled() else None)
        return answer

    def retry_delay_s(self, error: BaseException, attempt: int, elapsed_s: float) -> float | None:
        """See ``BlockSource``: losses are asked for again within the window, errors of the user's never."""
        cause = getattr(error, "cause", error) if isinstance(error, RayTaskError) else error
        if isinstance(cause, (LanceStreamError, TaskCancelledError)):
            return None
        lost = isinstance(cause, (RayActorError, RayError)) and not isinstance(cause, RayTaskError)
        if lost and elapsed_s > self._retry_window_s and attempt >= _STORAGE_ATTEMPTS:
            return None
        if not lost and attempt >= _STORAGE_ATTEMPTS:
            return None
        self._warn(attempt, cause)
        if lost:
            self._recover(cause)
        return float(min(_LONGEST_DELAY_S, _FIRST_DELAY_S * 2**attempt))

    def close(self) -> None:
        """See ``BlockSource``. Requests that no prefetcher has begun are withdrawn."""
        with self._lock:
            refs = [ref for member in self._members for ref in member.waiting]
        for ref in refs:
            self._abandon(ref)

    def _settle(self, member: _Member, ref: ray.ObjectRef[Any], done: Future[Any], answer: Future[pa.Table]) -> None:
        error = done.exception()
        with self._lock:
            member.waiting.discard(ref)
            if isinstance(error, RayActorError):
                member.suspect_until = time.monotonic() + _SUSPECT_S
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
        # A request that has begun cannot be stopped, and one that is done needs no stopping.
        with contextlib.suppress(Exception):
            ray.cancel(ref)

    def _recover(self, cause: BaseException) -> None:
        """Looks who is there now; plans whose rows were lost are opened again when asked for."""
        if isinstance(cause, ObjectLostError):
            for spec in [handle.spec for handle in self._renewed.values()]:
                self._ensure(spec, renew=True)
        self._refresh()

    def _refresh(self) -> None:
        """Waits to learn who is in the pool."""
        self._take_pool(_call(self._coordinator.pool.remote()))

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

    def _ensure(self, spec: PlanSpec, *, renew: bool) -> PlanHandle:
        handle: PlanHandle = _call(self._coordinator.ensure.remote(spec, renew))
        with self._lock:
            self._renewed = {spec.plan_id: handle}
        return handle


def _call(ref: ray.ObjectRef[Any]) -> Any:
    """Waits for an actor's answer; an error of ours arrives as it was raised there."""
    try:
        return ray.get(ref)
    except RayTaskError as error:
        cause = getattr(error, "cause", None)
        if isinstance(cause, LanceStreamError):
            raise cause from None
        raise


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
