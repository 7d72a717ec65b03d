"""Where ``StreamingDataset`` departs from ``lancedb.streaming`` on purpose: the whole list, each with its check."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import lancedb
import pytest
from conftest import Tables, rows_from
from torch.utils.data import DataLoader

from ray_lance_stream import ConfigError, StateError, StateMismatchError
from streaming.sides import LANCEDB, Side, ids, merged, saved, take_cycles

pytestmark = pytest.mark.thorough


@dataclass(frozen=True)
class Case:
    """What a check works with."""

    ours: Side
    tables: Tables
    caplog: pytest.LogCaptureFixture

    def table(self, rows: int = 24) -> Any:
        return lancedb.connect(self.tables.uri(rows)).open_table("t")

    def state(self, rows_taken: int = 8, **options: Any) -> Any:
        """The state of a single rank that has taken so many rows."""
        dataset = self.ours.one(self.table(), **options)
        ids(dataset, rows_taken)
        return saved(dataset.state_dict())


def states_say_what_they_belong_to(case: Case) -> None:
    theirs = LANCEDB.one(case.table()).state_dict()
    mine = case.ours.one(case.table()).state_dict()
    assert set(mine) - set(theirs) == {"format", "provenance"}
    assert {key: mine[key] for key in theirs} == theirs
    for name, value in {"filter": None, "order": "lancedb", "shuffle": True, "table_version": 2}.items():
        assert mine["provenance"][name] == value
    # LanceDB's class reads such a state; what it does not know it leaves alone.
    LANCEDB.one(case.table()).load_state_dict(mine)


def ranks_at_different_cycles_do_not_merge(case: Case) -> None:
    datasets = case.ours.open(case.table(), 2)
    ids(datasets[0], 6)
    with pytest.raises(StateError, match="different numbers of cycles"):
        merged(case.ours, datasets)
    ids(datasets[1], 6)
    assert take_cycles(case.ours.open(case.table(), 4, merged(case.ours, datasets)))


def several_ranks_do_not_continue_inside_a_cycle(case: Case) -> None:
    state = case.state(rows_taken=10)
    for world_size in (2, 3, 4):
        with pytest.raises(StateError, match="within a cycle"):
            case.ours.open(case.table(), world_size, state)
    assert len(ids(case.ours.one(case.table(), state))) == 14


def batches_do_not_depend_on_the_number_of_workers(case: Case) -> None:
    """Torch never splits the work: with prefetchers, see test_prefetchers.py."""
    loader = case.ours.loader(case.ours.one(case.table()), batch_size=4)
    assert loader.num_workers == 0
    assert loader.num_prefetchers == 0


def the_next_epoch_follows(case: Case) -> None:
    epochs = [ids(LANCEDB.one(case.table(), epoch=epoch)) for epoch in range(2)]
    dataset = case.ours.one(case.table())
    assert ids(dataset) == epochs[0]
    at_end = saved(dataset.state_dict())
    assert at_end["epoch"] == 0
    assert ids(dataset) == epochs[1]
    resumed = case.ours.one(case.table(), at_end)
    assert [ids(resumed), ids(resumed)] == [[], epochs[1]]


def ranks_do_not_draw_their_own_seeds(case: Case) -> None:
    with pytest.raises(ConfigError, match="shuffle_seed=None"):
        case.ours.open(case.table(), 2, shuffle_seed=None)
    state = case.state(shuffle_seed=None)
    resumed = case.ours.one(case.table(), state, shuffle_seed=None)  # takes the one that was drawn
    assert ids(resumed) == ids(LANCEDB.one(case.table(), state, shuffle_seed=state["shuffle_seed"]))


def numbers_out_of_range_are_refused_at_once(case: Case) -> None:
    for options in (
        {"rank": 2, "world_size": 2},
        {"rank": -1},
        {"world_size": 0},
        {"num_splits": 0},
        {"num_splits": 25},
        {"num_splits": 4, "world_size": 5},
        {"shuffle_clump_size": 0},
        {"read_batch_size": 0},
        {"read_batch_size": 2.5},
        {"shuffle_seed": -1},
        {"epoch": -1},
    ):
        with pytest.raises(ConfigError, match=next(iter(options))):
            case.ours.dataset(case.table(), **{"num_splits": 4} | options)
    assert issubclass(ConfigError, ValueError)


def columns_are_those_of_the_table_each_once(case: Case) -> None:
    for columns, message in ((["id", "id"], "named twice"), (["id", "_rowid"], "columns do not exist.*'_rowid'")):
        assert len(next(iter(LANCEDB.one(case.table(), columns=columns)))) == len(set(columns))
        with pytest.raises(ConfigError, match=message):
            case.ours.one(case.table(), columns=columns)


def any_number_of_ranks_up_to_that_of_splits(case: Case) -> None:
    expected = ids(LANCEDB.one(case.table(211), num_splits=7))
    for world_size in range(1, 8):
        assert take_cycles(case.ours.open(case.table(211), world_size, num_splits=7), num_splits=7) == expected


def torchs_own_loader_gets_a_multiple_of_the_owned_splits(case: Case) -> None:
    datasets = case.ours.open(case.table(240), 5, num_splits=12)
    loaders = [DataLoader(dataset, batch_size=2 * len(dataset.owned_splits)) for dataset in datasets]
    assert [len(list(loader)) for loader in loaders] == [10] * 5
    with pytest.raises(ConfigError, match="unequally"):
        case.ours.loader(datasets[0], batch_size=5)


def a_state_of_other_data_is_refused(case: Case) -> None:
    options: dict[str, Any] = {"filter": "id < 20", "epoch": 1, "shuffle_clump_size": 2}
    state = case.state(**options)
    for field, value in {
        "filter": None,
        "epoch": 2,
        "shuffle": False,
        "shuffle_clump_size": 3,
        "shuffle_seed": 1,
        "num_splits": 5,
    }.items():
        with pytest.raises(StateMismatchError) as raised:
            case.ours.one(case.table(), state, **options | {field: value})
        assert raised.value.field == field
        assert f"{field} differs" in str(raised.value)
    _, other = case.tables.own(24)
    with pytest.raises(StateMismatchError) as raised:
        next(iter(case.ours.one(other, state, **options)))  # opened with the first row
    assert raised.value.field == "table"


def a_state_without_provenance_brings_one_warning(case: Case) -> None:
    dataset = LANCEDB.one(case.table())
    taken = ids(dataset, 8)
    state = saved(dataset.state_dict())
    mine = case.ours.one(case.table())
    with case.caplog.at_level(logging.WARNING, logger="ray_lance_stream"):
        mine.load_state_dict(state)
    assert len(case.caplog.records) == 1
    assert "does not say what it was taken from" in case.caplog.text
    assert taken + ids(mine) == ids(LANCEDB.one(case.table()))
    with pytest.raises(StateError, match="order='lancedb'"):
        case.ours.one(case.table(), state, order="feistel")


def a_checkpoint_stays_with_its_version(case: Case) -> None:
    uri, table = case.tables.own(24)
    dataset = case.ours.one(table)
    expected = ids(LANCEDB.one(table))
    taken = ids(dataset, 8)
    state = saved(dataset.state_dict())
    table.add(rows_from(24, 8))
    resumed = case.ours.one(lancedb.connect(uri).open_table("t"), state)
    assert taken + ids(resumed) == expected
    assert len(ids(case.ours.one(lancedb.connect(uri).open_table("t")))) == 32  # a new run reads all


def consumed_rows_counts_the_epoch(case: Case) -> None:
    """LanceDB counts from the beginning of the iterator, which is none of the trainer's concern."""
    for side, expected in ((LANCEDB, 3), (case.ours, 11)):
        dataset = side.one(case.table())
        ids(dataset, 8)
        iterator = iter(dataset)
        ids(iterator, 3)
        assert dataset.consumed_rows == expected


@dataclass(frozen=True)
class Departure:
    """One way in which ours is meant to differ.

    Attributes:
        what: The difference.
        why: Its reason.
        check: Fails if it is not so.
    """

    what: str
    why: str
    check: Callable[[Case], None]


DEPARTURES = (
    Departure("states have the keys format and provenance", "they can be refused", states_say_what_they_belong_to),
    Departure("merging ranks at different cycles fails", "rows would be lost", ranks_at_different_cycles_do_not_merge),
    Departure(
        "several ranks refuse a state within a cycle that leaves them at different distances from the end",
        "they would end a step apart",
        several_ranks_do_not_continue_inside_a_cycle,
    ),
    Departure(
        "batches do not depend on num_workers",
        "a run may move to a machine with more cores",
        batches_do_not_depend_on_the_number_of_workers,
    ),
    Departure(
        "iterating after the end gives the next epoch, after a loaded end first an empty pass",
        "a loop over epochs needs no new dataset, and what ends an epoch runs once",
        the_next_epoch_follows,
    ),
    Departure(
        "shuffle_seed=None is for one rank", "each rank would draw its own order", ranks_do_not_draw_their_own_seeds
    ),
    Departure(
        "numbers out of range are ConfigErrors of the constructor",
        "others hang, panic or fail late",
        numbers_out_of_range_are_refused_at_once,
    ),
    Departure(
        "columns are those of the table, each once",
        "a batch has a column once, and a row id means nothing in a table that was moved or copied",
        columns_are_those_of_the_table_each_once,
    ),
    Departure(
        "world_size need not divide num_splits", "a cluster shrinks by one", any_number_of_ranks_up_to_that_of_splits
    ),
    Departure(
        "batches are then multiples of the owned splits",
        "ranks would take unequally many",
        torchs_own_loader_gets_a_multiple_of_the_owned_splits,
    ),
    Departure("a state of other data is refused by the field", "it means other rows", a_state_of_other_data_is_refused),
    Departure(
        "a state without provenance brings one warning",
        "what it belongs to cannot be checked",
        a_state_without_provenance_brings_one_warning,
    ),
    Departure(
        "a checkpoint continues on its table version",
        "rows would come twice or never",
        a_checkpoint_stays_with_its_version,
    ),
    Departure(
        "consumed_rows counts the epoch",
        "progress is that of the epoch, resumed or not",
        consumed_rows_counts_the_epoch,
    ),
)


@pytest.mark.parametrize("departure", DEPARTURES, ids=lambda departure: departure.what)
def test_departures(departure: Departure, ours: Side, tables: Tables, caplog: pytest.LogCaptureFixture) -> None:
    departure.check(Case(ours, tables, caplog))
