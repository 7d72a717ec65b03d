"""Which rows make up a step: the plan asked offline, without Ray, a cluster or a running stream.

Example:
    >>> import lancedb, numpy as np, pyarrow as pa, tempfile
    >>> from ray_lance_stream import LanceStream
    >>> from ray_lance_stream.explaining import rows_of_step
    >>> uri = tempfile.mkdtemp()
    >>> table = lancedb.connect(uri).create_table("numbers", pa.table({"id": np.arange(30)}))
    >>> stream = LanceStream(uri, "numbers", num_splits=4, global_batch_size=12, shuffle=False)
    >>> found = rows_of_step(stream, 1, world_size=2, columns=["id"])
    >>> found.places.column("row").to_pylist()
    [0, 7, 14, 21, 1, 8, 15, 22, 2, 9, 16, 23]
    >>> found.places.column("rank").to_pylist()
    [0, 0, 1, 1, 0, 0, 1, 1, 0, 0, 1, 1]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from ray_lance_stream.errors import ConfigError, explain
from ray_lance_stream.plan import OrderSpec, Plan, PlanSpec, SplitLayout, require_int
from ray_lance_stream.position import Position
from ray_lance_stream.provenance import Provenance
from ray_lance_stream.readable import check_identity
from ray_lance_stream.request import Ranges
from ray_lance_stream.state import StreamState
from ray_lance_stream.stepskips import NO_SKIPS, Skips
from ray_lance_stream.topology import Replica, StepPlan, shares

if TYPE_CHECKING:
    from ray_lance_stream.location import TableRef
    from ray_lance_stream.readable import ReadableTable
    from ray_lance_stream.stream import LanceStream
    from ray_lance_stream.userplan import UserPlan


@dataclass(frozen=True, kw_only=True, eq=False)
class StepRows:
    """The rows of one global batch, or of one replica's part of it, in canonical order.

    Attributes:
        epoch: Counted from 0.
        step: Counted from 1: what ``shard.step`` says at its end, where ``shard.is_step_end`` is true.
        num_steps: Steps in the epoch.
        cycles: The step's cycles.
        num_rows: Rows of the step, or of the replica's part, before ``limit``.
        places: int64 columns, one row per row: ``index`` in the global batch, ``split``, ``position`` in the split,
            ``row`` number in the table version; and, if a world size was given, the ``rank`` of the replica that
            gets it and the ``rank_index`` in that replica's batch.
        columns: The table's columns that were asked for, before any transform; None if none were.
        skipped: Whether ``skip_steps`` leaves the step out, so that no replica is handed it.
    """

    epoch: int
    step: int
    num_steps: int
    cycles: range
    num_rows: int
    places: pa.Table
    columns: pa.Table | None
    skipped: bool = False


class OfflinePlan:
    """One table version in one order; answers for any epoch. Counts the rows of a filter when it is made.

    Args:
        table: The version, open.
        order: The order.
        ref: How to open the table, for LanceDB's order.
        plan: The user's rows, for the order "plan".
        skips: Steps that are left out.

    Raises:
        ConfigError: A filter that cannot be read, fewer rows than splits, or the user's plan is missing.
    """

    def __init__(
        self,
        table: ReadableTable,
        order: OrderSpec,
        ref: TableRef | None = None,
        plan: UserPlan | None = None,
        skips: Skips = NO_SKIPS,
    ) -> None:
        if order.order == "plan" and plan is None:
            raise ConfigError(
                explain(
                    "which rows a step holds stands in the plan that the user chose",
                    found="a state that names it by its digest",
                    expected="the plan itself",
                    remedy="call ray_lance_stream.explaining.rows_of_step() with the stream",
                )
            )
        self.table = table
        self.order = order
        self.skips = skips
        self._ref = ref
        self._user_plan = plan
        if plan is not None:
            self.num_rows = len(plan.row_ids)
        elif order.filter is not None:
            self.num_rows = table.count_rows(order.filter)
        else:
            self.num_rows = table.num_rows
        self.layout = SplitLayout(num_rows=self.num_rows, num_splits=order.num_splits)

    @classmethod
    def of_provenance(cls, ref: TableRef, provenance: Provenance, plan: UserPlan | None = None) -> OfflinePlan:
        """Returns the plan of what a state was consumed from.

        Args:
            ref: Where the table is now.
            provenance: What the state says.
            plan: The user's rows, for the order "plan".

        Raises:
            ConfigError: The state is one of packed documents: a block has no row of its own.
            TableVersionError: The version is gone.
            StateMismatchError: The version of that number holds other data.
        """
        table = ref.open(provenance.table.version)
        check_identity(table, provenance.table, ref)
        if provenance.packing is not None:
            raise ConfigError(
                explain(
                    "the blocks of packed documents are not rows of the table",
                    found=f"pack_sequences={provenance.packing.pack_sequences}",
                    expected="a stream, or a state, of rows",
                    remedy="read the stream itself to see its blocks",
                )
            )
        return cls(table, provenance.order, ref, plan, provenance.skips)

    def _plan(self, epoch: int) -> Plan:
        spec = PlanSpec(table=self.table.identity, order=self.order, epoch=epoch)
        if not self.order.is_listed:
            return Plan(spec, self.num_rows)
        from ray_lance_stream.rowlists import listed_rows

        assert self._ref is not None, "LanceDB's order needs LanceDB's table"
        rows, _ = listed_rows(spec, self.table, self._ref, self._user_plan)
        return Plan(spec, len(rows), rows)

    def steps(self, global_batch_size: int, *, drop_last: bool = False) -> StepPlan:
        """Returns the steps of an epoch."""
        return StepPlan.of(self.layout, global_batch_size=global_batch_size, drop_last=drop_last)

    def rows_of_step(
        self,
        steps: StepPlan,
        step: int,
        *,
        epoch: int = 0,
        world_size: int | None = None,
        rank: int | None = None,
        columns: Sequence[str] = (),
        limit: int | None = None,
    ) -> StepRows:
        """Returns the rows of a step; see :func:`rows_of_step`.

        Args:
            steps: The steps, see :meth:`steps`.
            step: As below, like everything else.
            epoch: Counted from 0.
            world_size: Number of replicas.
            rank: One of them.
            columns: Columns to read.
            limit: Most rows to return.
        """
        require_int("step", step, minimum=1, maximum=steps.num_steps, remedy=_step_remedy(step, steps.num_steps))
        if limit is not None:
            require_int("limit", limit, minimum=1, remedy="leave it out for all rows")
        cycles = steps.cycles(step - 1)
        ranges = Ranges(first_split=0, num_splits=steps.num_splits, start=cycles.start, stop=cycles.stop)
        splits, positions = ranges.places()
        dp_size = 1 if world_size is None else world_size
        Replica(dp_size=dp_size).owned_splits(steps.num_splits)  # checks the number
        owner, owner_index = shares(splits, positions - cycles.start, steps.num_splits, dp_size)
        wanted = np.arange(len(splits)) if rank is None else np.flatnonzero(owner == _known_rank(rank, world_size))
        shown = wanted[:limit]
        rows = self._plan(epoch).rows(splits[shown], positions[shown])
        places = {"index": shown, "split": splits[shown], "position": positions[shown], "row": rows}
        if world_size is not None:
            places |= {"rank": owner[shown], "rank_index": owner_index[shown]}
        return StepRows(
            epoch=epoch,
            step=step,
            num_steps=steps.num_steps,
            cycles=cycles,
            num_rows=len(wanted),
            places=pa.table(places),
            columns=self.table.take(rows, list(columns)) if columns else None,
            skipped=any(cycles.start in gap for gap in self.skips.in_epoch(epoch)),
        )


def rows_of_step(
    stream: LanceStream,
    step: int,
    *,
    epoch: int = 0,
    state: Mapping[str, Any] | None = None,
    world_size: int | None = None,
    rank: int | None = None,
    columns: Sequence[str] = (),
    limit: int | None = None,
) -> StepRows:
    """Returns which rows make up a global batch, without running the stream.

    Args:
        stream: The stream; its transform is not run.
        step: Counted from 1: what ``shard.step`` said at its end, where ``shard.is_step_end`` was true.
        epoch: Counted from 0.
        state: A state dict of the run, if the run may stand on another table version than the stream was built on.
        world_size: Number of replicas, to say which of them gets each row. The order does not depend on it.
        rank: Only the rows of this replica.
        columns: Columns of the table to read.
        limit: Read and return at most so many rows.

    Raises:
        ConfigError: A step, rank or column that does not exist.
        StateMismatchError: The state belongs to other data.
        TableVersionError: The table version is gone.
    """
    config = stream.config
    position = Position.start(config) if state is None else Position.resume(config, StreamState.from_dict(state))
    if position.positions is not None:
        raise rows_were_skipped()
    plan = OfflinePlan.of_provenance(stream.recipe.table, position.provenance, stream.recipe.plan)
    return plan.rows_of_step(
        plan.steps(config.global_batch_size, drop_last=config.drop_last),
        step,
        epoch=epoch,
        world_size=world_size,
        rank=rank,
        columns=columns,
        limit=limit,
    )


def rows_were_skipped() -> ConfigError:
    """Returns the error for a run that skipped rows: only the transform knows which."""
    return ConfigError(
        explain(
            "which rows a step holds depends on the transform, as rows were skipped",
            found="a state with positions ahead of the rows consumed",
            expected="a run that skipped none",
            remedy="read the stream itself from the state",
        )
    )


def _step_remedy(step: object, num_steps: int) -> str:
    remedy = "pass what shard.step said at the end of the step: the first one of an epoch is 1"
    if isinstance(step, int) and step > num_steps > 0:
        epoch, before = divmod(step - 1, num_steps)
        remedy += f"; counted from the beginning of the run, step {step} is step {before + 1} of epoch {epoch}"
    return remedy


def _known_rank(rank: int, world_size: int | None) -> int:
    if world_size is None:
        raise ConfigError(
            explain(
                "a rank alone says nothing",
                found=f"rank={rank} without world_size",
                expected="both",
                remedy="pass the number of replicas",
            )
        )
    return Replica(dp_rank=rank, dp_size=world_size).dp_rank
