"""The coordinator: plans, the pool of prefetchers, and the leases that keep them."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import time
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError

from ray_lance_stream.cluster.answers import cause_of
from ray_lance_stream.cluster.examiner import Examiner, Findings
from ray_lance_stream.cluster.hand import Hand
from ray_lance_stream.cluster.leases import Leases
from ray_lance_stream.cluster.metrics import PoolMetrics
from ray_lance_stream.cluster.parcel import Parcel
from ray_lance_stream.cluster.placement import actor_options, describe_nodes, describe_request, extra_options
from ray_lance_stream.cluster.prefetcher import CONCURRENCY_GROUPS, Prefetcher
from ray_lance_stream.cluster.reports import PoolView, Report
from ray_lance_stream.cluster.roster import Roster
from ray_lance_stream.config import PrefetchConfig
from ray_lance_stream.errors import LanceStreamError, PlacementError, explain
from ray_lance_stream.plan import OrderSpec, PlanSpec, TableIdentity
from ray_lance_stream.request import PlanHandle, Ranges
from ray_lance_stream.sifting import SkippedRow
from ray_lance_stream.stats import PoolSize, StreamStats

cluster_nodes: Any = ray.nodes  # untyped
logger = logging.getLogger("ray_lance_stream")
_RETRY_PAUSE_S = 0.5
_PLANS_KEPT = 4
_LOST_BEFORE_EXAMINED = 3  # prefetchers that were lost while they opened a plan, before its first rows are suspected
_MORE_EXAMINED = 4  # where all of the first rows are left out, so many times as many are built
_PLAN_PATIENCE_S = 5.0  # opening takes a second or less; with a filter longer, and is then done twice; doubles
_MUCH_LONGER = 6  # times as long two may take for a plan, which answer otherwise, before a third is asked
_FENCE_WAIT_S = 2.0  # an answer takes a millisecond; a node that is lost needs longer to be noticed


class Coordinator:
    """One per run and stream. Everything it knows can be made again, so it may be restarted.

    An async actor: its methods run on one event loop, so its fields need no lock.
    """

    def __init__(self, session_id: str, recipe: Parcel, version: int, config: PrefetchConfig) -> None:
        self._session_id = session_id
        self._config = config
        self._leases = Leases(config.idle_timeout_s)
        self._plans: dict[tuple[TableIdentity, OrderSpec, int | None], asyncio.Task[PlanHandle]] = {}
        self._turn = 0
        self._metrics = PoolMetrics()
        # Ray's type hints do not know concurrency_groups.
        remote: Any = ray.remote
        actor = remote(concurrency_groups=CONCURRENCY_GROUPS, max_restarts=-1, max_task_retries=0)(Prefetcher)

        def start(index: int) -> Any:
            (options,) = actor_options(config, cluster_nodes(), [index])
            return actor.options(**options).remote(recipe, version, f"{session_id}/{index}")

        # The pool is owned by this actor: it cannot outlive it.
        self._roster = Roster(config, start, lambda prefetcher: str(prefetcher._actor_id.hex()))

        def extra() -> Any:
            options = extra_options(config, cluster_nodes()) | {"max_restarts": 0}
            return actor.options(**options).remote(recipe, None, f"{session_id}/examiner")

        self._examiner = Examiner(extra, config.placement_timeout_s)

    def __repr__(self) -> str:
        return f"Coordinator({self._session_id})"

    async def renew(self, holder: str) -> None:
        """Takes or renews a lease."""
        self._leases.renew(holder)

    async def release(self, holder: str) -> None:
        """Gives a lease back."""
        self._leases.release(holder)
        self._roster.forget(holder)

    async def pid(self) -> int:
        """Returns the process id on the coordinator's node."""
        return os.getpid()

    async def begin(self, proposed: int) -> tuple[int, int]:
        """Fences off older incarnations on every prefetcher, and waits for the first one to be there.

        Args:
            proposed: The new incarnation's id; a larger one is taken if the clock it came from went back.

        Returns:
            The id, and how many incarnations there were before.

        Raises:
            PlacementError: No prefetcher could be started within ``placement_timeout_s``.
        """
        incarnation = max(self._roster.incarnation + 1, proposed)
        before = self._roster.begin_group(incarnation)
        with self._leases.busy():
            await self._await_first()
            fenced = [
                asyncio.wrap_future(prefetcher.fence.remote(incarnation).future())
                for prefetcher in self._roster.started
            ]
            # One that is being restarted has no old requests to drop, and one that hangs must not hold up the
            # run: the first new request tells it as well.
            await asyncio.wait(fenced, timeout=_FENCE_WAIT_S)
        return incarnation, before

    async def pool(self) -> list[Any]:
        """Returns the handles of the prefetchers that have started, those that do not answer only if none does."""
        await self._await_first()
        return [hand.actor for hand in _answering(self._roster.ready)]

    async def report(self, report: Report) -> PoolView:
        """Hears how busy a consumer finds the pool, and tells it who is in the pool now."""
        self._roster.tend()
        view = self._roster.hear(report)
        self._metrics.tell(self._roster.stats)
        return view

    async def sizes(self) -> tuple[PoolSize, ...]:
        """Returns the size of the pool over time, the present one last."""
        return self._roster.sizes()

    async def stats(self) -> StreamStats:
        """Returns what is known of the run's workers and prefetchers."""
        return dataclasses.replace(self._roster.stats(), session=self._session_id)

    async def prefetchers(self) -> list[tuple[str, int]]:
        """Returns (node id, process id) of each prefetcher that answers now."""
        answers = await asyncio.gather(*(p.ready.remote() for p in await self.pool()), return_exceptions=True)
        return [answer for answer in answers if not isinstance(answer, BaseException)]

    async def ensure(self, spec: PlanSpec, lost: list[Any] | None = None) -> PlanHandle:
        """Opens a plan, or finds it open: built at most once at a time, safe to repeat.

        All epochs of a table version and order share what was counted and the list of matching rows.

        Args:
            spec: The plan.
            lost: The reference to a list of matching rows that was lost with its node, in a list. It is built
                again, once, whoever asks first.
        """
        key = (spec.table, spec.order, spec.epoch if spec.order.is_listed_per_epoch else None)
        task = self._plans.get(key)
        with self._leases.busy():
            if task is not None and task.done():
                failed = task.exception() is not None
                if failed or (lost and lost[0] == task.result().matching_rows):
                    task = None
            if task is None:
                task = asyncio.get_running_loop().create_task(self._open(spec))
                self._plans[key] = task
                for old in list(self._plans)[:-_PLANS_KEPT]:
                    del self._plans[old]
            return dataclasses.replace(await asyncio.shield(task), spec=spec)

    async def examine(self, handle: PlanHandle, ranges: Ranges) -> Findings:
        """Finds out whether a block kills the processes that build it; see ``Examiner.examine``."""
        with self._leases.busy():
            return await self._examiner.examine(handle, ranges)

    async def _open(self, spec: PlanSpec) -> PlanHandle:
        began, lost, examined = time.monotonic(), 0, 0
        deadly: tuple[SkippedRow, ...] = ()
        while True:
            try:
                return await self._open_somewhere(spec, deadly)
            except RayError as error:
                lost += isinstance(error, RayActorError)
                if lost >= _LOST_BEFORE_EXAMINED:
                    lost = 0
                    found = await self._deadly_among_first(spec, _MORE_EXAMINED**examined)
                    if set(found) - set(deadly):
                        deadly, began, examined = tuple(found), time.monotonic(), examined + 1
                        continue
                cause = cause_of(error)
                final = isinstance(cause, LanceStreamError) or not isinstance(cause, (OSError, RayError))
                if final or time.monotonic() - began > self._config.retry_window_s:
                    raise (cause if isinstance(cause, Exception) else error) from None
                logger.warning("opening a plan failed (%s); asking again", type(cause).__name__)
                await asyncio.sleep(_RETRY_PAUSE_S)

    async def _deadly_among_first(self, spec: PlanSpec, factor: int) -> list[SkippedRow]:
        """Examines the rows that opening a plan builds: the first of epoch 0, which fix the schema."""
        hand = await self._next_hand()
        try:
            with hand.used() as prefetcher:
                first_ref, rows_ref = prefetcher.count_plan.options(num_returns=2).remote(spec, factor)
                handle, ranges = await first_ref
        except RayError:
            return []  # lost, or an error, which opening the plan meets as well
        if spec.order.is_listed:
            handle = dataclasses.replace(handle, matching_rows=rows_ref)
        return (await self._examiner.examine(handle, ranges)).deadly

    async def _open_somewhere(self, spec: PlanSpec, deadly: tuple[SkippedRow, ...]) -> PlanHandle:
        """Asks a prefetcher, one more if that takes long, and others where those hang; the first answer counts.

        Raises:
            RayActorError: All that were asked were lost.
            RayTaskError: One of them has failed.
        """
        loop, patience_s = asyncio.get_running_loop(), _PLAN_PATIENCE_S
        asked: dict[asyncio.Task[PlanHandle], Hand] = {}
        hand: Hand | None = await self._next_hand()
        asked_at = loop.time()
        try:
            while True:
                if hand is not None:
                    asked[loop.create_task(_open_at(hand, spec, deadly))] = hand
                done, _ = await asyncio.wait(asked, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    if not (isinstance(task.exception(), RayActorError) and len(asked) > 1):
                        return task.result()
                    del asked[task]
                hand = None
                # A long list of rows takes as long on a third one. A process that hangs does not answer, either; of one
                # of whose threads hang, only time tells.
                alive = len(asked) > 1 and any(one.answers for one in asked.values())
                if not done and (not alive or loop.time() - asked_at > _MUCH_LONGER * patience_s):
                    hand = self._turn_of([ready for ready in self._roster.ready if ready not in asked.values()])
                    asked_at, patience_s = loop.time(), 2 * patience_s
        finally:
            for task in asked:
                task.cancel()

    async def _next_hand(self) -> Hand:
        """The prefetcher whose turn it is; waits for the first one."""
        await self._await_first()
        hand = self._turn_of(self._roster.ready)
        assert hand is not None
        return hand

    def _turn_of(self, hands: list[Hand]) -> Hand | None:
        """One after the other of those that answer; of all, if none does."""
        hands = _answering(hands)
        self._turn += 1
        return hands[self._turn % len(hands)] if hands else None

    async def _await_first(self) -> None:
        self._roster.tend()
        began = time.monotonic()
        while not self._roster.ready:
            broken = len(self._roster.broken) == self._roster.size
            if broken or time.monotonic() - began > self._config.placement_timeout_s:
                raise self._placement_error()
            await asyncio.sleep(0.02)

    def _placement_error(self) -> PlacementError:
        if self._roster.broken:
            return PlacementError(
                explain(
                    "prefetchers cannot start",
                    found=f"{self._roster.broken[0]}",
                    expected="the package, Lance and the transform's modules on the nodes they are placed on",
                    remedy="install them there, or pass runtime_env in PrefetchConfig",
                )
            )
        return PlacementError(
            explain(
                f"no prefetcher could be placed within {self._config.placement_timeout_s:.0f} s",
                found=f"nodes: {describe_nodes(cluster_nodes())}",
                expected=f"a node that has, for each of {self._config.min_actors}: {describe_request(self._config)}",
                remedy="label a node, add one, or change label_selector, num_cpus or resources in PrefetchConfig",
            )
        )


def _answering(hands: list[Hand]) -> list[Hand]:
    return [hand for hand in hands if hand.answers] or hands


async def _open_at(hand: Hand, spec: PlanSpec, deadly: tuple[SkippedRow, ...]) -> PlanHandle:
    with hand.used() as prefetcher:
        handle_ref, rows_ref = prefetcher.open_plan.options(num_returns=2).remote(spec, deadly)
        handle: PlanHandle = await handle_ref
    return handle if not spec.order.is_listed else dataclasses.replace(handle, matching_rows=rows_ref)
