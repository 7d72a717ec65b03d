"""The numbers of a run: what every fault has cost, and how the run went over time. Logs in, numbers and text out."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from soak.faults import Event
from soak.proof import Proof
from soak.sampling import MIB, Growth, Sample, Store, actors_over_time
from soak.steplog import Worker

_LINES: Final = 12  # of the table over time
_MOMENT_S: Final = 3.0  # a group does not get further than a step without one of its workers


@dataclass(frozen=True, kw_only=True)
class Restart:
    """A worker group that followed another one.

    Attributes:
        cause: What ended the older group, as far as times tell. None: nothing happened that is meant to restart
            workers, and the group ended by itself.
        world: World sizes before and after.
        first_step_s: When the new group was handed its first step, seconds since 1970.
        cost_s: From the cause to that; of a preemption, from when the node was taken.
        pause_s: From the older group's last step to that.
        replayed: Steps it was handed that others had been handed as a whole.
    """

    cause: Event | None
    world: tuple[int, int]
    first_step_s: float
    cost_s: float
    pause_s: float
    replayed: int


def restarts(groups: Sequence[Sequence[Worker]], events: Sequence[Event], proof: Proof) -> list[Restart]:
    """Finds what made each worker group start, and what that cost. Groups that were handed nothing are passed over.

    Args:
        groups: The worker groups, oldest first.
        events: What was done to the run, in order.
        proof: Knows what was replayed.
    """
    found = []
    handed = [(group, n) for group, n in zip(groups, proof.replays, strict=True) if any(w.shares for w in group)]
    for (before, _), (after, replayed) in itertools.pairwise(handed):
        first_step_s = first_step(after)
        last_s = max(worker.shares[-1].time_s for worker in before if worker.shares)
        pause_s, cause = first_step_s - last_s, _cause(before, last_s, first_step_s, events)
        cost_s = pause_s if cause is None else max(0.0, first_step_s - cause.time_s)
        world = (before[0].world, after[0].world)
        found.append(
            Restart(
                cause=cause,
                world=world,
                first_step_s=first_step_s,
                cost_s=cost_s,
                pause_s=pause_s,
                replayed=replayed,
            )
        )
    return found


def _cause(before: Sequence[Worker], last_s: float, until_s: float, events: Sequence[Event]) -> Event | None:
    """The event that ended a group: one it prepared for, or one in the moment of its last step, or the first of all."""
    began = first_step(before)
    causes = [e for e in events if e.restarts and began <= (e.noticed_s or e.time_s) <= until_s]
    if any(why == "preempted" for worker in before for _, why in worker.saved):
        expected = [event for event in causes if event.noticed_s is not None]
    else:
        expected = [event for event in causes if event.is_fault and abs(event.time_s - last_s) < _MOMENT_S]
    return next(iter(expected or causes), None)


def first_step(group: Sequence[Worker]) -> float:
    """Returns when a group that was handed something was handed its first step as a whole, or as far as it was."""
    return max(worker.shares[0].time_s for worker in group if worker.shares)


def world_sizes(groups: Sequence[Sequence[Worker]]) -> list[tuple[float, int]]:
    """Returns the world size from each time on, 0 while a run restarts: a step function."""
    points = []
    for group in groups:
        if any(worker.shares for worker in group):
            points.append((first_step(group), group[0].world))
            points.append((max(worker.shares[-1].time_s for worker in group if worker.shares), 0))
    return points


def steps_over_time(groups: Sequence[Sequence[Worker]], per_epoch: int) -> list[tuple[float, int]]:
    """Returns how many steps of the run were done at each time; falls back where steps are run again."""
    return [
        (share.time_s, share.at[0] * per_epoch + share.at[1])
        for group in groups
        for share in max(group, key=lambda worker: len(worker.shares)).shares
    ]


def events_text(events: Sequence[Event], found: Sequence[Restart], began_s: float) -> str:
    """Returns a table of what happened, and of what it cost."""
    lines = [f"{'t, s':>7}  {'what happened':62} {'workers':>8} {'first step after, s':>20} {'steps again':>12}"]
    rows = [(event.time_s, f"{event.kind} ({event.detail})", "") for event in events]
    of_event = {id(restart.cause): restart for restart in found if restart.cause is not None}
    for place, event in enumerate(events):
        if restart := of_event.get(id(event)):
            rows[place] = (*rows[place][:2], _cost(restart))
    unexplained = (r for r in found if r.cause is None)
    rows += [(r.first_step_s, "workers started again, without a cause here", _cost(r)) for r in unexplained]
    lines += [f"{time_s - began_s:7.1f}  {what:62} {cost}".rstrip() for time_s, what, cost in sorted(rows)]
    return "\n".join(lines)


def _cost(restart: Restart) -> str:
    before, after = restart.world
    return f"{before:4} -> {after} {restart.cost_s:20.1f} {restart.replayed:12}"


def samples_text(
    groups: Sequence[Sequence[Worker]],
    samples: Sequence[Sample],
    stores: Sequence[Store],
    per_epoch: int,
    began_s: float,
) -> str:
    """Returns a table of the run over time: one line for every twelfth of it."""
    roles = ("controller", "coordinator", "manager", "prefetcher")
    header = f"{'t, s':>7} {'step':>6} {'world':>6}"
    lines = [f"{header}  {'memory of ' + ', '.join(roles):^47} {'files':>6} {'actors':>7} {'objects':>8} {'store':>9}"]
    times = sorted({sample.time_s for sample in samples})
    worlds, steps = world_sizes(groups), steps_over_time(groups, per_epoch)
    actors = dict(actors_over_time(samples))
    for time_s in times[:: max(1, len(times) // _LINES)]:
        now = [sample for sample in samples if sample.time_s == time_s]
        memory = [_mib(max((s.rss_bytes for s in now if s.role == role), default=None)) for role in roles]
        files = sum(sample.files for sample in now if sample.role in roles)
        world = next((size for at, size in reversed(worlds) if at <= time_s), 0)
        step = next((n for at, n in reversed(steps) if at <= time_s), 0)
        store = next((store for store in reversed(stores) if store.time_s <= time_s), None)
        line = f"{time_s - began_s:7.1f} {step:6} {world or '-':>6}  " + " ".join(f"{text:>11}" for text in memory)
        line += f" {files:6} {actors[time_s]:7}"
        lines.append(line + (f" {store.objects:8} {_mib(store.used_bytes):>9}" if store else ""))
    return "\n".join(lines)


def growth_text(found: Sequence[Growth]) -> str:
    """Returns a table of what must not grow."""
    lines = [f"{'while only trainers are harmed':32} {'mean':>8} {'a minute':>10} {'at most':>8} {'seen, s':>8}"]
    for g in found:
        verdict = "GROWS" if g.is_bad else "" if g.is_judged else "too short to judge"
        lines.append(
            f"{g.what:32} {g.mean:8.1f} {g.per_minute:+10.2f} {g.bound:8.1f} {g.span_s:8.0f}  {verdict}".rstrip()
        )
    return "\n".join(lines)


def summary_text(
    groups: Sequence[Sequence[Worker]], events: Sequence[Event], found: Sequence[Restart], proof: Proof
) -> str:
    """Returns the sums."""
    faults = sum(event.is_fault for event in events)
    restarted = sum(restart.cause is not None and restart.cause.is_fault for restart in found)
    saved = {at for group in groups for worker in group for at, why in worker.saved if why == "preempted"}
    costs = sorted(restart.cost_s for restart in found)
    median = f"; {costs[len(costs) // 2]:.1f} s from cause to first step (median)" if costs else ""
    order = "NOT as one uninterrupted reader gets them" if proof.problems else "each once per epoch, in order"
    return "\n".join(
        [
            f"faults               {faults}, of which {restarted} restarted the training workers",
            f"nodes added          {len(events) - faults}",
            f"restarts             {len(found)}, {sum(r.pause_s for r in found):.0f} s without a step{median}",
            f"world sizes          {' -> '.join(str(group[0].world) for group in groups)}",
            f"loops ended by       {_errors(groups)}",
            f"saved just in time   {len(saved)} checkpoints before a preempted node was taken",
            f"steps                {proof.steps}, {proof.epochs} whole epochs",
            f"run again, the same  {proof.replayed} steps; {proof.partial} more had reached a part of the workers",
            f"rows                 {proof.rows}, {order}",
        ]
    )


def _errors(groups: Sequence[Sequence[Worker]]) -> str:
    """Counts the exceptions that ended training loops: those of workers whose fellow is gone."""
    counts = Counter(worker.error[1] for group in groups for worker in group if worker.error)
    return ", ".join(f"{count} x {name}" for name, count in counts.most_common()) or "no exception"


def _mib(value: int | None) -> str:
    return "-" if value is None else f"{value / MIB:.0f} MiB"
