"""gone.py: what is done when an object is gone, wherever Python notices that it is."""

from __future__ import annotations

import functools
import gc
import os
import subprocess
import sys
import threading
from typing import Any

import pytest
from runs import wait_until

from ray_lance_stream import gone
from ray_lance_stream.gone import when_gone


class Owner:
    """Something that ends."""

    other: Any = None


def test_the_job_is_done_once_on_a_thread_of_its_own() -> None:
    did: list[str] = []
    owner = Owner()
    when_gone(owner, lambda: did.append(threading.current_thread().name))
    assert not did
    del owner
    wait_until(lambda: bool(did), 10, "the job is done")
    assert did == [gone.THREAD]


def test_a_withdrawn_job_is_not_done() -> None:
    did: list[int] = []
    owners = [Owner() for _ in range(2)]
    jobs = [when_gone(owner, lambda i=i: did.append(i)) for i, owner in enumerate(owners)]  # type: ignore[misc]
    jobs[0].detach()
    owners.clear()
    wait_until(lambda: bool(did), 10, "the other job is done")
    assert did == [1]


def test_a_job_that_fails_is_told_and_keeps_none_from_being_done(caplog: pytest.LogCaptureFixture) -> None:
    did: list[int] = []
    first, second = Owner(), Owner()
    when_gone(first, lambda: 1 // 0)
    when_gone(second, lambda: did.append(1))
    with caplog.at_level("WARNING", logger="ray_lance_stream"):
        del first, second
        wait_until(lambda: bool(did), 10, "the second job is done")
    assert "ZeroDivisionError" in caplog.text


def test_who_lets_go_of_it_may_hold_what_the_job_needs() -> None:
    lock = threading.Lock()
    did: list[int] = []

    def job() -> None:
        with lock:
            did.append(1)

    owner = Owner()
    owner.other = owner  # found by the collector only
    when_gone(owner, job)
    with lock:
        del owner
        gc.collect()
        assert not did
    wait_until(lambda: bool(did), 10, "the job is done")


def _tell(write: int, done: threading.Event) -> None:
    os.write(write, b"child")
    done.set()


def test_a_fork_does_only_jobs_of_its_own() -> None:
    read, write = os.pipe()
    owner = Owner()
    when_gone(owner, lambda: os.write(write, b"parent"))
    child = os.fork()
    if child == 0:  # pragma: no cover
        try:
            own, done = Owner(), threading.Event()
            when_gone(own, functools.partial(_tell, write, done))
            del owner, own
            done.wait(10)
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert os.read(read, 100) == b"child"
    del owner
    assert os.read(read, 100) == b"parent"
    os.close(read)
    os.close(write)


def test_a_process_that_ends_does_its_jobs_first() -> None:
    script = (
        "import time\n"
        "from ray_lance_stream.gone import when_gone\n"
        "class Owner: pass\n"
        "owner = Owner()\n"
        "when_gone(owner, lambda: (time.sleep(0.5), print('done', flush=True)))\n"
        "del owner\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert (done.stdout, done.stderr) == ("done\n", "")
