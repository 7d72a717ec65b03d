"""States: taken anywhere, loaded anywhere, from either implementation."""

from __future__ import annotations

import io
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_lance_stream import StateError, StateMismatchError
from ray_lance_stream.agreement import ThreadAgreement
from ray_lance_stream.errors import StreamClosedError
from streaming.sides import (
    LANCEDB,
    OURS,
    OpenTable,
    Side,
    State,
    batch_ids,
    counts,
    flat,
    ids,
    merged,
    owned_counts,
    saved,
    take_cycles,
)

pytestmark = pytest.mark.thorough

SHUFFLED: dict[str, Any] = {"shuffle_seed": 5, "epoch": 2}


def run_with_states(side: Side, table: Any, **options: Any) -> tuple[list[int], list[State]]:
    """One epoch on a single rank: the ids, and the state before the first row and after every row."""
    dataset = side.one(table, **options)
    order, states = [], [saved(dataset.state_dict())]
    for row in dataset:
        order.append(row["id"])
        states.append(saved(dataset.state_dict()))
    return order, states


def test_a_state_after_any_row_continues_with_the_next(side: Side, table_of: OpenTable) -> None:
    order, states = run_with_states(side, table_of(24), **SHUFFLED)
    assert len(states) == 25
    for taken in side.some(len(states)):
        assert ids(side.one(table_of(24), states[taken], **SHUFFLED)) == order[taken:]
    assert [sum(counts(state)) for state in states] == list(range(25))


def test_a_state_of_one_side_after_any_row_continues_on_the_other(
    writer_and_reader: tuple[Side, Side], table_of: OpenTable
) -> None:
    writer, reader = writer_and_reader
    order, states = run_with_states(writer, table_of(24), **SHUFFLED)
    for taken in reader.some(len(states)):
        assert ids(reader.one(table_of(24), states[taken], **SHUFFLED)) == order[taken:]


def test_both_sides_count_alike_after_every_row(ours: Side, table_of: OpenTable) -> None:
    theirs, mine = (run_with_states(side, table_of(24), **SHUFFLED) for side in (LANCEDB, ours))
    assert mine[0] == theirs[0]
    for ours_state, their_state in zip(mine[1], theirs[1], strict=True):
        assert {key: ours_state.get(key) for key in their_state} == their_state


def test_a_state_after_any_cycle_continues_at_another_world_size(side: Side, table_of: OpenTable) -> None:
    expected = take_cycles(side.open(table_of(24), 1, **SHUFFLED))
    changes = [(2, 4), (4, 1), (1, 2), (4, 2)]
    for before, after in changes if side.name == "ours" else changes[:2]:
        datasets, begin = side.open(table_of(24), before, **SHUFFLED), 0
        for cycle in side.some(7):
            assert take_cycles(datasets, cycle - begin) == expected[begin * 4 : cycle * 4]
            rest = take_cycles(side.open(table_of(24), after, merged(side, datasets), **SHUFFLED))
            assert rest == expected[cycle * 4 :]
            begin = cycle


@pytest.mark.parametrize(("before", "after"), [(1, 4), (2, 1), (4, 2)])
def test_a_merged_state_continues_on_the_other_side(
    writer_and_reader: tuple[Side, Side], table_of: OpenTable, before: int, after: int
) -> None:
    writer, reader = writer_and_reader
    options: dict[str, Any] = {"shuffle_clump_size": 3, "filter": "id % 10 != 0", "shuffle_seed": 8}
    expected = take_cycles(LANCEDB.open(table_of(211), 1, **options))
    datasets = writer.open(table_of(211), before, **options)
    first = take_cycles(datasets, 17)
    rest = take_cycles(reader.open(table_of(211), after, merged(writer, datasets), **options))
    assert first + rest == expected


def test_states_of_lancedbs_ranks_are_merged_as_it_does(table_of: OpenTable) -> None:
    """By us as well: the files of a run's ranks are there before a program moves over."""
    table = table_of(211)
    for size, cycles in ((2, 17), (4, 1), (1, 5)):
        datasets = LANCEDB.open(table, size, **SHUFFLED)
        states = [saved(dataset.state_dict()) for dataset in datasets]
        assert OURS.dataset.merge_state_dicts(states) == LANCEDB.dataset.merge_state_dicts(states)
        first = take_cycles(datasets, cycles)
        state = merged(LANCEDB, datasets)
        states = [saved(dataset.state_dict()) for dataset in datasets]
        assert OURS.dataset.merge_state_dicts(states) == state
        assert first + take_cycles(OURS.open(table, 3, state, **SHUFFLED)) == ids(OURS.one(table, **SHUFFLED))
    apart = LANCEDB.open(table, 2, **SHUFFLED)
    ids(apart[0], 8)
    with pytest.raises(StateError, match=r"different numbers of cycles.*Found: state 0: 4, state 1: 0"):
        OURS.dataset.merge_state_dicts([saved(dataset.state_dict()) for dataset in apart])
    other = LANCEDB.one(table, **{**SHUFFLED, "shuffle_seed": 99}).state_dict()
    with pytest.raises(StateMismatchError, match="shuffle_seed differs"):
        OURS.dataset.merge_state_dicts([saved(apart[0].state_dict()), saved(other)])


def test_each_rank_goes_on_with_what_lancedbs_loader_saved_on_it(table_of: OpenTable) -> None:
    """Which says of the others only where they began. On another rank, or on one, it is not all that is needed."""
    table = table_of(211)
    datasets = LANCEDB.open(table, 2, **SHUFFLED)
    states = []
    for dataset in datasets:
        batch_ids(LANCEDB.loader(dataset, batch_size=4), 10)
        states.append(saved(dataset.state_dict()))
    assert [sorted(counts(state)) for state in states] == [[2, 2, 20, 20]] * 2, "what makes them hard to tell"
    expected = [flat(batch_ids(LANCEDB.loader(each, batch_size=4))) for each in LANCEDB.open(table, 2, **SHUFFLED)]
    for rank, state in enumerate(states):
        dataset = OURS.dataset(table, num_splits=4, rank=rank, world_size=2, **SHUFFLED)
        dataset.load_state_dict(state)
        assert flat(batch_ids(OURS.loader(dataset, batch_size=4))) == expected[rank][40:]
        others = OURS.open(table, 2, **SHUFFLED)[1 - rank], OURS.one(table, **SHUFFLED)
        for other in others:
            with pytest.raises(StateError, match=r"that of one rank.*merge_state_dicts"):
                other.load_state_dict(state)


def test_ranks_in_the_middle_of_a_cycle_merge_to_what_each_of_them_took(side: Side, table_of: OpenTable) -> None:
    """Both ranks have completed one cycle; each has gone on by as many rows as it liked."""
    datasets = side.open(table_of(24), 2, shuffle=False)
    taken = [ids(datasets[0], 3), ids(datasets[1], 2)]
    state = merged(side, datasets)
    assert counts(state) == [2, 1, 1, 1]
    rest = ids(side.one(table_of(24), state, shuffle=False))
    assert rest[:3] == [7, 13, 19]  # those who are behind come first
    assert sorted(taken[0] + taken[1] + rest) == list(range(24))


@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_a_state_after_any_batch_continues_where_it_was_taken(table_of: OpenTable, data: Any) -> None:
    """Within a cycle or not: with the state of all ranks, and each rank with its own."""
    table, splits = table_of(24), data.draw(st.integers(2, 8), label="splits")
    size = data.draw(st.integers(1, splits), label="ranks")
    widths = owned_counts(size, splits)
    share = data.draw(st.integers(1, 7), label="batch")
    batches = [share * width for width in widths] if splits % size else [share] * size
    options = SHUFFLED | {"num_splits": splits, "order": "feistel"}  # at once, where LanceDB's takes a while

    def loaders(datasets: list[Any]) -> list[Any]:
        return [OURS.loader(dataset, batch_size=batch) for dataset, batch in zip(datasets, batches, strict=True)]

    expected = [batch_ids(loader) for loader in loaders(OURS.open(table, size, **options))]
    assert len({len(share) for share in expected}) == 1
    state: State | None = None
    place = 0
    for _ in range(3):  # stopped and resumed again
        if place == len(expected[0]):
            break
        datasets = OURS.open(table, size, state, **options)
        count = data.draw(st.integers(1, len(expected[0]) - place), label="batches")
        taken = [batch_ids(loader, count) for loader in loaders(datasets)]
        assert taken == [batch[place : place + count] for batch in expected]
        place += count
        state = merged(OURS, datasets)
        alone = OURS.open(table, size, **options)
        for dataset, before in zip(alone, datasets, strict=True):
            dataset.load_state_dict(saved(before.state_dict()))
        assert [batch_ids(loader) for loader in loaders(alone)] == [batch[place:] for batch in expected]
        rest = ids(OURS.one(table, state, **options))
        assert sorted(rest) == sorted(flat(flat(batch[place:]) for batch in expected))


def test_ranks_of_lancedb_within_a_cycle_go_on_with_their_own_rows(table_of: OpenTable) -> None:
    options: dict[str, Any] = SHUFFLED | {"num_splits": 8}
    for whole in (True, False):
        datasets = LANCEDB.open(table_of(48), 2, **options)
        loaders = [LANCEDB.loader(dataset, batch_size=6) for dataset in datasets]
        iterators = [iter(loader) for loader in loaders]
        for iterator in iterators:
            next(iterator)
        states = [saved(dataset.state_dict()) for dataset in datasets]
        both = LANCEDB.dataset.merge_state_dicts(states)
        assert counts(both) == [2, 2, 1, 1, 2, 2, 1, 1]
        mine = OURS.open(table_of(48), 2, **options)
        for dataset, state in zip(mine, states, strict=True):
            dataset.load_state_dict(saved(both) if whole else state)
        found = [batch_ids(OURS.loader(dataset, batch_size=6)) for dataset in mine]
        assert found == [batch_ids(iterator) for iterator in iterators]


def test_one_ranks_state_within_a_cycle_is_no_other_ranks(ours: Side, table_of: OpenTable) -> None:
    datasets = ours.open(table_of(24), 2, **SHUFFLED)
    taken = [ids(dataset, 3) for dataset in datasets]
    states = [saved(dataset.state_dict()) for dataset in datasets]
    for rank, size in ((0, 1), (0, 3), (0, 4), (1, 2)):
        other = ours.dataset(table_of(24), num_splits=4, rank=rank, world_size=size, **SHUFFLED)
        with pytest.raises(StateError, match=r"that of one rank.*\[0, 2\].*merge_state_dicts"):
            other.load_state_dict(states[0])
        assert len(ids(other)) == 24 // size or size == 3  # what was refused has moved nothing
    together = ours.dataset.merge_state_dicts(states)
    assert "of_rank" not in together
    with pytest.raises(StateError, match=r"different distances.*rows given by each rank's splits: \[2, 1, 2, 1\]"):
        ours.open(table_of(24), 4, together, **SHUFFLED)
    rest = ids(ours.one(table_of(24), together, **SHUFFLED))
    assert sorted(flat(taken) + rest) == list(range(24))


def test_ranks_with_a_coordinator_go_on_within_a_cycle(ours: Side, table_of: OpenTable) -> None:
    """Each rank's own state, which may be at another row of the cycle than the other's."""
    order = [ids(dataset) for dataset in ours.open(table_of(24), 2, **SHUFFLED)]
    for places in ((3, 3), (2, 3), (3, 2), (0, 1), (5, 4)):
        agreement = ThreadAgreement(2)

        def rest(rank: int, places: tuple[int, int] = places, agreement: ThreadAgreement = agreement) -> list[int]:
            options = SHUFFLED | {"num_splits": 4, "rank": rank, "world_size": 2}
            before = ours.dataset(table_of(24), **options)
            taken = ids(before, places[rank])
            dataset = ours.dataset(table_of(24), coordinator=agreement.member(rank), **options)
            dataset.load_state_dict(saved(before.state_dict()))
            return taken + ids(dataset)

        with ThreadPoolExecutor(2) as pool:
            assert list(pool.map(rest, range(2))) == order


@pytest.mark.parametrize("batched", [False, True])
def test_a_state_that_is_loaded_ends_the_iteration_under_way(ours: Side, table_of: OpenTable, batched: bool) -> None:
    """Its rows would be covered by no state."""
    dataset = ours.one(table_of(24), **SHUFFLED)
    expected = ids(ours.one(table_of(24), **SHUFFLED))
    target = ours.loader(dataset, batch_size=4) if batched else dataset

    def take(iterator: Any, count: int) -> list[int]:
        return flat(batch_ids(iterator, count // 4)) if batched else ids(iterator, count)

    first = iter(target)
    take(first, 8)
    state = saved(target.state_dict())
    take(first, 8)
    with pytest.raises(StateMismatchError):
        target.load_state_dict(
            state | {"num_splits": 2, "samples_consumed_per_split": [4, 4]} | {"positions_consumed_per_split": [4, 4]}
        )
    assert take(first, 4) == expected[16:20]  # what was refused has ended nothing
    target.load_state_dict(state)
    with pytest.raises(StreamClosedError, match="load_state_dict while iterating"):
        next(first)
    assert target.state_dict() == state
    second = iter(target)
    assert take(second, 4) == expected[8:12]
    del first
    assert take(second, 4) == expected[12:16]
    assert sum(counts(target.state_dict())) == 16


def test_a_state_says_the_same_on_every_rank_at_a_cycle_end(side: Side, table_of: OpenTable) -> None:
    datasets = side.open(table_of(24), 4, **SHUFFLED)
    for _ in range(6):
        take_cycles(datasets, 1)
        states = [dataset.state_dict() for dataset in datasets]
        assert all(state == states[0] for state in states)


def test_a_loop_that_was_left_is_taken_up_again(side: Side, table_of: OpenTable) -> None:
    dataset = side.one(table_of(24), shuffle=False)
    taken: list[int] = []
    for count in (1, 4, 2, 7, 7, 1, 2):  # the last ones leave the loop within the last cycle
        taken += ids(dataset, count)
        assert sum(counts(dataset.state_dict())) == len(taken)
    assert taken == ids(side.one(table_of(24), shuffle=False))


def test_a_run_that_is_resumed_again_and_again(side: Side, table_of: OpenTable) -> None:
    """A new dataset after every few rows, each time at the state of the one before."""
    expected = ids(side.one(table_of(24), **SHUFFLED))
    state: State | None = None
    taken: list[int] = []
    for count in (5, 1, 6, 3, 5, 4):
        dataset = side.one(table_of(24), state, **SHUFFLED)
        taken += ids(dataset, count)
        state = dataset.state_dict()
    assert taken == expected


def test_a_state_is_loaded_in_place(side: Side, table_of: OpenTable) -> None:
    """Into a dataset that has been iterated already, back and forth."""
    dataset = side.one(table_of(24), **SHUFFLED)
    expected = ids(side.one(table_of(24), **SHUFFLED))
    start = dataset.state_dict()
    ids(dataset, 10)
    at_ten = dataset.state_dict()
    ids(dataset, 3)
    dataset.load_state_dict(at_ten)
    assert ids(dataset, 4) == expected[10:14]
    dataset.load_state_dict(start)
    assert ids(dataset, 4) == expected[:4]


def test_a_state_is_a_snapshot_of_plain_values(side: Side, table_of: OpenTable) -> None:
    dataset = side.one(table_of(24), **SHUFFLED)
    ids(dataset, 5)
    state = dataset.state_dict()
    before = saved(state)
    ids(dataset, 5)
    assert state == before  # JSON changes nothing, nor do more rows
    state["samples_consumed_per_split"][0] = 99
    assert sum(counts(dataset.state_dict())) == 10
    file = io.BytesIO()
    torch.save(before, file)
    file.seek(0)
    assert torch.load(file, weights_only=True) == before


def test_a_state_of_an_older_lancedb(side: Side, table_of: OpenTable) -> None:
    """Those had no positions; older ones still had one count for all splits."""
    order, states = run_with_states(LANCEDB, table_of(24), **SHUFFLED)
    for taken in (0, 6, 8, 24):
        state = {key: states[taken][key] for key in states[taken] if not key.startswith("positions")}
        assert ids(side.one(table_of(24), state, **SHUFFLED)) == order[taken:]
    scalar = {"shuffle_seed": 5, "num_splits": 4, "epoch": 2, "samples_consumed_per_split": 2}
    assert ids(side.one(table_of(24), scalar, **SHUFFLED)) == order[8:]


@pytest.mark.parametrize(
    ("options", "field"), [({"num_splits": 2}, "num_splits"), ({"shuffle_seed": 6}, "shuffle_seed")]
)
def test_a_state_of_another_run_is_refused(
    side: Side, table_of: OpenTable, options: dict[str, Any], field: str
) -> None:
    state = side.one(table_of(24), shuffle_seed=5).state_dict()
    with pytest.raises(ValueError, match=field):
        side.one(table_of(24), state, **{"shuffle_seed": 5} | options)


def test_what_cannot_be_merged(side: Side, table_of: OpenTable) -> None:
    merge = side.dataset.merge_state_dicts
    with pytest.raises(ValueError, match="state"):
        merge([])
    base = side.one(table_of(24), **SHUFFLED).state_dict()
    others: dict[str, dict[str, Any]] = {"shuffle_seed": {"shuffle_seed": 6, "epoch": 2}, "epoch": {"shuffle_seed": 5}}
    for field, other in others.items():
        with pytest.raises(ValueError, match=field):
            merge([base, side.one(table_of(24), **other).state_dict()])
    with pytest.raises(ValueError, match="num_splits"):
        merge([base, side.one(table_of(24), num_splits=2, **SHUFFLED).state_dict()])
    assert merge([base]) == base


def test_owned_splits_of_ranks() -> None:
    """The arithmetic that the tests bring ranks' rows into order with."""
    assert owned_counts(1) == [4]
    assert owned_counts(3) == [1, 1, 2]
    assert owned_counts(4, 8) == [2, 2, 2, 2]
