"""Requests on their way: sent to a prefetcher, to others if it is late, and settled."""

from __future__ import annotations

import contextlib
import functools
import logging
import queue
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Final

import ray
from ray.exceptions import ObjectLostError, RayActorError, RayError, RayTaskError, TaskCancelledError

from ray_lance_stream.cluster.answers import cause_of
from ray_lance_stream.cluster.cuts import rows_of
from ray_lance_stream.cluster.meter import Meter
from ray_lance_stream.cluster.pool import Call, Member, Pool
from ray_lance_stream.errors import LanceStreamError
from ray_lance_stream.request import PlanHandle, Ranges
from ray_lance_stream.sifting import SkippedRow

logger = logging.getLogger("ray_lance_stream")
_WARN_EVERY_S: Final = 5.0
_LOOK_EVERY_S: Final = 0.25  # how often open requests are looked through for late ones

Jobs = queue.SimpleQueue[Callable[[], None]]


@dataclass(eq=False)
class Request:
    """A block that is wanted, and the calls for it that are open: one, or more if that is late."""

    handle: PlanHandle
    ranges: Ranges
    answer: Future[Any] = field(default_factory=Future)
    deadly: tuple[SkippedRow, ...] = ()  # rows of it that are known to kill who reads them
    calls: list[Call] = field(default_factory=list)
    settled: bool = False

    @property
    def key(self) -> tuple[str, Ranges]:
        """Names the block, whoever asks for it and how often."""
        return self.handle.spec.plan_id, self.ranges


class Requests:
    """The open requests of one consumer, and what their failures tell. Safe to use from several threads.

    A request that waits much longer than is usual is sent to another prefetcher as well; the first answer counts.
    """

    def __init__(self, incarnation: int) -> None:
        self._incarnation = incarnation
        self._lock = threading.Lock()  # futures complete on a thread of Ray's
        self.meter = Meter(time.monotonic())
        self._pool = Pool(self.meter)
        self._open: dict[Request, None] = {}  # not yet settled, oldest first: that is the one waited for
        self._deaths: dict[tuple[str, Ranges], set[Any]] = {}  # processes that died while they had the block to build
        self._died_at: dict[tuple[str, Ranges], float] = {}  # when the first of them did
        self._rows_lost: dict[str, PlanHandle] = {}  # handles whose list of matching rows is gone
        self._closed = threading.Event()
        self._jobs: Jobs = queue.SimpleQueue()
        self._tended = False
        self._warned_at = float("-inf")
        self.copies = 0  # requests that were sent once more because they were late

    def take_pool(
        self, actors: list[Any], near: frozenset[str] = frozenset(), silent: frozenset[str] = frozenset()
    ) -> None:
        """Takes over who is in the pool now, who of them is preferred among equals, and who is passed over."""
        with self._lock:
            self._pool.replace(actors, near, silent)

    def may_ask(self) -> frozenset[str]:
        """Returns the ids of the prefetchers that may be asked, or were and have not answered."""
        with self._lock:
            return self._pool.may_ask()

    def asked_of(self, ranges: Ranges) -> frozenset[str]:
        """Returns the ids of the prefetchers that have been asked for a block and have not answered."""
        with self._lock:
            return frozenset(call.member.id for r in self._open if r.ranges == ranges for call in r.calls)

    @property
    def open(self) -> int:
        """The number of blocks that were asked for and are not here."""
        return len(self._open)

    @property
    def pool_size(self) -> int:
        """The number of prefetchers that may be asked."""
        return self._pool.size

    def send(self, request: Request) -> None:
        """Sends a request to the best prefetcher there is; its ``answer`` is the block, or what went wrong."""
        self._tend()
        with self._lock:
            self._open[request] = None
            call = self._new_call(request, self._pool.best(time.monotonic()))
        self._send(request, call)
        request.answer.add_done_callback(functools.partial(self._give_up, weakref.ref(request)))

    def deaths_with(self, request: Request) -> int:
        """Returns how many processes have died, as far as is known, while they had this block to build."""
        with self._lock:
            return len(self._deaths.get(request.key, ()))

    def dying_s(self, request: Request) -> float:
        """Returns for how many seconds this block has been lost with processes; 0 if none died with it."""
        with self._lock:
            now = time.monotonic()
            return now - self._died_at.get(request.key, now)

    def acquit(self, request: Request) -> None:
        """Forgets the processes that died with this block."""
        with self._lock:
            self._forget_deaths(request)

    def _forget_deaths(self, request: Request) -> None:
        self._deaths.pop(request.key, None)
        self._died_at.pop(request.key, None)

    def rows_lost(self) -> list[PlanHandle]:
        """Returns, once, the handles of plans whose list of matching rows is gone."""
        with self._lock:
            lost, self._rows_lost = self._rows_lost, {}
            return list(lost.values())

    def later(self, job: Callable[[], None]) -> None:
        """Does something that must not be done on a thread of Ray's, where futures complete."""
        self._jobs.put(job)

    def close(self) -> None:
        """Withdraws what no prefetcher has begun."""
        self._closed.set()
        self.later(_nothing)  # wakes the thread up, so that it ends
        with self._lock:
            calls = self._pool.calls()
        _withdraw(calls)

    def overtake(self) -> None:
        """Sends what is late to an idle prefetcher as well.

        Each further one takes twice the patience, of all that have the request: several may hang at once, and where
        only the storage is slow, few copies make it slower still.
        """
        now = time.monotonic()
        copies: list[tuple[Request, Call]] = []
        with self._lock:
            for request in [r for r in self._open if r.calls]:
                times = 2 ** (len(request.calls) - 1)
                if all(self._pool.is_late(call, now, times) for call in request.calls):
                    other = self._pool.idle(now, [call.member for call in request.calls])
                    if other is not None:
                        copies.append((request, self._new_call(request, other)))
            self.copies += len(copies)
        for request, call in copies:
            self.warn("a prefetcher is late with a block of %d rows: asking another one as well", call.rows)
            self._send(request, call)

    def warn(self, text: str, *args: Any) -> None:
        """Says why blocks are asked for again; one line for all that fail at the same time."""
        now = time.monotonic()
        if now - self._warned_at > _WARN_EVERY_S:
            self._warned_at = now
            logger.warning(text, *args)

    def _new_call(self, request: Request, member: Member) -> Call:
        call = Call(member, rows_of(request.ranges))
        request.calls.append(call)
        self._pool.add(call, time.monotonic())
        return call

    def _send(self, request: Request, call: Call) -> None:
        actor, process = call.member.actor, None
        if request.key in self._deaths:  # a block that was lost before: which process has it now?
            process = actor.ready.remote().future()
        call.ref = actor.build.remote(request.handle, request.ranges, self._incarnation, request.deadly)
        call.ref.future().add_done_callback(lambda done: self._settle(request, call, process, done))

    def _settle(self, request: Request, call: Call, process: Future[Any] | None, done: Future[Any]) -> None:
        error, now = done.exception(), time.monotonic()
        with self._lock:
            request.calls.remove(call)
            answered, lost = error is None and not request.settled, isinstance(error, RayActorError)
            self._pool.remove(call, now, answered=answered, lost=lost)
            if error is None:
                call.member.worked()
                self._forget_deaths(request)
            else:
                self._note_failure(request, call, process, error)
            final = error is None or isinstance(cause_of(error), LanceStreamError)
            if request.settled or (request.calls and not final):
                return  # another copy was faster, or may still bring the block; if it is late, one more is sent
            request.settled = True
            self._open.pop(request, None)
            if error is None:
                for late in request.calls:
                    late.member.failed(now)
        if request.calls:
            self.later(functools.partial(self._abandon, request))
        if request.answer.set_running_or_notify_cancel():
            if error is not None:
                request.answer.set_exception(error)
            else:
                request.answer.set_result(done.result())

    def _note_failure(self, request: Request, call: Call, process: Future[Any] | None, error: BaseException) -> None:
        if isinstance(error, RayTaskError):
            # Lost on the prefetcher: the list of rows. Lost here: only the block, which is just built again.
            if request.handle.spec.order.is_listed and isinstance(cause_of(error), ObjectLostError):
                self._rows_lost[request.handle.spec.plan_id] = request.handle
        elif isinstance(error, RayError) and not isinstance(error, TaskCancelledError):
            call.member.failed(time.monotonic())
            if isinstance(error, RayActorError) and call.begun_at is not None:
                died = self._deaths.setdefault(request.key, {"the first, whichever it was"})
                self._died_at.setdefault(request.key, time.monotonic())
                # A prefetcher that is just being started again fails at once, and no block is to blame for it.
                if process is not None and process.done() and process.exception() is None:
                    died.add(process.result())

    def _give_up(self, request: weakref.ref[Request], done: Future[Any]) -> None:
        # Weak: an answer keeps what it calls, and would be kept by it, with its block, until Python looks for cycles.
        present = request()
        if done.cancelled() and present is not None:
            # Later: what is too much is given up on whichever thread a block has arrived.
            self.later(functools.partial(self._abandon, present))

    def _abandon(self, request: Request) -> None:
        with self._lock:
            self._open.pop(request, None)
            calls = list(request.calls)
        _withdraw(calls)

    def _tend(self) -> None:
        """Starts the thread that looks after open requests, with the first one."""
        with self._lock:
            if self._tended:
                return
            self._tended = True
        arguments = (weakref.ref(self), self._jobs, self._closed)
        threading.Thread(target=_look_after, args=arguments, name="lance-stream-requests", daemon=True).start()


def _look_after(requests: weakref.ref[Requests], jobs: Jobs, closed: threading.Event) -> None:
    """Does the jobs and looks for late requests; ends with the consumer."""
    while not closed.is_set():
        with contextlib.suppress(queue.Empty):
            jobs.get(timeout=_LOOK_EVERY_S)()
        present = requests()
        if present is None or not ray.is_initialized():  # after ray.shutdown() a call would start Ray anew
            return
        present.overtake()
        del present


def _withdraw(calls: list[Call]) -> None:
    if not ray.is_initialized():  # after ray.shutdown() a call of Ray's would start it anew
        return
    for call in calls:
        # A call that has begun cannot be stopped, and one that is done needs no stopping.
        with contextlib.suppress(Exception):
            ray.cancel(call.ref)


def _nothing() -> None:
    """Only wakes the thread up."""
