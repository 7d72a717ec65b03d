"""cluster/sizing.py: the rule of the elastic pool, with pools and consumers that are numbers."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_lance_stream.cluster.sizing import Load, Sizing

HOLD_S = 30.0
STARVED = Load(waited=1.0, requests=1000.0)
FULL = Load(waited=0.0, requests=0.0)

bounds = st.tuples(st.integers(1, 40), st.integers(0, 40)).map(lambda pair: (pair[0], sum(pair)))
load = st.builds(Load, waited=st.floats(0, 1), requests=st.floats(0, 100))


def run(sizing: Sizing, loads: list[Load], size: int, seconds: int, start: int = 0) -> list[int]:
    """Observes once a second; what is wanted is there at once. Returns the sizes."""
    sizes = []
    for second in range(start, start + seconds):
        size = sizing.observe(float(second), loads, running=size, pending=0)
        sizes.append(size)
    return sizes


@given(bounds=bounds, steps=st.lists(st.tuples(st.lists(load, max_size=3), st.floats(0, 1), st.floats(0, 100))))
def test_it_never_leaves_its_bounds_whatever_happens(
    bounds: tuple[int, int], steps: list[tuple[list[Load], float, float]]
) -> None:
    least, most = bounds
    sizing, size, now = Sizing(least, most, HOLD_S), least, 0.0
    for loads, part, pause_s in steps:
        now += pause_s
        pending = round(part * size)
        target = sizing.observe(now, loads, running=size - pending, pending=pending)
        assert least <= target <= most
        if target > size:
            assert target - (size - pending) <= 4  # so many may be starting
            assert target <= sum(each.requests for each in loads)  # the last one has something to do, too
            assert max(each.waited for each in loads) > 0
        if not loads:
            assert target == size
        size = target


@given(bounds=bounds, others=st.lists(st.builds(Load, waited=st.floats(0, 1), requests=st.floats(0, 9)), max_size=3))
def test_the_one_that_starves_is_enough_and_growing_takes_few_observations(
    bounds: tuple[int, int], others: list[Load]
) -> None:
    least, most = bounds
    # Doubling up to four, then four at a time; three observations each.
    steps = max(0, math.ceil(math.log2(4 / least))) + math.ceil((most - least) / 4) + 1
    sizes = run(Sizing(least, most, HOLD_S), [*others, STARVED], least, 3 * steps)
    assert sizes[-1] == most
    assert sizes == sorted(sizes)


@given(size=st.integers(2, 40), hold_s=st.integers(1, 100), waited=st.floats(0.05, 1), requests=st.floats(0, 100))
def test_it_shrinks_only_after_all_buffers_were_full_for_the_stated_time(
    size: int, hold_s: int, waited: float, requests: float
) -> None:
    sizing = Sizing(1, size, float(hold_s))
    run(sizing, [FULL, Load(waited=waited, requests=requests)], size, 1, start=-1)
    assert run(sizing, [FULL, FULL], size, hold_s) == [size] * hold_s
    assert sizing.observe(float(hold_s), [FULL, FULL], running=size, pending=0) == size // 2
    # And again only after as long.
    assert set(run(sizing, [FULL], size // 2, hold_s, start=hold_s + 1)) == {size // 2}


@given(waited=st.floats(0.05, 1), size=st.integers(2, 40))
def test_it_does_not_shrink_while_one_waits(waited: float, size: int) -> None:
    one = Load(waited=waited, requests=0.5)
    assert set(run(Sizing(1, size, HOLD_S), [FULL, one], size, 1000)) == {size}


@pytest.mark.thorough
@given(
    bounds=bounds,
    demand=st.floats(0, 60),
    at_once=st.sampled_from([1, 2]),
    budget=st.integers(1, 200),
)
def test_a_constant_load_ends_in_a_constant_size(
    bounds: tuple[int, int], demand: float, at_once: int, budget: int
) -> None:
    """``demand``: blocks that are being built at any time where there are enough prefetchers for it."""
    least, most = bounds
    sizing, size, sizes = Sizing(least, most, HOLD_S), least, []
    for second in range(3000):
        slots = size * at_once
        starves = demand > min(slots, budget)
        # Who waits has all its budget under way; who does not, only what is being built.
        seen = Load(waited=1.0 if starves else 0.0, requests=float(budget) if starves else demand)
        size = sizing.observe(float(second), [seen], running=size, pending=0)
        sizes.append(size)
    turns = [after - before for before, after in itertools.pairwise(sizes) if after != before]
    signs = [step > 0 for step in turns]
    assert sum(a != b for a, b in itertools.pairwise(signs)) <= 1  # up, and once down again
    assert len(set(sizes[2000:])) == 1
    if demand <= min(most * at_once, budget):
        assert demand <= sizes[-1] * at_once  # and nobody waits


def test_prefetchers_that_find_no_room_are_few_and_given_up_when_nobody_starves() -> None:
    sizing = Sizing(1, 40, HOLD_S)
    sizes, size = [], 8
    for second in range(100):  # none of the new ones can be placed
        size = sizing.observe(float(second), [STARVED], running=8, pending=size - 8)
        sizes.append(size)
    assert sizes[-1] == 12
    enough = Load(waited=0.0, requests=8.0)
    wanted = [sizing.observe(100.0 + s, [enough], running=8, pending=4) for s in range(31)]
    assert wanted == [12] * 30 + [8]


def test_while_none_works_and_while_nobody_reports_nothing_is_learned() -> None:
    sizing = Sizing(1, 8, HOLD_S)
    run(sizing, [FULL], 4, 29)
    assert sizing.observe(29.0, [], running=4, pending=0) == 4
    assert run(sizing, [FULL], 4, 30, start=30) == [4] * 30
    assert {sizing.observe(60.0 + s, [FULL], running=0, pending=4) for s in range(100)} == {4}
    assert {sizing.observe(160.0 + s, [FULL], running=1, pending=3) for s in range(30)} == {4}
    assert sizing.observe(190.0, [FULL], running=1, pending=3) == 2


def test_those_of_the_least_are_not_given_up() -> None:
    sizing = Sizing(4, 8, HOLD_S)
    assert {sizing.observe(float(s), [FULL], running=1, pending=3) for s in range(100)} == {4}


def test_a_pool_that_had_to_grow_again_shrinks_later_the_next_time() -> None:
    sizing, now, holds = Sizing(1, 2, HOLD_S), 0, []
    for _ in range(8):
        assert run(sizing, [STARVED], 1, 3, start=now)[-1] == 2
        sizes = run(sizing, [FULL], 2, 700, start=now + 3)
        holds.append(sizes.index(1))
        now += 703
    assert holds == [30, 60, 120, 240, 480, 600, 600, 600]


@pytest.mark.parametrize("requests", [1.0, 2.0])
def test_more_prefetchers_than_requests_are_of_no_use(requests: float) -> None:
    """A budget of one or two blocks: who waits, waits for the one that is being built."""
    slow = Load(waited=0.9, requests=requests)
    assert run(Sizing(1, 8, HOLD_S), [slow], 1, 100)[-1] == int(requests)
