"""How the coordinator has a plan opened, without a cluster: prefetchers are small objects that answer when told to."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError

from ray_lance_stream.cluster import coordinator as coordinator_module
from ray_lance_stream.cluster.coordinator import Coordinator
from ray_lance_stream.cluster.hand import Hand
from ray_lance_stream.errors import TransformError

SPEC: Any = SimpleNamespace()
PATIENCE_S = 0.02


class Pool:
    """Prefetchers, and the plans they were asked for."""

    def __init__(self, size: int) -> None:
        self.hands = [Hand(None, index, str(index), node="n", answers=True) for index in range(size)]
        self.asked: list[int] = []
        self.answers: dict[int, asyncio.Future[Any]] = {}
        self.coordinator = Coordinator.__new__(Coordinator)
        self.coordinator._turn = 0
        roster: Any = SimpleNamespace(ready=self.hands, tend=lambda: None)
        self.coordinator._roster = roster

    async def open_at(self, hand: Hand, *_: Any) -> Any:
        self.asked.append(hand.index)
        self.answers[hand.index] = asyncio.get_running_loop().create_future()
        return await self.answers[hand.index]

    async def until_asked(self, count: int) -> None:
        while len(self.asked) < count:
            await asyncio.sleep(PATIENCE_S / 10)


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    def run(size: int, story: Callable[[Pool], Coroutine[Any, Any, None]]) -> tuple[Any, Pool]:
        async def opening() -> tuple[Any, Pool]:
            pool = Pool(size)
            monkeypatch.setattr(coordinator_module, "_open_at", pool.open_at)
            task = asyncio.ensure_future(pool.coordinator._open_somewhere(SPEC, ()))
            await asyncio.wait_for(story(pool), 30)
            (found,) = await asyncio.wait_for(asyncio.gather(task, return_exceptions=True), 30)
            return found, pool

        return asyncio.run(opening())

    monkeypatch.setattr(coordinator_module, "_PLAN_PATIENCE_S", PATIENCE_S)
    return run


def test_one_more_is_asked_where_it_takes_long_and_no_third_one(play: Callable[..., Any]) -> None:
    async def story(pool: Pool) -> None:
        await pool.until_asked(2)
        await asyncio.sleep(3 * PATIENCE_S)  # the patience is twice as long by now
        pool.answers[pool.asked[0]].set_result("plan")

    found, pool = play(4, story)
    assert found == "plan" and len(set(pool.asked)) == len(pool.asked) == 2


def test_others_are_asked_where_those_hang(play: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(pool: Pool) -> None:
        await pool.until_asked(2)
        for index in pool.asked:
            pool.hands[index].answers = False
        await pool.until_asked(3)
        pool.answers[pool.asked[-1]].set_result("plan")

    monkeypatch.setattr(coordinator_module, "_MUCH_LONGER", 10**9)  # that is not why
    found, pool = play(4, story)
    assert found == "plan" and len(set(pool.asked)) == 3


def test_a_third_one_is_asked_in_the_end_though_the_others_answer(play: Callable[..., Any]) -> None:
    async def story(pool: Pool) -> None:
        await pool.until_asked(3)
        pool.answers[pool.asked[2]].set_result("plan")

    found, pool = play(4, story)
    assert found == "plan" and len(set(pool.asked)) == 3


def test_one_that_is_lost_while_another_works_on_it_is_not_missed(play: Callable[..., Any]) -> None:
    async def story(pool: Pool) -> None:
        await pool.until_asked(2)
        pool.answers[pool.asked[0]].set_exception(ActorDiedError())
        await asyncio.sleep(PATIENCE_S / 2)
        pool.answers[pool.asked[1]].set_result("plan")

    found, pool = play(2, story)
    assert found == "plan" and len(pool.asked) == 2


def test_when_all_are_lost_or_one_fails_that_is_the_answer(play: Callable[..., Any]) -> None:
    lost = ActorDiedError()

    async def all_lost(pool: Pool) -> None:
        await pool.until_asked(2)
        pool.answers[0].set_exception(ActorDiedError())
        pool.answers[1].set_exception(lost)

    async def failed(pool: Pool) -> None:
        await pool.until_asked(2)
        pool.answers[1].set_exception(TransformError("bad"))

    assert isinstance(play(2, all_lost)[0], ActorDiedError)
    assert isinstance(play(2, failed)[0], TransformError)
