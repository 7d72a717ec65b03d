"""What a setup comes to, before anything is started: steps, shares, micro-batches, bytes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from ray_lance_stream.cli import demand
from ray_lance_stream.cli.flight import in_flight
from ray_lance_stream.config import PrefetchConfig
from ray_lance_stream.demand import Speeds
from ray_lance_stream.errors import ConfigError
from ray_lance_stream.plan import OrderSpec, PlanSpec, SplitLayout
from ray_lance_stream.topology import Replica, StepPlan, StepShare

if TYPE_CHECKING:
    from ray_lance_stream.location import TableRef

_NEAR: Final = 2  # global batches listed on each side
_ALL_SIZES: Final = 8  # world sizes all listed up to here


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What a stream and its training loop are told; checked as they check it.

    Attributes:
        order: The order.
        global_batch_size: Rows of a step on all replicas.
        drop_last: Whether a short last step is left out.
        world_size: Number of replicas.
        micro_batch_size: Most rows of a micro-batch; None for whole shares.
        prefetch: The budget.
        speeds: What takes how long, to find out how many prefetchers are needed; None if it is not known.
        block_bytes: The block size to find that out for; None for the smallest good one.

    Raises:
        ConfigError: A value, or a combination of values, that cannot work.
    """

    order: OrderSpec
    global_batch_size: int
    drop_last: bool
    world_size: int
    micro_batch_size: int | None
    prefetch: PrefetchConfig
    speeds: Speeds | None = None
    block_bytes: int | None = None

    def __post_init__(self) -> None:
        # Before any table is opened: what is wrong whatever its length.
        StepPlan(num_splits=self.order.num_splits, rows_per_split=1, global_batch_size=self.global_batch_size)
        Replica(dp_size=self.world_size).owned_splits(self.order.num_splits)

    def facts(self, ref: TableRef, version: int | None, columns: Sequence[str]) -> dict[str, Any]:
        """Returns what the setup comes to for a table, as plain values. Reads a few rows.

        Args:
            ref: The table.
            version: Its version; None for the latest.
            columns: Columns to read; none for all.

        Raises:
            ConfigError: The setup cannot work for this table.
        """
        from ray_lance_stream.block import BlockBuilder, BlockRecipe

        table = ref.open(version)
        builder = BlockBuilder(BlockRecipe(table=ref.located(table), columns=tuple(columns) or None))
        handle, _ = builder.open_plan(PlanSpec(table=table.identity, order=self.order, epoch=0))
        layout = SplitLayout(num_rows=handle.num_rows, num_splits=self.order.num_splits)
        steps = StepPlan.of(layout, global_batch_size=self.global_batch_size, drop_last=self.drop_last)
        check_micro_batches(steps, self.world_size, self.micro_batch_size)
        shares = [
            share_of(steps, world_size, self.micro_batch_size, handle.bytes_per_row, self.prefetch)
            for world_size in other_world_sizes(self.world_size, layout.num_splits)
        ]
        need = None
        if self.speeds is not None:
            found = demand.need_of(self.speeds, handle, steps, self.world_size, self.block_bytes)
            need = demand.facts(*found, handle.bytes_per_row)
        return {
            "table": {"version": table.version, "fingerprint": table.identity.fingerprint, "rows": table.num_rows},
            "filter": self.order.filter,
            "rows": handle.num_rows,
            "dropped_rows": handle.num_rows - steps.end_cycle * steps.num_splits,
            "num_splits": steps.num_splits,
            "rows_per_split": steps.rows_per_split,
            "steps": steps_facts(steps),
            "near": [steps_facts(near) for near in near_steps(steps)],
            "world_size": self.world_size,
            "micro_batch_size": self.micro_batch_size,
            "world_sizes": [dataclasses.asdict(share) for share in shares],
            "bytes_per_row": handle.bytes_per_row,
            "bytes_per_step": handle.bytes_per_row * self.global_batch_size,
            "max_buffer_bytes": self.prefetch.max_buffer_bytes,
            "in_flight_per_worker": dataclasses.asdict(in_flight(handle, steps, self.world_size, self.prefetch)),
            "demand": need,
        }


@dataclass(frozen=True, kw_only=True)
class Share:
    """What a world size means for its replicas. Where S is no multiple of it, some own one split more.

    Attributes:
        world_size: Number of replicas.
        splits: Fewest and most splits of a replica.
        rows: Fewest and most rows of a full step.
        balance: Mean over most rows: the part of the largest replica's time in which the others work, too.
        micro_batches: Micro-batches of a full step; None if the micro-batch size cannot work here.
        micro_batch_rows: Rows of the largest micro-batch.
        problem: Why it cannot work.
        share_bytes: The largest share of a step.
        budget_bytes: What each worker may buffer.
    """

    world_size: int
    splits: tuple[int, int]
    rows: tuple[int, int]
    balance: float
    micro_batches: int | None
    micro_batch_rows: int | None
    problem: str | None
    share_bytes: float
    budget_bytes: int


def share_of(
    steps: StepPlan, world_size: int, micro_batch_size: int | None, bytes_per_row: float, prefetch: PrefetchConfig
) -> Share:
    """Returns what a world size means.

    Raises:
        ConfigError: More replicas than splits.
    """
    # The last replica owns the most splits, the first one the fewest.
    largest = StepShare(
        replica=Replica(dp_rank=world_size - 1, dp_size=world_size),
        num_splits=steps.num_splits,
        num_cycles=steps.cycles_per_step,
    )
    fewest = len(Replica(dp_size=world_size).owned_splits(steps.num_splits))
    micro_batches = micro_batch_rows = problem = None
    try:
        check_micro_batches(steps, world_size, micro_batch_size)
    except ConfigError as error:
        problem = str(error)
    else:
        cut = StepShare(
            replica=largest.replica,
            num_splits=steps.num_splits,
            num_cycles=steps.cycles_per_step,
            micro_batch_size=micro_batch_size,
        )
        micro_batches = cut.num_micro_batches
        micro_batch_rows = max(len(cut.micro_batch(index)) for index in range(micro_batches))
    return Share(
        world_size=world_size,
        splits=(fewest, largest.rows // steps.cycles_per_step),
        rows=(largest.smallest_share, largest.largest_share),
        balance=largest.step_rows / world_size / largest.largest_share,
        micro_batches=micro_batches,
        micro_batch_rows=micro_batch_rows,
        problem=problem,
        share_bytes=largest.largest_share * bytes_per_row,
        budget_bytes=prefetch.max_buffer_bytes // world_size,
    )


def check_micro_batches(steps: StepPlan, world_size: int, micro_batch_size: int | None) -> None:
    """Raises ConfigError as a shard does: if a micro-batch, be it of a short last step, had no row for a replica."""
    for step in (0, steps.num_steps - 1):
        StepShare(
            replica=Replica(dp_size=world_size),
            num_splits=steps.num_splits,
            num_cycles=len(steps.cycles(step)),
            micro_batch_size=micro_batch_size,
        )


def other_world_sizes(world_size: int, num_splits: int) -> list[int]:
    """Returns the world sizes worth a look beside one: small ones, neighbours, half and double."""
    if num_splits <= _ALL_SIZES:
        return list(range(1, num_splits + 1))
    wanted = {1, 2, 3, 4, 6, 8, world_size // 2, world_size - 1, world_size, world_size + 1, 2 * world_size}
    return sorted(size for size in wanted if 1 <= size <= num_splits)


def steps_facts(steps: StepPlan) -> dict[str, int | bool]:
    """Returns what the steps of an epoch come to."""
    return {
        "global_batch_size": steps.global_batch_size,
        "cycles_per_step": steps.cycles_per_step,
        "num_steps": steps.num_steps,
        "rows": steps.end_cycle * steps.num_splits,
        "last_step_rows": len(steps.cycles(steps.num_steps - 1)) * steps.num_splits,
        "drops_last": steps.drop_last,
    }


def near_steps(steps: StepPlan) -> list[StepPlan]:
    """Returns the steps of the nearest global batches that work, and of the nearest without a short last step."""
    q, cycles = steps.cycles_per_step, steps.rows_per_split
    whole = [n for n in range(1, min(2 * q, cycles) + 1) if cycles % n == 0]
    below, above = [n for n in whole if n < q][-1:], [n for n in whole if n > q][:1]
    wanted = {*range(max(1, q - _NEAR), q + _NEAR + 1), *below, *above}
    found = []
    for near in sorted(wanted):
        if steps.drop_last and near > cycles:
            continue  # no step would be left
        found.append(
            StepPlan(
                num_splits=steps.num_splits,
                rows_per_split=cycles,
                global_batch_size=near * steps.num_splits,
                drop_last=steps.drop_last,
            )
        )
    return found
