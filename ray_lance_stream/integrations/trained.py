"""Batches for a trainer that fetches ahead: the stream's state is that of the batch it trained on last."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Final, cast

from ray_lance_stream.core import ShardCore
from ray_lance_stream.errors import ConfigError, StateError, StreamClosedError, explain
from ray_lance_stream.link import open_shards
from ray_lance_stream.shard import StreamShard
from ray_lance_stream.state import StreamState
from ray_lance_stream.stats import ShardStats

# A loader that has these is asked for its state by Lightning, which then saves rank 0's for all ranks. Here the
# state goes with the checkpoint's ``lance_stream.json``, merged, and comes back from there.
_NOT_SHOWN: Final = frozenset({"state_dict", "load_state_dict"})


@dataclass(frozen=True, kw_only=True)
class _Place:
    """Where the shard stands after a batch."""

    epoch: int
    step: int
    state: StreamState | None  # None in the middle of a step
    batches: int
    loss_scale: float
    is_step_end: bool


class TrainedBatches:
    """Iterates a shard for a trainer, and knows which batch the trainer is at.

    Trainers fetch batches before they train on them: Lightning one, to learn which is the last, Hugging Face's as
    many as it accumulates. The shard counts those as consumed, so a checkpoint would pass over them. This one counts
    a batch when :meth:`trained` says that it was trained on, which the callbacks of this package do; in its place in
    the run, :func:`~ray_lance_stream.report` and :func:`~ray_lance_stream.save_state` save what is counted here.
    Batches that were fetched and not trained on, as when an epoch is left early, are handed out again by the next
    ``iter()``.

    It has no length on purpose: on a resume, trainers that know one count batches that another number of workers,
    or another ``micro_batch_size``, cut otherwise.

    Args:
        shard: From ``ray.train.get_dataset_shard`` or ``LanceStream.open()``.
        **options: As for :meth:`StreamShard.iter_torch_batches`.

    Raises:
        ConfigError: An option cannot work for the shard.

    Example:
        >>> batches = TrainedBatches(ray.train.get_dataset_shard("train"), micro_batch_size=32)
        >>> for batch in fetch_ahead(batches):
        ...     train_step(batch, batches.loss_scale)
        ...     batches.trained()
    """

    def __init__(self, shard: StreamShard, **options: Any) -> None:
        self._shard = shard
        self._batches = shard.iter_torch_batches(**options)
        self._micro_batch_size: int | None = options.get("micro_batch_size")
        self._source: Iterator[Any] | None = None  # the epoch under way
        self._ahead: deque[tuple[Any, _Place]] = deque()  # fetched and not trained on, oldest first
        self._given = 0  # how many of those the trainer has
        self._turn = 0  # the newest iteration
        self._at = self._here()
        self._behind_epoch: _Place | None = None  # until all of the epoch was trained on
        open_shards[shard.name] = shard
        shard.speaker = cast(weakref.ref[ShardCore], weakref.ref(self))

    # ------------------------------------------------------------------ for the trainer

    def __iter__(self) -> Iterator[Any]:
        """Yields the rest of the epoch from the first batch not trained on; after its end, the next epoch."""
        self._turn += 1
        self._given = 0
        if self._source is None and not self._ahead:
            self._source = iter(self._batches)
        return self._iterate(self._turn)

    def _iterate(self, turn: int) -> Iterator[Any]:
        while True:
            if turn != self._turn:
                raise StreamClosedError("a newer iteration of these batches has taken over; use that one")
            if self._given == len(self._ahead) and not self._fetch():
                return
            self._given += 1
            yield self._ahead[self._given - 1][0]

    def trained(self) -> None:
        """Says that the oldest batch handed out was trained on.

        Raises:
            ConfigError: None is out.
        """
        if not self._given:
            raise ConfigError(
                explain(
                    "a batch was said to be trained on, but none is out",
                    found="more calls of trained() than batches",
                    expected="one call for each batch, after its training step",
                    remedy="pass these batches to the trainer whose callback this is, and to it alone",
                )
            )
        self._given -= 1
        self._at = self._ahead.popleft()[1]
        self._pass_end()

    @property
    def loss_scale(self) -> float:
        """``StreamShard.loss_scale`` of the batch in training: the oldest that was handed out and not trained on."""
        return self._in_training.loss_scale

    @property
    def is_step_end(self) -> bool:
        """``StreamShard.is_step_end`` of the batch in training."""
        return self._in_training.is_step_end

    @property
    def _in_training(self) -> _Place:
        return self._ahead[0][1] if self._given else self._at

    @property
    def at_step_end(self) -> bool:
        """Whether the batch trained on last was the last of its step, so that a checkpoint may be saved."""
        return self._at.is_step_end

    # ------------------------------------------------------------------ for the run

    @property
    def epoch(self) -> int:
        """The epoch of the batch that is to be trained on next."""
        return self._place().epoch

    @property
    def step(self) -> int:
        """Steps of that epoch that were trained on."""
        return self._place().step

    def state(self) -> StreamState:
        """Returns the state after the batch trained on last; behind the last of an epoch, the next one's beginning.

        Raises:
            StateError: In the middle of a step.
        """
        state = self._place().state
        if state is None:
            raise StateError(
                explain(
                    "a state can only be taken at the end of a step",
                    found="a micro-batch trained on that is not the last of its step",
                    expected="at_step_end to be true",
                    remedy="checkpoint after the optimizer's step, and let that be where the stream's step ends",
                )
            )
        return state

    def stats(self) -> ShardStats:
        """As ``StreamShard.stats``; ``batches`` are those trained on."""
        return replace(self._shard.stats(), batches=self._place().batches)

    def __getattr__(self, name: str) -> Any:
        if name in _NOT_SHOWN or name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self._shard, name)

    # ------------------------------------------------------------------ inside

    def _fetch(self) -> bool:
        """Takes the next batch from the shard; returns whether the epoch had one."""
        if self._source is None:
            return False
        for batch in self._source:
            self._ahead.append((batch, self._here()))
            return True
        self._source = None
        self._behind_epoch = self._here()
        self._pass_end()
        return False

    def _pass_end(self) -> None:
        """Moves to the next epoch's beginning once all of an epoch was trained on, and is known to be all."""
        if self._behind_epoch is not None and not self._ahead:
            self._at, self._behind_epoch = self._behind_epoch, None

    def _here(self) -> _Place:
        shard = self._shard
        return _Place(
            epoch=shard.epoch,
            step=shard.step,
            state=shard.state() if shard.is_step_end else None,
            batches=shard.stats().batches,
            loss_scale=shard.loss_scale,
            is_step_end=shard.is_step_end,
        )

    def _place(self) -> _Place:
        """Where training stands.

        A trainer that resumes after the last batch of an epoch begins the next one: it must not find the empty rest
        of the old one. Whether a batch was the last is known when no other comes.
        """
        may_be_last = self._shard._config.sifts or self._at.step >= len(self._shard)
        if not self._ahead and self._at.is_step_end and may_be_last:
            self._fetch()
        return self._at
