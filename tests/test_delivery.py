"""delivery.py: what is made ahead, on which thread, and how it ends."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Generator, Iterator
from typing import Any

import pytest
from conftest import stream_threads

from ray_lance_stream.delivery import prefetch

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
    assert list(prefetch(maker, depth, nothing)) == list(range(50))
    assert (maker.threads == {THREAD}) is (depth > 0)
    assert THREAD not in stream_threads()


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_no_more_than_depth_items_are_made_ahead(depth: int) -> None:
    maker = Maker()
    items = prefetch(maker, depth, nothing)
    assert maker.made == []  # nothing starts before the first next()
    for taken in range(1, 5):
        next(items)
        wait_for(taken + depth, maker.made)
        assert len(maker.made) == taken + depth
    items.close()


@pytest.mark.parametrize("depth", [1, 8])
def test_an_error_comes_after_the_items_before_it(depth: int) -> None:
    def three() -> Iterator[int]:
        yield from range(3)
        raise KeyError("broken")

    got = []
    with pytest.raises(KeyError, match="broken"):
        for item in prefetch(three(), depth, nothing):
            got.append(item)
    assert got == [0, 1, 2]
    assert THREAD not in stream_threads()


def test_leaving_early_interrupts_what_waits_and_joins_the_thread() -> None:
    interrupted = threading.Event()

    def stuck() -> Iterator[int]:
        yield 0
        interrupted.wait(30)
        yield 1

    items = prefetch(stuck(), 1, interrupted.set)
    assert next(items) == 0
    began = time.monotonic()
    items.close()
    assert interrupted.is_set()
    assert time.monotonic() - began < 5
    assert THREAD not in stream_threads()


def test_a_dropped_generator_ends_its_thread() -> None:
    items = prefetch(Maker(), 2, nothing)
    next(items)
    assert THREAD in stream_threads()
    del items
    assert THREAD not in stream_threads()


def test_a_generator_may_be_dropped_on_its_own_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    failures: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", failures.append)
    held: list[Generator[int, None, None]] = []
    taken, dropped = threading.Event(), threading.Event()

    def dropping() -> Iterator[int]:
        yield 0
        taken.wait(10)
        held.clear()
        dropped.set()
        yield 1

    held.append(prefetch(dropping(), 1, nothing))
    assert next(held[0]) == 0
    taken.set()
    assert dropped.wait(10)
    assert not failures
