"""What Ray has no room for: the reason for which a run does not start, or does not go on after a loss."""

from __future__ import annotations

from collections import Counter
from typing import Any

import ray
from ray.util.placement_group import placement_group_table


def lacking() -> str | None:
    """Returns a few words on the workers that wait for room on the cluster, whoever's they are; None if none do."""
    if not ray.is_initialized():
        return None
    table: Any = placement_group_table  # untyped
    waiting = [
        bundle
        for group in table().values()
        if group["state"] in ("PENDING", "RESCHEDULING") and group["stats"]["scheduling_state"] == "NO_RESOURCES"
        for at, bundle in group["bundles"].items()
        if not group["bundles_to_node_id"][at]
    ]
    if not waiting:
        return None
    counts = Counter(" + ".join(f"{amount:g} {name}" for name, amount in sorted(each.items())) for each in waiting)
    wants = ", ".join(f"{count} x {what}" for what, count in counts.items())
    return f"Ray has no room for {wants}; `ray status` shows what there is"
