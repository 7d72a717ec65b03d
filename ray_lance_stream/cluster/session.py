"""A session: the actors of one stream in one run, and a shard's connection to them."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import uuid
from dataclasses import dataclass, field, replace
from typing import Any, Final

import ray
from ray.exceptions import ActorDiedError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ray_lance_stream.agreement import Agreement
from ray_lance_stream.cluster.announcing import Announcer
from ray_lance_stream.cluster.answers import answer_of
from ray_lance_stream.cluster.coordinator import Coordinator
from ray_lance_stream.cluster.manager import StateManager
from ray_lance_stream.cluster.parcel import Parcel
from ray_lance_stream.cluster.source import RaySource
from ray_lance_stream.cluster.told import Memory, Standing, keep_alive
from ray_lance_stream.config import PrefetchConfig, StreamConfig
from ray_lance_stream.core import ShardCore
from ray_lance_stream.errors import StreamClosedError
from ray_lance_stream.gone import when_gone
from ray_lance_stream.source import BlockSource
from ray_lance_stream.state import StreamState
from ray_lance_stream.stats import RunProgress
from ray_lance_stream.topology import Seat

logger = logging.getLogger("ray_lance_stream")
NAMESPACE: Final = "ray_lance_stream"
_COORDINATOR: Final = ".coordinator"  # ends of the actors' names
_MANAGER: Final = ".manager"
_POLL_S: Final = 0.5  # how soon a wait for other replicas notices that nobody wants its answer any more
_MANY_CALLS: Final = 100_000  # concurrent calls an async actor takes: every rank may wait in one


@dataclass(frozen=True)
class Session:
    """Handles to a run's actors; picklable, so that every worker of the run shares them."""

    session_id: str
    coordinator: Any
    manager: Any
    prefetch: PrefetchConfig
    recipe: Parcel = field(repr=False)  # held so that a restarted actor finds it

    def begin(self) -> int:
        """Starts a new incarnation and returns its id; see :meth:`begin_group`."""
        return self.begin_group()[0]

    def begin_group(self) -> tuple[int, int]:
        """Starts a new incarnation; returns its id, and how many there were before. Waits for a prefetcher.

        Raises:
            PlacementError: No prefetcher could be placed in time.
        """
        # Time makes ids grow even if the coordinator was restarted and has forgotten the last one.
        begun = self.coordinator.begin.remote(time.time_ns())
        waiting = [begun]
        while waiting:  # placing prefetchers may take longer than actors live without a lease
            self.renew("driver")
            _, waiting = ray.wait(waiting, timeout=self.prefetch.idle_timeout_s / 4)
        incarnation, before = answer_of(begun)
        answer_of(self.manager.begin.remote(incarnation))
        return incarnation, before

    def renew(self, holder: str) -> list[ray.ObjectRef[Any]]:
        """Takes or renews a holder's lease on both actors. Does not wait."""
        return [a.renew.options(max_task_retries=0).remote(holder) for a in (self.coordinator, self.manager)]

    def is_alive(self, timeout_s: float) -> bool:
        """Whether the actors live; renews their leases.

        Slow ones, that do not answer in time, live too, and so do those that Ray is just starting again.
        """
        try:
            ray.get(self.renew("driver"), timeout=timeout_s)
        except ActorDiedError:
            return False
        except RayError:
            return True
        return True

    def kill(self) -> None:
        """Ends all actors of the session at once; the prefetchers go with the coordinator."""
        if not ray.is_initialized():
            return  # they ended with the connection; ray.kill would start a Ray of its own
        for actor in (self.coordinator, self.manager):
            with contextlib.suppress(RayError):
                ray.kill(actor, no_restart=True)


def start_session(config: StreamConfig, recipe: Parcel) -> Session:
    """Starts a coordinator and a state manager on this node. Does not wait for them.

    Args:
        config: The stream.
        recipe: A ``block.BlockRecipe``, which only prefetchers open.

    They belong to the calling process, and end with it, or when nobody has needed them for
    ``idle_timeout_s``.
    """
    session_id = f"{config.stream_id}.{uuid.uuid4().hex[:8]}"
    # Hard: a soft affinity says nothing of actors that reserve nothing, and they would be on any node that may go.
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    options: dict[str, Any] = {
        "num_cpus": 0,
        "namespace": NAMESPACE,
        "max_restarts": -1,
        "max_task_retries": -1,
        "max_concurrency": _MANY_CALLS,
        "scheduling_strategy": here,
    }
    remote: Any = ray.remote  # its hints take the async methods for plain functions
    coordinator = (
        remote(Coordinator)
        .options(**options, name=f"{session_id}{_COORDINATOR}")
        .remote(session_id, recipe, config.identity.version, config.prefetch)
    )
    manager = (
        remote(StateManager)
        .options(**options, name=f"{session_id}{_MANAGER}")
        .remote(session_id, config.prefetch.idle_timeout_s)
    )
    session = Session(session_id, coordinator, manager, config.prefetch, recipe)
    session.renew("driver")
    return session


def end_sessions(stream_id: str) -> None:
    """Ends every session of a stream on the cluster this process is connected to."""
    for kind in (_COORDINATOR, _MANAGER):
        for actor in _actors_of(stream_id, kind).values():
            with contextlib.suppress(RayError):
                ray.kill(actor, no_restart=True)


def progress_of(stream_id: str, timeout_s: float) -> list[RunProgress]:
    """Returns where every run of a stream stands; runs whose manager does not answer in time are left out."""
    progress = []
    coordinators = coordinators_of(stream_id)
    for session_id, manager in managers_of(stream_id).items():
        sizes = [coordinators[session_id].sizes] if session_id in coordinators else []
        asked, *more = [method.options(max_task_retries=0).remote() for method in (manager.where, *sizes)]
        with contextlib.suppress(RayError):
            found: RunProgress = ray.get(asked, timeout=timeout_s)
            progress.append(found)
            with contextlib.suppress(RayError):  # the run stands where it stands, whether that is known or not
                progress[-1] = replace(found, prefetchers=next(iter(ray.get(more, timeout=timeout_s)), ()))
    return progress


def coordinators_of(stream_id: str) -> dict[str, Any]:
    """Returns the living coordinators of a stream, or of every stream if that is empty, by session."""
    return _actors_of(stream_id, _COORDINATOR)


def managers_of(stream_id: str) -> dict[str, Any]:
    """Returns the living state managers likewise."""
    return _actors_of(stream_id, _MANAGER)


def _actors_of(stream_id: str, kind: str) -> dict[str, Any]:
    """The living actors of a kind of every session of a stream, by session."""
    if not ray.is_initialized():
        return {}
    found = {}
    for entry in ray.util.list_named_actors(all_namespaces=True):
        name = entry["name"]
        ours = entry["namespace"] == NAMESPACE and name.endswith(kind)
        if ours and (not stream_id or name.startswith(f"{stream_id}.")):
            with contextlib.suppress(ValueError):  # it ended in between
                found[name.removesuffix(kind)] = ray.get_actor(name, namespace=NAMESPACE)
    return found


class RayLink:
    """Connects a shard to a session's actors; see ``link.Link``.

    Args:
        session: The actors.
        owned: Whether they belong to this shard alone and end with it.
        agreement: How replicas find the common end of an epoch; by default through the session's manager.
    """

    _source_type: type[RaySource] = RaySource

    def __init__(self, session: Session, *, owned: bool, agreement: Agreement | None = None) -> None:
        self.session = session
        self._owned = owned
        self._stop = threading.Event()
        self._holder = uuid.uuid4().hex
        self._memory = Memory()
        self._announcer = Announcer(session.manager, self._stop)
        self._partial = False
        self._agreement = agreement
        self._source: RaySource | None = None

    def hold(self) -> None:
        """Takes a lease and renews it until the link is closed or dropped: from now on the actors are needed."""
        keep_alive(self.session, self._holder, self._stop, self._memory)
        when_gone(self, self._stop.set)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild_link, (self._without_recipe(), self._owned)

    def _without_recipe(self) -> Session:
        """The session for other processes: they have no use for the recipe, nor for the credentials in it."""
        return replace(self.session, recipe=Parcel(None, []))

    def open_source(self, config: StreamConfig, seat: Seat) -> BlockSource:
        """See ``Link``."""
        if not self.session.is_alive(config.prefetch.placement_timeout_s):
            raise StreamClosedError("the stream's actors have ended; open the stream again")
        self._partial = config.is_uneven and seat.replica.dp_size > 1
        source = self._source = self._source_type(
            self.session.coordinator, seat.incarnation, retry_window_s=config.prefetch.retry_window_s
        )
        source.keep_reporting(self._holder)
        return source

    def restored_state(self, config: StreamConfig, seat: Seat) -> StreamState | None:
        """See ``Link``; outside Ray Train there is no checkpoint of the run."""
        del config, seat
        return None

    def opened(self, shard: ShardCore) -> None:
        """See ``Link``; the coordinator hears of the shard from now on."""
        if self._source is not None:
            self._source.look_at(shard, self._run_name())

    def _run_name(self) -> str:
        return ""

    def announce(self, seat: Seat, step: int, state: StreamState) -> None:
        """See ``Link``; sent and not waited for."""
        standing = Standing(state.epoch, step, state, self._partial)
        self._memory.stand(seat, standing)
        self._announcer.tell(seat, standing)

    def agree(self, seat: Seat, epoch: int, cycle: int, servable: int, stop: threading.Event) -> int:
        """See ``Link``; asks the state manager, which waits until all replicas have said it."""
        if not seat.shared or seat.replica.dp_size == 1:
            return servable
        if self._agreement is not None:
            return self._agreement.least(epoch, cycle, servable, stop)
        if self._owned:
            return servable  # a session of its own: the other replicas are not in it
        said = self._memory.say(seat, (epoch, cycle), servable)
        ref = self.session.manager.agree.remote(seat, said, (epoch, cycle))
        while not ray.wait([ref], timeout=_POLL_S)[0]:
            if stop.is_set():
                raise StreamClosedError("this iteration of the shard has ended")
        answer: int = answer_of(ref)
        return answer

    def commit(self, seat: Seat, number: int, standing: Standing | None) -> StreamState | None:
        """Reports to the manager, and returns the state that all ranks agree on; see ``StateManager.commit``."""
        self._memory.report(seat, number, standing)
        self._announcer.flush()
        merged: StreamState | None = answer_of(self.session.manager.commit.remote(seat, number, standing))
        return merged

    def collect(self, seat: Seat, standing: Standing, timeout_s: float) -> StreamState:
        """Returns the state of all ranks after this one's step; see ``StateManager.collect``."""
        self._memory.stand(seat, standing)
        self._announcer.flush()
        merged: StreamState = answer_of(self.session.manager.collect.remote(seat, standing, timeout_s))
        return merged

    def close(self) -> None:
        """See ``Link``."""
        self._announcer.flush()
        self._stop.set()
        self._announcer.wake()
        if self._agreement is not None:
            self._agreement.close()
        if self._owned:
            self.session.kill()
            return
        if not ray.is_initialized():
            return
        for actor in (self.session.coordinator, self.session.manager):
            actor.release.options(max_task_retries=0).remote(self._holder)


def _rebuild_link(session: Session, owned: bool) -> RayLink:
    link = RayLink(session, owned=owned)
    link.hold()
    return link
