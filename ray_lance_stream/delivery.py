"""Makes the next items on a thread while the consumer works on the last one."""

from __future__ import annotations

import atexit
import contextlib
import queue
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from ray_lance_stream.errors import StreamClosedError
from ray_lance_stream.gone import LONGEST_END_S, when_gone

T = TypeVar("T")


@dataclass(frozen=True)
class _Item(Generic[T]):
    value: T


@dataclass(frozen=True)
class _End:
    error: BaseException | None


class _Presence:
    """Gone when the consumer has left."""


class Ahead(Generic[T]):
    """The items of an iterator, up to ``depth`` of them made before they are asked for. To be iterated once.

    Args:
        items: Advanced on a thread of its own if ``depth`` > 0, else on the caller's.
        depth: Items made ahead of the one the consumer has.
        interrupt: Makes ``items`` stop waiting; called when the consumer leaves early.

    An error of ``items`` is raised after the items before it. The thread ends with the last item; soon after an
    iteration is dropped; and before :meth:`end` returns.
    """

    def __init__(self, items: Iterator[T], depth: int, interrupt: Callable[[], None]) -> None:
        self._items: Iterator[T] | None = items
        self._depth = depth
        self._interrupt = interrupt
        self._ready: queue.Queue[_Item[T] | _End] = queue.Queue()
        self._room = threading.Semaphore(depth)
        self._left = False
        self._leaving = threading.Lock()
        self._thread: threading.Thread | None = None

    def __iter__(self) -> Iterator[T]:
        """Yields the items.

        Raises:
            StreamClosedError: :meth:`end` was called before the last item.
        """
        items, self._items = self._items, None
        assert items is not None
        if self._depth <= 0:
            yield from items
            return
        thread = threading.Thread(target=self._work, args=(items,), name="lance-stream-prefetch", daemon=True)
        del items  # the thread's
        with self._leaving:
            if self._left:
                raise StreamClosedError("this iteration has ended")
            thread.start()
            self._thread = thread
            _running.add(self)
        presence = _Presence()
        left = when_gone(presence, self._leave)
        while True:
            item = self._ready.get()
            if isinstance(item, _End):
                left.detach()
                if item.error is not None:
                    raise item.error
                return
            self._room.release()
            yield item.value

    def end(self, within_s: float | None = None) -> None:
        """Ends the thread, and waits until it has ended, or for so long. Safe to repeat."""
        self._leave()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():  # an item may end what it is part of
            thread.join(within_s)

    def _leave(self) -> None:
        with self._leaving:
            if not self._left:  # once: what it interrupts may serve another consumer by now
                self._left = True
                self._interrupt()
                self._room.release()

    def _work(self, items: Iterator[T]) -> None:
        error: BaseException | None = None
        try:
            while self._room.acquire() and not self._left:
                try:
                    self._ready.put(_Item(next(items)))
                except StopIteration:
                    break
        except BaseException as caught:  # handed to the consumer, whatever it is
            error = caught
        if self._left:
            with contextlib.suppress(queue.Empty):
                while True:  # nobody wants them, and they may be large
                    self._ready.get_nowait()
            error = error or StreamClosedError("this iteration has ended")
        self._ready.put(_End(error))


# What a thread is in, a read or a call of Ray's, must not go on while the process takes itself apart.
_running: weakref.WeakSet[Ahead[Any]] = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    for ahead in list(_running):
        ahead.end(LONGEST_END_S)
