"""cluster/roster.py without a cluster: its prefetchers are small objects, and time passes when it is told to."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, RuntimeEnvSetupError

from ray_lance_stream import PrefetchConfig
from ray_lance_stream.cluster import roster as roster_module
from ray_lance_stream.cluster.overview import with_places
from ray_lance_stream.cluster.reports import PoolView, Report
from ray_lance_stream.cluster.roster import Roster
from ray_lance_stream.cluster.sightings import Workload
from ray_lance_stream.cluster.sizing import Load
from ray_lance_stream.observing import Sight
from ray_lance_stream.stats import RankStats, RunProgress, ShardStats, StreamStats
from ray_lance_stream.topology import Seat

STARVED = Load(waited=1.0, requests=100.0)
FULL = Load(waited=0.0, requests=0.0)


class Actor:
    """A prefetcher: pending until it has a node."""

    def __init__(self, index: int) -> None:
        self.id = f"{index}"
        self.index = index
        self.placed = asyncio.Event()
        self.node = ""
        self.error: Exception | None = None
        self.fences: list[int] = []
        self.work: dict[str, Any] = {}

        async def fence(incarnation: int) -> None:
            self.fences.append(incarnation)

        self.workload = SimpleNamespace(remote=self._workload)
        self.fence = SimpleNamespace(remote=fence)

    async def _workload(self, run: str, stream: str) -> Workload:
        assert (run, stream) in {("", ""), ("r", "train")}
        await self.placed.wait()
        if self.error is not None:
            raise self.error
        return Workload(node=self.node, pid=self.index, **self.work)


class World:
    """The roster, its actors, a clock, and consumers that learn who is in the pool from the answers alone."""

    def __init__(self, config: PrefetchConfig) -> None:
        self.now = 1000.0
        self.actors: list[Actor] = []
        self.killed: list[Actor] = []
        self.views: dict[str, PoolView] = {}
        self.roster = Roster(config, self.start, lambda actor: str(actor.id))
        self.roster.begin(1)
        self.roster.tend()

    def start(self, index: int) -> Actor:
        actor = Actor(index)
        actor.id = f"{index}.{len(self.actors)}"
        self.actors.append(actor)
        return actor

    def kill(self, actor: Actor, *, no_restart: bool) -> None:
        assert no_restart
        self.killed.append(actor)
        actor.error = ActorDiedError()
        actor.placed.set()

    @property
    def living(self) -> list[Actor]:
        return [actor for actor in self.actors if actor not in self.killed]

    async def place(self, *nodes: str) -> None:
        """Gives those that are pending a node each, as far as there are."""
        for actor, node in zip([a for a in self.living if not a.placed.is_set()], nodes, strict=False):
            actor.node = node
            actor.placed.set()
        await settle()

    def report(
        self,
        holder: str,
        load: Load,
        *,
        busy: frozenset[str] = frozenset(),
        incarnation: int = 1,
        node: str = "trainer",
        sight: Sight | None = None,
    ) -> PoolView:
        known = self.views.get(holder)
        may_ask = busy | frozenset(a.id for a in (known.members if known else []))
        life = known.life if known else ""
        report = Report(
            holder=holder,
            incarnation=incarnation,
            node=node,
            load=load,
            may_ask=may_ask,
            life=life,
            run="r",
            sight=sight,
            asked_of=busy,
        )
        self.views[holder] = self.roster.hear(report)
        return self.views[holder]

    async def pass_time(self, seconds: int, **loads: Load) -> None:
        for _ in range(seconds):
            self.now += 1
            for holder, load in loads.items():
                self.report(holder, load)
            self.roster.decide()
            self.roster.tend()
            await settle()


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def play(monkeypatch: pytest.MonkeyPatch, config: PrefetchConfig, story: Callable[[World], Awaitable[None]]) -> World:
    async def run() -> World:
        world = World(config)
        monkeypatch.setattr("ray.kill", world.kill)
        monkeypatch.setattr(roster_module, "time", SimpleNamespace(monotonic=lambda: world.now, time=lambda: world.now))
        await story(world)
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        return world

    monkeypatch.setattr(roster_module, "_PROBE_EVERY_S", 0.0)
    monkeypatch.setattr(roster_module, "_RETRY_PAUSE_S", 0.0)
    return asyncio.run(run())


ELASTIC = PrefetchConfig(num_actors=(1, 8), shrink_after_s=10)


def test_pending_ones_are_few_the_stream_goes_on_and_they_are_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(world: World) -> None:
        await world.place("a")
        await world.pass_time(100, one=STARVED)
        assert len(world.living) == 2  # one runs, one is asked for
        assert [a.index for a in world.views["one"].members] == [0]
        await world.pass_time(9, one=FULL)
        assert not world.killed
        await world.pass_time(2, one=FULL)
        assert [actor.index for actor in world.killed] == [1]
        assert [(size.running, size.wanted) for size in world.roster.sizes()] == [(1, 1), (1, 2), (1, 1)]

    play(monkeypatch, ELASTIC, story)


def test_it_grows_as_nodes_come(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(world: World) -> None:
        await world.place("a")
        sizes = []
        for _ in range(5):
            await world.pass_time(4, one=STARVED)
            sizes.append(len(world.living))
            await world.place(*"bcdefgh")
        assert sizes == [2, 4, 8, 8, 8]
        assert [actor.index for actor in world.living] == list(range(8))
        assert all(actor.fences == [1] for actor in world.living)  # before anybody may ask it
        assert len(world.report("one", STARVED).members) == 8

    play(monkeypatch, ELASTIC, story)


def test_a_retired_one_ends_when_nobody_may_ask_it_or_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(world: World) -> None:
        await world.pass_time(10, one=FULL, other=FULL)
        assert world.roster.size == 2
        await world.pass_time(1, one=FULL, other=FULL)
        assert world.roster.size == 1
        (retired,) = {a.id for a in world.actors} - {hand.id for hand in world.roster.ready}
        for _ in range(4):  # one of them waits for an answer of it; the other one has not been heard of
            world.now += 1
            world.report("one", FULL, busy=frozenset({retired}))
            world.roster.decide()
        assert not world.killed
        for _ in range(3):
            world.now += 1
            world.report("one", FULL)
            world.roster.decide()
        assert not world.killed
        world.report("other", FULL)  # with what it knew
        world.roster.decide()
        assert not world.killed
        world.now += 1
        world.report("other", FULL)
        world.roster.decide()
        assert [actor.id for actor in world.killed] == [retired]

    play(monkeypatch, PrefetchConfig(num_actors=(1, 2), shrink_after_s=10), _after_growing_to_two(story))


def _after_growing_to_two(story: Callable[[World], Awaitable[None]]) -> Callable[[World], Awaitable[None]]:
    async def longer(world: World) -> None:
        await world.place("a")
        await world.pass_time(3, one=STARVED, other=FULL)
        await world.place("a")
        assert world.roster.size == 2
        await story(world)

    return longer


def test_consumers_that_are_gone_do_not_hold_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(world: World) -> None:
        await world.pass_time(12, one=FULL)  # the other one was killed
        assert world.roster.size == 1 and not world.killed
        await world.pass_time(4, one=FULL)
        assert len(world.killed) == 1

    play(monkeypatch, PrefetchConfig(num_actors=(1, 2), shrink_after_s=10), _after_growing_to_two(story))


def test_one_that_is_being_let_go_is_taken_back_when_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(world: World) -> None:
        await world.pass_time(11, one=FULL, other=FULL)
        assert world.roster.size == 1
        for _ in range(4):
            world.now += 1
            for holder in ("one", "other"):
                world.report(holder, STARVED, busy=frozenset(a.id for a in world.actors))
            world.roster.decide()
        assert world.roster.size == 2
        assert len(world.actors) == 2 and not world.killed

    play(monkeypatch, PrefetchConfig(num_actors=(1, 2), shrink_after_s=10), _after_growing_to_two(story))


def test_nodes_become_empty_one_after_the_other_and_those_that_are_lost_go_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def story(world: World) -> None:
        await world.place("a", "a", "a")
        await world.pass_time(3, one=STARVED)
        await world.place("b", "b", "c")
        world.actors[0].error = ActorUnavailableError("", bytes(16))
        await settle()
        assert len(world.roster.ready) == 6  # it may be back in a moment
        await world.pass_time(40, one=FULL)
        assert world.actors[0] in world.killed
        assert [actor.node for actor in world.living] == ["a", "a", "b"]

    play(monkeypatch, PrefetchConfig(num_actors=(3, 6), shrink_after_s=10), story)


def test_reports_of_older_incarnations_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(world: World) -> None:
        await world.place("a")
        world.report("new", FULL, incarnation=2)  # to a coordinator that was restarted and knows of no begin
        for _ in range(10):
            world.now += 1
            assert len(world.report("old", STARVED, incarnation=1).members) == 1
            world.roster.decide()
        assert world.roster.size == 1
        for _ in range(3):
            world.now += 1
            world.report("new", STARVED, incarnation=2)
            world.roster.decide()
        assert world.roster.size == 2

    play(monkeypatch, ELASTIC, story)


def test_after_a_restart_it_begins_with_as_many_as_consumers_knew(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(world: World) -> None:
        await world.place("a")
        dead = Report(
            holder="one",
            incarnation=1,
            node="n",
            load=FULL,
            may_ask=frozenset({"x", "y", "z"}),
            life="of the one before",
        )
        world.roster.hear(dead)
        world.roster.decide()
        assert world.roster.size == 3
        world.roster.decide()
        assert world.roster.size == 3

    play(monkeypatch, ELASTIC, story)


def test_one_that_cannot_start_is_replaced_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(world: World) -> None:
        await world.place("a")
        await world.pass_time(3, one=STARVED)
        broken = world.actors[-1]
        broken.error = RuntimeEnvSetupError("no such package")
        broken.placed.set()
        await world.pass_time(30, one=STARVED)
        assert len(world.actors) == 2 and len(world.roster.broken) == 1
        assert [a.index for a in world.views["one"].members] == [0]
        await world.pass_time(20, one=STARVED)
        assert len(world.actors) == 3 and not world.roster.broken
        assert world.killed == [broken] and world.actors[-1].index != broken.index  # which says where it is placed
        world.actors[-1].error = RuntimeEnvSetupError("no such package")
        world.actors[-1].placed.set()
        await world.pass_time(12, one=FULL)
        assert world.killed == world.actors[1:] and not world.roster.broken

    play(monkeypatch, ELASTIC, story)


def test_one_that_worked_and_cannot_start_again_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(world: World) -> None:
        await world.place("a")
        await world.pass_time(3, one=STARVED)
        await world.place("b")
        await world.pass_time(3, one=STARVED)
        assert {a.index for a in world.views["one"].members} == {0, 1}
        world.actors[0].error = RuntimeEnvSetupError("the package is gone")
        await asyncio.sleep(2 * roster_module._PROBE_EVERY_S)
        await world.pass_time(2, one=STARVED)
        assert [a.index for a in world.views["one"].members] == [1]
        await world.pass_time(31, one=STARVED)
        assert world.killed == world.actors[:1]
        await world.place(*"cdefgh")
        await world.pass_time(2, one=STARVED)
        assert world.actors[0] not in world.views["one"].members and len(world.views["one"].members) >= 2

    monkeypatch.setattr(roster_module, "_PROBE_EVERY_S", 0.01)
    play(monkeypatch, ELASTIC, story)


def test_those_on_the_consumers_node_are_preferred_where_they_have_time_for_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def story(world: World) -> None:
        await world.place("a", "b")
        for holder in ("1", "2"):
            assert world.report(holder, FULL, node="a").near == {world.actors[0].id}
        assert world.report("3", FULL, node="b").near == {world.actors[1].id}
        assert not world.report("4", FULL, node="elsewhere").near
        assert not world.report("5", FULL, node="a").near  # two blocks at a time, three consumers
        world.roster.forget("1")
        assert world.report("5", FULL, node="a").near == {world.actors[0].id}

    play(monkeypatch, PrefetchConfig(num_actors=2), story)


def test_it_tells_what_it_has_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """One prefetcher works and one waits for a node; a consumer takes 100 rows a second and waits half of the time."""

    async def story(world: World) -> None:
        assert world.roster.stats().verdict.startswith("nothing is known yet")
        await world.place("a")
        for second in range(60):
            world.now += 1
            world.actors[0].work = {"rows": 100 * second, "busy_s": 0.9 * second, "take_s": 0.1 * second}
            world.report("one", STARVED, sight=sight(rows=100 * second, wait_s=0.5 * second), busy=frozenset({"0.0"}))
            await settle()
        await world.pass_time(2)
        stats = world.roster.stats()
        assert (stats.run, stats.stream, stats.world_size, stats.restarts, stats.wanted) == ("r", "train", 1, 2, 2)
        (rank,) = stats.ranks
        assert (rank.rows, rank.rows_per_s, rank.wait_share, rank.silent_s) == (5900, 100.0, 0.5, 2.0)
        assert (rank.epoch, rank.step, rank.node, rank.asked_of) == (1, 3, "trainer", (0,))
        first, other = stats.prefetchers
        assert (first.state, first.node, first.rows, first.take_share) == ("idle", "a", 5900, 1.0)
        assert first.busy_s_per_row == pytest.approx(0.009)
        assert (other.state, other.node) == ("starting", "")
        world.roster.begin(2)
        assert (world.roster.stats().ranks, world.roster.stats().world_size, world.roster.stats().run) == ((), 0, "r")

    play(monkeypatch, PrefetchConfig(num_actors=2), story)


def test_the_manager_knows_places_first() -> None:
    run = StreamStats(
        world_size=2, ranks=(RankStats(rank=0, epoch=1, step=4, rows=9), RankStats(rank=1, epoch=1, step=6))
    )
    progress = RunProgress(name="train", world_size=3, ranks={0: (2, 0), 1: (1, 5), 2: (1, 6)})
    found = with_places(run, progress)
    assert [(r.rank, r.epoch, r.step, r.rows) for r in found.ranks] == [(0, 2, 0, 9), (1, 1, 6, 0), (2, 1, 6, 0)]
    assert (found.stream, found.world_size, found.ranks[2].silent_s) == ("train", 2, math.inf)


def sight(**numbers: float) -> Sight:
    stats: dict[str, Any] = {"batches": 1, "train_s": 1.0, "buffered_bytes": 1, "retries": 0} | numbers
    return Sight(seat=Seat(restarts=2), epoch=1, step=3, num_steps=9, stats=ShardStats(**stats))
