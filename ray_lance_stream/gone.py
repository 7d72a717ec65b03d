"""What is done after an object is gone: on a thread of its own, never where Python notices that it is.

Python collects garbage on whichever thread allocates next, inside whatever that thread does: with a lock held, or on
the thread on which Ray completes futures. A call of Ray's, a lock or a join there may wait for ever.
"""

from __future__ import annotations

import atexit
import logging
import os
import queue
import threading
import weakref
from collections.abc import Callable
from typing import Final

logger = logging.getLogger("ray_lance_stream")
THREAD: Final = "lance-stream-endings"
LONGEST_END_S: Final = 5.0  # a process that ends does not wait longer for a thread

# Its put() may interrupt itself, unlike those of locks and events: the documentation of queue.SimpleQueue.
_Jobs = queue.SimpleQueue[Callable[[], object]]
_starting = threading.Lock()
_working: _Jobs | None = None  # of this process, once its thread has begun


def when_gone(owner: object, job: Callable[[], object]) -> weakref.finalize[..., object]:
    """Has a job done soon after an object is gone, unless the process ends with it or forks first.

    Args:
        owner: Watched, and not kept.
        job: Must not hold ``owner``. May wait, but not long: all jobs share one thread.

    Returns:
        Its ``detach()`` withdraws the job.
    """
    finalizer = weakref.finalize(owner, _hand_over, _jobs(), job)
    finalizer.atexit = False
    return finalizer


def _jobs() -> _Jobs:
    """The queue of this process; starts its thread with the first job."""
    global _working
    with _starting:
        if _working is None:
            jobs = _Jobs()
            thread = threading.Thread(target=_work, args=(jobs,), name=THREAD, daemon=True)
            thread.start()
            atexit.register(_end, jobs, thread)
            _working = jobs
        return _working


def _hand_over(jobs: _Jobs, job: Callable[[], object]) -> None:
    if jobs is _working:  # a fork has copies of the objects, and not what they stand for
        jobs.put(job)


def _work(jobs: _Jobs) -> None:
    while True:
        try:
            jobs.get()()
        except Exception:  # whatever it is, the other jobs do not hang on it
            logger.warning("could not clean up after an object that is gone", exc_info=True)


def _end(jobs: _Jobs, thread: threading.Thread) -> None:
    """Does what is left before the process ends, and what the jobs use with it."""
    if jobs is _working:
        jobs.put(_stop)
        thread.join(LONGEST_END_S)


def _stop() -> None:
    raise SystemExit  # ends the thread, and says nothing


def _begin_anew() -> None:
    global _starting, _working
    _working = None  # its thread is the parent's
    _starting = threading.Lock()  # another thread of the parent may have held it


os.register_at_fork(after_in_child=_begin_anew)
