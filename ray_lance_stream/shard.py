"""The shard: what one training worker iterates. It owns the truth of how far the stream was consumed."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from ray_lance_stream import collate
from ray_lance_stream.batches import Batches, BatchIterator, BatchOptions, Convert, Delivery, Parts, deliveries
from ray_lance_stream.config import StreamConfig
from ray_lance_stream.delivery import prefetch
from ray_lance_stream.errors import ConfigError, StateError, StreamClosedError, explain
from ray_lance_stream.link import Link
from ray_lance_stream.plan import SplitLayout
from ray_lance_stream.position import Position
from ray_lance_stream.reader import BlockReader, ReadAhead
from ray_lance_stream.request import PlanHandle
from ray_lance_stream.source import BlockSource
from ray_lance_stream.state import StreamState
from ray_lance_stream.stats import ShardStats
from ray_lance_stream.topology import Replica, Seat, StepPlan

if TYPE_CHECKING:
    import torch

T = TypeVar("T")


class StreamShard:
    """One worker's part of a stream, epoch by epoch.

    Get it from ``ray.train.get_dataset_shard("train")`` or ``LanceStream.open()``. Iterating yields the
    rest of the current epoch; iterating again after the end yields the next epoch, and after a ``break``
    continues with the next row. Used by one thread at a time.

    Attributes:
        loss_scale: Factor for a loss that is a mean over the rows of the last batch: multiply, call
            ``backward``, sum over micro-batches, average over replicas, and it is the mean over the
            global batch. Exact for means over rows; token-weighted means need token counts, and
            BatchNorm or contrastive losses depend on the local batch all the same.
        is_step_end: Whether the last batch was the last of its step: time to synchronise gradients,
            step the optimizer and, if wanted, report a checkpoint.

    Example:
        >>> with LanceStream(uri, "digits", num_splits=4, global_batch_size=32).open() as shard:
        ...     for batch in shard.iter_torch_batches():
        ...         loss = criterion(model(batch["x"]), batch["y"]) * shard.loss_scale
    """

    def __init__(self, config: StreamConfig, seat: Seat, link: Link) -> None:
        seat.replica.owned_splits(config.order.num_splits)  # more replicas than splits fails here, on the driver
        self._config = config
        self._seat = seat
        self._link = link
        self._lock = threading.RLock()
        self._source: BlockSource | None = None
        self._closed = False
        self._iterating: weakref.ref[BatchIterator[Any]] | None = None
        self._position = Position.start(config)
        self._handle: PlanHandle | None = None
        self._reader: BlockReader | None = None
        self.loss_scale = 1.0
        self.is_step_end = True
        self._rows = self._batches = self._retries = 0
        self._wait_s = self._train_s = 0.0

    # ------------------------------------------------------------------ where it stands

    @property
    def name(self) -> str:
        """The stream's name in the run."""
        return self._seat.name

    @property
    def seat(self) -> Seat:
        """This worker's place in the run."""
        return self._seat

    @property
    def link(self) -> Link:
        """What connects the shard to its run."""
        return self._link

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._closed

    @property
    def replica(self) -> Replica:
        """The data-parallel group member this shard feeds."""
        return self._seat.replica

    @property
    def epoch(self) -> int:
        """The epoch that iterating yields next, or is yielding; counted from 0."""
        self._open()
        return self._position.epoch

    @property
    def step(self) -> int:
        """Steps of this epoch that are finished, the one that ends with the last batch included."""
        return self._steps().step_of(self._position.cycle + self._steps().cycles_per_step - 1)

    @property
    def num_rows(self) -> int:
        """Rows of the whole epoch, on all replicas."""
        return self._steps().end_cycle * self._config.order.num_splits

    @property
    def dropped_rows(self) -> int:
        """Rows of the table (after the filter) that this epoch leaves out: N mod S, and ``drop_last``."""
        return self._open_plan().num_rows - self.num_rows

    def __len__(self) -> int:
        """Returns the number of steps in an epoch."""
        return self._steps().num_steps

    def __repr__(self) -> str:
        seat = self._seat
        return f"StreamShard({seat.name!r}, replica {seat.replica.dp_rank} of {seat.replica.dp_size})"

    def stats(self) -> ShardStats:
        """Returns what this shard measured since it was opened."""
        reader = self._reader
        return ShardStats(
            rows=self._rows,
            batches=self._batches,
            wait_s=self._wait_s,
            train_s=self._train_s,
            buffered_bytes=0 if reader is None else reader.buffered_bytes,
            retries=self._retries + (0 if reader is None else reader.retries),
        )

    # ------------------------------------------------------------------ state

    def state(self) -> StreamState:
        """Returns how far the trainer got; see :meth:`state_dict`."""
        self._open()
        return self._position.state()

    def state_dict(self) -> dict[str, Any]:
        """Returns the state after the last batch handed out: plain JSON types, equal on all replicas.

        Batches that were prefetched do not count. Continues at any number of replicas.

        Raises:
            StateError: In the middle of a step that was cut into micro-batches.
        """
        return self.state().to_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Moves the shard to a state: the next row is the one after it.

        Raises:
            StateError: It is damaged or was not taken at the end of a cycle.
            StateMismatchError: It belongs to other data; the message names the field and the remedy.
        """
        loaded = StreamState.from_dict(state)
        self._end_iteration("load_state_dict moved the shard; iterate anew")
        with self._lock:
            self._open(restore=False)
            self._drop_reader()
            self._move_to(loaded)

    # ------------------------------------------------------------------ opening and closing

    def _open(self, *, restore: bool = True) -> BlockSource:
        with self._lock:
            if self._closed:
                raise StreamClosedError(f"{self!r} is closed; open the stream again")
            if self._source is None:
                config, seat = self._config, self._seat
                source = self._link.open_source(config, seat)
                try:
                    state = self._link.restored_state(config, seat) if restore else None
                    if restore and state is None and config.resume_states is not None:
                        state = config.state_for(seat.name, config.resume_states, "passed as resume_from")
                    self._source = source
                    if state is None:
                        self._open_plan()
                    else:
                        self._move_to(state)
                except BaseException:
                    self._source = None
                    source.close()
                    raise
                self._link.opened(self)
            return self._source

    def _move_to(self, state: StreamState) -> None:
        before = self._position, self._handle
        self._position, self._handle = Position.resume(self._config, state), None
        try:
            steps = self._steps()
            if self._position.cycle > steps.rows_per_split:
                raise StateError(
                    explain(
                        "the state lies beyond the end of the epoch",
                        found=f"{self._position.cycle} rows consumed of each split",
                        expected=f"at most {steps.rows_per_split}",
                        remedy="load the state as it was saved",
                    )
                )
        except BaseException:
            self._position, self._handle = before
            raise

    def _open_plan(self) -> PlanHandle:
        """The plan of the epoch under way, opened once per epoch."""
        source, spec = self._open(), self._position.plan_spec
        if self._handle is None or self._handle.spec != spec:
            self._handle = source.plan(spec)
        return self._handle

    def _steps_of(self, handle: PlanHandle) -> StepPlan:
        layout = SplitLayout(num_rows=handle.num_rows, num_splits=handle.spec.order.num_splits)
        return StepPlan(
            num_splits=layout.num_splits,
            rows_per_split=layout.rows_per_split,
            global_batch_size=self._config.global_batch_size,
            drop_last=self._config.drop_last,
        )

    def _steps(self) -> StepPlan:
        return self._steps_of(self._open_plan())

    def close(self) -> None:
        """Ends the iteration under way, if any, and gives up everything the shard holds. May be repeated."""
        self._end_iteration(f"{self!r} is closed; open the stream again")
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._drop_reader()
            if self._source is not None:
                self._source.close()
        self._link.close()

    def __enter__(self) -> StreamShard:
        self._open()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        if self._source is not None:
            raise TypeError("a StreamShard that is in use cannot be pickled; send the LanceStream instead")
        return StreamShard, (self._config, self._seat, self._link)

    def _end_iteration(self, why: str) -> None:
        # Not under the lock: it joins the thread that makes batches, and a collate_fn may ask the shard something.
        current = self._iterating() if self._iterating is not None else None
        if current is not None:
            current.close(why)

    def _drop_reader(self) -> None:
        if self._reader is not None:
            self._retries += self._reader.retries
            self._reader.interrupted.set()
            self._reader.close()
            self._reader = None

    # ------------------------------------------------------------------ iterating

    def iter_batches(
        self,
        *,
        batch_size: int | None = None,
        batch_format: Literal["numpy", "pyarrow", "pandas"] = "numpy",
        prefetch_batches: int = 1,
        micro_batch_size: int | None = None,
        drop_last: bool = False,
        local_shuffle_buffer_size: int | None = None,
        zero_copy: bool = False,
    ) -> Batches[Any]:
        """Returns the rest of the current epoch, one batch per step (or per micro-batch).

        Args:
            batch_size: Accepted where it equals this replica's rows of a full step; by default just that.
            batch_format: "numpy" (dict of arrays), "pyarrow" (table) or "pandas".
            prefetch_batches: Batches made ahead on a thread; 0 makes each when it is asked for.
            micro_batch_size: Most rows of a batch: each step is cut into equally many micro-batches on
                every replica. See ``is_step_end`` and ``loss_scale``.
            drop_last: Must equal the stream's; a short last step is a property of the plan.
            local_shuffle_buffer_size: Refused: it would make the order depend on timing.
            zero_copy: Hand out read-only views of the block instead of the trainer's own memory. The
                block stays in memory until the last view is gone.

        Raises:
            ConfigError: An argument cannot work; the message says what does.
        """
        converters: dict[str, Callable[[Parts], Any]] = {
            "numpy": lambda parts: collate.to_numpy(parts, copy=not zero_copy),
            "pyarrow": collate.to_arrow,
            "pandas": collate.to_pandas,
        }
        if batch_format not in converters:
            raise ConfigError(
                explain(
                    "batch_format is unknown",
                    found=repr(batch_format),
                    expected=f"one of {sorted(converters)}",
                    remedy="pass one, or use iter_torch_batches",
                )
            )
        options = BatchOptions(
            batch_size=batch_size,
            micro_batch_size=micro_batch_size,
            prefetch_batches=prefetch_batches,
            drop_last=drop_last,
            local_shuffle_buffer_size=local_shuffle_buffer_size,
        )
        return self._batches_of(converters[batch_format], options)

    def iter_torch_batches(
        self,
        *,
        batch_size: int | None = None,
        prefetch_batches: int = 1,
        micro_batch_size: int | None = None,
        dtypes: torch.dtype | dict[str, torch.dtype] | None = None,
        device: str | torch.device = "auto",
        collate_fn: Callable[[dict[str, Any]], Any] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        local_shuffle_buffer_size: int | None = None,
        zero_copy: bool = False,
    ) -> Batches[Any]:
        """Returns the rest of the current epoch as dicts of tensors; parameters as Ray Data's.

        Numbers become ``(rows,)`` tensors, fixed-size lists ``(rows, width)``, fixed-shape tensors
        ``(rows, *shape)``; strings, bytes and lists of varying length stay Python lists.

        Args:
            batch_size: See :meth:`iter_batches`.
            prefetch_batches: See :meth:`iter_batches`.
            micro_batch_size: See :meth:`iter_batches`.
            dtypes: One dtype for all numeric columns, or one by column name.
            device: Where tensors go; "auto" is the worker's training device, the CPU outside Ray Train.
            collate_fn: Called with the batch as a dict of numpy arrays; what it returns is yielded.
            pin_memory: Allocate batches in page-locked memory, for faster copies to a GPU.
            drop_last: See :meth:`iter_batches`.
            local_shuffle_buffer_size: See :meth:`iter_batches`.
            zero_copy: See :meth:`iter_batches`.
        """
        if collate_fn is not None and (dtypes is not None or pin_memory):
            raise ConfigError(
                explain(
                    "collate_fn goes with neither dtypes nor pin_memory",
                    found=f"dtypes={dtypes}, pin_memory={pin_memory}",
                    expected="a collate_fn that makes the tensors itself",
                    remedy="convert inside collate_fn",
                )
            )
        options = BatchOptions(
            batch_size=batch_size,
            micro_batch_size=micro_batch_size,
            prefetch_batches=prefetch_batches,
            drop_last=drop_last,
            local_shuffle_buffer_size=local_shuffle_buffer_size,
        )

        def convert(parts: Parts) -> Any:
            if collate_fn is not None:
                return collate_fn(collate.to_numpy(parts, copy=not zero_copy))
            target = self._link_device() if device == "auto" else device
            return collate.to_torch(parts, dtypes=dtypes, device=target, pin_memory=pin_memory, copy=not zero_copy)

        return self._batches_of(convert, options)

    def _link_device(self) -> Any:
        device = getattr(self._link, "device", None)
        return device() if callable(device) else None

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Iterates the rest of the current epoch with ``iter_torch_batches``'s defaults."""
        return iter(self.iter_torch_batches())

    def _batches_of(self, convert: Convert[T], options: BatchOptions) -> Batches[T]:
        options.check(self._steps(), self.replica, self._position, drop_last=self._config.drop_last)
        return Batches(self, convert, options)

    def _run(self, convert: Convert[T], options: BatchOptions) -> Generator[T, None, None]:
        steps, position = self._steps(), self._position
        options.check(steps, self.replica, position, drop_last=self._config.drop_last)  # time has passed
        position.micro_batch_size = options.micro_batch_size
        with self._lock:  # another thread may close the shard
            if self._reader is None:
                self._reader = self._new_reader(steps, options.prefetch_batches)
            reader = self._reader
        reader.interrupted.clear()
        made = deliveries(reader, steps, self.replica, position, convert, options.micro_batch_size)
        items = prefetch(made, options.prefetch_batches, reader.interrupted.set)
        try:
            for item in items:
                self._commit(item, steps)
                yield item.batch
        finally:
            items.close()
        self._finish_epoch()

    def _new_reader(self, steps: StepPlan, prefetch_batches: int) -> BlockReader:
        owned, handle = self.replica.owned_splits(steps.num_splits), self._open_plan()
        budget = self._config.prefetch.max_buffer_bytes // self._seat.world_size
        made_ahead = int(prefetch_batches * steps.cycles_per_step * len(owned) * handle.bytes_per_row)
        return BlockReader(
            self._open(),
            handle,
            owned,
            start_cycle=self._position.cycle,
            end_cycle=steps.end_cycle,
            cycles_per_step=steps.cycles_per_step,
            read_ahead=ReadAhead(max_bytes=max(1, budget - made_ahead), block_bytes=self._config.prefetch.block_bytes),
        )

    def _commit(self, item: Delivery[Any], steps: StepPlan) -> None:
        """Advances the state: the trainer gets this batch now."""
        position = self._position
        if item.micro_index == 0:
            step = steps.step_of(item.end_cycle - 1) + 1
            self._link.announce(self._seat, step, position.state_after(item.end_cycle))
        self.loss_scale, self.is_step_end = item.loss_scale, item.is_step_end
        if item.is_step_end:
            position.cycle, position.micro_done = item.end_cycle, 0
        else:
            position.micro_done = item.micro_index + 1
        self._rows += item.rows
        self._batches += 1

    def _finish_epoch(self) -> None:
        with self._lock:
            self._drop_reader()
        self._position = Position(provenance=self._position.provenance, epoch=self._position.epoch + 1)
        self._link.announce(self._seat, 0, self._position.state())
