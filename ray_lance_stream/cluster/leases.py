"""How actors of a stream notice that nobody needs them any more.

Ownership does not tell: Ray Train keeps its controller alive after ``fit()``. So whoever needs an actor
renews a lease, and the actor ends itself when all leases have lapsed.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator

import ray

logger = logging.getLogger("ray_lance_stream")


class Leases:
    """The leases on the actor this object lives in; made in the actor's constructor.

    The actor has ``idle_timeout_s`` from its start, or its restart, to be asked for something.
    """

    def __init__(self, idle_timeout_s: float) -> None:
        self._idle_timeout_s = idle_timeout_s
        self._lock = threading.Lock()
        self._renewed = {"start": time.monotonic()}
        self._calls = 0
        self._actor = ray.get_runtime_context().current_actor
        # A thread, not a task of the event loop: it must also run if no method is ever called.
        threading.Thread(target=self._reap, name="lance-stream-reaper", daemon=True).start()

    def renew(self, holder: str) -> None:
        """Takes or renews a lease."""
        with self._lock:
            self._renewed[holder] = time.monotonic()

    def release(self, holder: str) -> None:
        """Gives a lease back; the actor still waits ``idle_timeout_s`` for another one."""
        with self._lock:
            if self._renewed.pop(holder, None) is not None:
                self._renewed["start"] = time.monotonic()

    @contextlib.contextmanager
    def busy(self) -> Iterator[None]:
        """While a call is being answered, somebody needs the actor."""
        with self._lock:
            self._calls += 1
        try:
            yield
        finally:
            with self._lock:
                self._calls -= 1
                self._renewed["start"] = time.monotonic()

    def _lapsed(self) -> bool:
        oldest = time.monotonic() - self._idle_timeout_s
        with self._lock:
            self._renewed = {holder: at for holder, at in self._renewed.items() if at > oldest}
            return not self._renewed and not self._calls

    def _reap(self) -> None:
        while True:
            time.sleep(min(1.0, self._idle_timeout_s / 4))
            if self._lapsed():
                logger.info("no consumer for %.0f s: ending", self._idle_timeout_s)
                try:
                    ray.kill(self._actor, no_restart=True)
                except Exception:  # tried again in a moment: an actor that nobody needs must not stay
                    logger.warning("could not end the actor", exc_info=True)
