"""The picture of a run over time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from soak.faults import Event
from soak.sampling import MIB, Sample, Store, actors_over_time
from soak.steplog import Worker
from soak.timeline import steps_over_time, world_sizes

_COLOURS: Final = {
    "worker": "tab:red",
    "trainer": "tab:orange",
    "prefetcher": "tab:blue",
    "coordinator": "tab:purple",
    "manager": "tab:green",
    "loader": "tab:cyan",
    "controller": "0.3",
}


def draw(
    path: Path,
    groups: Sequence[Sequence[Worker]],
    events: Sequence[Event],
    samples: Sequence[Sample],
    stores: Sequence[Store],
    per_epoch: int,
    began_s: float,
) -> None:
    """Draws world size and events, steps, memory, open files, and actors and objects, one below the other.

    Args:
        path: A PNG file.
        groups: The worker groups.
        events: What was done to the run.
        samples: The processes.
        stores: The object store.
        per_epoch: Steps of an epoch.
        began_s: Time 0 of the picture, seconds since 1970.
    """
    figure = Figure(figsize=(14, 15), layout="constrained")
    FigureCanvasAgg(figure)
    axes: Any = figure.subplots(5, 1, sharex=True, height_ratios=[3, 2, 2, 2, 2])
    world, steps, memory, files, actors = axes

    points = world_sizes(groups)
    world.step([t - began_s for t, _ in points], [n for _, n in points], where="post", color="black", linewidth=1.5)
    world.set_ylabel("training workers")
    world.set_yticks(range(4))
    world.set_ylim(-0.1, 7.5)  # the upper half is for what happened
    for row, event in enumerate(events):
        colour = _COLOURS[event.kind.split()[0]]
        for axis in axes:
            axis.axvline(event.time_s - began_s, color=colour, linewidth=0.8, alpha=0.5, zorder=0)
        style = {"color": colour, "fontsize": 7, "ha": "left", "va": "center", "clip_on": True}
        world.text(event.time_s - began_s, 3.5 + 0.4 * (row % 10), f" {event.kind}", **style)

    done = steps_over_time(groups, per_epoch)
    steps.plot([t - began_s for t, _ in done], [n for _, n in done], color="black", linewidth=1.2)
    steps.set_ylabel("steps of the run")

    lives: dict[tuple[str, int], list[Sample]] = {}
    for sample in samples:
        if sample.role != "worker":
            lives.setdefault((sample.role, sample.pid), []).append(sample)
    labelled: set[str] = set()
    for (role, _), life in lives.items():
        times = [sample.time_s - began_s for sample in life]
        style = {"color": _COLOURS[role], "linewidth": 1.2, "marker": "." if len(life) == 1 else ""}
        label = None if role in labelled else role
        memory.plot(times, [sample.private_bytes / MIB for sample in life], label=label, **style)
        files.plot(times, [sample.files for sample in life], **style)
        labelled.add(role)
    memory.set_ylabel("memory, MiB (private)")
    memory.set_ylim(bottom=0)
    if labelled:
        memory.legend(loc="lower right", ncols=len(labelled))
    files.set_ylabel("open files")
    files.set_ylim(bottom=0)

    counts = actors_over_time(samples)
    actors.step(
        [t - began_s for t, _ in counts], [n for _, n in counts], where="post", color="black", label="our actors"
    )
    times = [store.time_s - began_s for store in stores]
    actors.plot(times, [s.objects for s in stores], color="tab:blue", linewidth=1, label="objects in the stores")
    actors.plot(times, [s.used_bytes / MIB for s in stores], color="tab:red", linewidth=1, label="MiB in the stores")
    actors.set_ylim(bottom=0)
    actors.legend(loc="upper right", ncols=3)
    actors.set_xlabel("seconds since the first step")
    figure.savefig(path, dpi=100)
