"""A consumer's calls of its coordinator: those it waits for, and those whose answers it takes when they come."""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Final

import ray
from ray.exceptions import ActorDiedError, RayTaskError

from ray_lance_stream.cluster.answers import answer_of, cause_of
from ray_lance_stream.errors import BlockError, LanceStreamError, PlacementError, StreamClosedError, explain
from ray_lance_stream.waits import Patience

logger = logging.getLogger("ray_lance_stream")
_POLL_S: Final = 0.5  # how soon a call that is waited for learns that nobody wants it any more
_LONG_S: Final = 1.0  # an answer takes some milliseconds; those that take much longer are remembered
_REMEMBERED: Final = 64
_LONGEST_S: Final = 3600.0  # to list the matching rows of a very large table, or else the coordinator hangs


class Coordination:
    """The coordinator, which may be slow, hang, be started again, or have ended. Safe to use from several threads.

    Args:
        actor: Its handle.
        closed: Set when nobody waits any more.

    Attributes:
        actor: Its handle.
    """

    def __init__(self, actor: Any, closed: threading.Event) -> None:
        self.actor = actor
        self._closed = closed
        self._lock = threading.Lock()  # futures complete on a thread of Ray's
        self._asking: dict[str, float] = {}  # what was asked for and is not answered, and since when
        self._asked: deque[tuple[float, float]] = deque(maxlen=_REMEMBERED)  # from when to when something was
        self._errors: dict[str, Exception] = {}  # what came instead of an answer, and was not raised yet
        self._unplaced: str | None = None  # why there are no prefetchers, as it said last

    def wait(self, ref: ray.ObjectRef[Any], what: str) -> Any:
        """Waits for an answer; says so if that takes long.

        Raises:
            StreamClosedError: It has ended, or nobody waits any more.
            LanceStreamError: As the coordinator raised it.
        """
        began, patience = time.monotonic(), Patience()
        while not ray.wait([ref], timeout=_POLL_S)[0]:
            if self._closed.is_set():
                raise StreamClosedError("the shard was closed while it waited for the stream's actors")
            waited_s = time.monotonic() - began
            if patience.is_over(waited_s):
                logger.warning("the stream's coordinator has not answered for %.0f s: %s", waited_s, what)
        try:
            return answer_of(ref)
        except ActorDiedError as error:
            final = _final(error)
        raise final

    def ask(self, what: str, call: Callable[[], Any], use: Callable[[Any], None]) -> None:
        """Asks for something unless it is being asked for already, and does not wait.

        Args:
            what: Names it.
            call: Makes the call.
            use: Takes the answer, on a thread of Ray's; is not called if there is none.
        """
        with self._lock:
            if what in self._asking:
                return
            self._asking[what] = time.monotonic()
        try:
            answer = call().future()
        except BaseException:  # it was not asked
            with self._lock:
                del self._asking[what]
            raise
        answer.add_done_callback(functools.partial(self._hear, what, use))

    def asked_s(self, within_s: float) -> float:
        """Returns for how many of the last so many seconds something was asked for, and was answered in the end.

        What is not answered yet counts as well, up to an hour; an answer that there are no prefetchers does not: it
        took the time that they are given to start.
        """
        now, total_s = time.monotonic(), 0.0
        covered = now - within_s
        with self._lock:
            waiting = ((since, min(now, since + _LONGEST_S)) for since in self._asking.values())
            spans = [*self._asked, *waiting]
        for since, until in sorted(spans):
            total_s += max(0.0, until - max(since, covered))
            covered = max(covered, until)
        return total_s

    def placed(self) -> None:
        """Notes that there are prefetchers."""
        self._unplaced = None

    def check(self) -> None:
        """Raises, each error once, what came instead of an answer where nobody waited; not where asking again may help.

        Raises:
            StreamClosedError: The coordinator has ended.
            LanceStreamError: As it raised it.
        """
        with self._lock:
            errors, self._errors = self._errors, {}  # those behind the first come again where they matter
        for error in errors.values():
            raise error

    def check_placed(self) -> None:
        """Raises PlacementError if it said last that there are no prefetchers."""
        if self._unplaced is not None:
            raise PlacementError(self._unplaced)

    def _hear(self, what: str, use: Callable[[Any], None], answer: Future[Any]) -> None:
        error = answer.exception()
        cause = None if error is None else cause_of(error)
        with self._lock:
            since, now = self._asking.pop(what), time.monotonic()
            self._errors.pop(what, None)
            if isinstance(cause, PlacementError):
                self._unplaced = str(cause)
            elif isinstance(error, (ActorDiedError, RayTaskError)):
                self._errors[what] = _told(error)
            elif now - since > _LONG_S:
                self._asked.append((since, now))
            if error is None:
                self._unplaced = None
        if error is None:
            use(answer.result())


def _told(error: ActorDiedError | RayTaskError) -> LanceStreamError:
    told = _final(error) if isinstance(error, ActorDiedError) else cause_of(error)
    if isinstance(told, LanceStreamError):
        return told
    failure = BlockError(
        explain(
            "the stream's coordinator could not do what blocks need",
            found=f"{type(told).__name__}: {str(told).strip()}",
            expected="prefetchers to ask, and the rows of the filter listed again where they were lost",
            remedy="look at the storage and at the coordinator's log",
        )
    )
    failure.__cause__ = error
    return failure


def _final(error: ActorDiedError) -> Exception:
    if error.actor_init_failed:
        return error
    ended = StreamClosedError(
        "the stream's actors have ended: the stream was closed, its driver ended, or nothing renewed their leases for "
        "idle_timeout_s; open the stream again"
    )
    ended.__cause__ = error
    return ended
