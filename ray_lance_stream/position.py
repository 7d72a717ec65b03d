"""Where a shard stands in its stream, and how a state moves it."""

from __future__ import annotations

from dataclasses import dataclass

from ray_lance_stream.config import StreamConfig
from ray_lance_stream.errors import StateError, StateMismatchError, explain
from ray_lance_stream.plan import PlanSpec
from ray_lance_stream.state import Provenance, StreamState, reconcile


@dataclass(kw_only=True)
class Position:
    """Moves as the trainer is handed batches, and only then.

    Attributes:
        provenance: The table version and order the rows come from.
        epoch: The epoch under way.
        cycle: Cycles of the epoch in finished steps.
        micro_done: Micro-batches handed out of the step under way, 0 between steps.
        micro_batch_size: How the step under way is cut.
        has_moved: Whether this process handed out batches since the position was loaded. At the end of an
            epoch it decides what iterating gives: the empty remainder after a resume, so that the code at
            the end of the epoch runs once; else the next epoch.
    """

    provenance: Provenance
    epoch: int = 0
    cycle: int = 0
    micro_done: int = 0
    micro_batch_size: int | None = None
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
        if not state.samples.uniform or state.positions != state.samples:
            raise StateError(
                explain(
                    "the state was not taken at the end of a cycle",
                    found="splits with different numbers of consumed rows",
                    expected="the same number for every split",
                    remedy="take the state at a step boundary",
                )
            )
        return cls(provenance=Provenance(table=table, order=order), epoch=state.epoch, cycle=state.samples.base)

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
        return self.state_after(self.cycle)

    def state_after(self, cycle: int) -> StreamState:
        """Returns the state once ``cycle`` cycles of this epoch have been handed out."""
        return StreamState.at_cycle(self.provenance, self.epoch, cycle)
