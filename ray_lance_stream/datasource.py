"""The canonical order as a ``ray.data.Dataset``: for batch inference, statistics or writes over what is trained on."""

from __future__ import annotations

import dataclasses
import functools
import math
import uuid
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pyarrow as pa
import ray
from ray.data.block import BlockMetadata
from ray.data.datasource import Datasource, ReadTask

from ray_lance_stream.block import BlockBuilder, BlockRecipe
from ray_lance_stream.cluster.parcel import Parcel
from ray_lance_stream.cluster.prefetcher import resolve_rows
from ray_lance_stream.config import StreamConfig
from ray_lance_stream.errors import ConfigError, explain
from ray_lance_stream.plan import PlanSpec, SplitLayout, require_int
from ray_lance_stream.position import provenance_from
from ray_lance_stream.provenance import Provenance
from ray_lance_stream.recent import Recent
from ray_lance_stream.request import PlanHandle, Ranges
from ray_lance_stream.stepskips import Skips
from ray_lance_stream.topology import StepPlan

if TYPE_CHECKING:
    from ray.data.context import DataContext

# A worker of Ray Data serves many tasks, of two datasets by turns perhaps; the table stays open in between.
_builders: Recent[str, BlockBuilder] = Recent(2)


class StreamDatasource(Datasource):
    """One epoch of a stream, from a step on; every read task builds a run of whole cycles.

    Args:
        config: The stream.
        recipe: Its ``block.BlockRecipe``, pickled: workers hold the table open between tasks.
        epoch: The epoch, counted from 0.
        start_step: How many steps are left out: what ``shard.step`` says once they are done.
        name: The stream's name, by which ``resume_from`` knows it.

    Raises:
        ConfigError: Rows may be skipped or are packed, an argument is out of range, or the table cannot be read so.
        StateError: ``resume_from`` is a state of other data, or has none of that name.
    """

    def __init__(
        self, config: StreamConfig, recipe: bytes, *, epoch: int = 0, start_step: int = 0, name: str = "train"
    ) -> None:
        builder = BlockBuilder(ray.cloudpickle.loads(recipe))
        _refuse_uneven(config, builder.recipe)
        reads = _provenance(config, name)
        spec = PlanSpec(table=reads.table, order=reads.order, epoch=epoch)
        handle, matching = builder.open_plan(spec)
        layout = SplitLayout(num_rows=handle.num_rows, num_splits=reads.order.num_splits)
        steps = StepPlan.of(layout, global_batch_size=config.global_batch_size, drop_last=config.drop_last)
        remedy = f"pass the number of finished steps; epoch {epoch} has {steps.num_steps}"
        require_int("start_step", start_step, minimum=0, maximum=steps.num_steps, remedy=remedy)
        # The list of rows is shared by all tasks, which fetch it when they need it.
        self._handle = handle if matching is None else dataclasses.replace(handle, matching_rows=ray.put(matching))
        self._recipe = Parcel.of(recipe)
        self._id = uuid.uuid4().hex
        self._runs = _runs(reads.skips, steps, epoch, start_step * steps.cycles_per_step)
        self._block_bytes = config.prefetch.block_bytes

    def get_name(self) -> str:
        """The operator's name in Ray Data's progress and logs."""
        return "LanceStream"

    def estimate_inmemory_data_size(self) -> int:
        """Bytes of the transformed rows, estimated from the first ones."""
        return self._bytes_of(sum(map(len, self._runs)))

    def get_read_tasks(
        self, parallelism: int, per_task_row_limit: int | None = None, data_context: DataContext | None = None
    ) -> list[ReadTask]:
        """Cuts the epoch into runs of cycles, in order: ``parallelism``, and one more wherever steps are left out."""
        del data_context
        each = max(1, math.ceil(sum(map(len, self._runs)) / max(1, parallelism)))
        return [
            self._task(start, min(start + each, run.stop), per_task_row_limit)
            for run in self._runs
            for start in run[::each]
        ]

    def _task(self, start: int, stop: int, row_limit: int | None) -> ReadTask:
        num_splits = self._handle.spec.order.num_splits
        metadata = BlockMetadata(
            num_rows=(stop - start) * num_splits,
            size_bytes=self._bytes_of(stop - start),
            input_files=None,
            exec_stats=None,
        )
        cycles_per_block = max(1, self._block_bytes // max(1, self._bytes_of(1)))
        read = functools.partial(_read, self._id, self._recipe, self._handle, range(start, stop), cycles_per_block)
        return ReadTask(read, metadata, schema=self._handle.schema, per_task_row_limit=row_limit)

    def _bytes_of(self, cycles: int) -> int:
        return int(cycles * self._handle.spec.order.num_splits * self._handle.bytes_per_row)


def _read(name: str, recipe: Parcel, handle: PlanHandle, cycles: range, cycles_per_block: int) -> Iterator[pa.Table]:
    builder = _builders.get(name, lambda: BlockBuilder(recipe.unpack()))
    for start in cycles[::cycles_per_block]:
        ranges = Ranges(
            first_split=0,
            num_splits=handle.spec.order.num_splits,
            start=start,
            stop=min(start + cycles_per_block, cycles.stop),
        )
        block, _ = builder.build(handle, ranges, resolve_rows)
        assert isinstance(block.rows, pa.Table)  # only datasets of torch have rows that are objects
        yield block.rows


def _provenance(config: StreamConfig, name: str) -> Provenance:
    """What a shard of the stream reads: seed, table version and skipped steps may be those of a state."""
    state = config.state_for(name, config.resume_states, "passed as resume_from") if config.resume_states else None
    return config.provenance if state is None else provenance_from(config, state)


def _runs(skips: Skips, steps: StepPlan, epoch: int, start: int) -> list[range]:
    """Returns the cycles from ``start`` on that are delivered."""
    skips.check(steps, given=True)
    ends = [(gap.start, gap.stop) for gap in skips.in_epoch(epoch)] + [(steps.end_cycle, steps.end_cycle)]
    runs = []
    for stop, behind in ends:
        runs.append(range(min(start, steps.end_cycle), min(stop, steps.end_cycle)))
        start = max(start, behind)
    return [run for run in runs if run]


def _refuse_uneven(config: StreamConfig, recipe: BlockRecipe) -> None:
    if config.packing is not None:
        raise ConfigError(
            explain(
                "packed rows cannot be read in parts: where a block begins depends on all documents before it",
                found="pack_sequences",
                expected="a stream of rows",
                remedy="leave pack_sequences out, and pack what the dataset gives",
            )
        )
    if recipe.policy is not None and not recipe.policy.raises and recipe.policy.replacement is None:
        raise ConfigError(
            explain(
                "a stream that skips rows cannot be read in parts: where one begins depends on what was skipped before",
                found="on_transform_error that leaves rows out",
                expected="'raise', or a ReplaceRow",
                remedy="pass on_transform_error=ReplaceRow(...), or read the stream with a shard",
            )
        )
