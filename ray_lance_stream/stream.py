"""``LanceStream``: the recipe of a training stream. Picklable; it starts nothing until it is used."""

from __future__ import annotations

import dataclasses
import logging
import secrets
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pyarrow as pa
from ray import cloudpickle

from ray_lance_stream.config import PrefetchConfig, StreamConfig, override_names
from ray_lance_stream.packspec import Packing
from ray_lance_stream.plan import PlanSpec, SplitLayout, require_int, whole
from ray_lance_stream.position import check_resumable
from ray_lance_stream.progress import Progress
from ray_lance_stream.provenance import Provenance
from ray_lance_stream.resuming import resume_states
from ray_lance_stream.shard import StreamShard
from ray_lance_stream.sifting import ErrorPolicy, OnTransformError
from ray_lance_stream.stats import RunProgress, StreamStats
from ray_lance_stream.stepskips import Skips, read_skip_steps
from ray_lance_stream.topology import StepPlan
from ray_lance_stream.userplan import column_names, order_spec, read_plan

if TYPE_CHECKING:
    import ray.data

    from ray_lance_stream.block import BlockRecipe
    from ray_lance_stream.transform import Transform

logger = logging.getLogger("ray_lance_stream")


class LanceStream:
    """A stream of training batches from a LanceDB table, the same for any number of workers.

    Building one opens the table to validate the arguments and to pin its version; it starts no actor and
    needs no Ray. Pass it to ``TorchTrainer(datasets={"train": stream})``, or call :meth:`open`.

    Args:
        uri: The database: a path or a URI, as for ``lancedb.connect``.
        table: The table's name.
        num_splits: Splits, S: fixed for the life of a run; any number of replicas from 1 to S works. A
            number with many divisors, such as 48, keeps the replicas' shares equal most often.
        global_batch_size: Rows of a step on all replicas together, packed blocks with ``pack_sequences``; a multiple
            of ``num_splits``.
        shuffle: Shuffle rows over the whole table, anew every epoch.
        shuffle_seed: Seed of the order and of the transform's generators; None draws one.
        shuffle_clump_size: Neighbouring rows shuffled as one: larger reads faster and mixes less.
        filter: SQL condition; only rows that satisfy it exist for the stream.
        columns: Columns to read; all by default.
        transform: Runs on the prefetchers: ``transform(batch)`` or ``transform(batch, ctx)`` with a
            ``pyarrow.RecordBatch`` and a ``TransformContext``. Returns as many rows, in the same order: a
            record batch or table, a dict of arrays or tensors, or a list of rows. A class is built once
            per prefetcher.
        drop_last: Leave out the epoch's last step if it is short.
        order: "feistel", the default; or "lancedb", the order of ``lancedb.streaming``, whose states can be continued
            with it (``resume_from``).
        plan: Rows in splits of your own, the same in every epoch: an Arrow or LanceDB table of ``row_id`` and
            ``split_id``; see :class:`~ray_lance_stream.rowlists.UserPlan`.
        on_transform_error: "raise"; "skip" leaves rows out on which the transform fails, and "warn" says so; a function
            of the exception returns whether to; a ``ReplaceRow`` puts another one in their place. With prefetchers
            likewise rows that kill every process that reads them, also without a transform. All replicas end an epoch
            at the same step whatever is skipped where. With ``pack_sequences``: documents that hold a null.
        pack_sequences: Delivers blocks of so many tokens instead of rows: the token lists of each split's rows one
            after another, each followed by ``eos_id``. A block is a row of two columns, ``input_ids`` and ``doc_ids``,
            int64 of shape ``(pack_sequences,)``; ``doc_ids`` numbers the documents of a block from 0.
        eos_id: Token that follows every document.
        pad_id: Token that fills the blocks of a split without documents left; padding keeps the ``doc_ids`` of what
            stands before it.
        blocks_per_epoch: Blocks of all splits together in an epoch, a multiple of ``num_splits``; "auto" estimates
            it from about 1 % of the rows, and a state brings its own. Splits of fewer tokens are padded, tokens beyond
            are left out.
        version: Pin this table version; by default the latest now, or the one a resumed state names.
        protect_version: Tags the version in the table, so that no clean-up removes it while checkpoints refer to it:
            clean-ups then leave it, or end with an error that names the tag. Pass the run's name, which the tag
            carries, so that the run finds its own when it is started again; True makes a name up. Tagged is the version
            that the stream is built on: the latest, ``version``, or that of ``resume_from``. The tag stays until
            ``ray-lance-stream release`` removes it. Needs a table that may be written to.
        storage_options: As for ``lancedb.connect``; never shown or stored in checkpoints.
        connection_factory: Instead of ``uri``: called with the table's name in every process that reads,
            returns the open table, remote ones (``db://``) included. For credentials that must not travel.
        prefetch: The pool of prefetchers.
        resume_from: Where to begin if the run has no checkpoint of its own: a checkpoint directory (path,
            URI or ``ray.train.Checkpoint``), or a state dict.
        on_missing_state: What to do with a checkpoint that holds no state of this stream: "error", or
            "restart" from the beginning.
        allow_changes: Fields in which this stream differs from the state on purpose, e.g. ``("filter",)``.
        skip_steps: Steps that are not delivered, such as those at which a loss spiked: a list of (epoch, first step,
            last step), both ends included, epochs from 0 and steps from 1, as ``shard.step`` says it at a step's end.
            ``shard.step`` goes on counting them. A state keeps the list, and a stream without one takes the state's;
            another list may differ in steps that lie ahead of the state. Not with rows that are skipped or packed.

    Raises:
        ConfigError: An argument cannot work.
        StateError: ``resume_from`` is damaged or is no state.

    Example:
        >>> stream = LanceStream("/data/db", "digits", num_splits=12, global_batch_size=120, shuffle_seed=42)
        >>> with stream.open() as shard:
        ...     for batch in shard.iter_torch_batches():
        ...         print(shard.step, batch["image"].shape)
    """

    def __init__(
        self,
        uri: str | Path | None = None,
        table: str = "",
        *,
        num_splits: int,
        global_batch_size: int,
        shuffle: bool = True,
        shuffle_seed: int | None = 0,
        shuffle_clump_size: int | None = None,
        filter: str | None = None,
        columns: Sequence[str] | None = None,
        transform: Callable[..., Any] | None = None,
        drop_last: bool = False,
        order: str | None = None,
        plan: Any = None,
        on_transform_error: OnTransformError = "raise",
        pack_sequences: int | None = None,
        eos_id: int | None = None,
        pad_id: int | None = None,
        blocks_per_epoch: int | Literal["auto"] | None = None,
        version: int | None = None,
        protect_version: bool | str = False,
        storage_options: Mapping[str, str] | None = None,
        connection_factory: Callable[[str], Any] | None = None,
        prefetch: PrefetchConfig | None = None,
        resume_from: object = None,
        on_missing_state: Literal["error", "restart"] = "error",
        allow_changes: Sequence[str] = (),
        skip_steps: Sequence[tuple[int, int, int]] | None = None,
    ) -> None:
        global_batch_size, version = whole(global_batch_size), whole(version)
        overrides = override_names(allow_changes)
        seed = secrets.randbits(63) if shuffle_seed is None else shuffle_seed
        user_plan = read_plan(plan)
        spec = order_spec(
            order=order,
            default_order="feistel",
            plan=user_plan,
            num_splits=num_splits,
            shuffle=shuffle,
            shuffle_seed=seed,
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
        policy = ErrorPolicy(on_transform_error)
        num_splits = whole(num_splits)
        StepPlan(num_splits=num_splits, rows_per_split=1, global_batch_size=global_batch_size)  # checks both
        pinned_version = version
        if version is not None:
            require_int("version", version, minimum=1, remedy="pass a version of the table, or leave it out")
        # Imported here: Ray Train's controller unpickles streams, and has no use for Lance.
        from ray_lance_stream.location import TableRef
        from ray_lance_stream.opening import block_recipe, checked_against, pickled, saved_version
        from ray_lance_stream.tags import check_protect, protect
        from ray_lance_stream.tokens import with_estimate

        check_protect(protect_version)
        ref = TableRef(
            uri=None if uri is None else str(uri),
            name=table,
            storage_options=storage_options,
            connection_factory=connection_factory,
        )
        if version is None and user_plan is not None:
            version = user_plan.base_version
        states = resume_states(
            resume_from, on_missing_state, of=lambda: Provenance(table=ref.open(version).identity, order=spec)
        )
        opened = ref.open(version if "table" in overrides else saved_version(version, states))
        cycles: int | None = None  # where it is known here: a state may name an older version that has other rows
        with checked_against(opened, is_latest=version is None and states is None):
            opened.check_columns(column_names(columns))
            if filter is not None:
                opened.check_filter(filter)
            if filter is None and resume_from is None and user_plan is None:
                cycles = SplitLayout(num_rows=opened.num_rows, num_splits=num_splits).rows_per_split
        recipe = block_recipe(
            ref,
            opened,
            columns=columns,
            transform=transform,
            wrapped_in=_transform,
            packing=packing,
            policy=policy,
            plan=user_plan,
        )
        if packing is not None:
            packing = with_estimate(packing, recipe, PlanSpec(table=opened.identity, order=spec, epoch=0))
            cycles = packing.blocks_per_split
        skipped = read_skip_steps(skip_steps)
        if cycles is not None:
            steps = StepPlan(
                num_splits=spec.num_splits,
                rows_per_split=cycles,
                global_batch_size=global_batch_size,
                drop_last=drop_last,
            )
            if packing is None:
                Skips.of_steps(skipped or (), steps.cycles_per_step).check(steps, given=True)
        self._config = StreamConfig(
            stream_id=uuid.uuid4().hex[:12],
            identity=opened.identity,
            order=spec,
            global_batch_size=global_batch_size,
            drop_last=drop_last,
            seed_given=shuffle_seed is not None,
            pinned_version=pinned_version,
            prefetch=prefetch if prefetch is not None else PrefetchConfig(),
            resume_states=states,
            on_missing_state=on_missing_state,
            allow_changes=overrides,
            sifts=recipe.policy is not None and packing is None,
            packing=packing,
            blocks_given=blocks_per_epoch != "auto",
            skip_steps=skipped,
        )
        dumps: Any = cloudpickle.dumps  # untyped
        check_resumable(self._config)
        self._recipe = pickled(dataclasses.replace(recipe, cache=self._config.prefetch.cache), dumps)
        self._table_text = str(ref)
        self._tag: str | None = None
        if protect_version is not False:
            run = self._config.stream_id if protect_version is True else protect_version
            self._tag = protect(opened, ref, run)
        self._run_stream: Any = None

    @property
    def config(self) -> StreamConfig:
        """The validated settings."""
        return self._config

    @property
    def recipe(self) -> BlockRecipe:
        """What blocks are made of."""
        recipe: BlockRecipe = cloudpickle.loads(self._recipe)
        return recipe

    @property
    def version_tag(self) -> str | None:
        """Name of the tag that protects the table version, with ``protect_version``."""
        return self._tag

    @property
    def schema(self) -> pa.Schema:
        """Schema of the table version the stream is pinned to, before columns and transform."""
        return self.recipe.table.open(self._config.identity.version).schema

    def __repr__(self) -> str:
        config = self._config
        return (
            f"LanceStream({self._table_text}, version {config.identity.version}, "
            f"num_splits={config.order.num_splits}, global_batch_size={config.global_batch_size})"
        )

    def __getstate__(self) -> dict[str, Any]:
        # A session belongs to the process that started it; whoever gets a copy of the recipe starts its own.
        return self.__dict__ | {"_run_stream": None}

    def open(self, *, rank: int = 0, world_size: int = 1, name: str = "train", coordinator: Any = None) -> StreamShard:
        """Opens one replica's shard outside Ray Train.

        With prefetchers if this process is connected to Ray, else in this process. Close the shard, or use
        it as a context manager.

        Args:
            rank: This replica's index in the data-parallel group.
            world_size: Number of replicas, 1 to ``num_splits``.
            name: The stream's name, under which ``resume_from`` is searched.
            coordinator: A ``torch.distributed`` process group, or "world": how several replicas end an epoch at the
                same step where rows may be skipped (``on_transform_error``). Without it each ends with its own splits.

        Raises:
            ConfigError: More replicas than splits, a rank out of range.
            PlacementError: No prefetcher could be placed.
        """
        from ray_lance_stream.outside import open_shard

        return open_shard(
            self._config, self._recipe, rank=rank, world_size=world_size, name=name, coordinator=coordinator
        )

    def __call__(self) -> Any:
        """Called by Ray Train: in its controller at every start of the worker group, or in local mode."""
        from ray_lance_stream.train import run_stream

        self._run_stream = run_stream(self._config, self._recipe, self._run_stream)
        return self._run_stream

    def to_dataset(
        self, *, epoch: int = 0, start_step: int = 0, name: str = "train", override_num_blocks: int | None = None
    ) -> ray.data.Dataset:
        """Returns an epoch as a Ray Dataset: the rows of training, transformed, in canonical order.

        For inference, statistics or writes over exactly what is trained on. Tasks of Ray Data read the blocks; with
        ``ray.data.DataContext.get_current().execution_options.preserve_order = True`` rows also come out in order.

        Args:
            epoch: The epoch, counted from 0.
            start_step: Steps to leave out at its beginning: ``shard.step`` gives what a trainer has not seen yet.
            name: The stream's name in the run that ``resume_from`` is of: seed, version and skipped steps are its.
            override_num_blocks: As for Ray Data's readers.

        Raises:
            ConfigError: The stream skips rows, or ``start_step`` lies beyond the epoch.
            StateError: ``resume_from`` is a state of other data.
        """
        import ray.data

        from ray_lance_stream.datasource import StreamDatasource

        source = StreamDatasource(self._config, self._recipe, epoch=epoch, start_step=start_step, name=name)
        dataset: ray.data.Dataset = ray.data.read_datasource(source, override_num_blocks=override_num_blocks)
        return dataset

    def where(self, timeout_s: float = 5.0) -> list[RunProgress]:
        """Returns where the runs of this stream stand, on the cluster this process is connected to.

        Callable on the driver while ``fit()`` runs in another thread; asks the runs' state managers.
        """
        from ray_lance_stream.cluster.session import progress_of

        return progress_of(self._config.stream_id, timeout_s)

    def stats(self, timeout_s: float = 5.0) -> StreamStats:
        """Returns what the run of this stream does that was started last, on the cluster this process is connected to.

        Callable on the driver while ``fit()`` runs in another thread, also after it; asks the run's coordinator, which
        hears of workers and prefetchers once a second. Without a run that answers, all is empty but the verdict.
        """
        from ray_lance_stream.cluster.overview import overview

        found = overview(self._config.stream_id, timeout_s)
        return found.runs[0] if found.runs else StreamStats(verdict="nothing is known: no run of this stream answers")

    def progress(self, epochs: int | None = None) -> Progress:
        """Shows on the driver where the run stands, for as long as the ``with`` block round ``fit()`` lasts.

        On a terminal one line that is written again, else a line every ten seconds, to standard error. Nothing is shown
        where the environment has ``RAY_LANCE_STREAM_PROGRESS=0``.

        Args:
            epochs: How many epochs the run has; without it the bar shows the epoch under way.

        Example:
            >>> with stream.progress(epochs=12):
            ...     trainer.fit()
        """
        from ray_lance_stream.cluster.room import lacking

        return Progress(self.stats, lacking, epochs=epochs)

    def close(self) -> None:
        """Ends everything this stream started on the cluster this process is connected to, at once."""
        from ray_lance_stream.cluster.session import end_sessions

        self._run_stream = None
        end_sessions(self._config.stream_id)

    def __enter__(self) -> LanceStream:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def _transform(function: Callable[..., Any]) -> Transform:
    from ray_lance_stream.transform import Transform

    transform = Transform(function)
    transform.validate_picklable(cloudpickle.dumps)
    return transform
