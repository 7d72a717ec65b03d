"""The runs of streams on the cluster this process is connected to, as their coordinators describe them."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import ray
from ray.exceptions import RayActorError

from ray_lance_stream.cluster.session import coordinators_of
from ray_lance_stream.stats import StreamStats


@dataclass(frozen=True, kw_only=True)
class Overview:
    """What was found.

    Attributes:
        runs: One entry for each stream of each run, the one started last first.
        silent: Names of the sessions whose coordinator did not answer in time: it is being restarted, or busy.
    """

    runs: tuple[StreamStats, ...]
    silent: tuple[str, ...]


def overview(stream_id: str, timeout_s: float) -> Overview:
    """Asks the coordinators of every run of a stream, or of every stream if ``stream_id`` is empty."""
    asked = {
        coordinator.stats.options(max_task_retries=0).remote(): session_id
        for session_id, coordinator in coordinators_of(stream_id).items()
    }
    if not asked:
        return Overview(runs=(), silent=())
    found: list[StreamStats] = []
    silent = set(asked.values())
    answered, _ = ray.wait(list(asked), num_returns=len(asked), timeout=timeout_s)
    for ref in answered:
        with contextlib.suppress(RayActorError):  # it ended in between, or is being restarted
            found.append(ray.get(ref))
            silent.discard(asked[ref])
    runs = sorted(found, key=lambda run: run.started_at, reverse=True)
    return Overview(runs=tuple(runs), silent=tuple(sorted(silent)))
