"""Where a shard stands in its stream, and how a state moves it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ray_lance_stream.config import StreamConfig
from ray_lance_stream.counts import SplitCounts
from ray_lance_stream.errors import StateError, StateMismatchError, explain
from ray_lance_stream.plan import PlanSpec
from ray_lance_stream.provenance import Provenance, reconcile
from ray_lance_stream.state import StreamState


@dataclass(kw_only=True)
class Position:
    """Moves as the trainer is handed batches, and only then.

    Attributes:
        provenance: The table version and order the rows come from.
        epoch: The epoch under way.
        cycle: Cycles of the epoch in finished steps.
        micro_done: Micro-batches handed out of the step under way, 0 between steps.
        micro_batch_size: How the step under way is cut.
        positions: Position of every split, where rows were skipped; None if each is ``cycle``.
        ended: Whether the epoch is known to end at ``cycle``, because rows were skipped.
        has_moved: Whether this process handed out batches since the position was loaded. At the end of an
            epoch it decides what iterating gives: the empty remainder after a resume, so that the code at
            the end of the epoch runs once; else the next epoch.
    """

    provenance: Provenance
    epoch: int = 0
    cycle: int = 0
    micro_done: int = 0
    micro_batch_size: int | None = None
    positions: tuple[int, ...] | None = None
    ended: bool = False
    has_moved: bool = False

    @classmethod
    def start(cls, config: StreamConfig) -> Position:
        """The beginning of a stream."""
        return cls(provenance=Provenance(table=config.identity, order=config.order))

    @classmethod
    def resume(cls, config: StreamConfig, state: StreamState) -> Position:
        """The row after a state.

        Raises:
            StateMismatchError: The state belongs to other data than the stream.
            StateError: It was not taken at the end of a cycle.
        """
        order = reconcile(
            state.provenance, config.order, seed_given=config.seed_given, allow_changes=config.allow_changes
        )
        saved_table = state.provenance.table
        table = config.identity if "table" in config.allow_changes else saved_table
        if config.pinned_version not in (None, table.version):
            raise StateMismatchError(
                explain(
                    "table version differs: the stream is pinned to another one",
                    found=f"version={config.pinned_version}",
                    expected=f"{saved_table.version}, from which the state was taken",
                    remedy="leave version unset to continue on the state's version, "
                    "or pass allow_changes=('table',) to go on with other data",
                ),
                "table",
                saved_table,
                config.identity,
            )
        if not state.samples.uniform:
            raise StateError(
                explain(
                    "the state was not taken at the end of a cycle",
                    found="splits with different numbers of consumed rows",
                    expected="the same number for every split",
                    remedy="take the state at a step boundary",
                )
            )
        skipped = state.positions != state.samples
        if skipped and not config.sifts:
            raise StateError(
                explain(
                    "the state is that of a stream which skips rows that fail",
                    found="positions ahead of the rows consumed, on a stream with on_transform_error='raise'",
                    expected="a stream that skips rows as well",
                    remedy="pass the on_transform_error the run began with, e.g. 'skip'",
                )
            )
        return cls(
            provenance=Provenance(table=table, order=order),
            epoch=state.epoch,
            cycle=state.samples.base,
            positions=tuple(state.positions.to_list()) if skipped else None,
        )

    @property
    def plan_spec(self) -> PlanSpec:
        """The plan of the epoch under way."""
        return PlanSpec(table=self.provenance.table, order=self.provenance.order, epoch=self.epoch)

    def state(self) -> StreamState:
        """Returns the state at the end of the last step.

        Raises:
            StateError: A step is under way.
        """
        if self.micro_done:
            raise StateError(
                explain(
                    "a state can only be taken at the end of a step",
                    found=f"{self.micro_done} micro-batch(es) of a step handed out",
                    expected="shard.is_step_end to be true",
                    remedy="checkpoint after the optimizer's step, where is_step_end is true",
                )
            )
        return self.state_after(self.cycle, self.positions)

    def state_after(self, cycle: int, positions: tuple[int, ...] | None = None) -> StreamState:
        """Returns the state once ``cycle`` cycles of this epoch have been handed out, up to the given positions."""
        state = StreamState.at_cycle(self.provenance, self.epoch, cycle)
        return state if positions is None else replace(state, positions=SplitCounts.of(positions))

    def positions_with(self, owned: range, cycle: int, own_positions: list[int]) -> tuple[int, ...]:
        """Returns every split's position at ``cycle``: exact for the owned ones, the least possible for others."""
        ahead = cycle - self.cycle
        known = self.positions or (self.cycle,) * self.provenance.order.num_splits
        others = [position + ahead for position in known]
        others[owned.start : owned.stop] = own_positions
        return tuple(others)
