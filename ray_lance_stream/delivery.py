"""Makes the next items on a thread while the consumer works on the last one."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class _Item(Generic[T]):
    value: T


@dataclass(frozen=True)
class _End:
    error: BaseException | None


def prefetch(items: Iterator[T], depth: int, interrupt: Callable[[], None]) -> Generator[T, None, None]:
    """Yields the items of an iterator, keeping up to ``depth`` of them ready.

    Args:
        items: Advanced on a thread of its own if ``depth`` > 0, else on the caller's.
        depth: Items made ahead of the one the consumer has.
        interrupt: Makes ``items`` stop waiting; called when the consumer leaves early.

    The thread has ended when the generator has: on exhaustion, ``close()``, or an error of ``items``,
    which is raised here.
    """
    if depth <= 0:
        yield from items
        return
    ready: queue.Queue[_Item[T] | _End] = queue.Queue()
    room = threading.Semaphore(depth)
    left = threading.Event()

    def work() -> None:
        error: BaseException | None = None
        try:
            while room.acquire() and not left.is_set():
                try:
                    ready.put(_Item(next(items)))
                except StopIteration:
                    break
        except BaseException as caught:  # handed to the consumer, whatever it is
            error = caught
        ready.put(_End(error))

    thread = threading.Thread(target=work, name="lance-stream-prefetch", daemon=True)
    thread.start()
    try:
        while True:
            item = ready.get()
            if isinstance(item, _End):
                if item.error is not None:
                    raise item.error
                return
            room.release()
            yield item.value
    finally:
        left.set()
        interrupt()
        room.release()
        if thread is not threading.current_thread():  # the last reference may have been dropped there
            thread.join()
