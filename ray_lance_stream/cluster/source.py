"""A block source that asks the pool of prefetchers."""

from __future__ import annotations

import functools
import math
import threading
import time
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, Final

import ray
from ray.exceptions import (
    ObjectStoreFullError,
    OutOfDiskError,
    RayError,
    RayTaskError,
    TaskCancelledError,
)

from ray_lance_stream.cluster.answers import cause_of
from ray_lance_stream.cluster.coordination import Coordination
from ray_lance_stream.cluster.examiner import Findings
from ray_lance_stream.cluster.meter import Answer
from ray_lance_stream.cluster.metrics import Watch
from ray_lance_stream.cluster.reports import PoolView, Report, keep_reporting
from ray_lance_stream.cluster.requests import Request, Requests
from ray_lance_stream.core import ShardCore
from ray_lance_stream.errors import LanceStreamError
from ray_lance_stream.plan import PlanSpec
from ray_lance_stream.request import PlanHandle, Ranges
from ray_lance_stream.sifting import SkippedRow, joined

_FEW_ATTEMPTS: Final = 4  # the same answer four times is final, unless time may heal it
_FIRST_DELAY_S: Final = 0.05
_LONGEST_DELAY_S: Final = 2.0
_REFRESH_EVERY_S: Final = 1.0
_PLANS: Final = 4  # the epoch that ends, the one that begins, and a few to go back to
_SUSPECTED_AFTER: Final = 0.5  # the part of the retry window after which a block that was lost is suspected as well
_DEATHS: Final = 3  # processes that died with a block, before the block is suspected and not they


class RaySource:
    """Sends each request to the prefetcher with the fewest open ones; see ``source.BlockSource``.

    A block whose prefetchers die again and again is examined: the row that kills them becomes an error, or is left
    out.
    """

    def __init__(self, coordinator: Any, incarnation: int, *, retry_window_s: float) -> None:
        self._closed = threading.Event()
        self._coordinator = Coordination(coordinator, self._closed)
        self._incarnation = incarnation
        self._retry_window_s = retry_window_s
        self._lock = threading.Lock()  # futures complete on a thread of Ray's
        self._requests = Requests(incarnation)
        self._plans: dict[str, PlanHandle] = {}  # as the coordinator gave them last, the newest at the end
        self._parts: dict[tuple[str, Ranges], list[Ranges]] = {}  # how blocks that were examined must be cut
        self._deadly: dict[str, list[SkippedRow]] = {}  # by plan: rows that kill who reads them, and are left out
        self._found_at = float("-inf")  # when an examination last told what a block was lost of
        self._refreshed_at = time.monotonic()
        self._life = ""  # of the coordinator that was heard of last
        self._watch: Watch | None = None
        self._requests.take_pool(self._coordinator.wait(coordinator.pool.remote(), "is there a prefetcher"))

    @property
    def copies(self) -> int:
        """How often a request was sent to one more prefetcher, because it was late."""
        return self._requests.copies

    def plan(self, spec: PlanSpec) -> PlanHandle:
        """See ``BlockSource``. Waits for the coordinator."""
        asked = self._coordinator.actor.ensure.remote(spec, None)
        handle: PlanHandle = self._coordinator.wait(asked, f"the plan of epoch {spec.epoch}")
        self._keep(handle)
        return handle

    def request(self, handle: PlanHandle, ranges: Ranges) -> Future[Any]:
        """See ``BlockSource``."""
        self._refresh_now_and_then(time.monotonic())
        with self._lock:
            current = self._plans.get(handle.spec.plan_id, handle)
            handle = current if current.with_rows == handle.with_rows else replace(current, with_rows=handle.with_rows)
            request = self._new_request(handle, ranges, Answer(self._requests.meter))
            parts = self._parts.get(request.key)
        if parts is not None:
            self._send_in_parts(request, parts)
        elif self._requests.deaths_with(request) >= _DEATHS or (
            # Where processes take long to start, as many would not have died before the window is over.
            self._requests.dying_s(request) > self._retry_window_s * _SUSPECTED_AFTER
        ):
            self._examine(request)
        else:
            self._requests.send(request)
        return request.answer

    def retry_delay_s(self, error: BaseException, attempt: int, elapsed_s: float) -> float | None:
        """See ``BlockSource``: losses and the storage's errors within the window, errors of the user's never."""
        cause = cause_of(error)
        if isinstance(cause, (LanceStreamError, TaskCancelledError)):
            return None
        lost = isinstance(cause, RayError) and not isinstance(cause, RayTaskError)
        # A row that kills takes the blocks beside it along, and finding it takes long: then their time begins anew.
        # Who waits for prefetchers to be there, or rows to be listed, does not wait for this block.
        elapsed_s -= self._coordinator.asked_s(elapsed_s)
        elapsed_s = min(elapsed_s, time.monotonic() - self._found_at)
        heals = (lost or isinstance(cause, OSError)) and elapsed_s <= self._retry_window_s
        if attempt >= _FEW_ATTEMPTS and not heals:
            if lost:
                self._coordinator.check()
                self._coordinator.check_placed()
            return None
        self._requests.warn("asking again for a block (attempt %d): %s", attempt + 1, _first_line(cause))
        if lost:
            self._recover()
            self._coordinator.check()
        return float(min(_LONGEST_DELAY_S, _FIRST_DELAY_S * 2 ** min(attempt, 10)))

    def advice(self, error: BaseException) -> str:
        """See ``BlockSource``."""
        cause = cause_of(error)
        if isinstance(cause, (ObjectStoreFullError, OutOfDiskError)):
            return (
                "look at `ray memory` for what fills the nodes' object stores and at their disks, give Ray more "
                "(object_store_memory), or pass smaller block_bytes and max_buffer_bytes in PrefetchConfig"
            )
        if isinstance(cause, RayError) and not isinstance(cause, RayTaskError):
            return (
                "look at the nodes of the prefetchers, whose memory may be too small; pass a longer retry_window_s in "
                "PrefetchConfig if they come back later"
            )
        return "look at the storage" if isinstance(cause, OSError) else "see the error it comes from"

    def close(self) -> None:
        """See ``BlockSource``. Requests that no prefetcher has begun are withdrawn."""
        if self._watch is not None and not self._closed.is_set() and ray.is_initialized():
            self._watch.look()  # what the metrics were not told yet
        self._closed.set()
        self._requests.close()

    # ------------------------------------------------------------------ the pool

    @property
    def prefetchers(self) -> int:
        """The number of prefetchers that may be asked, as last heard."""
        return self._requests.pool_size

    @property
    def open_requests(self) -> int:
        """Blocks that were asked for and are not here."""
        return self._requests.open

    def look_at(self, shard: ShardCore, run: str) -> None:
        """Reports from now on what this shard shows, too."""
        self._watch = Watch(shard, run)

    def keep_reporting(self, holder: str) -> None:
        """Tells the coordinator now and then how busy the pool is, as the consumer of that name; see ``reports``."""
        keep_reporting(self, self._coordinator.actor, holder, self._closed)

    def report(self, holder: str, node: str) -> Report:
        """See ``reports.Reporting``."""
        sight = None if self._watch is None else self._watch.look()
        waits_for = None if sight is None else sight.waits_for
        return Report(
            holder=holder,
            incarnation=self._incarnation,
            node=node,
            load=self._requests.meter.read(time.monotonic()),
            may_ask=self._requests.may_ask(),
            life=self._life,
            run="" if self._watch is None else self._watch.run,
            sight=sight,
            asked_of=frozenset() if waits_for is None else self._requests.asked_of(waits_for),
        )

    def take_view(self, view: PoolView) -> None:
        """See ``reports.Reporting``."""
        self._life = view.life
        if view.members:  # a coordinator that was restarted has none for a while; until then requests fail and wait
            self._refreshed_at = math.inf  # from now on it is told, and need not ask
            self._coordinator.placed()
            self._requests.take_pool(view.members, view.near, view.silent)

    # ------------------------------------------------------------------ blocks that kill

    def _examine(self, request: Request) -> None:
        """Has the coordinator find out what is wrong with a block, and goes on from there."""
        asked = self._coordinator.actor.examine.remote(request.handle, request.ranges).future()
        asked.add_done_callback(
            lambda found: self._requests.later(functools.partial(self._use_findings, request, found))
        )

    def _new_request(self, handle: PlanHandle, ranges: Ranges, answer: Future[Any]) -> Request:
        """A request that says which of its rows must not be touched. Called under the lock."""
        known = self._deadly.get(handle.spec.plan_id, ())
        return Request(handle, ranges, answer, tuple(row for row in known if ranges.holds(row.split, row.position)))

    def _use_findings(self, request: Request, found: Future[Findings]) -> None:
        error = found.exception()
        if error is not None:
            if request.answer.set_running_or_notify_cancel():
                request.answer.set_exception(error)
            return
        findings = found.result()
        self._requests.acquit(request)
        with self._lock:
            # Of this plan only: what a transform draws for a row, and whether it dies of it, differs by epoch.
            known = self._deadly.setdefault(request.handle.spec.plan_id, [])
            known += [row for row in findings.deadly if row not in known]
            if findings.deadly:
                self._found_at = time.monotonic()
            if findings.parts != [request.ranges]:
                self._parts[request.key] = findings.parts  # for the case that one of them is lost
        if findings == Findings(parts=[request.ranges]):
            self._requests.send(request)
        else:
            self._send_in_parts(request, findings.parts)

    def _send_in_parts(self, request: Request, parts: list[Ranges]) -> None:
        with self._lock:
            pieces = [self._new_request(request.handle, part, Future()) for part in parts]
        answers = [piece.answer for piece in pieces]

        def join(_: Future[Any]) -> None:
            if all(answer.done() for answer in answers):
                self._requests.later(functools.partial(_join, answers, request.answer))

        def cancel(done: Future[Any]) -> None:
            if done.cancelled():
                for answer in answers:
                    answer.cancel()

        for piece in pieces:
            piece.answer.add_done_callback(join)
            self._requests.send(piece)
        request.answer.add_done_callback(cancel)

    # ------------------------------------------------------------------ the coordinator

    def _recover(self) -> None:
        """Has plans whose rows were lost opened again, and asks who is there now.

        Does not wait: whoever reads may have blocks, and may be told to end.
        """
        for handle in self._requests.rows_lost():
            with self._lock:
                current = self._plans.get(handle.spec.plan_id, handle)
            if current.matching_rows == handle.matching_rows:  # else they were found again in the meantime
                lost = [handle.matching_rows]  # in a list, else Ray would look for the rows
                ensure = functools.partial(self._coordinator.actor.ensure.remote, handle.spec, lost)
                self._coordinator.ask(handle.spec.plan_id, ensure, self._keep)
        self._coordinator.ask("pool", self._coordinator.actor.pool.remote, self._requests.take_pool)

    def _refresh_now_and_then(self, now: float) -> None:
        """Asks, without waiting, whether prefetchers have joined the pool."""
        if now - self._refreshed_at > _REFRESH_EVERY_S:
            self._refreshed_at = now
            # One that does not answer is looked for when a request fails.
            pool = self._coordinator.actor.pool.options(max_task_retries=0)
            self._coordinator.ask("pool", pool.remote, self._requests.take_pool)

    def _keep(self, handle: PlanHandle) -> None:
        with self._lock:
            self._plans.pop(handle.spec.plan_id, None)
            self._plans[handle.spec.plan_id] = handle
            for old in list(self._plans)[:-_PLANS]:
                del self._plans[old]


def _join(pieces: list[Future[Any]], answer: Future[Any]) -> None:
    """Puts a block together from its parts, and empties their list: their callbacks would keep them by it."""
    parts, pieces[:] = pieces[:], []
    if not parts or not answer.set_running_or_notify_cancel():
        return  # done already, for parts that ended at the same time, or not wanted any more
    try:
        answer.set_result(joined([part.result() for part in parts]))
    except Exception as error:  # a part's, or parts that do not fit: somebody waits for this answer
        answer.set_exception(error)


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
