"""What Ray has no room for: the reason for which a run does not start, or does not go on after a loss."""

from __future__ import annotations

from collections import Counter
from typing import Any, Final

import ray
from ray.exceptions import RayError
from ray.util.placement_group import placement_group_table

_RESCHEDULING: Final = "RESCHEDULING"  # on a node that was lost; Ray 2.60 does not say then that there is no room
_NO_ROOM: Final = ("NO_RESOURCES", "INFEASIBLE")  # the latter on no node there is; one may be started


def lacking() -> str | None:
    """Returns a few words on the workers that wait for room on the cluster, whoever's they are; None if none do."""
    if not ray.is_initialized():
        return None
    table: Any = placement_group_table  # untyped
    try:
        groups = table().values()
    except (RayError, RuntimeError):  # the cluster does not answer: whoever asks has other ways to find out
        return None
    waiting = [
        (group["state"], bundle)
        for group in groups
        if group["state"] == _RESCHEDULING
        or (group["state"] == "PENDING" and group["stats"]["scheduling_state"] in _NO_ROOM)
        for at, bundle in group["bundles"].items()
        if not group["bundles_to_node_id"][at]
    ]
    if not waiting:
        return None
    counts = Counter(" + ".join(f"{amount:g} {name}" for name, amount in sorted(each.items())) for _, each in waiting)
    wants = ", ".join(f"{count} x {what}" for what, count in counts.items())
    said = f"Ray has no room for {wants}; `ray status` shows what there is"
    if any(state == _RESCHEDULING for state, _ in waiting):
        said += (
            "; a node was lost: if workers were being started on it, Ray Train waits for another one even where fewer "
            "would do, so add a node, or stop the job and submit it again"
        )
    return said
