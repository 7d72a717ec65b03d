"""The runs of streams on the cluster this process is connected to, as their coordinators and managers describe them."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.exceptions import RayActorError

from ray_lance_stream.cluster.session import coordinators_of, managers_of
from ray_lance_stream.stats import RankStats, RunProgress, StreamStats


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
    """Asks about every run of a stream, or of every stream if ``stream_id`` is empty."""
    coordinators, managers = coordinators_of(stream_id), managers_of(stream_id)
    stats = {session: actor.stats.options(max_task_retries=0).remote() for session, actor in coordinators.items()}
    where = {session: actor.where.options(max_task_retries=0).remote() for session, actor in managers.items()}
    asked = [*stats.values(), *where.values()]
    if asked:
        ray.wait(asked, num_returns=len(asked), timeout=timeout_s)
    found: dict[str, StreamStats] = _answered(stats)
    places: dict[str, RunProgress] = _answered(where)
    runs = [with_places(run, places[name]) if name in places else run for name, run in found.items()]
    runs.sort(key=lambda run: run.started_at, reverse=True)
    return Overview(runs=tuple(runs), silent=tuple(sorted(set(stats) - set(found))))


def _answered(asked: Mapping[str, ray.ObjectRef[Any]]) -> dict[str, Any]:
    found = {}
    ready = set(ray.wait(list(asked.values()), num_returns=len(asked), timeout=0)[0]) if asked else set()
    for name, ref in asked.items():
        if ref in ready:
            with contextlib.suppress(RayActorError):  # it ended in between, or is being restarted
                found[name] = ray.get(ref)
    return found


def with_places(run: StreamStats, progress: RunProgress) -> StreamStats:
    """Moves ranks to where the manager knows them, which is told of every step before it is handed out.

    Ranks that the coordinator has not heard of are added: of them no more is known.
    """
    ranks = {rank.rank: rank for rank in run.ranks}
    for number, (epoch, step) in progress.ranks.items():
        rank = ranks.get(number, RankStats(rank=number, dp_rank=number, silent_s=math.inf))
        if (epoch, step) > (rank.epoch, rank.step):
            rank = replace(rank, epoch=epoch, step=step)
        ranks[number] = rank
    world_size = run.world_size or progress.world_size
    return replace(
        run,
        stream=run.stream or progress.name,
        world_size=world_size,
        ranks=tuple(ranks[number] for number in sorted(ranks)),
    )
