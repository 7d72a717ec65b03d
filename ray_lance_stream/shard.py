"""The shard: what one training worker iterates. It owns the truth of how far the stream was consumed."""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Iterator
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from ray_lance_stream import collate
from ray_lance_stream.batches import (
    Batches,
    BatchOptions,
    Convert,
    Delivery,
    Parts,
    batches_left,
    deliveries,
    sifted_deliveries,
)
from ray_lance_stream.core import ShardCore
from ray_lance_stream.delivery import Ahead
from ray_lance_stream.errors import ConfigError, explain
from ray_lance_stream.origins import COLUMNS, saying_rows, unknown_rows
from ray_lance_stream.packedreader import PackedReader
from ray_lance_stream.position import Position
from ray_lance_stream.readers import Reader, Room, new_reader
from ray_lance_stream.request import PlanHandle
from ray_lance_stream.survivors import SurvivorReader
from ray_lance_stream.topology import StepPlan

if TYPE_CHECKING:
    import torch

T = TypeVar("T")


class StreamShard(ShardCore):
    """One worker's part of a stream, epoch by epoch.

    Get it from ``ray.train.get_dataset_shard("train")`` or ``LanceStream.open()``. Iterating yields the
    rest of the current epoch; iterating again after the end yields the next epoch, and after a ``break``
    continues with the next row. Used by one thread at a time.

    Of a stream with ``pack_sequences`` a row is one packed block, here and in all that follows: a dict entry of
    ``input_ids`` and one of ``doc_ids``, int64 of shape (rows, pack_sequences).

    A batch counts as consumed when it is handed out. A loop that fetches one batch ahead of the one it
    trains on (Accelerate, and Lightning where it does not know the length) has that batch counted too: take
    states where the loop holds none, or iterate the shard directly.

    Attributes:
        loss_scale: Factor for a loss that is a mean over the rows of the last batch: multiply, call
            ``backward``, sum over micro-batches, average over replicas, and it is the mean over the
            global batch. Exact for means over rows (of packed streams: over blocks, which also are means over tokens
            where none is padding or masked); token-weighted means need token counts, and
            BatchNorm or contrastive losses depend on the local batch all the same.
        is_step_end: Whether the last batch was the last of its step: time to synchronise gradients,
            step the optimizer and, if wanted, report a checkpoint.

    Example:
        >>> with LanceStream(uri, "digits", num_splits=4, global_batch_size=32).open() as shard:
        ...     for batch in shard.iter_torch_batches():
        ...         loss = criterion(model(batch["x"]), batch["y"]) * shard.loss_scale
    """

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
        with_rows: bool = False,
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
            zero_copy: Hand out read-only views of the block instead of the trainer's own memory, where the
                format allows it ("numpy", "pyarrow"). The block stays in memory until the last view is gone.
            with_rows: Add to every batch the int64 columns ``_stream_row``, the row's number in the table version,
                ``_stream_split``, ``_stream_position`` in the split, ``_stream_epoch``, ``_stream_step`` (counted from
                1: what ``step`` says at its end) and ``_stream_index`` in the global batch. See :meth:`explain`. Not
                for packed documents, whose blocks are no rows.

        Raises:
            ConfigError: An argument cannot work; the message says what does.
        """
        converters: dict[str, Callable[[Parts], Any]] = {
            "numpy": lambda parts: collate.to_numpy(parts, copy=not zero_copy),
            "pyarrow": lambda parts: collate.to_arrow(parts, copy=not zero_copy),
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
            with_rows=with_rows,
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
        with_rows: bool = False,
    ) -> Batches[Any]:
        """Returns the rest of the current epoch as dicts of tensors; parameters as Ray Data's.

        Numbers become ``(rows,)`` tensors, fixed-size lists ``(rows, width)``, fixed-shape tensors
        ``(rows, *shape)``; strings, bytes and lists of varying length stay Python lists.

        Args:
            batch_size: See :meth:`iter_batches`.
            prefetch_batches: See :meth:`iter_batches`.
            micro_batch_size: See :meth:`iter_batches`.
            dtypes: One dtype for all numeric columns, or one by column name; those of ``with_rows`` stay int64.
            device: Where tensors go; "auto" is the worker's training device, the CPU outside Ray Train.
            collate_fn: Called with the batch as a dict of numpy arrays; what it returns is yielded, tensors
                in it (also in dicts, lists and tuples) moved to ``device``.
            pin_memory: Allocate batches in page-locked memory, for faster copies to a GPU.
            drop_last: See :meth:`iter_batches`.
            local_shuffle_buffer_size: See :meth:`iter_batches`.
            zero_copy: See :meth:`iter_batches`. Torch knows no read-only tensors: writing into a batch, also
                by an in-place operation, then corrupts the block or kills the process.
            with_rows: See :meth:`iter_batches`; a ``collate_fn`` gets the columns as well.
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
            with_rows=with_rows,
        )

        def convert(parts: Parts) -> Any:
            target = self._link_device() if device == "auto" else device
            if collate_fn is not None:
                return collate.move(collate_fn(collate.to_numpy(parts, copy=not zero_copy)), target)
            places = [part.select(COLUMNS) for part in parts] if with_rows else []
            own = [part.drop_columns(list(COLUMNS)) for part in parts] if with_rows else parts
            to_torch = functools.partial(collate.to_torch, device=target, pin_memory=pin_memory, copy=not zero_copy)
            batch = to_torch(own, dtypes=dtypes)
            return batch | to_torch(places) if with_rows else batch

        return self._batches_of(convert, options)

    def _link_device(self) -> Any:
        device = getattr(self._link, "device", None)
        return device() if callable(device) else None

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Iterates the rest of the current epoch with ``iter_torch_batches``'s defaults."""
        return iter(self.iter_torch_batches())

    def _batches_of(self, convert: Convert[T], options: BatchOptions) -> Batches[T]:
        options.check(self._steps(), self.replica, self._position, drop_last=self._config.drop_last)
        self._plan_for(options)  # refuses rows that cannot be told
        return Batches(self, convert, options)

    def _run(self, convert: Convert[T], options: BatchOptions) -> Generator[T, None, None]:
        if self._position.has_moved and (self._position.ended or self._at_end()):
            self._finish_epoch()  # the loop was left with the epoch's last batch
        began_at, has_moved = self._position.cycle, self._position.has_moved
        yield from self._epoch(convert, options)
        if self._config.sifts and has_moved and self._position.cycle == began_at:
            # It was left with the last batch all the same: with skipped rows that shows only now.
            self._finish_epoch()
            yield from self._epoch(convert, options)
        self._finish_epoch()

    def _at_end(self) -> bool:
        steps = self._steps()
        return steps.next_cycle(self._position.cycle) >= steps.end_cycle

    def _epoch(self, convert: Convert[T], options: BatchOptions) -> Generator[T, None, None]:
        steps, position = self._steps(), self._position
        options.check(steps, self.replica, position, drop_last=self._config.drop_last)  # time has passed
        position.micro_batch_size = options.micro_batch_size
        with self._lock:  # another thread may close the shard
            handle = self._plan_for(options)
            if self._reader is not None and self._reads_rows != options.with_rows:
                self._drop_reader()  # its blocks have too many columns, or too few
            reader = self._reader = self._reader or self._new_reader(handle, steps, options.prefetch_batches)
            self._reads_rows = options.with_rows
            reader.dispatcher.serve(self._clock, f"stream {self.name!r}, rank {self._seat.world_rank}")
        reader.interrupted.clear()
        cut = (handle, steps, self.replica, position, convert, options.micro_batch_size)
        if isinstance(reader, SurvivorReader):
            made = sifted_deliveries(reader, *cut, functools.partial(self._link.agree, self._seat))
        else:
            made = deliveries(reader, *cut)
        self._ahead = Ahead(made, options.prefetch_batches, reader.interrupted.set)
        for item in self._ahead:
            self._commit(item, steps)
            yield item.batch

    def _plan_for(self, options: BatchOptions) -> PlanHandle:
        handle = self._open_plan()
        if not options.with_rows:
            return handle
        if self._config.packing is not None:
            raise unknown_rows("a stream of packed documents, whose blocks are no rows of the table")
        return saying_rows(handle)

    def _new_reader(self, handle: PlanHandle, steps: StepPlan, prefetch_batches: int) -> Reader:
        position = self._position
        room = Room.of(self._config, self._seat, steps, handle, prefetch_batches)
        if room.is_too_small and not self._warned_of_budget:
            self._warned_of_budget = True
            room.warn(self._seat)
        return new_reader(self._open(), handle, self._config, position, self._seat, steps, room)

    def _num_batches_left(self, micro_batch_size: int | None) -> int:
        steps, position = self._steps(), self._position
        if position.has_moved and self._at_end():  # the next epoch comes, which has as many steps
            position = Position(provenance=position.provenance, epoch=position.epoch + 1)
            steps = self._steps_of(self._open_plan(), position.epoch)
        return batches_left(steps, self.replica, position, micro_batch_size)

    def _commit(self, item: Delivery[Any], steps: StepPlan) -> None:
        """Advances the state: the trainer gets this batch now."""
        position = self._position
        if item.micro_index == 0:
            after = position.state_after(item.end_cycle, item.positions, item.places)
            self._link.announce(self._seat, steps.steps_done(item.end_cycle, ended=item.is_last), after)
        self.loss_scale, self.is_step_end, self._origin = item.loss_scale, item.is_step_end, item.origin
        if item.is_step_end:
            position.cycle, position.micro_done = item.end_cycle, 0
            position.positions, position.places, position.ended = item.positions, item.places, item.is_last
            self._padded_tokens += item.padded_tokens
        else:
            position.micro_done = item.micro_index + 1
        position.has_moved = True
        self._rows += item.rows
        self._batches += 1

    def _finish_epoch(self) -> None:
        if isinstance(self._reader, PackedReader):
            self._documents_left += self._reader.documents_left(
                self._open_plan().num_rows // self._config.order.num_splits
            )
        with self._lock:
            self._drop_reader()
        self._position = Position(provenance=self._position.provenance, epoch=self._position.epoch + 1)
        self._link.announce(self._seat, 0, self._position.state())
