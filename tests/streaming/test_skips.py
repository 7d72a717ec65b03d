"""Rows whose transform fails: dropped, counted, and never a reason to lose another row."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable
from typing import Any

import pytest

from ray_lance_stream import ConfigError, ReplaceRow, TransformError
from streaming.sides import LANCEDB, OpenTable, Side, counts, ids, saved

pytestmark = pytest.mark.thorough

BAD = frozenset({0, 7, 8, 23, 100, 101, 102, 150, 210})


def failing(bad: frozenset[int] = BAD) -> Callable[[Any], list[dict[str, Any]]]:
    """A transform that fails at a batch which holds one of these ids."""

    def transform(batch: Any) -> list[dict[str, Any]]:
        found = bad & set(batch["id"].to_pylist())
        if found:
            raise ArithmeticError(f"bad rows {sorted(found)}")
        rows: list[dict[str, Any]] = batch.to_pylist()
        return rows

    return transform


def options(mode: Any, bad: frozenset[int] = BAD, **more: Any) -> dict[str, Any]:
    return {"transform": failing(bad), "on_transform_error": mode, "shuffle_seed": 4} | more


@pytest.mark.parametrize("rows", [24, 211])
@pytest.mark.parametrize("read_batch_size", [1, 5, 64])
def test_the_rows_that_are_left_come_in_lancedbs_order(
    ours: Side, table_of: OpenTable, rows: int, read_batch_size: int
) -> None:
    settings = options("skip", read_batch_size=read_batch_size)
    theirs = ids(LANCEDB.one(table_of(rows), **settings))
    assert ids(ours.one(table_of(rows), **settings)) == theirs


def test_skipped_rows_are_counted_and_no_other_is_lost(side: Side, table_of: OpenTable) -> None:
    bad = frozenset({0, 6, 12, 18, 5, 11, 17, 23})  # two of every split
    dataset = side.one(table_of(24), **options("skip", bad, shuffle=False))
    assert dataset.rows_skipped == 0
    assert sorted(ids(dataset)) == sorted(set(range(24)) - bad)
    assert dataset.rows_skipped == 8
    state = dataset.state_dict()
    assert counts(state) == [4, 4, 4, 4]


def test_an_epoch_ends_with_the_last_whole_cycle(side: Side, table_of: OpenTable) -> None:
    """Split 0 keeps three of its six rows, so there are three cycles."""
    dataset = side.one(table_of(24), **options("skip", frozenset({0, 2, 4}), shuffle=False))
    assert ids(dataset) == [1, 6, 12, 18, 3, 7, 13, 19, 5, 8, 14, 20]
    assert counts(dataset.state_dict()) == [3, 3, 3, 3]


def test_a_state_after_any_row_continues_past_skipped_rows(side: Side, table_of: OpenTable) -> None:
    bad = frozenset({0, 1, 8, 9, 14, 19})
    settings = options("skip", bad, shuffle=False, read_batch_size=2)
    dataset = side.one(table_of(24), **settings)
    order, states = [], [saved(dataset.state_dict())]
    for row in dataset:
        order.append(row["id"])
        states.append(saved(dataset.state_dict()))
    for taken in side.some(len(states)):
        assert ids(side.one(table_of(24), states[taken], **settings)) == order[taken:]


def test_a_state_past_skipped_rows_travels(writer_and_reader: tuple[Side, Side], table_of: OpenTable) -> None:
    writer, reader = writer_and_reader
    expected = ids(LANCEDB.one(table_of(211), **options("skip")))
    for taken in (4, 30, 101, 160):
        dataset = writer.one(table_of(211), **options("skip"))
        assert ids(dataset, taken) == expected[:taken]
        state = dataset.state_dict()
        assert state["positions_consumed_per_split"] != counts(state) or taken == 4
        assert ids(reader.one(table_of(211), state, **options("skip"))) == expected[taken:]


def test_both_sides_count_alike_past_skipped_rows(ours: Side, table_of: OpenTable) -> None:
    datasets = [side.one(table_of(211), **options("skip", read_batch_size=8)) for side in (LANCEDB, ours)]
    for _ in range(5):
        theirs, mine = ([ids(dataset, 37), dataset.state_dict()] for dataset in datasets)
        assert mine[0] == theirs[0]
        assert {key: mine[1].get(key) for key in theirs[1]} == theirs[1]


def test_raise_hands_out_what_comes_before(side: Side, table_of: OpenTable) -> None:
    settings = options("raise", frozenset({20}), shuffle=False, read_batch_size=1)
    dataset = side.one(table_of(24), **settings)
    taken: list[int] = []
    with pytest.raises(Exception, match="bad rows") as raised:
        for row in dataset:
            taken.append(row["id"])  # the loop is left by the error
    assert isinstance(raised.value, ArithmeticError) or isinstance(raised.value.__cause__, ArithmeticError)
    assert taken == ids(LANCEDB.one(table_of(24), shuffle=False))[: len(taken)]
    assert 20 not in taken
    state = dataset.state_dict()
    assert sum(counts(state)) == len(taken)
    settings["transform"] = failing(frozenset())
    assert taken + ids(side.one(table_of(24), state, **settings)) == ids(LANCEDB.one(table_of(24), shuffle=False))


def test_warn_says_what_it_skips(side: Side, table_of: OpenTable, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        dataset = side.one(table_of(24), **options("warn", frozenset({3, 9, 15, 21}), shuffle=False))
        assert len(ids(dataset)) == 20
    said = [record.getMessage() for record in caplog.records if "bad rows" in record.getMessage()]
    assert said
    assert all("kipped" in text for text in said)
    assert dataset.rows_skipped == 4


def test_a_handler_decides(side: Side, table_of: OpenTable) -> None:
    asked: list[Exception] = []

    def handler(error: Exception) -> bool:
        asked.append(error)
        return isinstance(error, ArithmeticError)

    dataset = side.one(table_of(24), **options(handler, frozenset({3, 9, 15, 21}), shuffle=False))
    assert len(ids(dataset)) == 20
    assert all(isinstance(error, ArithmeticError) for error in asked)
    assert len(asked) >= 4

    def broken(batch: Any) -> Any:
        return batch["label"]

    with pytest.raises(Exception, match="label"):
        ids(side.one(table_of(24), transform=broken, on_transform_error=handler))
    assert isinstance(asked[-1], KeyError)


def test_a_handler_that_fails_is_named_and_not_tried_again(ours: Side, table_of: OpenTable) -> None:
    asked: list[Exception] = []

    def decide(error: Exception) -> bool:
        asked.append(error)
        return {"bad rows [7, 8]": True}[str(error)]

    dataset = ours.one(table_of(24), **options(decide, frozenset({7, 8}), shuffle=False))
    with pytest.raises(TransformError, match=r"on_transform_error failed.*row 7 of.*KeyError.*bad rows \[7\]") as info:
        ids(dataset)
    assert isinstance(info.value.__cause__, KeyError)
    assert list(map(str, asked)) == ["bad rows [7, 8]", "bad rows [7]"]
    dataset = ours.one(table_of(24), **options(lambda _: 1 / 0, frozenset({7}), shuffle=False))
    with pytest.raises(TransformError, match=r"on_transform_error failed.*rows \[0, .*ZeroDivisionError.*bad rows"):
        ids(dataset)


@pytest.mark.parametrize("mode", ["raise", "skip"])
@pytest.mark.parametrize("error", [KeyboardInterrupt("stop"), SystemExit(3)], ids=repr)
def test_a_transform_may_end_the_process(side: Side, table_of: OpenTable, mode: str, error: BaseException) -> None:
    def transform(batch: Any) -> list[Any]:
        if 22 in batch["id"].to_pylist():
            raise error
        rows: list[Any] = batch.to_pylist()
        return rows

    dataset = side.one(table_of(24), transform=transform, on_transform_error=mode, shuffle=False, read_batch_size=1)
    taken = []
    with pytest.raises(type(error)):
        for row in dataset:
            taken.append(row["id"])
    assert sum(counts(dataset.state_dict())) == len(taken)


def test_a_batch_that_fails_while_its_rows_do_not(side: Side, table_of: OpenTable) -> None:
    def only_single_rows(batch: Any) -> Any:
        if batch.num_rows > 1:
            raise RuntimeError("one row at a time, please")
        return batch.to_pylist()

    dataset = side.one(table_of(24), transform=only_single_rows, on_transform_error="skip")
    assert sorted(ids(dataset)) == list(range(24))
    assert dataset.rows_skipped == 0


@pytest.mark.parametrize("mode", ["raise", "skip"])
@pytest.mark.parametrize(
    "transform", [lambda batch: batch.to_pylist()[1:], lambda batch: [*batch.to_pylist(), None]], ids=["less", "more"]
)
def test_a_transform_that_changes_the_number_of_rows(
    side: Side, table_of: OpenTable, mode: str, transform: Any
) -> None:
    """Never skipped: the rows that are there cannot be told apart from those that are not."""
    with pytest.raises(Exception, match="row"):
        ids(side.one(table_of(24), transform=transform, on_transform_error=mode))


def test_every_row_fails(side: Side, table_of: OpenTable) -> None:
    dataset = side.one(table_of(24), **options("skip", frozenset(range(24))))
    assert ids(dataset) == []
    assert dataset.rows_skipped >= 6  # one split's rows are enough to see that there is no cycle
    assert counts(dataset.state_dict()) == [0, 0, 0, 0]


@pytest.mark.parametrize("mode", ["ignore", None, 1])
def test_an_unknown_mode(side: Side, table_of: OpenTable, mode: Any) -> None:
    with pytest.raises(ValueError, match="on_transform_error"):
        side.one(table_of(24), on_transform_error=mode)


class Failure(ValueError):
    """An exception to name instead of a function that knows it."""


@pytest.mark.parametrize(
    ("mode", "remedy"),
    [(ReplaceRow, r"ReplaceRow\(value\)"), (Failure, r"isinstance\(error, Failure\)"), (bool, "a function of the ex")],
)
def test_a_class_would_leave_out_every_row(ours: Side, table_of: OpenTable, mode: Any, remedy: str) -> None:
    with pytest.raises(ConfigError, match=f"on_transform_error must be.*not a class.*{remedy}") as caught:
        ours.one(table_of(24), on_transform_error=mode)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
