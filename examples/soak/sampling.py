"""Looks at the processes of a run and at its object store, again and again, and judges whether something grows."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import psutil
import ray
from grpc import RpcError  # type: ignore[import-untyped]
from ray._private.internal_api import get_memory_info_reply

from soak.cluster import OURS, Nodes

MIB: Final = 1024 * 1024
_EVERY_S: Final = 2.0
_STORE_TIMEOUT_S: Final = 5.0
_WARM_UP_S: Final = 30.0  # a process imports, opens its tables and fills its buffers: that is no leak
_LEAST_SPAN_S: Final = 180.0  # a line through less says nothing: runs of less than eight minutes are not judged

# The steepest slopes that pass: what jitter makes of a line through a few minutes. A leak of one block a step, of
# a file or an object a fault, is steeper.
_MEMORY_PER_MINUTE: Final = 2.0
_FILES_PER_MINUTE: Final = 2.0
_ACTORS_PER_MINUTE: Final = 0.3
_OBJECTS_PER_MINUTE: Final = 2.0
_STORE_PER_MINUTE: Final = 1.0


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A process at one time.

    Attributes:
        time_s: Seconds since 1970.
        role: One of ``cluster.ROLES``.
        pid: Process id.
        rss_bytes: Memory, that which is shared with others included: libraries, pages of the object store.
        private_bytes: The same without what is shared. This is what leaks.
        files: Open files and sockets.
    """

    time_s: float
    role: str
    pid: int
    rss_bytes: int
    private_bytes: int
    files: int


@dataclass(frozen=True, kw_only=True)
class Store:
    """The object stores of all nodes together at one time."""

    time_s: float
    used_bytes: int
    objects: int


class Sampler:
    """Takes samples on a thread, from :meth:`start` to :meth:`stop`."""

    def __init__(self, nodes: Nodes) -> None:
        self.samples: list[Sample] = []
        self.stores: list[Store] = []
        self._nodes = nodes
        self._ended = threading.Event()
        here = ray.get_runtime_context().get_node_id()
        known: Any = ray.nodes()  # type: ignore[no-untyped-call]
        (self._head,) = [node for node in known if node["NodeID"] == here]
        self._threads = [
            threading.Thread(target=self._repeat, args=(look,), name="sampler", daemon=True)
            for look in (self._look_at_processes, self._look_at_store)
        ]

    def start(self) -> None:
        """Begins."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Ends; waits for what is under way."""
        self._ended.set()
        for thread in self._threads:
            thread.join()

    def _repeat(self, look: Callable[[], None]) -> None:
        while not self._ended.wait(_EVERY_S):
            look()

    def _look_at_processes(self) -> None:
        now = time.time()
        for found in self._nodes.processes():
            try:
                with found.process.oneshot():
                    memory, files = found.process.memory_info(), found.process.num_fds()
            except psutil.Error:
                continue  # it has ended
            self.samples.append(
                Sample(
                    time_s=now,
                    role=found.role,
                    pid=found.process.pid,
                    rss_bytes=memory.rss,
                    private_bytes=memory.rss - memory.shared,
                    files=files,
                )
            )

    def _look_at_store(self) -> None:
        try:
            # Not public; behind the command "ray memory --stats-only", which takes seconds to start.
            stats = get_memory_info_reply(  # type: ignore[no-untyped-call]
                None,
                self._head["NodeManagerAddress"],
                self._head["NodeManagerPort"],
                timeout_seconds=_STORE_TIMEOUT_S,
            ).store_stats
        except RpcError:
            return  # it asks all nodes, and one of them has just been lost
        self.stores.append(
            Store(time_s=time.time(), used_bytes=stats.object_store_bytes_used, objects=stats.num_local_objects)
        )


@dataclass(frozen=True, kw_only=True)
class Growth:
    """How something went while what feeds the training was left alone.

    Attributes:
        what: What was measured.
        mean: Its mean.
        per_minute: Slope of the line through it.
        span_s: From the first to the last time it was seen.
        bound: The steepest slope that passes.
    """

    what: str
    mean: float
    per_minute: float
    span_s: float
    bound: float

    @property
    def is_judged(self) -> bool:
        """Whether enough was seen."""
        return self.span_s >= _LEAST_SPAN_S

    @property
    def is_bad(self) -> bool:
        """Whether it grew."""
        return self.is_judged and self.per_minute > self.bound


Series = tuple[Sequence[float], Sequence[float]]  # times in seconds, values


def growth(what: str, series: Sequence[Series], bound: float) -> Growth:
    """Fits one slope to several series, each with a level of its own.

    Processes are killed and started again: the level at which a new one begins is no growth, and what all of them
    have in common is the slope.
    """
    pairs = [(np.array(times), np.array(values)) for times, values in series if len(times) > 1]
    upper = sum(float(((t - t.mean()) * (v - v.mean())).sum()) for t, v in pairs)
    lower = sum(float(((t - t.mean()) ** 2).sum()) for t, _ in pairs)
    values = np.concatenate([v for _, v in pairs]) if pairs else np.zeros(1)
    return Growth(
        what=what,
        mean=float(values.mean()),
        per_minute=60 * upper / lower if lower else 0.0,
        span_s=max(float(t[-1]) for t, _ in pairs) - min(float(t[0]) for t, _ in pairs) if pairs else 0.0,
        bound=bound,
    )


def judge(samples: Sequence[Sample], stores: Sequence[Store], from_s: float) -> list[Growth]:
    """Fits a slope to everything that must not grow, from a time on, in seconds since 1970."""
    if not samples:
        return []
    born: dict[int, float] = {}
    for sample in samples:
        born.setdefault(sample.pid, sample.time_s)
    late = [s for s in samples if s.time_s >= max(from_s, born[s.pid] + _WARM_UP_S)]
    found = []
    for role in ("controller", *OURS):
        lives: dict[int, list[Sample]] = {}
        for sample in late:
            if sample.role == role:
                lives.setdefault(sample.pid, []).append(sample)
        times = [[sample.time_s for sample in life] for life in lives.values()]
        memory = [[sample.private_bytes / MIB for sample in life] for life in lives.values()]
        files = [[float(sample.files) for sample in life] for life in lives.values()]
        found.append(growth(f"memory of the {role}, MiB", list(zip(times, memory, strict=True)), _MEMORY_PER_MINUTE))
        found.append(growth(f"open files of the {role}", list(zip(times, files, strict=True)), _FILES_PER_MINUTE))
    actors = [(time_s, float(n)) for time_s, n in actors_over_time(samples) if time_s >= from_s]
    objects = [(store.time_s, float(store.objects)) for store in stores if store.time_s >= from_s]
    used = [(store.time_s, store.used_bytes / MIB) for store in stores if store.time_s >= from_s]
    found.append(growth("actors of ours", [_split(actors)], _ACTORS_PER_MINUTE))
    found.append(growth("objects in the stores", [_split(objects)], _OBJECTS_PER_MINUTE))
    found.append(growth("bytes in the stores, MiB", [_split(used)], _STORE_PER_MINUTE))
    return found


def actors_over_time(samples: Sequence[Sample]) -> list[tuple[float, int]]:
    """Returns how many processes of our actors there were at each time."""
    counts: dict[float, int] = {}
    for sample in samples:
        counts[sample.time_s] = counts.get(sample.time_s, 0) + (sample.role in OURS)
    return sorted(counts.items())


def _split(points: Sequence[tuple[float, float]]) -> Series:
    return [time_s for time_s, _ in points], [value for _, value in points]
