"""A consumer's calls of its coordinator: those it waits for, and those whose answers it takes when they come."""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Final

import ray
from ray.exceptions import ActorDiedError, RayTaskError

from ray_lance_stream.cluster.answers import answer_of, cause_of
from ray_lance_stream.errors import LanceStreamError, PlacementError, StreamClosedError
from ray_lance_stream.waits import Patience

logger = logging.getLogger("ray_lance_stream")
_POLL_S: Final = 0.5  # how soon a call that is waited for learns that nobody wants it any more


class Coordination:
    """The coordinator, which may be slow, hang, be started again, or have ended. Safe to use from several threads.

    Args:
        actor: Its handle.
        closed: Set when nobody waits any more.

    Attributes:
        actor: Its handle.
        unplaced: Why there are no prefetchers, as it said last; None since there are.
    """

    def __init__(self, actor: Any, closed: threading.Event) -> None:
        self.actor = actor
        self._closed = closed
        self._lock = threading.Lock()  # futures complete on a thread of Ray's
        self._asking: set[str] = set()  # what was asked for, and is not answered
        self._errors: dict[str, Exception] = {}  # what came instead of an answer, and was not raised yet
        self.unplaced: PlacementError | None = None

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
            raise _final(error) from error

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
            self._asking.add(what)
        call().future().add_done_callback(functools.partial(self._hear, what, use))

    def check(self) -> None:
        """Raises, once, what went wrong where nobody waited, unless asking again may help."""
        with self._lock:
            errors, self._errors = self._errors, {}
        for error in errors.values():
            raise error

    def _hear(self, what: str, use: Callable[[Any], None], answer: Future[Any]) -> None:
        error = answer.exception()
        cause = None if error is None else cause_of(error)
        with self._lock:
            self._asking.discard(what)
            self._errors.pop(what, None)
            self.unplaced = cause if isinstance(cause, PlacementError) else None
            if isinstance(error, ActorDiedError):
                self._errors[what] = _final(error)
            elif isinstance(error, RayTaskError) and self.unplaced is None:
                self._errors[what] = cause if isinstance(cause, LanceStreamError) else error
        if error is None:
            use(answer.result())


def _final(error: ActorDiedError) -> Exception:
    if error.actor_init_failed:
        return error
    ended = StreamClosedError(
        "the stream's actors have ended: the stream was closed, its driver ended, or nothing renewed their leases for "
        "idle_timeout_s; open the stream again"
    )
    ended.__cause__ = error
    return ended
