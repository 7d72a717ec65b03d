"""Tells the state manager which states a worker will have, off the training loop's thread."""

from __future__ import annotations

import logging
import threading
import weakref
from collections import deque
from typing import Any, Final

import ray

from ray_lance_stream.cluster.told import STANDINGS_OF_INTEREST, Standing
from ray_lance_stream.gone import when_gone
from ray_lance_stream.topology import Seat

logger = logging.getLogger("ray_lance_stream")
# A call to an actor costs the caller and the actor about a millisecond of CPU. Steps that take longer than this are
# told one by one and at once; those of a faster loop in groups.
_EVERY_S: Final = 0.02


class Announcer:
    """Sends what it is told in order, on a thread of its own that ends with it. Any thread may call it.

    Args:
        manager: The state manager's handle.
        stop: Set when nothing more is to be sent.
    """

    def __init__(self, manager: Any, stop: threading.Event) -> None:
        self._manager = manager
        self._stop = stop
        self._pending: deque[tuple[Seat, Standing]] = deque(maxlen=STANDINGS_OF_INTEREST)
        self._sending = threading.Lock()  # one at a time sends, so that the order stays
        self._wake = threading.Event()
        self._begun = False

    def tell(self, seat: Seat, standing: Standing) -> None:
        """Has it sent, within 20 ms; does not wait."""
        self._pending.append((seat, standing))
        if not self._begun:
            self._begun = True
            when_gone(self, self._wake.set)  # its thread finds it gone
            arguments = (weakref.ref(self), self._wake, self._stop)
            threading.Thread(target=_keep_sending, args=arguments, name="lance-stream-announcer", daemon=True).start()
        self._wake.set()

    def flush(self) -> None:
        """Sends what was told before; for who is about to tell or ask the manager more."""
        with self._sending:
            told = []
            while self._pending:
                told.append(self._pending.popleft())
            if told and ray.is_initialized():  # after ray.shutdown() a call would start Ray anew
                # One that is lost is followed by others.
                self._manager.push.options(max_task_retries=0).remote(told)

    def wake(self) -> None:
        """Lets the thread see that ``stop`` is set."""
        self._wake.set()


def _keep_sending(announcer: weakref.ref[Announcer], wake: threading.Event, stop: threading.Event) -> None:
    failed = False
    while True:
        wake.wait()
        wake.clear()
        present = announcer()
        if present is None or stop.is_set():
            return
        try:
            present.flush()
            failed = False
        except Exception:  # whatever it is, the next one may be sent, and a report tells the last one again
            if not failed:
                logger.warning("could not tell the state manager where this worker stands", exc_info=True)
            failed = True
        del present
        stop.wait(_EVERY_S)
