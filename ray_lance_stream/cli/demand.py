"""How many prefetchers a trainer needs, found from what reading, transforming and a step take."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Final

from ray_lance_stream.cli import text
from ray_lance_stream.cli.flight import in_flight
from ray_lance_stream.config import MIB, PrefetchConfig
from ray_lance_stream.demand import Need, Speeds
from ray_lance_stream.request import PlanHandle
from ray_lance_stream.topology import Replica, StepPlan, StepShare

_AMPLE: Final = 4  # blocks of a budget that does not make them smaller


def need_of(
    speeds: Speeds, handle: PlanHandle, steps: StepPlan, world_size: int, block_bytes: int | None
) -> tuple[int, Need]:
    """Returns a block size and what is needed with it, for blocks as readers really ask for them.

    Args:
        speeds: What takes how long.
        handle: The plan.
        steps: Its steps.
        world_size: Number of replicas.
        block_bytes: The size to take; None for the smallest good one.
    """
    largest = StepShare(
        replica=Replica(dp_rank=world_size - 1, dp_size=world_size),
        num_splits=steps.num_splits,
        num_cycles=steps.cycles_per_step,
    )
    share_bytes = largest.rows * handle.bytes_per_row

    def rows_of(size: int) -> int:
        budget = world_size * int(_AMPLE * size + _AMPLE * share_bytes + 1)
        prefetch = PrefetchConfig(block_bytes=size, max_buffer_bytes=budget)
        return in_flight(handle, steps, world_size, prefetch, speeds.transform_s_per_row).block_rows

    size = speeds.good_block_bytes(handle.bytes_per_row, rows_of) if block_bytes is None else block_bytes
    need = Need.of(
        speeds,
        block_rows=rows_of(size),
        bytes_per_row=handle.bytes_per_row,
        step_rows=largest.step_rows,
        share_rows=largest.rows,
        world_size=world_size,
    )
    return size, need


def facts(block_bytes: int, need: Need, bytes_per_row: float) -> dict[str, Any]:
    """Returns a need as plain values, with the settings of PrefetchConfig that meet it."""
    settings = {
        "num_actors": need.prefetchers,
        "block_bytes": block_bytes,
        "max_buffer_bytes": -(-need.max_buffer_bytes // MIB) * MIB,
    }
    return dataclasses.asdict(need) | {"bytes_per_s": need.rows_per_s * bytes_per_row, "prefetch": settings}


def lines(found: dict[str, Any]) -> list[tuple[str, str]]:
    """Returns what people read of :func:`facts`."""
    settings = ", ".join(f"{name}={value}" for name, value in found["prefetch"].items())
    speed = found["prefetcher_rows_per_s"]
    made = f"makes {text.number(speed)} rows a second" if math.isfinite(speed) else "takes no time for a block"
    return [
        ("trainer", f"takes {text.number(found['rows_per_s'])} rows, {text.size(found['bytes_per_s'])} a second"),
        (
            "a prefetcher",
            f"{made}, in blocks of {text.plural(found['block_rows'], 'row')}, {found['block_s']:.3g} s each",
        ),
        ("needed", f"{text.plural(found['prefetchers'], 'prefetcher')}, each with a fifth of its time to spare"),
        ("object store", f"up to {text.size(found['store_bytes'])} on all nodes together"),
        ("settings", f"PrefetchConfig({settings})"),
    ]
