"""delivery.py: what is made ahead, on which thread, and how it ends."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from conftest import stream_threads
from runs import wait_until

from ray_lance_stream.delivery import Ahead
from ray_lance_stream.errors import StreamClosedError

pytestmark = pytest.mark.usefixtures("no_threads_left")
THREAD = "lance-stream-prefetch"


def nothing() -> None:
    pass


def wait_for(count: int, made: list[int]) -> None:
    """Waits until so many items are made, and a little longer for one too many."""
    deadline = time.monotonic() + 5
    while len(made) < count and time.monotonic() < deadline:
        time.sleep(0.005)
    time.sleep(0.05)


class Maker(Iterator[int]):
    """Counts up, and remembers what it made and on which threads."""

    def __init__(self, stop: int = 100) -> None:
        self.stop = stop
        self.made: list[int] = []
        self.threads: set[str] = set()

    def __next__(self) -> int:
        self.threads.add(threading.current_thread().name)
        if len(self.made) == self.stop:
            raise StopIteration
        self.made.append(len(self.made))
        return self.made[-1]


@pytest.mark.parametrize("depth", [0, 1, 8])
def test_all_items_come_once_and_in_order(depth: int) -> None:
    maker = Maker(50)
    assert list(Ahead(maker, depth, nothing)) == list(range(50))
    assert (maker.threads == {THREAD}) is (depth > 0)
    assert THREAD not in stream_threads()


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_no_more_than_depth_items_are_made_ahead(depth: int) -> None:
    maker = Maker()
    ahead = Ahead(maker, depth, nothing)
    items = iter(ahead)
    assert maker.made == []  # nothing starts before the first next()
    for taken in range(1, 5):
        next(items)
        wait_for(taken + depth, maker.made)
        assert len(maker.made) == taken + depth
    ahead.end()


@pytest.mark.parametrize("depth", [1, 8])
def test_an_error_comes_after_the_items_before_it(depth: int) -> None:
    def three() -> Iterator[int]:
        yield from range(3)
        raise KeyError("broken")

    got = []
    with pytest.raises(KeyError, match="broken"):
        for item in Ahead(three(), depth, nothing):
            got.append(item)
    assert got == [0, 1, 2]
    assert THREAD not in stream_threads()


def test_its_end_interrupts_what_waits_and_joins_the_thread() -> None:
    interrupted = threading.Event()

    def stuck() -> Iterator[int]:
        yield 0
        interrupted.wait(30)
        yield 1

    ahead = Ahead(stuck(), 1, interrupted.set)
    items = iter(ahead)
    assert next(items) == 0
    for _ in range(2):
        ahead.end()
        assert interrupted.is_set()
        assert THREAD not in stream_threads()
    with pytest.raises(StreamClosedError):  # and not the end of the items
        next(items)


def test_a_consumer_that_waits_on_another_thread_is_told_of_the_end() -> None:
    interrupted = threading.Event()

    def stuck() -> Iterator[int]:
        yield 0
        interrupted.wait(30)

    ahead = Ahead(stuck(), 1, interrupted.set)
    errors: list[BaseException] = []

    def consume() -> None:
        try:
            list(ahead)
        except BaseException as error:
            errors.append(error)

    consumer = threading.Thread(target=consume)
    consumer.start()
    wait_until(lambda: THREAD in stream_threads(), 10, "it makes items")
    ahead.end()
    consumer.join(10)
    assert [type(error) for error in errors] == [StreamClosedError]


def test_a_dropped_iteration_ends_its_thread_soon() -> None:
    maker = Maker()
    items = iter(Ahead(maker, 2, nothing))
    next(items)
    assert THREAD in stream_threads()
    del items
    wait_until(lambda: THREAD not in stream_threads(), 10, "the thread has ended")
    assert len(maker.made) <= 4


def test_dropping_waits_for_nothing_that_the_dropping_thread_holds() -> None:
    """Garbage is collected anywhere, also where a lock is held that the making of items needs."""
    lock = threading.Lock()
    reached = threading.Event()

    def locked() -> Iterator[int]:
        yield 0
        reached.set()
        with lock:
            yield 1

    with lock:
        items = iter(Ahead(locked(), 1, nothing))
        assert next(items) == 0
        assert reached.wait(10)
        del items
    wait_until(lambda: THREAD not in stream_threads(), 10, "the thread has ended")


def test_an_iteration_may_be_dropped_on_its_own_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    failures: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", failures.append)
    held: list[Iterator[int]] = []
    taken, dropped = threading.Event(), threading.Event()

    def dropping() -> Iterator[int]:
        yield 0
        taken.wait(10)
        held.clear()
        dropped.set()
        yield 1

    held.append(iter(Ahead(dropping(), 1, nothing)))
    assert next(held[0]) == 0
    taken.set()
    assert dropped.wait(10)
    wait_until(lambda: THREAD not in stream_threads(), 10, "the thread has ended")
    assert not failures


def test_a_process_that_ends_ends_what_is_made_ahead_first() -> None:
    script = (
        "import threading, time\n"
        "from ray_lance_stream.delivery import Ahead\n"
        "reached, stop = threading.Event(), threading.Event()\n"
        "def items():\n"
        "    yield 0\n"
        "    reached.set()\n"
        "    stop.wait()\n"
        "    time.sleep(0.3)\n"
        "    print('out of it', flush=True)\n"
        "    yield 1\n"
        "taken = iter(Ahead(items(), 1, stop.set))\n"
        "next(taken)\n"
        "reached.wait()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert (done.stdout, done.stderr) == ("out of it\n", "")
