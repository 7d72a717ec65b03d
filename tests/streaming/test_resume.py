"""States: taken anywhere, loaded anywhere, from either implementation."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch

from ray_lance_stream import StateError, StateMismatchError
from streaming.sides import (
    LANCEDB,
    OURS,
    OpenTable,
    Side,
    State,
    counts,
    ids,
    merged,
    owned_counts,
    saved,
    take_cycles,
)

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


def test_ranks_in_the_middle_of_a_cycle_merge_to_what_each_of_them_took(side: Side, table_of: OpenTable) -> None:
    """Both ranks have completed one cycle; each has gone on by as many rows as it liked."""
    datasets = side.open(table_of(24), 2, shuffle=False)
    taken = [ids(datasets[0], 3), ids(datasets[1], 2)]
    state = merged(side, datasets)
    assert counts(state) == [2, 1, 1, 1]
    rest = ids(side.one(table_of(24), state, shuffle=False))
    assert rest[:3] == [7, 13, 19]  # those who are behind come first
    assert sorted(taken[0] + taken[1] + rest) == list(range(24))


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
