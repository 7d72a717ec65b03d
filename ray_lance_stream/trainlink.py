"""What connects a shard to the Ray Train run it belongs to."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

import ray.train
from ray.exceptions import RayError
from ray.train import Checkpoint

from ray_lance_stream.checkpoint import FILE_NAME, Saved, Streams, read_saved
from ray_lance_stream.cluster.answers import answer_of
from ray_lance_stream.cluster.session import RayLink, Session
from ray_lance_stream.cluster.source import RaySource
from ray_lance_stream.config import StreamConfig
from ray_lance_stream.core import ShardCore
from ray_lance_stream.errors import (
    ConfigError,
    LanceStreamError,
    MissingStateError,
    StateError,
    StateMismatchError,
    TableVersionError,
    explain,
)
from ray_lance_stream.link import open_shards
from ray_lance_stream.plan import PlanSpec
from ray_lance_stream.position import Position
from ray_lance_stream.provenance import Provenance
from ray_lance_stream.request import PlanHandle
from ray_lance_stream.resuming import with_way_back
from ray_lance_stream.source import BlockSource
from ray_lance_stream.state import StreamState
from ray_lance_stream.storage import CannotOpenError
from ray_lance_stream.topology import Seat

logger = logging.getLogger("ray_lance_stream")
# Of a table: its version was cleaned up, it was dropped and made anew, it lacks rows or columns.
_FINAL: Final = (StateMismatchError, TableVersionError, ConfigError)


class _RunSource(RaySource):
    """Tells the run of a plan that cannot be opened now, nor after any restart of the worker group."""

    refused: Callable[[LanceStreamError], None] | None = None

    def plan(self, spec: PlanSpec) -> PlanHandle:
        """See ``BlockSource``."""
        try:
            return super().plan(spec)
        except _FINAL as error:
            # One that cannot be opened from some node may be from another.
            if self.refused is not None and not isinstance(error, CannotOpenError):
                self.refused(error)
            raise


class TrainLink(RayLink):
    """Connects a training worker's shard to its run; see ``link.Link``."""

    _source_type = _RunSource

    def __init__(self, session: Session, seat: Seat, resume_states: Mapping[str, StreamState] | None = None) -> None:
        super().__init__(session, owned=False)
        self.seat = seat
        self.resume_states = resume_states

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrive, (self._without_recipe(), self.seat, self.resume_states)

    def open_source(self, config: StreamConfig, seat: Seat) -> BlockSource:
        """See ``Link``. What the table itself refuses is told to the run, as in :meth:`restored_state`."""
        source = super().open_source(config, seat)
        assert isinstance(source, _RunSource)
        source.refused = self._refuse
        return source

    def _refuse(self, refusal: LanceStreamError) -> None:
        with contextlib.suppress(RayError):  # the next start of the workers finds the same
            answer_of(self.session.manager.refuse.remote(refusal))

    def restored_state(self, config: StreamConfig, seat: Seat) -> StreamState | None:
        """See ``Link``: the run's own checkpoint, as it was when this worker started.

        A checkpoint that cannot be used is one now and after every restart of the worker group: the run is told,
        so that it ends with this error instead of starting again as often as it may.
        """
        try:
            return saved_state(config, seat.name)
        except (StateError, MissingStateError) as error:
            checkpoint = started_from()
            if checkpoint is None:
                raise
            filesystem: Any = checkpoint.filesystem
            refusal = with_way_back(error, filesystem, checkpoint.path, lambda states: fits(config, seat.name, states))
            self._refuse(refusal)
            raise refusal from error

    def opened(self, shard: ShardCore) -> None:
        """See ``Link``."""
        super().opened(shard)
        open_shards[shard.name] = shard
        if self.seat.world_rank == 0:
            logger.info(
                "stream %r: epoch %d, step %d; %d %s an epoch, %d rows left out that fill no cycle or step",
                *(shard.name, shard.epoch, shard.step),
                *(shard.num_rows, "rows" if shard.packing is None else "packed blocks", shard.dropped_rows),
            )
            if self.resume_states is not None and started_from() is None:
                logger.warning(
                    "stream %r goes on from resume_from, and ray.train.get_checkpoint() is None: weights are not "
                    "restored with it, unless the loop loads them from that checkpoint itself",
                    shard.name,
                )

    def _run_name(self) -> str:
        return run_name()

    def device(self) -> Any:
        """The device Ray Train gave this worker."""
        from ray.train.torch import get_device

        return get_device()


def saved_state(config: StreamConfig, name: str) -> StreamState | None:
    """Returns a stream's state in the checkpoint this worker started from; None without one, or if it begins anew.

    Raises:
        StateError: It is damaged, or belongs to other data.
        MissingStateError: There is none, or it is another run's.
    """
    saved, where = start_checkpoint()
    if where is None:
        return None
    if saved is not None and name not in saved.streams:
        _check_not_renamed(config, name, saved.streams, where)
        _check_not_foreign(config, name, saved, where)
        logger.warning(
            "%s holds no state of stream %r (of others: %s): it was not begun, and begins now",
            *(where, name, sorted(saved.streams)),
        )
        return None
    state = config.state_for(name, None if saved is None else saved.streams, where)
    if state is not None:
        _check_fits(config, name, state, where)
    return state


def _check_not_renamed(config: StreamConfig, name: str, states: Streams, where: str) -> None:
    strict = replace(config, allow_changes=())

    def same_data(saved: Provenance) -> bool:
        try:
            strict.continued(replace(saved, table=config.identity))
        except StateMismatchError:
            return False
        return True

    twins = [other for other, state in states.items() if same_data(state.provenance)]
    if twins and config.on_missing_state == "error":
        raise MissingStateError(
            explain(
                f"the checkpoint {where} holds no state of the stream {name!r}, but one of the same data",
                found=f"stream {twins[0]!r}",
                expected=f"stream {name!r}",
                remedy=f"keep the key {twins[0]!r} in datasets, or pass on_missing_state='restart'",
            )
        )


def _check_not_foreign(config: StreamConfig, name: str, saved: Saved, where: str) -> None:
    run = run_name()
    if saved.run not in (None, run) and config.on_missing_state == "error":
        raise MissingStateError(
            explain(
                f"the checkpoint {where} holds no state of the stream {name!r}, and is not one of this run",
                found=f"the streams {sorted(saved.streams)} of the run {saved.run!r}",
                expected=f"a state of {name!r}, written by the run {run!r}",
                remedy="resume from a checkpoint of this run, or pass on_missing_state='restart' to begin anew",
            )
        )


def _check_fits(config: StreamConfig, name: str, state: StreamState, where: str) -> None:
    """Refuses a state of other data before anything is opened."""
    try:
        Position.resume(config, state)
    except StateMismatchError as error:
        text = f"{where}/{FILE_NAME}, stream {name!r}: {error}"
        raise StateMismatchError(text, error.field, error.saved, error.current) from error
    except StateError as error:
        raise StateError(f"{where}/{FILE_NAME}, stream {name!r}: {error}") from error


def fits(config: StreamConfig, name: str, states: Streams) -> bool:
    """Whether a stream can go on from a checkpoint's states."""
    try:
        return name in states and Position.resume(config, states[name]) is not None
    except StateError:
        return False


def run_name() -> str:
    """The name of the Train run this worker works for."""
    return str(ray.train.get_context().get_experiment_name())


# The links that this worker was given, by stream name, whether or not their shards were opened.
links: dict[str, TrainLink] = {}

# The checkpoint this worker started from, and what was read from it.
_start: list[Checkpoint | None] = []
_found: tuple[Saved | None, str | None] | None = None


def _arrive(session: Session, seat: Seat, resume_states: Mapping[str, StreamState] | None) -> TrainLink:
    """Makes a link again in the worker that its shard was made for."""
    link = TrainLink(session, seat, resume_states)
    link.hold()  # it may be long before the worker asks for the first batch
    links[seat.name] = link
    started_from()
    return link


def started_from() -> Checkpoint | None:
    """The checkpoint this worker started from; ``ray.train.get_checkpoint()`` answers with newer ones later."""
    if not _start:
        _start.append(ray.train.get_checkpoint())
    return _start[0]


def start_checkpoint() -> tuple[Saved | None, str | None]:
    """What the checkpoint this worker started from says of the streams, and its path; (None, None) without one."""
    global _found
    if _found is None:
        checkpoint = started_from()
        if checkpoint is None:
            _found = None, None
        else:
            filesystem: Any = checkpoint.filesystem
            _found = read_saved(filesystem, checkpoint.path), checkpoint.path
    return _found
