"""Where a shard stands in its stream, and how a state moves it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ray_lance_stream.config import StreamConfig
from ray_lance_stream.counts import SplitCounts
from ray_lance_stream.errors import StateError, explain
from ray_lance_stream.packstate import PackPlace, common_blocks
from ray_lance_stream.plan import PlanSpec
from ray_lance_stream.provenance import Provenance
from ray_lance_stream.state import StreamState
from ray_lance_stream.topology import StepPlan


def provenance_from(config: StreamConfig, state: StreamState) -> Provenance:
    """Returns what a stream reads from a state on, skipped steps included.

    Raises:
        StateMismatchError: The state belongs to other data than the stream.
    """
    return replace(config.continued(state.provenance), skips=config.skips_from(state))


def check_resumable(config: StreamConfig) -> None:
    """Raises StateError if a stream can go on from none of the states in ``resume_from``, whatever its name is."""
    errors = []
    for state in (config.resume_states or {}).values():
        try:
            Position.resume(config, state)
            return
        except StateError as error:
            errors.append(error)
    if errors:
        raise errors[0]


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
        places: Where every split's next block begins, where documents are packed; None at the epoch's beginning.
            Like ``positions`` it is exact for the splits of this replica.
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
    places: tuple[PackPlace, ...] | None = None
    ended: bool = False
    has_moved: bool = False

    @classmethod
    def start(cls, config: StreamConfig) -> Position:
        """The beginning of a stream."""
        return cls(provenance=config.provenance)

    @classmethod
    def resume(cls, config: StreamConfig, state: StreamState) -> Position:
        """The row after a state.

        Raises:
            StateMismatchError: The state belongs to other data than the stream.
            StateError: It was not taken at the end of a cycle.
        """
        provenance = provenance_from(config, state)
        if state.packed is not None:
            places = tuple(PackPlace(cursor) for cursor in state.packed)
            return cls(provenance=provenance, epoch=state.epoch, cycle=common_blocks(state.packed), places=places)
        if not state.samples.uniform:
            raise StateError(
                explain(
                    "the state was not taken at the end of a cycle",
                    found="splits with different numbers of consumed rows",
                    expected="the same number for every split",
                    remedy="take the state at a step boundary; states of several ranks are to be merged first",
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
            provenance=provenance,
            epoch=state.epoch,
            cycle=state.samples.base,
            positions=tuple(state.positions.to_list()) if skipped else None,
        )

    def check_within(self, steps: StepPlan, rows_per_split: int) -> None:
        """Raises StateError if the position lies beyond the end of its epoch."""
        found, expected = f"{self.cycle} rows consumed of each split", f"at most {steps.rows_per_split}"
        documents = 0
        if self.places is not None:
            documents = max(place.cursor.begun for place in self.places)
            found = f"{self.cycle} blocks of each split, and up to {documents} documents"
            expected = f"at most {steps.rows_per_split} blocks, and {rows_per_split} documents"
        if self.cycle > steps.rows_per_split or documents > rows_per_split:
            raise StateError(
                explain(
                    "the state lies beyond the end of the epoch",
                    found=found,
                    expected=expected,
                    remedy="load the state as it was saved",
                )
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
        if self.places is not None and self.provenance.order.order == "lancedb":  # which can go on where we stop
            return StreamState.of_packed(self.provenance, self.epoch, [place.buffered() for place in self.places])
        return self.state_after(self.cycle, self.positions, self.places)

    def state_after(
        self, cycle: int, positions: tuple[int, ...] | None = None, places: tuple[PackPlace, ...] | None = None
    ) -> StreamState:
        """Returns the state once ``cycle`` cycles of this epoch have been handed out.

        Args:
            cycle: How many.
            positions: Of every split, where rows may be skipped.
            places: Of every split, where documents are packed.
        """
        if self.provenance.packing is not None:
            known = places or (PackPlace(),) * self.provenance.order.num_splits
            return StreamState.of_packed(self.provenance, self.epoch, [place.cursor for place in known])
        state = StreamState.at_cycle(self.provenance, self.epoch, cycle)
        return state if positions is None else replace(state, positions=SplitCounts.of(positions))

    def positions_with(self, owned: range, cycle: int, own_positions: list[int]) -> tuple[int, ...]:
        """Returns every split's position at ``cycle``: exact for the owned ones, the least possible for others."""
        # In this order: the position may move meanwhile, and what is said of the others must not be too much.
        known = self.positions or (self.cycle,) * self.provenance.order.num_splits
        ahead = cycle - self.cycle
        others = [max(cycle, position + ahead) for position in known]
        others[owned.start : owned.stop] = own_positions
        return tuple(others)

    def places_with(self, owned: range, own_places: tuple[PackPlace, ...]) -> tuple[PackPlace, ...]:
        """Returns every split's place: the owned ones', and of others where this replica last knew them."""
        known = self.places or (PackPlace(),) * self.provenance.order.num_splits
        return known[: owned.start] + own_places + known[owned.stop :]
