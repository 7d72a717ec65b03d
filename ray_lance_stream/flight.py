"""Requests under way: waits for blocks, and sends the failed ones again."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from typing import Any, Final

from ray_lance_stream.errors import BlockError, LanceStreamError, StreamClosedError, explain
from ray_lance_stream.request import PlanHandle, Ranges
from ray_lance_stream.source import BlockSource
from ray_lance_stream.storage import RefusedError
from ray_lance_stream.waits import LoopClock, Patience

logger = logging.getLogger("ray_lance_stream")
_POLL_S: Final = 0.2  # how often a wait looks after the other requests


@dataclass(kw_only=True)
class Flight:
    """One block that was asked for.

    Attributes:
        ranges: Which rows.
        num_bytes: Its size: expected, until it is here.
        block: The block, once it is here.
        error: Why it will not come; raised when it is wanted.
    """

    ranges: Ranges
    num_bytes: float
    future: Future[Any]
    attempt: int = 1
    retry_at: float | None = None
    failed_at: float | None = None  # since when it fails
    error: BaseException | None = None
    block: Any = None
    wanted: bool = False  # somebody waits for it

    @property
    def withdrawn(self) -> bool:
        """Whether it was given up before it was begun; to be asked for again."""
        return self.future.cancelled()

    @property
    def settled(self) -> bool:
        """Whether nothing more will happen to it by itself."""
        return self.block is not None or self.error is not None


class Dispatcher:
    """Sends requests to a source and looks after them. One thread at a time uses it; any may close it.

    Args:
        source: Where blocks come from.
        handle: The plan.
        grown: A method, called when a block has arrived that is larger than was expected; on a thread of the source's,
            for the consumer may be asleep. Gets the block's bytes per row asked for.
    """

    def __init__(self, source: BlockSource, handle: PlanHandle, grown: Callable[[float], None]) -> None:
        self._source = source
        self._handle = handle
        self._grown = weakref.WeakMethod(grown)  # of who holds this dispatcher
        self.closed = False
        self.interrupted = threading.Event()  # set: the wait under way raises StreamClosedError
        self.retries = 0
        self.waits_for: Flight | None = None  # which one whoever reads stands still for
        self._patience = Patience()
        self._clock: LoopClock | None = None
        self._consumer = "the reader"

    def serve(self, clock: LoopClock, consumer: str) -> None:
        """Says for whom blocks are read: only its waiting matters, not that of what reads ahead for it.

        Args:
            clock: The loop's.
            consumer: What to call it in the log.
        """
        self._clock, self._consumer = clock, consumer

    def send(self, ranges: Ranges, num_bytes: float) -> Flight:
        """Asks for a block of an expected size; does not wait."""
        flight = Flight(ranges=ranges, num_bytes=num_bytes, future=self._request(ranges))
        self._weigh_later(flight)
        return flight

    def close(self, flights: Iterable[Flight]) -> None:
        """Gives up the requests under way."""
        self.closed = True
        for flight in flights:
            flight.future.cancel()

    def check_open(self) -> None:
        """Raises StreamClosedError if another thread has closed the shard."""
        if self.closed:
            raise StreamClosedError("the shard was closed while it was being read")

    def wait(self, wanted: Flight, flights: Iterable[Flight]) -> list[Flight]:
        """Waits until a block is here, looking after all the others; returns those that have newly arrived.

        Raises:
            StreamClosedError: The wait was interrupted, or the shard closed.
            LanceStreamError: The block will not come; asking again is possible.
        """
        if not wanted.wanted:
            wanted.wanted = True
            _try_anew(wanted)
        arrived = self.look_after(flights)
        if wanted.block is None:
            self.waits_for = wanted
            try:
                arrived += self._wait(wanted, flights)
            finally:
                self.waits_for = None
                wanted.wanted = wanted.block is not None  # whoever asks for it next may do so much later
        return arrived

    def _wait(self, wanted: Flight, flights: Iterable[Flight]) -> list[Flight]:
        began, arrived = time.perf_counter(), list[Flight]()
        while wanted.block is None:
            if wanted.error is not None:
                error, wanted.error = wanted.error, None
                wanted.retry_at = time.monotonic()  # should it be wanted again
                raise error
            if wanted.withdrawn:
                self._send_again(wanted)
            self._pause(wanted)
            self._tell(wanted, began)
            self.check_open()
            if self.interrupted.is_set():
                raise StreamClosedError("this iteration of the shard has ended")
            arrived += self.look_after(flights)
        return arrived

    def _tell(self, wanted: Flight, began: float) -> None:
        now = time.perf_counter()
        waited_s = now - began if self._clock is None else self._clock.waiting_s(now)
        if self._patience.is_over(waited_s):
            logger.warning(
                "%s has waited %.0f s for data: %s, epoch %d; attempt %d",
                *(self._consumer, waited_s, wanted.ranges, self._handle.spec.epoch, wanted.attempt),
            )

    def look_after(self, flights: Iterable[Flight]) -> list[Flight]:
        """Takes in the blocks that have arrived, and returns them; sends failed requests again."""
        now, arrived = time.monotonic(), []
        for flight in list(flights):
            if flight.settled or flight.withdrawn:
                continue
            if flight.retry_at is not None:
                if now >= flight.retry_at:
                    flight.retry_at = None
                    flight.attempt += 1
                    self.retries += 1
                    self._send_again(flight)
            elif flight.future.done() and not self.closed and self._take_in(flight, now):
                arrived.append(flight)
        return arrived

    def _take_in(self, flight: Flight, now: float) -> bool:
        try:
            error = flight.future.exception()
        except CancelledError:
            return False  # withdrawn on another thread in this very moment
        if error is None:
            flight.block = flight.future.result()
            flight.num_bytes = flight.block.nbytes
            return True
        if flight.failed_at is None:
            flight.failed_at = now
        try:
            delay_s = self._source.retry_delay_s(error, flight.attempt, now - flight.failed_at)
        except LanceStreamError as told:  # when the block is wanted
            flight.error = told
            return False
        if delay_s is None:
            flight.error = self._final(flight, error)
        else:
            flight.retry_at = now + delay_s
        return False

    def _final(self, flight: Flight, error: BaseException) -> BaseException:
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            return error  # a transform of this process means the process
        cause = getattr(error, "cause", None)  # of an error that an actor raised
        for known in (cause, error):  # the cause first: Ray's error of a task is of its cause's type as well
            if isinstance(known, LanceStreamError):
                return known
        told = cause if isinstance(cause, BaseException) else error
        failure = BlockError(
            str(told)  # it says what to do
            if isinstance(told, RefusedError)
            else explain(
                f"the block of {flight.ranges} could not be built in {flight.attempt} attempt(s)",
                found=f"{type(told).__name__}: {str(told).strip()}",
                expected="a block",
                remedy=self._source.advice(error),
            )
        )
        failure.__cause__ = error
        return failure

    def _send_again(self, flight: Flight) -> None:
        flight.future = self._request(flight.ranges)
        self._weigh_later(flight)

    def _weigh_later(self, flight: Flight) -> None:
        # Weak: a future keeps what it calls, and a block must be gone when its last user is.
        flight.future.add_done_callback(functools.partial(_weigh, weakref.ref(self), weakref.ref(flight)))

    def weighed(self, flight: Flight, num_bytes: float) -> None:
        """Notes how large a block is that has arrived. Called on any thread."""
        expected, flight.num_bytes = flight.num_bytes, num_bytes
        grown = self._grown()
        if num_bytes > expected and grown is not None and not self.closed:
            grown(num_bytes / max(1, flight.ranges.num_rows))

    def _request(self, ranges: Ranges) -> Future[Any]:
        self.check_open()
        try:
            return self._source.request(self._handle, ranges)
        except Exception:
            self.check_open()  # closed in this very moment, and the source with it
            raise

    def _pause(self, wanted: Flight) -> None:
        """Waits until the block may be there, but no longer than one poll."""
        if wanted.retry_at is not None:
            self.interrupted.wait(max(0.0, min(_POLL_S, wanted.retry_at - time.monotonic())))
            return
        with contextlib.suppress(FutureTimeoutError, CancelledError):
            wanted.future.exception(timeout=_POLL_S)


def _try_anew(flight: Flight) -> None:
    """Has the attempts and the time of failing begin when somebody waits: what was read ahead may have failed in an
    outage that is over. An error that was final at once stays.
    """
    if flight.error is not None and flight.attempt > 1:
        flight.error, flight.retry_at = None, time.monotonic()
    if flight.error is None:
        flight.failed_at, flight.attempt = None, 0 if flight.retry_at is not None else 1


def _weigh(dispatcher: weakref.ref[Dispatcher], flight: weakref.ref[Flight], done: Future[Any]) -> None:
    present, of = dispatcher(), flight()
    if present is not None and of is not None and not done.cancelled() and done.exception() is None:
        present.weighed(of, done.result().nbytes)


def withdraw_latest(flights: Sequence[Flight], bytes_per_row: float, excess: Callable[[], float]) -> None:
    """Gives up requests that were not begun, the latest first, while too much is held.

    Args:
        flights: In the order in which they are wanted.
        bytes_per_row: What a row that was asked for seems to weigh.
        excess: Returns by how many bytes too much is held, those of open requests at their expected size.
    """
    open_flights = [flight for flight in flights if not flight.future.done()]
    for flight in open_flights:
        flight.num_bytes = max(flight.num_bytes, flight.ranges.num_rows * bytes_per_row)
    for flight in reversed(open_flights):
        if excess() <= 0 or flight.wanted:
            return
        if flight.future.cancel():  # false: it is being built
            flight.num_bytes = 0.0
