"""The state manager as a real actor that is killed: what workers wait for, they get from the one that follows."""

from __future__ import annotations

import dataclasses
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import ray
from conftest import Tables
from runs import wait_until

from ray_lance_stream import LanceStream, LockstepError, PrefetchConfig
from ray_lance_stream.cluster.parcel import Parcel
from ray_lance_stream.cluster.session import RayLink, Session, start_session
from ray_lance_stream.cluster.told import STANDINGS_OF_INTEREST, Standing
from ray_lance_stream.counts import SplitCounts
from ray_lance_stream.position import Position
from ray_lance_stream.state import StreamState, merge_states
from ray_lance_stream.topology import Replica, Seat

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.usefixtures("one_node")]
RANKS = 3
SPLITS = 6


@pytest.fixture
def stream(tables: Tables) -> LanceStream:
    prefetch = PrefetchConfig(num_actors=1, placement_timeout_s=120)
    return tables.stream(403, num_splits=SPLITS, global_batch_size=12, on_transform_error="skip", prefetch=prefetch)


@pytest.fixture
def session(stream: LanceStream) -> Iterator[Session]:
    session = start_session(stream.config, Parcel.of(stream._recipe))
    yield session
    session.kill()


@pytest.fixture
def links(session: Session) -> Iterator[list[RayLink]]:
    links = [RayLink(session, owned=False) for _ in range(RANKS)]
    for link in links:
        link.hold()
    yield links
    for link in links:
        link.close()


def seat(rank: int) -> Seat:
    return Seat(replica=Replica(dp_rank=rank, dp_size=RANKS), world_rank=rank, world_size=RANKS, incarnation=7)


def standing(stream: LanceStream, rank: int, step: int) -> Standing:
    """Where a rank stands whose own splits have skipped a row for every row they gave; of others it knows nothing."""
    owned = seat(rank).replica.owned_splits(SPLITS)
    base = Position.start(stream.config).state()
    samples = SplitCounts(num_splits=SPLITS, base=2 * step)
    positions = SplitCounts.of([2 * step * (2 if split in owned else 1) for split in range(SPLITS)])
    state = dataclasses.replace(base, samples=samples, positions=positions)
    return Standing(0, step, state, partial=True)


def kill_manager(session: Session) -> None:
    pid = ray.get(session.manager.pid.remote())
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: bool(ray.get(session.manager.pid.remote()) != pid), 60, "another manager")


def whole(stream: LanceStream, step: int) -> StreamState:
    merged = merge_states([standing(stream, rank, step).state for rank in range(RANKS)])
    assert merged.positions.to_list() == [4 * step] * SPLITS
    return merged


def test_steps_faster_than_calls_are_told_in_groups_and_none_is_missing(
    stream: LanceStream, session: Session, links: list[RayLink]
) -> None:
    steps = 24  # fewer than the manager remembers
    ray.get(session.manager.pid.remote())  # what it is sent before it has started may come in another order
    for step in range(1, steps + 1):
        for rank in (1, 2):
            links[rank].announce(seat(rank), step, standing(stream, rank, step).state)
    for step in (1, steps // 2, steps):
        merged = links[0].collect(seat(0), standing(stream, 0, step), timeout_s=30)
        assert merged == merge_states([standing(stream, rank, step).state for rank in range(RANKS)])
    links[1].announce(seat(1), steps + 1, standing(stream, 1, steps + 1).state)
    links[1].close()  # says at once what it was told
    at = ray.get(session.manager.where.remote()).ranks
    assert at == {0: (0, steps), 1: (0, steps + 1), 2: (0, steps)}


def test_replicas_that_go_back_together_agree_on_a_place_long_past(links: list[RayLink]) -> None:
    stop = threading.Event()
    with ThreadPoolExecutor(RANKS) as pool:
        for cycle in (*range(2 * STANDINGS_OF_INTEREST), 3, 4):
            asked = [pool.submit(links[r].agree, seat(r), 0, cycle, 100 + cycle - r, stop) for r in range(RANKS)]
            assert [answer.result(60) for answer in asked] == [100 + cycle - (RANKS - 1)] * RANKS


@pytest.mark.parametrize("answered", [[0], [0, 2]])
def test_a_report_that_only_some_ranks_got_an_answer_of(
    stream: LanceStream, session: Session, links: list[RayLink], answered: list[int]
) -> None:
    with ThreadPoolExecutor(RANKS) as pool:

        def report(rank: int, number: int) -> Future[Any]:
            return pool.submit(links[rank].commit, seat(rank), number, standing(stream, rank, number))

        for number in (1, 2):
            answers = [report(rank, number) for rank in range(RANKS)]
            assert [answer.result(60) for answer in answers] == [whole(stream, number)] * RANKS
        kill_manager(session)
        # The answer of the others was lost, so Ray sends their calls once more; those answered have gone on.
        late = [report(rank, 2) for rank in range(RANKS) if rank not in answered]
        assert [answer.result(60) for answer in late] == [whole(stream, 2)] * len(late)
        answers = [report(rank, 3) for rank in range(RANKS)]
        assert [answer.result(60) for answer in answers] == [whole(stream, 3)] * RANKS


def test_a_save_that_only_some_ranks_got_an_answer_of(
    stream: LanceStream, session: Session, links: list[RayLink]
) -> None:
    with ThreadPoolExecutor(RANKS) as pool:
        asked = [pool.submit(links[r].collect, seat(r), standing(stream, r, 5), 30.0) for r in range(RANKS)]
        assert [answer.result(60) for answer in asked] == [whole(stream, 5)] * RANKS
    for rank in (0, 1):  # and two of them take some more steps, but for which nobody would have word of them
        for step in (6, 7):
            links[rank].announce(seat(rank), step, standing(stream, rank, step).state)
    kill_manager(session)
    assert links[2].collect(seat(2), standing(stream, 2, 5), 30.0) == whole(stream, 5)
    assert ray.get(session.manager.where.remote()).ranks == {0: (0, 7), 1: (0, 7), 2: (0, 5)}


def test_an_agreement_that_only_some_ranks_got_an_answer_of(
    stream: LanceStream, session: Session, links: list[RayLink]
) -> None:
    del stream
    stop = threading.Event()
    with ThreadPoolExecutor(RANKS) as pool:
        asked = [pool.submit(links[r].agree, seat(r), 0, 4, 9 - r, stop) for r in range(RANKS)]
        assert [answer.result(60) for answer in asked] == [7] * RANKS
    kill_manager(session)
    assert links[1].agree(seat(1), 0, 4, 8, stop) == 7


def test_a_rank_that_has_gone_is_not_waited_for_and_never_guessed(
    stream: LanceStream, session: Session, links: list[RayLink]
) -> None:
    with ThreadPoolExecutor(RANKS) as pool:
        answers = [pool.submit(links[r].commit, seat(r), 1, standing(stream, r, 1)) for r in range(RANKS)]
        assert [answer.result(60) for answer in answers] == [whole(stream, 1)] * RANKS
        links[0].close()  # its process has died
        kill_manager(session)
        late = [pool.submit(links[r].commit, seat(r), 1, standing(stream, r, 1)) for r in (1, 2)]
        for answer in late:
            with pytest.raises(LockstepError, match=r"none of \[0\]"):
                answer.result(60)


def test_actors_that_are_being_started_again_are_not_given_up(session: Session) -> None:
    for actor in (session.coordinator, session.manager):
        pid = ray.get(actor.pid.remote())
        os.kill(pid, signal.SIGKILL)
        back = actor.pid.remote()  # waits for the one that follows
        answers = [session.is_alive(5.0)]
        while not ray.wait([back], timeout=0.1)[0]:
            answers.append(session.is_alive(5.0))
        assert all(answers) and ray.get(back) != pid
    session.kill()
    wait_until(lambda: not session.is_alive(5.0), 30, "they have ended")
