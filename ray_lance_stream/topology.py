"""Who gets which part of which step: ownership, steps, micro-batches. Numbers in, numbers out."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from ray_lance_stream.errors import ConfigError, explain
from ray_lance_stream.permutation import IntArray
from ray_lance_stream.plan import SplitLayout, require_int


@dataclass(frozen=True, kw_only=True)
class Replica:
    """One member of the data-parallel group.

    Usually a training worker; with tensor or pipeline parallelism several workers are one replica.
    """

    dp_rank: int = 0
    dp_size: int = 1

    def __post_init__(self) -> None:
        require_int("dp_size", self.dp_size, minimum=1, remedy="pass the number of replicas")
        require_int("dp_rank", self.dp_rank, minimum=0, maximum=self.dp_size - 1, remedy="pass this replica's index")

    def owned_splits(self, num_splits: int) -> range:
        """Returns the splits this replica owns: [r*S//R, (r+1)*S//R), any R from 1 to S."""
        if self.dp_size > num_splits:
            raise ConfigError(
                explain(
                    "there are more replicas than splits",
                    found=f"{self.dp_size} replicas for num_splits={num_splits}",
                    expected=f"1 to {num_splits} replicas",
                    remedy=f"pass num_splits of at least {self.dp_size}, or train on at most {num_splits} replicas",
                )
            )
        return range(self.dp_rank * num_splits // self.dp_size, (self.dp_rank + 1) * num_splits // self.dp_size)


def shares(splits: IntArray, cycles: IntArray, num_splits: int, dp_size: int) -> tuple[IntArray, IntArray]:
    """Returns, for every row of a step, the replica that gets it and the index in that replica's part of the step.

    Args:
        splits: The rows' splits, int64, shape (rows,).
        cycles: Their cycles, counted from the step's first one, likewise.
        num_splits: S.
        dp_size: Number of replicas, 1 to S.
    """
    # Replica r owns splits [r*S//R, (r+1)*S//R).
    ranks = ((splits + 1) * dp_size - 1) // num_splits
    first, behind = ranks * num_splits // dp_size, (ranks + 1) * num_splits // dp_size
    return ranks, cycles * (behind - first) + splits - first


@dataclass(frozen=True, kw_only=True)
class Seat:
    """A training worker's place in a run.

    Attributes:
        name: The stream's name in the run, the key of ``datasets``.
        replica: The data-parallel group member this worker is, or is a part of.
        world_rank: The worker's rank among all workers.
        world_size: Number of workers.
        incarnation: Which start of the worker group this is; later ones are larger.
        shared: Whether the workers divide the stream among them. If not, each reads all of it by itself.
        restarts: Worker groups that the run had before this one.
    """

    name: str = "train"
    replica: Replica = field(default_factory=Replica)
    world_rank: int = 0
    world_size: int = 1
    incarnation: int = 0
    shared: bool = True
    restarts: int = 0


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """The steps of one epoch: step k is cycles [k*q, (k+1)*q), q = global_batch_size / num_splits.

    The last step is short when q does not divide the number of cycles, unless ``drop_last``. ``left_out`` holds the
    cycles of steps that are not delivered, ascending; they keep their numbers.
    """

    num_splits: int
    rows_per_split: int
    global_batch_size: int
    drop_last: bool = False
    left_out: tuple[range, ...] = ()

    def __post_init__(self) -> None:
        require_int("global_batch_size", self.global_batch_size, minimum=1, remedy="pass a multiple of num_splits")
        if self.global_batch_size % self.num_splits:
            below = self.global_batch_size // self.num_splits * self.num_splits
            nearest = [size for size in (below, below + self.num_splits) if size > 0]
            raise ConfigError(
                explain(
                    "global_batch_size is not a multiple of num_splits",
                    found=f"global_batch_size={self.global_batch_size}, num_splits={self.num_splits}",
                    expected="whole cycles, one row of every split each",
                    remedy=f"pass {' or '.join(map(str, nearest))}",
                )
            )
        if not self.num_steps:
            raise ConfigError(
                explain(
                    "drop_last leaves no step in the epoch",
                    found=f"{self.rows_per_split} cycles, of which a step takes {self.cycles_per_step}",
                    expected="at least one whole step",
                    remedy="pass drop_last=False or a smaller global_batch_size",
                )
            )

    @classmethod
    def of(cls, layout: SplitLayout, *, global_batch_size: int, drop_last: bool) -> StepPlan:
        """Returns the steps of an epoch of all rows of a layout."""
        return cls(
            num_splits=layout.num_splits,
            rows_per_split=layout.rows_per_split,
            global_batch_size=global_batch_size,
            drop_last=drop_last,
        )

    @cached_property
    def cycles_per_step(self) -> int:
        """q, the number of cycles in a full step."""
        return self.global_batch_size // self.num_splits

    @cached_property
    def num_steps(self) -> int:
        """Steps in an epoch, the short last one included unless it is dropped."""
        if self.drop_last:
            return self.rows_per_split // self.cycles_per_step
        return -(-self.rows_per_split // self.cycles_per_step)

    @cached_property
    def end_cycle(self) -> int:
        """The cycle at which the epoch ends: L, or the last whole step's end with ``drop_last``."""
        return min(self.rows_per_split, self.num_steps * self.cycles_per_step)

    @property
    def cycles_left_out(self) -> int:
        """Cycles of the epoch that are not delivered."""
        return sum(len(range(gap.start, min(gap.stop, self.end_cycle))) for gap in self.left_out)

    def next_cycle(self, cycle: int) -> int:
        """Returns the first cycle from ``cycle`` on that is delivered; at the epoch's end, ``end_cycle`` or more."""
        return next((gap.stop for gap in self.left_out if cycle in gap), cycle)

    def step_of(self, cycle: int) -> int:
        """Returns the step a cycle belongs to."""
        return cycle // self.cycles_per_step

    def steps_done(self, cycle: int, *, ended: bool = False) -> int:
        """Returns how many steps are finished once the first ``cycle`` cycles have been handed out.

        With ``ended`` the epoch ends there, as skipped rows make it end early: the last step counts, however short.
        """
        if ended:
            return -(-cycle // self.cycles_per_step)
        return self.num_steps if cycle >= self.end_cycle else cycle // self.cycles_per_step

    def cycles(self, step: int) -> range:
        """Returns the cycles of a step."""
        if not 0 <= step < self.num_steps:
            raise IndexError(f"step {step} of an epoch of {self.num_steps} steps")
        return range(step * self.cycles_per_step, min((step + 1) * self.cycles_per_step, self.end_cycle))

    def rest_of_step(self, cycle: int) -> range:
        """Returns the cycles from ``cycle`` to the end of its step: a whole step at a step's start."""
        return range(cycle, self.cycles(self.step_of(cycle)).stop)


@dataclass(frozen=True, kw_only=True)
class StepShare:
    """One replica's part of one step, cut into micro-batches.

    All replicas cut the same step into the same number of micro-batches, however many rows they own.

    Attributes:
        replica: Whose share it is.
        num_splits: S.
        num_cycles: Cycles of the step.
        micro_batch_size: Most rows of a micro-batch, or None for one micro-batch.
    """

    replica: Replica
    num_splits: int
    num_cycles: int
    micro_batch_size: int | None = None

    def __post_init__(self) -> None:
        self.replica.owned_splits(self.num_splits)  # refuses more replicas than splits
        if self.micro_batch_size is None:
            return
        require_int("micro_batch_size", self.micro_batch_size, minimum=1, remedy="pass None for whole shares")
        if self.num_micro_batches > self.smallest_share:
            raise ConfigError(
                explain(
                    "micro_batch_size is too small for the splits a replica owns: some would get no row",
                    found=f"micro_batch_size={self.micro_batch_size} for {self.replica.dp_size} replicas that own "
                    f"{self.smallest_share} to {self.largest_share} rows of a step of {self.num_cycles} cycle(s)",
                    expected="at least one row in each micro-batch of each replica",
                    remedy=f"pass micro_batch_size={-(-self.largest_share // self.smallest_share)} or more",
                )
            )

    @property
    def rows(self) -> int:
        """Rows of the step that this replica gets."""
        return self.num_cycles * len(self.replica.owned_splits(self.num_splits))

    @property
    def step_rows(self) -> int:
        """Rows of the step on all replicas."""
        return self.num_cycles * self.num_splits

    @property
    def largest_share(self) -> int:
        """Rows of the replica that gets most."""
        return self.num_cycles * -(-self.num_splits // self.replica.dp_size)

    @property
    def smallest_share(self) -> int:
        """Rows of the replica that gets least."""
        return self.num_cycles * (self.num_splits // self.replica.dp_size)

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of the step, the same on every replica."""
        return 1 if self.micro_batch_size is None else -(-self.largest_share // self.micro_batch_size)

    def micro_batch(self, index: int) -> range:
        """Returns the rows, counted within this replica's share, of one micro-batch."""
        count = self.num_micro_batches
        return range(index * self.rows // count, (index + 1) * self.rows // count)

    def loss_scale(self, rows: int) -> float:
        """Returns R * rows / rows of the step: the weight of a mean over ``rows`` rows of this replica.

        Summed over the micro-batches and averaged over the replicas it makes the mean over the step.
        """
        return self.replica.dp_size * rows / self.step_rows
