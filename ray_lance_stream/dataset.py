"""``StreamingDataset``: the class of ``lancedb.streaming``, with its parameters, its order and its checkpoints."""

from __future__ import annotations

import dataclasses
import logging
import mmap
import os
import secrets
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.context import get_spawning_popen
from typing import Any, Literal

from torch.utils.data import IterableDataset, get_worker_info

from ray_lance_stream.agreement import agreement_of
from ray_lance_stream.config import MIB, PrefetchConfig, StreamConfig, override_names
from ray_lance_stream.errors import ConfigError, StreamClosedError, explain, shown
from ray_lance_stream.location import TableRef
from ray_lance_stream.opening import block_recipe
from ray_lance_stream.packedstream import PackedStream
from ray_lance_stream.packspec import Packing
from ray_lance_stream.plan import PlanSpec, SplitLayout, require_int, whole
from ray_lance_stream.rowcursor import check_place, named
from ray_lance_stream.rowsource import RowSource
from ray_lance_stream.rowstream import RowStream
from ray_lance_stream.sifting import ErrorPolicy, OnTransformError, SkippedRow
from ray_lance_stream.state import StreamState, merge_state_dicts
from ray_lance_stream.tokens import with_estimate
from ray_lance_stream.topology import Replica
from ray_lance_stream.transform import RowTransform, UserError
from ray_lance_stream.userplan import order_spec, read_plan

logger = logging.getLogger("ray_lance_stream")
_told: set[str] = set()  # knobs without use that this process has been told of


class StreamingDataset(IterableDataset[Any]):
    """Rows of a LanceDB table in one order for any number of ranks, resumable after any row.

    The parameters of ``lancedb.streaming.StreamingDataset`` 0.40, in its order, and with ``order="lancedb"`` (the
    default) in exactly its row order: programs and checkpoints go over by their import line, and back. Rows are read
    in blocks, by threads of this process or by Ray actors (see ``StreamingDataLoader``).

    Iterating yields the rest of the epoch; after its end the next one follows, and after a ``break`` the next row.

    Torch's own ``DataLoader`` works as well (without ``num_workers``, or nothing is known of the state), but its batch
    size is not known here. Where ``world_size`` does not divide ``num_splits``, pass ``q * len(dataset.owned_splits)``
    with the same q on every rank, or the ranks take different numbers of batches and wait for one another for ever;
    ``StreamingDataLoader`` checks that.

    Args:
        table: The open table. The version it stands at now is read, whatever is written later. One in memory goes to
            other processes whole; a remote one with its API key, unless there is a ``connection_factory``.
        num_splits: Splits, S; ``world_size`` by default. Fixed for the life of a run.
        shuffle: Shuffle rows over the whole table.
        shuffle_seed: Seed of the order; None draws one, on a single rank only.
        epoch: The epoch to begin with. With 0, the default, a loaded state brings its own.
        rank: This process among the data-parallel ones.
        world_size: Their number, 1 to ``num_splits``; it need not divide it.
        read_batch_size: Most rows of a call of ``transform``. (Reads are in blocks, sized in bytes.)
        io_queue_depth: Accepted; has no use here, see ``max_buffer_bytes``.
        columns: Columns to read; all by default.
        shuffle_clump_size: Neighbouring rows shuffled as one.
        filter: SQL condition; only rows that satisfy it exist for the dataset.
        transform: ``transform(batch)`` with a ``pyarrow.RecordBatch``, or ``transform(batch, ctx)``; returns one
            object for each row. Rows are dicts without one.
        transform_parallelism: Threads that may be inside ``transform`` at a time.
        on_transform_error: "raise", "skip", "warn", a function of the exception that returns whether to skip, or a
            ``ReplaceRow``. See :attr:`skipped`. With prefetchers also for rows that kill their process
            (``DeadlyRowError``); in this process such a row ends it.
        transform_queue_depth: Accepted; has no use here, see ``max_buffer_bytes``.
        connection_factory: Called with the table's name, returns the open table: how other processes open it.
        worker_info_override: An object with ``id`` and ``num_workers`` instead of torch's worker info.
        pack_sequences: Yields blocks of so many tokens instead of rows: the token lists of each split's rows one
            after another, each followed by ``eos_id``. A block is a dict of ``input_ids`` and ``doc_ids``, int64
            tensors of shape ``(pack_sequences,)``; ``doc_ids`` numbers the documents of a block from 0.
        eos_id: Token that follows every document.
        pad_id: Token that fills the blocks of a split without documents left; padding keeps the ``doc_ids`` of what
            stands before it.
        blocks_per_epoch: Blocks of all splits together in an epoch, a multiple of ``num_splits``; "auto" estimates
            it from about 1 % of the rows. Splits of fewer tokens are padded (:attr:`padded_tokens`), tokens beyond
            are left out (:attr:`dropped_tokens`, :attr:`left_behind`).
        prefetch_batches: Accepted; an old name of ``io_queue_depth``.
        order: "lancedb", or "feistel": ours, which starts at once whatever the size of the table.
        plan: Rows in splits of your own: an Arrow or LanceDB table of ``row_id`` and ``split_id``.
        coordinator: A ``torch.distributed`` process group, or "world": all ranks end an epoch at the same cycle
            whatever is skipped where. Without it each ends with its own splits.
        max_buffer_bytes: Most bytes of blocks held or asked for.
        prefetch: Where prefetchers run, if there are any; see ``StreamingDataLoader``.
        allow_changes: Fields in which this dataset differs from a loaded state on purpose, e.g. ``("filter",)``.

    Raises:
        ConfigError: An argument cannot work; a ``ValueError``.

    Example:
        >>> dataset = StreamingDataset(table, num_splits=4, shuffle_seed=42)
        >>> for row in dataset:
        ...     print(row["id"], dataset.state_dict()["samples_consumed_per_split"])
    """

    _loads = 0  # states that were loaded

    def __init__(
        self,
        table: Any,
        *,
        num_splits: int | None = None,
        shuffle: bool = True,
        shuffle_seed: int | None = 0,
        epoch: int = 0,
        rank: int = 0,
        world_size: int = 1,
        read_batch_size: int = 64,
        io_queue_depth: int = 4,
        columns: Sequence[str] | None = None,
        shuffle_clump_size: int | None = None,
        filter: str | None = None,
        transform: Callable[..., Any] | None = None,
        transform_parallelism: int | None = None,
        on_transform_error: OnTransformError = "raise",
        transform_queue_depth: int | None = None,
        connection_factory: Callable[[str], Any] | None = None,
        worker_info_override: Any = None,
        pack_sequences: int | None = None,
        eos_id: int | None = None,
        pad_id: int | None = None,
        blocks_per_epoch: int | Literal["auto"] | None = None,
        prefetch_batches: int | None = None,
        order: str | None = None,
        plan: Any = None,
        coordinator: Any = None,
        max_buffer_bytes: int = 256 * MIB,
        prefetch: PrefetchConfig | None = None,
        allow_changes: Sequence[str] = (),
    ) -> None:
        super().__init__()
        rank, world_size, epoch, read_batch_size = map(whole, (rank, world_size, epoch, read_batch_size))
        require_int("world_size", world_size, minimum=1, remedy="pass the number of ranks")
        require_int("rank", rank, minimum=0, maximum=world_size - 1, remedy="pass this rank's index")
        require_int("epoch", epoch, minimum=0, remedy="count epochs from 0")
        require_int("read_batch_size", read_batch_size, minimum=1, remedy="pass 64")
        threads = (os.cpu_count() or 1) if transform_parallelism is None else whole(transform_parallelism)
        require_int("transform_parallelism", threads, minimum=1, remedy="leave it out for one thread per CPU")
        _check_unused("io_queue_depth", io_queue_depth, 4)
        _check_unused("transform_queue_depth", transform_queue_depth, None)
        _check_unused("prefetch_batches", prefetch_batches, None)
        _check_worker_info(worker_info_override)
        if shuffle_seed is None and world_size > 1:
            raise ConfigError(
                explain(
                    "every rank would draw a seed of its own",
                    found=f"shuffle_seed=None with world_size={world_size}",
                    expected="one seed for all ranks",
                    remedy="draw one, share it, and pass it",
                )
            )
        user_plan = read_plan(plan)
        self._replica = Replica(dp_rank=rank, dp_size=world_size)
        spec = order_spec(
            order=order,
            default_order="lancedb",
            plan=user_plan,
            num_splits=world_size if num_splits is None and user_plan is None else num_splits,
            shuffle=shuffle,
            shuffle_seed=secrets.randbits(32) if shuffle_seed is None else shuffle_seed,
            shuffle_clump_size=shuffle_clump_size,
            filter=filter,
        )
        packing = Packing.of(
            num_splits=spec.num_splits,
            pack_sequences=pack_sequences,
            eos_id=eos_id,
            pad_id=pad_id,
            blocks_per_epoch=blocks_per_epoch,
        )
        self._owned = self._replica.owned_splits(spec.num_splits)
        ref = TableRef.of(table, connection_factory)
        opened = ref.open(getattr(table, "version", None) if user_plan is None else user_plan.base_version)
        rows = opened.num_rows if filter is None else opened.count_rows(filter)
        if user_plan is None:
            SplitLayout(num_rows=rows, num_splits=spec.num_splits)
        recipe = block_recipe(
            ref,
            opened,
            columns=columns,
            transform=transform,
            wrapped_in=lambda function: RowTransform(function, threads, read_batch_size),
            packing=packing,
            policy=ErrorPolicy(on_transform_error),
            plan=user_plan,
            always_sifts=True,
        )
        if packing is not None:
            packing = with_estimate(packing, recipe, PlanSpec(table=opened.identity, order=spec, epoch=epoch))
        config = StreamConfig(
            stream_id=uuid.uuid4().hex[:12],
            identity=opened.identity,
            order=spec,
            global_batch_size=spec.num_splits,
            seed_given=shuffle_seed is not None,
            prefetch=PrefetchConfig(max_buffer_bytes=max_buffer_bytes) if prefetch is None else prefetch,
            allow_changes=override_names(allow_changes),
            packing=packing,
            blocks_given=blocks_per_epoch != "auto",
        )
        self._epoch_given = epoch
        self._worker_info_override = worker_info_override
        self._source = RowSource(
            config,
            dataclasses.replace(recipe, cache=config.prefetch.cache),
            num_threads=threads if transform is not None else 2,
        )
        agreement = agreement_of(coordinator, world_size)
        self._coordinated = agreement is not None
        self._rows: RowStream | PackedStream
        if packing is None:
            self._rows = RowStream(config, self._owned, epoch, agreement)
        else:  # every split gives the same number of blocks: the ranks have nothing to agree on
            self._rows = PackedStream(config, self._owned, epoch)
        self._in_use: object = None  # the iteration under way
        self._untracked: Any = mmap.mmap(-1, 1)  # memory shared with forked workers, who set it

    # ------------------------------------------------------------------ what it is

    @property
    def num_splits(self) -> int:
        """Splits, S."""
        return self._rows.config.order.num_splits

    @property
    def rank(self) -> int:
        """This process among the data-parallel ones."""
        return self._replica.dp_rank

    @property
    def world_size(self) -> int:
        """Number of data-parallel processes."""
        return self._replica.dp_size

    @property
    def owned_splits(self) -> range:
        """The splits whose rows this rank yields."""
        return self._owned

    @property
    def epoch(self) -> int:
        """The epoch under way."""
        return self._rows.cursor.epoch

    def use_prefetchers(self, count: int) -> None:
        """Has blocks built by so many Ray actors from now on, or by threads of this process with 0.

        Raises:
            ConfigError: Ray is not running, and ``world_size`` is not 1.
        """
        if count != self._source.num_prefetchers:
            self._rows.drop_reader()
        self._source.use_prefetchers(count, self.world_size)

    def close(self) -> None:
        """Ends threads and actors; iterating starts them again."""
        self._rows.drop_reader()
        self._source.close()

    # ------------------------------------------------------------------ iterating

    def __iter__(self) -> Iterator[Any]:
        """Yields the rest of the epoch.

        Raises:
            RuntimeError: Another iteration of this dataset is under way.
        """
        return self._iterate()

    def _iterate(self) -> Iterator[Any]:
        if self._in_use is not None:
            raise RuntimeError(
                "StreamingDataset does not support concurrent iteration: only one active iterator is allowed for a "
                "dataset. Found: a second one. Remedy: end the first (close it, or drop it), or build another dataset."
            )
        ticket = self._in_use = object()
        try:
            self._become_worker()
            for row in self._rows.rows(self._source.open()):
                yield row
                if self._in_use is not ticket:  # the state stands elsewhere: it would not cover what comes here
                    raise StreamClosedError(
                        explain(
                            "the dataset was moved to a state, which has ended this iteration",
                            found="load_state_dict while iterating",
                            expected="a new iteration after it",
                            remedy="iterate anew, which begins with the row after that state",
                        )
                    )
        except UserError as error:
            raise error.user_error from error
        finally:
            if self._in_use is ticket:
                self._in_use = None

    def _become_worker(self) -> None:
        """In a worker of torch's own ``DataLoader``: reads this worker's part of the rank's splits."""
        real = get_worker_info()
        info = self._worker_info_override or real
        if info is None:
            return
        if real is not None:
            if self._coordinated:
                raise ConfigError(
                    explain(
                        "ranks with a coordinator cannot read in worker processes of torch's own DataLoader",
                        found=f"worker {real.id} of {real.num_workers}, which is in no process group",
                        expected="the process that is a rank of the group to read",
                        remedy="use StreamingDataLoader",
                    )
                )
            self._untracked[0] = 1  # the parent cannot know which rows were handed out
            if self._worker_info_override is not None:
                logger.warning("worker_info_override stands in for torch's own worker info, which is there too")
        count, workers = len(self._owned), info.num_workers
        if count % workers:
            raise ConfigError(
                explain(
                    f"Number of rank splits ({count}) must be divisible by num_workers ({workers})",
                    found=f"{count} splits for {workers} workers",
                    expected="as many splits for each worker",
                    remedy="pass another num_workers, or use StreamingDataLoader, where any number works",
                )
            )
        share = count // workers
        part = self._owned[info.id * share : (info.id + 1) * share]
        if self._rows.owned != part:
            self._rows = self._rows.only(part)

    # ------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """Returns the state after the last row handed out: plain JSON types.

        Exact for this rank's splits; of the others it says as many rows as cycles were completed here. Merge the
        states of all ranks (``merge_state_dicts``) where rows were skipped or this is within a cycle (not every owned
        split has given as many rows), and always where they are packed. Within a cycle it names its rank: no other
        one can continue it.

        Raises:
            StateError: Rows are packed, and this is within a cycle.
            RuntimeError: Workers of torch's own ``DataLoader`` iterate copies of this dataset.
        """
        if self._untracked[0]:
            raise RuntimeError(
                "cannot checkpoint a standard DataLoader with num_workers > 0: which of the rows its workers read were "
                "handed out is not known here. Use StreamingDataLoader instead."
            )
        return named(self._rows.state(), self._replica)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Moves to the row after a state, of this class or of ``lancedb.streaming`` (with ``order="lancedb"``).

        A state taken after whole cycles continues at any number of ranks. One taken within a cycle continues on one
        rank; merged, at any number of ranks at which every rank's splits have given as many rows (of as many cycles,
        where ranks own unequally many splits), as they have at the number it was taken at if all ranks had taken as
        many batches; and a rank's own on that rank, at the same ``world_size``. Each rank then goes on with its own
        splits, those that are behind first.

        An iteration under way ends: its next row is a ``StreamClosedError``.

        Raises:
            StateError: It is damaged, or was taken within a cycle and cannot be continued here.
            StateMismatchError: It belongs to other data; the message names the field and the remedy.
            TableVersionError: The table version it was taken from is gone.
        """
        loaded = StreamState.from_dict(state, of=self._rows.provenance)
        if "table" not in self._rows.config.allow_changes:
            self._source.check_table(loaded.provenance.table)
        self._rows.load(
            loaded, epoch_given=self._epoch_given, check=lambda place: check_place(place, state, self._replica)
        )
        self._in_use = None
        self._loads += 1

    @staticmethod
    def merge_state_dicts(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Merges the states of all ranks, taken after the same cycle; see ``ray_lance_stream.merge_state_dicts``."""
        return merge_state_dicts(states)

    def _mark(self) -> Any:
        return self._rows.mark()

    def _rewind(self, mark: Any) -> None:
        self._rows.rewind(mark)

    def __getstate__(self) -> dict[str, Any]:
        if get_spawning_popen() is not None:
            self._untracked[0] = 1  # a DataLoader is sending it to a worker process
        return self.__dict__ | {"_in_use": None, "_untracked": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._untracked = mmap.mmap(-1, 1)

    # ------------------------------------------------------------------ what it measured

    @property
    def bytes_loaded(self) -> int:
        """Bytes read, before any transform; of blocks that have arrived."""
        return self._rows.measured().read_bytes

    @property
    def fetch_time(self) -> float:
        """Seconds spent reading, summed over threads or prefetchers."""
        return self._rows.measured().take_s

    @property
    def transform_time(self) -> float:
        """Seconds spent in the transform, or in making dicts of rows without one."""
        return self._rows.measured().transform_s

    @property
    def raw_queue_depth(self) -> int:
        """Rows that are read and wait for the transform or are in it.

        While ``prefetch_queue_depth`` is 0: above 0 the transform is the limit, 0 storage is.
        """
        reader = self._rows.reader
        if reader is None:
            return 0
        return self._source.rows_in_transform if self._source.is_local else reader.rows_in_transform

    @property
    def prefetch_queue_depth(self) -> int:
        """Rows that are ready to be handed out; of packed documents those that are here and were not begun."""
        return self._rows.rows_ready

    @property
    def unscanned_rows(self) -> int:
        """Rows of this rank's splits that were not yet asked for; 0 when not iterating."""
        reader = self._rows.reader
        return 0 if reader is None else reader.rows_unasked

    @property
    def consumed_rows(self) -> int:
        """Rows of this epoch handed out by this rank; of packed documents those that were begun."""
        samples = self._rows.cursor.samples
        return sum(samples[split] for split in self._rows.owned)

    @property
    def rows_skipped(self) -> int:
        """Rows left out because the transform failed on them; of blocks that have arrived."""
        return self._rows.skip_log().count

    @property
    def skipped(self) -> list[SkippedRow]:
        """The last rows that were skipped or replaced, by row number and reason."""
        return self._rows.skip_log().rows

    @property
    def left_behind(self) -> int:
        """Rows of which nothing was handed out: some split of the epoch had ended, or they were not needed for blocks.

        Where rows are packed and some fail, those that would have failed count as well.
        """
        return self._rows.measured().left_behind

    @property
    def padded_tokens(self) -> int:
        """Tokens of padding in the blocks handed out."""
        return self._rows.measured().padded_tokens

    @property
    def dropped_tokens(self) -> int:
        """Tokens beyond an epoch's last blocks, of the documents these cut; further ones: :attr:`left_behind`."""
        return self._rows.measured().dropped_tokens


def _check_unused(name: str, value: int | None, default: int | None) -> None:
    """Checks a knob of ``lancedb.streaming`` that has no use here, and says so once."""
    if value is not None:
        require_int(name, whole(value), minimum=1, remedy="leave it out")
    if value != default and name not in _told:
        _told.add(name)
        logger.warning("%s has no use here: what is read ahead is bounded in bytes (max_buffer_bytes)", name)


def _check_worker_info(info: Any) -> None:
    """Raises ConfigError if what stands in for torch's worker info does not say which of how many workers this is."""
    number, count = getattr(info, "id", None), getattr(info, "num_workers", None)
    if info is None or (type(number) is int and type(count) is int and 0 <= number < count):
        return
    raise ConfigError(
        explain(
            "worker_info_override is not valid",
            found=f"id={shown(number)}, num_workers={shown(count)} in an object of type {type(info).__name__}",
            expected="an object with integers id and num_workers, 0 <= id < num_workers",
            remedy="leave it out, or pass one like torch.utils.data.get_worker_info() returns",
        )
    )
