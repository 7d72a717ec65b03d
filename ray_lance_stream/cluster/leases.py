"""How actors of a stream notice that nobody needs them any more.

Ownership does not tell: Ray Train keeps its controller alive after ``fit()``. So whoever needs an actor
renews a lease, and the actor ends itself when all leases have lapsed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterator

import ray

logger = logging.getLogger("ray_lance_stream")


class Leases:
    """The leases on the actor this object lives in; for async actors, used from their event loop."""

    def __init__(self, idle_timeout_s: float) -> None:
        self._idle_timeout_s = idle_timeout_s
        self._renewed = {"start": time.monotonic()}
        self._calls = 0
        self._reaper: asyncio.Task[None] | None = None

    def renew(self, holder: str) -> None:
        """Takes or renews a lease. Must run on the actor's event loop."""
        self._renewed[holder] = time.monotonic()
        if self._reaper is None:
            self._reaper = asyncio.get_running_loop().create_task(self._reap())

    def release(self, holder: str) -> None:
        """Gives a lease back; the actor still waits ``idle_timeout_s`` for another one."""
        if self._renewed.pop(holder, None) is not None:
            self._renewed["start"] = time.monotonic()

    @contextlib.contextmanager
    def busy(self) -> Iterator[None]:
        """While a call is being answered, somebody needs the actor."""
        self._calls += 1
        try:
            yield
        finally:
            self._calls -= 1
            self._renewed["start"] = time.monotonic()

    async def _reap(self) -> None:
        while True:
            await asyncio.sleep(min(1.0, self._idle_timeout_s / 4))
            oldest = time.monotonic() - self._idle_timeout_s
            self._renewed = {holder: at for holder, at in self._renewed.items() if at > oldest}
            if not self._renewed and not self._calls:
                logger.info("no consumer for %.0f s: ending", self._idle_timeout_s)
                ray.kill(ray.get_runtime_context().current_actor, no_restart=True)
                return
