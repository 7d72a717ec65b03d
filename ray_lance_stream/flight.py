"""Requests under way: waits for blocks, and sends the failed ones again."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterable
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from typing import Any, Final

from ray_lance_stream.errors import BlockError, LanceStreamError, StreamClosedError
from ray_lance_stream.request import PlanHandle, Ranges
from ray_lance_stream.source import BlockSource

logger = logging.getLogger("ray_lance_stream")
_POLL_S: Final = 0.2  # how often a wait looks after the other requests
_SAY_EVERY_S: Final = 30.0  # how often a wait that goes on is told of


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

    @property
    def settled(self) -> bool:
        """Whether nothing more will happen to it by itself."""
        return self.block is not None or self.error is not None


class Dispatcher:
    """Sends requests to a source and looks after them. One thread at a time uses it; any may close it."""

    def __init__(self, source: BlockSource, handle: PlanHandle) -> None:
        self._source = source
        self._handle = handle
        self.closed = False
        self.interrupted = threading.Event()  # set: the wait under way raises StreamClosedError
        self.retries = 0

    def send(self, ranges: Ranges, num_bytes: float) -> Flight:
        """Asks for a block of an expected size; does not wait."""
        return Flight(ranges=ranges, num_bytes=num_bytes, future=self._request(ranges))

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
        began, said = time.perf_counter(), 0
        arrived = self.look_after(flights)
        while wanted.block is None:
            if wanted.error is not None:
                error, wanted.error = wanted.error, None
                wanted.retry_at = time.monotonic()  # should it be wanted again
                wanted.failed_at, wanted.attempt = None, 0
                raise error
            self._pause(wanted)
            waited = time.perf_counter() - began
            if waited >= (said + 1) * _SAY_EVERY_S:
                said += 1
                logger.warning("waited %.0f s for %s; attempt %d", waited, wanted.ranges, wanted.attempt)
            self.check_open()
            if self.interrupted.is_set():
                raise StreamClosedError("this iteration of the shard has ended")
            arrived += self.look_after(flights)
        return arrived

    def look_after(self, flights: Iterable[Flight]) -> list[Flight]:
        """Takes in the blocks that have arrived, and returns them; sends failed requests again."""
        now, arrived = time.monotonic(), []
        for flight in list(flights):
            if flight.settled:
                continue
            if flight.retry_at is not None:
                if now >= flight.retry_at:
                    flight.retry_at = None
                    flight.attempt += 1
                    self.retries += 1
                    flight.future = self._request(flight.ranges)
            elif flight.future.done() and not self.closed and self._take_in(flight, now):
                arrived.append(flight)
        return arrived

    def _take_in(self, flight: Flight, now: float) -> bool:
        error = flight.future.exception()
        if error is None:
            flight.block = flight.future.result()
            flight.num_bytes = flight.block.nbytes
            return True
        if flight.failed_at is None:
            flight.failed_at = now
        delay_s = self._source.retry_delay_s(error, flight.attempt, now - flight.failed_at)
        if delay_s is None:
            flight.error = _final(flight, error)
        else:
            flight.retry_at = now + delay_s
        return False

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


def _final(flight: Flight, error: BaseException) -> BaseException:
    cause = getattr(error, "cause", None)
    for known in (error, cause):
        if isinstance(known, LanceStreamError):
            return known
    failure = BlockError(f"the block of {flight.ranges} could not be built in {flight.attempt} attempt(s): {error}")
    failure.__cause__ = error
    return failure
