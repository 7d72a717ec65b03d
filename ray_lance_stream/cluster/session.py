"""A session: the actors of one stream in one run, and a shard's connection to them."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import uuid
import weakref
from dataclasses import dataclass
from typing import Any, Final

import ray
from ray.exceptions import RayActorError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ray_lance_stream.cluster.coordinator import Coordinator
from ray_lance_stream.cluster.manager import StateManager
from ray_lance_stream.cluster.parcel import Parcel
from ray_lance_stream.cluster.source import RaySource, _call
from ray_lance_stream.config import PrefetchConfig, StreamConfig
from ray_lance_stream.errors import StreamClosedError
from ray_lance_stream.shard import StreamShard
from ray_lance_stream.source import BlockSource
from ray_lance_stream.state import StreamState
from ray_lance_stream.topology import Seat

logger = logging.getLogger("ray_lance_stream")
NAMESPACE: Final = "ray_lance_stream"
_MANY_CALLS: Final = 1000  # concurrent calls an async actor takes: every rank may wait in one


@dataclass(frozen=True)
class Session:
    """Handles to a run's actors; picklable, so that every worker of the run shares them."""

    session_id: str
    coordinator: Any
    manager: Any
    prefetch: PrefetchConfig
    recipe: Parcel  # held so that a restarted actor finds it

    def begin(self) -> int:
        """Starts a new incarnation and returns its id. Waits for a prefetcher.

        Raises:
            PlacementError: No prefetcher could be placed in time.
        """
        # Time makes ids grow without anybody having to remember the last one.
        incarnation = time.time_ns()
        _call(self.coordinator.begin.remote(incarnation))
        _call(self.manager.begin.remote(incarnation))
        return incarnation

    def is_alive(self, timeout_s: float) -> bool:
        """Whether both actors answer within the timeout; renews their lives if so."""
        calls = [actor.renew.options(max_task_retries=0).remote("driver") for actor in (self.coordinator, self.manager)]
        try:
            ray.get(calls, timeout=timeout_s)
        except RayError:
            return False
        return True

    def kill(self) -> None:
        """Ends all actors of the session at once; the prefetchers go with the coordinator."""
        for actor in (self.coordinator, self.manager):
            with contextlib.suppress(RayActorError):
                ray.kill(actor, no_restart=True)


def start_session(config: StreamConfig) -> Session:
    """Starts a coordinator and a state manager on this node. Does not wait for them.

    They belong to the calling process, and end with it, or when nobody has needed them for
    ``idle_timeout_s``.
    """
    recipe = Parcel.pack(config.recipe)
    session_id = f"{config.stream_id}.{uuid.uuid4().hex[:8]}"
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
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
        .options(**options, name=f"{session_id}.coordinator")
        .remote(session_id, recipe, config.prefetch)
    )
    manager = (
        remote(StateManager)
        .options(**options, name=f"{session_id}.manager")
        .remote(session_id, config.prefetch.idle_timeout_s)
    )
    for actor in (coordinator, manager):
        actor.renew.remote("driver")
    return Session(session_id, coordinator, manager, config.prefetch, recipe)


def end_sessions(stream_id: str) -> None:
    """Ends every session of a stream on the cluster this process is connected to."""
    if not ray.is_initialized():
        return
    for entry in ray.util.list_named_actors(all_namespaces=True):
        if entry["namespace"] == NAMESPACE and entry["name"].startswith(f"{stream_id}."):
            with contextlib.suppress(ValueError, RayActorError):
                ray.kill(ray.get_actor(entry["name"], namespace=NAMESPACE), no_restart=True)


class RayLink:
    """Connects a shard to a session's actors; see ``link.Link``.

    Args:
        session: The actors.
        owned: Whether they belong to this shard alone and end with it.
    """

    def __init__(self, session: Session, *, owned: bool) -> None:
        self.session = session
        self._owned = owned
        self._stop = threading.Event()
        self._holder = uuid.uuid4().hex

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild_link, (type(self), self.session, self._owned)

    def open_source(self, config: StreamConfig, seat: Seat) -> BlockSource:
        """See ``Link``."""
        if not self.session.is_alive(config.prefetch.placement_timeout_s):
            raise StreamClosedError("the stream's actors have ended; open the stream again")
        _keep_alive(self.session, self._holder, self._stop)
        weakref.finalize(self, self._stop.set)  # a shard that is dropped without close() lets its lease lapse
        return RaySource(self.session.coordinator, seat.incarnation, retry_window_s=config.prefetch.retry_window_s)

    def restored_state(self, config: StreamConfig, seat: Seat) -> StreamState | None:
        """See ``Link``; outside Ray Train there is no checkpoint of the run."""
        del config, seat
        return None

    def opened(self, shard: StreamShard) -> None:
        """See ``Link``."""

    def announce(self, seat: Seat, step: int, state: StreamState) -> None:
        """See ``Link``; sent and not waited for."""
        push = self.session.manager.push.options(max_task_retries=0)  # one that is lost is followed by others
        push.remote(seat, state.epoch, step, state)

    def close(self) -> None:
        """See ``Link``."""
        self._stop.set()
        if self._owned:
            self.session.kill()
            return
        for actor in (self.session.coordinator, self.session.manager):
            actor.release.options(max_task_retries=0).remote(self._holder)


def _rebuild_link(kind: type[RayLink], session: Session, owned: bool) -> RayLink:
    return kind(session, owned=owned)


def _keep_alive(session: Session, holder: str, stop: threading.Event) -> None:
    """Renews the leases until ``stop`` is set, on a thread that refers to nothing else of the shard."""

    def renew() -> None:
        while not stop.is_set() and ray.is_initialized():
            for actor in (session.coordinator, session.manager):
                actor.renew.options(max_task_retries=0).remote(holder)
            stop.wait(session.prefetch.idle_timeout_s / 4)

    threading.Thread(target=renew, name="lance-stream-lease", daemon=True).start()
